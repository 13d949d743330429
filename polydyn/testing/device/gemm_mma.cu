// C = relu(A * B + bias), f16 in and out, f32 inside, row major; M, N, K and all pitches at run time.
// Hand-written, for tests and for the first day with a GPU: the shape that generated mma.sync kernels should have.
// VECTOR: bytes per global access (16, 8 or 4; pitches must be multiples of it). All tails are zero-filled copies.
#include "pd_device.cuh"
#ifndef BM
#define BM 128
#define BN 128
#define WM 64
#define WN 32
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef VECTOR
#define VECTOR 16
#endif
#define BK 32
#define THREADS (BM / WM * (BN / WN) * 32)
#define A_BYTES (BM * BK * 2)
#define STAGE (A_BYTES + BK * BN * 2)
#define PITCH ((BN + 8) * 2)  // of the staged output tile: rows 4 banks apart

// Byte offsets of 16-byte chunk c of row r: rows of 64 bytes (A) and of at least 128 (B), no ldmatrix conflicts.
PD_DEV int at_a(int r, int c) { return r * (BK * 2) + ((c ^ ((r >> 1) & 3)) << 4); }
PD_DEV int at_b(int r, int c) { return r * (BN * 2) + ((c ^ (r & 7)) << 4); }

// Columns [col, col + 8) of a row to one chunk; zeros from column `cols` on, or throughout when the row is outside.
PD_DEV void copy_chunk(unsigned char *s, const pd_half *row, int col, int cols, bool inside) {
  PD_UNROLL
  for (int i = 0; i < 16; i += VECTOR) {
    int c = col + i / 2, bytes = inside ? pd_imax(pd_imin((cols - c) * 2, VECTOR), 0) : 0;
    pd_cp_async<VECTOR>(s + i, bytes ? row + c : row, bytes);
  }
}
PD_DEV void copy_stage(unsigned char *s, const pd_half *a, const pd_half *b, int m, int n, int k, int lda, int ldb, int m0,
                       int n0, int k0) {
  PD_UNROLL
  for (int q = 0; q < BM * (BK / 8) / THREADS; q++) {
    int i = q * THREADS + pd_tid(), r = i / (BK / 8), c = i % (BK / 8);
    bool inside = m0 + r < m;
    copy_chunk(s + at_a(r, c), a + (int64_t)(inside ? m0 + r : 0) * lda, k0 + c * 8, k, inside);
  }
  PD_UNROLL
  for (int q = 0; q < BK * (BN / 8) / THREADS; q++) {
    int i = q * THREADS + pd_tid(), r = i / (BN / 8), c = i % (BN / 8);
    bool inside = k0 + r < k;
    copy_chunk(s + A_BYTES + at_b(r, c), b + (int64_t)(inside ? k0 + r : 0) * ldb, n0 + c * 8, n, inside);
  }
}
PD_DEV void multiply_stage(float (*acc)[WN / 8][4], const unsigned char *s, int wm, int wn) {
  int lane = pd_tid() % 32;
  PD_UNROLL
  for (int kk = 0; kk < BK / 16; kk++) {
    uint32_t fa[WM / 16][4], fb[WN / 16][4];
    PD_UNROLL
    for (int i = 0; i < WM / 16; i++) pd_ldmatrix_x4(fa[i], s + at_a(wm + i * 16 + lane % 16, kk * 2 + lane / 16));
    PD_UNROLL
    for (int j = 0; j < WN / 16; j++)
      pd_ldmatrix_x4_trans(fb[j], s + A_BYTES + at_b(kk * 16 + lane % 16, wn / 8 + j * 2 + lane / 16));
    PD_UNROLL
    for (int i = 0; i < WM / 16; i++)
      PD_UNROLL
      for (int j = 0; j < WN / 8; j++) pd_mma_m16n8k16_f16(acc[i][j], fa[i], fb[j / 2] + j % 2 * 2);
  }
}
// Bias and relu in registers, tile staged in shared memory, rows stored in VECTOR-byte pieces.
PD_DEV void store_tile(float (*acc)[WN / 8][4], unsigned char *smem, const pd_half *bias, pd_half *c, int m, int n, int ldc,
                       int m0, int n0, int wm, int wn) {
  int lane = pd_tid() % 32;
  PD_UNROLL
  for (int j = 0; j < WN / 8; j++) {
    int col = wn + j * 8 + lane % 4 * 2;
    float b0 = n0 + col < n ? pd_f16_to_f32(pd_ldg(bias + n0 + col)) : 0.f;
    float b1 = n0 + col + 1 < n ? pd_f16_to_f32(pd_ldg(bias + n0 + col + 1)) : 0.f;
    PD_UNROLL
    for (int i = 0; i < WM / 16; i++)
      PD_UNROLL
      for (int h = 0; h < 2; h++) {
        float x = pd_max(acc[i][j][h * 2] + b0, 0.f), y = pd_max(acc[i][j][h * 2 + 1] + b1, 0.f);
        pd_sts<uint32_t>(smem + (wm + i * 16 + h * 8 + lane / 4) * PITCH + col * 2, pd_pack_f16x2(x, y));
      }
  }
  pd_syncthreads();
  PD_UNROLL
  for (int q = 0; q < BM * (BN / 8) / THREADS; q++) {
    int i = q * THREADS + pd_tid(), r = i / (BN / 8), col = i % (BN / 8) * 8;
    pd_b128 v = pd_lds<pd_b128>(smem + r * PITCH + col * 2);
    pd_half *to = c + (int64_t)(m0 + r) * ldc + n0 + col;
    if (m0 + r >= m || n0 + col >= n) continue;
    if (VECTOR == 16 && n0 + col + 8 <= n) {
      pd_stg((pd_b128 *)to, v);
      continue;
    }
    PD_UNROLL
    for (int e = 0; e < 8; e++)
      if (n0 + col + e < n) pd_stg(to + e, pd_half{(uint16_t)(v.x[e / 2] >> e % 2 * 16)});
  }
}

PD_KERNEL(gemm_mma, THREADS, 2)(const pd_half *a, const pd_half *b, const pd_half *bias, pd_half *c, int m, int n, int k,
                                int lda, int ldb, int ldc) {
  PD_DYN_SMEM(smem);
  int warp = pd_tid() / 32, wm = warp % (BM / WM) * WM, wn = warp / (BM / WM) * WN;
  int columns = (n + BN - 1) / BN, m0 = pd_bid_x() / columns * BM, n0 = pd_bid_x() % columns * BN, steps = (k + BK - 1) / BK;
  float acc[WM / 16][WN / 8][4] = {};
  PD_UNROLL
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < steps) copy_stage(smem + s * STAGE, a, b, m, n, k, lda, ldb, m0, n0, s * BK);
    pd_cp_async_commit();
  }
  int read = 0, write = STAGES - 1;
  for (int step = 0; step < steps; step++) {
    pd_cp_async_wait<STAGES - 2>();
    pd_syncthreads();
    if (step + STAGES - 1 < steps)
      copy_stage(smem + write * STAGE, a, b, m, n, k, lda, ldb, m0, n0, (step + STAGES - 1) * BK);
    pd_cp_async_commit();
    multiply_stage(acc, smem + read * STAGE, wm, wn);
    read = read + 1 == STAGES ? 0 : read + 1;
    write = write + 1 == STAGES ? 0 : write + 1;
  }
  pd_cp_async_wait<0>();
  pd_syncthreads();
  store_tile(acc, smem, bias, c, m, n, ldc, m0, n0, wm, wn);
}
PD_EXPORT(gemm_mma, THREADS);
