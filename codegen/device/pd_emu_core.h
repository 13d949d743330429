// pd_emu_core.h -- the machine under the emulation: fibers, scheduler, memory rules, access counts.
//
// One fiber per CUDA thread, one block at a time. A warp runs until none of its lanes can go on, then the next warp
// runs; `reverse` turns both orders round, because many missing barriers show in one order only. When no fiber can
// run, hardware that completes on its own (TMA) gets one step; if that helps nobody, the kernel is dead-locked.
// A broken rule ends the launch at once: the fiber switches to the scheduler and never comes back.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <mutex>
#include <type_traits>
#include <vector>

#include "pd_emu_abi.h"

#if !defined(__x86_64__) && !defined(PD_EMU_UCONTEXT)
#define PD_EMU_UCONTEXT 1
#endif
#ifdef PD_EMU_UCONTEXT
#include <ucontext.h>
#endif

#define PD_SITE int site = __builtin_LINE()  // default argument: the source line of the call
#define PD_DEV static inline

namespace pdemu {

constexpr int MAX_THREADS = 1024, WARP = 32, NAMED_BARRIERS = 16;
constexpr size_t STACK = 256 << 10;
constexpr uint64_t CANARY = 0x5ca1ab1e0ddba11ull;

// ---- contexts -------------------------------------------------------------------------------------------------
#ifdef PD_EMU_UCONTEXT
struct Context { ucontext_t u; };
static void swap(Context *save, Context *load) { swapcontext(&save->u, &load->u); }
static void prepare(Context *c, unsigned char *stack, void (*entry)()) {
  getcontext(&c->u);
  c->u.uc_stack.ss_sp = stack;
  c->u.uc_stack.ss_size = STACK;
  c->u.uc_link = nullptr;
  makecontext(&c->u, entry, 0);
}
#else
struct Context { void *sp; };
// Saves what the SysV ABI says a callee must keep; a kernel touches no floating-point control word.
extern "C" void pdemu_switch(void **save, void *load);
asm(".text\n.p2align 4\n.local pdemu_switch\n.type pdemu_switch,@function\npdemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nretq\n"
    ".size pdemu_switch,.-pdemu_switch\n");
static void swap(Context *save, Context *load) { pdemu_switch(&save->sp, load->sp); }
static void prepare(Context *c, unsigned char *stack, void (*entry)()) {
  void **sp = (void **)(stack + STACK) - 2;  // at entry the stack is 8 modulo 16, as after a call
  *sp = (void *)entry;
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  c->sp = sp;
}
#endif

// ---- state ----------------------------------------------------------------------------------------------------
enum State : uint8_t { READY, WAITING, DONE };
struct Copy { unsigned char *to; const unsigned char *from; uint32_t size, bytes, group; };  // one cp.async
struct Access { uint64_t addr; int site; uint32_t occurrence; uint8_t bytes, lane; bool shared; };
struct Fiber {
  Context context;
  State state;
  const void *arg[3];         // what the lane brought to the collective it waits in
  std::vector<Copy> copies;   // cp.async in flight
  uint32_t groups;            // cp.async groups committed
  std::vector<Access> log;    // since the warp's last meeting point
};
struct Meeting { const char *what; int site, arrived, first; };  // a collective in progress
struct Block {
  unsigned char *smem;
  uint32_t smem_bytes, id[3];
  int threads, live, current, reverse;
  Meeting barrier[NAMED_BARRIERS], warp[MAX_THREADS / WARP];
  Fiber fiber[MAX_THREADS];
  Context scheduler;
  unsigned char *stacks;
  pdemu_launch *launch;
  int code;
  void (*call)(void *const *);
};
static Block *B;                                   // the block that runs; launches are serialised by a lock
static bool (*hardware_step)() = nullptr;          // lets one asynchronous engine finish one thing
static void (*hardware_reset)() = nullptr;         // at the start of a block
static void (*hardware_finish)() = nullptr;        // at its end: complains about work nobody waited for

static inline Fiber *self() { return &B->fiber[B->current]; }
static inline void count(int counter, uint64_t n = 1) { B->launch->counters[counter] += n; }

// Ends the launch. From a fiber it does not return; from the scheduler (current < 0) it only records.
template <class... A> static void fail(int code, const char *format, A... a) {
  char text[PDEMU_MESSAGE - 96];
  snprintf(text, sizeof text, format, a...);
  if (B->code == 0) {
    snprintf(B->launch->message, PDEMU_MESSAGE, "%s (block %u,%u,%u thread %d)", text, B->id[0], B->id[1], B->id[2],
             B->current);
    B->code = code;
  }
  if (B->current >= 0) {
    Fiber *f = self();
    swap(&f->context, &B->scheduler);
  }
}
#define PD_RULE(ok, code, ...) do { if (__builtin_expect(!(ok), 0)) pdemu::fail(code, __VA_ARGS__); } while (0)

// ---- waiting and waking ---------------------------------------------------------------------------------------
static inline void wait() {
  Fiber *f = self();
  f->state = WAITING;
  swap(&f->context, &B->scheduler);
}
static inline void wake(int from, int to) {
  for (int t = from; t < to; t++)
    if (B->fiber[t].state == WAITING) B->fiber[t].state = READY;
}
// One arrival at a collective of `size` threads; true for the last one, who acts for all and wakes them.
static inline bool arrive(Meeting &m, int size, const char *what, int site) {
  if (m.arrived == 0) m.what = what, m.site = site, m.first = B->current;
  PD_RULE(m.site == site && m.what == what, PDEMU_FAILED,
          "divergent collective: %s at line %d meets %s at line %d (thread %d)", what, site, m.what, m.site, m.first);
  if (++m.arrived < size) return false;
  m.arrived = 0;
  return true;
}

// ---- shared and global access counts --------------------------------------------------------------------------
static inline void note(bool shared, uint64_t addr, uint32_t bytes, int site) {
  Fiber *f = self();
  uint32_t occurrence = 0;
  for (size_t i = f->log.size(); i-- > 0;)
    if (f->log[i].site == site && f->log[i].shared == shared) { occurrence = f->log[i].occurrence + 1; break; }
  f->log.push_back({addr, site, occurrence, (uint8_t)bytes, (uint8_t)(B->current % WARP), shared});
}
// Extra wavefronts of one warp instruction: 32 banks of 4 bytes; wide accesses go in phases of 128 bytes.
static int bank_conflicts(const Access *a, int n) {
  int extra = 0, lanes_per_phase = a->bytes > 4 ? 128 / a->bytes : WARP;
  for (int i = 0; i < n;) {
    uint64_t words[WARP * 4];
    int k = 0, phase = a[i].lane / lanes_per_phase, most = 1, per_bank[32] = {0};
    for (; i < n && a[i].lane / lanes_per_phase == phase; i++)
      for (uint64_t w = a[i].addr / 4; w <= (a[i].addr + a[i].bytes - 1) / 4; w++) words[k++] = w;
    std::sort(words, words + k);
    int distinct = (int)(std::unique(words, words + k) - words);
    for (int j = 0; j < distinct; j++) most = std::max(most, ++per_bank[words[j] % 32]);
    extra += most - 1;
  }
  return extra;
}
static void count_global(const Access *a, int n) {
  std::vector<uint64_t> sectors;
  uint64_t bytes = 0;
  for (int i = 0; i < n; i++) {
    bytes += a[i].bytes;
    for (uint64_t s = a[i].addr / 32; s <= (a[i].addr + a[i].bytes - 1) / 32; s++) sectors.push_back(s);
  }
  std::sort(sectors.begin(), sectors.end());
  count(PDEMU_GLOBAL);
  count(PDEMU_GLOBAL_SECTORS, std::unique(sectors.begin(), sectors.end()) - sectors.begin());
  count(PDEMU_GLOBAL_SECTORS_MIN, (bytes + 31) / 32);
}
// At a meeting point: group the lanes' accesses into warp instructions and count each.
static void settle_accesses(int warp) {
  static std::vector<Access> all;
  all.clear();
  for (int t = warp * WARP; t < std::min((warp + 1) * WARP, B->threads); t++) {
    all.insert(all.end(), B->fiber[t].log.begin(), B->fiber[t].log.end());
    B->fiber[t].log.clear();
  }
  auto key = [](const Access &a) { return std::make_tuple(a.shared, a.site, a.occurrence, a.bytes, a.lane); };
  std::sort(all.begin(), all.end(), [&](const Access &a, const Access &b) { return key(a) < key(b); });
  for (size_t i = 0, j; i < all.size(); i = j) {
    for (j = i + 1; j < all.size() && all[j].shared == all[i].shared && all[j].site == all[i].site &&
                    all[j].occurrence == all[i].occurrence && all[j].bytes == all[i].bytes; j++) {}
    if (all[i].shared) {
      count(PDEMU_SHARED);
      count(PDEMU_SHARED_CONFLICTS, bank_conflicts(&all[i], (int)(j - i)));
    } else {
      count_global(&all[i], (int)(j - i));
    }
  }
}

// ---- collectives ----------------------------------------------------------------------------------------------
// A warp instruction: every lane leaves pointers to its registers, the last to arrive computes for all 32.
template <class F>
static inline void warp_collective(const char *what, int site, const void *a0, const void *a1, const void *a2, F act) {
  Fiber *f = self();
  f->arg[0] = a0, f->arg[1] = a1, f->arg[2] = a2;
  int w = B->current / WARP;
  PD_RULE((w + 1) * WARP <= B->threads, PDEMU_FAILED, "%s at line %d in a warp of fewer than 32 threads", what, site);
  if (!arrive(B->warp[w], WARP, what, site)) return wait();
  settle_accesses(w);
  act(&B->fiber[w * WARP]);
  wake(w * WARP, (w + 1) * WARP);
}
static inline void block_barrier(int site) {
  PD_RULE(B->live == B->threads, PDEMU_FAILED, "divergent barrier at line %d: some threads have left the kernel", site);
  if (!arrive(B->barrier[0], B->threads, "barrier", site)) return wait();
  for (int w = 0; w * WARP < B->threads; w++) settle_accesses(w);
  count(PDEMU_BARRIERS);
  wake(0, B->threads);
}

// ---- memory rules ---------------------------------------------------------------------------------------------
static inline void check_global(const void *p, uint32_t bytes, uint32_t align, int site) {
  uint64_t a = (uint64_t)p;
  PD_RULE(a % align == 0, PDEMU_MISALIGNED, "misaligned global access of %u bytes at line %d", align, site);
  if (bytes == 0) return;
  static const pdemu_range *last;
  const pdemu_range *r = B->launch->ranges, *end = r + B->launch->nranges;
  if (last >= r && last < end && a >= last->lo && a + bytes <= last->hi) return;
  last = std::upper_bound(r, end, a, [](uint64_t x, const pdemu_range &q) { return x < q.lo; }) - 1;
  PD_RULE(last >= r && a + bytes <= last->hi, PDEMU_ILLEGAL_ADDRESS,
          "out-of-bounds global access of %u bytes at line %d", bytes, site);
}
static inline uint32_t shared_offset(const void *p) { return (uint32_t)((const unsigned char *)p - B->smem); }
static inline void check_shared(const void *p, uint32_t bytes, uint32_t align, int site) {
  uint64_t o = (uint64_t)p - (uint64_t)B->smem;
  PD_RULE(o <= B->smem_bytes && o + bytes <= B->smem_bytes, PDEMU_ILLEGAL_ADDRESS,
          "out-of-bounds shared access of %u bytes at offset %lld, line %d", bytes, (long long)o, site);
  PD_RULE(o % align == 0, PDEMU_MISALIGNED, "misaligned shared access of %u bytes at line %d", align, site);
}

// ---- running --------------------------------------------------------------------------------------------------
static void fiber_main() {
  B->call(B->launch->params);
  Fiber *f = self();
  f->state = DONE;
  B->live--;
  for (const Copy &c : f->copies)
    PD_RULE(c.bytes == 0, PDEMU_FAILED, "cp.async of %u bytes was never waited for", c.size);
  PD_RULE(B->barrier[0].arrived == 0, PDEMU_FAILED, "divergent barrier: thread left while thread %d waits at line %d",
          B->barrier[0].first, B->barrier[0].site);
  swap(&f->context, &B->scheduler);
}
static void resume(int t) {
  B->current = t;
  swap(&B->scheduler, &B->fiber[t].context);
  B->current = -1;
}
static bool run_warp(int w) {
  bool any = false;
  for (bool again = true; again && !B->code;) {
    again = false;
    int n = std::min(WARP, B->threads - w * WARP);
    for (int i = 0; i < n && !B->code; i++) {
      int t = w * WARP + (B->reverse ? n - 1 - i : i);
      if (B->fiber[t].state == READY) resume(t), again = any = true;
    }
  }
  return any;
}
static void describe_deadlock() {
  for (int w = 0; w * WARP < B->threads; w++)
    if (B->warp[w].arrived)
      return fail(PDEMU_TIMEOUT, "deadlock: %s at line %d waits for all 32 lanes, %d came", B->warp[w].what,
                  B->warp[w].site, B->warp[w].arrived);
  for (const Meeting &m : B->barrier)
    if (m.arrived) return fail(PDEMU_TIMEOUT, "deadlock: %d threads wait at the barrier of line %d", m.arrived, m.site);
  fail(PDEMU_TIMEOUT, "deadlock: every thread that is left waits for an mbarrier or a warpgroup");
}
static void run_block() {
  B->live = B->threads;
  memset(B->barrier, 0, sizeof B->barrier);
  memset(B->warp, 0, sizeof B->warp);
  memset(B->smem, 0xff, B->smem_bytes);  // NaN in every float format
  if (hardware_reset) hardware_reset();
  for (int t = 0; t < B->threads; t++) {
    Fiber &f = B->fiber[t];
    unsigned char *stack = B->stacks + (size_t)t * STACK;
    memcpy(stack, &CANARY, 8);
    prepare(&f.context, stack, fiber_main);
    f.state = READY, f.groups = 0;
    f.copies.clear(), f.log.clear();
  }
  int warps = (B->threads + WARP - 1) / WARP;
  while (B->live && !B->code) {
    bool any = false;
    for (int i = 0; i < warps; i++) any |= run_warp(B->reverse ? warps - 1 - i : i);
    if (!any && !B->code && !(hardware_step && hardware_step())) describe_deadlock();
  }
  if (B->code) return;
  for (int w = 0; w < warps; w++) settle_accesses(w);
  for (int t = 0; t < B->threads; t++)
    PD_RULE(!memcmp(B->stacks + (size_t)t * STACK, &CANARY, 8), PDEMU_FAILED, "emulated stack of thread %d overflowed", t);
  if (hardware_finish) hardware_finish();
}
static int run_grid(pdemu_launch *l, uint32_t bound, void (*call)(void *const *)) {
  static std::mutex one_launch_at_a_time;
  std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  l->message[0] = 0;
  if (l->abi != PDEMU_ABI || l->threads == 0 || l->threads > bound) {
    snprintf(l->message, PDEMU_MESSAGE, "launch of %u threads per block; the kernel is bound to %u", l->threads, bound);
    return PDEMU_INVALID;
  }
  B = new Block();
  B->launch = l, B->call = call, B->threads = (int)l->threads, B->reverse = (int)l->reverse, B->current = -1;
  B->smem_bytes = l->smem;
  B->smem = (unsigned char *)aligned_alloc(1024, (l->smem + 1024) / 1024 * 1024);
  B->stacks = (unsigned char *)aligned_alloc(4096, (size_t)l->threads * STACK);
  for (B->id[2] = 0; B->id[2] < l->grid[2] && !B->code; B->id[2]++)
    for (B->id[1] = 0; B->id[1] < l->grid[1] && !B->code; B->id[1]++)
      for (B->id[0] = 0; B->id[0] < l->grid[0] && !B->code; B->id[0]++) run_block();
  int code = B->code;
  free(B->stacks);
  free(B->smem);
  delete B;
  B = nullptr;
  return code;
}

// ---- parameters -----------------------------------------------------------------------------------------------
template <class... A> struct Parameters {
  static constexpr uint32_t n = sizeof...(A);
  uint32_t sizes[n + 1] = {(uint32_t)sizeof(A)..., 0}, offsets[n + 1] = {};
  Parameters() {
    uint32_t aligns[n + 1] = {(uint32_t)alignof(A)..., 1}, at = 0;
    for (uint32_t i = 0; i < n; i++) offsets[i] = at = (at + aligns[i] - 1) / aligns[i] * aligns[i], at += sizes[i];
  }
};
template <class... A> static Parameters<A...> parameters_of(void (*)(A...)) { return {}; }
template <class... A, size_t... I>
static void call_with(void (*f)(A...), void *const *p, std::index_sequence<I...>) {
  (void)p;
  f(*(typename std::remove_reference<A>::type *)p[I]...);
}
template <class... A> static void call_with(void (*f)(A...), void *const *p) {
  call_with(f, p, std::index_sequence_for<A...>());
}

}  // namespace pdemu
