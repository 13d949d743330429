/* What steps of the host do in C (polydyn/runtime/host_steps.py): loops that depend on what they found before. */
#include <stdint.h>
#include <stdlib.h>

#include "polydyn.h"

#define EXPORT __attribute__((visibility("default")))
#define BLOCK 8 /* boxes that are compared at once */

typedef struct {
    float score;
    int64_t box;
} pd_scored;

/* Boxes that stayed in a class, BLOCK at a time: the lower and the upper corner, the area. Unused places overlap nothing. */
typedef struct {
    float y1[BLOCK], x1[BLOCK], y2[BLOCK], x2[BLOCK], area[BLOCK];
} pd_kept;

/* Highest score first, NaN last, ties by place. */
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

/* Whether a box has more than the share `overlap` of their union in common with one of those kept. */
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

/* Rows (batch, class, box) of the boxes that stay, at most `most` of a class; their number, -1: no memory. `corners`
 * [batches, boxes, 4] as y1 x1 y2 x2, `scores` [batches, classes, boxes], `rows` with room for all. `least`: NULL, or
 * what a score must exceed. */
EXPORT int64_t pd_suppress(const float *corners, const float *scores, int64_t batches, int64_t classes, int64_t boxes,
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

/* From C a program of several parts is refused by name. */
EXPORT int32_t pd_abi_version(void) { return PD_ABI_VERSION; }

EXPORT const char *pd_error(void) {
    return "this program has steps of the host between its parts (sizes that data decide, loops): run it by "
           "polydyn.load in Python";
}

EXPORT int64_t pd_weight_bytes(const pd_program *program) {
    (void)program;
    return 0;
}

EXPORT int32_t pd_open(const char *path, const void *memory, int64_t offset, int64_t bytes, pd_program **program) {
    (void)path, (void)memory, (void)offset, (void)bytes;
    *program = NULL;
    return PD_USAGE;
}
