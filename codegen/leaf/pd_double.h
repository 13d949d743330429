/* pd_double.h: functions on vectors of float64; pd_math.h includes it. A unit whose kernels compute in float64 has half as
   many lanes as others, so that a vector of float64 is one register.

   Largest errors in units in the last place: exp 1.0, sigmoid 2.5 (tests/kernels/test_c_doubles.py). The other functions
   are the C library's, lane by lane. */
#pragma once

PD_LANEWISE_OF(expm1, f64) PD_LANEWISE_OF(log, f64) PD_LANEWISE_OF(log1p, f64) PD_LANEWISE_OF(tanh, f64)
PD_LANEWISE_OF(erf, f64) PD_LANEWISE_OF(sin, f64) PD_LANEWISE_OF(cos, f64) PD_LANEWISE_OF(atan, f64)
PD_LANEWISE_OF(asin, f64) PD_LANEWISE_OF(acos, f64)
PD_LANEWISE2(pow, f64, vf64) PD_LANEWISE2(atan2, f64, vf64) PD_LANEWISE2(fmod, f64, vf64) PD_LANEWISE2(mod, f64, vf64)
#if defined(__AVX512F__) && PD_W == 8 && !defined(__clang__)
PD_INLINE vf64 pd_sqrt_vf64(vf64 x) { return (vf64)__builtin_ia32_sqrtpd512_mask(x, x, 0xff, 4); }
PD_INLINE vf64 pd_floor_vf64(vf64 x) { return (vf64)__builtin_ia32_rndscalepd_mask(x, 9, x, 0xff, 4); }
PD_INLINE vf64 pd_ceil_vf64(vf64 x) { return (vf64)__builtin_ia32_rndscalepd_mask(x, 10, x, 0xff, 4); }
PD_INLINE vf64 pd_rint_vf64(vf64 x) { return (vf64)__builtin_ia32_rndscalepd_mask(x, 4, x, 0xff, 4); }
#elif defined(__AVX__) && PD_W == 4 && !defined(__clang__)
PD_INLINE vf64 pd_sqrt_vf64(vf64 x) { return (vf64)__builtin_ia32_sqrtpd256(x); }
PD_INLINE vf64 pd_floor_vf64(vf64 x) { return (vf64)__builtin_ia32_roundpd256(x, 9); }
PD_INLINE vf64 pd_ceil_vf64(vf64 x) { return (vf64)__builtin_ia32_roundpd256(x, 10); }
PD_INLINE vf64 pd_rint_vf64(vf64 x) { return (vf64)__builtin_ia32_roundpd256(x, 4); }
#else
PD_LANEWISE_OF(sqrt, f64) PD_LANEWISE_OF(floor, f64) PD_LANEWISE_OF(ceil, f64) PD_LANEWISE_OF(rint, f64)
#endif
PD_INLINE vf64 pd_abs_vf64(vf64 x) { return (vf64)((vi64)x & INT64_MAX); }
PD_INLINE vf64 pd_sign_vf64(vf64 x) {
  const vi64 one = (vi64)vbcast_f64(1.0);
  vi64 s = ((x > 0) & one) | ((x < 0) & (one | INT64_MIN));
  return pd_where_vf64(x != x, x, (vf64)s);
}

/* exp: Cody-Waite reduction by ln 2, then exp's series on [-ln2/2, ln2/2]. The product of n and the first part of ln 2
   is exact. 2^n is two factors, so that a denormal result is rounded once. The clamps hand NaN on */
PD_INLINE vf64 pd_exp_inline_vf64(vf64 x) {
  const f64 magic = 6755399441055744.0; /* 1.5 * 2^52: the last bit of magic + n is 1 */
  x = pd_where_vf64(x > 710.0, vbcast_f64(710.0), pd_where_vf64(x < -746.0, vbcast_f64(-746.0), x));
  vf64 t = x * 1.44269504088896338700e+00 + magic, n = t - magic;
  vf64 half = n * 0.5 + magic;
  vf64 r = x - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  vf64 p = 1.6059043836821614599e-10 * r + 2.0876756987868098979e-09;
  p = p * r + 2.5052108385441718775e-08;
  p = p * r + 2.7557319223985890653e-07;
  p = p * r + 2.7557319223985890653e-06;
  p = p * r + 2.4801587301587301587e-05;
  p = p * r + 1.9841269841269841270e-04;
  p = p * r + 1.3888888888888888889e-03;
  p = p * r + 8.3333333333333333333e-03;
  p = p * r + 4.1666666666666666667e-02;
  p = p * r + 1.6666666666666666667e-01;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  vi64 a = (vi64)half, b = (vi64)t - a + (vi64)vbcast_f64(magic);
  return p * (vf64)((a << 52) + (vi64)vbcast_f64(1.0)) * (vf64)((b << 52) + (vi64)vbcast_f64(1.0));
}
/* through exp(-|x|), so that small results keep their digits: e / (1 + e) below zero */
PD_INLINE vf64 pd_sigmoid_inline_vf64(vf64 x) {
  vf64 e = pd_exp_inline_vf64(-pd_abs_vf64(x));
  return pd_where_vf64(x < 0, e, vbcast_f64(1.0)) / (1.0 + e);
}
PD_LEAF vf64 pd_exp_vf64(vf64 x) { return pd_exp_inline_vf64(x); }
PD_LEAF vf64 pd_sigmoid_vf64(vf64 x) { return pd_sigmoid_inline_vf64(x); }
