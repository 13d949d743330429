// Kernels whose times are the numbers that the cost model supposes; calibration.py launches them.
#include "pd_device.cuh"

PD_KERNEL(nothing, 32, 1)(uint32_t *out) { (void)out; }
PD_EXPORT(nothing, 32);

// One thread follows `steps` indices: each load waits for the one before.
PD_KERNEL(chase, 32, 1)(const uint32_t *next, int steps, uint32_t *out) {
  uint32_t at = 0;
  if (pd_tid() == 0) {
    for (int i = 0; i < steps; i++) at = pd_ldg(next + at);
    pd_stg(out, at);
  }
}
PD_EXPORT(chase, 32);

// All blocks read `vectors` of 16 bytes, `rounds` times; four loads in flight a thread.
PD_KERNEL(read, 512, 2)(const pd_b128 *x, int vectors, int rounds, uint32_t *out) {
  uint32_t sum = 0;
  int stride = pd_nbid_x() * 512;
  for (int r = 0; r < rounds; r++)
    for (int i = pd_bid_x() * 512 + pd_tid(); i < vectors; i += 4 * stride)
#pragma unroll
      for (int u = 0; u < 4; u++)
        if (i + u * stride < vectors) {
          pd_b128 v = pd_ldg(x + i + u * stride);
          sum += v.x[0] ^ v.x[1] ^ v.x[2] ^ v.x[3];
        }
  if (sum == 12345u) pd_stg(out, sum);
}
PD_EXPORT(read, 512);

// `steps` barriers of a block.
PD_KERNEL(barriers, 256, 1)(int steps, float *out) {
  for (int i = 0; i < steps; i++) pd_syncthreads();
  if (steps < 0) pd_stg(out, 0.f);
}
PD_EXPORT(barriers, 256);

// Every thread reads 16 bytes of its own, eight times a step.
PD_KERNEL(shared_read, 512, 1)(int steps, float *out) {
  PD_DYN_SMEM(smem);
  float sum = 0.f;
  int t = pd_tid();
  pd_sts<float>(smem + t * 16, 1.f);
  for (int i = 1; i < 4; i++) pd_sts<float>(smem + t * 16 + i * 4, 0.f);
  pd_syncthreads();
  for (int s = 0; s < steps; s++)
#pragma unroll
    for (int u = 0; u < 8; u++) {
      pd_b128 v = pd_lds<pd_b128>(smem + (t ^ ((u + s) & 7)) * 16);
      sum += (float)(v.x[0] ^ v.x[1] ^ v.x[2] ^ v.x[3]);
    }
  pd_stg(out + pd_bid_x() * 512 + t, sum);
}
PD_EXPORT(shared_read, 512);

// Sixteen chains of multiply-adds, four links of each a step.
PD_KERNEL(multiply_adds, 512, 1)(int steps, float *out) {
  float x[16], by = 1.f + (float)steps * 1e-9f;
  for (int i = 0; i < 16; i++) x[i] = (float)(pd_tid() + i);
  for (int s = 0; s < steps; s++)
#pragma unroll
    for (int u = 0; u < 4; u++)
#pragma unroll
      for (int i = 0; i < 16; i++) x[i] = x[i] * by + 1.f;
  float sum = 0.f;
  for (int i = 0; i < 16; i++) sum += x[i];
  pd_stg(out + pd_bid_x() * 512 + pd_tid(), sum);
}
PD_EXPORT(multiply_adds, 512);

// A step: 16 products of a warp (bit 0 of `what`), and two vectors of a thread for the next step (bit 1).
PD_KERNEL(beside, 256, 2)(const pd_b128 *in, int vectors, int steps, int what, float *out) {
  uint32_t a[4] = {}, b[2] = {}, seen = 0;
  float d[8][4] = {};
  int t = pd_bid_x() * 256 + pd_tid(), stride = pd_nbid_x() * 256, at = t % vectors;
  for (int s = 0; s < steps; s++) {
    pd_b128 v[2] = {};
    if (what & 2)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        v[u] = pd_ldg(in + at);
        at = (at + stride) % vectors;
      }
    if (what & 1)
#pragma unroll
      for (int u = 0; u < 16; u++) pd_mma_m16n8k16_f16(d[u % 8], a, b);
#pragma unroll
    for (int u = 0; u < 2; u++) seen ^= v[u].x[0] ^ v[u].x[1] ^ v[u].x[2] ^ v[u].x[3];
  }
  float sum = (float)seen;
  for (int u = 0; u < 8; u++)
    for (int i = 0; i < 4; i++) sum += d[u][i];
  pd_stg(out + t, sum);
}
PD_EXPORT(beside, 256);

// Eight independent accumulators of m16n8k16 a warp, operands in registers.
PD_KERNEL(mma_rate, 256, 1)(int steps, const uint32_t *in, float *out) {
  uint32_t a[4], b[2];
  float d[8][4] = {};
  for (int i = 0; i < 4; i++) a[i] = pd_ldg(in + (pd_tid() + 32 * i) % 256);
  for (int i = 0; i < 2; i++) b[i] = pd_ldg(in + (pd_tid() + 17 * i) % 256);
  for (int s = 0; s < steps; s++)
#pragma unroll
    for (int u = 0; u < 8; u++) pd_mma_m16n8k16_f16(d[u], a, b);
  float sum = 0.f;
  for (int u = 0; u < 8; u++)
    for (int i = 0; i < 4; i++) sum += d[u][i];
  pd_stg(out + pd_bid_x() * 256 + pd_tid(), sum);
}
PD_EXPORT(mma_rate, 256);
