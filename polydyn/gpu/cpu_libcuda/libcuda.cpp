// A CUDA driver without a GPU: the part of libcuda.so.1 that polydyn, pycuda and cuda-bindings use, over emulated
// kernels. A module image is the ELF bytes of a shared object made by polydyn.gpu.emulator.compile_emulated.
//
// It behaves like the real driver where that matters for tests: allocations are poisoned and fenced, copies outside
// them fail, a launch returns before its errors are reported, and a kernel that fails breaks its context for good.
// Settings from the environment: PDEMU_SM (compute capability, default 90), PDEMU_MEMORY (bytes, default 4 GiB),
// PDEMU_REVERSE=1 (warps and lanes in reverse order), PDEMU_TRACE=1 (name calls that are not supported).
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "pd_emu_abi.h"

#define API(name) extern "C" __attribute__((visibility("default"))) int name
typedef void *Handle;
typedef uint64_t Address;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
       OUT_OF_RESOURCES = 701, NOT_SUPPORTED = 801 };

struct Context { int broken, flags; };
struct Function { const pdemu_kernel *kernel; int max_dynamic; };
struct Module { void *library; std::map<std::string, Function *> functions; };
struct Event { double at; };
struct Allocation { size_t bytes; Context *owner; };

static std::recursive_mutex state;
#define LOCK std::lock_guard<std::recursive_mutex> lock(state)
static bool initialised;
static Context *primary;
static int primary_users;
static std::set<Context *> contexts;
static thread_local std::vector<Context *> current;
static std::map<Address, Allocation> memory;
static size_t memory_used;
static std::set<Handle> streams, events, modules;
static std::string last_message;

static long setting(const char *name, long otherwise) { const char *v = getenv(name); return v && *v ? atol(v) : otherwise; }
static int capability() { return (int)setting("PDEMU_SM", 90); }
static size_t memory_size() { return (size_t)setting("PDEMU_MEMORY", 4l << 30); }
static int shared_limit() { return capability() == 80 ? 166912 : capability() < 90 ? 101376 : 232448; }
static double now_ms() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec * 1e-6; }
static Context *here() { return current.empty() || !contexts.count(current.back()) ? nullptr : current.back(); }
// Every call that needs a context starts so; a broken one answers with what broke it.
#define NEED_CONTEXT LOCK; if (!initialised) return NOT_INITIALIZED; if (!here()) return INVALID_CONTEXT; \
  if (here()->broken) return here()->broken

// ---- device -----------------------------------------------------------------------------------------------------
API(cuInit)(unsigned) { LOCK; initialised = true; return 0; }
API(cuDriverGetVersion)(int *v) { *v = 13000; return 0; }
API(cuDeviceGetCount)(int *n) { *n = 1; return initialised ? 0 : NOT_INITIALIZED; }
API(cuDeviceGet)(int *d, int i) { *d = 0; return !initialised ? NOT_INITIALIZED : i ? INVALID_DEVICE : 0; }
API(cuDeviceGetName)(char *s, int n, int) { snprintf(s, (size_t)n, "polydyn CPU emulation, sm_%d", capability()); return 0; }
API(cuDeviceGetUuid)(void *u, int) { memset(u, 0, 16); return 0; }
API(cuDeviceGetUuid_v2)(void *u, int) { memset(u, 0, 16); return 0; }
API(cuDeviceGetPCIBusId)(char *s, int n, int) { snprintf(s, (size_t)n, "0000:00:00.0"); return 0; }
API(cuDeviceComputeCapability)(int *major, int *minor, int) { *major = capability() / 10, *minor = capability() % 10; return 0; }
API(cuDeviceTotalMem_v2)(size_t *n, int) { *n = memory_size(); return 0; }
API(cuDeviceGetAttribute)(int *v, int attribute, int) {
  switch (attribute) {
    case 1: case 2: *v = 1024; break;              // threads per block, block dim x
    case 3: *v = 1024; break;
    case 4: *v = 64; break;
    case 5: *v = 2147483647; break;                // grid dims
    case 6: case 7: *v = 65535; break;
    case 8: *v = 49152; break;                     // shared memory per block
    case 10: *v = 32; break;                       // warp size
    case 12: *v = 65536; break;                    // registers per block
    case 16: *v = 4; break;                        // multiprocessors
    case 39: *v = 2048; break;                     // threads per multiprocessor
    case 75: *v = capability() / 10; break;
    case 76: *v = capability() % 10; break;
    case 81: *v = shared_limit() + 1024; break;    // shared memory per multiprocessor
    case 82: *v = 65536; break;
    case 97: *v = shared_limit(); break;           // shared memory per block, opt-in
    default: *v = 0;
  }
  return 0;
}

// ---- contexts ---------------------------------------------------------------------------------------------------
static void destroy(Context *c) {
  for (auto it = memory.begin(); it != memory.end();)
    if (it->second.owner == c) {
      munmap((void *)it->first, it->second.bytes + 4096);
      memory_used -= it->second.bytes;
      it = memory.erase(it);
    } else {
      ++it;
    }
  contexts.erase(c);
  delete c;
}
static int create(Context **c) {
  if (!initialised) return NOT_INITIALIZED;
  *c = new Context();
  contexts.insert(*c);
  return 0;
}
API(cuCtxCreate_v2)(Context **c, unsigned, int) { LOCK; int r = create(c); if (!r) current.push_back(*c); return r; }
API(cuCtxCreate_v3)(Context **c, Handle, int, unsigned, int) { return cuCtxCreate_v2(c, 0, 0); }
API(cuCtxCreate_v4)(Context **c, Handle, unsigned, int) { return cuCtxCreate_v2(c, 0, 0); }
API(cuCtxDestroy_v2)(Context *c) {
  LOCK;
  if (!contexts.count(c) || c == primary) return INVALID_CONTEXT;  // the primary one is released, not destroyed
  if (!current.empty() && current.back() == c) current.pop_back();
  destroy(c);
  return 0;
}
API(cuCtxAttach)(Context **c, unsigned) { LOCK; *c = here(); return *c ? 0 : INVALID_CONTEXT; }
API(cuCtxPushCurrent_v2)(Context *c) { LOCK; if (!contexts.count(c)) return INVALID_CONTEXT; current.push_back(c); return 0; }
API(cuCtxPopCurrent_v2)(Context **c) {
  LOCK;
  if (current.empty()) return INVALID_CONTEXT;
  if (c) *c = current.back();
  current.pop_back();
  return 0;
}
API(cuCtxGetCurrent)(Context **c) { LOCK; *c = here(); return 0; }
API(cuCtxSetCurrent)(Context *c) {
  LOCK;
  if (!current.empty()) current.pop_back();
  if (c && !contexts.count(c)) return INVALID_CONTEXT;
  if (c) current.push_back(c);
  return 0;
}
API(cuCtxGetDevice)(int *d) { LOCK; *d = 0; return here() ? 0 : INVALID_CONTEXT; }
API(cuCtxGetDevice_v2)(int *d, Context *) { *d = 0; return 0; }
API(cuCtxGetApiVersion)(Context *, unsigned *v) { *v = 13000; return 0; }
API(cuCtxGetStreamPriorityRange)(int *low, int *high) { *low = 0, *high = -5; return 0; }
API(cuCtxSetCacheConfig)(int) { return 0; }
API(cuCtxSynchronize)() { NEED_CONTEXT; return 0; }
API(cuDevicePrimaryCtxRetain)(Context **c, int) {
  LOCK;
  if (!primary)
    if (int r = create(&primary)) return r;
  primary_users++;
  *c = primary;
  return 0;
}
API(cuDevicePrimaryCtxReset_v2)(int) {
  LOCK;
  if (primary) destroy(primary);
  primary = nullptr, primary_users = 0;
  return 0;
}
API(cuDevicePrimaryCtxRelease_v2)(int d) {
  LOCK;
  if (primary_users == 0) return INVALID_CONTEXT;
  return --primary_users ? 0 : cuDevicePrimaryCtxReset_v2(d);
}
API(cuCtxDetach)(Context *c) { LOCK; return c && c == primary ? cuDevicePrimaryCtxRelease_v2(0) : cuCtxDestroy_v2(c); }
API(cuDevicePrimaryCtxGetState)(int, unsigned *flags, int *active) { *flags = 0, *active = primary != nullptr; return 0; }

// ---- memory: every allocation in pages of its own, poisoned, with a gap behind it -------------------------------
static bool inside(Address p, size_t n) {
  auto it = memory.upper_bound(p);
  return it != memory.begin() && (--it, p + n <= it->first + it->second.bytes);
}
API(cuMemAlloc_v2)(Address *p, size_t n) {
  NEED_CONTEXT;
  if (n == 0) return INVALID_VALUE;
  if (memory_used + n > memory_size()) return OUT_OF_MEMORY;
  void *m = mmap(nullptr, n + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  memset(m, 0xff, n);
  memory[*p = (Address)m] = {n, here()};
  memory_used += n;
  return 0;
}
API(cuMemFree_v2)(Address p) {
  NEED_CONTEXT;
  auto it = memory.find(p);
  if (it == memory.end()) return INVALID_VALUE;
  munmap((void *)p, it->second.bytes + 4096);
  memory_used -= it->second.bytes;
  memory.erase(it);
  return 0;
}
API(cuMemAllocAsync)(Address *p, size_t n, Handle) { return cuMemAlloc_v2(p, n); }
API(cuMemFreeAsync)(Address p, Handle) { return cuMemFree_v2(p); }
API(cuMemGetInfo_v2)(size_t *left, size_t *total) { NEED_CONTEXT; *total = memory_size(), *left = *total - memory_used; return 0; }
API(cuMemGetAddressRange_v2)(Address *base, size_t *n, Address p) {
  NEED_CONTEXT;
  if (!inside(p, 1)) return NOT_FOUND;
  auto it = --memory.upper_bound(p);
  if (base) *base = it->first;
  if (n) *n = it->second.bytes;
  return 0;
}
API(cuMemHostAlloc)(Handle *p, size_t n, unsigned) { *p = malloc(n ? n : 1); return *p ? 0 : OUT_OF_MEMORY; }
API(cuMemAllocHost_v2)(Handle *p, size_t n) { return cuMemHostAlloc(p, n, 0); }
API(cuMemFreeHost)(Handle p) { free(p); return 0; }
API(cuMemHostRegister_v2)(Handle, size_t, unsigned) { return 0; }
API(cuMemHostUnregister)(Handle) { return 0; }
API(cuMemcpyHtoD_v2)(Address d, const void *s, size_t n) {
  NEED_CONTEXT;
  if (n && !inside(d, n)) return INVALID_VALUE;
  memcpy((void *)d, s, n);
  return 0;
}
API(cuMemcpyDtoH_v2)(void *d, Address s, size_t n) {
  NEED_CONTEXT;
  if (n && !inside(s, n)) return INVALID_VALUE;
  memcpy(d, (const void *)s, n);
  return 0;
}
API(cuMemcpyDtoD_v2)(Address d, Address s, size_t n) {
  NEED_CONTEXT;
  if (n && (!inside(d, n) || !inside(s, n))) return INVALID_VALUE;
  memmove((void *)d, (const void *)s, n);
  return 0;
}
API(cuMemcpyHtoDAsync_v2)(Address d, const void *s, size_t n, Handle) { return cuMemcpyHtoD_v2(d, s, n); }
API(cuMemcpyDtoHAsync_v2)(void *d, Address s, size_t n, Handle) { return cuMemcpyDtoH_v2(d, s, n); }
API(cuMemcpyDtoDAsync_v2)(Address d, Address s, size_t n, Handle) { return cuMemcpyDtoD_v2(d, s, n); }
template <class T> static int fill(Address d, T v, size_t n) {
  NEED_CONTEXT;
  if (n && !inside(d, n * sizeof v)) return INVALID_VALUE;
  for (size_t i = 0; i < n; i++) ((T *)d)[i] = v;
  return 0;
}
API(cuMemsetD8_v2)(Address d, unsigned char v, size_t n) { return fill(d, v, n); }
API(cuMemsetD16_v2)(Address d, unsigned short v, size_t n) { return fill(d, v, n); }
API(cuMemsetD32_v2)(Address d, unsigned v, size_t n) { return fill(d, v, n); }
API(cuMemsetD8Async)(Address d, unsigned char v, size_t n, Handle) { return fill(d, v, n); }
API(cuMemsetD32Async)(Address d, unsigned v, size_t n, Handle) { return fill(d, v, n); }

// ---- streams and events: everything is done when the call returns -----------------------------------------------
static bool is_stream(Handle s) { return (uintptr_t)s <= 2 || streams.count(s); }
API(cuStreamCreate)(Handle *s, unsigned) { NEED_CONTEXT; streams.insert(*s = malloc(1)); return 0; }
API(cuStreamCreateWithPriority)(Handle *s, unsigned f, int) { return cuStreamCreate(s, f); }
API(cuStreamDestroy_v2)(Handle s) { LOCK; if (!streams.erase(s)) return INVALID_HANDLE; free(s); return 0; }
API(cuStreamSynchronize)(Handle s) { NEED_CONTEXT; return is_stream(s) ? 0 : INVALID_HANDLE; }
API(cuStreamQuery)(Handle s) { NEED_CONTEXT; return is_stream(s) ? 0 : INVALID_HANDLE; }
API(cuStreamWaitEvent)(Handle s, Handle e, unsigned) { NEED_CONTEXT; return is_stream(s) && events.count(e) ? 0 : INVALID_HANDLE; }
API(cuEventCreate)(Handle *e, unsigned) { NEED_CONTEXT; events.insert(*e = new Event{-1}); return 0; }
API(cuEventDestroy_v2)(Handle e) { LOCK; if (!events.erase(e)) return INVALID_HANDLE; delete (Event *)e; return 0; }
API(cuEventRecord)(Handle e, Handle s) {
  NEED_CONTEXT;
  if (!events.count(e) || !is_stream(s)) return INVALID_HANDLE;
  ((Event *)e)->at = now_ms();
  return 0;
}
API(cuEventSynchronize)(Handle e) { NEED_CONTEXT; return events.count(e) ? 0 : INVALID_HANDLE; }
API(cuEventQuery)(Handle e) { NEED_CONTEXT; return events.count(e) ? 0 : INVALID_HANDLE; }
API(cuEventElapsedTime)(float *ms, Handle a, Handle b) {
  NEED_CONTEXT;
  if (!events.count(a) || !events.count(b) || ((Event *)a)->at < 0 || ((Event *)b)->at < 0) return INVALID_HANDLE;
  *ms = (float)(((Event *)b)->at - ((Event *)a)->at);
  return 0;
}
API(cuEventElapsedTime_v2)(float *ms, Handle a, Handle b) { return cuEventElapsedTime(ms, a, b); }

// ---- modules ----------------------------------------------------------------------------------------------------
static int load_elf(Module **out, const unsigned char *image) {
  uint64_t sections;
  uint16_t machine, entry, entries;
  memcpy(&machine, image + 18, 2), memcpy(&sections, image + 40, 8), memcpy(&entry, image + 58, 2), memcpy(&entries, image + 60, 2);
  if (machine == 190) return NO_BINARY;  // a real cubin
  size_t bytes = sections + (size_t)entry * entries;
  char path[] = "/tmp/polydyn-module-XXXXXX";  // a name of its own: dlopen takes equal names for one library
  int fd = mkstemp(path);
  if (fd < 0) return OUT_OF_MEMORY;
  void *library = nullptr;
  if (write(fd, image, bytes) == (ssize_t)bytes) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library && getenv("PDEMU_TRACE")) fprintf(stderr, "cuModuleLoadData: %s\n", dlerror());
  close(fd);
  unlink(path);
  const uint32_t *arch = library ? (const uint32_t *)dlsym(library, "pdemu_arch") : nullptr;
  if (!arch) return INVALID_IMAGE;
  // 90 stands for sm_90a, which runs nowhere else; older targets would come with PTX, so they run on newer devices.
  if (*arch > (uint32_t)capability() || (*arch == 90 && capability() != 90)) return dlclose(library), NO_BINARY;
  modules.insert(*out = new Module{library, {}});
  return 0;
}
API(cuModuleLoadData)(Module **m, const void *image) {
  NEED_CONTEXT;
  return memcmp(image, "\177ELF", 4) ? INVALID_IMAGE : load_elf(m, (const unsigned char *)image);
}
// The linker's logs, which pycuda asks for, are empty.
API(cuModuleLoadDataEx)(Module **m, const void *image, unsigned n, const int *options, void **values) {
  for (unsigned i = 0; options && i < n; i++) {
    if (options[i] == 3 || options[i] == 5) *(char *)values[i] = 0;                            // buffers
    if (options[i] == 4 || options[i] == 6) values[i] = nullptr;                               // their sizes, then used
  }
  return cuModuleLoadData(m, image);
}
API(cuModuleUnload)(Module *m) {
  LOCK;
  if (!modules.erase(m)) return INVALID_HANDLE;
  for (auto &f : m->functions) delete f.second;
  dlclose(m->library);
  delete m;
  return 0;
}
API(cuModuleGetFunction)(Function **f, Module *m, const char *name) {
  NEED_CONTEXT;
  if (!modules.count(m)) return INVALID_HANDLE;
  Function *&known = m->functions[name];
  if (!known) {
    auto kernel = (const pdemu_kernel *)dlsym(m->library, (std::string("pdemu_kernel_") + name).c_str());
    if (!kernel) return m->functions.erase(name), NOT_FOUND;
    known = new Function{kernel, 49152};
  }
  *f = known;
  return 0;
}
API(cuModuleGetGlobal_v2)(Address *, size_t *, Module *, const char *) { return NOT_FOUND; }
API(cuLibraryLoadData)(Module **m, const void *image, Handle, Handle, unsigned, Handle, Handle, unsigned) { return cuModuleLoadData(m, image); }
API(cuLibraryUnload)(Module *m) { return cuModuleUnload(m); }
API(cuLibraryGetKernel)(Function **f, Module *m, const char *name) { return cuModuleGetFunction(f, m, name); }
API(cuKernelGetFunction)(Function **f, Function *k) { *f = k; return 0; }
API(cuFuncSetBlockShape)(Function *, int, int, int) { return 0; }
API(cuFuncSetCacheConfig)(Function *, int) { return 0; }
API(cuFuncSetAttribute)(Function *f, int attribute, int v) {
  if (attribute == 8 && (v < 0 || v > shared_limit())) return INVALID_VALUE;
  if (attribute == 8) f->max_dynamic = v;
  return 0;
}
API(cuFuncGetAttribute)(int *v, int attribute, Function *f) {
  *v = attribute == 0 ? (int)f->kernel->threads : attribute == 5 || attribute == 6 ? (int)f->kernel->arch
     : attribute == 8 ? f->max_dynamic : 0;  // registers and local memory: 0, there are none
  return 0;
}

// ---- launch -----------------------------------------------------------------------------------------------------
extern "C" __attribute__((visibility("default"))) uint64_t pdemu_counters[PDEMU_COUNTERS];
uint64_t pdemu_counters[PDEMU_COUNTERS];

API(cuLaunchKernel)(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
                    Handle stream, void **params, void **extra) {
  NEED_CONTEXT;
  if (!f || !is_stream(stream)) return INVALID_HANDLE;
  if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || !bx || by != 1 || bz != 1 || (int)smem > f->max_dynamic) return INVALID_VALUE;
  if (bx > f->kernel->threads) return OUT_OF_RESOURCES;
  std::vector<void *> pointers;
  if (!params && extra) {
    char *buffer = nullptr;
    for (int i = 0; extra[i]; i += 2)
      if (extra[i] == (void *)1) buffer = (char *)extra[i + 1];
    for (uint32_t i = 0; buffer && i < f->kernel->nparams; i++) pointers.push_back(buffer + f->kernel->offsets[i]);
    params = pointers.data();
  }
  // The device copies parameters into constant memory, which is aligned enough for tensor maps.
  std::vector<std::vector<char>> copies(f->kernel->nparams);
  std::vector<void *> aligned(f->kernel->nparams + 1);
  for (uint32_t i = 0; i < f->kernel->nparams; i++) {
    copies[i].resize(f->kernel->sizes[i] + 64);
    aligned[i] = (void *)(((uintptr_t)copies[i].data() + 63) & ~(uintptr_t)63);
    memcpy(aligned[i], params[i], f->kernel->sizes[i]);
  }
  std::vector<pdemu_range> ranges;
  for (auto &a : memory) ranges.push_back({a.first, a.first + a.second.bytes});
  pdemu_launch l = {PDEMU_ABI, {gx, gy, gz}, bx, smem, (uint32_t)setting("PDEMU_REVERSE", 0), (uint32_t)ranges.size(),
                    ranges.data(), aligned.data(), pdemu_counters, {0}};
  int code = f->kernel->launch(&l);
  if (code == PDEMU_INVALID) return INVALID_VALUE;
  if (code) here()->broken = code, last_message = l.message;  // reported by the next call, as on a GPU
  return 0;
}
API(cuLaunchKernelEx)(const unsigned *config, Function *f, void **params, void **extra) {
  return cuLaunchKernel(f, config[0], config[1], config[2], config[3], config[4], config[5], config[6],
                        *(Handle *)(config + 8), params, extra);
}

// ---- tensor maps ------------------------------------------------------------------------------------------------
API(cuTensorMapEncodeTiled)(void *out, int type, unsigned rank, Address base, const uint64_t *dims, const uint64_t *strides,
                            const unsigned *box, const unsigned *element_strides, int interleave, int swizzle, int, int) {
  static const uint8_t sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  if ((uint64_t)out % 64 || type < 0 || type > 9 || rank < 1 || rank > 5 || base % 16 || interleave) return INVALID_VALUE;
  if (swizzle != 0 && swizzle != 3) return NOT_SUPPORTED;
  pdemu_tensor_map m = {};
  m.base = base, m.magic = PDEMU_TENSOR_MAP, m.rank = (uint8_t)rank, m.element_bytes = sizes[type], m.swizzle = (uint8_t)swizzle;
  for (int i = 0; i < 5; i++) m.dims[i] = 1, m.box[i] = 1;
  for (unsigned i = 0; i < rank; i++) {
    if (!dims[i] || dims[i] > 1ull << 32 || !box[i] || box[i] > 256 || element_strides[i] != 1) return INVALID_VALUE;
    if (i && (strides[i - 1] % 16 || strides[i - 1] >= 1ull << 40)) return INVALID_VALUE;
    m.dims[i] = (uint32_t)dims[i], m.box[i] = (uint16_t)box[i];
    if (i) m.strides[i - 1] = strides[i - 1];
  }
  if (box[0] * sizes[type] % 16 || (swizzle == 3 && box[0] * sizes[type] > 128)) return INVALID_VALUE;
  memset(out, 0, 128);
  memcpy(out, &m, sizeof m);
  return 0;
}

// ---- errors and entry points ------------------------------------------------------------------------------------
static const struct { int code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"}, {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}, {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}, {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}, {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"}, {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}};
API(cuGetErrorName)(int code, const char **s) {
  *s = nullptr;
  for (auto &e : errors) if (e.code == code) *s = e.name;
  return *s ? 0 : INVALID_VALUE;
}
API(cuGetErrorString)(int code, const char **s) {  // of a failed kernel: the emulation's own words
  LOCK;
  static std::string text;
  *s = nullptr;
  for (auto &e : errors) if (e.code == code) *s = e.text;
  if (*s && code >= 700 && code < 800 && code != OUT_OF_RESOURCES && !last_message.empty()) *s = (text = std::string(*s) + ": " + last_message).c_str();
  return *s ? 0 : INVALID_VALUE;
}
API(cuGetProcAddress_v2)(const char *name, Handle *f, int, uint64_t, int *found) {
  for (const char *suffix : {"_v4", "_v3", "_v2", ""})
    if ((*f = dlsym(RTLD_DEFAULT, (std::string(name) + suffix).c_str()))) break;
  if (found) *found = *f ? 0 : 1;
  return *f ? 0 : NOT_FOUND;
}
API(cuGetProcAddress)(const char *name, Handle *f, int v, uint64_t flags) { return cuGetProcAddress_v2(name, f, v, flags, nullptr); }
API(pdemu_unsupported)(const char *name) {
  if (getenv("PDEMU_TRACE")) fprintf(stderr, "CPU libcuda: %s is not supported\n", name);
  return NOT_SUPPORTED;
}
