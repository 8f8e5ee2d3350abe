// Copies between slots, of all layers of a pool in one launch: forks, checkpoints, roll backs, moves, and slots to and
// from a package (one contiguous buffer). Bytes are moved, so element types do not matter.
//
// A table that the host built once says how each layer is cut into lanes: words of WORD bytes that repeat at a step.
// With channels contiguous a lane is a word of channels and the steps are positions; other layouts see
// serving_conv/native/copy_plan.py, which chooses. One thread owns a lane of both slots, whatever is moved, so no two
// threads ever meet at a byte, and moves that depend on each other need an order within a thread alone.
// Grid: x tiles of all layers, y moves; a list that has an order is run whole by every thread, and y is 1.

// One side of a copy; all distances in bytes.
struct Side {
  char *base;  // of slot 0; null: the layer's part of the package
  i64 slot, row, lane, step;
};

struct Layer {
  Side source, destination;
  int lanes;
  int lanes_of_row;  // lanes come in rows, `row` apart
  int steps;         // of a destination
  int source_steps;
  int word_bytes;
  int unused;  // the size is a multiple of eight bytes
};

// Steps `shift` and up of the source go to step 0 and up of the destination; what has no source stays.
struct Move {
  int source, destination, shift;
};
constexpr int NOTHING = -1;  // as a source: zeros
constexpr int KEPT = -2;     // as a destination: the thread keeps the word; as a source: it gives it back

struct Parameters {
  const Layer *layers;
  const i64 *entry_bytes;  // of each layer in one entry of a package
  char *package;           // or null
  const Move *staged;      // [count], or null: they are in `moves`
  int tiles;               // blocks of a layer
  int count;
  int entries;  // of the package
  int ordered;  // each move must follow those before it
  Move moves[MOVES];
};

constexpr int TOGETHER = 4;  // words of a thread that are in flight together
constexpr int PACKAGE_ALIGNMENT = 16;

DEVICE Move move_at(const Parameters &p, int index) { return p.staged ? p.staged[index] : p.moves[index]; }

DEVICE i64 aligned(i64 bytes) { return (bytes + PACKAGE_ALIGNMENT - 1) / PACKAGE_ALIGNMENT * PACKAGE_ALIGNMENT; }

// First byte of a layer in the package: layers lie one after another, each aligned.
DEVICE i64 package_offset(const Parameters &p, int layer) {
  i64 offset = 0;
  for (int before = 0; before < layer; ++before) offset += aligned(p.entries * p.entry_bytes[before]);
  return offset;
}

// A lane of slot 0.
DEVICE char *lane_of(const Side &side, char *package, const Layer &layer, int lane) {
  const int row = lane / layer.lanes_of_row;
  return (side.base ? side.base : package) + row * side.row + (lane - row * layer.lanes_of_row) * side.lane;
}

template <int WORD>
DEVICE void copy_lane(const char *from, i64 from_step, char *to, i64 to_step, int steps) {
  NO_UNROLL for (int first = 0; first < steps; first += TOGETHER) {
    u32 words[TOGETHER][4] = {};
    UNROLL for (int i = 0; i < TOGETHER; ++i)
      if (from && first + i < steps) load_word<WORD, false>(from + (first + i) * from_step, words[i]);
    UNROLL for (int i = 0; i < TOGETHER; ++i)
      if (first + i < steps) store_word<WORD, false>(to + (first + i) * to_step, words[i]);
  }
}

// Moves side by side: no slot is both read and written.
template <int WORD>
DEVICE void move_each(const Parameters &p, const Layer &layer, const char *from, char *to) {
  for (int i = (int)blockIdx.y; i < p.count; i += (int)gridDim.y) {
    const Move move = move_at(p, i);
    const Side &source = layer.source, &destination = layer.destination;
    const int left = layer.source_steps - move.shift;
    copy_lane<WORD>(move.source < 0 ? nullptr : from + move.source * source.slot + move.shift * source.step, source.step,
                    to + move.destination * destination.slot, destination.step, left < layer.steps ? left : layer.steps);
  }
}

// Moves in their order, step by step. A shifted move reads ahead of all that was written so far, so it never minds the
// order; the host orders the others.
template <int WORD>
DEVICE void move_in_order(const Parameters &p, const Layer &layer, const char *from, char *to) {
  u32 kept[4] = {};
  for (int step = 0; step < layer.steps; ++step)
    for (int i = 0; i < p.count; ++i) {
      const Move move = move_at(p, i);
      if (step + move.shift >= layer.source_steps) continue;
      u32 word[4];
      if (move.source == KEPT) {
        UNROLL for (int part = 0; part < 4; ++part) word[part] = kept[part];
      } else {
        load_word<WORD, false>(from + move.source * layer.source.slot + (step + move.shift) * layer.source.step, word);
      }
      if (move.destination == KEPT) {
        UNROLL for (int part = 0; part < 4; ++part) kept[part] = word[part];
      } else {
        store_word<WORD, false>(to + move.destination * layer.destination.slot + step * layer.destination.step, word);
      }
    }
}

template <int WORD>
DEVICE void move_all(const Parameters &p, const Layer &layer, const char *from, char *to) {
  if (p.ordered) move_in_order<WORD>(p, layer, from, to);
  else move_each<WORD>(p, layer, from, to);
}

KERNEL(THREADS, MIN_BLOCKS) copy_slots(PARAMETER Parameters p) {
  let_later_grids_start();
  // The tables are constant: no earlier kernel writes them.
  const int index = (int)blockIdx.x / p.tiles, tile = (int)blockIdx.x % p.tiles;
  const Layer layer = p.layers[index];
  const i64 offset = p.package ? package_offset(p, index) : 0;
  wait_for_earlier_grids();
  if (!layer.destination.base && tile == 0 && blockIdx.y == 0) {
    // The bytes up to the package's next layer are zero. Elements have two bytes or more.
    const i64 end = p.entries * p.entry_bytes[index], place = end + 2 * threadIdx.x;
    const u32 zero = 0;
    if (place < aligned(end)) store_word<2, false>(p.package + offset + place, &zero);
  }
  const i64 lane = (i64)tile * THREADS + threadIdx.x;
  if (lane >= layer.lanes) return;
  const char *from = lane_of(layer.source, p.package + offset, layer, (int)lane);
  char *to = lane_of(layer.destination, p.package + offset, layer, (int)lane);
  switch (layer.word_bytes) {
    case 2: return move_all<2>(p, layer, from, to);
    case 4: return move_all<4>(p, layer, from, to);
    case 8: return move_all<8>(p, layer, from, to);
    default: return move_all<16>(p, layer, from, to);
  }
}
