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
  if (!contexts.count(c) || c == primary) return INVALID_CONTEXT;  // the primary context is released, not destroyed
  if (!current.empty() && current.back() == c) current.pop_back();
  destroy(c);
  return 0;
}
API(cuCtxAttach)(Context **c, unsigned) { LOCK; *c = here(); return *c ? 0 : INVALID_CONTEXT; }
// "May also return error codes from previous, asynchronous launches": with PDEMU_STICKY=1, pushing and popping only do
// that.
static int sticky(Context *c) { return setting("PDEMU_STICKY", 0) && contexts.count(c) ? c->broken : 0; }
API(cuCtxPushCurrent_v2)(Context *c) {
  LOCK;
  if (!contexts.count(c)) return INVALID_CONTEXT;
  if (int code = sticky(c)) return code;
  current.push_back(c);
  return 0;
}
API(cuCtxPopCurrent_v2)(Context **c) {
  LOCK;
  if (current.empty()) return INVALID_CONTEXT;
  if (int code = sticky(current.back())) return code;
  if (c) *c = current.back();
  current.pop_back();
  return 0;
}
API(cuCtxGetCurrent)(Context **c) { LOCK; *c = here(); return 0; }
API(cuCtxSetCurrent)(Context *c) {
  LOCK;
  if (c && !contexts.count(c)) return INVALID_CONTEXT;
  if (!current.empty()) current.pop_back();
  if (c) current.push_back(c);
  return 0;
}
API(cuCtxGetDevice)(int *d) { LOCK; *d = 0; return here() ? 0 : INVALID_CONTEXT; }
API(cuCtxGetDevice_v2)(int *d, Context *) { *d = 0; return 0; }
API(cuCtxGetApiVersion)(Context *, unsigned *v) { *v = 13000; return 0; }
API(cuCtxGetStreamPriorityRange)(int *low, int *high) { *low = 0, *high = -5; return 0; }
API(cuCtxSetCacheConfig)(int) { return 0; }
// Waits for everything, and therefore ends every capture in the context, in any mode.
API(cuCtxSynchronize)() {
  NEED_CONTEXT;
  if (int code = invalidate(CAPTURE_UNSUPPORTED, [](Stream *s) { return s->owner == here(); })) return code;
  finish_all();
  return here()->broken;
}
API(cuDevicePrimaryCtxRetain)(Context **c, int) {
  LOCK;
  if (!primary)
    if (int r = create(&primary)) return r;
  primary_users++;
  *c = primary;
  return 0;
}
API(cuDevicePrimaryCtxReset_v2)(int) {  // a caller that has retained it must still release it
  LOCK;
  if (primary) destroy(primary);
  primary = nullptr;
  return 0;
}
API(cuDevicePrimaryCtxRelease_v2)(int d) {
  LOCK;
  if (primary_users == 0) return INVALID_CONTEXT;
  return --primary_users ? 0 : cuDevicePrimaryCtxReset_v2(d);
}
API(cuCtxDetach)(Context *c) { LOCK; return c && c == primary ? cuDevicePrimaryCtxRelease_v2(0) : cuCtxDestroy_v2(c); }
API(cuDevicePrimaryCtxGetState)(int, unsigned *flags, int *active) { *flags = 0, *active = primary != nullptr; return 0; }

// ---- memory: every allocation is followed by a gap ----------------------------------------------------------------
static bool inside(Address p, size_t n) {
  auto it = memory.upper_bound(p);
  return it != memory.begin() && (--it, p + n <= it->first + it->second.bytes);
}
static bool inside_pinned(const void *p, size_t n) {
  auto it = pinned.upper_bound((Address)p);
  return it != pinned.begin() && (--it, (Address)p + n <= it->first + it->second.bytes);
}
API(cuMemAlloc_v2)(Address *p, size_t n) {
  NEED_CONTEXT;
  if (int code = unsafe()) return code;
  if (n == 0) return INVALID_VALUE;
  if (memory_used + n > memory_size()) return OUT_OF_MEMORY;
  if (!(*p = (Address)map_pages(memory, n))) return OUT_OF_MEMORY;
  memory_used += n;
  return 0;
}
API(cuMemFree_v2)(Address p) {
  NEED_CONTEXT;
  if (int code = unsafe()) return code;
  if (setting("PDEMU_FREE_WAITS", 1)) finish_all();
  arrive();
  auto it = memory.find(p);
  if (it == memory.end()) return INVALID_VALUE;
  unmap(memory, it);
  return 0;
}
API(cuMemAllocAsync)(Address *p, size_t n, Handle s) {
  LOCK;
  if (!is_stream(s)) return INVALID_HANDLE;
  if (int code = not_captured(s, NOT_SUPPORTED)) return code;
  return cuMemAlloc_v2(p, n);
}
API(cuMemFreeAsync)(Address p, Handle s) {
  LOCK;
  if (!is_stream(s)) return INVALID_HANDLE;
  if (int code = not_captured(s, NOT_SUPPORTED)) return code;
  return cuMemFree_v2(p);
}
API(cuMemGetInfo_v2)(size_t *left, size_t *total) { NEED_CONTEXT; *total = memory_size(), *left = *total - memory_used; return 0; }
API(cuMemGetAddressRange_v2)(Address *base, size_t *n, Address p) {
  NEED_CONTEXT;
  if (!inside(p, 1)) return NOT_FOUND;
  auto it = --memory.upper_bound(p);
  if (base) *base = it->first;
  if (n) *n = it->second.bytes;
  return 0;
}
API(cuPointerGetAttribute)(void *value, int attribute, Address p) {
  LOCK;
  if (!inside(p, 1)) return INVALID_VALUE;
  if (attribute == 1) *(Context **)value = (--memory.upper_bound(p))->second.owner;
  if (attribute == 2) *(unsigned *)value = 2;  // device memory
  return attribute == 1 || attribute == 2 ? 0 : NOT_SUPPORTED;
}
API(cuMemHostAlloc)(Handle *p, size_t n, unsigned) {
  NEED_CONTEXT;
  if (int code = unsafe(true)) return code;
  if (n == 0) return INVALID_VALUE;
  return (*p = map_pages(pinned, n)) ? 0 : OUT_OF_MEMORY;
}
API(cuMemAllocHost_v2)(Handle *p, size_t n) { return cuMemHostAlloc(p, n, 0); }
API(cuMemFreeHost)(Handle p) {
  NEED_CONTEXT;
  if (int code = unsafe(true)) return code;
  auto it = pinned.find((Address)p);
  if (it == pinned.end()) return INVALID_VALUE;
  unmap(pinned, it);
  return 0;
}
API(cuMemHostRegister_v2)(Handle, size_t, unsigned) { LOCK; return unsafe(true); }
API(cuMemHostUnregister)(Handle) { LOCK; return unsafe(true); }

// Copies on a stream. A graph checks again that its memory exists.
static int copy(void *to, const void *from, size_t n, bool to_device, bool from_device, Handle stream) {
  const void *host = to_device ? from : to;
  bool was_pinned = !(to_device && from_device) && inside_pinned(host, n);
  auto there = [=] {
    return !n || ((!to_device || inside((Address)to, n)) && (!from_device || inside((Address)from, n)) &&
                  (!was_pinned || inside_pinned(host, n)));
  };
  if (!there()) return INVALID_VALUE;
  std::shared_ptr<std::vector<char>> staged;  // pageable memory is read now, and written before the call returns
  bool pageable = !was_pinned && to_device != from_device && deferred(stream) && !capture_of(stream);
  if (pageable && to_device) staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + n);
  int code = enqueue(stream, [=] {
    if (!there()) return fault("a copy of memory that was freed");
    memmove(to, staged ? staged->data() : from, n);
    if (to_device && stream) write_to((Address)to);
    return 0;
  });
  if (pageable && from_device && !code) finish(stream), code = here()->broken;
  return code;
}
// Copies on the legacy stream; the host waits for it.
static int copy_now(void *to, const void *from, size_t n, bool to_device, bool from_device) {
  if (int code = implicit(nullptr)) return code;
  if (int code = unsafe()) return code;
  return copy(to, from, n, to_device, from_device, nullptr);
}
API(cuMemcpyHtoD_v2)(Address d, const void *s, size_t n) {
  NEED_CONTEXT;
  if (!n || !inside(d, n) || inside_pinned(s, n)) return copy_now((void *)d, s, n, true, false);
  if (int code = implicit(nullptr)) return code;
  if (int code = unsafe()) return code;
  arrive(), late.push_back({d, std::vector<char>((const char *)s, (const char *)s + n)});
  return 0;
}
API(cuMemcpyDtoH_v2)(void *d, Address s, size_t n) { NEED_CONTEXT; return copy_now(d, (const void *)s, n, false, true); }
API(cuMemcpyDtoD_v2)(Address d, Address s, size_t n) { NEED_CONTEXT; return copy_now((void *)d, (const void *)s, n, true, true); }
API(cuMemcpyHtoDAsync_v2)(Address d, const void *s, size_t n, Handle stream) { NEED_CONTEXT; return copy((void *)d, s, n, true, false, stream); }
API(cuMemcpyDtoHAsync_v2)(void *d, Address s, size_t n, Handle stream) { NEED_CONTEXT; return copy(d, (const void *)s, n, false, true, stream); }
API(cuMemcpyDtoDAsync_v2)(Address d, Address s, size_t n, Handle stream) { NEED_CONTEXT; return copy((void *)d, (const void *)s, n, true, true, stream); }
template <class T> static int fill(Address d, T v, size_t n, Handle stream) {
  auto there = [=] { return !n || inside(d, n * sizeof v); };
  if (!there()) return INVALID_VALUE;
  return enqueue(stream, [=] {
    if (!there()) return fault("a graph fills memory that was freed");
    for (size_t i = 0; i < n; i++) ((T *)d)[i] = v;
    write_to(d);
    return 0;
  });
}
template <class T> static int fill_now(Address d, T v, size_t n) {
  if (int code = implicit(nullptr)) return code;
  if (int code = unsafe()) return code;
  return fill(d, v, n, nullptr);
}
API(cuMemsetD8_v2)(Address d, unsigned char v, size_t n) { NEED_CONTEXT; return fill_now(d, v, n); }
API(cuMemsetD16_v2)(Address d, unsigned short v, size_t n) { NEED_CONTEXT; return fill_now(d, v, n); }
API(cuMemsetD32_v2)(Address d, unsigned v, size_t n) { NEED_CONTEXT; return fill_now(d, v, n); }
API(cuMemsetD8Async)(Address d, unsigned char v, size_t n, Handle stream) { NEED_CONTEXT; return fill(d, v, n, stream); }
API(cuMemsetD32Async)(Address d, unsigned v, size_t n, Handle stream) { NEED_CONTEXT; return fill(d, v, n, stream); }

// ---- streams and events -----------------------------------------------------------------------------------------
API(cuStreamCreate)(Stream **s, unsigned flags) { NEED_CONTEXT; streams.insert(*s = new Stream{!(flags & 1), here(), nullptr, {}}); return 0; }
API(cuStreamCreateWithPriority)(Stream **s, unsigned f, int) { return cuStreamCreate(s, f); }
API(cuStreamDestroy_v2)(Stream *s) {
  LOCK;
  if (!streams.count(s)) return INVALID_HANDLE;
  finish(s), destroy(s);
  return 0;
}
API(cuStreamSynchronize)(Handle s) {
  NEED_CONTEXT;
  if (int code = waiting(s)) return code;
  deferred(s) ? finish(s) : arrive();
  return here()->broken;
}
API(cuStreamQuery)(Handle s) { return cuStreamSynchronize(s); }
API(cuStreamWaitEvent)(Handle s, Handle e, unsigned) {
  NEED_CONTEXT;
  if (!is_stream(s) || !is_event(e)) return INVALID_HANDLE;
  if (int code = implicit(s)) return code;
  bool captured = ((Event *)e)->captured;
  if (capture_of(s)) return capture_of(s)->invalid ? CAPTURE_INVALIDATED : captured ? 0 : not_captured(s, CAPTURE_ISOLATION);
  if (captured) return NOT_SUPPORTED;  // a real driver would let the stream join the capture
  std::shared_ptr<Mark> mark = ((Event *)e)->mark;
  return enqueue(s, [mark, from = mark->stream, number = mark->asked] { return reach(mark, from, number), 0; });
}
API(cuEventCreate)(Event **e, unsigned) {
  NEED_CONTEXT;
  events.insert(*e = new Event{false, std::make_shared<Mark>(Mark{nullptr, 0, 0, -1}), here()});
  return 0;
}
API(cuEventDestroy_v2)(Event *e) { LOCK; if (!events.count(e)) return INVALID_HANDLE; destroy(e); return 0; }
API(cuEventRecord)(Handle e, Handle s) {
  NEED_CONTEXT;
  if (!is_event(e) || !is_stream(s)) return INVALID_HANDLE;
  if (int code = implicit(s)) return code;
  if (capture_of(s) && capture_of(s)->invalid) return CAPTURE_INVALIDATED;
  if ((((Event *)e)->captured = capture_of(s) != nullptr)) return 0;
  std::shared_ptr<Mark> mark = ((Event *)e)->mark;
  uint64_t number = ++mark->asked;
  mark->stream = s;
  return enqueue(s, [mark, number] { return mark->done = number, mark->at = now_ms(), 0; });
}
static int waiting_for(Handle e) {
  if (!is_event(e)) return INVALID_HANDLE;
  if (((Event *)e)->captured) return CAPTURED_EVENT;
  if (int code = unsafe()) return code;
  std::shared_ptr<Mark> mark = ((Event *)e)->mark;
  reach(mark, mark->stream, mark->asked);
  return here()->broken;
}
API(cuEventSynchronize)(Handle e) { NEED_CONTEXT; return waiting_for(e); }
API(cuEventQuery)(Handle e) { NEED_CONTEXT; return waiting_for(e); }
API(cuEventElapsedTime)(float *ms, Handle a, Handle b) {
  NEED_CONTEXT;
  if (!is_event(a) || !is_event(b)) return INVALID_HANDLE;
  const Mark &from = *((Event *)a)->mark, &to = *((Event *)b)->mark;
  if (!from.asked || !to.asked) return INVALID_HANDLE;
  if (((Event *)a)->captured || ((Event *)b)->captured) return CAPTURED_EVENT;
  if (from.done < from.asked || to.done < to.asked) return NOT_READY;
  *ms = (float)(to.at - from.at);
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
  char path[] = "/tmp/polydyn-module-XXXXXX";  // a unique name: dlopen takes equal names for the same library
  int fd = mkstemp(path);
  if (fd < 0) return OUT_OF_MEMORY;
  void *library = nullptr;
  if (write(fd, image, bytes) == (ssize_t)bytes) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library && getenv("PDEMU_TRACE")) fprintf(stderr, "cuModuleLoadData: %s\n", dlerror());
  close(fd);
  unlink(path);
  const uint32_t *arch = library ? (const uint32_t *)dlsym(library, "pdemu_arch") : nullptr;
  if (!arch) return INVALID_IMAGE;
  // 90 means sm_90a, which runs nowhere else. For older targets a program also has PTX, so they run on newer devices.
  if (*arch > (uint32_t)capability() || (*arch == 90 && capability() != 90)) return dlclose(library), NO_BINARY;
  static uint64_t number;
  loaded.insert(++number);
  modules.insert(*out = new Module{library, {}, number, here()});
  return 0;
}
API(cuModuleLoadData)(Module **m, const void *image) {
  NEED_CONTEXT;
  if (int code = unsafe()) return code;
  return memcmp(image, "\177ELF", 4) ? INVALID_IMAGE : load_elf(m, (const unsigned char *)image);
}
// The linker logs that pycuda requests are empty.
API(cuModuleLoadDataEx)(Module **m, const void *image, unsigned n, const int *options, void **values) {
  for (unsigned i = 0; options && i < n; i++) {
    if (options[i] == 3 || options[i] == 5) *(char *)values[i] = 0;                            // buffers
    if (options[i] == 4 || options[i] == 6) values[i] = nullptr;                               // their sizes, then used sizes
  }
  return cuModuleLoadData(m, image);
}
API(cuModuleUnload)(Module *m) {
  LOCK;
  if (int code = unsafe()) return code;
  finish_all();
  if (!modules.count(m)) return INVALID_HANDLE;
  destroy(m);
  return 0;
}
API(cuModuleGetFunction)(Function **f, Module *m, const char *name) {
  NEED_CONTEXT;
  if (!modules.count(m)) return INVALID_HANDLE;
  Function *&known = m->functions[name];
  if (!known) {
    auto kernel = (const pdemu_kernel *)dlsym(m->library, (std::string("pdemu_kernel_") + name).c_str());
    if (!kernel) return m->functions.erase(name), NOT_FOUND;
    functions.insert(known = new Function{kernel, 49152, m->number});
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
  LOCK;
  if (!functions.count(f)) return INVALID_HANDLE;
  if (attribute == 8 && (v < 0 || v > shared_limit())) return INVALID_VALUE;
  if (attribute == 9 && (v < -1 || v > 100)) return INVALID_VALUE;
  if (attribute == 8) f->max_dynamic = v;
  return 0;
}
API(cuFuncGetAttribute)(int *v, int attribute, Function *f) {
  LOCK;
  if (!functions.count(f)) return INVALID_HANDLE;
  *v = attribute == 0 ? (int)f->kernel->threads : attribute == 5 || attribute == 6 ? capability()  // as compiled for it
     : attribute == 8 ? f->max_dynamic : 0;  // no registers and no local memory
  return 0;
}
// Limited by threads and shared memory; registers are unknown.
API(cuOccupancyMaxActiveBlocksPerMultiprocessor)(int *blocks, Function *f, int threads, size_t smem) {
  LOCK;
  if (!functions.count(f)) return INVALID_HANDLE;
  if (threads <= 0) return INVALID_VALUE;
  bool never = (unsigned)threads > f->kernel->threads || smem > (size_t)f->max_dynamic;
  *blocks = never ? 0 : (int)std::min<size_t>(std::min(32, 2048 / threads), (shared_limit() + 1024) / (smem + 1024));
  return 0;
}

// ---- launch -----------------------------------------------------------------------------------------------------
extern "C" __attribute__((visibility("default"))) uint64_t pdemu_counters[PDEMU_COUNTERS];
uint64_t pdemu_counters[PDEMU_COUNTERS];
// For tests: how many launches have begun before the previous one had ended.
extern "C" __attribute__((visibility("default"))) uint64_t pdemu_overlaps;
uint64_t pdemu_overlaps;

struct Launch { Function *function; uint64_t module; uint32_t grid[3], threads, smem; std::vector<std::string> params; bool overlaps; };
static int run_kernel(const Launch &k) {
  if (!loaded.count(k.module)) return fault("a graph launches a kernel whose module was unloaded");
  // The device copies parameters into constant memory, which is aligned enough for tensor maps.
  std::vector<std::vector<char>> copies(k.params.size());
  std::vector<void *> aligned(k.params.size() + 1);
  for (size_t i = 0; i < k.params.size(); i++) {
    copies[i].resize(k.params[i].size() + 64);
    aligned[i] = (void *)(((uintptr_t)copies[i].data() + 63) & ~(uintptr_t)63);
    memcpy(aligned[i], k.params[i].data(), k.params[i].size());
  }
  std::vector<pdemu_range> ranges;
  for (auto &a : memory)
    if (a.second.owner == here()) ranges.push_back({a.first, a.first + a.second.bytes, a.second.written});
  pdemu_launch l = {PDEMU_ABI, {k.grid[0], k.grid[1], k.grid[2]}, k.threads, k.smem, (uint32_t)setting("PDEMU_REVERSE", 0), k.overlaps,
                    (uint32_t)ranges.size(), ranges.data(), aligned.data(), pdemu_counters, {0}};
  pdemu_overlaps += k.overlaps;
  int code = k.function->kernel->launch(&l);
  for (const pdemu_range &r : ranges) memory[r.lo].written = r.written != 0;
  if (code == PDEMU_INVALID) return INVALID_VALUE;
  if (code) here()->broken = code, last_message = l.message;  // reported by the next call, as on a GPU
  return 0;
}
// Copies a launch with its parameters; returns an error code.
static int describe(Launch *k, Function *f, const unsigned *grid, const unsigned *block, unsigned smem, void **params, void **extra) {
  if (!functions.count(f)) return INVALID_HANDLE;
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > INT32_MAX || grid[1] > 65535 || grid[2] > 65535) return INVALID_VALUE;
  if (!block[0] || block[1] != 1 || block[2] != 1 || smem > (unsigned)f->max_dynamic) return INVALID_VALUE;
  if (block[0] > f->kernel->threads) return OUT_OF_RESOURCES;
  const char *buffer = nullptr;
  for (int i = 0; !params && extra && extra[i]; i += 2)
    if (extra[i] == (void *)1) buffer = (const char *)extra[i + 1];
  *k = {f, f->module, {grid[0], grid[1], grid[2]}, block[0], smem, {}, false};
  for (uint32_t i = 0; i < f->kernel->nparams; i++)
    k->params.emplace_back(buffer ? buffer + f->kernel->offsets[i] : (const char *)params[i], f->kernel->sizes[i]);
  return 0;
}
static int launch(const Launch &k, Handle stream) {
  int code = enqueue(stream, [k] { return run_kernel(k); });
  if (code || !setting("CUDA_LAUNCH_BLOCKING", 0) || capture_of(stream)) return code;
  finish(stream);  // a launch that waits for its kernel returns the kernel's error
  return here()->broken;
}
API(cuLaunchKernel)(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
                    Handle stream, void **params, void **extra) {
  NEED_CONTEXT;
  if (!is_stream(stream)) return INVALID_HANDLE;
  const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
  Launch k;
  int code = describe(&k, f, grid, block, smem, params, extra);
  return code ? code : launch(k, stream);
}
struct Attribute { int id, pad, value, rest[15]; };  // CUlaunchAttribute
struct Config { unsigned grid[3], block[3], smem; Handle stream; const Attribute *attributes; unsigned count; };  // CUlaunchConfig
API(cuLaunchKernelEx)(const Config *how, Function *f, void **params, void **extra) {
  NEED_CONTEXT;
  enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
  if (!is_stream(how->stream)) return INVALID_HANDLE;
  Launch k;
  if (int code = describe(&k, f, how->grid, how->block, how->smem, params, extra)) return code;
  for (unsigned i = 0; i < how->count; i++) {
    if (how->attributes[i].id != PROGRAMMATIC_STREAM_SERIALIZATION || capability() < 90) return NOT_SUPPORTED;
    k.overlaps |= how->attributes[i].value != 0;
  }
  return launch(k, how->stream);
}

// ---- tensor maps ------------------------------------------------------------------------------------------------
// Fills in the properties common to both modes of a tensor map. `inner`: elements along dim 0 of a copied box.
static int describe(pdemu_tensor_map *m, const void *out, int type, unsigned rank, Address base, const uint64_t *dims,
                    const uint64_t *strides, unsigned inner, int interleave, int swizzle) {
  static const uint8_t sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 0, 4};  // type 10 (flush to zero) is not modelled
  enum { TFLOAT32 = 11 };
  if (type < 0 || type > TFLOAT32 || !sizes[type]) return INVALID_VALUE;
  if ((uint64_t)out % 64 || rank < 1 || rank > 5 || base % 16 || interleave) return INVALID_VALUE;
  if (swizzle != 0 && swizzle != 3) return NOT_SUPPORTED;
  m->base = base, m->magic = PDEMU_TENSOR_MAP, m->rank = (uint8_t)rank, m->element_bytes = sizes[type];
  m->swizzle = (uint8_t)swizzle, m->tf32 = type == TFLOAT32;
  for (int i = 0; i < 5; i++) m->dims[i] = 1, m->box[i] = 1;
  for (unsigned i = 0; i < rank; i++) {
    if (!dims[i] || dims[i] > 1ull << 32) return INVALID_VALUE;
    if (i && (strides[i - 1] % 16 || strides[i - 1] >= 1ull << 40)) return INVALID_VALUE;
    m->dims[i] = (uint32_t)dims[i];
    if (i) m->strides[i - 1] = strides[i - 1];
  }
  if (!inner || inner > 256 || inner * sizes[type] % 16 || (swizzle == 3 && inner * sizes[type] > 128)) return INVALID_VALUE;
  return 0;
}
static int put(void *out, const pdemu_tensor_map &m) {
  memset(out, 0, 128);
  memcpy(out, &m, sizeof m);
  return 0;
}
API(cuTensorMapEncodeTiled)(void *out, int type, unsigned rank, Address base, const uint64_t *dims, const uint64_t *strides,
                            const unsigned *box, const unsigned *element_strides, int interleave, int swizzle, int, int) {
  pdemu_tensor_map m = {};
  if (int code = describe(&m, out, type, rank, base, dims, strides, box[0], interleave, swizzle)) return code;
  for (unsigned i = 0; i < rank; i++) {
    if (!box[i] || box[i] > 256 || element_strides[i] != 1) return INVALID_VALUE;
    m.box[i] = (uint16_t)box[i];
  }
  return put(out, m);
}
// Corners are in the order w, h, d, as are the dims and strides between channels and images. A box must contain a
// pixel.
API(cuTensorMapEncodeIm2col)(void *out, int type, unsigned rank, Address base, const uint64_t *dims, const uint64_t *strides,
                             const int *lower, const int *upper, unsigned channels, unsigned pixels,
                             const unsigned *element_strides, int interleave, int swizzle, int, int) {
  static const int most[] = {1 << 15, 1 << 7, 1 << 4};
  pdemu_tensor_map m = {};
  if (rank < 3) return INVALID_VALUE;
  if (int code = describe(&m, out, type, rank, base, dims, strides, channels, interleave, swizzle)) return code;
  if (!pixels || pixels > 1024 || element_strides[rank - 1] != 1) return INVALID_VALUE;
  m.box[0] = (uint16_t)channels, m.box[1] = (uint16_t)pixels;
  for (unsigned i = 0; i + 2 < rank; i++) {
    int limit = most[rank - 3];
    unsigned step = element_strides[i + 1];
    if (lower[i] < -limit || lower[i] >= limit || upper[i] < -limit || upper[i] >= limit || !step || step > 8) return INVALID_VALUE;
    if ((int64_t)dims[i + 1] + upper[i] <= lower[i]) return INVALID_VALUE;
    m.lower[i] = (int16_t)lower[i], m.upper[i] = (int16_t)upper[i], m.steps[i] = (uint8_t)step;
  }
  return put(out, m);
}

// ---- errors and entry points ------------------------------------------------------------------------------------
static const struct { int code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"}, {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}, {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}, {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"}, {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"}};
API(cuGetErrorName)(int code, const char **s) {
  *s = nullptr;
  for (auto &e : errors) if (e.code == code) *s = e.name;
  return *s ? 0 : INVALID_VALUE;
}
API(cuGetErrorString)(int code, const char **s) {  // for a failed kernel: the emulation's message
  LOCK;
  static thread_local std::string text;  // valid until the thread calls this again
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
