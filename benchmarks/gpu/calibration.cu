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
