/* limits.c: kernels that reach the machine's limits, for the calibration (measure/calibrate.py). */
#include <stdint.h>

typedef float vec __attribute__((vector_size(PD_W * sizeof(float))));

#if defined(__x86_64__)
#define KEEP(v) "+x"(v)
#else
#define KEEP(v) "+w"(v)
#endif

/* Runs sym[0] steps of 12 independent chains of fused multiply-adds: 24 * PD_W operations per step and task. */
void pdl_fma(void *const *buffers, const int64_t *sym, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    for (int64_t t = begin; t < end; t++) {
        vec a[12], x, y;
        for (int i = 0; i < PD_W; i++) x[i] = 0.5f, y[i] = 0.25f;
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) a[i] = x * (float)(i + 1); /* equal chains would be merged */
        for (int64_t s = 0; s < sym[0]; s++) {
            __asm__ volatile("" : KEEP(x), KEEP(y)); /* keeps the compiler from merging steps */
#pragma GCC unroll 12
            for (int i = 0; i < 12; i++) a[i] = a[i] * x + y;
        }
        vec all = a[0];
#pragma GCC unroll 12
        for (int i = 1; i < 12; i++) all += a[i];
        ((volatile float *)buffers[0])[t] = all[0];
    }
}

/* Each task reads its own sym[0] floats sym[1] times. */
void pdl_read(void *const *buffers, const int64_t *sym, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    for (int64_t t = begin; t < end; t++) {
        const float *data = (const float *)buffers[0] + t * sym[0];
        vec sum[8] = {{0}};
        for (int64_t r = 0; r < sym[1]; r++) {
            for (int64_t i = 0; i + 8 * PD_W <= sym[0]; i += 8 * PD_W)
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) sum[k] += *(const vec *)(data + i + k * PD_W);
            __asm__ volatile("" : : "r"(data) : "memory");
        }
#pragma GCC unroll 8
        for (int k = 1; k < 8; k++) sum[0] += sum[k];
        ((volatile float *)buffers[1])[t] = sum[0][0];
    }
}
