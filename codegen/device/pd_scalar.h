// pd_scalar.h -- storage types, conversions and scalar functions of generated kernels; both meanings side by side.
// Values are f32 inside kernels; f16 and bf16 only store. No CUDA header is needed, so NVRTC needs no toolkit.
// Included by pd_device.cuh and pd_emu.h, which define PD_DEV.
#pragma once

struct alignas(2) pd_half { uint16_t bits; };
struct alignas(2) pd_bf16 { uint16_t bits; };
struct alignas(8) pd_b64 { uint32_t x[2]; };    // 8 and 16 bytes that move as one
struct alignas(16) pd_b128 { uint32_t x[4]; };

#ifdef PD_EMU
PD_DEV uint32_t pd_f32_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
PD_DEV float pd_bits_to_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
PD_DEV float pd_f16_to_f32(pd_half h) {
  uint32_t m = (uint32_t)(h.bits & 0x7fff) << 13, sign = (uint32_t)(h.bits & 0x8000) << 16;
  if (m >= 0x7c00u << 13) return pd_bits_to_f32(sign | m | 0x7f800000);
  return pd_bits_to_f32(sign | pd_f32_to_bits(pd_bits_to_f32(m) * 0x1p112f));  // also right for subnormals
}
PD_DEV pd_half pd_f32_to_f16(float f) {  // to nearest, ties to even; NaN becomes the GPU's 0x7fff
  uint32_t x = pd_f32_to_bits(f), sign = x >> 16 & 0x8000;
  x &= 0x7fffffff;
  if (x > 0x7f800000) return {0x7fff};
  if (x >= 0x477ff000) return {(uint16_t)(sign | 0x7c00)};
  if (x < 0x38800000) return {(uint16_t)(sign | (pd_f32_to_bits(pd_bits_to_f32(x) + 0.5f) - 0x3f000000))};
  x += 0xfff + (x >> 13 & 1);
  return {(uint16_t)(sign | (x - 0x38000000) >> 13)};
}
PD_DEV pd_bf16 pd_f32_to_bf16(float f) {
  uint32_t x = pd_f32_to_bits(f);
  if ((x & 0x7fffffff) > 0x7f800000) return {0x7fff};
  return {(uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16)};
}
PD_DEV uint32_t pd_pack_f16x2(float lo, float hi) { return pd_f32_to_f16(lo).bits | (uint32_t)pd_f32_to_f16(hi).bits << 16; }
PD_DEV uint32_t pd_pack_bf16x2(float lo, float hi) { return pd_f32_to_bf16(lo).bits | (uint32_t)pd_f32_to_bf16(hi).bits << 16; }
PD_DEV uint32_t pd_f32_to_tf32(float f) {  // to nearest, ties away from zero
  uint32_t x = pd_f32_to_bits(f);
  return (x & 0x7f800000) == 0x7f800000 ? x : (x + 0x1000) & 0xffffe000u;
}
PD_DEV int32_t pd_f32_to_s8(float f) {  // to nearest even, saturating; NaN becomes 0
  return f != f ? 0 : f <= -128.f ? -128 : f >= 127.f ? 127 : (int32_t)nearbyintf(f);
}
PD_DEV int32_t pd_f32_to_u8(float f) { return f != f || f <= 0.f ? 0 : f >= 255.f ? 255 : (int32_t)nearbyintf(f); }
PD_DEV float pd_max(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }  // NaN wins, as in numpy
PD_DEV float pd_min(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
PD_DEV float pd_rsqrt(float x) { return 1.f / sqrtf(x); }
PD_DEV float pd_exp2_fast(float x) { return exp2f(x); }
PD_DEV float pd_exp_fast(float x) { return expf(x); }
PD_DEV float pd_log_fast(float x) { return logf(x); }
PD_DEV float pd_rcp_fast(float x) { return 1.f / x; }
PD_DEV float pd_tanh_fast(float x) { return tanhf(x); }
#else
PD_DEV uint32_t pd_f32_to_bits(float f) { return __float_as_uint(f); }
PD_DEV float pd_bits_to_f32(uint32_t u) { return __uint_as_float(u); }
PD_DEV float pd_f16_to_f32(pd_half h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits)); return f; }
PD_DEV pd_half pd_f32_to_f16(float f) { pd_half h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(f)); return h; }
PD_DEV pd_bf16 pd_f32_to_bf16(float f) { pd_bf16 h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h.bits) : "f"(f)); return h; }
PD_DEV uint32_t pd_pack_f16x2(float lo, float hi) {
  uint32_t r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
PD_DEV uint32_t pd_pack_bf16x2(float lo, float hi) {
  uint32_t r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
PD_DEV uint32_t pd_f32_to_tf32(float f) { uint32_t r; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(f)); return r; }
PD_DEV int32_t pd_f32_to_s8(float f) { int32_t r; asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(r) : "f"(f)); return r; }
PD_DEV int32_t pd_f32_to_u8(float f) { int32_t r; asm("cvt.rni.sat.u8.f32 %0, %1;" : "=r"(r) : "f"(f)); return r; }
PD_DEV float pd_max(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
PD_DEV float pd_min(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
PD_DEV float pd_rsqrt(float x) { return rsqrtf(x); }
PD_DEV float pd_exp2_fast(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
PD_DEV float pd_exp_fast(float x) { return pd_exp2_fast(x * 1.44269504f); }
PD_DEV float pd_log_fast(float x) { float r; asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r * 0.69314718f; }
PD_DEV float pd_rcp_fast(float x) { float r; asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
PD_DEV float pd_tanh_fast(float x) { float r; asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
#endif

// ---- the same text for both -----------------------------------------------------------------------------------
PD_DEV float pd_bf16_to_f32(pd_bf16 h) { return pd_bits_to_f32((uint32_t)h.bits << 16); }
PD_DEV float pd_f16_lo(uint32_t r) { return pd_f16_to_f32(pd_half{(uint16_t)r}); }
PD_DEV float pd_f16_hi(uint32_t r) { return pd_f16_to_f32(pd_half{(uint16_t)(r >> 16)}); }
PD_DEV float pd_bf16_lo(uint32_t r) { return pd_bits_to_f32(r << 16); }
PD_DEV float pd_bf16_hi(uint32_t r) { return pd_bits_to_f32(r & 0xffff0000u); }

// Accurate to a few ulp (the CUDA library on the GPU, libm in emulation); the *_fast ones are single approximations:
// relative error about 2^-22 (ex2, lg2, rcp), absolute about 2^-11 (tanh), exp_fast loses |x| * 2^-24 more.
PD_DEV float pd_exp(float x) { return expf(x); }
PD_DEV float pd_log(float x) { return logf(x); }
PD_DEV float pd_sqrt(float x) { return sqrtf(x); }
PD_DEV float pd_tanh(float x) { return tanhf(x); }
PD_DEV float pd_erf(float x) { return erff(x); }
PD_DEV float pd_sin(float x) { return sinf(x); }
PD_DEV float pd_cos(float x) { return cosf(x); }
PD_DEV float pd_pow(float x, float y) { return powf(x, y); }
PD_DEV float pd_fmod(float x, float y) { return fmodf(x, y); }
PD_DEV float pd_floor(float x) { return floorf(x); }
PD_DEV float pd_ceil(float x) { return ceilf(x); }
PD_DEV float pd_rint(float x) { return rintf(x); }
PD_DEV float pd_abs(float x) { return fabsf(x); }
PD_DEV float pd_fma(float a, float b, float c) { return fmaf(a, b, c); }
PD_DEV float pd_sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

PD_DEV int32_t pd_imin(int32_t a, int32_t b) { return a < b ? a : b; }
PD_DEV int32_t pd_imax(int32_t a, int32_t b) { return a > b ? a : b; }
PD_DEV int64_t pd_imin(int64_t a, int64_t b) { return a < b ? a : b; }
PD_DEV int64_t pd_imax(int64_t a, int64_t b) { return a > b ? a : b; }
PD_DEV int32_t pd_floordiv(int32_t a, int32_t b) { int32_t q = a / b; return q - ((a % b != 0) & ((a ^ b) < 0)); }
PD_DEV int64_t pd_floordiv(int64_t a, int64_t b) { int64_t q = a / b; return q - ((a % b != 0) & ((a ^ b) < 0)); }
