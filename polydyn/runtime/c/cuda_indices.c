/* cuda_indices.c: index checks on the device.
 *
 * A wrong index never makes a kernel leave its arrays, because subscripts are taken modulo the size of the axis.
 * Therefore nothing waits for the check: a separate launch writes words (polydyn/program/index_checks.py), which are
 * copied to the host after it and read when the run is waited for. Only an axis without elements is rejected before the
 * run, from the sizes alone. */
#include <inttypes.h>

#include "cuda_internal.h"


enum { SPAN = 16, VALUE_BITS = 59 }; /* as in program/index_checks.py */
static const int64_t HALF = INT64_C(1) << (VALUE_BITS - 1), NOTHING = INT64_MAX;

/* Returns the number of words of a check's result, or 0 if the check is not needed. */
static int64_t words(const pd_context *c, const pd_device_check *p) {
    if (p->input >= 0 && c->places[p->input] == PD_ON_HOST) return 0;
    if (p->reader >= 0 && c->values[plan->launches[p->reader].elements] <= 0) return 0;
    return pd_max(c->values[p->words], 0);
}

int32_t pd_cuda_ask(pd_context *c) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    int64_t all = 0;
    for (int32_t i = 0; i < plan->device_check_count; i++) {
        const pd_device_check *p = &plan->device_checks[i];
        int64_t count = words(c, p), size = c->values[p->size];
        if (count && size <= 0) return pd_fail(PD_INPUT, "%s, here %" PRId64 ": it has no elements", p->message, size);
        x->word_counts[2 * i] = count;
        x->word_counts[2 * i + 1] = size;
        all += count * (int64_t)sizeof(int64_t);
    }
    if (all > x->found_bytes) { /* the last run may still write there */
        pd_cuda_settle(d, x);
        pd_cuda_drop(c);
    }
    return pd_cuda_pinned(d, &x->found, &x->found_bytes, all);
}

int pd_cuda_on_host(const pd_context *c, int32_t k) {
    for (int32_t i = 0; i < plan->device_check_count; i++) {
        const pd_device_check *p = &plan->device_checks[i];
        if (p->launch == k && (p->input >= 0 || p->reader >= 0)) return !words(c, p);
    }
    return 0;
}

int32_t pd_cuda_fetch_found(pd_context *c, int32_t k, pd_call *call) {
    pd_cuda *x = c->place;
    char *to = x->found;
    int32_t code = PD_OK;
    for (int32_t i = 0; i < plan->device_check_count && code == PD_OK; i++) {
        const pd_device_check *p = &plan->device_checks[i];
        int64_t bytes = words(c, p) * (int64_t)sizeof(int64_t);
        if (p->launch == k && bytes)
            code = pd_cuda_copy(c, call, PD_DEVICE_TO_HOST, to, c->buffers[p->buffer], bytes, "fetching checks");
        to += bytes;
    }
    return code;
}

int pd_cuda_checks_indices(const pd_context *c) {
    const pd_cuda *x = c->place;
    int64_t all = 0;
    for (int32_t i = 0; i < plan->device_check_count; i++) all += x->word_counts[2 * i];
    return all > 0;
}

static int32_t wrong(const pd_device_check *p, int64_t size, int64_t at, int64_t value, const char *when) {
    const char *clamped = value == -HALF ? " or less" : value == HALF - 2 ? " or more" : "";
    return pd_fail(PD_INPUT, "%s, here %" PRId64 ": element %" PRId64 " is %" PRId64 "%s%s", p->message, size,
                   p->first + p->step * at, value, clamped, when);
}

int32_t pd_cuda_found(const pd_context *c, const char *when) {
    const pd_cuda *x = c->place;
    const int64_t *word = (const int64_t *)(const void *)x->found;
    for (int32_t i = 0; i < plan->device_check_count; word += x->word_counts[2 * i++])
        for (int64_t k = 0; k < x->word_counts[2 * i]; k++)
            if (word[k] != NOTHING)
                return wrong(&plan->device_checks[i], x->word_counts[2 * i + 1], k * SPAN + (word[k] >> VALUE_BITS),
                             (word[k] & (2 * HALF - 1)) - HALF, when);
    return PD_OK;
}

int32_t pd_cuda_index_status(pd_context *c, const char *when) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    if (!x->unread) return PD_OK;
    x->unread = 0;
    x->busy = 0;
    TRY(cuEventSynchronize(x->done), "a kernel of an earlier run failed");
    return pd_cuda_found(c, when);
}

PD_EXPORT int32_t pd_cuda_wait(pd_context *c) {
    pd_device *d = c->program->place;
    int32_t code = pd_cuda_alive(c);
    if (code == PD_OK) code = pd_cuda_enter(d);
    if (code != PD_OK) return code;
    code = pd_cuda_index_status(c, "");
    if (code == PD_OK) pd_cuda_settle(d, c->place);
    return pd_cuda_leave(d, code);
}
