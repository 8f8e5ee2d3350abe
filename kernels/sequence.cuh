// What a sequence is in this call: its rows, its slot, where its window starts, and whether it may touch anything.
// Values on the device are never trusted: the order of the tests is that of serving_conv/reference.py.

constexpr int FAULT_OFFSETS = 1, FAULT_SLOT = 2, FAULT_ACCEPTED_COUNT = 4, FAULT_STATE_TRUNCATED = 8;

struct Sequence {
  int begin, end;     // rows; within [0, rows] unless faulty
  int slot;
  int window_start;   // position of the window's oldest input in the slot
  bool live;          // computes, and touches its slot
  bool has_history;   // the window is read from the slot; else it is zeros and the slot is not read
};

// `absent_history` answers for sequences when no flags are given. `report`: this thread leaves the sticky code.
DEVICE Sequence read_sequence(const Parameters &p, int index, bool absent_history, bool report) {
  Sequence s;
  s.begin = p.cu_seqlens ? p.cu_seqlens[index] : index;
  s.end = p.cu_seqlens ? p.cu_seqlens[index + 1] : index + 1;
  s.slot = p.slots[index * p.slots_stride];
  s.has_history = p.has_initial_state ? p.has_initial_state[index] != 0 : absent_history;
  const int accepted = p.num_accepted_tokens ? p.num_accepted_tokens[index] : 1;
  s.window_start = accepted - 1;
  int fault = 0;
  if (s.begin < 0 || s.end < s.begin || s.end > p.rows) fault = FAULT_OFFSETS;
  else if (s.begin == s.end) fault = 0;
  else if (s.slot < 0 || s.slot >= p.slot_count) fault = FAULT_SLOT;
  else if (accepted < 1 || accepted > p.positions - WIDTH + 2) fault = FAULT_ACCEPTED_COUNT;
  const bool padding = s.slot == p.pad_slot_id;
  s.live = !padding && !fault && s.begin < s.end;
  if (report && fault && !padding) raise_fault(p.fault_flag, fault);
  return s;
}
