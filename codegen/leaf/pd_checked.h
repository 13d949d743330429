/* Checked memory for kernels compiled with PD_CHECKED: the leaves of pd_cpu.h, every access through pd_checked.c.

   An access out of bounds, a read of an element that was never written, a write to what another task or an earlier
   kernel has written, a second write without a read in between, a read of what another task wrote, and a store of a
   value made from an unset register end the call with a message. Masked lanes touch nothing. */
#ifndef PD_CHECKED_H
#define PD_CHECKED_H

const void *pdc_read(const void *b, i64 i, i64 size, const char *name);
void pdc_write(void *b, i64 i, const void *value, i64 size, int kind, const char *name);
void pdc_lanes(const char *name, i64 stride, i64 lanes);
void *pdc_scratch(void *from, i64 count, i64 size, const char *name);
void pdc_stack(void *b, i64 count, i64 size, const char *name);

enum { PDC_OTHER, PDC_F32, PDC_F64 };
#define PDC_KIND(x) _Generic((x), f32: PDC_F32, f64: PDC_F64, default: PDC_OTHER)

#define PD_AT(b, i) (*(__typeof__((b)[0]) const *)pdc_read(b, i, sizeof (b)[0], #b))
#define PD_PUT(b, i, x)                                                                                               \
  do { __typeof__((b)[0]) pdc_x = (x); pdc_write(b, i, &pdc_x, sizeof pdc_x, PDC_KIND(pdc_x), #b); } while (0)
#define PD_WORD(b, i) pdc_word(b, i, sizeof (b)[0], #b)
PD_INLINE i32 pdc_word(const void *b, i64 i, i64 size, const char *name) {
  i32 w;
  for (i64 k = 0; k < (i64)sizeof w / size; ++k) memcpy((char *)&w + k * size, pdc_read(b, i + k, size, name), size);
  return w;
}
#define PD_STACK(T, b, n) T b[n] __attribute__((aligned(64))); pdc_stack(b, n, sizeof(T), #b)
#define pd_written_soon(b, i, s) ((void)0)
/* elements that the task may have written and now replaces: as if it had read them */
#define pd_again(b, i, s, n) ((void)({ for (i64 pdc_k = 0; pdc_k < (n); ++pdc_k) (void)PD_AT(b, (i) + pdc_k * (s)); }))
#define PD_SCRATCH(T, b, n, from) ((T *)pdc_scratch(from, n, sizeof(T), #b))

/* a NaN whose payload arithmetic hands on, so that a store sees what was made from it */
PD_INLINE f32 pdc_undefined_f32(void) { u32 u = 0x7fe5a5a5u; f32 x; memcpy(&x, &u, sizeof x); return x; }
PD_INLINE f64 pdc_undefined_f64(void) { u64 u = 0x7ffca5a5a5a5a5a5u; f64 x; memcpy(&x, &u, sizeof x); return x; }
#define PD_UNDEFINED(T)                                                                                               \
  _Generic((T)0, f32: pdc_undefined_f32(), f64: pdc_undefined_f64(), default: (T)0xaaaaaaaaaaaaaaaau)

#define PD_MEMORY(T, V)                                                                                               \
  static __attribute__((noinline, unused)) V pdc_vload_##T(const T *b, i64 i, i64 s, i64 n, const char *name) {        \
    V v = {0};                                                                                                        \
    for (i64 l = 0; l < PD_W && l < n; ++l) v[l] = *(const T *)pdc_read(b, i + l * s, sizeof *b, name);                \
    return v;                                                                                                         \
  }                                                                                                                   \
  static __attribute__((noinline, unused)) void pdc_vstore_##T(T *b, i64 i, i64 s, V v, i64 n, const char *name) {     \
    pdc_lanes(name, s, n);                                                                                            \
    for (i64 l = 0; l < PD_W && l < n; ++l) { T x = v[l]; pdc_write(b, i + l * s, &x, sizeof x, PDC_KIND(x), name); }  \
  }
#define PD_GUARDED(T, V)                                                                                              \
  static __attribute__((noinline, unused)) V pdc_vloadg_##T(const T *b, i64 i, i64 s, vb c, const char *name) {        \
    V v = {0};                                                                                                        \
    for (i64 l = 0; l < PD_W; ++l) if (c[l]) v[l] = *(const T *)pdc_read(b, i + l * s, sizeof *b, name);               \
    return v;                                                                                                         \
  }
PD_GUARDED(f32, vf32)
PD_GUARDED(f64, vf64)
PD_GUARDED(u8, vu8)
PD_GUARDED(i8, vi8)
PD_MEMORY(f32, vf32)
PD_MEMORY(i32, vi32)
PD_MEMORY(i64, vi64)
PD_MEMORY(f64, vf64)
PD_MEMORY(u8, vu8)
PD_MEMORY(i8, vi8)

static __attribute__((noinline, unused)) hf32 pdc_hload_f32(const f32 *b, i64 i, i64 s, i64 n, const char *name) {
  hf32 v = {0};
  for (i64 l = 0; l < PD_W / 2 && l < n; ++l) v[l] = *(const f32 *)pdc_read(b, i + l * s, sizeof *b, name);
  return v;
}
static __attribute__((noinline, unused)) void pdc_hstore_f32(f32 *b, i64 i, hf32 v, const char *name) {
  for (i64 l = 0; l < PD_W / 2; ++l) { f32 x = v[l]; pdc_write(b, i + l, &x, sizeof x, PDC_KIND(x), name); }
}
PD_INLINE void pd_in_memory_f32(const f32 *b, i64 i) { (void)b; (void)i; }
PD_INLINE void pd_prefetch_f32(const f32 *b, i64 i) { (void)b; (void)i; }
PD_INLINE void pd_prefetch_far_f32(const f32 *b, i64 i) { (void)b; (void)i; }
PD_INLINE void pd_prefetch_write_f32(const f32 *b, i64 i) { (void)b; (void)i; }
PD_INLINE void pd_prefetch_i32(const i32 *b, i64 i) { (void)b; (void)i; }
PD_INLINE void pd_prefetch_far_i32(const i32 *b, i64 i) { (void)b; (void)i; }

#define hload_f32(b, i) pdc_hload_f32(b, i, 1, PD_W / 2, #b)
#define hstore_f32(b, i, v) pdc_hstore_f32(b, i, v, #b)
#define hloadm_f32(b, i, n) pdc_hload_f32(b, i, 1, n, #b)
#define hloads_f32(b, i, s, n) pdc_hload_f32(b, i, s, n, #b)
#define vload_f32(b, i) pdc_vload_f32(b, i, 1, PD_W, #b)
#define vloadg_f32(b, i, c) pdc_vloadg_f32(b, i, 1, c, #b)
#define vloadg_f64(b, i, c) pdc_vloadg_f64(b, i, 1, c, #b)
#define vloadgs_f32(b, i, s, c) pdc_vloadg_f32(b, i, s, c, #b)
#define vloadgs_f64(b, i, s, c) pdc_vloadg_f64(b, i, s, c, #b)
#define vload_i32(b, i) pdc_vload_i32(b, i, 1, PD_W, #b)
#define vload_i64(b, i) pdc_vload_i64(b, i, 1, PD_W, #b)
#define vload_f64(b, i) pdc_vload_f64(b, i, 1, PD_W, #b)
#define vload_u8(b, i) pdc_vload_u8(b, i, 1, PD_W, #b)
#define vload_i8(b, i) pdc_vload_i8(b, i, 1, PD_W, #b)
#define vloadg_u8(b, i, c) pdc_vloadg_u8(b, i, 1, c, #b)
#define vloadg_i8(b, i, c) pdc_vloadg_i8(b, i, 1, c, #b)
#define vloadgs_u8(b, i, s, c) pdc_vloadg_u8(b, i, s, c, #b)
#define vloadgs_i8(b, i, s, c) pdc_vloadg_i8(b, i, s, c, #b)
#define vloadm_f32(b, i, n) pdc_vload_f32(b, i, 1, n, #b)
#define vloadm_i32(b, i, n) pdc_vload_i32(b, i, 1, n, #b)
#define vloadm_i64(b, i, n) pdc_vload_i64(b, i, 1, n, #b)
#define vloadm_f64(b, i, n) pdc_vload_f64(b, i, 1, n, #b)
#define vloadm_u8(b, i, n) pdc_vload_u8(b, i, 1, n, #b)
#define vloadm_i8(b, i, n) pdc_vload_i8(b, i, 1, n, #b)
#define vloads_f32(b, i, s, n) pdc_vload_f32(b, i, s, n, #b)
#define vloads_i32(b, i, s, n) pdc_vload_i32(b, i, s, n, #b)
#define vloads_i64(b, i, s, n) pdc_vload_i64(b, i, s, n, #b)
#define vloads_f64(b, i, s, n) pdc_vload_f64(b, i, s, n, #b)
#define vloads_u8(b, i, s, n) pdc_vload_u8(b, i, s, n, #b)
#define vloads_i8(b, i, s, n) pdc_vload_i8(b, i, s, n, #b)
#define vstore_f32(b, i, v) pdc_vstore_f32(b, i, 1, v, PD_W, #b)
#define vstream_f32(b, i, v, s) ((void)(s), vstore_f32(b, i, v))
#define vstore_i32(b, i, v) pdc_vstore_i32(b, i, 1, v, PD_W, #b)
#define vstore_i64(b, i, v) pdc_vstore_i64(b, i, 1, v, PD_W, #b)
#define vstore_f64(b, i, v) pdc_vstore_f64(b, i, 1, v, PD_W, #b)
#define vstore_u8(b, i, v) pdc_vstore_u8(b, i, 1, v, PD_W, #b)
#define vstore_i8(b, i, v) pdc_vstore_i8(b, i, 1, v, PD_W, #b)
#define vstorem_f32(b, i, v, n) pdc_vstore_f32(b, i, 1, v, n, #b)
#define vstorem_i32(b, i, v, n) pdc_vstore_i32(b, i, 1, v, n, #b)
#define vstorem_i64(b, i, v, n) pdc_vstore_i64(b, i, 1, v, n, #b)
#define vstorem_f64(b, i, v, n) pdc_vstore_f64(b, i, 1, v, n, #b)
#define vstorem_u8(b, i, v, n) pdc_vstore_u8(b, i, 1, v, n, #b)
#define vstorem_i8(b, i, v, n) pdc_vstore_i8(b, i, 1, v, n, #b)
#define vstores_f32(b, i, s, v, n) pdc_vstore_f32(b, i, s, v, n, #b)
#define vstores_i32(b, i, s, v, n) pdc_vstore_i32(b, i, s, v, n, #b)
#define vstores_i64(b, i, s, v, n) pdc_vstore_i64(b, i, s, v, n, #b)
#define vstores_f64(b, i, s, v, n) pdc_vstore_f64(b, i, s, v, n, #b)
#define vstores_u8(b, i, s, v, n) pdc_vstore_u8(b, i, s, v, n, #b)
#define vstores_i8(b, i, s, v, n) pdc_vstore_i8(b, i, s, v, n, #b)
#endif
