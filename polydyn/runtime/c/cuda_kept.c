/* cuda_kept.c: graphs of repeated runs. A run with the same sizes and arrays as an earlier one is a single launch.
 *
 * A run is recorded when it occurs for the second time. Its key consists of the values that determine all sizes, the
 * places of arrays, and the addresses of those that are used in place. A context keeps a few graphs. A new one replaces
 * the least recently used one, but only if its run recurred sooner than that one was used. Otherwise, calls that cycle
 * through more sizes than are kept would record continuously.
 *
 * The driver does not report the memory of an executable graph; it is estimated from the number of nodes. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"


enum { KEPT = 8, MOST_KEPT = 64, SEEN = 4 * MOST_KEPT };
/* Bytes per node (NVIDIA states about 10 KB for a kernel node, cccl 3768), and for all graphs of a context. */
enum { NODE_BYTES = 16 << 10, MOST_BYTES = 64 << 20 };

typedef struct {
    pd_recorded made;
    int64_t used;         /* the number of the last run that used it */
    int64_t *key, *values; /* of the context, including the choices */
} pd_kept;

struct pd_keeper {
    int32_t most, count; /* the maximum number of graphs, and the current one */
    int64_t most_bytes;  /* the maximum for all graphs together */
    pd_kept kept[MOST_KEPT];
    int64_t *key; /* of this run */
    struct {
        uint64_t key;
        int64_t run;
    } seen[SEEN]; /* hashes of the last keys, and the run in which each occurred */
    int64_t runs, recorded, replayed, refused;
};

/* ---- the key of a run ---- */

static int64_t key_words(void) {
    return pd_cuda_key_words() + 3 * (int64_t)(plan->input_count + plan->output_count);
}

/* Adds array i to the key: its place, its offset in the arena, and its address if the device uses it. */
static int64_t *add(const pd_context *c, int32_t i, const void *at, int64_t *to) {
    *to++ = c->places[i];
    *to++ = i < plan->input_count || c->places[i] ? c->staged[i] : 0;
    *to++ = c->places[i] == PD_ON_HOST ? 0 : (int64_t)(uintptr_t)at;
    return to;
}

static void make_key(const pd_context *c, const pd_call *call, int64_t *key) {
    memcpy(key, c->values, (size_t)pd_cuda_key_words() * sizeof *key);
    key += pd_cuda_key_words();
    for (int32_t i = 0; i < plan->input_count; i++) key = add(c, i, call->given[i], key);
    for (int32_t o = 0; o < plan->output_count; o++) key = add(c, plan->input_count + o, call->outputs[o], key);
}

/* Returns the run in which this key last occurred; 0: never, or long ago. Records that it occurs now. */
static int64_t last_seen(pd_keeper *k) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a, by words */
    for (int64_t i = 0; i < key_words(); i++) hash = (hash ^ (uint64_t)k->key[i]) * UINT64_C(0x100000001b3);
    int32_t at = 0;
    for (int32_t i = 0; i < SEEN; i++) {
        if (k->seen[i].run < k->seen[at].run) at = i;
        if (!k->seen[i].run || k->seen[i].key != hash) continue;
        at = i;
        break;
    }
    int64_t before = k->seen[at].key == hash ? k->seen[at].run : 0;
    k->seen[at].key = hash;
    k->seen[at].run = k->runs;
    return before;
}

/* ---- keeping ---- */

static void forget_graph(pd_kept *e) {
    free(e->key);
    free(e->values);
    memset(e, 0, sizeof *e);
}

static void give_back(pd_context *c, int32_t at) {
    pd_keeper *k = ((pd_cuda *)c->place)->keeper;
    pd_cuda_destroy(c, &k->kept[at].made);
    forget_graph(&k->kept[at]);
    k->kept[at] = k->kept[--k->count];
    memset(&k->kept[k->count], 0, sizeof k->kept[0]);
}

void pd_cuda_drop(pd_context *c) {
    pd_keeper *k = ((pd_cuda *)c->place)->keeper;
    while (k && k->count) give_back(c, k->count - 1);
}

static int32_t oldest(const pd_keeper *k) {
    int32_t at = 0;
    for (int32_t i = 1; i < k->count; i++)
        if (k->kept[i].used < k->kept[at].used) at = i;
    return at;
}

static int64_t bytes_of(const pd_keeper *k) {
    int64_t nodes = 0;
    for (int32_t i = 0; i < k->count; i++) nodes += k->kept[i].made.nodes;
    return nodes * NODE_BYTES;
}

/* Frees graphs until `more` new ones of so many bytes fit. They must not be running. */
static void shrink(pd_context *c, int32_t more, int64_t bytes) {
    pd_keeper *k = ((pd_cuda *)c->place)->keeper;
    while (k->count && (k->count + more > k->most || bytes_of(k) + bytes > k->most_bytes)) give_back(c, oldest(k));
}

/* Keeps the recorded graph of this run. PD_MEMORY: out of host memory. */
static int32_t keep(pd_context *c, pd_recorded made) {
    pd_keeper *k = ((pd_cuda *)c->place)->keeper;
    size_t key = (size_t)key_words() * sizeof(int64_t), values = (size_t)plan->value_count * sizeof(int64_t);
    pd_kept e = {made, k->runs, malloc(key), malloc(values)};
    if (!e.key || !e.values) {
        pd_cuda_destroy(c, &e.made);
        forget_graph(&e);
        return pd_fail(PD_MEMORY, "out of memory");
    }
    memcpy(e.key, k->key, key);
    memcpy(e.values, c->values, values);
    k->kept[k->count++] = e;
    k->recorded++;
    return PD_OK;
}

/* Whether to keep a graph of so many bytes: it fits, or its run, which last occurred in run `before`, recurred sooner
 * than the least recently used graph was used. */
static int wanted(const pd_keeper *k, int64_t bytes, int64_t before) {
    if (k->count < k->most && bytes_of(k) + bytes <= k->most_bytes) return 1;
    return k->count && bytes <= k->most_bytes && before > k->kept[oldest(k)].used;
}

/* Records this run, which last occurred in run `before`, if it is worth keeping. If its graph would be too large, the
 * run is put on the stream, which is still empty. The same holds if the device has no memory for graphs or does not
 * support them; then the context also frees its other graphs and keeps none from now on. */
static int32_t record_graph(pd_context *c, const pd_call *call, int64_t before) {
    pd_cuda *x = c->place;
    pd_keeper *k = x->keeper;
    pd_recorded made = {0};
    int32_t code = PD_OK;
    while (x->next < plan->launch_count && code == PD_OK) code = pd_cuda_choose(c, x->next, call->stream);
    if (code != PD_OK) return code;
    int64_t bytes = (int64_t)pd_cuda_most_nodes(c) * NODE_BYTES;
    k->refused += bytes > k->most_bytes;
    if (!wanted(k, bytes, before)) return PD_OK;
    pd_cuda_settle(c->program->place, x); /* graphs may be freed */
    shrink(c, 1, bytes);
    code = pd_cuda_build(c, call, &made);
    if (code == PD_DEVICE && (pd_cuda_result() == OUT_OF_MEMORY || pd_cuda_result() == NOT_SUPPORTED)) {
        pd_cuda_drop(c);
        k->most = 0;
        k->refused++;
        return PD_OK;
    }
    return code == PD_OK ? keep(c, made) : code;
}

/* Returns the kept graph of this run, or NULL. */
static pd_kept *find(pd_keeper *k) {
    for (int32_t i = 0; i < k->count; i++)
        if (!memcmp(k->kept[i].key, k->key, (size_t)key_words() * sizeof *k->key)) return &k->kept[i];
    return NULL;
}

int32_t pd_cuda_kept(pd_context *c, const pd_call *call, const pd_recorded **found) {
    const pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    pd_keeper *k = x->keeper;
    x->replayed = 0;
    if (!d->graphs || !k->most) return PD_OK;
    k->runs++;
    make_key(c, call, k->key);
    pd_kept *e = find(k);
    int64_t before = e ? 0 : last_seen(k);
    if (before && wanted(k, 0, before)) {
        int32_t code = record_graph(c, call, before);
        if (code != PD_OK) return code;
        e = find(k);
    }
    if (!e) return PD_OK;
    e->used = k->runs;
    memcpy(c->values, e->values, (size_t)plan->value_count * sizeof *c->values);
    x->replayed = 1;
    k->replayed++;
    *found = &e->made;
    return PD_OK;
}

/* ---- contexts ---- */

pd_keeper *pd_keeper_new(void) {
    pd_keeper *k = calloc(1, sizeof *k);
    if (k && !(k->key = calloc((size_t)key_words() + 1, sizeof *k->key))) free(k), k = NULL;
    if (k) k->most = KEPT, k->most_bytes = MOST_BYTES;
    return k;
}

void pd_keeper_free(pd_keeper *k) {
    for (int32_t i = 0; i < k->count; i++) forget_graph(&k->kept[i]);
    free(k->key);
    free(k);
}

/* Frees graphs in excess of the limits. */
static int32_t keep_fewer(pd_context *c) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    pd_keeper *k = x->keeper;
    if (pd_cuda_is_lost(c)) return PD_OK;
    if (k->count <= k->most && bytes_of(k) <= k->most_bytes) return PD_OK;
    int32_t code = pd_cuda_enter(d);
    if (code != PD_OK) return code;
    pd_cuda_settle(d, x);
    shrink(c, 0, 0);
    return pd_cuda_leave(d, PD_OK);
}

PD_EXPORT int32_t pd_cuda_keep(pd_context *c, int32_t most) {
    if (most < 0 || most > MOST_KEPT) return pd_fail(PD_USAGE, "graphs is %d, it must be 0 to %d", most, MOST_KEPT);
    ((pd_cuda *)c->place)->keeper->most = most;
    return keep_fewer(c);
}

PD_EXPORT int32_t pd_cuda_keep_bytes(pd_context *c, int64_t most) {
    if (most < 0) return pd_fail(PD_USAGE, "graphs may take %" PRId64 " bytes, which is less than none", most);
    ((pd_cuda *)c->place)->keeper->most_bytes = most;
    return keep_fewer(c);
}

PD_EXPORT void pd_cuda_graphs(const pd_context *c, int64_t counts[5]) {
    const pd_keeper *k = ((const pd_cuda *)c->place)->keeper;
    int64_t nodes = bytes_of(k) / NODE_BYTES;
    const int64_t all[5] = {k->count, nodes, k->recorded, k->replayed, k->refused};
    memcpy(counts, all, sizeof all);
}
