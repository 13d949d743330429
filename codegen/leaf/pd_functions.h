/* pd_functions.h: roots, steps, logarithms and circular functions on vectors of float32; pd_math.h includes it.

   Largest errors over all float32 exponents, denormals included, in units in the last place: log 0.8, log1p 1.5, sin and
   cos 1.5, atan 2.1, asin 2.2, acos 1.1 (tests/kernels/test_c_math.py). The polynomials are minimax for the relative error. */
#pragma once

#if defined(__AVX512F__) && PD_W == 16 && !defined(__clang__)
PD_INLINE vf32 pd_sqrt_vf32(vf32 x) { return (vf32)__builtin_ia32_sqrtps512_mask(x, x, 0xffff, 4); }
PD_INLINE vf32 pd_floor_vf32(vf32 x) { return (vf32)__builtin_ia32_rndscaleps_mask(x, 9, x, 0xffff, 4); }
PD_INLINE vf32 pd_ceil_vf32(vf32 x) { return (vf32)__builtin_ia32_rndscaleps_mask(x, 10, x, 0xffff, 4); }
#elif defined(__AVX__) && PD_W == 8 && !defined(__clang__)
PD_INLINE vf32 pd_sqrt_vf32(vf32 x) { return (vf32)__builtin_ia32_sqrtps256(x); }
PD_INLINE vf32 pd_floor_vf32(vf32 x) { return (vf32)__builtin_ia32_roundps256(x, 9); }
PD_INLINE vf32 pd_ceil_vf32(vf32 x) { return (vf32)__builtin_ia32_roundps256(x, 10); }
#else
PD_LANEWISE_OF(sqrt, f32) PD_LANEWISE_OF(floor, f32) PD_LANEWISE_OF(ceil, f32)
#endif
PD_INLINE vf32 pd_sign_vf32(vf32 x) {
  vf32 s = vsel_f32(x > 0, vbcast_f32(1.0f), vsel_f32(x < 0, vbcast_f32(-1.0f), vbcast_f32(0.0f)));
  return vsel_f32(x != x, x, s);
}

/* log x = k log 2 + log(1 + r) with 1 + r = x / 2^k in [sqrt(1/2), sqrt(2)); log 2 in two parts, of which k times the
   first is exact */
PD_INLINE vf32 pd_log_inline_vf32(vf32 x) {
  vb small = x < 1.17549435e-38f;
  vi32 bits = (vi32)vsel_f32(small, x * 8388608.0f, x);
  vi32 k = (bits - 0x3f3504f3) >> 23;
  vf32 r = (vf32)(bits - (vi32)((vu32)k << 23)) - 1.0f, z = r * r;
  vf32 n = __builtin_convertvector(k - (small & 23), vf32);
  vf32 p = 6.7466382721e-02f * r - 1.1675651217e-01f;
  p = p * r + 1.1888162969e-01f;
  p = p * r - 1.2405589062e-01f;
  p = p * r + 1.4219552279e-01f;
  p = p * r - 1.6667995843e-01f;
  p = p * r + 2.0002118663e-01f;
  p = p * r - 2.5000009600e-01f;
  p = p * r + 3.3333312604e-01f;
  vf32 y = p * (r * z) - n * 2.12194440e-4f;
  y = (r + (y - 0.5f * z)) + n * 0.693359375f;
  y = vsel_f32((x > 0) & (x < INFINITY), y, x); /* infinity and NaN stay */
  return vsel_f32(x == 0, vbcast_f32(-INFINITY), vsel_f32(x < 0, vbcast_f32(NAN), y));
}

/* log(u) with u = 1 + x rounded, and what the rounding lost over u; results have the sign of x */
PD_INLINE vf32 pd_log1p_inline_vf32(vf32 x) {
  vf32 u = x + 1.0f, lost = x - (u - 1.0f);
  vf32 y = pd_log_inline_vf32(u) + vsel_f32((u > 0) & (x < INFINITY), lost / u, vbcast_f32(0.0f));
  return vsel_f32(x != x, x, pd_signed(y, x));
}

#if defined(__FMA__) || defined(__aarch64__)
/* whether any lane is true */
#if defined(__AVX512DQ__) && PD_W == 16 && !defined(__clang__)
PD_INLINE int pd_any(vb c) { return (unsigned short)__builtin_ia32_cvtd2mask512(c) != 0; }
#elif defined(__AVX__) && PD_W == 8
PD_INLINE int pd_any(vb c) { return __builtin_ia32_movmskps256((vf32)c) != 0; }
#else
PD_INLINE int pd_any(vb c) {
  int any = 0;
  for (int l = 0; l < PD_W; ++l) any |= c[l];
  return any != 0;
}
#endif
/* sin(x + turns pi/2): x = n pi/2 + r with pi/2 in three parts. The first difference is exact up to n of 2^17 where
   multiplications and additions are fused. Lanes beyond that make all lanes the C library's */
PD_INLINE vf32 pd_wave(vf32 x, i32 turns) {
  const f32 magic = 12582912.0f;
  vf32 t = x * 6.36619772367581343e-01f + magic, n = t - magic;
  vf32 r = x - n * 1.57079637050628662f;
  r = r + n * 4.37113900018624283e-08f;
  r = r + n * 1.71512451811e-15f;
  vi32 quarter = (vi32)t + turns;
  vf32 z = r * r;
  vf32 s = -1.9514084825e-04f * z + 8.3321550514e-03f;
  s = s * z - 1.6666654590e-01f;
  s = s * (z * r) + r;
  vf32 c = 2.4434845937e-05f * z - 1.3887337082e-03f;
  c = c * z + 4.1666646269e-02f;
  c = c * (z * z) + (1.0f - 0.5f * z);
  vf32 y = vsel_f32((quarter & 1) != 0, c, s);
  return (vf32)((vi32)y ^ (vi32)((vu32)(quarter & 2) << 30));
}
PD_INLINE vf32 pd_sin_inline_vf32(vf32 x) {
  if (__builtin_expect(pd_any(~(pd_magnitude(x) < 2.0e5f)), 0)) {
    vf32 y;
    for (int l = 0; l < PD_W; ++l) y[l] = pd_sin_f32(x[l]);
    return y;
  }
  return vsel_f32(x == 0, x, pd_wave(x, 0));
}
PD_INLINE vf32 pd_cos_inline_vf32(vf32 x) {
  if (__builtin_expect(pd_any(~(pd_magnitude(x) < 2.0e5f)), 0)) {
    vf32 y;
    for (int l = 0; l < PD_W; ++l) y[l] = pd_cos_f32(x[l]);
    return y;
  }
  return pd_wave(x, 1);
}
PD_OUTLINE(sin) PD_OUTLINE(cos)
#else
PD_LANEWISE_OF(sin, f32) PD_LANEWISE_OF(cos, f32)
#endif

/* atan x with |x| in three intervals around 0, 1 and infinity */
PD_INLINE vf32 pd_atan_inline_vf32(vf32 x) {
  vf32 a = pd_magnitude(x);
  vb far = a > 2.41421366f, middle = ~far & (a > 0.414213568f);
  vf32 up = vsel_f32(far, vbcast_f32(-1.0f), vsel_f32(middle, a - 1.0f, a));
  vf32 t = up / vsel_f32(far, a, vsel_f32(middle, a + 1.0f, vbcast_f32(1.0f))), z = t * t;
  vf32 p = -6.0605314180e-02f * z + 1.0587364848e-01f;
  p = p * z - 1.4242741887e-01f;
  p = p * z + 1.9998434485e-01f;
  p = p * z - 3.3333314676e-01f;
  vf32 y = p * (z * t) + t;
  y = vsel_f32(far, 1.57079637f + (y - 4.37113883e-08f), vsel_f32(middle, 0.785398185f + (y - 2.18556941e-08f), y));
  return pd_signed(y, x);
}

/* asin t for t up to 1/2, with z = t t; beyond, asin x is pi/2 - 2 asin sqrt((1 - x) / 2) */
PD_INLINE vf32 pd_arc(vf32 z, vf32 t) {
  vf32 p = 4.2278531829e-02f * z + 2.4114479264e-02f;
  p = p * z + 4.5483336856e-02f;
  p = p * z + 7.4951960976e-02f;
  p = p * z + 1.6666754949e-01f;
  return p * (z * t) + t;
}
PD_INLINE vf32 pd_asin_inline_vf32(vf32 x) {
  vf32 a = pd_magnitude(x);
  vb far = a > 0.5f;
  vf32 z = vsel_f32(far, 0.5f - 0.5f * a, a * a), y = pd_arc(z, vsel_f32(far, pd_sqrt_vf32(z), a));
  return pd_signed(vsel_f32(far, 1.57079637f - (2.0f * y + 4.37113883e-08f), y), x);
}
PD_INLINE vf32 pd_acos_inline_vf32(vf32 x) {
  vf32 a = pd_magnitude(x);
  vb far = a > 0.5f;
  vf32 z = vsel_f32(far, 0.5f - 0.5f * a, a * a), y = pd_arc(z, vsel_f32(far, pd_sqrt_vf32(z), x));
  vf32 twice = vsel_f32(x < 0, 3.14159274f - (2.0f * y + 8.74227766e-08f), 2.0f * y);
  return vsel_f32(far, twice, 1.57079637f - (y + 4.37113883e-08f));
}
PD_OUTLINE(log) PD_OUTLINE(log1p) PD_OUTLINE(atan) PD_OUTLINE(asin) PD_OUTLINE(acos)
