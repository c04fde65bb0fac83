/* The seam of the compiled kernels: plain C. Python reads the declarations between the two marks (see build.py). */

#ifndef HOROVOD_SPARSE_KERNELS_H
#define HOROVOD_SPARSE_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* begin */
/* Residuals, velocities and x are of float32 or float64, gradients of any type, which is converted to the residual's;
   what is not finite then is left out. A cut is not negative, a threshold is any number; both are rounded to x's type.
   Infinities in x are numbers like others. NaN in x is above every threshold but NaN, and makes sums NaN or left out.
   Threads beyond the first are started as far as the system has them. A failed allocation ends the process. */
enum { HS_FLOAT32, HS_FLOAT64, HS_BFLOAT16, HS_FLOAT16 };

typedef struct {
    int64_t count;        /* entries that are not zero */
    double total;         /* sum of magnitudes */
    double squares;       /* sum of squares */
    double largest;       /* magnitude */
    int64_t tail_count;   /* entries above the cut */
    double tail_total;    /* sum of their excesses over it */
    double tail_squares;  /* sum of the squares of those */
    double tail_logs;     /* sum of the logarithms of those, if asked for */
    int64_t not_finite;   /* entries of the gradient, which were left out */
} hs_sums;

/* residual += gradient; sums of the new residual. */
void hs_accumulate(void* residual, int type, const void* gradient, int gradient_type, int64_t n, double cut,
                   int threads, hs_sums* sums);
/* velocity = momentum velocity + gradient, residual += velocity; Nesterov's: velocity = momentum (velocity + gradient),
   residual += velocity + gradient. Sums of the new residual. */
void hs_accumulate_velocity(void* residual, void* velocity, int type, const void* gradient, int gradient_type,
                            int64_t n, double momentum, int nesterov, double cut, int threads, hs_sums* sums);
/* Sums of x as it is. */
void hs_measure(const void* x, int type, int64_t n, double cut, int with_logs, int threads, hs_sums* sums);
/* counts[j] = number of entries above thresholds[j]; at most 16 thresholds. */
void hs_counts(const void* x, int type, int64_t n, const double* thresholds, int number, int threads, int64_t* counts);
/* Whether all entries are finite; of any type. */
int hs_all_finite(const void* x, int type, int64_t n, int threads);
/* Ascending indices of the first `capacity` entries above the threshold; how many entries are above it. */
int64_t hs_select_above(const void* x, int type, int64_t n, double threshold, int64_t* indices, int64_t capacity,
                        int threads);
/* values = x[indices] rounded to float32, which is subtracted there; changes nothing and returns 0 if an index is
   outside [0, n). */
int hs_take(void* x, int type, int64_t n, const int64_t* indices, int64_t count, float* values);
/* target[indices] += values; changes nothing and returns 0 if an index is outside [0, n). */
int hs_scatter_add(void* target, int type, int64_t n, const int64_t* indices, const void* values, int values_type,
                   int64_t count);
/* end */

#ifdef __cplusplus
}
#endif

#endif
