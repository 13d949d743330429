/* What generated C kernels may call: vector types of PD_W lanes in GCC/Clang vector extensions (one text for AVX2,
   AVX-512 and NEON), loads and stores (plain, masked, strided), and math functions. With PD_CHECKED every access to
   memory is checked (pd_checked.h); the kernels' text is the same. */
#ifndef PD_CPU_H
#define PD_CPU_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#ifndef PD_W
#define PD_W 16
#endif
#define PD_INLINE static inline __attribute__((always_inline, unused))
#define PD_LEAF static __attribute__((noinline, unused, const))
#define PD_MIN(a, b) ((a) < (b) ? (a) : (b))
#define PD_MAX(a, b) ((a) > (b) ? (a) : (b))

PD_INLINE int64_t pd_fdiv(int64_t a, int64_t n) { return n ? a / n - ((a % n != 0) & ((a < 0) != (n < 0))) : 0; }

typedef float f32; typedef double f64; typedef int8_t i8; typedef int16_t i16; typedef int32_t i32; typedef int64_t i64;
typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64;
typedef f32 vf32 __attribute__((vector_size(4 * PD_W)));
typedef i32 vi32 __attribute__((vector_size(4 * PD_W)));
typedef i64 vi64 __attribute__((vector_size(8 * PD_W)));
typedef f64 vf64 __attribute__((vector_size(8 * PD_W)));
typedef u8 vu8 __attribute__((vector_size(PD_W)));
typedef i8 vi8 __attribute__((vector_size(PD_W)));
typedef u32 vu32 __attribute__((vector_size(4 * PD_W)));
typedef u64 vu64 __attribute__((vector_size(8 * PD_W)));
typedef f32 hf32 __attribute__((vector_size(2 * PD_W)));         /* a narrow vector: half of a whole one */
typedef vi32 vb;                                     /* a boolean in vector form: 0 or -1 in every lane */
#include "pd_clang.h"

/* A float as an integer, in a register: gcc (under -fno-trapping-math) takes the way there and back for the float without
   its fraction, which is larger than any integer for large floats, and -0 for -0.5. */
#if defined(__AVX512F__)
#define PD_REGISTER 64
#elif defined(__AVX__)
#define PD_REGISTER 32
#else
#define PD_REGISTER 16
#endif
#if defined(__x86_64__)
#define PD_OPAQUE(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define PD_OPAQUE(v) __asm__("" : "+w"(v))
#else
#define PD_OPAQUE(v) __asm__("" : "+m"(v))
#endif
#define pd_cut(T, x) ({ T pd_c = (T)(x); __asm__("" : "+r"(pd_c)); pd_c; })
#if defined(__clang__)
#define vcut(T, x) __builtin_convertvector(x, T) /* not taken for a float; and an operand of asm must fit, even unused */
#else
#define vcut(T, x)                                                                                                    \
  ({                                                                                                                  \
    T pd_c = __builtin_convertvector(x, T);                                                                           \
    if (sizeof pd_c <= PD_REGISTER && sizeof pd_c >= 16) PD_OPAQUE(pd_c);                                             \
    else __asm__("" : "+m"(pd_c));                                                                                    \
    pd_c;                                                                                                             \
  })
#endif

#ifdef PD_CHECKED
#include "pd_checked.h"
#else
/* -- memory: element i of a buffer, PD_W elements from i, s elements apart, only the first n ----------------------- */
#define PD_AT(b, i) ((b)[i])
#define PD_PUT(b, i, x) ((b)[i] = (x))
#define PD_WORD(b, i) pd_word((b) + (i))                        /* 32 bits from an element of fewer on */
PD_INLINE i32 pd_word(const void *p) { i32 w; memcpy(&w, p, sizeof w); return w; }
#define PD_STACK(T, b, n) T b[n] __attribute__((aligned(64)))
#define PD_SCRATCH(T, b, n, from) ((T *)(from))
#define PD_UNDEFINED(T) ((T)0)                                  /* what a register holds before its first value */
#define pd_again(b, i, s, n) ((void)0) /* only a checked build looks */
#define pd_written_soon(b, i, s) ((s) > 0 ? (void)0 : __builtin_prefetch((b) + (i), 1)) /* written soon, not streamed */

#if defined(__AVX512F__) && PD_W == 16
typedef float pd_m512 __attribute__((vector_size(64), may_alias));
PD_INLINE unsigned short pd_lanes(i64 n) { return (unsigned short)((1u << PD_MAX(PD_MIN(n, 16), 0)) - 1u); }
PD_INLINE vf32 vloadm_f32(const f32 *b, i64 i, i64 n) {
  return (vf32)__builtin_ia32_loadups512_mask(b + i, (vf32){0}, pd_lanes(n));
}
PD_INLINE void vstorem_f32(f32 *b, i64 i, vf32 v, i64 n) { __builtin_ia32_storeups512_mask(b + i, v, pd_lanes(n)); }
#else
#if defined(__AVX__) && PD_W == 8
PD_INLINE vf32 vloadm_f32(const f32 *b, i64 i, i64 n) {
  const vi32 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  return (vf32)__builtin_ia32_maskloadps256((const vf32 *)(b + i), lanes < (i32)PD_MAX(PD_MIN(n, 8), 0));
}
#else
PD_INLINE vf32 vloadm_f32(const f32 *b, i64 i, i64 n) {
  vf32 v = {0};
  for (i64 l = 0; l < PD_W; ++l) if (l < n) v[l] = b[i + l];
  return v;
}
#endif
PD_INLINE void vstorem_f32(f32 *b, i64 i, vf32 v, i64 n) { for (i64 l = 0; l < PD_W; ++l) if (l < n) b[i + l] = v[l]; }
#endif

#define PD_MEMORY(T, V)                                                                                               \
  PD_INLINE V vload_##T(const T *b, i64 i) { V v; memcpy(&v, b + i, sizeof v); return v; }                             \
  PD_INLINE void vstore_##T(T *b, i64 i, V v) { memcpy(b + i, &v, sizeof v); }                                         \
  PD_INLINE V vloads_##T(const T *b, i64 i, i64 s, i64 n) {                                                            \
    V v = {0};                                                                                                        \
    for (i64 l = 0; l < PD_W; ++l) if (l < n) v[l] = b[i + l * s];                                                     \
    return v;                                                                                                         \
  }                                                                                                                   \
  PD_INLINE void vstores_##T(T *b, i64 i, i64 s, V v, i64 n) {                                                         \
    for (i64 l = 0; l < PD_W; ++l) if (l < n) b[i + l * s] = v[l];                                                     \
  }
PD_MEMORY(f32, vf32)
PD_MEMORY(i32, vi32)
PD_MEMORY(i64, vi64)
PD_MEMORY(f64, vf64)
PD_MEMORY(u8, vu8)
PD_MEMORY(i8, vi8)
#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
/* elements 1 to 4 apart, out of whole vectors; no lane behind the last element is read */
PD_INLINE vf32 vunzip_f32(const f32 *b, i64 i, i64 s, i64 n) {
  const vi32 e = (vi32){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * (i32)s;
  const i64 m = (PD_MIN(n, 16) - 1) * s + 1;
  if (s < 1 || s > 4) return vloads_f32(b, i, s, n);
  if (s == 1) return n < 16 ? vloadm_f32(b, i, n) : vload_f32(b, i);
  vf32 first = n < 16 ? vloadm_f32(b, i, m) : vload_f32(b, i);
  vf32 low = __builtin_shuffle(first, vloadm_f32(b, i + 16, m - 16), e), high = {0};
  if (s == 2) return low;
  if (s == 3) high = __builtin_shuffle(vloadm_f32(b, i + 32, m - 32), e);
  else high = __builtin_shuffle(vloadm_f32(b, i + 32, m - 32), vloadm_f32(b, i + 48, m - 48), e);
  const vi32 left = e < 32;
  return (vf32)((left & (vi32)low) | (~left & (vi32)high));
}
#define vloads_f32 vunzip_f32
/* the same of bytes two apart: the steps of pairs */
#define PD_UNZIP(T, V)                                                                                                \
  PD_INLINE V vunzip_##T(const T *b, i64 i, i64 s, i64 n) {                                                            \
    const V l = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};                                                \
    if (n < 16 || s != 2) return vloads_##T(b, i, s, n);                                                               \
    return __builtin_shuffle(vload_##T(b, i), vload_##T(b, i + 15), l * 2 - (V)(l * 2 >= 16));                         \
  }
PD_UNZIP(u8, vu8)
PD_UNZIP(i8, vi8)
#define vloads_u8 vunzip_u8
#define vloads_i8 vunzip_i8
#endif
PD_INLINE hf32 hload_f32(const f32 *b, i64 i) { hf32 v; memcpy(&v, b + i, sizeof v); return v; }
PD_INLINE void hstore_f32(f32 *b, i64 i, hf32 v) { memcpy(b + i, &v, sizeof v); }
PD_INLINE hf32 hloads_f32(const f32 *b, i64 i, i64 s, i64 n) {
  hf32 v = {0};
  for (i64 l = 0; l < PD_W / 2; ++l) if (l < n) v[l] = b[i + l * s];
  return v;
}
#if defined(__AVX512VL__) && PD_W == 16
PD_INLINE hf32 hloadm_f32(const f32 *b, i64 i, i64 n) {
  return (hf32)__builtin_ia32_loadups256_mask((const void *)(b + i), (hf32){0}, (unsigned char)((1u << PD_MAX(PD_MIN(n, 8), 0)) - 1u));
}
#else
PD_INLINE hf32 hloadm_f32(const f32 *b, i64 i, i64 n) {
  hf32 v = {0};
  for (i64 l = 0; l < PD_W / 2; ++l) if (l < n) v[l] = b[i + l];
  return v;
}
#endif
/* What was stored in b is loaded from there again: the compiler may not keep it in registers meanwhile. */
PD_INLINE void pd_in_memory_f32(const f32 *b, i64 i) { __asm__("" : : "r"(b + i) : "memory"); }
PD_INLINE void pd_prefetch_f32(const f32 *b, i64 i) { __builtin_prefetch(b + i); }
PD_INLINE void pd_prefetch_far_f32(const f32 *b, i64 i) { __builtin_prefetch(b + i, 0, 2); }
PD_INLINE void pd_prefetch_write_f32(const f32 *b, i64 i) { __builtin_prefetch(b + i, 1); }
PD_INLINE void pd_prefetch_i32(const i32 *b, i64 i) { __builtin_prefetch(b + i); }
PD_INLINE void pd_prefetch_far_i32(const i32 *b, i64 i) { __builtin_prefetch(b + i, 0, 2); }
/* Where s > 0 an aligned vector goes around the caches: its line is not read first, and drives nothing out. pd_drain
   must come before anybody else may read it. */
#if defined(__clang__)
#define PD_STREAM(to, v) __builtin_nontemporal_store(v, (vf32 *)(to))
#elif defined(__AVX512F__) && PD_W == 16
#define PD_STREAM(to, v) __builtin_ia32_movntps512(to, v)
#elif defined(__AVX__) && PD_W == 8
#define PD_STREAM(to, v) __builtin_ia32_movntps256(to, v)
#elif defined(__SSE2__) && PD_W == 4
#define PD_STREAM(to, v) __builtin_ia32_movntps(to, v)
#else
#define PD_STREAM(to, v) memcpy(to, &(v), sizeof(v))
#endif
PD_INLINE void vstream_f32(f32 *b, i64 i, vf32 v, i64 s) {
  if (__builtin_expect(s > 0 && (uintptr_t)(b + i) % sizeof v == 0, 0)) PD_STREAM(b + i, v);
  else vstore_f32(b, i, v);
}
#define PD_MASKED(T, V)                                                                                               \
  PD_INLINE V vloadm_##T(const T *b, i64 i, i64 n) { return vloads_##T(b, i, 1, n); }                                  \
  PD_INLINE void vstorem_##T(T *b, i64 i, V v, i64 n) { vstores_##T(b, i, 1, v, n); }
PD_MASKED(i32, vi32)
PD_MASKED(i64, vi64)
#if defined(__AVX512F__) && PD_W == 8 && !defined(__clang__)
#define pd_eighths(n) ((unsigned char)((1u << PD_MAX(PD_MIN(n, 8), 0)) - 1u))
PD_INLINE vf64 vloadm_f64(const f64 *b, i64 i, i64 n) {
  return (vf64)__builtin_ia32_loadupd512_mask(b + i, (vf64){0}, pd_eighths(n));
}
PD_INLINE void vstorem_f64(f64 *b, i64 i, vf64 v, i64 n) { __builtin_ia32_storeupd512_mask(b + i, v, pd_eighths(n)); }
#elif defined(__AVX__) && PD_W == 4
typedef long long pd_longs __attribute__((vector_size(32)));
PD_INLINE pd_longs pd_first(i64 n) { return (pd_longs)((vi64){0, 1, 2, 3} < n); }
PD_INLINE vf64 vloadm_f64(const f64 *b, i64 i, i64 n) {
  return (vf64)__builtin_ia32_maskloadpd256((const vf64 *)(b + i), pd_first(n));
}
PD_INLINE void vstorem_f64(f64 *b, i64 i, vf64 v, i64 n) {
  __builtin_ia32_maskstorepd256((vf64 *)(b + i), pd_first(n), v);
}
#else
PD_MASKED(f64, vf64)
#endif
/* bytes: the first n; and only lanes whose guard is true, the others are 0 */
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && PD_W == 16
typedef char pd_bytes __attribute__((vector_size(16)));
#define PD_BYTES(T, V)                                                                                                \
  PD_INLINE V vloadm_##T(const T *b, i64 i, i64 n) {                                                                   \
    return (V)__builtin_ia32_loaddquqi128_mask((const void *)(b + i), (pd_bytes){0}, pd_lanes(n));                 \
  }                                                                                                                   \
  PD_INLINE void vstorem_##T(T *b, i64 i, V v, i64 n) {                                                                \
    __builtin_ia32_storedquqi128_mask((void *)(b + i), (pd_bytes)v, pd_lanes(n));                                  \
  }                                                                                                                   \
  PD_INLINE V vloadg_##T(const T *b, i64 i, vb c) {                                                                    \
    unsigned short m = (unsigned short)__builtin_ia32_cvtd2mask512(c);                                                 \
    return (V)__builtin_ia32_loaddquqi128_mask((const void *)(b + i), (pd_bytes){0}, m);                           \
  }
#else
#define PD_BYTES(T, V)                                                                                                \
  PD_MASKED(T, V)                                                                                                     \
  PD_INLINE V vloadg_##T(const T *b, i64 i, vb c) {                                                                    \
    V v = {0};                                                                                                        \
    for (i64 l = 0; l < PD_W; ++l) if (c[l]) v[l] = b[i + l];                                                          \
    return v;                                                                                                         \
  }
#endif
PD_BYTES(u8, vu8)
PD_BYTES(i8, vi8)
/* only lanes whose guard is true, the others are 0 */
#if defined(__AVX512DQ__) && PD_W == 16
PD_INLINE vf32 vloadg_f32(const f32 *b, i64 i, vb c) {
  return (vf32)__builtin_ia32_loadups512_mask(b + i, (vf32){0}, (unsigned short)__builtin_ia32_cvtd2mask512(c));
}
#elif defined(__AVX__) && PD_W == 8
PD_INLINE vf32 vloadg_f32(const f32 *b, i64 i, vb c) {
  return (vf32)__builtin_ia32_maskloadps256((const vf32 *)(b + i), c);
}
#else
PD_INLINE vf32 vloadg_f32(const f32 *b, i64 i, vb c) {
  vf32 v = {0};
  for (i64 l = 0; l < PD_W; ++l) if (c[l]) v[l] = b[i + l];
  return v;
}
#endif
static const u64 pd_every[] __attribute__((unused)) = {0, 0xffff, 0x5555555555555555, 0x9249249249249249, 0x1111111111111111};
/* the same of elements s apart */
PD_INLINE vf32 vloadgs_f32(const f32 *b, i64 i, i64 s, vb c) {
#if defined(__AVX512DQ__) && defined(__BMI2__) && PD_W == 16 && !defined(__clang__)
  if (s > 1 && s <= 4) {
    const vi32 e = (vi32){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * (i32)s, left = e < 32;
    u64 m = __builtin_ia32_pdep_di((unsigned short)__builtin_ia32_cvtd2mask512(c), pd_every[s]);
    vf32 part[4] = {{0}};
    for (int k = 0; k < s; ++k) part[k] = (vf32)__builtin_ia32_loadups512_mask(b + i + 16 * k, part[k], (unsigned short)(m >> 16 * k));
    vf32 low = __builtin_shuffle(part[0], part[1], e), high = __builtin_shuffle(part[2], part[3], e);
    return s == 2 ? low : (vf32)((left & (vi32)low) | (~left & (vi32)high));
  }
#endif
  vf32 v = {0};
  for (i64 l = 0; l < PD_W; ++l) if (c[l]) v[l] = b[i + l * s];
  return v;
}
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__BMI2__) && PD_W == 16
typedef char pd_twice __attribute__((vector_size(32)));
#define PD_APART(T, V)                                                                                                \
  PD_INLINE V vloadgs_##T(const T *b, i64 i, i64 s, vb c) {                                                            \
    V v = {0};                                                                                                        \
    if (s == 2) {                                                                                                     \
      u32 m = __builtin_ia32_pdep_si((u32)__builtin_ia32_cvtd2mask512(c), 0x55555555u);                                \
      pd_twice x = (pd_twice)__builtin_ia32_loaddquqi256_mask((const void *)(b + i), (pd_twice){0}, m);            \
      V half[2];                                                                                                      \
      memcpy(half, &x, sizeof x);                                                                                     \
      const V l = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};                                         \
      return __builtin_shuffle(half[0], half[1], l);                                                                   \
    }                                                                                                                 \
    for (i64 l = 0; l < PD_W; ++l) if (c[l]) v[l] = b[i + l * s];                                                      \
    return v;                                                                                                         \
  }
#else
#define PD_APART(T, V)                                                                                                \
  PD_INLINE V vloadgs_##T(const T *b, i64 i, i64 s, vb c) {                                                            \
    V v = {0};                                                                                                        \
    for (i64 l = 0; l < PD_W; ++l) if (c[l]) v[l] = b[i + l * s];                                                      \
    return v;                                                                                                         \
  }
#endif
PD_APART(u8, vu8)
PD_APART(i8, vi8)
PD_INLINE vf64 vloadgs_f64(const f64 *b, i64 i, i64 s, vb c) {
  vf64 v = {0};
  for (i64 l = 0; l < PD_W; ++l) if (c[l]) v[l] = b[i + l * s];
  return v;
}
PD_INLINE vf64 vloadg_f64(const f64 *b, i64 i, vb c) { return vloadgs_f64(b, i, 1, c); }
#endif

PD_INLINE hf32 hbcast_f32(f32 x) { return x - (hf32){0}; }
PD_INLINE hf32 hlow_f32(vf32 v) { hf32 h; memcpy(&h, &v, sizeof h); return h; }
#if PD_W == 16 && (__GNUC__ >= 12 || defined(__clang__))
PD_INLINE vf32 vwiden_f32(hf32 h) {
  return __builtin_shufflevector(h, h, 0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1);
}
#else
PD_INLINE vf32 vwiden_f32(hf32 h) { vf32 v = {0}; memcpy(&v, &h, sizeof h); return v; }
#endif
#if defined(__SSE2__)
#define pd_drain() __builtin_ia32_sfence()
#else
#define pd_drain() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#endif
/* What a launch must move for its stores to stream: a core's share of the last level. Virtual machines report all of a
   processor with many of them (glibc multiplies), so that more than the usual share is not believed. */
#define PD_CACHE_BYTES pd_cache_bytes()
PD_INLINE i64 pd_cache_bytes(void) {
  static i64 bytes;
  i64 n = __atomic_load_n(&bytes, __ATOMIC_RELAXED);
  if (n) return n;
#ifdef _SC_LEVEL3_CACHE_SIZE
  n = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  n = n > 0 ? PD_MIN(n, 32 << 20) : 32 << 20;
  __atomic_store_n(&bytes, n, __ATOMIC_RELAXED);
  return n;
}

/* the numbers of the lanes, a constant: compilers keep a loop over lanes unless they unroll or vectorize it */
#if PD_W == 16
#define PD_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif PD_W == 8
#define PD_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define PD_NUMBERS {0, 1, 2, 3}
#endif
#define PD_VALUES(T, V, U)                                                                                            \
  PD_INLINE V vbcast_##T(T x) { return x - (V){0}; }                                                                   \
  PD_INLINE V vramp_##T(i64 a, i64 s) { return (V)((v##U)PD_NUMBERS * (U)s + (U)a); }
PD_VALUES(i32, vi32, u32)
PD_VALUES(i64, vi64, u64)
PD_VALUES(u8, vu8, u8)
PD_VALUES(i8, vi8, u8)
PD_INLINE vf32 vbcast_f32(f32 x) { return x - (vf32){0}; }
PD_INLINE vf32 vramp_f32(i64 a, i64 s) { return __builtin_convertvector(vramp_i64(a, s), vf32); }
PD_INLINE vf64 vbcast_f64(f64 x) { return x - (vf64){0}; }
PD_INLINE vf64 vramp_f64(i64 a, i64 s) { return __builtin_convertvector(vramp_i64(a, s), vf64); }

/* bytes in 32 bits: compilers take the general conversion apart */
#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
typedef char pd_sixteen __attribute__((vector_size(16)));
PD_INLINE vi32 vwide_u8(vu8 x) { return (vi32)__builtin_ia32_pmovzxbd512_mask((pd_sixteen)x, (vi32){0}, 0xffff); }
PD_INLINE vi32 vwide_i8(vi8 x) { return (vi32)__builtin_ia32_pmovsxbd512_mask((pd_sixteen)x, (vi32){0}, 0xffff); }
#elif defined(__AVX2__) && PD_W == 8 && !defined(__clang__)
typedef char pd_sixteen __attribute__((vector_size(16)));
PD_INLINE vi32 vwide_u8(vu8 x) { pd_sixteen v = {0}; memcpy(&v, &x, sizeof x); return (vi32)__builtin_ia32_pmovzxbd256(v); }
PD_INLINE vi32 vwide_i8(vi8 x) { pd_sixteen v = {0}; memcpy(&v, &x, sizeof x); return (vi32)__builtin_ia32_pmovsxbd256(v); }
#else
PD_INLINE vi32 vwide_u8(vu8 x) { return __builtin_convertvector(x, vi32); }
PD_INLINE vi32 vwide_i8(vi8 x) { return __builtin_convertvector(x, vi32); }
#endif
PD_INLINE vb vbool(vu8 x) { return vwide_u8(x) != 0; }
PD_INLINE vu8 vbyte(vb x) { return __builtin_convertvector(-x, vu8); }
PD_INLINE vb vlive(i64 n) { return vramp_i32(0, 1) < (i32)(n > PD_W ? PD_W : n < 0 ? 0 : n); }
PD_INLINE vb vbetween(i64 low, i64 high) { return ~vlive(low) & vlive(high); }
#if defined(__AVX512DQ__) && PD_W == 16
PD_INLINE vf32 vsel_f32(vb c, vf32 a, vf32 b) {
  return (vf32)__builtin_ia32_movaps512_mask(a, b, (unsigned short)__builtin_ia32_cvtd2mask512(c));
}
#else
PD_INLINE vf32 vsel_f32(vb c, vf32 a, vf32 b) { return (vf32)((c & (vi32)a) | (~c & (vi32)b)); }
#endif
PD_INLINE vi32 vsel_i32(vb c, vi32 a, vi32 b) { return (c & a) | (~c & b); }
PD_INLINE vi64 vsel_i64(vb c, vi64 a, vi64 b) { vi64 m = __builtin_convertvector(c, vi64); return (m & a) | (~m & b); }
PD_INLINE vf64 vsel_f64(vb c, vf64 a, vf64 b) { return (vf64)vsel_i64(c, (vi64)a, (vi64)b); }
PD_INLINE vu8 vsel_u8(vb c, vu8 a, vu8 b) { vu8 m = (vu8)__builtin_convertvector(c, vi8); return (m & a) | (~m & b); }
PD_INLINE vi8 vsel_i8(vb c, vi8 a, vi8 b) { vi8 m = __builtin_convertvector(c, vi8); return (m & a) | (~m & b); }

/* every other element of two vectors, from the first one on and from the second one on */
PD_INLINE vf32 pd_other(vf32 a, vf32 b, int first) {
  return __builtin_shuffle(a, b, (vi32)PD_NUMBERS * 2 + first);
}
PD_INLINE vf32 vevens_f32(vf32 a, vf32 b) { return pd_other(a, b, 0); }
PD_INLINE vf32 vodds_f32(vf32 a, vf32 b) { return pd_other(a, b, 1); }

/* v, out of a register */
#if (defined(__AVX__) && !defined(__clang__) && PD_W >= 8)
PD_INLINE vf32 vkeep_f32(vf32 v) { __asm__("" : "+v"(v)); return v; }
#else
PD_INLINE vf32 vkeep_f32(vf32 v) { return v; }
#endif

/* min and max hand NaN on, as numpy does */
#define PD_EXTREMES(T)                                                                                                \
  PD_INLINE T pd_max_##T(T a, T b) { return a > b || a != a ? a : b; }                                                 \
  PD_INLINE T pd_min_##T(T a, T b) { return a < b || a != a ? a : b; }
PD_EXTREMES(f32) PD_EXTREMES(f64) PD_EXTREMES(i8) PD_EXTREMES(i16) PD_EXTREMES(i32) PD_EXTREMES(i64)
PD_EXTREMES(u8) PD_EXTREMES(u16) PD_EXTREMES(u32) PD_EXTREMES(u64)
/* vgreater, vless: a when it is greater (less) than b, else b: the instruction, which gives b where either is NaN */
#if defined(__AVX512F__) && PD_W == 16
PD_INLINE vf32 vgreater(vf32 a, vf32 b) { return (vf32)__builtin_ia32_maxps512_mask(a, b, b, 0xffff, 4); }
PD_INLINE vf32 vless(vf32 a, vf32 b) { return (vf32)__builtin_ia32_minps512_mask(a, b, b, 0xffff, 4); }
/* lanes where b is NaN keep it; b, as a reduction's accumulator is a and should not wait for the comparison */
PD_INLINE vf32 pd_max_vf32(vf32 a, vf32 b) {
  return (vf32)__builtin_ia32_maxps512_mask(b, a, b, __builtin_ia32_cmpps512_mask(b, b, 7, 0xffff, 4), 4);
}
PD_INLINE vf32 pd_min_vf32(vf32 a, vf32 b) {
  return (vf32)__builtin_ia32_minps512_mask(b, a, b, __builtin_ia32_cmpps512_mask(b, b, 7, 0xffff, 4), 4);
}
#else
#if defined(__AVX__) && PD_W == 8
PD_INLINE vf32 vgreater(vf32 a, vf32 b) { return (vf32)__builtin_ia32_maxps256(a, b); }
PD_INLINE vf32 vless(vf32 a, vf32 b) { return (vf32)__builtin_ia32_minps256(a, b); }
#else
PD_INLINE vf32 vgreater(vf32 a, vf32 b) { return vsel_f32(a > b, a, b); }
PD_INLINE vf32 vless(vf32 a, vf32 b) { return vsel_f32(a < b, a, b); }
#endif
PD_INLINE vf32 pd_max_vf32(vf32 a, vf32 b) { return vsel_f32(b != b, b, vgreater(b, a)); }
PD_INLINE vf32 pd_min_vf32(vf32 a, vf32 b) { return vsel_f32(b != b, b, vless(b, a)); }
#endif
PD_INLINE vi32 pd_max_vi32(vi32 a, vi32 b) { return vsel_i32(a > b, a, b); }
PD_INLINE vi32 pd_min_vi32(vi32 a, vi32 b) { return vsel_i32(a < b, a, b); }
PD_INLINE vf64 pd_where_vf64(vi64 m, vf64 a, vf64 b) { return (vf64)((m & (vi64)a) | (~m & (vi64)b)); }
PD_INLINE vf64 pd_max_vf64(vf64 a, vf64 b) { return pd_where_vf64((b != b) | (b > a), b, a); }
PD_INLINE vf64 pd_min_vf64(vf64 a, vf64 b) { return pd_where_vf64((b != b) | (b < a), b, a); }
PD_INLINE vi64 pd_max_vi64(vi64 a, vi64 b) { vi64 m = a > b; return (m & a) | (~m & b); }
PD_INLINE vi64 pd_min_vi64(vi64 a, vi64 b) { vi64 m = a < b; return (m & a) | (~m & b); }
#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
#define PD_BYTE_BOUNDS(V, S)                                                                                                \
  PD_INLINE V pd_max_##V(V a, V b) { return (V)__builtin_ia32_pmax##S##128((pd_sixteen)a, (pd_sixteen)b); }            \
  PD_INLINE V pd_min_##V(V a, V b) { return (V)__builtin_ia32_pmin##S##128((pd_sixteen)a, (pd_sixteen)b); }
PD_BYTE_BOUNDS(vu8, ub) PD_BYTE_BOUNDS(vi8, sb)
#else
PD_INLINE vu8 pd_max_vu8(vu8 a, vu8 b) { vu8 m = (vu8)(a > b); return (m & a) | (~m & b); }
PD_INLINE vu8 pd_min_vu8(vu8 a, vu8 b) { vu8 m = (vu8)(a < b); return (m & a) | (~m & b); }
PD_INLINE vi8 pd_max_vi8(vi8 a, vi8 b) { vi8 m = a > b; return (m & a) | (~m & b); }
PD_INLINE vi8 pd_min_vi8(vi8 a, vi8 b) { vi8 m = a < b; return (m & a) | (~m & b); }
#endif

/* floats clipped to bytes, the second one rounded half to even; NaN gives 0 */
#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
PD_INLINE vu8 pd_clip_u8(vi32 x) {
  x = (vi32)__builtin_ia32_pmaxsd512_mask(x, (vi32){0}, (vi32){0}, 0xffff);
  return (vu8)__builtin_ia32_pmovusdb512_mask(x, (pd_sixteen){0}, 0xffff);
}
PD_INLINE vu8 vclip_u8(vf32 x) { return pd_clip_u8(__builtin_convertvector(vless(255.0f - (vf32){0}, x), vi32)); }
PD_INLINE vu8 vclip_rint_u8(vf32 x) {
  return pd_clip_u8((vi32)__builtin_ia32_cvtps2dq512_mask(vless(255.0f - (vf32){0}, x), (vi32){0}, 0xffff, 4));
}
#else
PD_INLINE vu8 vclip_u8(vf32 x) {
  x = pd_min_vf32(pd_max_vf32(x, (vf32){0}), 255.0f - (vf32){0});
  return __builtin_convertvector(__builtin_convertvector(x, vi32), vu8);
}
#define vclip_rint_u8(x) vclip_u8(pd_rint_vf32(x))
#endif
/* the whole number next to x, half to even, between two; NaN gives the lower one */
#define vnear_f32(x, low, high) vless(high, vgreater(pd_rint_vf32(x), low))

/* two integers of 16 bits in one of 32; both products of two such, added */
PD_INLINE i32 pd_pair_i32(i32 a, i32 b) { return (i32)(((u32)a & 0xffffu) | ((u32)b << 16)); }
PD_INLINE i32 pd_dot2_i32(i32 a, i32 b) { return (i32)((u32)((i16)a * (i16)b) + (u32)((a >> 16) * (b >> 16))); }
PD_INLINE vi32 pd_pair_vi32(vi32 a, vi32 b) { return (a & 0xffff) | (vi32)((vu32)b << 16); }
#if defined(__AVX512BW__) && PD_W == 16
typedef short pd_shorts __attribute__((vector_size(64)));
PD_INLINE vi32 pd_dot2_vi32(vi32 a, vi32 b) {
  return (vi32)__builtin_ia32_pmaddwd512_mask((pd_shorts)a, (pd_shorts)b, (vi32){0}, 0xffff);
}
#elif defined(__AVX2__) && PD_W == 8
typedef short pd_shorts __attribute__((vector_size(32)));
PD_INLINE vi32 pd_dot2_vi32(vi32 a, vi32 b) { return (vi32)__builtin_ia32_pmaddwd256((pd_shorts)a, (pd_shorts)b); }
#else
PD_INLINE vi32 pd_low_vi32(vi32 a) { return (vi32)((vu32)a << 16) >> 16; }
PD_INLINE vi32 pd_dot2_vi32(vi32 a, vi32 b) { return pd_low_vi32(a) * pd_low_vi32(b) + (a >> 16) * (b >> 16); }
#endif
#if defined(__AVX512VNNI__) && PD_W == 16
PD_INLINE vi32 pd_dot2_add_vi32(vi32 s, vi32 a, vi32 b) { return (vi32)__builtin_ia32_vpdpwssd_v16si(s, a, b); }
#else
PD_INLINE vi32 pd_dot2_add_vi32(vi32 s, vi32 a, vi32 b) { return (vi32)((vu32)s + (vu32)pd_dot2_vi32(a, b)); }
#endif

/* four bytes in one integer of 32 bits; all four products of two such, unsigned by signed, added */
PD_INLINE i32 pd_quad_i32(i32 a, i32 b, i32 c, i32 d) {
  return (i32)(((u32)a & 0xffu) | ((u32)b & 0xffu) << 8 | ((u32)c & 0xffu) << 16 | (u32)d << 24);
}
PD_INLINE i32 pd_dot4_i32(i32 a, i32 b) {
  i32 s = 0;
  for (int k = 0; k < 32; k += 8) s += (u8)((u32)a >> k) * (i8)((u32)b >> k);
  return s;
}
PD_INLINE vi32 pd_quad_vi32(vi32 a, vi32 b, vi32 c, vi32 d) {
  return (a & 0xff) | (vi32)((vu32)(b & 0xff) << 8) | (vi32)((vu32)(c & 0xff) << 16) | (vi32)((vu32)d << 24);
}
#if defined(__AVX512VNNI__) && PD_W == 16
PD_INLINE vi32 pd_dot4_add_vi32(vi32 s, vi32 a, vi32 b) { return (vi32)__builtin_ia32_vpdpbusd_v16si(s, a, b); }
#elif defined(__AVXVNNI__) && PD_W == 8
PD_INLINE vi32 pd_dot4_add_vi32(vi32 s, vi32 a, vi32 b) { return (vi32)__builtin_ia32_vpdpbusd_v8si(s, a, b); }
#else
PD_INLINE vi32 pd_dot4_add_vi32(vi32 s, vi32 a, vi32 b) {
  for (int k = 0; k < 32; k += 8) s = (vi32)((vu32)s + (vu32)(((a >> k) & 0xff) * ((vi32)((vu32)b << (24 - k)) >> 24)));
  return s;
}
#endif
PD_INLINE vi32 pd_dot4_vi32(vi32 a, vi32 b) { return pd_dot4_add_vi32((vi32){0}, a, b); }

/* four bits of each integer of 32 less 8, in float32: numbers 0 to 3 in the lower halves of its bytes, 4 to 7 above */
#define PD_SHIFT(n) (8 * ((n) % 4) + 4 * ((n) / 4))
PD_INLINE f32 pd_nibble_i32(i32 w, i32 n) { return (f32)((i32)((u32)w >> PD_SHIFT(n) & 15u) - 8); }
#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
PD_INLINE vf32 pd_nibble_vi32(vi32 w, i32 n) {                  /* the permutation looks at four bits of each lane */
  const vf32 numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return __builtin_shuffle(numbers, (vi32)((vu32)w >> PD_SHIFT(n)));
}
#else
PD_INLINE vf32 pd_nibble_vi32(vi32 w, i32 n) {
  return __builtin_convertvector(((vi32)((vu32)w >> PD_SHIFT(n)) & 15) - 8, vf32);
}
#endif
/* the products of a word's nibbles, 0 to 15, and the signed bytes of two words, added */
PD_INLINE vi32 pd_dot_nibbles_add_vi32(vi32 s, vi32 w, vi32 a, vi32 b) {
  const vi32 half = (vi32){0} + 0x0f0f0f0f;
  return pd_dot4_add_vi32(pd_dot4_add_vi32(s, w & half, a), (vi32)((vu32)w >> 4) & half, b);
}

/* integer division truncates (C, ONNX Div), fmod takes the dividend's sign, mod the divisor's; by zero gives 0 */
#define PD_INTEGERS(T, U)                                                                                             \
  PD_INLINE T pd_div_##T(T a, T b) { return b == 0 ? 0 : b == (T)-1 ? (T)(0 - (U)a) : (T)(a / b); }                    \
  PD_INLINE T pd_fmod_##T(T a, T b) { return b == 0 || b == (T)-1 ? 0 : (T)(a % b); }                                  \
  PD_INLINE T pd_mod_##T(T a, T b) { T r = pd_fmod_##T(a, b); return r != 0 && ((r < 0) != (b < 0)) ? (T)(r + b) : r; } \
  PD_INLINE T pd_abs_##T(T a) { return a < 0 ? (T)(0 - (U)a) : a; }                                                    \
  PD_INLINE T pd_sign_##T(T a) { return (T)((a > 0) - (a < 0)); }                                                      \
  PD_POW(T, U)
#define PD_UNSIGNED(T, U)                                                                                             \
  PD_INLINE T pd_div_##T(T a, T b) { return b == 0 ? 0 : (T)(a / b); }                                                 \
  PD_INLINE T pd_fmod_##T(T a, T b) { return b == 0 ? 0 : (T)(a % b); }                                                \
  PD_INLINE T pd_mod_##T(T a, T b) { return pd_fmod_##T(a, b); }                                                       \
  PD_INLINE T pd_abs_##T(T a) { return a; }                                                                            \
  PD_INLINE T pd_sign_##T(T a) { return a > 0; }                                                                       \
  PD_POW(T, U)
/* powers wrap; a negative exponent truncates: 0 but for the bases 1 and -1 */
#define PD_POW(T, U)                                                                                                  \
  PD_INLINE T pd_pow_##T(T a, T b) {                                                                                   \
    if (b < 0) return a == 1 ? 1 : a == (T)-1 ? (b % 2 ? a : 1) : 0;                                                   \
    U r = 1, x = (U)a;                                                                                                 \
    for (; b; b = (T)(b / 2), x *= x) if (b % 2) r *= x;                                                               \
    return (T)r;                                                                                                       \
  }
PD_INTEGERS(i8, u32) PD_INTEGERS(i16, u32) PD_INTEGERS(i32, u32) PD_INTEGERS(i64, u64)
PD_UNSIGNED(u8, u32) PD_UNSIGNED(u16, u32) PD_UNSIGNED(u32, u32) PD_UNSIGNED(u64, u64)

#define PD_FLOATS(T, S)                                                                                               \
  PD_INLINE T pd_exp_##T(T x) { return exp##S(x); }      PD_INLINE T pd_log_##T(T x) { return log##S(x); }             \
  PD_INLINE T pd_sqrt_##T(T x) { return sqrt##S(x); }    PD_INLINE T pd_tanh_##T(T x) { return tanh##S(x); }           \
  PD_INLINE T pd_erf_##T(T x) { return erf##S(x); }      PD_INLINE T pd_sin_##T(T x) { return sin##S(x); }             \
  PD_INLINE T pd_cos_##T(T x) { return cos##S(x); }      PD_INLINE T pd_abs_##T(T x) { return fabs##S(x); }            \
  PD_INLINE T pd_floor_##T(T x) { return floor##S(x); }  PD_INLINE T pd_ceil_##T(T x) { return ceil##S(x); }           \
  PD_INLINE T pd_rint_##T(T x) { return nearbyint##S(x); } PD_INLINE T pd_pow_##T(T a, T b) { return pow##S(a, b); }   \
  PD_INLINE T pd_expm1_##T(T x) { return expm1##S(x); }  PD_INLINE T pd_log1p_##T(T x) { return log1p##S(x); }         \
  PD_INLINE T pd_erfc_##T(T x) { return erfc##S(x); }                                                                 \
  PD_INLINE T pd_atan2_##T(T y, T x) { return atan2##S(y, x); }                                                       \
  PD_INLINE T pd_fmod_##T(T a, T b) { return fmod##S(a, b); }                                                         \
  PD_INLINE T pd_mod_##T(T a, T b) { T r = fmod##S(a, b); return r != 0 && ((r < 0) != (b < 0)) ? r + b : r; }         \
  PD_INLINE T pd_sign_##T(T x) { return x != x ? x : (T)((x > 0) - (x < 0)); }                                         \
  PD_INLINE T pd_sigmoid_##T(T x) { T e = exp##S(-fabs##S(x)); return (x < 0 ? e : 1) / (1 + e); }
PD_FLOATS(f32, f) PD_FLOATS(f64, )

#include "pd_math.h"

PD_INLINE vi32 pd_abs_vi32(vi32 x) { return vsel_i32(x < 0, -x, x); }
PD_INLINE vi64 pd_abs_vi64(vi64 x) { return vsel_i64(__builtin_convertvector(x < 0, vi32), -x, x); }

/* horizontal reductions: a tree of halves, lane l with lane l + w */
#if defined(__GNUC__) && (PD_W == 16 || PD_W == 8 || PD_W == 4)
#define PD_LANES PD_NUMBERS

/* lane l is v[l / m * m], the first element of every group of m */
#if defined(PD_LANES)
#define PD_SPREAD(m)                                                                                                  \
  PD_INLINE vf32 vspread##m##_f32(vf32 v) { return __builtin_shuffle(v, (vi32)PD_LANES & -m); }
/* v % m, for 0 <= v < 2 * PD_W and 0 < m <= PD_W */
PD_INLINE vi32 vremainder_i32(vi32 v, i32 m) { return v - ((v * (65536 / m + 1)) >> 16) * m; }
/* lane l is v[(l + phase) / m], 0 <= phase < m <= PD_W: every element m times. The product is exact below 2 * PD_W */
PD_INLINE vf32 vrepeat_f32(vf32 v, i64 m, i64 phase) {
  return __builtin_shuffle(v, (((vi32)PD_LANES + (i32)phase) * (i32)(65536 / m + 1)) >> 16);
}
#else
#define PD_SPREAD(m)                                                                                                  \
  PD_INLINE vf32 vspread##m##_f32(vf32 v) { vf32 r; for (int l = 0; l < PD_W; ++l) r[l] = v[l / m * m]; return r; }
PD_INLINE vi32 vremainder_i32(vi32 v, i32 m) { return v % m; }
PD_INLINE vf32 vrepeat_f32(vf32 v, i64 m, i64 phase) {
  vf32 r;
  for (int l = 0; l < PD_W; ++l) r[l] = v[(l + phase) / m];
  return r;
}
#endif
PD_SPREAD(2) PD_SPREAD(4) PD_SPREAD(8)
#define PD_HALVE(T, V, M, NAME, OP)                                                                                   \
  PD_INLINE T pd_h##NAME##_##V(V v) {                                                                                  \
    const M lanes = PD_LANES;                                                                                         \
    V u;                                                                                                              \
    if (PD_W > 8) { u = __builtin_shuffle(v, (lanes + 8) & (PD_W - 1)); v = OP; }                                      \
    if (PD_W > 4) { u = __builtin_shuffle(v, (lanes + 4) & (PD_W - 1)); v = OP; }                                      \
    u = __builtin_shuffle(v, (lanes + 2) & (PD_W - 1)); v = OP;                                                        \
    u = __builtin_shuffle(v, (lanes + 1) & (PD_W - 1)); v = OP;                                                        \
    return v[0];                                                                                                      \
  }
#else
#define PD_HALVE(T, V, M, NAME, OP)                                                                                   \
  PD_INLINE T pd_h##NAME##_##V(V v) {                                                                                  \
    V u = v;                                                                                                          \
    for (int w = PD_W / 2; w; w /= 2) { for (int l = 0; l < w; ++l) u[l] = v[l + w]; v = OP; }                         \
    return v[0];                                                                                                      \
  }
#endif
#define PD_HORIZONTAL(T, V, M)                                                                                        \
  PD_HALVE(T, V, M, sum, v + u) PD_HALVE(T, V, M, prod, v * u)                                                         \
  PD_HALVE(T, V, M, max, pd_max_##V(v, u)) PD_HALVE(T, V, M, min, pd_min_##V(v, u))
#if defined(__AVX512F__) && PD_W == 16
/* the last two steps on 16 bytes; a row waits for them. An extreme of lanes of which one is NaN is that NaN */
typedef f32 pd_quarter __attribute__((vector_size(16)));
typedef i32 pd_places __attribute__((vector_size(16)));
#define PD_QUARTER(NAME, OP, WIDE, FIRST)                                                                             \
  PD_INLINE f32 pd_h##NAME##_vf32(vf32 v) {                                                                            \
    const vi32 lanes = PD_LANES;                                                                                      \
    FIRST                                                                                                             \
    vf32 u = __builtin_shuffle(v, (lanes + 8) & 15); v = WIDE;                                                         \
    u = __builtin_shuffle(v, (lanes + 4) & 15); v = WIDE;                                                              \
    pd_quarter q, t;                                                                                                  \
    memcpy(&q, &v, sizeof q);                                                                                         \
    t = __builtin_shuffle(q, (pd_places){2, 3, 0, 1}); q = OP;                                                 \
    t = __builtin_shuffle(q, (pd_places){1, 0, 3, 2}); q = OP;                                                 \
    return q[0];                                                                                                      \
  }
#define PD_NAN if (__builtin_expect(__builtin_ia32_cmpps512_mask(v, v, 3, 0xffff, 4), 0)) return NAN;
PD_QUARTER(sum, q + t, v + u, ) PD_QUARTER(prod, q * t, v * u, )
PD_QUARTER(max, __builtin_ia32_maxps(q, t), vgreater(v, u), PD_NAN)
PD_QUARTER(min, __builtin_ia32_minps(q, t), vless(v, u), PD_NAN)
#else
PD_HORIZONTAL(f32, vf32, vi32)
#endif
PD_HORIZONTAL(i32, vi32, vi32)
PD_HORIZONTAL(i64, vi64, vi64)
PD_HORIZONTAL(f64, vf64, vi64)
PD_HALVE(u8, vu8, vu8, max, pd_max_vu8(v, u)) PD_HALVE(u8, vu8, vu8, min, pd_min_vu8(v, u))
PD_HALVE(i8, vi8, vi8, max, pd_max_vi8(v, u)) PD_HALVE(i8, vi8, vi8, min, pd_min_vi8(v, u))

/* d[at + k] = the sum of all lanes of the k-th of eight vectors: halves of 16 lanes, then each four lanes, then both */
#if defined(PD_LANES) && PD_W >= 8 && !defined(PD_CHECKED)
typedef f32 pd_eight __attribute__((vector_size(32)));
typedef i32 pd_eight_places __attribute__((vector_size(32)));
#if PD_W == 16
PD_INLINE pd_eight pd_halves(vf32 v) {
#if __GNUC__ >= 12 || defined(__clang__)
  return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  pd_eight half[2];
  memcpy(half, &v, sizeof v);
  return half[0] + half[1];
#endif
}
#else
PD_INLINE pd_eight pd_halves(vf32 v) { return v; }
#endif
PD_INLINE pd_eight pd_pairs(pd_eight a, pd_eight b) {
  return __builtin_shuffle(a, b, (pd_eight_places){0, 8, 1, 9, 4, 12, 5, 13})
       + __builtin_shuffle(a, b, (pd_eight_places){2, 10, 3, 11, 6, 14, 7, 15});
}
PD_INLINE pd_eight pd_fours(pd_eight a, pd_eight b) {
  return __builtin_shuffle(a, b, (pd_eight_places){0, 1, 8, 9, 4, 5, 12, 13})
       + __builtin_shuffle(a, b, (pd_eight_places){2, 3, 10, 11, 6, 7, 14, 15});
}
PD_INLINE void pd_sums_f32(f32 *d, i64 at, vf32 v0, vf32 v1, vf32 v2, vf32 v3, vf32 v4, vf32 v5, vf32 v6, vf32 v7) {
  pd_eight a = pd_fours(pd_pairs(pd_halves(v0), pd_halves(v1)), pd_pairs(pd_halves(v2), pd_halves(v3)));
  pd_eight b = pd_fours(pd_pairs(pd_halves(v4), pd_halves(v5)), pd_pairs(pd_halves(v6), pd_halves(v7)));
  a = __builtin_shuffle(a, b, (pd_eight_places){0, 1, 2, 3, 8, 9, 10, 11})
    + __builtin_shuffle(a, b, (pd_eight_places){4, 5, 6, 7, 12, 13, 14, 15});
  memcpy(d + at, &a, sizeof a);
}
#else
PD_INLINE f32 pd_sum_four(vf32 v, int l) {
  f32 x[4];
  for (int k = 0; k < 4; ++k) x[k] = PD_W == 16 ? v[l + k] + v[(l + k + 8) % PD_W] : v[l + k];
  return (x[0] + x[2]) + (x[1] + x[3]);
}
PD_INLINE f32 pd_sum_vf32(vf32 v) { return PD_W > 4 ? pd_sum_four(v, 0) + pd_sum_four(v, 4 % PD_W) : pd_sum_four(v, 0); }
#define pd_sums_f32(d, at, v0, v1, v2, v3, v4, v5, v6, v7)                                                             \
  do {                                                                                                                \
    vf32 pd_v[8] = {v0, v1, v2, v3, v4, v5, v6, v7};                                                                   \
    for (int pd_k = 0; pd_k < 8; ++pd_k) PD_PUT(d, (at) + pd_k, pd_sum_vf32(pd_v[pd_k]));                              \
  } while (0)
#endif

/* d[at + PD_W*c + l] = b[i + l*s + c] for columns c < m, lanes l < n (0 in the other lanes): a block transposed in
   registers, in log2(PD_W) steps */
#if defined(PD_LANES) && !defined(PD_CHECKED)
#define PD_MEET(S, LOW, FAR)                                                                                          \
  if (S < PD_W) {                                                                                                     \
    const vi32 lanes = PD_LANES, low = LOW, high = low + FAR;                                                          \
    _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) if (!(r & S)) {                                            \
      vf32 a = v[r], b = v[(r + S) & (PD_W - 1)];                                                                      \
      v[r] = __builtin_shuffle(a, b, low);                                                                            \
      v[(r + S) & (PD_W - 1)] = __builtin_shuffle(a, b, high);                                                         \
    }                                                                                                                 \
  }
#define PD_HALF (PD_W / 2)
/* blocks of 4 x 4 inside of four lanes, then these: shuffles that need no lanes from memory */
PD_INLINE void pd_transpose_block(vf32 *restrict v) {
  PD_MEET(1, (lanes & ~3) + (lanes >> 1 & 1) + (lanes & 1) * PD_W, 2)
  PD_MEET(2, (lanes & ~3) + (lanes & 1) + (lanes >> 1 & 1) * PD_W, 2)
  _Pragma("GCC unroll 4") for (int r = 1; r < PD_W; r += 4) { vf32 x = v[r]; v[r] = v[r + 1]; v[r + 1] = x; }
  PD_MEET(4, (lanes & 3) + (lanes & (PD_HALF - 4)) * 2 + (((lanes & PD_HALF) != 0) & PD_W), 4)
  PD_MEET(8, (lanes & 3) + (lanes & (PD_HALF - 4)) * 2 + (((lanes & PD_HALF) != 0) & PD_W), 4)
}
static __attribute__((noinline, unused)) void pd_transpose_f32(f32 *d, i64 at, const f32 *b, i64 i, i64 s, i64 n, i64 m) {
  vf32 v[PD_W];
  if (n >= PD_W && m >= PD_W) {
    _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) v[r] = vload_f32(b, i + r * s);
    pd_transpose_block(v);
    _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) vstore_f32(d, at + r * PD_W, v[r]);
    return;
  }
  _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) v[r] = r < n ? vloadm_f32(b, i + r * s, m) : (vf32){0};
  pd_transpose_block(v);
  _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) if (r < m) vstore_f32(d, at + r * PD_W, v[r]);
}
/* the same to rows p elements apart; only live lanes of them are written, and whole lines may stream */
static __attribute__((noinline, unused)) void pd_transpose_rows_f32(
    f32 *restrict d, i64 at, const f32 *restrict b, i64 i, i64 s, i64 n, i64 m, i64 p, i64 stream) {
  vf32 v[PD_W];
  if (n >= PD_W && m >= PD_W) {
    _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) v[r] = vload_f32(b, i + r * s);
    pd_transpose_block(v);
    if (sizeof *v == 64 && stream > 0) {
      _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) vstream_f32(d, at + r * p, v[r], stream);
      return;
    }
    _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) vstore_f32(d, at + r * p, v[r]);
    return;
  }
  _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) v[r] = r < n ? vloadm_f32(b, i + r * s, m) : (vf32){0};
  pd_transpose_block(v);
  _Pragma("GCC unroll 16") for (int r = 0; r < PD_W; ++r) if (r < m) vstorem_f32(d, at + r * p, v[r], n);
}
#else                                                      /* a macro: checked accesses know buffers by their names */
#define pd_transpose_rows_f32(d, at, b, i, s, n, m, p, stream)                                                         \
  for (i64 pd_c = 0; pd_c < PD_W && pd_c < (m); ++pd_c)                                                                \
    vstorem_f32(d, (at) + pd_c * (p), vloads_f32(b, (i) + pd_c, s, PD_MIN(n, PD_W)), PD_MIN(n, PD_W))
#define pd_transpose_f32(d, at, b, i, s, n, m)                                                                         \
  for (i64 pd_c = 0; pd_c < PD_W && pd_c < (m); ++pd_c)                                                                \
    vstore_f32(d, (at) + pd_c * PD_W, vloads_f32(b, (i) + pd_c, s, PD_MIN(n, PD_W)))
#endif
#include "pd_storage.h"
#include "pd_order.h"
#include "pd_amx.h"
#endif
