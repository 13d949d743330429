// pd_wide.h -- neighbouring elements that move as one access; in registers each of them is a value of its own.
// Included last by pd_device.cuh and pd_emu.h: text for both meanings. N elements of T make a multiple of 4 bytes, moved
// in pieces of at most 16; addresses are aligned to the piece.
#pragma once
#ifdef PD_EMU
#define PD_AT , PD_SITE
#define PD_FROM , site
#else
#define PD_AT
#define PD_FROM
#endif

template <int B> struct alignas(B) pd_words { uint32_t x[B / 4]; };

// Element e of some words, as a value: 16-bit floats are float, everything else is itself.
PD_DEV float pd_element(const pd_half *, const uint32_t *w, int e) { return e % 2 ? pd_f16_hi(w[e / 2]) : pd_f16_lo(w[e / 2]); }
PD_DEV float pd_element(const pd_bf16 *, const uint32_t *w, int e) { return e % 2 ? pd_bf16_hi(w[e / 2]) : pd_bf16_lo(w[e / 2]); }
PD_DEV float pd_element(const float *, const uint32_t *w, int e) { return pd_bits_to_f32(w[e]); }
template <class T> PD_DEV T pd_element(const T *, const uint32_t *w, int e) {
  if constexpr (sizeof(T) == 8)
    return (T)(((uint64_t)w[e * 2 + 1] << 32) | w[e * 2]);
  else
    return (T)(w[e * (int)sizeof(T) / 4] >> e * (int)sizeof(T) % 4 * 8);
}
// The words that N values make in memory.
template <int N> PD_DEV void pd_pack(const pd_half *, uint32_t *w, const float *r) {
  PD_UNROLL
  for (int e = 0; e < N; e += 2) w[e / 2] = pd_pack_f16x2(r[e], r[e + 1]);
}
template <int N> PD_DEV void pd_pack(const pd_bf16 *, uint32_t *w, const float *r) {
  PD_UNROLL
  for (int e = 0; e < N; e += 2) w[e / 2] = pd_pack_bf16x2(r[e], r[e + 1]);
}
template <int N> PD_DEV void pd_pack(const float *, uint32_t *w, const float *r) {
  PD_UNROLL
  for (int e = 0; e < N; e++) w[e] = pd_f32_to_bits(r[e]);
}
template <int N, class T, class R> PD_DEV void pd_pack(const T *, uint32_t *w, const R *r) {
  if constexpr (sizeof(T) == 8) {
    PD_UNROLL
    for (int e = 0; e < N; e++) w[e * 2] = (uint32_t)r[e], w[e * 2 + 1] = (uint32_t)((uint64_t)r[e] >> 32);
  } else {
    constexpr int per = 4 / (int)sizeof(T);
    constexpr uint32_t mask = sizeof(T) == 4 ? 0xffffffffu : (1u << sizeof(T) % 4 * 8) - 1;
    PD_UNROLL
    for (int i = 0; i < N / per; i++) {
      w[i] = 0;
      PD_UNROLL
      for (int e = 0; e < per; e++) w[i] |= ((uint32_t)r[i * per + e] & mask) << e * (int)sizeof(T) * 8;
    }
  }
}

template <int N, class T> constexpr int pd_piece = N * (int)sizeof(T) < 16 ? N * (int)sizeof(T) : 16;

template <int N, class T, class R> PD_DEV void pd_ldg_wide(R *r, const T *p PD_AT) {
  constexpr int B = pd_piece<N, T>, per = B / (int)sizeof(T);
  PD_UNROLL
  for (int i = 0; i < N / per; i++) {
    pd_words<B> v = pd_ldg((const pd_words<B> *)(p + i * per) PD_FROM);
    PD_UNROLL
    for (int e = 0; e < per; e++) r[i * per + e] = pd_element(p, v.x, e);
  }
}
template <int N, class T, class R> PD_DEV void pd_stg_wide(T *p, const R *r PD_AT) {
  constexpr int B = pd_piece<N, T>, per = B / (int)sizeof(T);
  PD_UNROLL
  for (int i = 0; i < N / per; i++) {
    pd_words<B> v;
    pd_pack<per>(p, v.x, r + i * per);
    pd_stg((pd_words<B> *)(p + i * per), v PD_FROM);
  }
}
// The same between registers and shared memory, floats only.
template <int N> PD_DEV void pd_lds_wide(float *r, const void *p PD_AT) {
  pd_words<N * 4> v = pd_lds<pd_words<N * 4>>(p PD_FROM);
  PD_UNROLL
  for (int e = 0; e < N; e++) r[e] = pd_bits_to_f32(v.x[e]);
}
template <int N> PD_DEV void pd_sts_wide(void *p, const float *r PD_AT) {
  pd_words<N * 4> v;
  pd_pack<N>((const float *)0, v.x, r);
  pd_sts<pd_words<N * 4>>(p, v PD_FROM);
}
