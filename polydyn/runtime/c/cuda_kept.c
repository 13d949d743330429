/* cuda_kept.c: graphs of runs that came again: with the same sizes and arrays a run is one launch.
 *
 * A run is recorded when it comes for the second time. What is known of it: the values that all sizes follow from, where
 * arrays lie, and the addresses of those that are used in place. A context keeps a few graphs. A new one takes the place of
 * the one that was used least recently, if it came again sooner than that one was used: calls that go round in more sizes than
 * are kept would else record all the time.
 *
 * No call of the driver tells how much memory an executable graph takes: it is counted by its nodes. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

static const pd_plan *const plan = &pd_the_plan;

enum { KEPT = 8, MOST_KEPT = 64, SEEN = 4 * MOST_KEPT };
/* Bytes of a node: NVIDIA counts about 10 KB for a kernel's (cccl 3768); and of all graphs of a context. */
enum { NODE_BYTES = 16 << 10, MOST_BYTES = 64 << 20 };

typedef struct {
    pd_recorded made;
    int64_t used;         /* the number of the run that used it last */
    int64_t *key, *values; /* of the context, what was chosen among them */
} pd_kept;

struct pd_keeper {
    int32_t most, count; /* graphs: that may be kept, that are */
    int64_t most_bytes;  /* they may take so much together */
    pd_kept kept[MOST_KEPT];
    int64_t *key; /* of this run */
    struct {
        uint64_t key;
        int64_t run;
    } seen[SEEN]; /* hashes of the last keys, and when each came */
    int64_t runs, recorded, replayed, refused;
};

/* ---- what is known of a run ---- */

static int64_t key_words(void) {
    return pd_cuda_key_words() + 3 * (int64_t)(plan->input_count + plan->output_count);
}

/* Where array i lies: its place, its place in the arena, and its address where the device uses that. */
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

/* When this key came before, 0: never, or long ago; it is seen now. */
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

static void forget(pd_kept *e) {
    free(e->key);
    free(e->values);
    memset(e, 0, sizeof *e);
}

static void give_back(pd_context *c, int32_t at) {
    pd_keeper *k = ((pd_cuda *)c->place)->keeper;
    pd_cuda_destroy(c, &k->kept[at].made);
    forget(&k->kept[at]);
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

/* Gives back graphs until there is room for `more` new ones, of so many bytes; they must not be at work. */
static void shrink(pd_context *c, int32_t more, int64_t bytes) {
    pd_keeper *k = ((pd_cuda *)c->place)->keeper;
    while (k->count && (k->count + more > k->most || bytes_of(k) + bytes > k->most_bytes)) give_back(c, oldest(k));
}

/* Keeps what was recorded of this run; PD_MEMORY. */
static int32_t keep(pd_context *c, pd_recorded made) {
    pd_keeper *k = ((pd_cuda *)c->place)->keeper;
    size_t key = (size_t)key_words() * sizeof(int64_t), values = (size_t)plan->value_count * sizeof(int64_t);
    pd_kept e = {made, k->runs, malloc(key), malloc(values)};
    if (!e.key || !e.values) {
        pd_cuda_destroy(c, &e.made);
        forget(&e);
        return pd_fail(PD_MEMORY, "out of memory");
    }
    memcpy(e.key, k->key, key);
    memcpy(e.values, c->values, values);
    k->kept[k->count++] = e;
    k->recorded++;
    return PD_OK;
}

/* Whether a graph of so many bytes is kept: there is room, or its run, which came `before`, came again sooner than the oldest
 * one was used. */
static int wanted(const pd_keeper *k, int64_t bytes, int64_t before) {
    if (k->count < k->most && bytes_of(k) + bytes <= k->most_bytes) return 1;
    return k->count && bytes <= k->most_bytes && before > k->kept[oldest(k)].used;
}

/* Records this run, which came `before`, if it is wanted. Where its graph would be too large, this run is put on the stream,
 * where nothing is yet; where the device has no memory for it, or makes none, too, and the context gives back the others and
 * keeps none any more. */
static int32_t record(pd_context *c, const pd_call *call, int64_t before) {
    pd_cuda *x = c->place;
    pd_keeper *k = x->keeper;
    pd_recorded made = {0};
    int32_t code = PD_OK;
    while (x->next < plan->launch_count && code == PD_OK) code = pd_cuda_choose(c, x->next, call->stream);
    if (code != PD_OK) return code;
    int64_t bytes = (int64_t)pd_cuda_most_nodes(c) * NODE_BYTES;
    k->refused += bytes > k->most_bytes;
    if (!wanted(k, bytes, before)) return PD_OK;
    pd_cuda_settle(c->program->place, x); /* graphs may go */
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

/* The kept graph of this run, NULL: there is none. */
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
        int32_t code = record(c, call, before);
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
    for (int32_t i = 0; i < k->count; i++) forget(&k->kept[i]);
    free(k->key);
    free(k);
}

/* Gives back graphs that are more than may be kept. */
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
