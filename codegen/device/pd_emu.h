// pd_emu.h -- strict CPU semantics of pd_device.cuh.
//
// As late as the ISA allows: cp.async poisons its destination with NaN when issued and writes it at the wait that
// retires its group. All accesses are checked for bounds and alignment. What is not modelled: weak memory order
// between blocks, partial-warp masks, register limits.
#pragma once
#include "pd_emu_core.h"

#ifndef PD_ARCH
#define PD_ARCH 80
#endif
#define PD_KERNEL(name, threads, min_blocks) static void name
#define PD_DYN_SMEM(name) unsigned char *name = pdemu::B->smem
#define PD_UNROLL
#define PD_EXPORT(name, bound)                                                                                   \
  static void name##_call(void *const *p) { pdemu::call_with(name, p); }                                         \
  static int name##_launch(pdemu_launch *l) { return pdemu::run_grid(l, bound, name##_call); }                   \
  static const auto name##_parameters = pdemu::parameters_of(name);                                              \
  extern "C" __attribute__((visibility("default"))) const pdemu_kernel pdemu_kernel_##name;                      \
  const pdemu_kernel pdemu_kernel_##name = {PDEMU_ABI, PD_ARCH, bound, name##_parameters.n,                      \
                                            name##_parameters.sizes, name##_parameters.offsets, name##_launch}

#include "pd_scalar.h"

extern "C" __attribute__((visibility("default"))) const uint32_t pdemu_arch;  // of the whole module
const uint32_t pdemu_arch = PD_ARCH;

// ---- where am I -----------------------------------------------------------------------------------------------
PD_DEV int pd_tid() { return pdemu::B->current; }
PD_DEV int pd_bid_x() { return (int)pdemu::B->id[0]; }
PD_DEV int pd_bid_y() { return (int)pdemu::B->id[1]; }
PD_DEV int pd_bid_z() { return (int)pdemu::B->id[2]; }
PD_DEV int pd_nbid_x() { return (int)pdemu::B->launch->grid[0]; }

// ---- barriers and fences --------------------------------------------------------------------------------------
PD_DEV void pd_syncthreads(PD_SITE) { pdemu::block_barrier(site); }
PD_DEV void pd_syncwarp(PD_SITE) {
  pdemu::warp_collective("syncwarp", site, nullptr, nullptr, nullptr, [](pdemu::Fiber *) {});
}
// Sides of a named barrier may stand at different lines (a producer and its consumers), so no line is compared.
PD_DEV void pd_bar_sync(int id, int threads, PD_SITE) {
  using namespace pdemu;
  PD_RULE(id > 0 && id < NAMED_BARRIERS && threads % WARP == 0 && threads <= B->threads, PDEMU_FAILED,
          "bar.sync %d, %d at line %d: barrier 1..15, whole warps", id, threads, site);
  Meeting &m = B->barrier[id];
  self()->arg[0] = &m;
  if (!arrive(m, threads, "bar.sync", 0)) return wait("bar.sync", site);
  for (int t = 0; t < B->threads; t++)
    if (B->fiber[t].state == WAITING && B->fiber[t].arg[0] == &m) B->fiber[t].state = READY;
}
PD_DEV void pd_fence_gpu() {}

// ---- plain memory ---------------------------------------------------------------------------------------------
template <class T> PD_DEV T pd_ldg(const T *p, PD_SITE) {
  pdemu::check_global(p, sizeof(T), sizeof(T), site);
  pdemu::note(false, (uint64_t)p, sizeof(T), site);
  return *p;
}
template <class T> PD_DEV void pd_stg(T *p, T v, PD_SITE) {
  pdemu::check_global(p, sizeof(T), sizeof(T), site);
  pdemu::note(false, (uint64_t)p, sizeof(T), site);
  *p = v;
}
template <class T> PD_DEV T pd_lds(const void *p, PD_SITE) {
  pdemu::check_shared(p, sizeof(T), sizeof(T), site);
  pdemu::note(true, pdemu::shared_offset(p), sizeof(T), site);
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}
namespace pdemu { static void (*on_shared_store)(const void *, uint32_t) = nullptr; }  // set by pd_emu_hopper.h
template <class T> PD_DEV void pd_sts(void *p, T v, PD_SITE) {
  pdemu::check_shared(p, sizeof(T), sizeof(T), site);
  pdemu::note(true, pdemu::shared_offset(p), sizeof(T), site);
  memcpy(p, &v, sizeof v);
  if (pdemu::on_shared_store) pdemu::on_shared_store(p, sizeof(T));
}
PD_DEV uint32_t pd_atomic_add_u32(uint32_t *p, uint32_t v, PD_SITE) {
  pdemu::check_global(p, 4, 4, site);
  uint32_t old = *p;
  *p = old + v;
  return old;
}

// ---- cp.async -------------------------------------------------------------------------------------------------
template <int V> PD_DEV void pd_cp_async(void *shared, const void *global, int bytes, PD_SITE) {
  using namespace pdemu;
  static_assert(V == 4 || V == 8 || V == 16, "cp.async copies 4, 8 or 16 bytes");
  PD_RULE(bytes >= 0 && bytes <= V, PDEMU_FAILED, "cp.async source size %d of %d at line %d", bytes, V, site);
  check_shared(shared, V, V, site);
  check_global(global, (uint32_t)bytes, V, site);
  count(PDEMU_CP_ASYNC);
  note(true, shared_offset(shared), V, site);
  if (bytes) note(false, (uint64_t)global, (uint32_t)bytes, site);
  Fiber *f = self();
  f->copies.push_back({(unsigned char *)shared, (const unsigned char *)global, V, (uint32_t)bytes, f->groups});
  memset(shared, 0xff, V);
}
PD_DEV void pd_cp_async_commit() { pdemu::self()->groups++; }
template <int N> PD_DEV void pd_cp_async_wait() {
  using namespace pdemu;
  Fiber *f = self();
  auto retired = [f](const Copy &c) { return c.group + N < f->groups; };
  for (const Copy &c : f->copies)
    if (retired(c)) memcpy(c.to, c.from, c.bytes), memset(c.to + c.bytes, 0, c.size - c.bytes);
  f->copies.erase(std::remove_if(f->copies.begin(), f->copies.end(), retired), f->copies.end());
}

// ---- shuffles -------------------------------------------------------------------------------------------------
namespace pdemu {
// Each lane names the lane it reads; outside 0..31 it keeps its own value.
template <class T> static inline T shuffle(const char *what, int site, T v, int from) {
  static_assert(sizeof(T) == 4, "shuffles move 32 bits");
  T in = v, out = v;
  if (from < 0 || from >= WARP) from = B->current % WARP;
  warp_collective(what, site, &in, &out, &from, [](Fiber *lanes) {
    for (int l = 0; l < WARP; l++) memcpy((void *)lanes[l].arg[1], lanes[*(const int *)lanes[l].arg[2]].arg[0], 4);
  });
  return out;
}
static inline int lane() { return B->current % WARP; }
}  // namespace pdemu
template <class T> PD_DEV T pd_shfl_xor(T v, int m, PD_SITE) { return pdemu::shuffle("shfl.xor", site, v, pdemu::lane() ^ m); }
template <class T> PD_DEV T pd_shfl_down(T v, int d, PD_SITE) { return pdemu::shuffle("shfl.down", site, v, pdemu::lane() + d); }
template <class T> PD_DEV T pd_shfl_up(T v, int d, PD_SITE) { return pdemu::shuffle("shfl.up", site, v, pdemu::lane() - d); }
template <class T> PD_DEV T pd_shfl_idx(T v, int from, PD_SITE) { return pdemu::shuffle("shfl.idx", site, v, from & 31); }
PD_DEV uint32_t pd_ballot(bool v, PD_SITE) {
  uint32_t out = 0;
  pdemu::warp_collective("ballot", site, &v, &out, nullptr, [](pdemu::Fiber *lanes) {
    uint32_t mask = 0;
    for (int l = 0; l < pdemu::WARP; l++) mask |= (uint32_t) * (const bool *)lanes[l].arg[0] << l;
    for (int l = 0; l < pdemu::WARP; l++) *(uint32_t *)lanes[l].arg[1] = mask;
  });
  return out;
}

// ---- ldmatrix -------------------------------------------------------------------------------------------------
// 8x8 matrices of 16-bit elements; lane 8*m + r names row r of matrix m; lane l receives two elements of each matrix.
template <int N, bool TRANSPOSED> PD_DEV void pd_emu_ldmatrix(uint32_t *r, const void *row, int site) {
  using namespace pdemu;
  if (B->current % WARP < 8 * N) check_shared(row, 16, 16, site);
  warp_collective(TRANSPOSED ? "ldmatrix.trans" : "ldmatrix", site, r, row, nullptr, [](Fiber *lanes) {
    count(PDEMU_LDMATRIX);
    for (int m = 0; m < N; m++) {
      Access rows[8];
      for (int i = 0; i < 8; i++) rows[i] = {shared_offset(lanes[m * 8 + i].arg[1]), 0, 16, (uint8_t)i, true};
      count(PDEMU_LDMATRIX_CONFLICTS, bank_conflicts(rows, 8));
      for (int l = 0; l < WARP; l++) {
        uint16_t two[2];
        for (int e = 0; e < 2; e++) {
          int i = TRANSPOSED ? l % 4 * 2 + e : l / 4, j = TRANSPOSED ? l / 4 : l % 4 * 2 + e;
          memcpy(&two[e], (const uint16_t *)lanes[m * 8 + i].arg[1] + j, 2);
        }
        memcpy((uint32_t *)lanes[l].arg[0] + m, two, 4);
      }
    }
  });
}
PD_DEV void pd_ldmatrix_x1(uint32_t *r, const void *p, PD_SITE) { pd_emu_ldmatrix<1, false>(r, p, site); }
PD_DEV void pd_ldmatrix_x2(uint32_t *r, const void *p, PD_SITE) { pd_emu_ldmatrix<2, false>(r, p, site); }
PD_DEV void pd_ldmatrix_x4(uint32_t *r, const void *p, PD_SITE) { pd_emu_ldmatrix<4, false>(r, p, site); }
PD_DEV void pd_ldmatrix_x1_trans(uint32_t *r, const void *p, PD_SITE) { pd_emu_ldmatrix<1, true>(r, p, site); }
PD_DEV void pd_ldmatrix_x2_trans(uint32_t *r, const void *p, PD_SITE) { pd_emu_ldmatrix<2, true>(r, p, site); }
PD_DEV void pd_ldmatrix_x4_trans(uint32_t *r, const void *p, PD_SITE) { pd_emu_ldmatrix<4, true>(r, p, site); }

// ---- mma.sync m16n8 -------------------------------------------------------------------------------------------
// A register holds E elements of 32/E bits. With g = lane/4, t = lane%4 (PTX ISA, "Matrix Fragments for mma"):
// A: rows g, g+8, g, g+8 at k offsets 0, 0, 4E, 4E; B: column g at k offsets 0, 4E; D: rows g, g+8, columns 2t, 2t+1.
template <int E, class Acc, class ReadA, class ReadB>
PD_DEV void pd_emu_mma(const char *what, int site, Acc *d, const uint32_t *a, const uint32_t *b, ReadA read_a, ReadB read_b) {
  using namespace pdemu;
  warp_collective(what, site, d, a, b, [read_a, read_b](Fiber *lanes) {
    constexpr int K = 8 * E;
    count(PDEMU_MMA);
    typedef Acc Row __attribute__((vector_size(8 * sizeof(Acc))));
    Acc A[16][K];
    Row X[K], D[16];
    for (int l = 0; l < WARP; l++) {
      int g = l / 4, t = l % 4;
      const uint32_t *ra = (const uint32_t *)lanes[l].arg[1], *rb = (const uint32_t *)lanes[l].arg[2];
      for (int e = 0; e < E; e++) {
        for (int i = 0; i < 4; i++) A[g + i % 2 * 8][i / 2 * 4 * E + t * E + e] = read_a(ra[i], e);
        for (int i = 0; i < 2; i++) X[i * 4 * E + t * E + e][g] = read_b(rb[i], e);
      }
      const Acc *c = (const Acc *)lanes[l].arg[0];
      for (int i = 0; i < 4; i++) D[g + i / 2 * 8][t * 2 + i % 2] = c[i];
    }
    for (int i = 0; i < 16; i++) {
      Row d = D[i];
      for (int k = 0; k < K; k++) d += A[i][k] * X[k];
      D[i] = d;
    }
    for (int l = 0; l < WARP; l++)
      for (int i = 0; i < 4; i++) ((Acc *)lanes[l].arg[0])[i] = D[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
  });
}
namespace pdemu {
struct F16 { float operator()(uint32_t r, int e) const { return pd_f16_to_f32(pd_half{(uint16_t)(r >> 16 * e)}); } };
struct BF16 { float operator()(uint32_t r, int e) const { return pd_bf16_to_f32(pd_bf16{(uint16_t)(r >> 16 * e)}); } };
struct TF32 { float operator()(uint32_t r, int) const { return pd_bits_to_f32(r & 0xffffe000u); } };  // 10 mantissa bits
struct S8 { int32_t operator()(uint32_t r, int e) const { return (int8_t)(r >> 8 * e); } };
struct U8 { int32_t operator()(uint32_t r, int e) const { return (uint8_t)(r >> 8 * e); } };
}  // namespace pdemu
PD_DEV void pd_mma_m16n8k16_f16(float *d, const uint32_t *a, const uint32_t *b, PD_SITE) {
  pd_emu_mma<2>("mma.f16", site, d, a, b, pdemu::F16(), pdemu::F16());
}
PD_DEV void pd_mma_m16n8k16_bf16(float *d, const uint32_t *a, const uint32_t *b, PD_SITE) {
  pd_emu_mma<2>("mma.bf16", site, d, a, b, pdemu::BF16(), pdemu::BF16());
}
// The low 13 bits of an operand are undefined behaviour unless pd_f32_to_tf32 has rounded them away (or it is NaN).
PD_DEV void pd_mma_m16n8k8_tf32(float *d, const uint32_t *a, const uint32_t *b, PD_SITE) {
  for (int i = 0; i < 6; i++) {
    uint32_t r = i < 4 ? a[i] : b[i - 4];
    PD_RULE(!(r & 0x1fffu) || (r & 0x7fffffffu) > 0x7f800000u, PDEMU_FAILED,
            "mma.tf32 at line %d: operand %08x is not rounded to tf32", site, r);
  }
  pd_emu_mma<1>("mma.tf32", site, d, a, b, pdemu::TF32(), pdemu::TF32());
}
PD_DEV void pd_mma_m16n8k32_s8(int32_t *d, const uint32_t *a, const uint32_t *b, PD_SITE) {
  pd_emu_mma<4>("mma.s8", site, d, a, b, pdemu::S8(), pdemu::S8());
}
PD_DEV void pd_mma_m16n8k32_u8s8(int32_t *d, const uint32_t *a, const uint32_t *b, PD_SITE) {
  pd_emu_mma<4>("mma.u8s8", site, d, a, b, pdemu::U8(), pdemu::S8());
}
#include "pd_wide.h"
