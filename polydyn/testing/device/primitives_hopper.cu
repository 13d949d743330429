// One small kernel per primitive of pd_hopper.cuh (sm_90a); cases_hopper.py feeds them.
#include "pd_hopper.cuh"

// ---- TMA loads: one box or column of pixels to shared memory, its bytes out as they lie -------------------------
#define TMA_LOAD(name, ...)                                                                              \
  PD_KERNEL(name, 128, 1)(PD_TMAP(map), int bytes, int x, int y, int z, int w, int v, int kx, int ky, int kz, uint32_t *out) { \
    PD_DYN_SMEM(smem);                                                                                   \
    uint64_t *bar = (uint64_t *)(smem + bytes);                                                          \
    int t = pd_tid();                                                                                    \
    if (t == 0) {                                                                                        \
      pd_mbar_init(bar, 1);                                                                              \
      pd_fence_mbar_init();                                                                              \
    }                                                                                                    \
    pd_syncthreads();                                                                                    \
    if (t == 0) {                                                                                        \
      pd_tma_prefetch(&map);                                                                             \
      pd_mbar_expect_tx(bar, bytes);                                                                     \
      __VA_ARGS__;                                                                                       \
    }                                                                                                    \
    pd_mbar_wait(bar, 0);                                                                                \
    for (int i = t; i < bytes / 4; i += 128) pd_stg(out + i, pd_lds<uint32_t>(smem + i * 4));            \
    (void)z, (void)w, (void)v, (void)kx, (void)ky, (void)kz;                                             \
  }                                                                                                      \
  PD_EXPORT(name, 128);
TMA_LOAD(tma_load_2d, pd_tma_fetch_2d(&map, x, y), pd_tma_load_2d(smem, &map, x, y, bar))
TMA_LOAD(tma_load_3d, pd_tma_fetch_3d(&map, x, y, z), pd_tma_load_3d(smem, &map, x, y, z, bar))
TMA_LOAD(tma_load_4d, pd_tma_fetch_4d(&map, x, y, z, w), pd_tma_load_4d(smem, &map, x, y, z, w, bar))
TMA_LOAD(tma_pixels_3d, pd_tma_pixels_3d(smem, &map, x, y, z, kx, bar))
TMA_LOAD(tma_pixels_4d, pd_tma_pixels_4d(smem, &map, x, y, z, w, kx, ky, bar))
TMA_LOAD(tma_pixels_5d, pd_tma_pixels_5d(smem, &map, x, y, z, w, v, kx, ky, kz, bar))

// ---- TMA stores: shared memory written plainly, fenced, then moved ----------------------------------------------
#define TMA_STORE(name, ...)                                                                             \
  PD_KERNEL(name, 128, 1)(PD_TMAP(map), const uint32_t *in, int bytes, int x, int y, int z) {            \
    PD_DYN_SMEM(smem);                                                                                   \
    int t = pd_tid();                                                                                    \
    for (int i = t; i < bytes / 4; i += 128) pd_sts<uint32_t>(smem + i * 4, pd_ldg(in + i));             \
    pd_fence_proxy_async();                                                                              \
    pd_syncthreads();                                                                                    \
    if (t == 0) {                                                                                        \
      __VA_ARGS__;                                                                                       \
      pd_tma_store_commit();                                                                             \
      pd_tma_store_wait_read<0>();                                                                       \
      pd_tma_store_wait<0>();                                                                            \
    }                                                                                                    \
    (void)z;                                                                                             \
  }                                                                                                      \
  PD_EXPORT(name, 128);
TMA_STORE(tma_store_2d, pd_tma_store_2d(&map, smem, x, y))
TMA_STORE(tma_store_3d, pd_tma_store_3d(&map, smem, x, y, z))

// ---- clusters: each of two blocks brings half of the lines to both, twice; a slot is filled when both have read it --
#define CLUSTER(name, ...)                                                                               \
  PD_KERNEL_CLUSTER(name, 64, 1, 2)(PD_TMAP(map), int bytes, int lines, int x, int y, int z, int w, uint32_t *out) { \
    PD_DYN_SMEM(smem);                                                                                   \
    uint64_t *full = (uint64_t *)(smem + 2 * bytes), *empty = full + 1;                                  \
    const int t = pd_tid(), rank = pd_cluster_rank();                                                    \
    unsigned char *half = smem + rank * bytes;                                                           \
    if (t == 0) {                                                                                        \
      pd_mbar_init(full, 1);                                                                             \
      pd_mbar_init(empty, 2);                                                                            \
      pd_fence_mbar_init();                                                                              \
    }                                                                                                    \
    pd_cluster_start();                                                                                  \
    for (int i = 0; i < 2; i++) {                                                                        \
      const int line = y + (2 * i + rank) * lines;                                                       \
      if (t == 0) {                                                                                      \
        pd_mbar_wait(empty, 1 - i);                                                                      \
        pd_mbar_expect_tx(full, 2 * bytes);                                                              \
        __VA_ARGS__;                                                                                     \
      }                                                                                                  \
      pd_mbar_wait(full, i);                                                                             \
      for (int j = t; j < bytes / 2; j += 64)                                                            \
        pd_stg(out + (pd_bid_x() * 2 + i) * (bytes / 2) + j, pd_lds<uint32_t>(smem + j * 4));            \
      pd_syncthreads();                                                                                  \
      if (t < 2) pd_mbar_arrive_at(empty, t);                                                            \
    }                                                                                                    \
    pd_cluster_arrive();                                                                                 \
    pd_cluster_wait();                                                                                   \
    (void)z, (void)w;                                                                                    \
  }                                                                                                      \
  PD_EXPORT(name, 64);
CLUSTER(cluster_load_2d, pd_tma_load_2d_to(half, &map, x, line, full, 3))
CLUSTER(cluster_load_3d, pd_tma_load_3d_to(half, &map, x, line, z, full, 3))
CLUSTER(cluster_load_4d, pd_tma_load_4d_to(half, &map, x, line, z, w, full, 3))

// ---- clusters: what a thread of each of four blocks has stored, added in their order, twice ------------------------
PD_KERNEL_CLUSTER(cluster_sums, 64, 1, 4)(const float *x, float *out) {
  PD_DYN_SMEM(smem);
  const int t = pd_tid();
  float total[4];
  for (int i = 0; i < 2; i++) {
    pd_sts<float>(smem + t * 4, pd_ldg(x + (pd_bid_x() * 2 + i) * 64 + t));
    pd_cluster_arrive();
    pd_cluster_wait();
    for (int e = 0; e < 4; e++) total[e] = 0.f;
    for (int b = 0; b < 4; b++) {
      float one[1], two[2], four[4];
      const int first = t / 4 * 16;
      pd_lds_wide_at<4>(four, smem + first, b);
      pd_lds_wide_at<2>(two, smem + first + 8, b);
      pd_lds_wide_at<1>(one, smem + first, b);
      total[0] += one[0], total[1] += four[1], total[2] += two[0], total[3] += two[1];
    }
    pd_stg(out + (pd_bid_x() * 2 + i) * 64 + t, total[t % 4]);
    pd_cluster_arrive();
    pd_cluster_wait();
  }
}
PD_EXPORT(cluster_sums, 64);

// ---- mbarrier: two halves hand a counter to and fro -------------------------------------------------------------
PD_KERNEL(mbarrier_phases, 64, 1)(int rounds, int32_t *out) {
  PD_DYN_SMEM(smem);
  uint64_t *ping = (uint64_t *)smem, *pong = ping + 1;
  int t = pd_tid();
  if (t == 0) {
    pd_mbar_init(ping, 32);
    pd_mbar_init(pong, 32);
    pd_fence_mbar_init();
    pd_sts<int32_t>(smem + 16, 1);
  }
  pd_syncthreads();
  for (int i = 0; i < rounds; i++) {
    if (t < 32) {
      if (t == 0) pd_sts<int32_t>(smem + 16, pd_lds<int32_t>(smem + 16) * 2);
      pd_mbar_arrive(ping);
      pd_mbar_wait(pong, i & 1);
    } else {
      pd_mbar_wait(ping, i & 1);
      if (t == 32) pd_sts<int32_t>(smem + 16, pd_lds<int32_t>(smem + 16) + 3);
      pd_mbar_arrive(pong);
    }
  }
  pd_syncthreads();
  pd_stg(out + t, pd_lds<int32_t>(smem + 16));
}
PD_EXPORT(mbarrier_phases, 64);

// ---- wgmma: 128 bytes of k; A 64 rows and B N rows (or 64 rows of N columns when MN-major) by swizzled TMA ----------
#define WGMMA(name, N, acc, TB, ...)                                                                     \
  PD_KERNEL(name, 128, 1)(PD_TMAP(ta), PD_TMAP(tb), const acc *c, acc *out) {                            \
    PD_DYN_SMEM(smem);                                                                                   \
    unsigned char *sb = smem + 8192;                                                                     \
    uint64_t *bar = (uint64_t *)(smem + 8192 + N * 128);                                                 \
    int t = pd_tid(), row = t / 32 * 16 + t % 32 / 4;                                                    \
    if (t == 0) {                                                                                        \
      pd_mbar_init(bar, 1);                                                                              \
      pd_fence_mbar_init();                                                                              \
      pd_mbar_expect_tx(bar, 8192 + N * 128);                                                            \
      pd_tma_load_2d(smem, &ta, 0, 0, bar);                                                              \
      if (TB)                                                                                            \
        for (int p = 0; p < N / 64; p++) pd_tma_load_2d(sb + p * 8192, &tb, p * 64, 0, bar);             \
      else                                                                                               \
        pd_tma_load_2d(sb, &tb, 0, 0, bar);                                                              \
    }                                                                                                    \
    acc d[N / 2];                                                                                        \
    PD_UNROLL                                                                                            \
    for (int i = 0; i < N / 2; i++) d[i] = pd_ldg(c + (row + i / 2 % 2 * 8) * N + i / 4 * 8 + t % 4 * 2 + i % 2); \
    pd_syncthreads();                                                                                    \
    pd_mbar_wait(bar, 0);                                                                                \
    pd_wgmma_fence();                                                                                    \
    PD_UNROLL                                                                                            \
    for (int k = 0; k < 4; k++)                                                                          \
      __VA_ARGS__(d, pd_desc_k(smem + k * 32), TB ? pd_desc_mn(sb + k * 2048, 8192) : pd_desc_k(sb + k * 32), 1); \
    pd_wgmma_commit();                                                                                   \
    pd_wgmma_wait<0>();                                                                                  \
    PD_UNROLL                                                                                            \
    for (int i = 0; i < N / 2; i++) pd_stg(out + (row + i / 2 % 2 * 8) * N + i / 4 * 8 + t % 4 * 2 + i % 2, d[i]); \
  }                                                                                                      \
  PD_EXPORT(name, 128);
WGMMA(wgmma_f16_n32, 32, float, 0, pd_wgmma_m64n32k16_f16<0>)
WGMMA(wgmma_f16_n64, 64, float, 0, pd_wgmma_m64n64k16_f16<0>)
WGMMA(wgmma_f16_n96, 96, float, 0, pd_wgmma_m64n96k16_f16<0>)
WGMMA(wgmma_f16_n128, 128, float, 0, pd_wgmma_m64n128k16_f16<0>)
WGMMA(wgmma_f16_n192, 192, float, 0, pd_wgmma_m64n192k16_f16<0>)
WGMMA(wgmma_f16_n256, 256, float, 0, pd_wgmma_m64n256k16_f16<0>)
WGMMA(wgmma_bf16_n32, 32, float, 0, pd_wgmma_m64n32k16_bf16<0>)
WGMMA(wgmma_bf16_n64, 64, float, 0, pd_wgmma_m64n64k16_bf16<0>)
WGMMA(wgmma_bf16_n128, 128, float, 0, pd_wgmma_m64n128k16_bf16<0>)
WGMMA(wgmma_bf16_n256, 256, float, 0, pd_wgmma_m64n256k16_bf16<0>)
WGMMA(wgmma_f16_n64_mn, 64, float, 1, pd_wgmma_m64n64k16_f16<1>)
WGMMA(wgmma_f16_n128_mn, 128, float, 1, pd_wgmma_m64n128k16_f16<1>)
WGMMA(wgmma_f16_n256_mn, 256, float, 1, pd_wgmma_m64n256k16_f16<1>)
WGMMA(wgmma_bf16_n128_mn, 128, float, 1, pd_wgmma_m64n128k16_bf16<1>)
WGMMA(wgmma_tf32_n32, 32, float, 0, pd_wgmma_m64n32k8_tf32)
WGMMA(wgmma_tf32_n96, 96, float, 0, pd_wgmma_m64n96k8_tf32)
WGMMA(wgmma_tf32_n128, 128, float, 0, pd_wgmma_m64n128k8_tf32)
WGMMA(wgmma_tf32_n256, 256, float, 0, pd_wgmma_m64n256k8_tf32)
WGMMA(wgmma_e4m3_n128, 128, float, 0, pd_wgmma_m64n128k32_e4m3)
WGMMA(wgmma_e5m2_n256, 256, float, 0, pd_wgmma_m64n256k32_e5m2)
WGMMA(wgmma_e4m3e5m2_n128, 128, float, 0, pd_wgmma_m64n128k32_e4m3e5m2)
WGMMA(wgmma_e5m2e4m3_n64, 64, float, 0, pd_wgmma_m64n64k32_e5m2e4m3)
WGMMA(wgmma_s8_n64, 64, int32_t, 0, pd_wgmma_m64n64k32_s8)
WGMMA(wgmma_s8_n128, 128, int32_t, 0, pd_wgmma_m64n128k32_s8)
WGMMA(wgmma_s8_n192, 192, int32_t, 0, pd_wgmma_m64n192k32_s8)
WGMMA(wgmma_s8_n256, 256, int32_t, 0, pd_wgmma_m64n256k32_s8)
WGMMA(wgmma_u8s8_n128, 128, int32_t, 0, pd_wgmma_m64n128k32_u8s8)
WGMMA(wgmma_u8s8_n256, 256, int32_t, 0, pd_wgmma_m64n256k32_u8s8)
WGMMA(wgmma_s8u8_n128, 128, int32_t, 0, pd_wgmma_m64n128k32_s8u8)
WGMMA(wgmma_s8u8_n256, 256, int32_t, 0, pd_wgmma_m64n256k32_s8u8)
WGMMA(wgmma_u8_n128, 128, int32_t, 0, pd_wgmma_m64n128k32_u8)
WGMMA(wgmma_u8_n256, 256, int32_t, 0, pd_wgmma_m64n256k32_u8)

// ---- the same with A in registers, read from memory as the fragments of four steps; descriptors advanced by bytes ------
#define WGMMA_RS(name, N, TB, ...)                                                                       \
  PD_KERNEL(name, 128, 1)(PD_TMAP(tb), const uint32_t *a, const float *c, float *out) {                  \
    PD_DYN_SMEM(smem);                                                                                   \
    uint64_t *bar = (uint64_t *)(smem + N * 128);                                                        \
    int t = pd_tid(), row = t / 32 * 16 + t % 32 / 4;                                                    \
    if (t == 0) {                                                                                        \
      pd_mbar_init(bar, 1);                                                                              \
      pd_fence_mbar_init();                                                                              \
      pd_mbar_expect_tx(bar, N * 128);                                                                   \
      for (int p = 0; p < (TB ? N / 64 : 1); p++) pd_tma_load_2d(smem + p * 8192, &tb, p * 64, 0, bar);  \
    }                                                                                                    \
    float d[N / 2];                                                                                      \
    uint32_t r[16];                                                                                      \
    PD_UNROLL                                                                                            \
    for (int i = 0; i < N / 2; i++) d[i] = pd_ldg(c + (row + i / 2 % 2 * 8) * N + i / 4 * 8 + t % 4 * 2 + i % 2); \
    PD_UNROLL                                                                                            \
    for (int i = 0; i < 16; i++) r[i] = pd_ldg(a + (row + i % 2 * 8) * 32 + i / 2 * 4 + t % 4);          \
    pd_syncthreads();                                                                                    \
    pd_mbar_wait(bar, 0);                                                                                \
    const uint64_t b = TB ? pd_desc_mn(smem, 8192) : pd_desc_k(smem);                                    \
    pd_wgmma_fence();                                                                                    \
    PD_UNROLL                                                                                            \
    for (int k = 0; k < 4; k++) __VA_ARGS__(d, r + k * 4, pd_desc_at(b, k * (TB ? 2048 : 32)), 1);       \
    pd_wgmma_commit();                                                                                   \
    pd_wgmma_wait<0>();                                                                                  \
    pd_wgmma_keep<N / 2>(d);                                                                             \
    pd_wgmma_keep<16>(r);                                                                                \
    PD_UNROLL                                                                                            \
    for (int i = 0; i < N / 2; i++) pd_stg(out + (row + i / 2 % 2 * 8) * N + i / 4 * 8 + t % 4 * 2 + i % 2, d[i]); \
  }                                                                                                      \
  PD_EXPORT(name, 128);
WGMMA_RS(wgmma_rs_f16_n64, 64, 0, pd_wgmma_rs_m64n64k16_f16<0>)
WGMMA_RS(wgmma_rs_f16_n128_mn, 128, 1, pd_wgmma_rs_m64n128k16_f16<1>)
WGMMA_RS(wgmma_rs_f16_n256_mn, 256, 1, pd_wgmma_rs_m64n256k16_f16<1>)
WGMMA_RS(wgmma_rs_bf16_n32, 32, 0, pd_wgmma_rs_m64n32k16_bf16<0>)
WGMMA_RS(wgmma_rs_bf16_n192_mn, 192, 1, pd_wgmma_rs_m64n192k16_bf16<1>)

// ---- warps' products of 8-bit floats: fragments in, fragments out; sm_89 and newer ---------------------------------
#define MMA(name)                                                                                        \
  PD_KERNEL(mma_##name, 32, 1)(const pd_b128 *a, const pd_b64 *b, const float *c, float *out) {          \
    int t = pd_tid();                                                                                    \
    pd_b128 fa = pd_ldg(a + t);                                                                          \
    pd_b64 fb = pd_ldg(b + t);                                                                           \
    float d[4];                                                                                          \
    for (int i = 0; i < 4; i++) d[i] = pd_ldg(c + t * 4 + i);                                            \
    pd_mma_m16n8k32_##name(d, fa.x, fb.x);                                                               \
    for (int i = 0; i < 4; i++) pd_stg(out + t * 4 + i, d[i]);                                           \
  }                                                                                                      \
  PD_EXPORT(mma_##name, 32);
MMA(e4m3)
MMA(e5m2)
MMA(e4m3e5m2)
MMA(e5m2e4m3)

// ---- where dynamic shared memory begins (swizzles follow from the address), and the fields of descriptors ----------
PD_KERNEL(shared_places, 32, 1)(uint32_t *base, uint64_t *fields) {
  PD_DYN_SMEM(smem);
  int t = pd_tid();
  uint64_t start = (pd_saddr(smem) & 0x3ffff) >> 4;
  pd_stg(base + t, pd_saddr(smem) % 1024);
  pd_stg(fields + t, (t % 2 ? pd_desc_mn(smem + t * 32, 8192) : pd_desc_k(smem + t * 32)) - start);
}
PD_EXPORT(shared_places, 32);
