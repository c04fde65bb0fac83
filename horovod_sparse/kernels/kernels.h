/* The interface of the compiled kernels, in plain C. Python reads the declarations between the two marks (see build.py). */

#pragma once

#include <stdint.h>

/* begin */
/* horovod_sparse/ops/protocol.py says under the same names what the operations compute. Here is what is asked of the memory.
   Residuals, velocities and x are float32 or float64, gradients of any type. A cut is not negative, a threshold is any number;
   both are rounded to x's type. Infinities in x are treated like other numbers. NaN in x is above every threshold except NaN;
   sums become NaN or leave it out. Threads beyond the first are started as far as the system has them. A failed allocation ends
   the process. */
enum { HS_FLOAT32, HS_FLOAT64, HS_BFLOAT16, HS_FLOAT16 };

typedef struct {
    int64_t count;       /* number of entries that are not zero, or that are above the cut */
    double total;        /* sum of magnitudes, or of their excesses over the cut */
    double squares;      /* sum of squares of the same */
    double largest;      /* largest magnitude of all entries */
    double logs;         /* sum of logarithms of the excesses, if asked for */
} hs_sums;

/* A part of an array, which takes in a gradient or is written to. */
typedef struct {
    uintptr_t address;  /* of the gradient, or of the part */
    int type;
    int64_t first, n;
    uintptr_t start;    /* if not null, of an array like the gradient, which is not wider than what takes it in:
                           growth * (gradient - start) + pull * start is taken in */
    double growth, pull;
    int64_t not_finite; /* result: number of its entries that are not finite, and of sums that left the range of the type */
    int64_t found;      /* result: number of entries that are noted of this part and of those before it */
} hs_part;

/* A row of a message of pairs. */
typedef struct {
    int32_t index;
    float value;
} hs_pair;

/* What is found out about an array while its parts take in gradients, one after the other. */
typedef struct {
    double cut;
    int64_t room;       /* for indices and values; 0 if none are wanted */
    int32_t* indices;   /* of the entries above the cut: ascending within a part, parts in the order in which they came */
    void* values;       /* of the array's type */
    int wanted;         /* 0: the largest magnitude; 1: also the number of entries that are not zero; 2: all sums */
    hs_sums sums;       /* of all parts so far */
    int64_t found;      /* number of entries that indices and values hold */
    int complete;       /* whether these are all that are above the cut; must be 1 at first */
    int valid;          /* whether all of this holds; must be 1 at first. Sums that left the range make it 0 */
} hs_notes;

/* Returns the name of variant `number` of those that this processor runs, the fastest first; null after the last. */
const char* hs_variant(int number);
/* Makes all functions below use a variant. Changes nothing and returns 0 if no variant of this name runs here. */
int hs_choose(const char* name);
/* Says whether gradients are read a page ahead of where they are needed (1 or 0; -1: if that saves time on this processor).
   Returns what was decided. Results have the same bits. */
int hs_ask_ahead(int wanted);
/* Makes all functions below use the threads of the OpenMP runtime that the process has loaded. Idle threads of such a runtime
   spin for a while; threads of our own would compete with them. Returns 0 if there is none, or in a forked process. */
int hs_share_threads(void);
/* Takes in the gradients in this order. `velocity` and `notes` may be null. Changes nothing and returns 0 if a gradient reaches
   beyond numel, or has a start although there is a velocity. */
int hs_accumulate(void* residual, void* velocity, int type, int64_t numel, hs_part* gradients, int64_t number,
                  double momentum, double rate, int threads, hs_notes* notes);
/* Writes the sums of the excesses over a cut: of all magnitudes if the cut is 0, zeros if it is infinite or NaN. */
void hs_measure(const void* x, int type, int64_t n, double cut, int with_logs, int threads, hs_sums* sums);
/* Writes ascending indices of the entries above the threshold, or of the `capacity` largest of them, and returns how many entries
   are above it; n is at most 2^31. */
int64_t hs_select_above(const void* x, int type, int64_t n, double threshold, int64_t capacity, int threads,
                        int64_t* indices);
/* Writes ascending indices of the `count` largest entries, of equals the first, and returns the smallest magnitude of these.
   `count` is in [1, n], n is at most 2^31. */
double hs_select_largest(const void* x, int type, int64_t n, int64_t count, int threads, int64_t* indices);
/* Returns the smallest of the `count` largest magnitudes of every stride-th entry; there must be so many. */
double hs_sampled_largest(const void* x, int type, int64_t n, int64_t stride, int64_t count, int threads);
/* Returns the number of entries that all searches of this process have read, pass by pass, but for samples. */
int64_t hs_entries_read(void);
/* Writes what was taken to `values` or, with its indices, to a `message` of `capacity` >= count pairs; the other one is null.
   Changes nothing and returns 0 if an index is outside [0, n). */
int hs_take(void* x, int type, int64_t n, const int64_t* indices, int64_t count, float* values, hs_pair* message,
            int64_t capacity);
/* Does as an `assembler`, with `world` messages of `capacity` rows. Changes nothing and returns 0 unless every message's
   indices ascend within each target. */
int hs_assemble(const hs_part* targets, int64_t number, const hs_pair* messages, int64_t capacity, int64_t world,
                const int64_t* used, float divisor);
/* Writes a packed message of `length` int32, for x with n entries. */
void hs_quantize(void* x, int type, int64_t n, hs_pair* message, int64_t capacity, int32_t* packed, int64_t length);
/* Writes messages of pairs, of `capacity` rows, from packed ones of `length` int32. */
void hs_unquantize(int32_t* packed, int64_t length, int64_t chunks, int64_t world, hs_pair* messages, int64_t capacity);
/* Writes to `used`; -1 stands for None. Indices are `stride` apart. */
void hs_rows_in_use(const int32_t* indices, int64_t stride, int64_t capacity, int64_t world, int64_t n, int64_t* used);
/* Returns the number of indices; -1 stands for None. `merged` has room for all indices of `world` messages of `length`. */
int64_t hs_union(const int32_t* messages, int64_t length, int64_t header, int64_t world, int64_t n, int64_t* merged);
/* end */
