/* The matrix unit of a processor (AMX): what C has no words for. Eight tiles of up to 16 rows of 16 words of 32 bits: 0 to 3
   are sums, 4 and 5 rows of a product's left operand, 6 and 7 words of its columns, [word][column]. Elements of a tile's rows
   are `s` apart; a checked build looks at each of its rows and words. Bytes are unsigned by signed, sums of theirs wrap. */
#if !defined(PD_AMX_H) && (defined(__AMX_TILE__) || defined(PD_AMX_EMULATED))
#define PD_AMX_H
#include "pd_cpu.h"
#if defined(PD_AMX_EMULATED)
#include "pd_amx_emulated.h"
#else
/* immintrin.h has the same, in 62,000 lines that every unit would parse */
#define _tile_loadconfig(p) __asm__ volatile("ldtilecfg %0" : : "m"(*(const u8(*)[64])(p)))
#define _tile_release() __asm__ volatile("tilerelease")
#define _tile_zero(t) __asm__ volatile("tilezero %%tmm" #t :)
#define _tile_loadd(t, p, s)                                                                                           \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"((const void *)(p)), "r"((i64)(s)))
#define _tile_stored(t, p, s)                                                                                          \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"((void *)(p)), "r"((i64)(s)) : "memory")
#define _tile_dpbf16ps(t, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #t :)
#define _tile_dpbusd(t, a, b) __asm__ volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #t :)
#endif
/* the intrinsics do not say that they read memory */
#define PD_AMX_MEMORY(p) __asm__ volatile("" : : "r"(p) : "memory")

/* shapes of all tiles, for products of so many rows and words: until pd_amx_end, by the thread that calls it */
PD_INLINE void pd_amx_begin(i64 rows, i64 words) {
  u8 shape[64] __attribute__((aligned(64))) = {1};
  for (int t = 0; t < 8; ++t) {
    shape[16 + 2 * t] = (u8)(t == 4 || t == 5 ? 4 * words : 64);
    shape[48 + t] = (u8)(t < 6 ? rows : words);
  }
  PD_AMX_MEMORY(shape);
  _tile_loadconfig(shape);
}
#define pd_amx_end() _tile_release()
#define pd_amx_zero(t) _tile_zero(t)
#define pd_amx_add_bf16(t, a, b) _tile_dpbf16ps(t, a, b)
#define pd_amx_add_quads(t, a, b) _tile_dpbusd(t, a, b)

#ifdef PD_CHECKED
#define pd_amx_load(t, b, i, s, rows, words)                                                                           \
  do {                                                                                                                \
    for (i64 pd_r = 0; pd_r < (rows); ++pd_r)                                                                          \
      for (i64 pd_c = 0; pd_c < (words) * 4 / (i64)sizeof *(b); ++pd_c) (void)PD_AT(b, (i) + pd_r * (s) + pd_c);       \
    _tile_loadd(t, (b) + (i), (s) * (i64)sizeof *(b));                                                                 \
  } while (0)
#define pd_amx_store(t, b, i, s, rows, words)                                                                          \
  do {                                                                                                                \
    __typeof__(*(b)) pd_tile[16][16];                                                                                 \
    _tile_stored(t, pd_tile, 64);                                                                                      \
    for (i64 pd_r = 0; pd_r < (rows); ++pd_r)                                                                          \
      for (i64 pd_c = 0; pd_c < (words); ++pd_c) PD_PUT(b, (i) + pd_r * (s) + pd_c, pd_tile[pd_r][pd_c]);              \
  } while (0)
#else
#define pd_amx_load(t, b, i, s, rows, words)                                                                           \
  do { PD_AMX_MEMORY(b); _tile_loadd(t, (b) + (i), (s) * (i64)sizeof *(b)); } while (0)
#define pd_amx_store(t, b, i, s, rows, words) _tile_stored(t, (b) + (i), (s) * (i64)sizeof *(b))
#endif
#endif
