// pd_hopper.cuh -- the sm_90a functions a generated kernel may call: mbarrier, TMA tensor copies, wgmma, setmaxnreg.
// Same two meanings as pd_device.cuh; the emulation is in pd_emu_hopper.h.
//
// Tensor maps come first in a kernel's parameters: PD_KERNEL(k, 384, 1)(PD_TMAP(a), PD_TMAP(b), ...). Coordinates are
// in elements, innermost first; outside the tensor loads give zeros and stores do nothing.
// A map of type tf32 rounds floats to tf32 (to nearest, ties to even) as it loads them.
#pragma once
#include "pd_device.cuh"
#ifdef PD_EMU
#include "pd_emu_hopper.h"
#else

struct alignas(64) pd_tmap { uint64_t opaque[16]; };  // the bytes of a CUtensorMap
#define PD_TMAP(name) const __grid_constant__ pd_tmap name

// ---- mbarrier: 8 bytes of shared memory; phase parity starts at 0 ------------------------------------------------
PD_DEV void pd_mbar_init(uint64_t *b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(pd_saddr(b)), "r"(arrivals) : "memory");
}
PD_DEV void pd_fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PD_DEV void pd_mbar_arrive(uint64_t *b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(pd_saddr(b)) : "memory");
}
// One arrival, and `bytes` more for TMA to bring before the phase completes.
PD_DEV void pd_mbar_expect_tx(uint64_t *b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(pd_saddr(b)), "r"(bytes) : "memory");
}
// Returns when the phase of that parity has completed; a fresh barrier counts as past parity 1.
PD_DEV void pd_mbar_wait(uint64_t *b, int parity) {
  asm volatile("{\n.reg .pred p;\nW_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra W_%=;\n}" ::"r"(pd_saddr(b)),
               "r"(parity) : "memory");
}

// ---- clusters (PD_KERNEL_CLUSTER): the same offset names the same thing in every block's shared memory -----------
PD_DEV int pd_cluster_rank() {
  int r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// A barrier of all threads of all blocks, in two halves: between them a thread may do what concerns its own block alone.
// Arrive is said behind all accesses to other blocks: what has been waited for, one may have left.
PD_DEV void pd_cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
PD_DEV void pd_cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// Both halves behind the fence of mbarriers, which orders what they need.
PD_DEV void pd_cluster_start() { asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
// N neighbours of 4 bytes that lie in that block where `p` is here: stored before both blocks' threads arrived at a
// barrier of the cluster that has been waited for. No block leaves before its memory has been read.
template <int N, class R> PD_DEV void pd_lds_wide_at(R *r, const void *p, int block) {
  static_assert(sizeof(R) == 4 && (N == 1 || N == 2 || N == 4), "float or int32_t");
  uint32_t w[N], at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(pd_saddr(p)), "r"(block));
  if constexpr (N == 4)
    asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
  else if constexpr (N == 2)
    asm volatile("ld.shared::cluster.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(at) : "memory");
  else
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(w[0]) : "r"(at) : "memory");
  PD_UNROLL for (int e = 0; e < N; e++) r[e] = pd_element((const R *)0, w, e);
}
template <class T> PD_DEV T pd_lds_at(const T *p, int block) {
  T v;
  pd_lds_wide_at<1>(&v, p, block);
  return v;
}
// An arrival at the barrier of that block. It orders no plain stores: it says that what TMA wrote has been read.
PD_DEV void pd_mbar_arrive_at(uint64_t *b, int block) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(pd_saddr(b)),
               "r"(block) : "memory");
}

// ---- TMA: a box of a tensor map to 128-byte aligned shared memory (1024 when swizzled), counted on an mbarrier ----
#define PD_TMA_LOAD(rank) "cp.async.bulk.tensor." rank ".shared::cluster.global.tile.mbarrier::complete_tx::bytes "
PD_DEV void pd_tma_load_2d(void *s, const pd_tmap *t, int x, int y, uint64_t *bar) {
  asm volatile(PD_TMA_LOAD("2d") "[%0], [%1, {%2, %3}], [%4];" ::"r"(pd_saddr(s)), "l"(t), "r"(x), "r"(y),
               "r"(pd_saddr(bar)) : "memory");
}
PD_DEV void pd_tma_load_3d(void *s, const pd_tmap *t, int x, int y, int z, uint64_t *bar) {
  asm volatile(PD_TMA_LOAD("3d") "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(pd_saddr(s)), "l"(t), "r"(x), "r"(y), "r"(z),
               "r"(pd_saddr(bar)) : "memory");
}
PD_DEV void pd_tma_load_4d(void *s, const pd_tmap *t, int x, int y, int z, int w, uint64_t *bar) {
  asm volatile(PD_TMA_LOAD("4d") "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(pd_saddr(s)), "l"(t), "r"(x), "r"(y),
               "r"(z), "r"(w), "r"(pd_saddr(bar)) : "memory");
}
// To the same place in every block of a mask, counted on the barrier that each has at the same place.
#define PD_TMA_LOAD_TO(rank) \
  "cp.async.bulk.tensor." rank ".shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
PD_DEV void pd_tma_load_2d_to(void *s, const pd_tmap *t, int x, int y, uint64_t *bar, int blocks) {
  asm volatile(PD_TMA_LOAD_TO("2d") "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(pd_saddr(s)), "l"(t), "r"(x), "r"(y),
               "r"(pd_saddr(bar)), "h"((uint16_t)blocks) : "memory");
}
PD_DEV void pd_tma_load_3d_to(void *s, const pd_tmap *t, int x, int y, int z, uint64_t *bar, int blocks) {
  asm volatile(PD_TMA_LOAD_TO("3d") "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(pd_saddr(s)), "l"(t), "r"(x), "r"(y),
               "r"(z), "r"(pd_saddr(bar)), "h"((uint16_t)blocks) : "memory");
}
PD_DEV void pd_tma_load_4d_to(void *s, const pd_tmap *t, int x, int y, int z, int w, uint64_t *bar, int blocks) {
  asm volatile(PD_TMA_LOAD_TO("4d") "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(pd_saddr(s)), "l"(t), "r"(x), "r"(y),
               "r"(z), "r"(w), "r"(pd_saddr(bar)), "h"((uint16_t)blocks) : "memory");
}
// In im2col mode: a column of pixels of an image that lies channels last, from the first one at (w, h, ..., n) on. Pixels
// follow each other along w, h, ..., n at the map's steps, through the map's bounding box and image after image; the
// offsets of the tap are added to each. What lies outside the tensor comes as zeros.
#define PD_TMA_PIXELS(rank) "cp.async.bulk.tensor." rank ".shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
PD_DEV void pd_tma_pixels_3d(void *s, const pd_tmap *t, int c, int w, int n, int kw, uint64_t *bar) {
  asm volatile(PD_TMA_PIXELS("3d") "[%0], [%1, {%2, %3, %4}], [%5], {%6};" ::"r"(pd_saddr(s)), "l"(t), "r"(c), "r"(w),
               "r"(n), "r"(pd_saddr(bar)), "h"((uint16_t)kw) : "memory");
}
PD_DEV void pd_tma_pixels_4d(void *s, const pd_tmap *t, int c, int w, int h, int n, int kw, int kh, uint64_t *bar) {
  asm volatile(PD_TMA_PIXELS("4d") "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(pd_saddr(s)), "l"(t), "r"(c),
               "r"(w), "r"(h), "r"(n), "r"(pd_saddr(bar)), "h"((uint16_t)kw), "h"((uint16_t)kh) : "memory");
}
PD_DEV void pd_tma_pixels_5d(void *s, const pd_tmap *t, int c, int w, int h, int d, int n, int kw, int kh, int kd, uint64_t *bar) {
  asm volatile(PD_TMA_PIXELS("5d") "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], {%8, %9, %10};" ::"r"(pd_saddr(s)), "l"(t),
               "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "r"(pd_saddr(bar)), "h"((uint16_t)kw), "h"((uint16_t)kh),
               "h"((uint16_t)kd) : "memory");
}
// Stores are grouped per thread like cp.async. Between plain shared stores and a TMA store: every storing thread
// calls pd_fence_proxy_async, then a barrier. Wait_read: shared memory may be reused; wait: the data is written.
#define PD_TMA_STORE(rank) "cp.async.bulk.tensor." rank ".global.shared::cta.tile.bulk_group "
PD_DEV void pd_tma_store_2d(const pd_tmap *t, const void *s, int x, int y) {
  asm volatile(PD_TMA_STORE("2d") "[%0, {%1, %2}], [%3];" ::"l"(t), "r"(x), "r"(y), "r"(pd_saddr(s)) : "memory");
}
PD_DEV void pd_tma_store_3d(const pd_tmap *t, const void *s, int x, int y, int z) {
  asm volatile(PD_TMA_STORE("3d") "[%0, {%1, %2, %3}], [%4];" ::"l"(t), "r"(x), "r"(y), "r"(z), "r"(pd_saddr(s)) : "memory");
}
PD_DEV void pd_tma_store_4d(const pd_tmap *t, const void *s, int x, int y, int z, int w) {
  asm volatile(PD_TMA_STORE("4d") "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(t), "r"(x), "r"(y), "r"(z), "r"(w), "r"(pd_saddr(s))
               : "memory");
}
PD_DEV void pd_tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> PD_DEV void pd_tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <int N> PD_DEV void pd_tma_store_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
PD_DEV void pd_tma_prefetch(const pd_tmap *t) { asm volatile("prefetch.tensormap [%0];" ::"l"(t) : "memory"); }
// A box to L2, as pd_fetch.
#define PD_TMA_FETCH(dim) "cp.async.bulk.prefetch.tensor." dim ".L2.global.tile "
PD_DEV void pd_tma_fetch_2d(const pd_tmap *t, int x, int y) {
  asm volatile(PD_TMA_FETCH("2d") "[%0, {%1, %2}];" ::"l"(t), "r"(x), "r"(y) : "memory");
}
PD_DEV void pd_tma_fetch_3d(const pd_tmap *t, int x, int y, int z) {
  asm volatile(PD_TMA_FETCH("3d") "[%0, {%1, %2, %3}];" ::"l"(t), "r"(x), "r"(y), "r"(z) : "memory");
}
PD_DEV void pd_tma_fetch_4d(const pd_tmap *t, int x, int y, int z, int w) {
  asm volatile(PD_TMA_FETCH("4d") "[%0, {%1, %2, %3, %4}];" ::"l"(t), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
PD_DEV void pd_fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- register budget of a warpgroup: R a multiple of 8 in 24..256 -------------------------------------------------
template <int R> PD_DEV void pd_reg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R)); }
template <int R> PD_DEV void pd_reg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R)); }

// ---- wgmma: d[N/2] += A(64 x K) * B(K x N), both in shared memory under descriptors (below) -----------------------
// K is 32 bytes: 16 of f16 or bf16, 8 of tf32, 32 of e4m3, e5m2, s8 or u8. N in {32, 64, 96, 128, 192, 256}.
// tf32 operands are float32 whose low 13 bits are 0: the hardware drops them. Bytes: any pair of signs, sums wrap; e4m3
// and e5m2: any pair, sums as in pd_emu.h.
// fence before the first of a group, commit after the last; registers d and both operands stay untouched until the
// wait. scale_d 0 starts from zero. TB 1: B is MN-major (f16 and bf16; all others have both operands K-major).
PD_DEV void pd_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PD_DEV void pd_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> PD_DEV void pd_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

#define PD_R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PD_R1 PD_R0 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PD_R2 PD_R1 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define PD_R3 PD_R2 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PD_R4 PD_R3 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PD_R5 PD_R4 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define PD_R6 PD_R5 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define PD_R7 PD_R6 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define PD_D4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define PD_D16(c, i) PD_D4(c, i), PD_D4(c, i + 4), PD_D4(c, i + 8), PD_D4(c, i + 12)
#define PD_D32(c, i) PD_D16(c, i), PD_D16(c, i + 16)
#define PD_D_32(c) PD_D16(c, 0)
#define PD_D_64(c) PD_D32(c, 0)
#define PD_D_96(c) PD_D32(c, 0), PD_D16(c, 32)
#define PD_D_128(c) PD_D32(c, 0), PD_D32(c, 32)
#define PD_D_192(c) PD_D_128(c), PD_D32(c, 64)
#define PD_D_256(c) PD_D_192(c), PD_D32(c, 96)
#define PD_WGMMA_ASM(n, ks, types, regs, A, X, S, tail)                                                                \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k" #ks "." types " {" regs      \
  "}, %" A ", %" X ", p" tail ";\n}"
#define PD_WGMMA_HALF(n, type, regs, A, X, S, T)                                                                      \
  template <int TB> PD_DEV void pd_wgmma_m64n##n##k16_##type(float *d, uint64_t a, uint64_t b, int scale_d) {         \
    asm volatile(PD_WGMMA_ASM(n, 16, "f32." #type "." #type, regs, A, X, S, ", 1, 1, 0, %" T)                         \
                 : PD_D_##n("+f") : "l"(a), "l"(b), "r"(scale_d), "n"(TB));                                           \
  }
#define PD_WGMMA_K(n, ks, name, types, tail, acc, c, regs, A, X, S)                                                    \
  PD_DEV void pd_wgmma_m64n##n##k##ks##_##name(acc *d, uint64_t a, uint64_t b, int scale_d) {                          \
    asm volatile(PD_WGMMA_ASM(n, ks, types, regs, A, X, S, tail) : PD_D_##n(c) : "l"(a), "l"(b), "r"(scale_d));        \
  }
#define PD_WGMMA(n, regs, A, X, S, T)                                                                                 \
  PD_WGMMA_HALF(n, f16, regs, A, X, S, T) PD_WGMMA_HALF(n, bf16, regs, A, X, S, T)                                    \
  PD_WGMMA_K(n, 8, tf32, "f32.tf32.tf32", ", 1, 1", float, "+f", regs, A, X, S)                                       \
  PD_WGMMA_K(n, 32, e4m3, "f32.e4m3.e4m3", ", 1, 1", float, "+f", regs, A, X, S)                                      \
  PD_WGMMA_K(n, 32, e5m2, "f32.e5m2.e5m2", ", 1, 1", float, "+f", regs, A, X, S)                                      \
  PD_WGMMA_K(n, 32, e4m3e5m2, "f32.e4m3.e5m2", ", 1, 1", float, "+f", regs, A, X, S)                                  \
  PD_WGMMA_K(n, 32, e5m2e4m3, "f32.e5m2.e4m3", ", 1, 1", float, "+f", regs, A, X, S)                                  \
  PD_WGMMA_K(n, 32, s8, "s32.s8.s8", "", int32_t, "+r", regs, A, X, S)                                                \
  PD_WGMMA_K(n, 32, u8, "s32.u8.u8", "", int32_t, "+r", regs, A, X, S)                                                \
  PD_WGMMA_K(n, 32, s8u8, "s32.s8.u8", "", int32_t, "+r", regs, A, X, S)                                              \
  PD_WGMMA_K(n, 32, u8s8, "s32.u8.s8", "", int32_t, "+r", regs, A, X, S)
PD_WGMMA(32, PD_R0, "16", "17", "18", "19")
PD_WGMMA(64, PD_R1, "32", "33", "34", "35")
PD_WGMMA(96, PD_R2, "48", "49", "50", "51")
PD_WGMMA(128, PD_R3, "64", "65", "66", "67")
PD_WGMMA(192, PD_R5, "96", "97", "98", "99")
PD_WGMMA(256, PD_R7, "128", "129", "130", "131")
// A in registers, 4 a thread of two 16-bit elements: mma.sync's m16n8k16 fragment, warp w holding rows 16w to 16w + 15.
// They are written before the fence and stay untouched until the wait.
#define PD_WGMMA_RS(n, type, regs, A0, A1, A2, A3, X, S, T)                                                            \
  template <int TB> PD_DEV void pd_wgmma_rs_m64n##n##k16_##type(float *d, const uint32_t *a, uint64_t b, int scale_d) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type \
                 " {" regs "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" X ", p, 1, 1, %" T ";\n}"                          \
                 : PD_D_##n("+f") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(TB));        \
  }
#define PD_WGMMA_RS2(n, regs, ...) PD_WGMMA_RS(n, f16, regs, __VA_ARGS__) PD_WGMMA_RS(n, bf16, regs, __VA_ARGS__)
PD_WGMMA_RS2(32, PD_R0, "16", "17", "18", "19", "20", "21", "22")
PD_WGMMA_RS2(64, PD_R1, "32", "33", "34", "35", "36", "37", "38")
PD_WGMMA_RS2(128, PD_R3, "64", "65", "66", "67", "68", "69", "70")
PD_WGMMA_RS2(192, PD_R5, "96", "97", "98", "99", "100", "101", "102")
PD_WGMMA_RS2(256, PD_R7, "128", "129", "130", "131", "132", "133", "134")
// No instruction: what uses these registers is not moved over it. Behind a wait, for what the wait delivers.
template <int R> PD_DEV void pd_wgmma_keep(float *d) {
  PD_UNROLL for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
template <int R> PD_DEV void pd_wgmma_keep(uint32_t *d) {
  PD_UNROLL for (int i = 0; i < R; i++) asm volatile("" : "+r"(d[i]) :: "memory");
}
#endif

// ---- operand descriptors: 128-byte swizzle, atoms of 8 rows of 128 bytes at multiples of 1024 ----------------------
// K-major: row r of the tile at r * 128, 128 bytes of k. One wgmma takes 32: step k by adding 32 bytes to p.
PD_DEV uint64_t pd_desc_k(const void *p) {
  return (uint64_t)((pd_saddr(p) & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// MN-major, 16-bit elements: panels of 64 columns, `panel` bytes apart; in a panel row k at k * 128. Step k by adding 2048 bytes to p.
PD_DEV uint64_t pd_desc_mn(const void *p, int panel) {
  return (uint64_t)((pd_saddr(p) & 0x3ffff) >> 4) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// The descriptor of a place `bytes` further on: the field of the address has 14 bits of 16 bytes and does not overflow.
PD_DEV uint64_t pd_desc_at(uint64_t d, int bytes) { return (d & 0xffffffff00000000ull) | (uint32_t)((uint32_t)d + (bytes >> 4)); }
