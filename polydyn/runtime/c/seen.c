/* seen.c: the log of the sizes of runs: a hash table that only grows, and to which contexts on any thread add rows. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define CHAINS PD_SHAPES_SEEN

typedef struct pd_seen pd_seen;

struct pd_seen {
    pd_seen *next;
    int64_t runs;
    int64_t sizes[]; /* of the plan's symbols */
};

struct pd_log {
    pd_seen *chains[CHAINS];
    int64_t rows;
    int64_t others; /* runs with shapes that did not fit */
};

pd_log *pd_log_new(void) { return calloc(1, sizeof(pd_log)); }

void pd_log_free(pd_log *log) {
    for (int i = 0; log && i < CHAINS; i++)
        while (log->chains[i]) {
            pd_seen *row = log->chains[i];
            log->chains[i] = row->next;
            free(row);
        }
    free(log);
}

static uint64_t chain_of(const int64_t *sizes) {
    uint64_t h = 0;
    for (int32_t s = 0; s < pd_the_plan.symbol_count; s++) h = (h ^ (uint64_t)sizes[s]) * UINT64_C(0x9E3779B97F4A7C15);
    return (h >> 32) % CHAINS;
}

/* Returns the row of these sizes in a chain up to `end`, or NULL. */
static pd_seen *find(pd_seen *row, const pd_seen *end, const int64_t *sizes) {
    size_t bytes = (size_t)pd_the_plan.symbol_count * sizeof *sizes;
    while (row != end && memcmp(row->sizes, sizes, bytes)) row = row->next;
    return row == end ? NULL : row;
}

int64_t *pd_log_runs(pd_log *log, const int64_t *sizes) {
    pd_seen **chain = &log->chains[chain_of(sizes)], *first = __atomic_load_n(chain, __ATOMIC_ACQUIRE);
    pd_seen *row = find(first, NULL, sizes);
    if (row) return &row->runs;
    if (__atomic_load_n(&log->rows, __ATOMIC_RELAXED) >= PD_SHAPES_SEEN) return &log->others;
    size_t bytes = (size_t)pd_the_plan.symbol_count * sizeof *sizes;
    row = calloc(1, sizeof *row + bytes);
    if (!row) return &log->others;
    memcpy(row->sizes, sizes, bytes);
    row->next = first;
    while (!__atomic_compare_exchange_n(chain, &row->next, row, 0, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE)) {
        pd_seen *same = find(row->next, first, sizes); /* another thread was faster */
        if (same) return free(row), &same->runs;
        first = row->next;
    }
    __atomic_fetch_add(&log->rows, 1, __ATOMIC_RELAXED);
    return &row->runs;
}

PD_EXPORT const char *pd_symbol(const pd_program *p, int32_t k) {
    (void)p;
    return k >= 0 && k < pd_the_plan.symbol_count ? pd_the_plan.sources[k].symbol : NULL;
}

PD_EXPORT int64_t pd_shapes_seen(const pd_program *p, int64_t *rows, int64_t room, int64_t *others) {
    int64_t count = 0;
    *others = __atomic_load_n(&p->log->others, __ATOMIC_RELAXED);
    for (int i = 0; i < CHAINS; i++)
        for (const pd_seen *r = __atomic_load_n(&p->log->chains[i], __ATOMIC_ACQUIRE); r; r = r->next) {
            int64_t runs = __atomic_load_n(&r->runs, __ATOMIC_RELAXED);
            if (!runs) continue; /* prepared, never run */
            if (count < room) {
                memcpy(rows, r->sizes, (size_t)pd_the_plan.symbol_count * sizeof *rows);
                rows[pd_the_plan.symbol_count] = runs;
                rows += pd_the_plan.symbol_count + 1;
            }
            count++;
        }
    return count;
}
