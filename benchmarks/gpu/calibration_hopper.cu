// Rates of wgmma from shared memory, and meetings of a cluster; calibration.py launches them.
#include "pd_hopper.cuh"

// Two warpgroups, each m64nNk16 on a tile of its own in shared memory: 4 instructions a group, two groups in flight.
// TB: B lies along N (its descriptor is another), else along K.
#define WGMMA_RATE(N, TB, name)                                                                                 \
  PD_KERNEL(name, 256, 1)(int steps, const uint32_t *in, float *out) {                                          \
    PD_DYN_SMEM(smem);                                                                                          \
    int t = pd_tid();                                                                                           \
    for (int i = t; i < (128 * 128 + N * 128) / 4; i += 256) pd_sts<uint32_t>(smem + i * 4, pd_ldg(in + i % 256)); \
    pd_fence_proxy_async();                                                                                     \
    pd_syncthreads();                                                                                           \
    float d[N / 2] = {};                                                                                        \
    unsigned char *a = smem + t / 128 * 8192, *b = smem + 16384;                                                         \
    for (int s = 0; s < steps; s++) {                                                                           \
      pd_wgmma_fence();                                                                                         \
      for (int k = 0; k < 4; k++)                                                                               \
        pd_wgmma_m64n##N##k16_f16<TB>(d, pd_desc_k(a + 32 * k), TB ? pd_desc_mn(b + 2048 * k, 8192) : pd_desc_k(b + 32 * k), 1); \
      pd_wgmma_commit();                                                                                        \
      pd_wgmma_wait<1>();                                                                                       \
    }                                                                                                           \
    pd_wgmma_wait<0>();                                                                                         \
    float sum = 0.f;                                                                                            \
    for (int i = 0; i < N / 2; i++) sum += d[i];                                                                \
    pd_stg(out + pd_bid_x() * 256 + t, sum);                                                                    \
  }                                                                                                             \
  PD_EXPORT(name, 256);
WGMMA_RATE(64, 0, wgmma_64_k)
WGMMA_RATE(128, 0, wgmma_128_k)
WGMMA_RATE(192, 0, wgmma_192_k)
WGMMA_RATE(256, 0, wgmma_256_k)
WGMMA_RATE(64, 1, wgmma_64_n)
WGMMA_RATE(256, 1, wgmma_256_n)

// `steps` meetings of a cluster of two blocks.
PD_KERNEL_CLUSTER(meetings, 128, 1, 2)(int steps, float *out) {
  for (int i = 0; i < steps; i++) {
    pd_cluster_arrive();
    pd_cluster_wait();
  }
  if (steps < 0) pd_stg(out, 0.f);
}
PD_EXPORT(meetings, 128);
