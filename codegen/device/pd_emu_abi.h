// pd_emu_abi.h -- what an emulated kernel's shared object and its caller (CPU libcuda, Python) agree on. Plain C.
//
// A kernel file that ends with PD_EXPORT(name, threads) exports, when compiled with -DPD_EMU, one pdemu_kernel called
// "pdemu_kernel_<name>". The caller fills a pdemu_launch and calls ->launch, which runs the whole grid before it returns.
#pragma once
#include <stdint.h>

#define PDEMU_ABI 1
#define PDEMU_MESSAGE 384

// Counters are added to, per launch. "Accesses" are warp instructions: the lanes of a warp that made the k-th access of
// one source line since their last meeting point count as one instruction.
enum pdemu_counter {
  PDEMU_MMA,                 // mma.sync instructions (per warp)
  PDEMU_WGMMA,               // wgmma instructions (per warpgroup)
  PDEMU_LDMATRIX,            // ldmatrix instructions (per warp)
  PDEMU_LDMATRIX_CONFLICTS,  // extra shared-memory wavefronts of ldmatrix; 0 is the aim
  PDEMU_CP_ASYNC,            // cp.async instructions (per thread)
  PDEMU_TMA,                 // bulk tensor copies
  PDEMU_SHARED,              // plain shared loads, stores and cp.async destinations (per warp)
  PDEMU_SHARED_CONFLICTS,    // their extra wavefronts; 0 is the aim
  PDEMU_GLOBAL,              // global loads and stores (per warp)
  PDEMU_GLOBAL_SECTORS,      // 32-byte sectors they touch
  PDEMU_GLOBAL_SECTORS_MIN,  // sectors that a dense layout of the same bytes would touch
  PDEMU_BARRIERS,            // block-wide barriers completed
  PDEMU_COUNTERS
};

enum pdemu_code {  // the CUresult the real driver would report
  PDEMU_OK = 0,
  PDEMU_INVALID = 1,             // launch configuration
  PDEMU_ILLEGAL_ADDRESS = 700,
  PDEMU_TIMEOUT = 702,           // deadlock: a real GPU would hang
  PDEMU_MISALIGNED = 716,
  PDEMU_FAILED = 719             // any other broken rule
};

typedef struct { uint64_t lo, hi; } pdemu_range;  // one global allocation, [lo, hi)

// What the CPU libcuda writes into the 128 bytes of a CUtensorMap.
#define PDEMU_TENSOR_MAP 0x70616d74
typedef struct {
  uint64_t base, strides[4];   // bytes; strides of dims 1..4
  uint32_t magic, dims[5];
  uint16_t box[5];
  uint8_t rank, element_bytes, swizzle;  // swizzle: 0 none, 3 128 bytes
} pdemu_tensor_map;

typedef struct {
  uint32_t abi;                // PDEMU_ABI
  uint32_t grid[3];
  uint32_t threads;            // per block; blocks are one-dimensional
  uint32_t smem;               // bytes of dynamic shared memory
  uint32_t reverse;            // 0: warps and lanes run in order; 1: in reverse order
  uint32_t nranges;
  const pdemu_range *ranges;   // sorted by lo, disjoint: the only global memory the kernel may touch
  void *const *params;         // one pointer per kernel parameter, as for cuLaunchKernel
  uint64_t *counters;          // PDEMU_COUNTERS entries
  char message[PDEMU_MESSAGE]; // out: what broke, where
} pdemu_launch;

typedef struct {
  uint32_t abi, arch, threads, nparams;  // arch: 80, 90, ... as compiled for; threads: the launch bound
  const uint32_t *sizes, *offsets;       // of the parameters in a packed parameter buffer
  int (*launch)(pdemu_launch *);         // returns a pdemu_code
} pdemu_kernel;
