/* DietCode, Figure 7: one micro-kernel of MB x NB, with its checks of the last row in different places.
 * Every version has the stages of Listing 1: fetch rows into a local workspace, compute, write back. Columns always fill
 * their blocks. w holds panels of NR columns: w[panel][k][NR]. */
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define MR 8
#else
#define LANES 8
#define MR 4
#endif
#define NR (2 * LANES)
#define MB 128
#define NB 128
#define KB 256

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef struct { float x[MB * KB], y[MB * NB]; } workspace;

#define STAGE static inline __attribute__((always_inline)) void

/* rows: rows that exist from this block on. */
STAGE fetch(workspace *s, const float *x, int64_t depth, int64_t k0, int64_t kb, int64_t rows, int checked) {
    for (int64_t r = 0; r < MB; r++) {
        if (!checked || r < rows)
            memcpy(s->x + r * KB, x + r * depth + k0, kb * sizeof(float));
        else if (checked == 2) /* local padding */
            memset(s->x + r * KB, 0, kb * sizeof(float));
    }
}

STAGE compute(workspace *s, const float *w, int64_t depth, int64_t k0, int64_t kb, int64_t rows, int checked) {
    for (int64_t j = 0; j < NB / NR; j++)
        for (int64_t i = 0; i < MB / MR; i++) {
            const float *panel = w + (j * depth + k0) * NR, *a = s->x + i * MR * KB;
            float *y = s->y + i * MR * NB + j * NR;
            vec acc[MR][2];
            int64_t left = rows - i * MR;
            for (int r = 0; r < MR; r++)
                for (int q = 0; q < 2; q++) acc[r][q] = *(const vec *)(y + r * NB + q * LANES);
            for (int64_t k = 0; k < kb; k++) {
                const vec b0 = *(const vec *)(panel + k * NR), b1 = *(const vec *)(panel + k * NR + LANES);
                if (checked) __asm__ volatile("" : "+r"(left)); /* the check stays where it is written */
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++)
                    if (!checked || r < left) {
                        acc[r][0] += a[r * KB + k] * b0;
                        acc[r][1] += a[r * KB + k] * b1;
                    }
            }
            for (int r = 0; r < MR; r++)
                for (int q = 0; q < 2; q++) *(vec *)(y + r * NB + q * LANES) = acc[r][q];
        }
}

STAGE write_back(workspace *s, float *y, int64_t columns, int64_t rows, int checked) {
    for (int64_t r = 0; r < MB; r++)
        if (!checked || r < rows) memcpy(y + r * columns, s->y + r * NB, NB * sizeof(float));
}

STAGE block(workspace *s, const float *x, const float *w, float *y, int64_t columns, int64_t depth, int64_t rows,
            int fetched, int computed, int written) {
    memset(s->y, 0, sizeof s->y);
    for (int64_t k0 = 0; k0 < depth; k0 += KB) {
        const int64_t kb = depth - k0 < KB ? depth - k0 : KB;
        fetch(s, x, depth, k0, kb, rows, fetched);
        compute(s, w, depth, k0, kb, rows, computed);
    }
    write_back(s, y, columns, rows, written);
}

#define ARGS                                                                                                           \
    void *memory, const float *x, const float *w, float *y, int64_t rows, int64_t columns, int64_t depth, float *px,   \
        float *py
#define EACH_BLOCK(source, target, ...)                                                                                \
    for (int64_t i = 0; i < rows; i += MB)                                                                             \
        for (int64_t j = 0; j < columns; j += NB) {                                                                    \
            const float *x0 = (source) + i * depth, *w0 = w + j * depth;                                               \
            float *y0 = (target) + i * columns + j;                                                                    \
            const int64_t left = rows - i;                                                                             \
            __VA_ARGS__                                                                                                \
        }
#define API __attribute__((visibility("default"))) void

API bounds_baseline(ARGS) { EACH_BLOCK(x, y, block(memory, x0, w0, y0, columns, depth, left, 1, 1, 1);) }

API bounds_global(ARGS) { /* px, py: padded copies of x and y */
    const int64_t padded = (rows + MB - 1) / MB * MB;
    memcpy(px, x, rows * depth * sizeof(float));
    memset(px + rows * depth, 0, (padded - rows) * depth * sizeof(float));
    EACH_BLOCK(px, py, block(memory, x0, w0, y0, columns, depth, left, 0, 0, 0);)
    memcpy(y, py, rows * columns * sizeof(float));
}

API bounds_partition(ARGS) {
    EACH_BLOCK(x, y, {
        if (left >= MB)
            block(memory, x0, w0, y0, columns, depth, left, 0, 0, 0);
        else
            block(memory, x0, w0, y0, columns, depth, left, 1, 1, 1);
    })
}

API bounds_local(ARGS) { EACH_BLOCK(x, y, block(memory, x0, w0, y0, columns, depth, left, 2, 0, 1);) }

__attribute__((visibility("default"))) int64_t bounds_panel(void) { return NR; }
__attribute__((visibility("default"))) int64_t bounds_memory(void) { return sizeof(workspace); }
