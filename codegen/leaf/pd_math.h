/* pd_math.h: mathematical functions on vectors of float32; pd_cpu.h includes it where their parts are known.

   Largest errors over all float32 exponents, denormals included, in units in the last place: exp 1.0 (1.1 where there is
   no FMA), tanh 2.5 (2.7), erf 1.3 (1.6), sigmoid 2.3; scalar tails (libm) 0.6, 2.1, 0.9, 2.3 (tests/test_c_math.py). */
#pragma once

PD_INLINE vf32 pd_rint_fast(vf32 x) { const f32 magic = 12582912.0f; return (x + magic) - magic; } /* |x| < 2^22 */

/* 2^n p for integer-valued n in [-300, 300], rounded once where the result is denormal */
#if defined(__AVX512F__) && PD_W == 16
PD_INLINE vf32 pd_scale2(vf32 p, vf32 n) { return (vf32)__builtin_ia32_scalefps512_mask(p, n, p, 0xffff, 4); }
#else
PD_INLINE vf32 pd_scale2(vf32 p, vf32 n) {
  vi32 k = __builtin_convertvector(n, vi32), h = k >> 1;
  vf32 a = (vf32)((h + 127) << 23), b = (vf32)((k - h + 127) << 23);
  return p * a * b;
}
#endif

/* x < limit ? a : b in every lane; NaN takes b */
#if defined(__AVX512F__) && PD_W == 16
PD_INLINE vf32 pd_below(vf32 x, f32 limit, vf32 a, vf32 b) {
  return (vf32)__builtin_ia32_blendmps_512_mask(b, a, __builtin_ia32_cmpps512_mask(x, vbcast_f32(limit), 1, 0xffff, 4));
}
#else
PD_INLINE vf32 pd_below(vf32 x, f32 limit, vf32 a, vf32 b) { return vsel_f32(x < limit, a, b); }
#endif
PD_INLINE vf32 pd_magnitude(vf32 x) { return (vf32)((vi32)x & 0x7fffffff); }
/* |a| with the sign of x */
#if defined(__AVX512F__) && PD_W == 16
PD_INLINE vf32 pd_signed(vf32 a, vf32 x) {
  return (vf32)__builtin_ia32_pternlogd512_mask((vi32)a, (vi32)x, (vi32){0} + 0x7fffffff, 0xe4, 0xffff);
}
#else
PD_INLINE vf32 pd_signed(vf32 a, vf32 x) {
  return (vf32)(((vi32)a & 0x7fffffff) | ((vi32)x & (i32)0x80000000));
}
#endif

/* exp of [-105, 89]: Cody-Waite reduction by ln 2, minimax of degree 6 on [-ln2/2, ln2/2] */
PD_INLINE vf32 pd_exp_bounded(vf32 x) {
  vf32 n = pd_rint_fast(x * 1.44269504088896341f);
  vf32 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf32 p = 1.3814539557e-3f * r + 8.3687454462e-3f;
  p = p * r + 4.1668388993e-2f;
  p = p * r + 1.6666521132e-1f;
  p = p * r + 4.9999994040e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return pd_scale2(p, n);
}

#if defined(__AVX512DQ__) && PD_W == 16
/* 2^floor(n) T exp(r) with n a multiple of 1/16, T = 2^(n - floor(n)) from a table of one register and exp(r) a minimax
   cubic on [-ln2/32, ln2/32]. The scale carries infinities, NaN, overflow and underflow; r only has to stay finite */
PD_INLINE vf32 pd_exp_inline_vf32(vf32 x) {
  const vf32 powers = {1.0f, 1.04427378243f, 1.09050773267f, 1.13878863476f, 1.18920711500f, 1.24185781207f,
                       1.29683955465f, 1.35425554693f, 1.41421356237f, 1.47682614594f, 1.54221082541f, 1.61049033195f,
                       1.68179283051f, 1.75625216037f, 1.83400808641f, 1.91520656140f};
  const f32 magic = 786432.0f; /* 1.5 * 2^19: the last bit of magic + n is 1/16 */
  vf32 t = x * 1.44269504088896341f + magic, n = t - magic;
  vf32 T = (vf32)__builtin_ia32_permvarsf512_mask(powers, (vi32)t, powers, 0xffff);
  vf32 r = x - n * 0.693147182464599609375f;
  r = r + n * 1.904654323e-9f;
  r = (vf32)__builtin_ia32_rangeps512_mask(r, vbcast_f32(0.03f), 2, r, 0xffff, 4); /* the smaller magnitude; no NaN */
  vf32 p = (1.6666719e-1f * r + 5.0001622e-1f) * r + 1.0f;
  return pd_scale2(T * r * p + T, n);
}
#else
/* NaN passes both clamps and all products */
PD_INLINE vf32 pd_exp_inline_vf32(vf32 x) {
  return pd_exp_bounded(vless(vbcast_f32(89.0f), vgreater(vbcast_f32(-105.0f), x)));
}
#endif

/* exp(x) - 1 = 2^n ((exp(r) - 1) + (1 - 2^-n)): the terms of exp's polynomial without its 1, which keep their digits near
   zero; from -17 on the result is -1, and 2^-n of n above 100 is lost in 1 */
PD_INLINE vf32 pd_expm1_inline_vf32(vf32 x) {
  vf32 t = vless(vbcast_f32(89.0f), vgreater(vbcast_f32(-30.0f), x));
  vf32 n = pd_rint_fast(t * 1.44269504088896341f);
  vf32 r = t - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vf32 p = 1.3814539557e-3f * r + 8.3687454462e-3f;
  p = p * r + 4.1668388993e-2f;
  p = p * r + 1.6666521132e-1f;
  p = p * r + 4.9999994040e-1f;
  p = p * (r * r) + r;
  vi32 k = __builtin_convertvector(vless(vbcast_f32(100.0f), n), vi32);
  return pd_signed(pd_scale2(p + (1.0f - (vf32)((127 - k) << 23)), n), x);
}

/* tanh: |m / (m + 2)| with m = exp(-2|x|) - 1 = 2^n (exp(2r) - 1) - (1 - 2^n), which keeps its digits near zero; the
   polynomial is minimax for (exp(2r) - 1) / r on [-ln2/4, ln2/4] with an exact first coefficient. m of the other sign
   would save the sign's handling, but above 2 the sum m + 2 is rounded twice as coarsely */
PD_INLINE vf32 pd_tanh_inline_vf32(vf32 x) {
  const f32 magic = 12582912.0f;
  vf32 h = vgreater(vbcast_f32(-9.1f), (vf32)((vi32)x | (i32)0x80000000));
  vf32 t = h * 2.88539008177792681f + magic, n = t - magic;
  vf32 s = (vf32)(((vi32)t << 23) + 0x3f800000);
  vf32 r = h - n * 0.346573590279972654709f;
  vf32 p = 8.8757254183e-2f * r + 2.6772555709e-1f;
  p = p * r + 6.6667944193e-1f;
  p = p * r + 1.3333235979f;
  p = p * r + 1.9999998808f;
  p = p * r + 2.0f;
  vf32 m = p * (r * s) - (1.0f - s);
  return pd_signed(m / (m + 2.0f), x);
}

/* erf: x times an even polynomial below 0.9, else 1 - exp(polynomial), which fits log(1 - erf) on [0.9, 4], where erf
   has become 1; both are minimax for the relative error of erf. That exp is of [-19, -1.4], so that a short one does */
PD_INLINE vf32 pd_erf_inline_vf32(vf32 x) {
  vf32 a = pd_magnitude(x), z = x * x;
  vf32 s = -6.0903793201e-4f * z + 5.0119669177e-3f;
  s = s * z - 2.6778917022e-2f;
  s = s * z + 1.1282140762e-1f;
  s = s * z - 3.7612524629e-1f;
  s = s * z + 1.2837915123e-1f;
  s = s * x + x;
  vf32 t = vless(vbcast_f32(4.0f), a);
  vf32 g = 1.9821965543e-4f * t - 3.0654901639e-3f;
  g = g * t + 2.2315213457e-2f;
  g = g * t - 1.0411367565e-1f;
  g = g * t - 6.3697606325e-1f;
  g = g * t - 1.1277972460e+0f;
  g = g * t - 1.6644777497e-4f;
  const f32 magic = 12582912.0f;
  vf32 u = g * 1.44269504088896341f + magic, r = g - (u - magic) * 0.693147182464599609375f;
  vf32 p = 8.3125010133e-3f * r + 4.1890330613e-2f;
  p = p * r + 1.6667115688e-1f;
  p = p * r + 4.9999231100e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  vf32 e = 1.0f - p * (vf32)(((vi32)u << 23) + 0x3f800000);
  return pd_below(a, 0.9f, s, pd_signed(e, x));
}

/* sigmoid through exp(-|x|), so that small results keep their digits: e / (1 + e) below zero */
PD_INLINE vf32 pd_sigmoid_inline_vf32(vf32 x) {
  vf32 e = pd_exp_bounded(vgreater(vbcast_f32(-105.0f), (vf32)((vi32)x | (i32)0x80000000)));
  return pd_below(x, 0.0f, e, vbcast_f32(1.0f)) / (1.0f + e);
}

/* the same out of line: an epilogue on a register tile would otherwise hold a hundred copies */
#define PD_OUTLINE(NAME) PD_LEAF vf32 pd_##NAME##_vf32(vf32 x) { return pd_##NAME##_inline_vf32(x); }
PD_OUTLINE(exp) PD_OUTLINE(expm1) PD_OUTLINE(tanh) PD_OUTLINE(erf) PD_OUTLINE(sigmoid)

#define PD_LANEWISE_OF(NAME, T)                                                                                       \
  PD_LEAF v##T pd_##NAME##_v##T(v##T x) { v##T y; for (int l = 0; l < PD_W; ++l) y[l] = pd_##NAME##_##T(x[l]); return y; }
#define PD_LANEWISE(NAME) PD_LANEWISE_OF(NAME, f32) PD_LANEWISE_OF(NAME, f64)
PD_LANEWISE(erfc)
#include "pd_functions.h"
/* half to even, in the direction that is set */
#if defined(__AVX512F__) && PD_W == 16
PD_INLINE vf32 pd_rint_vf32(vf32 x) { return (vf32)__builtin_ia32_rndscaleps_mask(x, 4, x, 0xffff, 4); }
#elif defined(__AVX__) && PD_W == 8
PD_INLINE vf32 pd_rint_vf32(vf32 x) { return (vf32)__builtin_ia32_roundps256(x, 4); }
#else
PD_LANEWISE_OF(rint, f32)
#endif
#define PD_LANEWISE2(NAME, T, V)                                                                                      \
  PD_LEAF V pd_##NAME##_##V(V a, V b) { V y; for (int l = 0; l < PD_W; ++l) y[l] = pd_##NAME##_##T(a[l], b[l]); return y; }
PD_LANEWISE2(pow, f32, vf32) PD_LANEWISE2(atan2, f32, vf32) PD_LANEWISE2(fmod, f32, vf32) PD_LANEWISE2(mod, f32, vf32)
PD_LANEWISE2(div, i32, vi32) PD_LANEWISE2(fmod, i32, vi32) PD_LANEWISE2(mod, i32, vi32)
PD_LANEWISE2(div, i64, vi64) PD_LANEWISE2(fmod, i64, vi64) PD_LANEWISE2(mod, i64, vi64)
PD_LANEWISE2(div, u8, vu8) PD_LANEWISE2(fmod, u8, vu8) PD_LANEWISE2(mod, u8, vu8)
PD_LANEWISE2(div, i8, vi8) PD_LANEWISE2(fmod, i8, vi8) PD_LANEWISE2(mod, i8, vi8) PD_LANEWISE2(pow, i8, vi8)
PD_LANEWISE2(pow, i32, vi32) PD_LANEWISE2(pow, i64, vi64) PD_LANEWISE2(pow, u8, vu8)
PD_INLINE vi32 pd_sign_vi32(vi32 x) { return (x < 0) - (x > 0); }
PD_INLINE vi64 pd_sign_vi64(vi64 x) { return (x < 0) - (x > 0); }
PD_INLINE vu8 pd_sign_vu8(vu8 x) { return (vu8)(x != 0) & 1; }
PD_INLINE vu8 pd_abs_vu8(vu8 x) { return x; }
PD_INLINE vi8 pd_sign_vi8(vi8 x) { return (x < 0) - (x > 0); }
PD_INLINE vi8 pd_abs_vi8(vi8 x) { vi8 m = x < 0; return (vi8)((vu8)(x ^ m) - (vu8)m); }
PD_INLINE vf32 pd_abs_vf32(vf32 x) { return (vf32)((vi32)x & 0x7fffffff); }

/* trigonometric and hyperbolic functions and their inverses: the C library's */
#define PD_CIRCULAR(T, S)                                                                                             \
  PD_INLINE T pd_tan_##T(T x) { return tan##S(x); }      PD_INLINE T pd_atan_##T(T x) { return atan##S(x); }           \
  PD_INLINE T pd_asin_##T(T x) { return asin##S(x); }    PD_INLINE T pd_acos_##T(T x) { return acos##S(x); }           \
  PD_INLINE T pd_sinh_##T(T x) { return sinh##S(x); }    PD_INLINE T pd_cosh_##T(T x) { return cosh##S(x); }           \
  PD_INLINE T pd_asinh_##T(T x) { return asinh##S(x); }  PD_INLINE T pd_acosh_##T(T x) { return acosh##S(x); }         \
  PD_INLINE T pd_atanh_##T(T x) { return atanh##S(x); }
PD_CIRCULAR(f32, f) PD_CIRCULAR(f64, )
PD_LANEWISE(tan) PD_LANEWISE(sinh) PD_LANEWISE(cosh)
PD_LANEWISE(asinh) PD_LANEWISE(acosh) PD_LANEWISE(atanh)
#include "pd_double.h"

/* bits; a shift by as many as there are, or more, gives 0 */
#define PD_BITS(T)                                                                                                    \
  PD_INLINE T pd_bitand_##T(T a, T b) { return (T)(a & b); }                                                           \
  PD_INLINE T pd_bitor_##T(T a, T b) { return (T)(a | b); }                                                            \
  PD_INLINE T pd_bitxor_##T(T a, T b) { return (T)(a ^ b); }                                                           \
  PD_INLINE T pd_bitnot_##T(T a) { return (T)~a; }
#define PD_SHIFTS(T, U)                                                                                               \
  PD_INLINE T pd_shl_##T(T a, T b) { return (u64)b < 8 * sizeof(T) ? (T)((U)a << b) : 0; }                             \
  PD_INLINE T pd_shr_##T(T a, T b) { return (u64)b < 8 * sizeof(T) ? (T)(a >> b) : (T)(a < 0 ? -1 : 0); }
PD_BITS(i8) PD_BITS(i16) PD_BITS(i32) PD_BITS(i64) PD_BITS(u8) PD_BITS(u16) PD_BITS(u32) PD_BITS(u64)
PD_BITS(vi8) PD_BITS(vi32) PD_BITS(vi64) PD_BITS(vu8)
PD_SHIFTS(i8, u32) PD_SHIFTS(i16, u32) PD_SHIFTS(i32, u32) PD_SHIFTS(i64, u64)
PD_SHIFTS(u8, u32) PD_SHIFTS(u16, u32) PD_SHIFTS(u32, u32) PD_SHIFTS(u64, u64)
#define PD_LANEWISE_SHIFTS(T, V) PD_LANEWISE2(shl, T, V) PD_LANEWISE2(shr, T, V)
PD_LANEWISE_SHIFTS(i8, vi8) PD_LANEWISE_SHIFTS(u8, vu8) PD_LANEWISE_SHIFTS(i32, vi32) PD_LANEWISE_SHIFTS(i64, vi64)
/* the same bits as another type */
#define PD_BITCAST(A, B)                                                                                              \
  PD_INLINE B pd_bitcast_##A##_##B(A x) { B y; memcpy(&y, &x, sizeof y); return y; }                                   \
  PD_INLINE A pd_bitcast_##B##_##A(B x) { A y; memcpy(&y, &x, sizeof y); return y; }
PD_BITCAST(i8, u8) PD_BITCAST(i16, u16) PD_BITCAST(i32, u32) PD_BITCAST(i64, u64)
PD_BITCAST(f32, i32) PD_BITCAST(f32, u32) PD_BITCAST(f64, i64) PD_BITCAST(f64, u64)
