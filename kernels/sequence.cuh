// What a sequence is in this call: its rows, its slot, where its window starts, and whether it may touch anything.
// Values on the device are never trusted: the order of the tests is that of serving_conv/reference.py.

constexpr int FAULT_OFFSETS = 1, FAULT_SLOT = 2, FAULT_ACCEPTED_COUNT = 4, FAULT_STATE_TRUNCATED = 8,
              FAULT_CHECKPOINT = 16;

struct Sequence {
  int begin, end;     // rows; within [0, rows] unless faulty
  int slot;
  int window_start;   // position of the window's oldest input in the slot
  int fault;          // sticky code to leave, or 0
  bool live;          // computes, and touches its slot
  bool has_history;   // the window is read from the slot; else it is zeros and the slot is not read
};

constexpr bool ONE_ROW_EACH = SEQUENCES > 0;  // no offsets: nothing about them to read or to doubt

// Decide whether a sequence is live, from what the engine says of it.
DEVICE Sequence judge(const Parameters &p, int begin, int end, int slot, bool has_history, int accepted) {
  Sequence s;
  s.begin = begin;
  s.end = end;
  s.slot = slot;
  s.has_history = has_history;
  s.window_start = accepted > 0 ? accepted - 1 : 0;
  s.fault = 0;
  const bool backwards = !ONE_ROW_EACH && s.end < s.begin;
  const bool bad_offsets = backwards || (!ONE_ROW_EACH && (s.begin < 0 || s.end > p.rows));
  const bool bad_slot = s.slot < 0 || s.slot >= p.slot_count;
  const bool bad_count = accepted < 1 || accepted > p.positions - WIDTH + 2;
  const bool padding = s.slot == p.pad_slot_id, empty = s.begin == s.end;
  s.live = !(padding | bad_offsets | empty | bad_slot | bad_count);
  // Padding may carry anything but offsets that go backwards, which lead a search for the owner of a row astray.
  if ((!padding | backwards) & !s.live)
    s.fault = bad_offsets ? FAULT_OFFSETS : empty ? 0 : bad_slot ? FAULT_SLOT : FAULT_ACCEPTED_COUNT;
  return s;
}

// `absent_history` answers for sequences when no flags are given.
DEVICE Sequence read_sequence(const Parameters &p, int index, bool absent_history) {
  const int begin = ONE_ROW_EACH ? index : p.cu_seqlens[index];
  const int end = ONE_ROW_EACH ? index + 1 : p.cu_seqlens[index + 1];
  const int slot = p.slots[index * p.slots_stride];
  const bool has_history = p.has_initial_state ? p.has_initial_state[index] != 0 : absent_history;
  const int accepted = p.num_accepted_tokens ? p.num_accepted_tokens[index] : 1;
  return judge(p, begin, end, slot, has_history, accepted);
}

// Where the numbers of a sequence of one row lie. Addresses follow from the launch alone, so a kernel can have them
// before it waits for the grid that may still write the numbers.
struct SequencePlace {
  const int *slot;
  const unsigned char *has_initial_state;  // or null
  const int *num_accepted_tokens;          // or null
};

DEVICE SequencePlace place_of(const Parameters &p, int index) {
  SequencePlace place;
  place.slot = p.slots + index * p.slots_stride;
  place.has_initial_state = p.has_initial_state ? p.has_initial_state + index : nullptr;
  place.num_accepted_tokens = p.num_accepted_tokens ? p.num_accepted_tokens + index : nullptr;
  return place;
}

// Have the addresses now, not where they are used.
DEVICE void hold(SequencePlace &place) {
  hold(place.slot);
  hold(place.has_initial_state);
  hold(place.num_accepted_tokens);
}

DEVICE Sequence read_single(const Parameters &p, const SequencePlace &place, int index, bool absent_history) {
  const bool has_history = place.has_initial_state ? *place.has_initial_state != 0 : absent_history;
  const int accepted = place.num_accepted_tokens ? *place.num_accepted_tokens : 1;
  return judge(p, index, index + 1, *place.slot, has_history, accepted);
}
