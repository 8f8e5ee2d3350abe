// Sequences of one token each, COUNT side by side: what decode steps are made of, and the decode rows of mixed ones.
// All their loads are in flight together, and the taps are read once for all of them. Sequence i owns row i of `out`
// and input i; a step that counts accepted tokens leaves the same slot as a plain one, since it has one token.
template <int COUNT>
DEVICE void convolve_singles(const Parameters &p, const Taps &taps, i64 channel, const Sequence (&s)[COUNT], int count,
                             bool report, const Raw<X, VEC> (&inputs)[COUNT], char *out, i64 out_pitch) {
  SlotWindow fetched[COUNT];
  UNROLL for (int i = 0; i < COUNT; ++i)
    if (i < count && s[i].live && s[i].has_history)
      fetch_window(p, s[i].slot, channel, s[i].window_start, fetched[i]);
  UNROLL for (int i = 0; i < COUNT; ++i)
    if (i < count) {
      Window window;
      clear(window);
      if (s[i].live && s[i].has_history) unpack_window(p, channel, fetched[i], s[i].window_start, window);
      Raw<X, VEC> result = convolve(window, taps, inputs[i]);
      if (s[i].live) store_window(p, s[i].slot, channel, window);
      UNROLL for (u32 &word : result.words) word = s[i].live ? word : 0;
      store<X, VEC, true>(out + i * out_pitch, result);
    }
  UNROLL for (int i = 0; i < COUNT; ++i)
    if (report && i < count && s[i].fault) raise_fault(p.fault_flag, s[i].fault);
}
