// pd_device.cuh -- the only functions a generated CUDA kernel may call.
//
// Two meanings: inline PTX under nvcc or NVRTC (sm_80 and newer, no CUDA header needed), strict CPU emulation under a
// host compiler with -DPD_EMU (pd_emu.h). A kernel file looks like
//
//     #include "pd_device.cuh"
//     PD_KERNEL(name, 256, 2)(const pd_half *a, float *c, int n) { PD_DYN_SMEM(smem); ... }
//     PD_EXPORT(name, 256);
//
// Rules for kernels, so that both meanings agree and every access is checked:
//   * global and shared memory are touched through pd_ldg, pd_stg, pd_lds, pd_sts, pd_cp_async, ldmatrix, TMA only;
//   * shared memory is dynamic, one array, 1024-byte aligned; blocks are one-dimensional, whole warps;
//   * collectives (barriers, shuffles, ldmatrix, mma) are reached by all lanes at the same source line;
//   * no thread returns before the last barrier. "b" pointers below name shared memory, generic addresses.
// A primitive's register layout is PTX's own ("Matrix Fragments for mma"); addresses are the kernel's business.
#pragma once
#ifdef PD_EMU
#include "pd_emu.h"
#else

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef short int16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif

#define PD_KERNEL(name, threads, min_blocks) extern "C" __global__ void __launch_bounds__(threads, min_blocks) name
#define PD_EXPORT(name, threads) static_assert(threads % 32 == 0, "whole warps")
#define PD_DEV static __device__ __forceinline__
#define PD_DYN_SMEM(name) extern __shared__ __align__(1024) unsigned char name[]
#define PD_UNROLL _Pragma("unroll")

#include "pd_scalar.h"

PD_DEV uint32_t pd_saddr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }  // for this header's own use

// ---- where am I -----------------------------------------------------------------------------------------------
PD_DEV int pd_tid() { return (int)threadIdx.x; }
PD_DEV int pd_bid_x() { return (int)blockIdx.x; }
PD_DEV int pd_bid_y() { return (int)blockIdx.y; }
PD_DEV int pd_bid_z() { return (int)blockIdx.z; }
PD_DEV int pd_nbid_x() { return (int)gridDim.x; }

// ---- barriers and fences --------------------------------------------------------------------------------------
PD_DEV void pd_syncthreads() { __syncthreads(); }
PD_DEV void pd_syncwarp() { __syncwarp(); }
// Named barrier 1..15 over `threads` threads (a multiple of 32); barrier 0 is pd_syncthreads.
PD_DEV void pd_bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
PD_DEV void pd_fence_gpu() { __threadfence(); }

// ---- plain memory: T is 1, 2, 4, 8 or 16 bytes, addresses aligned to it ----------------------------------------
template <class T> PD_DEV T pd_ldg(const T *p) { return *p; }
template <class T> PD_DEV void pd_stg(T *p, T v) { *p = v; }
template <class T> PD_DEV T pd_lds(const void *p) { return *(const T *)p; }
template <class T> PD_DEV void pd_sts(void *p, T v) { *(T *)p = v; }
PD_DEV uint32_t pd_atomic_add_u32(uint32_t *p, uint32_t v) { return atomicAdd(p, v); }  // global memory; the old value

// ---- cp.async: V in {4, 8, 16} bytes to shared, the first `bytes` from global, the rest zero --------------------
// Both addresses V-aligned, also when bytes is 0 (the global one is then not read). Bypasses L1 when V is 16.
template <int V> PD_DEV void pd_cp_async(void *shared, const void *global, int bytes) {
  static_assert(V == 4 || V == 8 || V == 16, "cp.async copies 4, 8 or 16 bytes");
  if (V == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(pd_saddr(shared)), "l"(global), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(pd_saddr(shared)), "l"(global), "r"(bytes), "n"(V) : "memory");
}
PD_DEV void pd_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when at most N of this thread's groups are in flight; other threads see the data after a barrier.
template <int N> PD_DEV void pd_cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// ---- shuffles over the whole warp: float, int32_t, uint32_t ----------------------------------------------------
template <class T> PD_DEV T pd_shfl_xor(T v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
template <class T> PD_DEV T pd_shfl_down(T v, int delta) { return __shfl_down_sync(0xffffffffu, v, delta); }
template <class T> PD_DEV T pd_shfl_up(T v, int delta) { return __shfl_up_sync(0xffffffffu, v, delta); }
template <class T> PD_DEV T pd_shfl_idx(T v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
PD_DEV uint32_t pd_ballot(bool v) { return __ballot_sync(0xffffffffu, v); }

// ---- ldmatrix: N 8x8 matrices of 16-bit elements; lane 8*m + r gives the 16-byte aligned row r of matrix m -------
#define PD_LDM1(trans) asm volatile("ldmatrix.sync.aligned.m8n8.x1" trans ".shared.b16 {%0}, [%1];"                 \
                                    : "=r"(r[0]) : "r"(pd_saddr(p)) : "memory")
#define PD_LDM2(trans) asm volatile("ldmatrix.sync.aligned.m8n8.x2" trans ".shared.b16 {%0, %1}, [%2];"             \
                                    : "=r"(r[0]), "=r"(r[1]) : "r"(pd_saddr(p)) : "memory")
#define PD_LDM4(trans) asm volatile("ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0, %1, %2, %3}, [%4];"     \
                                    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(pd_saddr(p)) : "memory")
PD_DEV void pd_ldmatrix_x1(uint32_t *r, const void *p) { PD_LDM1(""); }
PD_DEV void pd_ldmatrix_x2(uint32_t *r, const void *p) { PD_LDM2(""); }
PD_DEV void pd_ldmatrix_x4(uint32_t *r, const void *p) { PD_LDM4(""); }
PD_DEV void pd_ldmatrix_x1_trans(uint32_t *r, const void *p) { PD_LDM1(".trans"); }
PD_DEV void pd_ldmatrix_x2_trans(uint32_t *r, const void *p) { PD_LDM2(".trans"); }
PD_DEV void pd_ldmatrix_x4_trans(uint32_t *r, const void *p) { PD_LDM4(".trans"); }

// ---- mma.sync m16n8: d += a * b; a is 4 registers (row major), b 2 (column major), d 4 --------------------------
#define PD_MMA(shape, types, C)                                                                                     \
  asm volatile("mma.sync.aligned." shape ".row.col." types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : C(d[0]), C(d[1]), C(d[2]), C(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
PD_DEV void pd_mma_m16n8k16_f16(float *d, const uint32_t *a, const uint32_t *b) { PD_MMA("m16n8k16", "f32.f16.f16.f32", "+f"); }
PD_DEV void pd_mma_m16n8k16_bf16(float *d, const uint32_t *a, const uint32_t *b) { PD_MMA("m16n8k16", "f32.bf16.bf16.f32", "+f"); }
PD_DEV void pd_mma_m16n8k8_tf32(float *d, const uint32_t *a, const uint32_t *b) { PD_MMA("m16n8k8", "f32.tf32.tf32.f32", "+f"); }
PD_DEV void pd_mma_m16n8k32_s8(int32_t *d, const uint32_t *a, const uint32_t *b) { PD_MMA("m16n8k32", "s32.s8.s8.s32", "+r"); }
PD_DEV void pd_mma_m16n8k32_u8s8(int32_t *d, const uint32_t *a, const uint32_t *b) { PD_MMA("m16n8k32", "s32.u8.s8.s32", "+r"); }

#include "pd_wide.h"
#endif
