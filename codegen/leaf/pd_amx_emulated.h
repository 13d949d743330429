/* The tile instructions of AMX in C, as Intel's manual has them (SDM volume 2: LDTILECFG, TILELOADD, TDPBF16PS, TDPBUSD), for
   machines without the unit. Strict: what faults there stops here with a message, and so do shapes loaded over others, which a
   kernel did not release. Each thread has tiles of its own. Only for tests. */
#if !defined(PD_AMX_EMULATED_H) && defined(PD_AMX_EMULATED)
#define PD_AMX_EMULATED_H
#include <stdio.h>
#include <stdlib.h>

typedef struct { int on, rows[8], bytes[8]; u8 tile[8][16][64]; } pd_amx_state;
static _Thread_local pd_amx_state pd_amx;

#ifdef PD_CHECKED
void pdc_fault(const char *what);
#define PD_AMX_FAULT(what) pdc_fault(what)
#else
#define PD_AMX_FAULT(what) do { fprintf(stderr, "AMX emulation: %s\n", what); abort(); } while (0)
#endif
#define PD_AMX_NEEDS(condition, what) do { if (!(condition)) PD_AMX_FAULT(what); } while (0)

static __attribute__((noinline, unused)) void pd_amx_config(const void *from) {
  const u8 *c = (const u8 *)from;
  int on = pd_amx.on, zeros = 1;
  memset(&pd_amx, 0, sizeof pd_amx);
  PD_AMX_NEEDS(!on, "shapes of tiles are loaded over others, which were not released");
  for (int k = 1; k < 64; ++k) zeros &= !c[k] || (k >= 16 && k < 32) || (k >= 48 && k < 56);
  PD_AMX_NEEDS(c[0] == 1 && zeros, "the shapes of tiles have no palette 1, or something where zeros must be");
  for (int t = 0; t < 8; ++t) {
    int bytes = c[16 + 2 * t] | c[17 + 2 * t] << 8, rows = c[48 + t];
    PD_AMX_NEEDS(rows <= 16 && bytes <= 64 && !rows == !bytes, "a tile has more than 16 rows of 64 bytes, or only one of the two");
    pd_amx.rows[t] = rows, pd_amx.bytes[t] = bytes;
  }
  pd_amx.on = 1;
}
PD_INLINE void pd_amx_usable(int t) {
  PD_AMX_NEEDS(pd_amx.on, "a tile is used and none has a shape");
  PD_AMX_NEEDS(t >= 0 && t < 8 && pd_amx.rows[t], "a tile without a shape is used");
}
static __attribute__((noinline, unused)) void pd_amx_clear(int t) {
  pd_amx_usable(t);
  memset(pd_amx.tile[t], 0, sizeof pd_amx.tile[t]);
}
static __attribute__((noinline, unused)) void pd_amx_read(int t, const void *from, i64 stride) {
  pd_amx_clear(t);
  for (int r = 0; r < pd_amx.rows[t]; ++r) memcpy(pd_amx.tile[t][r], (const char *)from + r * stride, pd_amx.bytes[t]);
}
static __attribute__((noinline, unused)) void pd_amx_write(int t, void *to, i64 stride) {
  pd_amx_usable(t);
  for (int r = 0; r < pd_amx.rows[t]; ++r) memcpy((char *)to + r * stride, pd_amx.tile[t][r], pd_amx.bytes[t]);
}
/* subnormal numbers are 0, of operands and of results */
PD_INLINE f32 pd_amx_flushed(f32 x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
PD_INLINE f32 pd_amx_bf16(const u8 *p) {
  u16 h;
  memcpy(&h, p, sizeof h);
  return pd_amx_flushed(pd_float_of((u32)h << 16));
}
static __attribute__((noinline, unused)) void pd_amx_multiply(int d, int a, int b, int floats) {
  pd_amx_usable(d), pd_amx_usable(a), pd_amx_usable(b);
  PD_AMX_NEEDS(d != a && d != b && a != b, "the tiles of a product are not three");
  PD_AMX_NEEDS(pd_amx.bytes[a] % 4 == 0 && pd_amx.bytes[d] % 4 == 0, "rows of a tile are no whole words");
  PD_AMX_NEEDS(pd_amx.rows[d] == pd_amx.rows[a] && pd_amx.bytes[d] == pd_amx.bytes[b] && pd_amx.bytes[a] == 4 * pd_amx.rows[b],
               "the shapes of a product's tiles do not fit");
  int words = pd_amx.bytes[a] / 4;
  for (int m = 0; m < pd_amx.rows[d]; ++m)
    for (int n = 0; n < pd_amx.bytes[d] / 4; ++n) {
      u8 *at = &pd_amx.tile[d][m][4 * n];
      if (floats) {                                  /* even and odd steps have a sum each, of one rounding a step */
        f32 s, even = 0, odd = 0;
        for (int k = 0; k < words; ++k) {
          const u8 *x = &pd_amx.tile[a][m][4 * k], *y = &pd_amx.tile[b][k][4 * n];
          even = pd_amx_flushed(fmaf(pd_amx_bf16(x), pd_amx_bf16(y), even));
          odd = pd_amx_flushed(fmaf(pd_amx_bf16(x + 2), pd_amx_bf16(y + 2), odd));
        }
        memcpy(&s, at, sizeof s);
        s = pd_amx_flushed(pd_amx_flushed(s) + pd_amx_flushed(even + odd));
        memcpy(at, &s, sizeof s);
      } else {
        u32 s;
        memcpy(&s, at, sizeof s);
        for (int k = 0; k < 4 * words; ++k) s += (u32)(pd_amx.tile[a][m][k] * (i8)pd_amx.tile[b][k / 4][4 * n + k % 4]);
        memcpy(at, &s, sizeof s);
      }
    }
}
#define _tile_loadconfig(from) pd_amx_config(from)
#define _tile_release() ((void)(pd_amx.on = 0))
#define _tile_zero(t) pd_amx_clear(t)
#define _tile_loadd(t, from, stride) pd_amx_read(t, from, stride)
#define _tile_stored(t, to, stride) pd_amx_write(t, to, stride)
#define _tile_dpbf16ps(d, a, b) pd_amx_multiply(d, a, b, 1)
#define _tile_dpbusd(d, a, b) pd_amx_multiply(d, a, b, 0)
#endif
