/* pd_clang.h: gcc's names of instructions for clang (and zig cc, which is clang), so that one text of pd_cpu.h serves both.
   Where clang renamed or retyped a builtin between its versions 12 and 22 the instruction itself is written. A permutation
   whose lanes are constants becomes one instruction in either. */
#if !defined(PD_CLANG_H) && defined(__clang__)
#define PD_CLANG_H

#define __builtin_shuffle pd_shuffle
#define PD_SHUFFLES(V, M)                                                                                             \
  PD_INLINE __attribute__((overloadable)) V pd_shuffle(V a, V b, M m) {                                                \
    const int n = (int)(sizeof a / sizeof a[0]);                                                                       \
    V r = a;                                                                                                          \
    _Pragma("clang loop unroll(full)") for (int l = 0; l < n; ++l) r[l] = m[l] & n ? b[m[l] & (n - 1)] : a[m[l] & (n - 1)]; \
    return r;                                                                                                         \
  }                                                                                                                   \
  PD_INLINE __attribute__((overloadable)) V pd_shuffle(V a, M m) { return pd_shuffle(a, a, m); }
PD_SHUFFLES(vf32, vi32) PD_SHUFFLES(vi32, vi32) PD_SHUFFLES(vi64, vi64) PD_SHUFFLES(vf64, vi64) PD_SHUFFLES(vu8, vu8) PD_SHUFFLES(vi8, vi8)
#if PD_W == 16
typedef f32 pd_f32x8 __attribute__((vector_size(32)));
typedef i32 pd_i32x8 __attribute__((vector_size(32)));
typedef f32 pd_f32x4 __attribute__((vector_size(16)));
typedef i32 pd_i32x4 __attribute__((vector_size(16)));
PD_SHUFFLES(pd_f32x8, pd_i32x8) PD_SHUFFLES(pd_f32x4, pd_i32x4)
#endif

/* v = an instruction of two operands, or of one */
#define pd_two(T, name, a, b) ({ T pd_y; __asm__(name " %2, %1, %0" : "=v"(pd_y) : "v"(a), "v"(b)); pd_y; })
#define pd_one(T, name, a) ({ T pd_y; __asm__(name " %1, %0" : "=v"(pd_y) : "v"(a)); pd_y; })
#define pd_add(T, name, s, a, b) ({ T pd_y = (s); __asm__(name " %2, %1, %0" : "+v"(pd_y) : "v"(a), "v"(b)); pd_y; })

#if defined(__AVX512F__) && PD_W == 16
/* lanes whose bit is set in m come from the first */
#define pd_where(m, a, b) __builtin_ia32_selectps_512(m, a, b)
#define __builtin_ia32_blendmps_512_mask(b, a, m) pd_where(m, a, b)
#define __builtin_ia32_movaps512_mask(a, b, m) pd_where(m, a, b)
#define __builtin_ia32_maxps512_mask(a, b, from, m, rounding) pd_where(m, __builtin_ia32_maxps512(a, b, rounding), from)
#define __builtin_ia32_minps512_mask(a, b, from, m, rounding) pd_where(m, __builtin_ia32_minps512(a, b, rounding), from)
#define __builtin_ia32_permvarsf512_mask(table, at, from, m) pd_where(m, __builtin_ia32_permvarsf512(table, at), from)
#define __builtin_ia32_pmaddwd512_mask(a, b, from, m) pd_two(vi32, "vpmaddwd", a, b)
#define __builtin_ia32_vpdpwssd_v16si(s, a, b) pd_add(vi32, "vpdpwssd", s, a, b)
#define __builtin_ia32_vpdpbusd_v16si(s, a, b) pd_add(vi32, "vpdpbusd", s, a, b)
#define __builtin_ia32_cvtneps2bf16_v16sf(x) pd_one(hu32, "vcvtneps2bf16", x)
#define __builtin_ia32_dpbf16ps_v16sf(s, a, b) pd_add(vf32, "vdpbf16ps", s, a, b)
#endif
#if defined(__AVXVNNI__) && PD_W == 8
#define __builtin_ia32_vpdpbusd_v8si(s, a, b) pd_add(vi32, "{vex} vpdpbusd", s, a, b)
#endif
#if defined(__F16C__)
typedef f32 pd_f32s8 __attribute__((vector_size(32)));
#define __builtin_ia32_vcvtph2ps(x) pd_one(pd_f32s, "vcvtph2ps", x)
#define __builtin_ia32_vcvtps2ph(x, rounding) ({ pd_f16s pd_y; __asm__("vcvtps2ph %2, %1, %0" : "=v"(pd_y) : "v"(x), "i"(rounding)); pd_y; })
#define __builtin_ia32_vcvtph2ps256(x) pd_one(pd_f32s8, "vcvtph2ps", x)
#define __builtin_ia32_vcvtps2ph256(x, rounding) ({ pd_f16s pd_y; __asm__("vcvtps2ph %2, %1, %0" : "=v"(pd_y) : "v"(x), "i"(rounding)); pd_y; })
#endif
#endif
