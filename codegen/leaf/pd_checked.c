/* Checked memory: what pd_checked.h calls, and the driver that runs the tasks of one kernel one by one.

   Every buffer has a state per element: 0 never written, 1 written before this launch, else (task + 1) * 2, plus 1
   when it was read since. One call at a time: the state is global. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;
typedef void pd_kernel(void *const *buf, const int64_t *sym, int64_t begin, int64_t end, void *scratch);
typedef struct { const char *name; char *data; i64 count, size; uint32_t *state; i64 shared; } pdc_region;

enum { MOST_LOCALS = 64, PDC_F32 = 1, PDC_F64 = 2 };

static struct {
  const char *kernel;
  i64 task, buffers;
  pdc_region *buffer;
  pdc_region local[MOST_LOCALS];
  i64 locals;
  char *scratch;
  i64 scratch_bytes;
  uint32_t *scratch_state;
  char *message;
  i64 room;
  jmp_buf out;
} now;

static void fail(const char *format, ...) {
  int n = snprintf(now.message, now.room, "kernel %s, task %lld: ", now.kernel, (long long)now.task);
  va_list args;
  va_start(args, format);
  if (n < now.room) vsnprintf(now.message + n, now.room - n, format, args);
  va_end(args);
  longjmp(now.out, 1);
}

static pdc_region *find(const void *b, const char *name) {
  for (i64 k = now.locals - 1; k >= 0; --k)
    if (now.local[k].data == b && !strcmp(now.local[k].name, name)) return &now.local[k];
  for (i64 k = 0; k < now.buffers; ++k)
    if (now.buffer[k].data == b) return &now.buffer[k];
  fail("%s is not a buffer of this launch", name);
  return NULL;
}

static void *element(pdc_region *r, i64 i, i64 size, const char *verb, const char *name) {
  if (size != r->size) fail("%s elements of %lld bytes of %s, which has %lld", verb, size, name, r->size);
  if (i < 0 || i >= r->count)
    fail("%s element %lld of %s (%s), which has %lld", verb, (long long)i, name, r->name, (long long)r->count);
  return r->data + i * size;
}

const void *pdc_read(const void *b, i64 i, i64 size, const char *name) {
  pdc_region *r = find(b, name);
  void *p = element(r, i, size, "reads", name);
  uint32_t s = r->state[i];
  if (s == 0) fail("reads element %lld of %s (%s), which was never written", (long long)i, name, r->name);
  if (s > 1 && r->shared && s / 2 != now.task + 1)
    fail("reads element %lld of %s (%s), which task %u wrote", (long long)i, name, r->name, s / 2 - 1);
  if (s > 1) r->state[i] = s | 1;
  return p;
}

static int undefined(const void *value, int kind) {
  uint32_t u; uint64_t w;
  if (kind == PDC_F32) { memcpy(&u, value, sizeof u); return (u & 0x7fffffffu) == 0x7fe5a5a5u; }
  if (kind == PDC_F64) { memcpy(&w, value, sizeof w); return (w & 0x7fffffffffffffffu) == 0x7ffca5a5a5a5a5a5u; }
  return 0;
}

void pdc_write(void *b, i64 i, const void *value, i64 size, int kind, const char *name) {
  pdc_region *r = find(b, name);
  void *p = element(r, i, size, "writes", name);
  uint32_t s = r->state[i], own = (uint32_t)(now.task + 1) * 2;
  if (undefined(value, kind))
    fail("writes to element %lld of %s (%s) what was made from a register without a value", (long long)i, name, r->name);
  if (r->shared && s == 1)
    fail("writes element %lld of %s (%s), which was written before this launch", (long long)i, name, r->name);
  if (r->shared && s > 1 && s / 2 != own / 2)
    fail("writes element %lld of %s (%s), which task %u wrote", (long long)i, name, r->name, s / 2 - 1);
  if (r->shared && s == own)
    fail("writes element %lld of %s (%s) twice without reading it in between", (long long)i, name, r->name);
  memcpy(p, value, size);
  r->state[i] = own;
}

/* what an emulated instruction refuses */
void pdc_fault(const char *what) { fail("%s", what); }

void pdc_lanes(const char *name, i64 stride, i64 lanes) {
  if (stride == 0 && lanes > 1) fail("%lld lanes write one element of %s", (long long)lanes, name);
}

/* a new local buffer; those that lay there before, or had its name, are gone */
static void enter(char *data, i64 count, i64 size, uint32_t *state, const char *name) {
  i64 kept = 0;
  for (i64 k = 0; k < now.locals; ++k) {
    pdc_region *r = &now.local[k];
    if (strcmp(r->name, name) && (r->data >= data + count * size || r->data + r->count * r->size <= data))
      now.local[kept++] = *r;
    else if (r->state < now.scratch_state || r->state > now.scratch_state + now.scratch_bytes)
      free(r->state);
  }
  now.locals = kept;
  if (kept == MOST_LOCALS) fail("more than %d local buffers", MOST_LOCALS);
  memset(data, 0xaa, count * size);
  memset(state, 0, count * sizeof *state);
  now.local[now.locals++] = (pdc_region){name, data, count, size, state, 0};
}

void *pdc_scratch(void *from, i64 count, i64 size, const char *name) {
  i64 at = (char *)from - now.scratch;
  if (count < 0 || at < 0 || at + count * size > now.scratch_bytes)
    fail("scratch %s needs bytes %lld to %lld of %lld", name, (long long)at, (long long)(at + count * size),
         (long long)now.scratch_bytes);
  enter(from, count, size, now.scratch_state + at, name);
  return from;
}

void pdc_stack(void *b, i64 count, i64 size, const char *name) {
  enter(b, count, size, calloc(count + 1, sizeof(uint32_t)), name);
}

static void leave_all(void) {
  for (i64 k = 0; k < now.locals; ++k)
    if (now.local[k].state < now.scratch_state || now.local[k].state > now.scratch_state + now.scratch_bytes)
      free(now.local[k].state);
  now.locals = 0;
}

extern pd_kernel *const pdc_kernels[];
extern const char *const pdc_names[];

/* Runs the tasks in the given order, each by a call of its own. Returns 1 with a message when a check failed. */
__attribute__((visibility("default"))) int pdc_run(i64 kernel, i64 buffers, pdc_region *buffer, const i64 *symbols,
                                                  i64 tasks, const i64 *order, i64 scratch_bytes, char *message,
                                                  i64 room) {
  void **pointers = calloc(buffers + 1, sizeof(void *));
  void *volatile scratch = NULL;
  if (posix_memalign((void **)&scratch, 64, scratch_bytes + 64)) scratch = NULL;
  now.kernel = pdc_names[kernel];
  now.task = -1;
  now.buffers = buffers;
  now.buffer = buffer;
  now.locals = 0;
  now.scratch = scratch;
  now.scratch_bytes = scratch_bytes;
  now.scratch_state = calloc(scratch_bytes + 1, sizeof(uint32_t));
  now.message = message;
  now.room = room;
  volatile int failed = 0;
  if (!pointers || !scratch || !now.scratch_state) {
    snprintf(message, room, "kernel %s: no memory for %lld bytes of checked scratch", now.kernel, (long long)scratch_bytes);
    failed = 1;
  } else if (setjmp(now.out)) {
    failed = 1;
  } else {
    for (i64 k = 0; k < buffers; ++k) pointers[k] = buffer[k].data;
    for (i64 k = 0; k < tasks; ++k) {
      leave_all();
      now.task = order[k];
      pdc_kernels[kernel](pointers, symbols, order[k], order[k] + 1, scratch);
    }
  }
  leave_all();
  free(now.scratch_state);
  free(scratch);
  free(pointers);
  return failed;
}
