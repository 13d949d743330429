/* Types of memory only: elements are widened to f32 where they are read, and rounded to nearest even where they are
   written. Conversions are the processor's where it has them; integers round subnormal numbers to bfloat16, which its
   instruction drops. */
#ifndef PD_STORAGE_H
#define PD_STORAGE_H

typedef u16 f16; typedef u16 bf16;
typedef u16 vu16 __attribute__((vector_size(2 * PD_W)));
typedef u16 hu16 __attribute__((vector_size(PD_W)));
typedef u32 hu32 __attribute__((vector_size(2 * PD_W)));

/* -- memory: as in pd_cpu.h, of 16 bits ------------------------------------------------------------------------------ */
#ifdef PD_CHECKED
PD_MEMORY(u16, vu16)
PD_GUARDED(u16, vu16)
static __attribute__((noinline, unused)) hu16 pdc_hload_u16(const u16 *b, i64 i, i64 s, i64 n, const char *name) {
  hu16 v = {0};
  for (i64 l = 0; l < PD_W / 2 && l < n; ++l) v[l] = *(const u16 *)pdc_read(b, i + l * s, sizeof *b, name);
  return v;
}
#define hload_u16(b, i) pdc_hload_u16(b, i, 1, PD_W / 2, #b)
#define hloadm_u16(b, i, n) pdc_hload_u16(b, i, 1, n, #b)
#define hloads_u16(b, i, s, n) pdc_hload_u16(b, i, s, n, #b)
#define vload_u16(b, i) pdc_vload_u16(b, i, 1, PD_W, #b)
#define vloadg_u16(b, i, c) pdc_vloadg_u16(b, i, 1, c, #b)
#define vloadgs_u16(b, i, s, c) pdc_vloadg_u16(b, i, s, c, #b)
#define vloadm_u16(b, i, n) pdc_vload_u16(b, i, 1, n, #b)
#define vloads_u16(b, i, s, n) pdc_vload_u16(b, i, s, n, #b)
#define vstore_u16(b, i, v) pdc_vstore_u16(b, i, 1, v, PD_W, #b)
#define vstorem_u16(b, i, v, n) pdc_vstore_u16(b, i, 1, v, n, #b)
#define vstores_u16(b, i, s, v, n) pdc_vstore_u16(b, i, s, v, n, #b)
#else
PD_MEMORY(u16, vu16)
PD_INLINE hu16 hload_u16(const u16 *b, i64 i) { hu16 v; memcpy(&v, b + i, sizeof v); return v; }
PD_INLINE hu16 hloads_u16(const u16 *b, i64 i, i64 s, i64 n) {
  hu16 v = {0};
  for (i64 l = 0; l < PD_W / 2; ++l) if (l < n) v[l] = b[i + l * s];
  return v;
}
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__BMI2__) && PD_W == 16 && !defined(__clang__)
typedef short pd_halves16 __attribute__((vector_size(32)));
typedef short pd_halves8 __attribute__((vector_size(16)));
PD_INLINE vu16 vloadm_u16(const u16 *b, i64 i, i64 n) {
  return (vu16)__builtin_ia32_loaddquhi256_mask((const void *)(b + i), (pd_halves16){0}, pd_lanes(n));
}
PD_INLINE void vstorem_u16(u16 *b, i64 i, vu16 v, i64 n) {
  __builtin_ia32_storedquhi256_mask((void *)(b + i), (pd_halves16)v, pd_lanes(n));
}
PD_INLINE vu16 vloadg_u16(const u16 *b, i64 i, vb c) {
  unsigned short m = (unsigned short)__builtin_ia32_cvtd2mask512(c);
  return (vu16)__builtin_ia32_loaddquhi256_mask((const void *)(b + i), (pd_halves16){0}, m);
}
/* elements s apart, from 1 to 4, of those lanes: out of one or two whole vectors */
PD_INLINE vu16 pd_apart_u16(const u16 *b, i64 i, i64 s, u32 lanes) {
  typedef short pd_words __attribute__((vector_size(64)));
  typedef u16 pd_places __attribute__((vector_size(64)));
  u64 m = __builtin_ia32_pdep_di(lanes, pd_every[s]);
  pd_words low = __builtin_ia32_loaddquhi512_mask((const void *)(b + i), (pd_words){0}, (u32)m), high = {0};
  if (s > 2) high = __builtin_ia32_loaddquhi512_mask((const void *)(b + i + 32), high, (u32)(m >> 32));
  pd_places at;
  _Pragma("GCC unroll 32") for (int l = 0; l < 32; ++l) at[l] = (u16)(l % 16 * s);
  pd_words x = __builtin_shuffle(low, high, (pd_words)at);
  vu16 v;
  memcpy(&v, &x, sizeof v);
  return v;
}
PD_INLINE vu16 vunzip_u16(const u16 *b, i64 i, i64 s, i64 n) {
  return s > 0 && s <= 4 ? pd_apart_u16(b, i, s, pd_lanes(n)) : vloads_u16(b, i, s, n);
}
#define vloads_u16 vunzip_u16
PD_INLINE vu16 vloadgs_u16(const u16 *b, i64 i, i64 s, vb c) {
  vu16 v = {0};
  if (s > 0 && s <= 4) return pd_apart_u16(b, i, s, (unsigned short)__builtin_ia32_cvtd2mask512(c));
  for (i64 l = 0; l < PD_W; ++l) if (c[l]) v[l] = b[i + l * s];
  return v;
}
PD_INLINE hu16 hloadm_u16(const u16 *b, i64 i, i64 n) {
  unsigned char m = (unsigned char)((1u << PD_MAX(PD_MIN(n, 8), 0)) - 1u);
  return (hu16)__builtin_ia32_loaddquhi128_mask((const void *)(b + i), (pd_halves8){0}, m);
}
#else
PD_MASKED(u16, vu16)
PD_INLINE vu16 vloadgs_u16(const u16 *b, i64 i, i64 s, vb c) {
  vu16 v = {0};
  for (i64 l = 0; l < PD_W; ++l) if (c[l]) v[l] = b[i + l * s];
  return v;
}
PD_INLINE vu16 vloadg_u16(const u16 *b, i64 i, vb c) { return vloadgs_u16(b, i, 1, c); }
PD_INLINE hu16 hloadm_u16(const u16 *b, i64 i, i64 n) { return hloads_u16(b, i, 1, n); }
#endif
#endif

#include "pd_short.h"

/* -- one element ------------------------------------------------------------------------------------------------------ */
PD_INLINE f32 pd_float_of(u32 u) { f32 x; memcpy(&x, &u, sizeof x); return x; }
PD_INLINE u32 pd_bits_of(f32 x) { u32 u; memcpy(&u, &x, sizeof u); return u; }
PD_INLINE f32 pd_read_bf16(u16 h) { return pd_float_of((u32)h << 16); }
PD_INLINE u16 pd_write_bf16(f32 x) {
  u32 u = pd_bits_of(x);
  return (u16)(x != x ? u >> 16 | 0x40u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
#if defined(__F16C__)
typedef short pd_f16s __attribute__((vector_size(16)));
typedef f32 pd_f32s __attribute__((vector_size(16)));
PD_INLINE f32 pd_read_f16(u16 h) { return __builtin_ia32_vcvtph2ps((pd_f16s){(short)h})[0]; }
PD_INLINE u16 pd_write_f16(f32 x) { return (u16)__builtin_ia32_vcvtps2ph((pd_f32s){x}, 0)[0]; }
#else
PD_INLINE f32 pd_read_f16(u16 h) {                       /* the exponent's bias differs by 112: scaling mends subnormals */
  u32 u = (u32)(h & 0x7fffu) << 13, sign = (u32)(h & 0x8000u) << 16;
  f32 x = (h & 0x7c00u) == 0x7c00u ? pd_float_of(u | 0x7f800000u) : pd_float_of(u) * 0x1p112f;
  return pd_float_of(pd_bits_of(x) | sign);
}
PD_INLINE u16 pd_write_f16(f32 x) {
  u32 u = pd_bits_of(x) & 0x7fffffffu, sign = pd_bits_of(x) >> 16 & 0x8000u, h;
  if (u > 0x7f800000u) h = 0x7e00u | (u >> 13 & 0x1ffu);
  else if (u >= 0x477ff000u) h = 0x7c00u;
  else if (u < 0x38800000u) h = pd_bits_of(pd_float_of(u) + 0.5f) - 0x3f000000u;  /* the sum rounds to 2^-24 */
  else h = (u - 0x38000000u + 0xfffu + (u >> 13 & 1u)) >> 13;
  return (u16)(sign | h);
}
#endif
/* a number that is rounded once more: the last bit says that something was cut off */
PD_INLINE f32 pd_odd_f32(f64 x) {
  f32 y = (f32)x;
  if (x != x || (f64)y == x) return y;
  return pd_float_of((pd_bits_of(y) - (fabs((f64)y) > fabs(x))) | 1u);
}
PD_LEAF vf32 vodd_f32(vf64 x) { vf32 y; for (int l = 0; l < PD_W; ++l) y[l] = pd_odd_f32(x[l]); return y; }

/* Floats of at most 8 bits: a sign, exponents from LOW on, M bits of mantissa; the codes of the largest number, of an
   overflow and of NaN. FNUZ: the code of -0 is NaN. */
PD_INLINE f32 pd_power(int e) { return pd_float_of((u32)(127 + e) << 23); }
PD_INLINE f32 pd_read_small(u32 sign, u32 code, int m, int low, u32 most, int infinite) {
  u32 e = code >> m, part = code & ((1u << m) - 1u);
  f32 x = e ? (f32)((1u << m) + part) * pd_power((int)e + low - 1 - m) : (f32)part * pd_power(low - m);
  if (code > most) x = infinite && code == most + 1 ? INFINITY : NAN;
  return sign ? -x : x;
}
PD_INLINE u32 pd_write_small(f32 x, int m, int low, u32 most, u32 over) {
  f32 a = fabsf(x);
  if (!(a < INFINITY)) return over;
  int e = PD_MAX((int)(pd_bits_of(a) >> 23) - 127, low);
  if (e - low > 60) return over;
  f32 r = (a * pd_power(m - e) + 0x1p23f) - 0x1p23f;                                  /* to nearest even */
  u32 code = (u32)r + ((u32)(e - low) << m);
  return code > most ? over : code;
}
#define PD_SMALL(T, BITS, M, LOW, MOST, OVER, NANS, INFINITE, FNUZ)                                                    \
  typedef u8 T;                                                                                                       \
  PD_INLINE f32 pd_read_##T(u8 c) {                                                                                    \
    u32 sign = c >> (BITS - 1) & 1u, code = c & ((1u << (BITS - 1)) - 1u);                                              \
    return FNUZ && sign && !code ? NAN : pd_read_small(sign, code, M, LOW, MOST, INFINITE);                            \
  }                                                                                                                   \
  PD_INLINE u8 pd_write_##T(f32 x) {                                                                                   \
    u32 sign = (pd_bits_of(x) >> 31) << (BITS - 1);                                                                    \
    if (x != x) return (u8)(FNUZ ? NANS : sign | NANS);                                                               \
    u32 code = pd_write_small(x, M, LOW, MOST, OVER);                                                                  \
    return (u8)(FNUZ && (!code || code == OVER) ? code : sign | code);                                                 \
  }
PD_SMALL(float8_e4m3fn, 8, 3, -6, 0x7e, 0x7f, 0x7f, 0, 0)
PD_SMALL(float8_e4m3fnuz, 8, 3, -7, 0x7f, 0x80, 0x80, 0, 1)
PD_SMALL(float8_e5m2, 8, 2, -14, 0x7b, 0x7c, 0x7e, 1, 0)
PD_SMALL(float8_e5m2fnuz, 8, 2, -15, 0x7f, 0x80, 0x80, 0, 1)
PD_SMALL(float4_e2m1fn, 4, 1, 0, 0x7, 0x7, 0x8, 0, 0)
typedef u8 float8_e8m0fnu;                                                           /* an exponent; 255: NaN */
PD_INLINE f32 pd_read_float8_e8m0fnu(u8 c) { return c == 255 ? NAN : c ? pd_power(c - 127) : 0x1p-127f; }
PD_INLINE u8 pd_write_float8_e8m0fnu(f32 x) {
  u32 u = pd_bits_of(x), e = (u + 0x3fffffu + (u >> 23 & 1u)) >> 23;
  return (u8)(x > 0 && x < INFINITY && e < 255 ? e : 255);
}
typedef u8 int4; typedef u8 uint4; typedef u8 int2; typedef u8 uint2;
PD_INLINE i8 pd_read_int4(u8 c) { return (i8)((c & 15) - (c & 8) * 2); }
PD_INLINE i8 pd_read_int2(u8 c) { return (i8)((c & 3) - (c & 2) * 2); }
PD_INLINE u8 pd_read_uint4(u8 c) { return c & 15; }
PD_INLINE u8 pd_read_uint2(u8 c) { return c & 3; }
PD_INLINE u8 pd_write_int4(i8 x) { return (u8)x & 15; }
PD_INLINE u8 pd_write_int2(i8 x) { return (u8)x & 3; }
PD_INLINE u8 pd_write_uint4(u8 x) { return x & 15; }
PD_INLINE u8 pd_write_uint2(u8 x) { return x & 3; }

/* -- words of two bfloat16 -------------------------------------------------------------------------------------------- */
PD_INLINE i32 pd_pair_bf16_f32(f32 a, f32 b) { return (i32)((u32)pd_write_bf16(a) | (u32)pd_write_bf16(b) << 16); }
PD_INLINE f32 pd_dot2_bf16_i32(i32 a, i32 b) {
  f32 low = pd_float_of((u32)a << 16) * pd_float_of((u32)b << 16);
  return low + pd_float_of((u32)a & 0xffff0000u) * pd_float_of((u32)b & 0xffff0000u);
}

/* -- vectors ---------------------------------------------------------------------------------------------------------- */
#if defined(__AVX512BW__) && PD_W == 16 && !defined(__clang__)
typedef short pd_words32 __attribute__((vector_size(64)));
typedef int pd_ints8 __attribute__((vector_size(32)));
PD_INLINE vf32 vwide_bf16(vu16 h) {                           /* one permutation: element l into the upper half of lane l */
  const pd_words32 from = {0, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  pd_words32 v = (pd_words32)__builtin_ia32_si512_256si((pd_ints8)h);
  return (vf32)__builtin_ia32_permvarhi512_mask(v, from, (pd_words32){0}, 0xaaaaaaaau);
}
#else
PD_INLINE vf32 vwide_bf16(vu16 h) { return (vf32)(__builtin_convertvector(h, vu32) << 16); }
#endif
PD_INLINE vu16 vnarrow_bits_bf16(vf32 x) {
  vu32 u = (vu32)x, nan = (vu32)(x != x), r = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  return __builtin_convertvector((r & ~nan) | ((u >> 16 | 0x40u) & nan), vu16);
}
#if defined(__AVX512BF16__) && defined(__AVX512DQ__) && PD_W == 16
#define PD_SUBNORMAL 0x20
PD_INLINE vu16 vnarrow_bf16(vf32 x) {                             /* the instruction takes subnormal numbers for 0 */
  if (__builtin_expect(__builtin_ia32_fpclassps512_mask(x, PD_SUBNORMAL, 0xffff), 0)) return vnarrow_bits_bf16(x);
  return (vu16)__builtin_ia32_cvtneps2bf16_v16sf(x);
}
#else
PD_INLINE vu16 vnarrow_bf16(vf32 x) { return vnarrow_bits_bf16(x); }
#endif
#define PD_WIDE_LANEWISE(T)                                                                                                \
  PD_INLINE vf32 vwide_##T(vu16 h) { vf32 v; for (int l = 0; l < PD_W; ++l) v[l] = pd_read_##T(h[l]); return v; }       \
  PD_INLINE vu16 vnarrow_##T(vf32 x) { vu16 v; for (int l = 0; l < PD_W; ++l) v[l] = pd_write_##T(x[l]); return v; }
#define PD_HALF_LANEWISE(T)                                                                                           \
  PD_INLINE hf32 hwide_##T(hu16 h) { hf32 v; for (int l = 0; l < PD_W / 2; ++l) v[l] = pd_read_##T(h[l]); return v; }
#if defined(__AVX2__) && PD_W == 16 && !defined(__clang__)
typedef short pd_shorts8 __attribute__((vector_size(16)));
PD_INLINE hf32 hwide_bf16(hu16 h) { return (hf32)((hu32)__builtin_ia32_pmovzxwd256((pd_shorts8)h) << 16); }
#else
PD_INLINE hf32 hwide_bf16(hu16 h) { return (hf32)(__builtin_convertvector(h, hu32) << 16); }
#endif
#if defined(__AVX512F__) && PD_W == 16
typedef short pd_f16v __attribute__((vector_size(32)));
PD_INLINE vf32 vwide_f16(vu16 h) { return (vf32)__builtin_ia32_vcvtph2ps512_mask((pd_f16v)h, (vf32){0}, 0xffff, 4); }
PD_INLINE vu16 vnarrow_f16(vf32 x) { return (vu16)__builtin_ia32_vcvtps2ph512_mask(x, 0, (pd_f16v){0}, 0xffff); }
PD_INLINE hf32 hwide_f16(hu16 h) { return (hf32)__builtin_ia32_vcvtph2ps256((pd_f16s)h); }
#elif defined(__F16C__) && PD_W == 8
PD_INLINE vf32 vwide_f16(vu16 h) { return (vf32)__builtin_ia32_vcvtph2ps256((pd_f16s)h); }
PD_INLINE vu16 vnarrow_f16(vf32 x) { return (vu16)__builtin_ia32_vcvtps2ph256(x, 0); }
PD_HALF_LANEWISE(f16)
#else
PD_WIDE_LANEWISE(f16)
PD_HALF_LANEWISE(f16)
#endif
PD_INLINE vf32 vround_f16(vf32 x) { return vwide_f16(vnarrow_f16(x)); }
PD_INLINE vf32 vround_bf16(vf32 x) { return vwide_bf16(vnarrow_bf16(x)); }

/* words of two bfloat16: both products of two words, added. The instruction takes subnormal numbers for 0, and rounds after
   each product. */
PD_INLINE vi32 pd_pair_bf16_vf32(vf32 a, vf32 b) {
  return (vi32)(__builtin_convertvector(vnarrow_bf16(a), vu32) | __builtin_convertvector(vnarrow_bf16(b), vu32) << 16);
}
PD_INLINE vf32 pd_dot2_bf16_vi32(vi32 a, vi32 b) {
  vu32 p = (vu32)a, q = (vu32)b;
  return (vf32)(p << 16) * (vf32)(q << 16) + (vf32)(p & 0xffff0000u) * (vf32)(q & 0xffff0000u);
}
#if defined(__AVX512BF16__) && PD_W == 16
#if __GNUC__ >= 13
typedef __bf16 pd_bf16s __attribute__((vector_size(64)));
#else
typedef short pd_bf16s __attribute__((vector_size(64)));
#endif
PD_INLINE vf32 pd_dot2_bf16_add_vf32(vf32 s, vi32 a, vi32 b) {
  return (vf32)__builtin_ia32_dpbf16ps_v16sf(s, (pd_bf16s)a, (pd_bf16s)b);
}
#else
PD_INLINE vf32 pd_dot2_bf16_add_vf32(vf32 s, vi32 a, vi32 b) { return s + pd_dot2_bf16_vi32(a, b); }
#endif

#define vload_f16(b, i) vwide_f16(vload_u16(b, i))
#define vloadm_f16(b, i, n) vwide_f16(vloadm_u16(b, i, n))
#define vloads_f16(b, i, s, n) vwide_f16(vloads_u16(b, i, s, n))
#define vloadg_f16(b, i, c) vwide_f16(vloadg_u16(b, i, c))
#define vloadgs_f16(b, i, s, c) vwide_f16(vloadgs_u16(b, i, s, c))
#define hload_f16(b, i) hwide_f16(hload_u16(b, i))
#define hloadm_f16(b, i, n) hwide_f16(hloadm_u16(b, i, n))
#define hloads_f16(b, i, s, n) hwide_f16(hloads_u16(b, i, s, n))
#define vstore_f16(b, i, v) vstore_u16(b, i, vnarrow_f16(v))
#define vstorem_f16(b, i, v, n) vstorem_u16(b, i, vnarrow_f16(v), n)
#define vstores_f16(b, i, s, v, n) vstores_u16(b, i, s, vnarrow_f16(v), n)
#define vload_bf16(b, i) vwide_bf16(vload_u16(b, i))
#define vloadm_bf16(b, i, n) vwide_bf16(vloadm_u16(b, i, n))
#define vloads_bf16(b, i, s, n) vwide_bf16(vloads_u16(b, i, s, n))
#define vloadg_bf16(b, i, c) vwide_bf16(vloadg_u16(b, i, c))
#define vloadgs_bf16(b, i, s, c) vwide_bf16(vloadgs_u16(b, i, s, c))
#define hload_bf16(b, i) hwide_bf16(hload_u16(b, i))
#define hloadm_bf16(b, i, n) hwide_bf16(hloadm_u16(b, i, n))
#define hloads_bf16(b, i, s, n) hwide_bf16(hloads_u16(b, i, s, n))
#define vstore_bf16(b, i, v) vstore_u16(b, i, vnarrow_bf16(v))
#define vstorem_bf16(b, i, v, n) vstorem_u16(b, i, vnarrow_bf16(v), n)
#define vstores_bf16(b, i, s, v, n) vstores_u16(b, i, s, vnarrow_bf16(v), n)
#endif
