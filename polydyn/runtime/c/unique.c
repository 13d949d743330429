/* unique.c: the distinct elements of a tensor, or distinct slices along an axis, by a stable radix sort. */
#include <string.h>

#include "sequence.h"

/* ---- keys ---- */

static const uint64_t infinities[] = {[PD_FLOAT16] = 0x7c00, [PD_BFLOAT16] = 0x7f80, [PD_FLOAT32] = 0x7f800000,
                                      [PD_FLOAT64] = UINT64_C(0x7ff0000000000000)};

/* Returns an unsigned key with the order of the elements: -0 equals 0, and all NaNs are equal and last. */
static inline uint64_t key_of(const char *at, int32_t dtype, int64_t bytes) {
    uint64_t bits = 0, top = UINT64_C(1) << (8 * bytes - 1);
    memcpy(&bits, at, (size_t)bytes);
    if (dtype > PD_FLOAT64) return dtype >= PD_INT8 && dtype <= PD_INT64 ? bits ^ top : bits;
    uint64_t size = bits & (top - 1);
    if (size > infinities[dtype]) return top | (top - 1);
    return !size ? top : bits & top ? top - 1 - size : bits | top;
}

/* Slices: `count` of them, each of `before` times `after` elements. */
typedef struct {
    const char *data;
    int32_t dtype;
    int64_t bytes, before, count, after;
} slices;

static inline uint64_t slice_key(const slices *x, int64_t k, int64_t column) {
    int64_t at = (column / x->after * x->count + k) * x->after + column % x->after;
    return key_of(x->data + at * x->bytes, x->dtype, x->bytes);
}

static int equal(const slices *x, int64_t a, int64_t b) {
    for (int64_t c = 0; c < x->before * x->after; c++)
        if (slice_key(x, a, c) != slice_key(x, b, c)) return 0;
    return 1;
}

/* ---- order ---- */

typedef struct {
    uint64_t key;
    int64_t slice;
} entry;

/* Sorts by byte `byte` of the keys. Returns 0, without moving anything, if that byte is the same in all keys. */
static int pass(const entry *from, entry *to, int64_t count, int byte) {
    int64_t starts[256] = {0};
    for (int64_t k = 0; k < count; k++) starts[from[k].key >> 8 * byte & 255]++;
    if (starts[from[0].key >> 8 * byte & 255] == count) return 0;
    for (int64_t d = 0, at = 0; d < 256; d++) {
        int64_t own = starts[d];
        starts[d] = at, at += own;
    }
    for (int64_t k = 0; k < count; k++) to[starts[from[k].key >> 8 * byte & 255]++] = from[k];
    return 1;
}

/* Sorts the slices; returns one of the two arrays. It sorts by the last element first; each sort is stable. */
static const entry *sorted(const slices *x, entry *one, entry *other) {
    for (int64_t k = 0; k < x->count; k++) one[k].slice = k;
    for (int64_t c = x->before * x->after; c-- > 0 && x->count;) {
        for (int64_t k = 0; k < x->count; k++) one[k].key = slice_key(x, one[k].slice, c);
        for (int byte = 0; byte < x->bytes; byte++)
            if (pass(one, other, x->count, byte)) {
                entry *sorted = other;
                other = one, one = sorted;
            }
    }
    return one;
}

/* Computes the group of every slice, numbered in sorted order or by first occurrence; returns the number of groups.
 * `numbers`: scratch of the same length. */
static int64_t group(const slices *x, const entry *order, int in_order, int64_t *groups, int64_t *numbers) {
    int64_t count = 0, next = 0;
    for (int64_t k = 0; k < x->count; k++) {
        if (!k || !equal(x, order[k - 1].slice, order[k].slice)) numbers[count++] = -1;
        groups[order[k].slice] = count - 1;
    }
    for (int64_t k = 0; k < x->count && !in_order; k++) {
        if (numbers[groups[k]] < 0) numbers[groups[k]] = next++;
        groups[k] = numbers[groups[k]];
    }
    return count;
}

/* ---- the step ---- */

static void fill(const slices *x, const int64_t *groups, int64_t count, pd_held *const *to) {
    int64_t *first = (int64_t *)(void *)to[1]->data, *inverse = (int64_t *)(void *)to[2]->data;
    int64_t *counts = (int64_t *)(void *)to[3]->data, row = x->after * x->bytes;
    for (int64_t g = 0; g < count; g++) first[g] = -1, counts[g] = 0;
    for (int64_t k = 0; k < x->count; k++) {
        int64_t g = inverse[k] = groups[k];
        if (counts[g]++) continue;
        first[g] = k;
        for (int64_t b = 0; b < x->before && row; b++)
            memcpy(to[0]->data + (b * count + g) * row, x->data + (b * x->count + k) * row, (size_t)row);
    }
}

int32_t pd_unique(pd_sequence *s, const pd_stage *g) {
    const pd_held *t = &s->tensors[g->inputs[0]];
    int32_t axis = g->setting / 2 - 1, in_order = g->setting % 2; /* axis -1: all elements */
    slices x = {t->data, t->dtype, pd_item_bytes[t->dtype], 1, axis < 0 ? pd_elements(t) : t->shape[axis], 1};
    for (int32_t a = 0; a < axis; a++) x.before *= t->shape[a];
    for (int32_t a = axis + 1; axis >= 0 && a < t->rank; a++) x.after *= t->shape[a];
    int64_t room = x.count * (int64_t)sizeof(entry);
    int32_t code = pd_reserve(s, g->scratch, 2 * room + 2 * x.count * (int64_t)sizeof(int64_t) + 64, 0);
    if (code != PD_OK) return code;
    entry *one = (entry *)(void *)g->scratch->data, *other = one + x.count;
    int64_t *groups = (int64_t *)(void *)(other + x.count), *numbers = groups + x.count;
    int64_t count = group(&x, sorted(&x, one, other), in_order, groups, numbers), shape[PD_MAX_RANK];
    pd_held *to[4];
    for (int32_t o = 0; o < 4; o++) to[o] = &s->tensors[g->outputs[o]];
    memcpy(shape, t->shape, (size_t)t->rank * sizeof *shape);
    shape[pd_max(axis, 0)] = count;
    pd_take_shape(to[0], axis < 0 ? 1 : t->rank, shape);
    pd_take_shape(to[1], 1, &count), pd_take_shape(to[2], 1, &x.count), pd_take_shape(to[3], 1, &count);
    for (int32_t o = 0; o < 4 && code == PD_OK; o++) code = pd_place(s, to[o]);
    if (code != PD_OK) return code;
    fill(&x, groups, count, to);
    s->values[g->symbols[0]] = count;
    return PD_OK;
}
