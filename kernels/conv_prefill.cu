// Packed steps: prompt chunks and, in the same launch, decode and speculative rows. A block owns ROWS packed rows and a tile of channels, whatever sequences lie in it: the grid follows
// from sizes the host knows, and all rows are on their way before the block knows whose they are.
//
// A thread owns VEC channels of those rows. It copies its own bytes ahead into shared memory, which holds them without
// registers and has an index; no thread reads another's, so there is no barrier. Blocks come in three kinds:
//   inside    all rows belong to one sequence that began at least W-1 rows earlier: nothing but rows is touched
//   singles   every row is a sequence of one token, as decode rows of a mixed step are: windows fetched side by side
//   general   anything else, segment after segment, the next one's window fetched while this one computes
//
// Slots: the block that holds a sequence's first row alone reads its old window and writes the new one. So that no
// other block needs the old window, that block also computes the sequence's first W-1 rows where they spill over
// its rows, and the next block leaves those out. SPECULATIVE: sequences may be marked as drafts; they keep (the last
// W-2 of the window, all tokens) instead of the last W-1. CHECKPOINTS: see checkpoints.cuh.
// Grid: x channel tiles, y and z (a high digit) ranges of rows: tiles run fastest, so that the rows of one DRAM page are in flight together.

constexpr int GROUP = 4;  // rows computed in one stretch, so that their latencies overlap
constexpr int STAGES = ROWS / GROUP;  // rows arrive in stages: a block inside a sequence computes the first ones early
constexpr int ROW_BYTES = VEC * X::SIZE;

// A thread's rows of one block.
struct Tile {
  const Shared<ROW_BYTES> *rows;  // in shared memory, THREADS apart
  char *out;                      // where the first row's result goes
  i64 out_pitch;                  // bytes
  i64 channel;
  int row0, row1;
};

DEVICE Raw<X, VEC> input_of(const Tile &tile, int row) {
  return read_shared<X, VEC>(tile.rows[(row - tile.row0) * THREADS]);
}

DEVICE void write_result(const Tile &tile, int row, const Raw<X, VEC> &result) {
  store<X, VEC, true>(tile.out + (row - tile.row0) * tile.out_pitch, result);
}

// The part of a block's rows that one sequence owns.
enum SegmentKind { UNOWNED, ZERO, LIVE };
struct Segment {
  SegmentKind kind;
  int sequence;
  int begin, end;  // rows of the whole sequence
  int first;       // first row that this block writes
  int slot, window_start;
  bool has_history;
  bool drafts;  // of more than one token; one token leaves the same slot either way
};

DEVICE bool has_drafts(const Parameters &p, int sequence) {
  if constexpr (SPECULATIVE) return p.speculative[sequence] != 0;
  return false;
}

// `continues`: the row is the block's first, which may lie inside its sequence.
DEVICE Segment segment_of(const Parameters &p, int sequence, int row, bool continues) {
  Segment g;
  g.sequence = sequence;
  g.begin = g.first = row;
  g.slot = g.window_start = 0;
  g.has_history = g.drafts = false;
  if (sequence < 0 || sequence >= p.sequences) {  // before the first offset or past the last: not written
    g.kind = UNOWNED;
    const int next = sequence < 0 ? p.cu_seqlens[0] : p.rows;
    g.end = next > row ? next : p.rows;
    return g;
  }
  const Sequence s = read_sequence(p, sequence, false);
  if (s.begin > row || s.end <= row || (s.begin < row && !continues)) {  // only offsets that go backwards lead here
    g.kind = ZERO;
    g.end = row + 1;
    return g;
  }
  g.kind = s.live ? LIVE : ZERO;
  g.begin = s.begin;
  g.end = s.end < p.rows ? s.end : p.rows;
  g.slot = s.slot;
  g.window_start = s.window_start;
  g.has_history = s.live && s.has_history;
  g.drafts = s.live && s.end - s.begin > 1 && has_drafts(p, sequence);
  if (s.live && row > s.begin && row - s.begin < WIDTH - 1) {
    const int spilled = s.begin + WIDTH - 1;  // the block before computes these
    g.first = spilled < s.end ? spilled : s.end;
  }
  return g;
}

// The sequence after `sequence` that owns `row`: usually the next one; a search skips long runs of empty ones.
DEVICE int sequence_after(const Parameters &p, int sequence, int row) {
  int low = sequence + 1, high = p.sequences;
  if (low >= high || p.cu_seqlens[low + 1] > row) return low;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (p.cu_seqlens[middle + 1] <= row) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The slot of a sequence that begins here and ends in a later block: its last W-1 inputs, from memory.
DEVICE void store_final_inputs(const Parameters &p, const Segment &g, i64 channel) {
  Window window;
  UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
    set_input(window, tap, load_row(p, g.end - (WIDTH - 1) + tap, channel));
  store_window(p, g.slot, channel, window);
}

// What a sequence of drafts keeps of its window, which goes out of reach with the first row.
DEVICE void store_window_before_drafts(const Parameters &p, const Segment &g, i64 channel, const Window &window) {
  const i64 offset = slot_offset(p, g.slot, channel);
  UNROLL for (int tap = 1; tap < WIDTH - 1; ++tap) store_position(p, offset, tap - 1, window.past[tap]);
}

// The drafts themselves, as many as fit. They are few, and all lie in rows.
DEVICE void store_drafts(const Parameters &p, const Segment &g, i64 channel) {
  const i64 offset = slot_offset(p, g.slot, channel);
  const int room = p.positions - (WIDTH - 2), tokens = g.end - g.begin < room ? g.end - g.begin : room;
  NO_UNROLL for (int t = 0; t < tokens; ++t) {
    const Raw<X, VEC> raw = load_row(p, g.begin + t, channel);
    float input[VEC];
    UNROLL for (int i = 0; i < VEC; ++i) input[i] = element(raw, i);
    store_position(p, offset, WIDTH - 2 + t, input);
  }
}

DEVICE void compute_inside(const Taps &taps, const Tile &tile, Window &window, bool live) {
  const Shared<ROW_BYTES> *input = tile.rows;
  char *out = tile.out;
  UNROLL for (int stage = 0; stage < STAGES; ++stage) {
    wait_for_copies_but(STAGES - 1 - stage);
    UNROLL for (int u = 0; u < GROUP; ++u, input += THREADS, out += tile.out_pitch) {
      // Whether the sequence is padding is needed last, when its slot number has long arrived.
      Raw<X, VEC> result = convolve(window, taps, read_shared<X, VEC>(*input));
      UNROLL for (u32 &word : result.words) word = live ? word : 0;
      store<X, VEC, true>(out, result);
    }
  }
}

DEVICE void compute_singles(const Parameters &p, const Taps &taps, const Tile &tile, int sequence) {
  NO_UNROLL for (int place = 0; place < ROWS; place += GROUP) {
    Raw<X, VEC> inputs[GROUP];
    UNROLL for (int u = 0; u < GROUP; ++u) inputs[u] = read_shared<X, VEC>(tile.rows[(place + u) * THREADS]);
    Sequence s[GROUP];
    UNROLL for (int u = 0; u < GROUP; ++u) s[u] = read_sequence(p, sequence + place + u, false);
    convolve_singles<GROUP>(p, taps, tile.channel, s, GROUP, false, inputs, tile.out + place * tile.out_pitch,
                            tile.out_pitch);
  }
}

DEVICE void compute_segments(const Parameters &p, const Taps &taps, const Tile &tile, Window &window, int sequence) {
  const i64 channel = tile.channel;
  Segment g = segment_of(p, sequence, tile.row0, true);
  SlotWindow fetched;
  if (g.has_history && g.begin == tile.row0) fetch_window(p, g.slot, channel, g.window_start, fetched);
  int row = tile.row0;
  while (true) {
    const int until = g.end < tile.row1 ? g.end : tile.row1;
    const bool begins = g.begin >= tile.row0;
    if (begins) {
      clear(window);
      if (g.has_history) unpack_window(p, channel, fetched, g.window_start, window);
      if constexpr (SPECULATIVE)
        if (g.drafts) {
          store_window_before_drafts(p, g, channel, window);
          store_drafts(p, g, channel);
        }
    } else {
      // What lies before the sequence is in the way only of rows that the block before computes.
      UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
        if (row - (WIDTH - 1) + tap < g.begin) UNROLL for (int i = 0; i < VEC; ++i) window.past[tap][i] = 0.0f;
    }
    Segment next;
    if (until < tile.row1) {
      next = segment_of(p, sequence_after(p, g.sequence, until), until, false);
      if (next.has_history) fetch_window(p, next.slot, channel, next.window_start, fetched);
    }
    if (g.kind == LIVE) {
      const bool plain = !SPECULATIVE || !g.drafts;
      if (plain && begins && g.end > tile.row1 && g.end > g.begin + WIDTH - 1) store_final_inputs(p, g, channel);
      for (; row + GROUP <= until && row >= g.first; row += GROUP)
        UNROLL for (int u = 0; u < GROUP; ++u)
          write_result(tile, row + u, convolve(window, taps, input_of(tile, row + u)));
      NO_UNROLL for (; row < until; ++row) {
        const Raw<X, VEC> result = convolve(window, taps, input_of(tile, row));
        if (row >= g.first) write_result(tile, row, result);
      }
      // A sequence that lies wholly in this block: its final window is at hand.
      if (plain && begins && row == g.end) store_window(p, g.slot, channel, window);
    } else if (g.kind == ZERO) {
      const Raw<X, VEC> zero = {};
      NO_UNROLL for (; row < until; ++row) write_result(tile, row, zero);
    }
    row = until;
    if (row == tile.row1) break;
    g = next;
  }
  // The first rows of the last sequence where they spill over the block's.
  if (g.kind == LIVE && g.begin >= tile.row0 && g.end > tile.row1 && tile.row1 - g.begin < WIDTH - 1) {
    const int spilled = g.begin + WIDTH - 1 < g.end ? g.begin + WIDTH - 1 : g.end;
    NO_UNROLL for (; row < spilled; ++row) store_row(p, row, channel, convolve(window, taps, load_row(p, row, channel)));
    if (spilled == g.end && !(SPECULATIVE && g.drafts)) store_window(p, g.slot, channel, window);
  }
}

// Sticky codes: one block looks at every sequence, its threads side by side.
DEVICE void report_faults(const Parameters &p) {
  if (threadIdx.x == 0 && p.sequences > 0 && p.cu_seqlens[0] != 0) raise_fault(p.fault_flag, FAULT_OFFSETS);
  for (int i = threadIdx.x; i < p.sequences; i += THREADS) {
    const Sequence s = read_sequence(p, i, false);
    if (s.fault) raise_fault(p.fault_flag, s.fault);
    if (s.live && has_drafts(p, i) && s.end - s.begin > p.positions - WIDTH + 2)
      raise_fault(p.fault_flag, FAULT_STATE_TRUNCATED);
  }
}

KERNEL(THREADS, MIN_BLOCKS) conv_prefill(PARAMETER Parameters p) {
  SHARED Shared<ROW_BYTES> shared_rows[ROWS][THREADS];
  Tile tile;
  tile.rows = &shared_rows[0][threadIdx.x];
  tile.channel = ((i64)blockIdx.x * THREADS + threadIdx.x) * VEC;
  const u32 block = blockIdx.z * gridDim.y + blockIdx.y, row_blocks = ((u32)p.rows + ROWS - 1) / ROWS;
  const u32 row0 = block * ROWS;
  tile.row0 = (int)row0;
  tile.row1 = p.rows - tile.row0 < ROWS ? p.rows : tile.row0 + ROWS;
  tile.out_pitch = p.out_row_stride * X::SIZE;
  tile.out = (char *)p.out + tile.row0 * tile.out_pitch + tile.channel * X::SIZE;
  const bool first_block = blockIdx.x == 0 && block == 0;
  const bool active = tile.channel < p.channels;
  let_later_grids_start();
  // Weights and bias are constants of the model: no earlier kernel of the step writes them.
  const RawTaps raw_taps = fetch_taps(p, active ? tile.channel : 0);
  wait_for_earlier_grids();
  if (block >= row_blocks) {
    if constexpr (CHECKPOINTS)
      if (block - row_blocks < (u32)p.checkpoints)
        store_checkpoint(p, (int)(block - row_blocks), tile.channel, active, tile.channel == 0);
    return;
  }

  Window window;  // of the rows before the block's own, in case its first sequence began earlier
  clear(window);
  Raw<X, VEC> halo[WIDTH - 1];
  if (active) {
    constexpr int WORD = word_bytes<X, VEC>();
    const char *from = (const char *)p.x + (tile.row0 * p.x_row_stride + tile.channel) * X::SIZE;
    UNROLL for (int r = 0; r < ROWS; ++r) {
      if (r < tile.row1 - tile.row0)
        UNROLL for (int byte = 0; byte < ROW_BYTES; byte += WORD)
          copy_ahead<WORD>(shared_rows[r][threadIdx.x].bytes + byte, from + r * p.x_row_stride * X::SIZE + byte);
      if (r % GROUP == GROUP - 1) close_stage_of_copies();
    }
    UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
      if (tile.row0 >= WIDTH - 1 - tap) halo[tap] = load_row(p, tile.row0 - (WIDTH - 1) + tap, tile.channel);
  }
  const int sequence = first_above(p.cu_seqlens, p.sequences + 1, tile.row0) - 1;
  if (first_block) report_faults(p);
  if (!active) return;
  const bool owned = sequence >= 0 && sequence < p.sequences, full = tile.row1 - tile.row0 == ROWS;
  const int begin = owned ? p.cu_seqlens[sequence] : 0, end = owned ? p.cu_seqlens[sequence + 1] : 0;
  const bool inside = owned && full && begin >= 0 && begin + WIDTH - 1 <= tile.row0 && end >= tile.row1 && end <= p.rows;
  bool singles = owned && full && begin == tile.row0 && end == begin + 1 && sequence + ROWS <= p.sequences;
  if (singles)
    UNROLL for (int r = 1; r < ROWS; ++r) singles &= p.cu_seqlens[sequence + r + 1] == tile.row0 + r + 1;
  const bool live = inside && read_sequence(p, sequence, false).live;

  const Taps taps = unpack_taps(raw_taps);
  UNROLL for (int tap = 0; tap < WIDTH - 1; ++tap)
    if (tile.row0 >= WIDTH - 1 - tap) set_input(window, tap, halo[tap]);
  if (inside) {
    compute_inside(taps, tile, window, live);
    return;
  }
  if constexpr (CHECKPOINTS) store_early_checkpoints_of_rows(p, sequence, tile.row0, tile.row1, tile.channel);
  wait_for_copies_but(0);
  if (singles) compute_singles(p, taps, tile, sequence);
  else compute_segments(p, taps, tile, window, sequence);
}
