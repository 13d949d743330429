/* The places of the first elements of a line in an order: the smallest or largest first, ties by place, NaN the largest. */
#ifndef PD_ORDER_H
#define PD_ORDER_H

/* a number whose order is that of the elements */
PD_INLINE u64 pd_key_f32(f32 x) {
  u32 u;
  x += 0.0f; /* one zero */
  memcpy(&u, &x, sizeof u);
  return x != x ? 0xffffffffu : u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
}
PD_INLINE u64 pd_key_f64(f64 x) {
  u64 u;
  x += 0.0;
  memcpy(&u, &x, sizeof u);
  return x != x ? ~(u64)0 : u ^ (u >> 63 ? ~(u64)0 : (u64)1 << 63);
}
PD_INLINE u64 pd_key_f16(u16 x) { return pd_key_f32(pd_read_f16(x)); }
PD_INLINE u64 pd_key_bf16(u16 x) { return pd_key_f32(pd_read_bf16(x)); }
#define PD_KEY(T, BIAS) PD_INLINE u64 pd_key_##T(T x) { return (u64)(i64)x + (BIAS); }
PD_KEY(i8, 128) PD_KEY(i16, 1 << 15) PD_KEY(i32, (u64)1 << 31) PD_KEY(i64, (u64)1 << 63)
PD_KEY(u8, 0) PD_KEY(u16, 0) PD_KEY(u32, 0) PD_KEY(u64, 0)

#define PD_FEW 24 /* elements that are sorted by insertion */
#define PD_PART 8 /* so many times more elements than are asked for: the first are kept in a heap */

/* whether entry a comes before entry b */
PD_INLINE int pd_sooner(u64 a, u64 at_a, u64 b, u64 at_b) { return a < b || (a == b && at_a < at_b); }

/* the entry (key, at) sinks from the top of a heap of n entries, the last in order on top */
static __attribute__((unused)) void pd_sink(u64 *sorted, i64 keys, i64 places, i64 n, u64 key, u64 at) {
  i64 i = 0;
  for (i64 c; (c = 2 * i + 1) < n; i = c) {
    u64 k = PD_AT(sorted, keys + c), p = PD_AT(sorted, places + c);
    if (c + 1 < n && pd_sooner(k, p, PD_AT(sorted, keys + c + 1), PD_AT(sorted, places + c + 1)))
      c++, k = PD_AT(sorted, keys + c), p = PD_AT(sorted, places + c);
    if (pd_sooner(k, p, key, at)) break;
    PD_PUT(sorted, keys + i, k);
    PD_PUT(sorted, places + i, p);
  }
  PD_PUT(sorted, keys + i, key);
  PD_PUT(sorted, places + i, at);
}

/* where the places of the first k of n elements are in `sorted`, whose first n numbers are their keys; room for 4 n */
static __attribute__((noinline, unused)) i64 pd_order(u64 *sorted, i64 n, i64 k) {
  i64 places = n;
  if (n <= PD_FEW) {
    for (i64 i = 0; i < n; i++) {
      u64 key = PD_AT(sorted, i);
      i64 j = i;
      for (; j > 0 && PD_AT(sorted, j - 1) > key; j--) {
        u64 before = PD_AT(sorted, j - 1), at = PD_AT(sorted, places + j - 1);
        PD_PUT(sorted, j, before);
        PD_PUT(sorted, places + j, at);
      }
      PD_PUT(sorted, j, key);
      PD_PUT(sorted, places + j, (u64)i);
    }
    return places;
  }
  if (k <= n / PD_PART) {
    i64 keys = n;
    places = 2 * n;
    for (i64 i = 0; i < k; i++) { /* in ascending order turned round: a heap */
      u64 key = PD_AT(sorted, i), at = (u64)i;
      i64 j = i;
      for (i64 up; j > 0; j = up) {
        up = (j - 1) / 2;
        u64 above = PD_AT(sorted, keys + up), place = PD_AT(sorted, places + up);
        if (pd_sooner(key, at, above, place)) break;
        PD_PUT(sorted, keys + j, above);
        PD_PUT(sorted, places + j, place);
      }
      PD_PUT(sorted, keys + j, key);
      PD_PUT(sorted, places + j, at);
    }
    u64 last = k ? PD_AT(sorted, keys) : 0;
    for (i64 i = k; i < n && k; i++) {
      u64 key = PD_AT(sorted, i);
      if (key >= last) continue; /* ties stay with those before */
      pd_sink(sorted, keys, places, k, key, (u64)i);
      last = PD_AT(sorted, keys);
    }
    for (i64 m = k - 1; m > 0; m--) {
      u64 key = PD_AT(sorted, keys + m), at = PD_AT(sorted, places + m);
      u64 top = PD_AT(sorted, keys), place = PD_AT(sorted, places);
      PD_PUT(sorted, keys + m, top);
      PD_PUT(sorted, places + m, place);
      pd_sink(sorted, keys, places, m, key, at);
    }
    return places;
  }
  i64 from = 0, to = 2 * n;
  for (i64 i = 0; i < n; i++) PD_PUT(sorted, n + i, (u64)i);
  for (int shift = 0; shift < 64; shift += 8) { /* by bytes, the least first: each pass keeps the order of the ones before */
    i64 count[257] = {0};
    for (i64 i = 0; i < n; i++) count[1 + (PD_AT(sorted, from + i) >> shift & 255)]++;
    if (count[1 + (PD_AT(sorted, from) >> shift & 255)] == n) continue;
    for (int b = 0; b < 256; b++) count[b + 1] += count[b];
    for (i64 i = 0; i < n; i++) {
      u64 key = PD_AT(sorted, from + i), place = PD_AT(sorted, from + n + i);
      i64 at = to + count[key >> shift & 255]++;
      PD_PUT(sorted, at, key);
      PD_PUT(sorted, at + n, place);
    }
    i64 other = from;
    from = to, to = other;
  }
  return from + n;
}

/* out[to + j step] = the place of element j in order, j < k, of the n elements b[i + e s]; largest: -1, the largest first */
#define PD_FIRST(T)                                                                                                   \
  PD_INLINE void pd_first_##T(const T *b, i64 i, i64 s, i64 n, i64 k, i64 largest, i64 *out, i64 to, i64 step,        \
                              u64 *sorted, i64 at) {                                                                  \
    (void)at;                                                                                                         \
    for (i64 e = 0; e < n; e++) {                                                                                     \
      u64 key = pd_key_##T(PD_AT(b, i + e * s)) ^ (u64)largest;                                                       \
      PD_PUT(sorted, e, key);                                                                                         \
    }                                                                                                                 \
    i64 places = pd_order(sorted, n, k);                                                                              \
    for (i64 j = 0; j < k; j++) PD_PUT(out, to + j * step, (i64)PD_AT(sorted, places + j));                           \
  }
PD_FIRST(f16) PD_FIRST(bf16) PD_FIRST(f32) PD_FIRST(f64) PD_FIRST(i8) PD_FIRST(i16) PD_FIRST(i32) PD_FIRST(i64)
PD_FIRST(u8) PD_FIRST(u16) PD_FIRST(u32) PD_FIRST(u64)
#endif
