/* pd_short.h: vectors of 16-bit integers; pd_storage.h includes it, which has the memory of uint16. */
#pragma once

typedef i16 vi16 __attribute__((vector_size(2 * PD_W)));
#ifdef PD_CHECKED
PD_MEMORY(i16, vi16)
PD_GUARDED(i16, vi16)
#define vload_i16(b, i) pdc_vload_i16(b, i, 1, PD_W, #b)
#define vloadg_i16(b, i, c) pdc_vloadg_i16(b, i, 1, c, #b)
#define vloadgs_i16(b, i, s, c) pdc_vloadg_i16(b, i, s, c, #b)
#define vloadm_i16(b, i, n) pdc_vload_i16(b, i, 1, n, #b)
#define vloads_i16(b, i, s, n) pdc_vload_i16(b, i, s, n, #b)
#define vstore_i16(b, i, v) pdc_vstore_i16(b, i, 1, v, PD_W, #b)
#define vstorem_i16(b, i, v, n) pdc_vstore_i16(b, i, 1, v, n, #b)
#define vstores_i16(b, i, s, v, n) pdc_vstore_i16(b, i, s, v, n, #b)
#else
#define PD_AS_U16(b) ((const u16 *)(const void *)(b))
PD_INLINE vi16 vload_i16(const i16 *b, i64 i) { return (vi16)vload_u16(PD_AS_U16(b), i); }
PD_INLINE vi16 vloadm_i16(const i16 *b, i64 i, i64 n) { return (vi16)vloadm_u16(PD_AS_U16(b), i, n); }
PD_INLINE vi16 vloads_i16(const i16 *b, i64 i, i64 s, i64 n) { return (vi16)vloads_u16(PD_AS_U16(b), i, s, n); }
PD_INLINE vi16 vloadg_i16(const i16 *b, i64 i, vb c) { return (vi16)vloadg_u16(PD_AS_U16(b), i, c); }
PD_INLINE vi16 vloadgs_i16(const i16 *b, i64 i, i64 s, vb c) { return (vi16)vloadgs_u16(PD_AS_U16(b), i, s, c); }
PD_INLINE void vstore_i16(i16 *b, i64 i, vi16 v) { vstore_u16((u16 *)(void *)b, i, (vu16)v); }
PD_INLINE void vstorem_i16(i16 *b, i64 i, vi16 v, i64 n) { vstorem_u16((u16 *)(void *)b, i, (vu16)v, n); }
PD_INLINE void vstores_i16(i16 *b, i64 i, i64 s, vi16 v, i64 n) { vstores_u16((u16 *)(void *)b, i, s, (vu16)v, n); }
#endif

/* 16 bits in 32: compilers take the general conversion apart */
#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
typedef short pd_shorts16 __attribute__((vector_size(32)));
PD_INLINE vi32 vwide_u16(vu16 x) { return (vi32)__builtin_ia32_pmovzxwd512_mask((pd_shorts16)x, (vi32){0}, 0xffff); }
PD_INLINE vi32 vwide_i16(vi16 x) { return (vi32)__builtin_ia32_pmovsxwd512_mask((pd_shorts16)x, (vi32){0}, 0xffff); }
#elif defined(__AVX2__) && PD_W == 8 && !defined(__clang__)
typedef short pd_shorts8 __attribute__((vector_size(16)));
PD_INLINE vi32 vwide_u16(vu16 x) { return (vi32)__builtin_ia32_pmovzxwd256((pd_shorts8)x); }
PD_INLINE vi32 vwide_i16(vi16 x) { return (vi32)__builtin_ia32_pmovsxwd256((pd_shorts8)x); }
#else
PD_INLINE vi32 vwide_u16(vu16 x) { return __builtin_convertvector(x, vi32); }
PD_INLINE vi32 vwide_i16(vi16 x) { return __builtin_convertvector(x, vi32); }
#endif

#if defined(__clang__)
PD_SHUFFLES(vu16, vu16) PD_SHUFFLES(vi16, vi16)
#endif
#define PD_SHORTS(T, V)                                                                                               \
  PD_INLINE V vbcast_##T(T x) { return x - (V){0}; }                                                                   \
  PD_INLINE V vsel_##T(vb c, V a, V b) {                                                                               \
    V m = (V)__builtin_convertvector(c, vi16);                                                                        \
    return (m & a) | (~m & b);                                                                                        \
  }                                                                                                                   \
  PD_INLINE V pd_max_##V(V a, V b) { V m = (V)(a > b); return (m & a) | (~m & b); }                                    \
  PD_INLINE V pd_min_##V(V a, V b) { V m = (V)(a < b); return (m & a) | (~m & b); }                                    \
  PD_LANEWISE2(div, T, V) PD_LANEWISE2(fmod, T, V) PD_LANEWISE2(mod, T, V) PD_LANEWISE2(pow, T, V)                     \
  PD_LANEWISE_SHIFTS(T, V) PD_BITS(V)                                                                                  \
  PD_HALVE(T, V, V, max, pd_max_##V(v, u)) PD_HALVE(T, V, V, min, pd_min_##V(v, u))
PD_SHORTS(u16, vu16)
PD_SHORTS(i16, vi16)
PD_INLINE vu16 pd_sign_vu16(vu16 x) { return (vu16)(x != 0) & 1; }
PD_INLINE vu16 pd_abs_vu16(vu16 x) { return x; }
PD_INLINE vi16 pd_sign_vi16(vi16 x) { return (x < 0) - (x > 0); }
PD_INLINE vi16 pd_abs_vi16(vi16 x) { vi16 m = x < 0; return (vi16)((vu16)(x ^ m) - (vu16)m); }
