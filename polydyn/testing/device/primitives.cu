// One small kernel per primitive of pd_device.cuh; cases.py feeds them and says what must come out.
// They run emulated in the tests and on a GPU in conformance.py.
#include "pd_device.cuh"

// ---- ldmatrix: rows of 16 bytes in shared memory, one fragment register per matrix and lane ---------------------
#define LDMATRIX(name, n, call)                                                                          \
  PD_KERNEL(name, 32, 1)(const uint32_t *in, uint32_t *out) {                                            \
    PD_DYN_SMEM(smem);                                                                                   \
    int t = pd_tid();                                                                                    \
    for (int i = t; i < n * 32; i += 32) pd_fetch(in + i), pd_sts<uint32_t>(smem + i * 4, pd_ldg(in + i)); \
    pd_syncthreads();                                                                                    \
    uint32_t r[4];                                                                                       \
    call(r, smem + t % (n * 8) * 16);                                                                    \
    for (int i = 0; i < n; i++) pd_stg(out + t * n + i, r[i]);                                           \
  }                                                                                                      \
  PD_EXPORT(name, 32);
LDMATRIX(ldmatrix_x1, 1, pd_ldmatrix_x1)
LDMATRIX(ldmatrix_x2, 2, pd_ldmatrix_x2)
LDMATRIX(ldmatrix_x4, 4, pd_ldmatrix_x4)
LDMATRIX(ldmatrix_x1_trans, 1, pd_ldmatrix_x1_trans)
LDMATRIX(ldmatrix_x2_trans, 2, pd_ldmatrix_x2_trans)
LDMATRIX(ldmatrix_x4_trans, 4, pd_ldmatrix_x4_trans)

// ---- mma: fragments in, fragments out ---------------------------------------------------------------------------
#define MMA(name, acc, call)                                                                             \
  PD_KERNEL(name, 32, 1)(const pd_b128 *a, const pd_b64 *b, const acc *c, acc *out) {                    \
    int t = pd_tid();                                                                                    \
    pd_b128 fa = pd_ldg(a + t);                                                                          \
    pd_b64 fb = pd_ldg(b + t);                                                                           \
    acc d[4];                                                                                            \
    for (int i = 0; i < 4; i++) d[i] = pd_ldg(c + t * 4 + i);                                            \
    call(d, fa.x, fb.x);                                                                                 \
    for (int i = 0; i < 4; i++) pd_stg(out + t * 4 + i, d[i]);                                           \
  }                                                                                                      \
  PD_EXPORT(name, 32);
MMA(mma_f16, float, pd_mma_m16n8k16_f16)
MMA(mma_bf16, float, pd_mma_m16n8k16_bf16)
MMA(mma_tf32, float, pd_mma_m16n8k8_tf32)
MMA(mma_s8, int32_t, pd_mma_m16n8k32_s8)
MMA(mma_u8, int32_t, pd_mma_m16n8k32_u8)
MMA(mma_s8u8, int32_t, pd_mma_m16n8k32_s8u8)
MMA(mma_u8s8, int32_t, pd_mma_m16n8k32_u8s8)

// ---- four products of bytes and a sum --------------------------------------------------------------------------
#define DP4A(name)                                                                                       \
  PD_KERNEL(name, 32, 1)(const uint32_t *a, const uint32_t *b, const int32_t *c, int32_t *out) {         \
    int t = pd_tid();                                                                                    \
    pd_stg(out + t, pd_##name(pd_ldg(a + t), pd_ldg(b + t), pd_ldg(c + t)));                             \
  }                                                                                                      \
  PD_EXPORT(name, 32);
DP4A(dp4a_s8)
DP4A(dp4a_u8)
DP4A(dp4a_u8s8)
DP4A(dp4a_s8u8)

// ---- a tile of 32 steps of 16 bytes, contiguous along its columns, to the column operands of two mma --------------
PD_KERNEL(byte_columns, 32, 1)(const uint32_t *in, uint32_t *out) {
  PD_DYN_SMEM(smem);
  int t = pd_tid(), m = t / 8, i = t % 8;
  for (int e = t; e < 128; e += 32) pd_sts<uint32_t>(smem + e * 4, pd_ldg(in + e));
  pd_syncthreads();
  uint32_t r[4];
  pd_ldmatrix_x4_trans(r, smem + (m / 2 * 16 + i / 2 * 4 + (m + i / 4) % 2 * 2 + i % 2) * 16);
  pd_byte_columns(r, t);
  for (int e = 0; e < 4; e++) pd_stg(out + t * 4 + e, r[e]);
}
PD_EXPORT(byte_columns, 32);

// ---- cp.async with every source size, in two groups -------------------------------------------------------------
#define CP_ASYNC(name, V, copy)                                                                          \
  PD_KERNEL(name, 64, 1)(const uint8_t *in, const int32_t *sizes, uint32_t *out) {                       \
    PD_DYN_SMEM(smem);                                                                                   \
    int t = pd_tid();                                                                                    \
    for (int g = 0; g < 2; g++) {                                                                        \
      copy<V>(smem + (g * 64 + t) * V, in + (g * 64 + t) * V, pd_ldg(sizes + g * 64 + t));               \
      pd_cp_async_commit();                                                                              \
    }                                                                                                    \
    pd_cp_async_wait<1>();                                                                               \
    pd_syncthreads();                                                                                    \
    for (int i = 0; i < V / 4; i++) pd_stg(out + t * (V / 4) + i, pd_lds<uint32_t>(smem + (63 - t) * V + i * 4)); \
    pd_cp_async_wait<0>();                                                                               \
    pd_syncthreads();                                                                                    \
    for (int i = 0; i < V / 4; i++)                                                                      \
      pd_stg(out + (64 + t) * (V / 4) + i, pd_lds<uint32_t>(smem + (127 - t) * V + i * 4));              \
  }                                                                                                      \
  PD_EXPORT(name, 64);
CP_ASYNC(cp_async_16, 16, pd_cp_async)
CP_ASYNC(cp_async_8, 8, pd_cp_async)
CP_ASYNC(cp_async_4, 4, pd_cp_async)
CP_ASYNC(cp_async_if_16, 16, pd_cp_async_if)
CP_ASYNC(cp_async_if_8, 8, pd_cp_async_if)
CP_ASYNC(cp_async_if_4, 4, pd_cp_async_if)

// ---- shuffles and ballot ----------------------------------------------------------------------------------------
PD_KERNEL(shuffles, 32, 1)(const float *in, float *out, uint32_t *mask, int64_t *wide, uint8_t *narrow) {
  int t = pd_tid();
  float v = pd_ldg(in + t);
  pd_stg(out + t, pd_shfl_xor(v, 21));
  pd_stg(out + 32 + t, pd_shfl_down(v, 19));
  pd_stg(out + 64 + t, pd_shfl_up(v, 17));
  pd_stg(out + 96 + t, pd_shfl_idx(v, 31 - t));
  pd_stg(mask + t, pd_ballot(v > 0.f));
  pd_stg(wide + t, pd_shfl_xor(((int64_t)t << 40) - t, 21));
  pd_stg(narrow + t, pd_shfl_xor((uint8_t)(255 - t), 21));
}
PD_EXPORT(shuffles, 32);

// ---- barriers: a block sum, then one half of the block handing over to the other -------------------------------
PD_KERNEL(barriers, 128, 1)(const int32_t *in, int32_t *out) {
  PD_DYN_SMEM(smem);
  int t = pd_tid();
  pd_sts<int32_t>(smem + t * 4, pd_ldg(in + t));
  for (int h = 64; h > 0; h /= 2) {
    pd_syncthreads();
    if (t < h) pd_sts<int32_t>(smem + t * 4, pd_lds<int32_t>(smem + t * 4) + pd_lds<int32_t>(smem + (t + h) * 4));
  }
  pd_syncthreads();
  int32_t sum = pd_lds<int32_t>(smem);
  if (t >= 64) {
    pd_sts<int32_t>(smem + 512 + t * 4, sum + t);
    pd_bar_sync(1, 128);
  } else {
    pd_bar_sync(1, 128);
    pd_stg(out + t, pd_lds<int32_t>(smem + 512 + (127 - t) * 4));
  }
}
PD_EXPORT(barriers, 128);

PD_KERNEL(syncwarp, 32, 1)(const int32_t *in, int32_t *out) {
  PD_DYN_SMEM(smem);
  int t = pd_tid();
  pd_sts<int32_t>(smem + t * 4, pd_ldg(in + t));
  pd_syncwarp();
  pd_stg(out + t, pd_lds<int32_t>(smem + (31 - t) * 4));
}
PD_EXPORT(syncwarp, 32);

// ---- plain memory in every width, through shared memory ---------------------------------------------------------
#define MEMORY(name, T)                                                                                  \
  PD_KERNEL(name, 64, 1)(const T *in, T *out) {                                                          \
    PD_DYN_SMEM(smem);                                                                                   \
    int t = pd_tid();                                                                                    \
    pd_sts<T>(smem + t * sizeof(T), pd_ldg(in + t));                                                     \
    pd_syncthreads();                                                                                    \
    pd_stg(out + t, pd_lds<T>(smem + (63 - t) * sizeof(T)));                                             \
  }                                                                                                      \
  PD_EXPORT(name, 64);
MEMORY(memory_1, uint8_t)
MEMORY(memory_2, pd_half)
MEMORY(memory_4, float)
MEMORY(memory_8, pd_b64)
MEMORY(memory_16, pd_b128)

// ---- grid, atomics ----------------------------------------------------------------------------------------------
PD_KERNEL(grid, 32, 1)(uint32_t *count, int32_t *out) {
  int block = (pd_bid_z() * 2 + pd_bid_y()) * pd_nbid_x() + pd_bid_x();
  pd_stg(out + block * 32 + pd_tid(), block * 100 + pd_tid());
  pd_fence_gpu();
  pd_atomic_add_u32(count, 3);
}
PD_EXPORT(grid, 32);

// ---- what each of four blocks has left, added in their order by the last one ------------------------------------
PD_KERNEL(counted_sums, 32, 1)(const float *x, float *out, float *space, uint32_t *counters) {
  const int t = pd_tid(), here = pd_bid_x() * 64, task = pd_bid_x() / 4;
  const int at = t < 8 ? t * 4 : t < 16 ? t * 2 + 16 : t + 32, n = t < 8 ? 4 : t < 16 ? 2 : 1;
  float mine[4], total[4] = {0.f, 0.f, 0.f, 0.f};
  for (int e = 0; e < n; e++) mine[e] = pd_ldg(x + here + at + e);
  if (n == 4) pd_leave<4>(space + here + at, mine);
  if (n == 2) pd_leave<2>(space + here + at, mine);
  if (n == 1) pd_leave<1>(space + here + at, mine);
  if (pd_last_block(counters + task, 4)) {
    for (int b = 0; b < 4; b++) {
      const float *there = space + (task * 4 + b) * 64 + at;
      if (n == 4) pd_left<4>(mine, there);
      if (n == 2) pd_left<2>(mine, there);
      if (n == 1) mine[0] = pd_left(there);
      for (int e = 0; e < n; e++) total[e] += mine[e];
    }
    for (int e = 0; e < n; e++) pd_stg(out + task * 64 + at + e, total[e]);
  }
}
PD_EXPORT(counted_sums, 32);

// ---- conversions ------------------------------------------------------------------------------------------------
PD_KERNEL(convert, 64, 1)(const float *in, int n, uint16_t *f16, uint16_t *bf16, uint32_t *tf32, uint32_t *packed,
                          int32_t *ints) {
  for (int i = pd_tid(); i < n; i += 64) {
    float v = pd_ldg(in + i), w = pd_ldg(in + n - 1 - i);
    pd_stg(f16 + i, pd_f32_to_f16(v).bits);
    pd_stg(bf16 + i, pd_f32_to_bf16(v).bits);
    pd_stg(tf32 + i, pd_f32_to_tf32(v));
    pd_stg(packed + i, pd_pack_f16x2(v, w));
    pd_stg(packed + n + i, pd_pack_bf16x2(v, w));
    pd_stg(ints + i, pd_f32_to_s8(v));
    pd_stg(ints + n + i, pd_f32_to_u8(v));
  }
}
PD_EXPORT(convert, 64);

PD_KERNEL(widen, 64, 1)(const uint16_t *in, int n, float *out) {  // every 16-bit pattern
  for (int i = pd_tid(); i < n; i += 64) {
    uint16_t h = pd_ldg(in + i), g = pd_ldg(in + n - 1 - i);
    uint32_t pair = h | (uint32_t)g << 16;
    pd_stg(out + i, pd_f16_to_f32(pd_half{h}));
    pd_stg(out + n + i, pd_bf16_to_f32(pd_bf16{h}));
    pd_stg(out + 2 * n + i, pd_f16_hi(pair));
    pd_stg(out + 3 * n + i, pd_bf16_hi(pair));
    pd_stg(out + 4 * n + i, pd_f16_lo(pair));
    pd_stg(out + 5 * n + i, pd_bf16_lo(pair));
  }
}
PD_EXPORT(widen, 64);

// ---- scalar functions, one row of out each ----------------------------------------------------------------------
PD_KERNEL(math, 64, 1)(const float *in, const float *other, int n, float *out) {
  for (int i = pd_tid(); i < n; i += 64) {
    float x = pd_ldg(in + i), y = pd_ldg(other + i);
    float v[] = {pd_exp(x), pd_log(x), pd_sqrt(x), pd_tanh(x), pd_erf(x), pd_sin(x), pd_cos(x), pd_sigmoid(x),
                 pd_floor(x), pd_ceil(x), pd_rint(x), pd_abs(x), pd_max(x, y), pd_min(x, y), pd_pow(x, y), pd_fmod(x, y),
                 pd_fma(x, y, x), pd_rsqrt(x)};
    PD_UNROLL
    for (int f = 0; f < (int)(sizeof v / sizeof v[0]); f++) pd_stg(out + f * n + i, v[f]);
  }
}
PD_EXPORT(math, 64);

PD_KERNEL(math_fast, 64, 1)(const float *in, int n, float *out) {
  for (int i = pd_tid(); i < n; i += 64) {
    float x = pd_ldg(in + i);
    float v[] = {pd_exp_fast(x), pd_exp2_fast(x), pd_log_fast(x), pd_log2_fast(x), pd_rcp_fast(x), pd_tanh_fast(x),
                 pd_erf_fast(x), pd_sigmoid_fast(x), pd_sqrt_fast(x), pd_div_fast(1.f, x)};
    PD_UNROLL
    for (int f = 0; f < (int)(sizeof v / sizeof v[0]); f++) pd_stg(out + f * n + i, v[f]);
  }
}
PD_EXPORT(math_fast, 64);

PD_KERNEL(integers, 64, 1)(const int32_t *a, const int32_t *b, int n, int32_t *out) {
  for (int i = pd_tid(); i < n; i += 64) {
    int32_t x = pd_ldg(a + i), y = pd_ldg(b + i);
    pd_stg(out + i, pd_floordiv(x, y));
    pd_stg(out + n + i, (int32_t)pd_floordiv((int64_t)x, (int64_t)y));
    pd_stg(out + 2 * n + i, pd_imin(x, y));
    pd_stg(out + 3 * n + i, pd_imax(x, y));
  }
}
PD_EXPORT(integers, 64);

// ---- neighbouring elements as one access: a vector each way, reversed inside --------------------------------------
#define WIDE(name, T, R, N)                                                                              \
  PD_KERNEL(name, 64, 1)(const T *in, T *out) {                                                          \
    R r[N], q[N];                                                                                        \
    pd_ldg_wide<N>(r, in + pd_tid() * N);                                                                \
    for (int e = 0; e < N; e++) q[e] = r[N - 1 - e];                                                     \
    pd_stg_wide<N>(out + pd_tid() * N, q);                                                               \
  }                                                                                                      \
  PD_EXPORT(name, 64);
WIDE(wide_f16_8, pd_half, float, 8)
WIDE(wide_f16_2, pd_half, float, 2)
WIDE(wide_bf16_8, pd_bf16, float, 8)
WIDE(wide_f32_4, float, float, 4)
WIDE(wide_f32_8, float, float, 8)
WIDE(wide_s8_8, int8_t, int8_t, 8)
WIDE(wide_u8_16, uint8_t, uint8_t, 16)
WIDE(wide_u16_4, uint16_t, uint16_t, 4)
WIDE(wide_s32_4, int32_t, int32_t, 4)
WIDE(wide_s64_2, int64_t, int64_t, 2)
#define WIDE_SHARED(name, T, N)                                                                          \
  PD_KERNEL(name, 64, 1)(const T *in, T *out) {                                                          \
    PD_DYN_SMEM(smem);                                                                                   \
    T r[N], q[N];                                                                                        \
    int t = pd_tid();                                                                                    \
    pd_ldg_wide<N>(r, in + t * N);                                                                       \
    pd_sts_wide<N>(smem + t * N * 4, r);                                                                 \
    pd_syncthreads();                                                                                    \
    pd_lds_wide<N>(q, smem + (63 - t) * N * 4);                                                          \
    pd_stg_wide<N>(out + t * N, q);                                                                      \
  }                                                                                                      \
  PD_EXPORT(name, 64);
WIDE_SHARED(wide_shared_1, float, 1)
WIDE_SHARED(wide_shared_2, float, 2)
WIDE_SHARED(wide_shared_4, float, 4)
WIDE_SHARED(wide_shared_s32_2, int32_t, 2)
WIDE_SHARED(wide_shared_s32_4, int32_t, 4)
