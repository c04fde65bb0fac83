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
    int64_t count;       /* entries that are not zero, or above the cut */
    double total;        /* sum of magnitudes, or of their excesses over the cut, as all that follows */
    double squares;      /* sum of squares */
    double largest;      /* magnitude, of all entries */
    double logs;         /* sum of logarithms; of excesses, if asked for */
} hs_sums;

/* A gradient, and the part of an array that takes it in. */
typedef struct {
    uintptr_t address;
    int type;
    int64_t first, n;
    int64_t not_finite; /* result: entries of it, which were left out */
    int overflowed;     /* result: whether the part has an infinite entry now */
    int64_t found;      /* result: how many entries above the cut there are now, of this part and those before */
} hs_gradient;

/* A part of an array, to be written. */
typedef struct {
    uintptr_t address;
    int type;
    int64_t first, n;
} hs_target;

/* What is found out about an array while its parts take in gradients, one after the other. */
typedef struct {
    double cut;
    int64_t room;       /* for indices and values; 0 if nothing is wanted, or if the array has indices beyond int32 */
    int32_t* indices;   /* of the entries above the cut: those of a part ascend, parts follow each other as they came */
    void* values;       /* of the array's type */
    int with_sums;      /* whether sums are wanted, not only the largest magnitude */
    hs_sums sums;       /* of all parts so far */
    int64_t found;      /* how many are above the cut */
    int complete;       /* whether all of them are there; must be 1 at first */
} hs_notes;

/* Names of the variants that this processor runs, the fastest first; null where there is no more. */
const char* hs_variant(int number);
/* Has all functions below use a variant; changes nothing and returns 0 if none of this name runs here. */
int hs_choose(const char* name);
/* Each gradient's part of residual and velocity takes it in, in this order. Without velocity: residual += gradient. With:
   velocity = momentum velocity + gradient, residual += velocity; Nesterov's: velocity = momentum (velocity + gradient),
   residual += velocity + gradient. What leaves the range of the type becomes infinite: the caller brings the numbers back, and
   forgets the notes. Notes may be null. Returns how many gradients had such entries or others that are not finite; changes
   nothing and returns -1 if one reaches beyond the residual's numel. */
int64_t hs_accumulate(void* residual, void* velocity, int type, int64_t numel, hs_gradient* gradients, int64_t number,
                      double momentum, int nesterov, int threads, hs_notes* notes);
/* Sums of what exceeds a cut, nothing if that is infinite or NaN; with a cut of 0 of all magnitudes. */
void hs_measure(const void* x, int type, int64_t n, double cut, int with_logs, int threads, hs_sums* sums);
/* counts[j] = number of entries above thresholds[j]; at most 16 thresholds. */
void hs_counts(const void* x, int type, int64_t n, const double* thresholds, int number, int threads, int64_t* counts);
/* Whether all entries are finite; of any type. */
int hs_all_finite(const void* x, int type, int64_t n, int threads);
/* Ascending indices of entries above the threshold, all of them if `complete` says so, for which room for twice as many
   mostly suffices, and with one thread room for all; how many entries are above it. */
int64_t hs_select_above(const void* x, int type, int64_t n, double threshold, int64_t* indices, int64_t room,
                        int threads, int* complete);
/* values = x[indices] rounded to float32, which is subtracted there; changes nothing and returns 0 if an index is
   outside [0, n). */
int hs_take(void* x, int type, int64_t n, const int64_t* indices, int64_t count, float* values);
/* target[indices] += values; changes nothing and returns 0 if an index is outside [0, n). */
int hs_scatter_add(void* target, int type, int64_t n, const int64_t* indices, const void* values, int values_type,
                   int64_t count);
/* Each target = the sum of those entries of `world` messages of pairs that are in [first, first + n), counted from `first`, in
   the messages' order, each divided by `divisor` first; zero where none has an entry. Of message number w the first used[w] of
   `capacity` rows count. Changes nothing and returns 0 unless every message's indices ascend there. */
int hs_assemble(const hs_target* targets, int64_t number, const int32_t* messages, int64_t capacity, int64_t world,
                const int64_t* used, float divisor);
/* A message of pairs with room for `capacity`: see horovod_sparse/wire.py. */
void hs_pack(const int64_t* indices, const float* values, int64_t count, int64_t capacity, int32_t* message);
/* used[w] = how many of the `capacity` indices of message number w, all `stride` apart, come before its padding; -2 if the
   first is -2, and -1 unless they are as horovod_sparse/wire.py wants them for a bucket of n. */
void hs_rows_in_use(const int32_t* indices, int64_t stride, int64_t capacity, int64_t world, int64_t n, int64_t* used);
/* The first `used` rows of a message of pairs. */
void hs_unpack(const int32_t* message, int64_t used, int64_t* indices, float* values);
/* end */

#ifdef __cplusplus
}
#endif

#endif
