// A CUDA driver without a GPU: the part of libcuda.so.1 that polydyn, pycuda and cuda-bindings use, for emulated
// kernels. A module image is the ELF file of a shared object compiled by polydyn.gpu.emulator.compile_emulated.
//
// It behaves like the real driver where tests depend on it: allocations are poisoned and fenced, copies outside of them
// fail, a launch returns before its errors are reported, and a kernel that fails breaks its context permanently.
// Environment variables: PDEMU_SM (compute capability, default 90), PDEMU_MEMORY (bytes, default 4 GiB),
// PDEMU_REVERSE=1 (warps and lanes in reverse order), PDEMU_GRAPHS=0 (a driver without graphs), PDEMU_STICKY=1 (a
// broken context cannot be pushed or popped), PDEMU_TRACE=1 (print unsupported calls). state.cpp, libcuda.cpp and
// graphs.cpp form one translation unit.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "pd_emu_abi.h"

#define API(name) extern "C" __attribute__((visibility("default"))) int name
typedef void *Handle;
typedef uint64_t Address;
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500,
       NOT_READY = 600, OUT_OF_RESOURCES = 701, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
       CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907,
       CAPTURE_WRONG_THREAD = 908 };

struct Context { int broken, flags; };
struct Function { const pdemu_kernel *kernel; int max_dynamic; uint64_t module; };
struct Module { void *library; std::map<std::string, Function *> functions; uint64_t number; Context *owner; };
struct Mark { Handle stream; uint64_t asked, done; double at; };  // the last recording of an event
struct Event { bool captured; std::shared_ptr<Mark> mark; Context *owner; };
struct Allocation { size_t bytes; Context *owner; bool written; };  // written: by a launch, or by a copy on a stream

static std::recursive_mutex state;
#define LOCK std::lock_guard<std::recursive_mutex> lock(state)
static bool initialised;
static Context *primary;
static int primary_users;
static std::set<Context *> contexts;
static thread_local std::vector<Context *> current;
static std::map<Address, Allocation> memory;
static size_t memory_used;
static std::set<Event *> events;
static std::set<Module *> modules;
static std::set<Function *> functions;
static std::set<uint64_t> loaded;  // modules by number, because addresses are reused
static std::map<Address, Allocation> pinned;
static std::string last_message;

static long setting(const char *name, long otherwise) { const char *v = getenv(name); return v && *v ? atol(v) : otherwise; }
static int capability() { return (int)setting("PDEMU_SM", 90); }
static size_t memory_size() { return (size_t)setting("PDEMU_MEMORY", 4l << 30); }
static int shared_limit() { return capability() == 80 ? 166912 : capability() < 90 ? 101376 : 232448; }
static double now_ms() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec * 1e-6; }
static Context *here() { return current.empty() || !contexts.count(current.back()) ? nullptr : current.back(); }
// Every call that needs a context starts with this. In a broken context it returns the error that broke it.
#define NEED_CONTEXT LOCK; if (!initialised) return NOT_INITIALIZED; if (!here()) return INVALID_CONTEXT; \
  if (here()->broken) return here()->broken

// ---- stream capture ---------------------------------------------------------------------------------------------
// As documented for the driver: a capturing stream records its work instead of executing it. Calls that cannot be
// recorded, or that use no stream (memory, modules, waiting), invalidate the capture, which its owner must still end.
// Stricter than the driver: all waiting and querying counts as unsafe, and streams cannot join another capture.
enum Mode { GLOBAL, THREAD_LOCAL, RELAXED };
typedef std::function<int()> Work;
struct Capture { int mode; std::thread::id thread; bool invalid; std::vector<Work> work; };
struct Stream { bool blocking; Context *owner; Capture *capture; std::deque<Work> queue; };
static std::set<Stream *> streams;
static thread_local int thread_mode = GLOBAL;

static bool is_stream(Handle s) {
  return (uintptr_t)s <= 2 || (streams.count((Stream *)s) && ((Stream *)s)->owner == here());
}
static bool is_event(Handle e) { return events.count((Event *)e) && ((Event *)e)->owner == here(); }
static bool is_legacy(Handle s) { return (uintptr_t)s <= 1; }
static Capture *capture_of(Handle s) { return (uintptr_t)s <= 2 ? nullptr : ((Stream *)s)->capture; }
// Invalidates the captures for which `which` is true; returns `code` if there were any.
template <class F> static int invalidate(int code, F which) {
  int found = 0;
  for (Stream *s : streams)
    if (s->capture && which(s)) s->capture->invalid = true, found = code;
  return found;
}
// Checks a call that uses no stream. Pinned memory is rejected in relaxed mode too.
static int unsafe(bool pinned = false) {
  return invalidate(CAPTURE_UNSUPPORTED, [=](Stream *s) {
    bool mine = s->capture->thread == std::this_thread::get_id();
    if (pinned && mine) return true;
    if (thread_mode == RELAXED) return false;
    return mine ? s->capture->mode != RELAXED : thread_mode == GLOBAL && s->capture->mode == GLOBAL;
  });
}
// Checks a call on the legacy stream, which waits for all blocking streams.
static int implicit(Handle s) {
  return is_legacy(s) ? invalidate(CAPTURE_IMPLICIT, [](Stream *t) { return t->blocking && t->owner == here(); }) : 0;
}
// Checks a call that cannot be captured.
static int not_captured(Handle s, int code) {
  return capture_of(s) ? capture_of(s)->invalid = true, code : 0;
}
// Checks a call that waits for a stream or queries it.
static int waiting(Handle s) {
  if (!is_stream(s)) return INVALID_HANDLE;
  if (int code = not_captured(s, CAPTURE_UNSUPPORTED)) return code;
  if (int code = implicit(s)) return code;
  return unsafe();
}

// ---- deferred work ------------------------------------------------------------------------------------------------
// A copy from pageable memory returns after reading its source; the data arrive for work that waits for the legacy stream.
// Work on a stream that does not wait for the legacy stream is executed when another call waits for it. Freeing memory
// may wait; here it does, unless PDEMU_FREE_WAITS=0.
struct Late { Address to; std::vector<char> bytes; };
static std::vector<Late> late;
static void arrive() {
  for (const Late &c : late) memcpy((void *)c.to, c.bytes.data(), c.bytes.size());
  late.clear();
}
static bool deferred(Handle s) { return (uintptr_t)s > 2 && streams.count((Stream *)s) && !((Stream *)s)->blocking; }
static void finish(Handle s, const std::function<bool()> &enough = [] { return false; }) {
  if (!deferred(s)) return;
  Stream *stream = (Stream *)s;
  if (!contexts.count(stream->owner)) return stream->queue.clear();
  current.push_back(stream->owner);  // the waiting thread may be in another context
  while (!stream->queue.empty() && !enough()) {
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (here()->broken) continue;
    if (int code = work()) here()->broken = code;
  }
  current.pop_back();
}
static void finish_all() {
  arrive();
  for (Stream *s : streams) finish(s);
}
static void reach(const std::shared_ptr<Mark> &mark, Handle stream, uint64_t number) {
  finish(stream, [&] { return mark->done >= number; });
}
// Adds work to a stream: executed at once or later, or recorded for the graph.
static int enqueue(Handle s, const Work &work) {
  if (!is_stream(s)) return INVALID_HANDLE;
  if (int code = implicit(s)) return code;
  Capture *c = capture_of(s);
  if (!c && deferred(s)) return ((Stream *)s)->queue.push_back(work), 0;
  if (!c) return arrive(), work();
  if (c->invalid) return CAPTURE_INVALIDATED;
  c->work.push_back(work);
  return 0;
}
static void write_to(Address p) {
  auto it = memory.upper_bound(p);
  if (it != memory.begin()) (--it)->second.written = true;
}
// Breaks the context, as a failing kernel does: a graph used memory that no longer exists.
static int fault(const char *what) { here()->broken = 700, last_message = what; return 0; }

struct Host { const char *at; size_t bytes; };  // host memory that a copy writes
struct Launch;
struct Node { Work work; std::vector<Node *> after; Host host; std::shared_ptr<Launch> launch; };
struct Graph { std::deque<Node> nodes; };
struct Step { Work work; std::vector<size_t> after; Host host; };  // of an executable graph
struct Executable { std::vector<Step> steps; Context *owner; size_t bytes; bool compared; };
static std::set<Graph *> graphs;
static std::set<Executable *> executables;

// ---- resources of a context -----------------------------------------------------------------------------------------
// Allocates device or host memory in separate pages, poisoned.
static void *map_pages(std::map<Address, Allocation> &in, size_t n) {
  void *m = mmap(nullptr, n + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m == MAP_FAILED) return nullptr;
  memset(m, 0xff, n);
  in[(Address)m] = {n, here(), false};
  return m;
}
typedef std::map<Address, Allocation>::iterator Place;
static Place unmap(std::map<Address, Allocation> &in, Place at) {
  munmap((void *)at->first, at->second.bytes + 4096);
  if (&in == &memory) memory_used -= at->second.bytes;
  return in.erase(at);
}
static void destroy(Stream *s) { streams.erase(s), delete s->capture, delete s; }
static void destroy(Event *e) { events.erase(e), delete e; }
static void destroy(Module *m) {
  modules.erase(m), loaded.erase(m->number);
  for (auto &f : m->functions) functions.erase(f.second), delete f.second;
  dlclose(m->library);
  delete m;
}
static void destroy(Executable *e) {
  memory_used -= e->bytes;
  executables.erase(e);
  delete e;
}
template <class T> static void destroy_those_of(Context *c, std::set<T *> all) {
  for (T *t : all)
    if (t->owner == c) destroy(t);
}
static void destroy(Context *c) {
  for (auto *in : {&memory, &pinned})
    for (Place at = in->begin(); at != in->end();) at->second.owner == c ? at = unmap(*in, at) : ++at;
  destroy_those_of(c, executables), destroy_those_of(c, streams), destroy_those_of(c, events), destroy_those_of(c, modules);
  late.clear();
  contexts.erase(c);
  delete c;
}
