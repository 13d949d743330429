/* host_steps.c: steps of a sequence whose output sizes depend on the data: non-maximum suppression, positions of
 * nonzero elements. */
#include <stdlib.h>
#include <string.h>

#include "sequence.h"

#define BLOCK 8 /* boxes compared at once */

typedef struct {
    float score;
    int64_t box;
} pd_scored;

/* The boxes kept for a class, in blocks: lower corner, upper corner, area. Unused entries overlap nothing. */
typedef struct {
    float y1[BLOCK], x1[BLOCK], y2[BLOCK], x2[BLOCK], area[BLOCK];
} pd_kept;

/* Highest score first, NaN last; ties are ordered by index. */
static inline int before(pd_scored p, pd_scored q) {
    int p_nan = p.score != p.score, q_nan = q.score != q.score;
    if (p_nan != q_nan) return q_nan;
    if (!p_nan && p.score != q.score) return p.score > q.score;
    return p.box < q.box;
}

static void sift(pd_scored *heap, int64_t count, int64_t at) {
    pd_scored moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && before(heap[child + 1], heap[child])) child++;
        if (before(moved, heap[child])) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static inline float area_of(const float *a) { return (a[2] - a[0]) * (a[3] - a[1]); }

/* Whether a box and a kept box have an intersection over union above `overlap`. */
static int overlaps(const pd_kept *kept, int64_t blocks, const float *a, float overlap) {
    float area = area_of(a);
    for (int64_t b = 0; b < blocks; b++) {
        const pd_kept *k = kept + b;
        int32_t hit[BLOCK], any = 0;
        for (int l = 0; l < BLOCK; l++) {
            float y1 = a[0] > k->y1[l] ? a[0] : k->y1[l], x1 = a[1] > k->x1[l] ? a[1] : k->x1[l];
            float y2 = a[2] < k->y2[l] ? a[2] : k->y2[l], x2 = a[3] < k->x2[l] ? a[3] : k->x2[l];
            float common = (y2 - y1) * (x2 - x1), whole = area + k->area[l] - common;
            hit[l] = (y2 > y1) & (x2 > x1) & (whole > 0) & (common / whole > overlap);
        }
        for (int l = 0; l < BLOCK; l++) any |= hit[l];
        if (any) return 1;
    }
    return 0;
}

/* Writes rows (batch, class, box) of the kept boxes, at most `most` per class; returns their number, or -1 if out of
 * memory. `corners` [batches, boxes, 4] as y1 x1 y2 x2; `scores` [batches, classes, boxes]; `rows` must be large enough
 * for all boxes. `least`: NULL, or a limit that scores must exceed. */
static int64_t suppress(const float *corners, const float *scores, int64_t batches, int64_t classes, int64_t boxes,
                           int64_t most, float overlap, const float *least, int64_t *rows) {
    pd_scored *heap = malloc((size_t)(boxes + 1) * sizeof *heap);
    pd_kept *kept = malloc((size_t)(most / BLOCK + 1) * sizeof *kept);
    int64_t count = heap && kept ? 0 : -1;
    for (int64_t n = 0; count >= 0 && n < batches * classes; n++) {
        const float *of = scores + n * boxes, *places = corners + n / classes * boxes * 4;
        int64_t left = 0, stayed = 0;
        for (int64_t k = 0; k < boxes; k++)
            if (!least || of[k] > *least) heap[left++] = (pd_scored){of[k], k};
        for (int64_t k = left / 2 - 1; k >= 0; k--) sift(heap, left, k);
        while (left && stayed < most) {
            int64_t box = heap[0].box;
            const float *a = places + 4 * box;
            heap[0] = heap[--left];
            sift(heap, left, 0);
            if (overlaps(kept, (stayed + BLOCK - 1) / BLOCK, a, overlap)) continue;
            pd_kept *k = kept + stayed / BLOCK;
            if (stayed % BLOCK == 0)
                for (int l = 0; l < BLOCK; l++) k->y1[l] = k->x1[l] = k->y2[l] = k->x2[l] = k->area[l] = 0;
            int l = (int)(stayed % BLOCK);
            k->y1[l] = a[0], k->x1[l] = a[1], k->y2[l] = a[2], k->x2[l] = a[3], k->area[l] = area_of(a);
            rows[3 * count] = n / classes, rows[3 * count + 1] = n % classes, rows[3 * count + 2] = box;
            stayed++, count++;
        }
    }
    free(heap), free(kept);
    return count;
}

/* Converts boxes to (y1, x1, y2, x2), lower corner first. Input: two corners, or center and size. */
static void corners_of(const float *boxes, int64_t count, int center, float *to) {
    for (int64_t k = 0; k < count; k++, boxes += 4, to += 4) {
        float a = boxes[0], b = boxes[1], c = boxes[2], d = boxes[3];
        if (center) {
            to[0] = b - d * 0.5f, to[1] = a - c * 0.5f, to[2] = b + d * 0.5f, to[3] = a + c * 0.5f;
        } else {
            to[0] = a < c || a != a ? a : c, to[1] = b < d || b != b ? b : d;
            to[2] = a > c || a != a ? a : c, to[3] = b > d || b != b ? b : d;
        }
    }
}

static const char *given(const pd_sequence *s, const pd_stage *g, int32_t i) {
    return g->inputs[i] < 0 || !pd_elements(&s->tensors[g->inputs[i]]) ? NULL : s->tensors[g->inputs[i]].data;
}

/* Non-maximum suppression. Inputs: boxes [B, N, 4], scores [B, C, N], the maximum number of boxes per class, the
 * overlap above which a box is dropped, the score that a box must exceed. The last three are optional. */
static int32_t run_suppress(pd_sequence *s, const pd_stage *g) {
    const pd_held *boxes = &s->tensors[g->inputs[0]], *scores = &s->tensors[g->inputs[1]];
    const char *most_given = given(s, g, 2), *overlap = given(s, g, 3);
    int64_t batches = scores->shape[0], classes = scores->shape[1], count = scores->shape[2], most = 0;
    if (most_given) memcpy(&most, most_given, sizeof most);
    most = pd_min(pd_max(most, 0), count);
    int64_t room = batches * classes * most, found = 0;
    int64_t corners = pd_bytes(boxes);
    int32_t code = pd_reserve(s, g->scratch, corners + room * 3 * (int64_t)sizeof(int64_t), 0);
    if (code != PD_OK) return code;
    int64_t *rows = (int64_t *)(void *)(g->scratch->data + corners);
    corners_of((const float *)(const void *)boxes->data, corners / 16, g->setting, (float *)(void *)g->scratch->data);
    if (room)
        found = suppress((const float *)(const void *)g->scratch->data, (const float *)(const void *)scores->data, batches,
                         classes, count, most, overlap ? *(const float *)(const void *)overlap : 0,
                         (const float *)(const void *)given(s, g, 4), rows);
    if (found < 0) return pd_refuse(s, PD_MEMORY, "there is no memory for boxes and their scores");
    pd_held *t = &s->tensors[g->outputs[0]];
    pd_take_shape(t, 2, (const int64_t[]){found, 3});
    code = pd_place(s, t);
    if (code != PD_OK) return code;
    memcpy(t->data, rows, (size_t)pd_bytes(t));
    s->values[g->symbols[0]] = found;
    return PD_OK;
}

/* ---- positions of nonzero elements ---- */

#define PLACES(name, type, test)                                                                                      \
    static int64_t count_##name(const void *data, int64_t n) {                                                        \
        const type *x = data;                                                                                         \
        int64_t found = 0;                                                                                            \
        for (int64_t k = 0; k < n; k++) found += (test) != 0;                                                         \
        return found;                                                                                                 \
    }                                                                                                                 \
    static void put_##name(const void *data, int64_t found, int64_t *to) {                                            \
        const type *x = data;                                                                                         \
        for (int64_t k = 0, at = 0; at < found; k++) {                                                                \
            to[at] = k; /* one that is 0 is written over: a branch would be guessed wrong */                          \
            at += (test) != 0;                                                                                        \
        }                                                                                                             \
    }
PLACES(8, uint8_t, x[k])
PLACES(16, uint16_t, x[k])
PLACES(32, uint32_t, x[k])
PLACES(64, uint64_t, x[k])
PLACES(half, uint16_t, (uint16_t)(x[k] << 1))
PLACES(float, float, x[k] != 0)
PLACES(double, double, x[k] != 0)

static const struct {
    int64_t (*count)(const void *, int64_t);
    void (*put)(const void *, int64_t, int64_t *);
} places[] = {
    [PD_FLOAT16] = {count_half, put_half}, [PD_BFLOAT16] = {count_half, put_half}, [PD_FLOAT32] = {count_float, put_float},
    [PD_FLOAT64] = {count_double, put_double}, [PD_INT8] = {count_8, put_8}, [PD_INT16] = {count_16, put_16},
    [PD_INT32] = {count_32, put_32}, [PD_INT64] = {count_64, put_64}, [PD_UINT8] = {count_8, put_8},
    [PD_UINT16] = {count_16, put_16}, [PD_UINT32] = {count_32, put_32}, [PD_UINT64] = {count_64, put_64},
};

/* Writes the positions of all nonzero elements in row-major order. */
static int32_t non_zero(pd_sequence *s, const pd_stage *g) {
    const pd_held *x = &s->tensors[g->inputs[0]];
    pd_held *t = &s->tensors[g->outputs[0]];
    int32_t dtype = x->dtype < PD_BOOL ? x->dtype : PD_UINT8;
    int64_t n = pd_elements(x), found = places[dtype].count(x->data, n);
    pd_take_shape(t, 1, &found);
    int32_t code = pd_place(s, t);
    if (code != PD_OK) return code;
    places[dtype].put(x->data, found, (int64_t *)(void *)t->data);
    s->values[g->symbols[0]] = found;
    return PD_OK;
}

int32_t pd_counting_step(pd_sequence *s, const pd_stage *g) {
    return g->kind == PD_NON_ZERO ? non_zero(s, g) : run_suppress(s, g);
}
