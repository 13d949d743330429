// C = relu(A * B + bias) as gemm_mma.cu, on sm_90a: one TMA producer warpgroup, consumers with wgmma, a ring of
// mbarriers. A and B row major (B is MN-major for wgmma); tensor maps carry extents and pitches, so tails are zeros.
#include "pd_hopper.cuh"
#ifndef BN
#define BN 128
#endif
#ifndef STAGES
#define STAGES 4
#endif
#define BM 128
#define BK 64
#define CONSUMERS (BM / 64)
#define THREADS ((CONSUMERS + 1) * 128)
#define A_BYTES (BM * BK * 2)
#define PANEL (BK * 128)  // 64 columns of B
#define STAGE (A_BYTES + BN / 64 * PANEL)
#define PASTE_(a, b, c) a##b##c
#define PASTE(a, b, c) PASTE_(a, b, c)
#define WGMMA PASTE(pd_wgmma_m64n, BN, k16_f16)

PD_DEV void produce(unsigned char *smem, uint64_t *full, uint64_t *empty, const pd_tmap *ta, const pd_tmap *tb, int m0, int n0,
                    int steps) {
  int slot = 0, parity = 0;
  for (int step = 0; step < steps; step++) {
    unsigned char *s = smem + slot * STAGE;
    pd_mbar_wait(empty + slot, parity ^ 1);
    pd_mbar_expect_tx(full + slot, STAGE);
    pd_tma_load_2d(s, ta, step * BK, m0, full + slot);
    PD_UNROLL
    for (int p = 0; p < BN / 64; p++) pd_tma_load_2d(s + A_BYTES + p * PANEL, tb, n0 + p * 64, step * BK, full + slot);
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
}
PD_DEV void consume(float *acc, const unsigned char *smem, uint64_t *full, uint64_t *empty, int steps) {
  int slot = 0, parity = 0, previous = -1;
  for (int step = 0; step < steps; step++) {
    const unsigned char *sa = smem + slot * STAGE + (pd_tid() / 128 - 1) * 8192, *sb = smem + slot * STAGE + A_BYTES;
    pd_mbar_wait(full + slot, parity);
    pd_wgmma_fence();
    PD_UNROLL
    for (int k = 0; k < BK / 16; k++) WGMMA<1>(acc, pd_desc_k(sa + k * 32), pd_desc_mn(sb + k * 2048, PANEL), step + k > 0);
    pd_wgmma_commit();
    pd_wgmma_wait<1>();  // the previous step's operands are read: its slot is free
    if (previous >= 0 && pd_tid() % 128 == 0) pd_mbar_arrive(empty + previous);
    previous = slot;
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  pd_wgmma_wait<0>();
}
PD_DEV void store_tile(const float *acc, const pd_half *bias, pd_half *c, int m, int n, int ldc, int m0, int n0) {
  int t = pd_tid() % 128, row = m0 + (pd_tid() / 128 - 1) * 64 + t / 32 * 16 + t % 32 / 4;
  PD_UNROLL
  for (int j = 0; j < BN / 8; j++) {
    int col = n0 + j * 8 + t % 4 * 2;
    float b0 = col < n ? pd_f16_to_f32(pd_ldg(bias + col)) : 0.f, b1 = col + 1 < n ? pd_f16_to_f32(pd_ldg(bias + col + 1)) : 0.f;
    PD_UNROLL
    for (int h = 0; h < 2; h++) {
      if (row + h * 8 >= m) continue;
      pd_half *to = c + (int64_t)(row + h * 8) * ldc + col;
      uint32_t two = pd_pack_f16x2(pd_max(acc[j * 4 + h * 2] + b0, 0.f), pd_max(acc[j * 4 + h * 2 + 1] + b1, 0.f));
      if (col + 1 < n) pd_stg((uint32_t *)to, two);
      else if (col < n) pd_stg(to, pd_half{(uint16_t)two});
    }
  }
}

PD_KERNEL(gemm_wgmma, THREADS, 1)(PD_TMAP(ta), PD_TMAP(tb), const pd_half *bias, pd_half *c, int m, int n, int k, int ldc) {
  PD_DYN_SMEM(smem);
  uint64_t *full = (uint64_t *)(smem + STAGES * STAGE), *empty = full + STAGES;
  int columns = (n + BN - 1) / BN, m0 = pd_bid_x() / columns * BM, n0 = pd_bid_x() % columns * BN, steps = (k + BK - 1) / BK;
  if (pd_tid() == 0) {
    for (int s = 0; s < STAGES; s++) {
      pd_mbar_init(full + s, 1);
      pd_mbar_init(empty + s, CONSUMERS);
    }
    pd_fence_mbar_init();
  }
  pd_syncthreads();
  if (pd_tid() < 128) {
    pd_reg_dec<40>();
    if (pd_tid() == 0) produce(smem, full, empty, &ta, &tb, m0, n0, steps);
  } else {
    pd_reg_inc<232>();
    float acc[BN / 2];
    PD_UNROLL
    for (int i = 0; i < BN / 2; i++) acc[i] = 0.f;
    consume(acc, smem, full, empty, steps);
    store_tile(acc, bias, c, m, n, ldc, m0, n0);
  }
}
PD_EXPORT(gemm_wgmma, THREADS);
