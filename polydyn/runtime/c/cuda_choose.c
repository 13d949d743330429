/* cuda_choose.c: chooses candidates for launches while earlier ones run, and prepares them. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "cuda_internal.h"


/* Prepares a candidate for launching with the context's sizes: its kernels, workspace and symbols. */
static int32_t prepare(pd_context *c, int32_t k, const pd_candidate *n, void *stream) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    const int64_t *v = c->values;
    int64_t bytes = v[n->workspace];
    int32_t at = x->first[k];
    if (bytes > x->workspace_bytes) {
        char what[64];
        snprintf(what, sizeof what, "%" PRId64 " bytes of workspace", bytes);
        if (x->counters) { /* earlier launches may use it, and cuMemFree does not necessarily wait */
            TRY(cuStreamSynchronize(stream), what);
            pd_cuda_drop(c);
            TRY(cuMemFree_v2(x->counters), what);
        }
        x->counters = x->workspace = 0;
        x->workspace_bytes = 0;
        x->next = 0; /* if the allocation fails, earlier launches need their workspace again */
        TRY(cuMemAlloc_v2(&x->counters, PD_COUNTERS * sizeof(uint32_t) + (size_t)bytes), what);
        TRY(cuMemsetD32Async(x->counters, 0, PD_COUNTERS, stream), what);
        TRY(cuStreamSynchronize(stream), what); /* a bound call may start on another stream */
        x->workspace = x->counters + PD_COUNTERS * sizeof(uint32_t);
        x->workspace_bytes = bytes;
    }
    for (const pd_candidate *last = n + n->after; n <= last; n++) {
        int32_t code = pd_cuda_load(d, n->kernel, v[n->scratch] > 0);
        if (code != PD_OK) return code;
        if (v[n->tasks] > INT_MAX)
            return pd_fail(PD_OVERFLOW, "%s needs %" PRId64 " blocks", plan->launches[k].label, v[n->tasks]);
        for (int32_t m = n->first_map; m < n->first_map + n->maps; m++, at++) {
            x->parameters[at] = x->maps + (int64_t)m * MAP_BYTES;
            x->map_addresses[m] = 0;
        }
        for (int32_t b = 0; b < n->buffers; b++, at++) x->parameters[at] = &x->values[at];
        for (int32_t s = 0; s < n->symbols; s++, at++) {
            x->parameters[at] = &x->values[at];
            x->values[at] = v[plan->launch_symbols[n->first_symbol + s]];
        }
    }
    return PD_OK;
}

/* ---- remembered choices ----
 *
 * All values follow from the symbols, the special values and the callers' strides, which come first. The last few
 * choices are remembered with these as the key. */

#define REMEMBERED 8

int64_t pd_cuda_key_words(void) {
    int64_t words = plan->symbol_count + PD_SPECIALS;
    for (int32_t i = 0; i < plan->input_count; i++) words += plan->inputs[i].strided;
    for (int32_t o = 0; o < plan->output_count; o++) words += plan->outputs[o].strided;
    return words;
}

int64_t pd_cuda_remembered_words(void) { return REMEMBERED * (int64_t)plan->value_count; }

/* Returns the k-th set of remembered values. */
static int64_t *remembered(const pd_cuda *x, int64_t k) { return x->remembered + k % REMEMBERED * plan->value_count; }

/* Restores all values for the context's sizes; returns 0 if they are not remembered. */
static int recall(pd_context *c) {
    pd_cuda *x = c->place;
    size_t key = (size_t)pd_cuda_key_words() * sizeof *c->values;
    for (int64_t k = 0; k < pd_min(x->remembered_count, REMEMBERED); k++) {
        if (memcmp(c->values, remembered(x, k), key)) continue;
        memcpy(c->values, remembered(x, k), (size_t)plan->value_count * sizeof *c->values);
        return 1;
    }
    return 0;
}

int32_t pd_cuda_choose(pd_context *c, int32_t k, void *stream) {
    pd_cuda *x = c->place;
    const pd_launch_entry *l = &plan->launches[k];
    if (!k) x->recalled = recall(c);
    if (!x->recalled) {
        if (l->choose(c->values))
            return pd_fail(PD_OVERFLOW, "the sizes of this call overflow 64 bits in %s", l->label);
        x->choices++;
    }
    const pd_candidate *n = pd_chosen(c, k);
    if (!n && c->values[l->elements] > 0)
        return pd_fail(PD_INPUT, "no kernel of %s runs at this size, with %" PRId64 " bytes of shared memory", l->label,
                       c->values[plan->symbol_count + PD_SHARED]);
    int32_t code = n ? prepare(c, k, n, stream) : PD_OK;
    if (code != PD_OK) return code;
    x->next = k + 1;
    if (x->next == plan->launch_count && !x->recalled) /* replaces the oldest set */
        memcpy(remembered(x, x->remembered_count++), c->values, (size_t)plan->value_count * sizeof *c->values);
    return PD_OK;
}

PD_EXPORT int64_t pd_cuda_choices(const pd_context *c) { return ((const pd_cuda *)c->place)->choices; }
