/* pd_math.h: mathematical functions on vectors of float32; pd_cpu.h includes it where their parts are known.

   Largest errors over all float32 exponents, denormals included, in units in the last place: exp 1.0 (1.1 where there is
   no FMA), tanh 2.5 (2.7), erf 1.3 (1.6), sigmoid 2.3, log 0.8, log1p 2.3, sin and cos 1.5, atan 2.7 (2.8), asin 2.2, acos
   1.2; scalar tails (libm) 0.6, 2.1, 0.9, 2.3, then below 1 (tests/kernels/test_c_math.py). */
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
#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
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

#if defined(__AVX512DQ__) && PD_W == 16 && !defined(__clang__)
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

/* trigonometric and hyperbolic functions and their inverses of single numbers: the C library's */
#define PD_CIRCULAR(T, S)                                                                                             \
  PD_INLINE T pd_tan_##T(T x) { return tan##S(x); }      PD_INLINE T pd_atan_##T(T x) { return atan##S(x); }           \
  PD_INLINE T pd_asin_##T(T x) { return asin##S(x); }    PD_INLINE T pd_acos_##T(T x) { return acos##S(x); }           \
  PD_INLINE T pd_sinh_##T(T x) { return sinh##S(x); }    PD_INLINE T pd_cosh_##T(T x) { return cosh##S(x); }           \
  PD_INLINE T pd_asinh_##T(T x) { return asinh##S(x); }  PD_INLINE T pd_acosh_##T(T x) { return acosh##S(x); }         \
  PD_INLINE T pd_atanh_##T(T x) { return atanh##S(x); }
PD_CIRCULAR(f32, f) PD_CIRCULAR(f64, )

#define PD_LANEWISE(NAME)                                                                                             \
  PD_LEAF vf32 pd_##NAME##_vf32(vf32 x) { vf32 y; for (int l = 0; l < PD_W; ++l) y[l] = pd_##NAME##_f32(x[l]); return y; }

/* log: exponent times ln 2, and a polynomial of the mantissa in [sqrt(1/2), sqrt(2)). Denormals are scaled up first */
PD_INLINE vf32 pd_log_inline_vf32(vf32 x) {
  vf32 y = vsel_f32(x < 1.17549435e-38f, x * 8388608.0f, x);
  vi32 bits = (vi32)y - 0x3f3504f3, e = (bits >> 23) - (23 & (x < 1.17549435e-38f));
  vf32 m = (vf32)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, n = __builtin_convertvector(e, vf32);
  vf32 z = m * m;
  vf32 p = 7.0376836292e-2f * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  p = p * m * z - n * 2.12194440e-4f;
  vf32 r = m + (p - 0.5f * z) + n * 0.693359375f;
  r = vsel_f32(x == 0.0f, vbcast_f32(-INFINITY), vsel_f32(x < INFINITY, r, x)); /* infinity and NaN stay */
  return vsel_f32(x < 0.0f, vbcast_f32(NAN), r);
}

/* log1p: log of the rounded u = 1 + x, times the rounding x / (u - 1) */
PD_INLINE vf32 pd_log1p_inline_vf32(vf32 x) {
  vf32 u = 1.0f + x, y = pd_log_inline_vf32(u) * (x / (u - 1.0f));
  return vsel_f32((u == 1.0f) | (x == INFINITY), x, y);
}

/* sin and cos: the angle to [-pi/4, pi/4] in float64, as multiples of pi/2 that a float32 nearly hits cancel most digits;
   the C library's from 2^18 on, where n no longer fits a mantissa's product */
typedef f64 pd_wide_f64 __attribute__((vector_size(8 * PD_W)));
PD_INLINE vf32 pd_circle(vf32 x, i32 quarters) {
  vf32 n = pd_rint_fast(x * 0.636619772367581343f);
  pd_wide_f64 w = __builtin_convertvector(x, pd_wide_f64), k = __builtin_convertvector(n, pd_wide_f64);
  vf32 r = __builtin_convertvector((w - k * 1.57079632673412561417) - k * 6.07710050650619224932e-11, vf32), z = r * r;
  vf32 s = (-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f;
  vf32 c = (2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f;
  s = s * z * r + r;
  c = c * z * z - 0.5f * z + 1.0f;
  vi32 q = __builtin_convertvector(n, vi32) + quarters;
  vf32 y = vsel_f32((q & 1) != 0, c, s);
  return (vf32)((vi32)y ^ ((q & 2) << 30));
}
PD_INLINE int pd_any_from(vf32 x, f32 limit) {
  vb far = ~(pd_magnitude(x) < limit);
  i32 some = 0;
  for (int l = 0; l < PD_W; ++l) some |= far[l];
  return some;
}
#define PD_CIRCLE(NAME, QUARTERS)                                                                                     \
  PD_INLINE vf32 pd_##NAME##_inline_vf32(vf32 x) {                                                                     \
    const vb zero = -(QUARTERS == 0) & (x == 0.0f); /* sin(-0) is -0 */                                                \
    if (!pd_any_from(x, 262144.0f)) return vsel_f32(zero, x, pd_circle(x, QUARTERS));                                  \
    vf32 y;                                                                                                            \
    for (int l = 0; l < PD_W; ++l) y[l] = pd_##NAME##_f32(x[l]);                                                       \
    return y;                                                                                                          \
  }
PD_CIRCLE(sin, 0) PD_CIRCLE(cos, 1)

#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
PD_INLINE vf32 pd_sqrt_vf32(vf32 x) { return (vf32)__builtin_ia32_sqrtps512_mask(x, x, 0xffff, 4); }
PD_INLINE vf32 pd_floor_vf32(vf32 x) { return (vf32)__builtin_ia32_rndscaleps_mask(x, 9, x, 0xffff, 4); }
PD_INLINE vf32 pd_ceil_vf32(vf32 x) { return (vf32)__builtin_ia32_rndscaleps_mask(x, 10, x, 0xffff, 4); }
#elif defined(__AVX__) && PD_W == 8
PD_INLINE vf32 pd_sqrt_vf32(vf32 x) { return (vf32)__builtin_ia32_sqrtps256(x); }
PD_INLINE vf32 pd_floor_vf32(vf32 x) { return (vf32)__builtin_ia32_roundps256(x, 9); }
PD_INLINE vf32 pd_ceil_vf32(vf32 x) { return (vf32)__builtin_ia32_roundps256(x, 10); }
#else
PD_LANEWISE(sqrt) PD_LANEWISE(floor) PD_LANEWISE(ceil)
#endif

/* atan: of (x - 1) / (x + 1) or -1 / x where x is large, then pi/4 or pi/2 more */
PD_INLINE vf32 pd_atan_inline_vf32(vf32 x) {
  vf32 a = pd_magnitude(x);
  vb high = a > 2.414213562373095f, low = ~(a > 0.4142135623730950f);
  vf32 t = vsel_f32(high, vbcast_f32(-1.0f), vsel_f32(low, a, a - 1.0f)) /
           vsel_f32(high, a, vsel_f32(low, vbcast_f32(1.0f), a + 1.0f));
  vf32 from = vsel_f32(high, vbcast_f32(1.57079632679489662f), vsel_f32(low, (vf32){0}, vbcast_f32(0.785398163397448310f)));
  vf32 z = t * t;
  vf32 p = 8.05374449538e-2f * z - 1.38776856032e-1f;
  p = p * z + 1.99777106478e-1f;
  p = p * z - 3.33329491539e-1f;
  return pd_signed(from + (p * z * t + t), x);
}

/* asin: a polynomial up to 1/2, beyond it pi/2 - 2 asin(sqrt((1 - x) / 2)); acos alike */
PD_INLINE vf32 pd_arc(vf32 z, vf32 t) {
  vf32 p = 4.2163199048e-2f * z + 2.4181311049e-2f;
  p = p * z + 4.5470025998e-2f;
  p = p * z + 7.4953002686e-2f;
  p = p * z + 1.6666752422e-1f;
  return p * z * t + t;
}
PD_INLINE vf32 pd_asin_inline_vf32(vf32 x) {
  vf32 a = pd_magnitude(x);
  vb far = a > 0.5f;
  vf32 z = vsel_f32(far, 0.5f * (1.0f - a), x * x);
  vf32 p = pd_arc(z, vsel_f32(far, pd_sqrt_vf32(z), a));
  return pd_signed(vsel_f32(far, 1.57079632679489662f - 2.0f * p, p), x);
}
PD_INLINE vf32 pd_acos_inline_vf32(vf32 x) {
  vf32 a = pd_magnitude(x);
  vb far = a > 0.5f;
  vf32 z = vsel_f32(far, 0.5f * (1.0f - a), x * x);
  vf32 p = pd_arc(z, vsel_f32(far, pd_sqrt_vf32(z), x));
  vf32 behind = vsel_f32(x < 0.0f, 3.14159265358979324f - 2.0f * p, 2.0f * p);
  return vsel_f32(far, behind, 1.57079632679489662f - p);
}

/* the same out of line: an epilogue on a register tile would otherwise hold a hundred copies */
#define PD_OUTLINE(NAME) PD_LEAF vf32 pd_##NAME##_vf32(vf32 x) { return pd_##NAME##_inline_vf32(x); }
PD_OUTLINE(exp) PD_OUTLINE(expm1) PD_OUTLINE(tanh) PD_OUTLINE(erf) PD_OUTLINE(sigmoid)
PD_OUTLINE(log) PD_OUTLINE(log1p) PD_OUTLINE(sin) PD_OUTLINE(cos) PD_OUTLINE(atan) PD_OUTLINE(asin) PD_OUTLINE(acos)

PD_LANEWISE(sign) PD_LANEWISE(erfc)
/* half to even, in the direction that is set */
#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
PD_INLINE vf32 pd_rint_vf32(vf32 x) { return (vf32)__builtin_ia32_rndscaleps_mask(x, 4, x, 0xffff, 4); }
#elif defined(__AVX__) && PD_W == 8
PD_INLINE vf32 pd_rint_vf32(vf32 x) { return (vf32)__builtin_ia32_roundps256(x, 4); }
#else
PD_LANEWISE(rint)
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

PD_LANEWISE(tan) PD_LANEWISE(sinh) PD_LANEWISE(cosh)
PD_LANEWISE(asinh) PD_LANEWISE(acosh) PD_LANEWISE(atanh)

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
