// Backward of the packed convolution: the gradients of the rows, of the taps and bias, and of each sequence's initial
// window, from the gradients of the outputs and of the final windows. x and dout are read once, dx is written once.
//
// A thread owns VEC channels of a run of rows. Its bytes of x and dout come through a ring in shared memory, AHEAD
// rows before they are needed; no thread reads another's, so there is no barrier. It walks the run upwards and computes
// each row's pre-activation again, in the forward's order, with the forward's window:
//   g[t]  = dout[t] * activation'(sum[t])
//   dx[s] = final gradient, then g[s] * tap W-1, g[s+1] * tap W-2 ... g[s+W-1] * tap 0: complete W-1 rows later
//   dweight[k] += g[t] * input[t-(W-1)+k], dbias += g[t]: in registers for the whole run
// So a run also reads the W-1 inputs before it and the W-1 rows behind it, which other runs own. The inputs before a
// sequence are its initial window; the W-1 gradients that fall on them are the initial window's.
//
// The sums of a run go to one place of their own (ORDERED, then sum_partials adds them in order) or by atomics to one
// place for all runs. dx and the initial window's gradient never depend on the order of blocks or the cut into runs.
// Initial windows come with channels contiguous (STATE_LAYOUT 0). Grid: x channel tiles, y and z (a high digit) runs,
// as in conv_prefill.

constexpr int GROUP = 4;                 // rows between two waits
constexpr int STAGES = AHEAD / GROUP;    // of the ring
constexpr int HALO = WIDTH - 1;
constexpr int ROW_BYTES = VEC * X::SIZE;

struct Ring {
  Shared<ROW_BYTES> x[STAGES][GROUP][THREADS];
  Shared<ROW_BYTES> dout[STAGES][GROUP][THREADS];
};

// A thread's run. Rows count through the whole batch, [0, batches * rows_per_batch).
struct Run {
  const char *x, *dout;       // at the next row to ask for
  char *dx;                   // at row0, or null
  i64 x_pitch, dout_pitch, dx_pitch;  // bytes
  i64 channel;
  int row0, row1;             // owned: dx is written, the sums are taken
  int stop;                   // first row that is not looked at
  int batch;
  int batch_begin, batch_end;
};

struct Sums {
  float weight[WIDTH][VEC];
  float bias[VEC];
};

// Gradients of the W-1 inputs before the current row, as far as they are known; oldest first.
struct Pending {
  float dx[HALO][VEC];
};

// The sequence that owns the current row, or a stretch of rows that none owns.
struct Segment {
  int sequence;
  int begin, end;
  bool live;
};

DEVICE Segment segment_of(const Parameters &p, const Run &run, int sequence, int row) {
  Segment s;
  s.sequence = sequence;
  s.live = true;
  if (!p.cu_seqlens) {
    s.begin = run.batch_begin;
    s.end = run.batch_end;
    return s;
  }
  const bool owned = sequence >= 0 && sequence < p.sequences;
  s.begin = owned ? p.cu_seqlens[sequence] : row;
  s.end = owned ? p.cu_seqlens[sequence + 1] : sequence < 0 ? p.cu_seqlens[0] : run.batch_end;
  // Only offsets that go backwards or leave the rows fail these; such rows belong to nobody, one at a time.
  const bool sound = s.begin >= run.batch_begin && s.begin <= row && s.end > row && s.end <= run.batch_end &&
                     (s.begin == row || row == run.row0);
  s.live = owned && sound;
  if (!sound) {
    s.begin = row;
    s.end = row + 1;
  }
  return s;
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

DEVICE const char *row_of_x(const BackwardParameters &b, const Run &run, int row) {
  return (const char *)b.forward.x + (run.batch * b.x_batch_stride + (row - run.batch_begin) * b.forward.x_row_stride +
                                      run.channel * b.x_channel_stride) * X::SIZE;
}

// The W-1 inputs before `row`: of its own sequence, and before that of the sequence's initial window.
DEVICE void window_before(const BackwardParameters &b, const Run &run, const Segment &s, int row, Window &window) {
  clear(window);
  if (!s.live) return;
  const Parameters &p = b.forward;
  const bool known = p.conv_state && s.sequence < p.slot_count;
  UNROLL for (int tap = 0; tap < HALO; ++tap) {
    const int source = row - HALO + tap;
    if (source >= s.begin)
      set_input(window, tap, load<X, VEC, true>(row_of_x(b, run, source)));
    else if (known)
      set_input(window, tap, load<State, VEC, false>((const char *)p.conv_state +
                                                     (slot_offset(p, s.sequence, run.channel) +
                                                      (source - s.begin + HALO) * p.position_stride) * State::SIZE));
  }
}

DEVICE void read_float_vector(const float *from, float (&values)[VEC]) {
  const Raw<Float32, VEC> raw = load<Float32, VEC, false>(from);
  UNROLL for (int i = 0; i < VEC; ++i) values[i] = element(raw, i);
}

// Position `position` of a sequence's window in the fp32 arrays [sequences, W-1, channels].
DEVICE i64 window_offset(const Parameters &p, const Run &run, const Segment &s, int position) {
  return ((i64)s.sequence * HALO + position) * p.channels + run.channel;
}

// What the final window's gradient gives to `row` (before the sequence's begin: to its initial window).
DEVICE void final_gradient(const BackwardParameters &b, const Run &run, const Segment &s, int row,
                           float (&values)[VEC]) {
  UNROLL for (int i = 0; i < VEC; ++i) values[i] = 0.0f;
  if (b.dfinal && s.live && row >= s.end - HALO && s.sequence < b.final_count)
    read_float_vector(b.dfinal + window_offset(b.forward, run, s, row - (s.end - HALO)), values);
}

// A finished gradient goes to its row, or to the initial window.
DEVICE void emit(const BackwardParameters &b, const Run &run, const Segment &s, int row, const float (&values)[VEC]) {
  if (row >= s.begin) {
    if (run.dx && row >= run.row0 && row < run.row1)
      store<X, VEC, true>(run.dx + (i64)(row - run.row0) * run.dx_pitch, round_to<X, VEC>(values));
  } else if (b.dinitial && s.begin >= run.row0 && s.begin < run.row1 && s.sequence < b.initial_count) {
    store<Float32, VEC, false>(b.dinitial + window_offset(b.forward, run, s, row - s.begin + HALO),
                               round_to<Float32, VEC>(values));
  }
}

// The gradient of a row's sum, and the sums that it belongs to.
DEVICE void gradient(const Window &window, const Taps &taps, const float (&input)[VEC], const Raw<X, VEC> &dout,
                     float (&g)[VEC]) {
  float sum[VEC];
  if constexpr (SILU) sum_taps(window, taps, input, sum);
  UNROLL for (int i = 0; i < VEC; ++i) {
    g[i] = element(dout, i);
    if constexpr (SILU) {
      const float s = sigmoid(sum[i]);
      g[i] *= fused_multiply_add(sum[i] * s, 1.0f - s, s);
    }
  }
}

DEVICE void accumulate(Sums &sums, const Window &window, const float (&input)[VEC], const float (&g)[VEC]) {
  UNROLL for (int i = 0; i < VEC; ++i) {
    UNROLL for (int tap = 0; tap < HALO; ++tap)
      sums.weight[tap][i] = fused_multiply_add(g[i], window.past[tap][i], sums.weight[tap][i]);
    sums.weight[HALO][i] = fused_multiply_add(g[i], input[i], sums.weight[HALO][i]);
    if constexpr (HAS_BIAS) sums.bias[i] += g[i];
  }
}

// Give a row's gradient to itself and the W-1 inputs before it; the oldest of them is then done. `own` starts the row's.
DEVICE void spread(Pending &pending, const Taps &taps, const float (&g)[VEC], const float (&own)[VEC],
                   float (&done)[VEC]) {
  UNROLL for (int i = 0; i < VEC; ++i) {
    done[i] = fused_multiply_add(g[i], taps.weight[0][i], pending.dx[0][i]);
    UNROLL for (int place = 0; place + 1 < HALO; ++place)
      pending.dx[place][i] = fused_multiply_add(g[i], taps.weight[place + 1][i], pending.dx[place + 1][i]);
    pending.dx[HALO - 1][i] = fused_multiply_add(g[i], taps.weight[HALO][i], own[i]);
  }
}

// One row anywhere: at the ends of a sequence or of the run.
DEVICE void any_row(const BackwardParameters &b, const Run &run, const Segment &s, int row, const Taps &taps,
                    const Raw<X, VEC> &x, const Raw<X, VEC> &dout, Window &window, Pending &pending, Sums &sums) {
  float input[VEC], g[VEC], own[VEC], done[VEC];
  if (!s.live) {
    UNROLL for (int i = 0; i < VEC; ++i) done[i] = 0.0f;
    emit(b, run, s, row, done);
    return;
  }
  UNROLL for (int i = 0; i < VEC; ++i) input[i] = element(x, i);
  gradient(window, taps, input, dout, g);
  if (row < run.row1) accumulate(sums, window, input, g);
  final_gradient(b, run, s, row, own);
  spread(pending, taps, g, own, done);
  emit(b, run, s, row - HALO, done);
  push(window, input);
  if (row == s.end - 1) UNROLL for (int place = 0; place < HALO; ++place)
    emit(b, run, s, row - HALO + 1 + place, pending.dx[place]);
}

DEVICE void begin_segment(const BackwardParameters &b, const Run &run, const Segment &s, int row, Window &window,
                          Pending &pending) {
  window_before(b, run, s, row, window);
  // A sequence shorter than its window passes the final window's gradient on to the initial one.
  UNROLL for (int place = 0; place < HALO; ++place) final_gradient(b, run, s, row - HALO + place, pending.dx[place]);
}

DEVICE void request(Ring &ring, int stage, Run &run, int row) {
  constexpr int WORD = word_bytes<X, VEC>();
  Shared<ROW_BYTES> *to_x = &ring.x[stage][0][threadIdx.x], *to_dout = &ring.dout[stage][0][threadIdx.x];
  const int rows = run.stop - row < GROUP ? run.stop - row : GROUP;
  if (rows == GROUP) {
    UNROLL for (int u = 0; u < GROUP; ++u, run.x += run.x_pitch, run.dout += run.dout_pitch)
      UNROLL for (int byte = 0; byte < ROW_BYTES; byte += WORD) {
        copy_ahead<WORD>(to_x[u * THREADS].bytes + byte, run.x + byte);
        copy_ahead<WORD>(to_dout[u * THREADS].bytes + byte, run.dout + byte);
      }
  } else {
    NO_UNROLL for (int u = 0; u < rows; ++u, run.x += run.x_pitch, run.dout += run.dout_pitch)
      UNROLL for (int byte = 0; byte < ROW_BYTES; byte += WORD) {
        copy_ahead<WORD>(to_x[u * THREADS].bytes + byte, run.x + byte);
        copy_ahead<WORD>(to_dout[u * THREADS].bytes + byte, run.dout + byte);
      }
  }
  close_stage_of_copies();
}

DEVICE void write_term(const BackwardParameters &b, float *to, const float (&values)[VEC]) {
  if constexpr (ORDERED) store<Float32, VEC, false>(to, round_to<Float32, VEC>(values));
  else UNROLL for (int i = 0; i < VEC; ++i) add_to(to + i, values[i]);
}

DEVICE void write_sums(const BackwardParameters &b, const Run &run, i64 index, const Sums &sums) {
  const i64 channels = b.forward.channels;
  float *to = b.partials + (ORDERED ? index * (WIDTH + HAS_BIAS) * channels : 0) + run.channel;
  UNROLL for (int tap = 0; tap < WIDTH; ++tap) write_term(b, to + tap * channels, sums.weight[tap]);
  if constexpr (HAS_BIAS) write_term(b, to + WIDTH * channels, sums.bias);
}

KERNEL(THREADS, MIN_BLOCKS) conv_backward(PARAMETER BackwardParameters b) {
  SHARED Ring ring;
  const Parameters &p = b.forward;
  let_later_grids_start();
  wait_for_earlier_grids();
  const u32 index = blockIdx.z * gridDim.y + blockIdx.y;
  if (index >= (u32)b.runs) return;
  const int batch = (int)(index / (u32)b.runs_per_batch);
  const int place = (int)(index % (u32)b.runs_per_batch) * b.rows_of_run;  // in its batch
  Run run;
  run.channel = ((i64)blockIdx.x * THREADS + threadIdx.x) * VEC;
  run.batch = batch;
  run.batch_begin = batch * b.rows_per_batch;
  run.batch_end = run.batch_begin + b.rows_per_batch;
  run.row0 = run.batch_begin + place;
  run.row1 = run.batch_end - run.row0 < b.rows_of_run ? run.batch_end : run.row0 + b.rows_of_run;
  run.stop = run.batch_end - run.row1 < HALO ? run.batch_end : run.row1 + HALO;
  const int sequence = p.cu_seqlens ? first_above(p.cu_seqlens, p.sequences + 1, run.row0) - 1 : batch;
  if (run.channel >= p.channels) return;

  run.x_pitch = p.x_row_stride * X::SIZE;
  run.dout_pitch = b.dout_row_stride * X::SIZE;
  run.dx_pitch = b.dx_row_stride * X::SIZE;
  run.x = row_of_x(b, run, run.row0);
  run.dout = (const char *)b.dout +
             (batch * b.dout_batch_stride + place * b.dout_row_stride + run.channel * b.dout_channel_stride) * X::SIZE;
  run.dx = b.dx ? (char *)b.dx + (batch * b.dx_batch_stride + place * b.dx_row_stride + run.channel) * X::SIZE : nullptr;

  NO_UNROLL for (int stage = 0; stage < STAGES; ++stage) request(ring, stage, run, run.row0 + stage * GROUP);
  const Taps taps = unpack_taps(fetch_taps(p, run.channel));
  Segment s = segment_of(p, run, sequence, run.row0);
  Window window;
  Pending pending;
  begin_segment(b, run, s, run.row0, window, pending);
  Sums sums = {};

  // Rows [plain, plain_end) lie inside a sequence and a run: what they finish is a row of this run, and no more.
  int plain = (s.begin > run.row0 ? s.begin : run.row0) + HALO;
  int plain_end = s.live ? (s.end - HALO < run.row1 ? s.end - HALO : run.row1) : run.row0;
  bool at_end = false;
  int stage = 0;
  NO_UNROLL for (int row = run.row0; row < run.stop && !at_end; row += GROUP) {
    wait_for_copies_but(STAGES - 1);
    const Shared<ROW_BYTES> *x = &ring.x[stage][0][threadIdx.x], *dout = &ring.dout[stage][0][threadIdx.x];
    if (run.dx && row >= plain && row + GROUP <= plain_end) {
      char *dx = run.dx + (i64)(row - HALO - run.row0) * run.dx_pitch;
      UNROLL for (int u = 0; u < GROUP; ++u, dx += run.dx_pitch) {
        const Raw<X, VEC> raw = read_shared<X, VEC>(x[u * THREADS]);
        float input[VEC], g[VEC], done[VEC];
        const float none[VEC] = {};
        UNROLL for (int i = 0; i < VEC; ++i) input[i] = element(raw, i);
        gradient(window, taps, input, read_shared<X, VEC>(dout[u * THREADS]), g);
        accumulate(sums, window, input, g);
        spread(pending, taps, g, none, done);
        push(window, input);
        store<X, VEC, true>(dx, round_to<X, VEC>(done));
      }
    } else {
      NO_UNROLL for (int u = 0; u < GROUP && row + u < run.stop; ++u) {
        if (row + u == s.end) {
          if (row + u >= run.row1) {
            at_end = true;
            break;
          }
          s = segment_of(p, run, p.cu_seqlens ? sequence_after(p, s.sequence, row + u) : 0, row + u);
          begin_segment(b, run, s, row + u, window, pending);
          plain = s.begin + HALO;
          plain_end = s.live ? (s.end - HALO < run.row1 ? s.end - HALO : run.row1) : run.row0;
        }
        any_row(b, run, s, row + u, taps, read_shared<X, VEC>(x[u * THREADS]), read_shared<X, VEC>(dout[u * THREADS]),
                window, pending, sums);
      }
    }
    request(ring, stage, run, row + STAGES * GROUP);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  if (b.partials) write_sums(b, run, index, sums);
}
