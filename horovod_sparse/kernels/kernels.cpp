// The array verbs that read or write whole residuals, at the speed of the memory. No header of Python, PyTorch or
// TensorFlow, so that one build serves them all. Every function has its twin in horovod_sparse/numpy/ops.py.
//
// Sums are of float64, block by block in the order of the blocks: the same on every run and with any number of threads.
// Magnitudes are compared by their bits, which orders them like the numbers, denormal ones too, whatever the processor
// is set to do with those.

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

// One build runs on every x86-64: the functions marked so are compiled for several generations of it, and the system's
// loader picks. Elsewhere the compiler's baseline has vectors of its own. (Other compilers learnt these names later.)
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
// Compressing a vector has no portable form: this one kernel is also written with the instruction for it.
#if !defined(HOROVOD_SPARSE_PORTABLE)
#include <immintrin.h>
#define HAS_COMPRESS 1
#endif
#if !defined(HOROVOD_SPARSE_PORTABLE) && !defined(HOROVOD_SPARSE_NO_CLONES)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#endif
#ifndef CLONES
#define CLONES
#endif
#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

namespace {

using Wide = double __attribute__((vector_size(64)));

// What the loops below need to know of a type of residual: 64 bytes of it at once, and the bits of its magnitudes.
template <class T>
struct Type;

template <>
struct Type<float> {
    using Vector = float __attribute__((vector_size(64)));
    using Bits = int32_t __attribute__((vector_size(64)));
    using Bit = int32_t;
    static constexpr Bit magnitude = 0x7fffffff, infinity = 0x7f800000;
};

template <>
struct Type<double> {
    using Vector = Wide;
    using Bits = int64_t __attribute__((vector_size(64)));
    using Bit = int64_t;
    static constexpr Bit magnitude = 0x7fffffffffffffff, infinity = 0x7ff0000000000000;
};

static_assert(std::numeric_limits<float>::is_iec559 && std::numeric_limits<double>::is_iec559);

template <class T>
using Vector = typename Type<T>::Vector;
template <class T>
using Bits = typename Type<T>::Bits;
template <class T>
constexpr int64_t kLanes = 64 / sizeof(T);

// Elements per partial sum.
constexpr int64_t kBlock = 1 << 14;
// Elements that are converted, changed and looked at again while they are in the first-level cache.
constexpr int64_t kPiece = 1024;
// Elements that become zero, and are added to, while they are in the second-level cache.
constexpr int64_t kStretch = 1 << 14;
// A thread that has less to do costs more than it brings.
constexpr int64_t kLeastPerThread = 1 << 18;
// Vectors that are looked at together before a branch.
constexpr int kGroup = 4;
constexpr int64_t kMostThreads = 64;
constexpr int kMostThresholds = 16;

template <class T>
INLINE Vector<T> load(const T* from) {
    Vector<T> vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class T>
INLINE void store(T* to, Vector<T> vector) {
    std::memcpy(to, &vector, sizeof vector);
}

// The processor's own guesses end with a page. An address that is nobody's does no harm.
INLINE void ask_for_what_follows(const void* here) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(here) + (1 << 14)));
}

template <class T>
INLINE Bits<T> magnitude_bits(Vector<T> x) {
    return (Bits<T>)x & Type<T>::magnitude;
}

// The bits that a magnitude must exceed to be above the threshold; all are above a negative one, none is above NaN.
template <class T>
INLINE typename Type<T>::Bit limit_bits(double threshold) {
    // What is beyond the type's range becomes infinity, a tiny negative number a negative zero, whose bits are no
    // magnitude's.
    T limit = static_cast<T>(threshold);
    if (limit < 0) return -1;
    if (std::isnan(limit)) return Type<T>::magnitude;
    limit = std::abs(limit);
    typename Type<T>::Bit bits;
    std::memcpy(&bits, &limit, sizeof bits);
    return bits;
}

// All ones where limit < bits. Both are not negative, or the limit is -1: no overflow. (NaN is above every number.)
template <class T>
INLINE Bits<T> above(Bits<T> bits, Bits<T> limit) {
    return (limit - bits) >> (8 * sizeof(T) - 1);
}

template <class T>
INLINE Bits<T> all_lanes(typename Type<T>::Bit bit) {
    return bit - Bits<T>{};
}

// The halves of a vector.
template <class Half, class Whole>
INLINE void split(Whole whole, Half& low, Half& high) {
    static_assert(2 * sizeof(Half) == sizeof(Whole));
    std::memcpy(&low, &whole, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&whole) + sizeof low, sizeof high);
}

template <class T>
INLINE bool any(Bits<T> mask) {
    int64_t __attribute__((vector_size(32))) low, high;
    int64_t __attribute__((vector_size(16))) a, b;
    split(mask, low, high);
    split(low | high, a, b);
    a |= b;
    return (a[0] | a[1]) != 0;
}

// A sum of float64 over vectors of either type.
struct Sum {
    Wide low = {}, high = {};

    INLINE void add(Vector<float> x) {
        Wide a, b;
        widen(x, a, b);
        low += a;
        high += b;
    }
    INLINE void add_squares(Vector<float> x) {
        Wide a, b;
        widen(x, a, b);
        low += a * a;
        high += b * b;
    }
    INLINE void add(Wide x) { low += x; }
    INLINE void add_squares(Wide x) { low += x * x; }

    // Adds magnitude - cut where the mask is set, and its square to `squares`.
    INLINE void add_excesses(Vector<float> magnitude, Bits<float> mask, double cut, Sum& squares) {
        using Ints = int32_t __attribute__((vector_size(32)));
        using Longs = int64_t __attribute__((vector_size(64)));
        Ints low_mask, high_mask;
        split(mask, low_mask, high_mask);
        Wide a, b;
        widen(magnitude, a, b);
        a = (Wide)((Longs)(a - cut) & __builtin_convertvector(low_mask, Longs));
        b = (Wide)((Longs)(b - cut) & __builtin_convertvector(high_mask, Longs));
        low += a;
        high += b;
        squares.low += a * a;
        squares.high += b * b;
    }
    INLINE void add_excesses(Wide magnitude, Bits<double> mask, double cut, Sum& squares) {
        const Wide excess = (Wide)((Bits<double>)(magnitude - cut) & mask);
        low += excess;
        squares.low += excess * excess;
    }

    INLINE void add(const Sum& other) {
        low += other.low;
        high += other.high;
    }

    INLINE double value() const {
        const Wide both = low + high;
        double total = 0;
        for (int lane = 0; lane < 8; ++lane) total += both[lane];
        return total;
    }

    static INLINE void widen(Vector<float> x, Wide& a, Wide& b) {
        float __attribute__((vector_size(32))) low, high;
        split(x, low, high);
        a = __builtin_convertvector(low, Wide);
        b = __builtin_convertvector(high, Wide);
    }
};

// The sums of one block.
template <class T>
struct Sums {
    Sum total, squares;
    Bits<T> count = {}, largest = {};

    INLINE void add(Vector<T> x) {
        const Bits<T> bits = magnitude_bits<T>(x);
        total.add((Vector<T>)bits);
        squares.add_squares((Vector<T>)bits);
        count -= above<T>(bits, Bits<T>{});
        largest = bits > largest ? bits : largest;
    }

    INLINE void add(const Sums& other) {
        total.add(other.total);
        squares.add(other.squares);
        count += other.count;
        largest = other.largest > largest ? other.largest : largest;
    }

    INLINE void write(hs_sums& sums) const {
        const auto magnitudes = (Vector<T>)largest;
        sums.total += total.value();
        sums.squares += squares.value();
        for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
            sums.count += count[lane];
            sums.largest = std::max<double>(sums.largest, magnitudes[lane]);
        }
    }
};

// The sums of one block's excesses over a cut.
template <class T, bool kLogs>
struct Tail {
    Bits<T> limit;
    double cut;
    Sum total, squares;
    Bits<T> count = {};
    double logs = 0;

    INLINE void add(Vector<T> x) {
        const Bits<T> bits = magnitude_bits<T>(x), tail = above<T>(bits, limit);
        const auto magnitude = (Vector<T>)bits;
        count -= tail;
        total.add_excesses(magnitude, tail, cut, squares);
        if (kLogs) {
            for (int64_t lane = 0; lane < kLanes<T>; ++lane)
                if (tail[lane]) logs += std::log(static_cast<double>(magnitude[lane]) - cut);
        }
    }

    INLINE void write(hs_sums& sums) const {
        sums.total += total.value();
        sums.squares += squares.value();
        for (int64_t lane = 0; lane < kLanes<T>; ++lane) sums.count += count[lane];
        sums.logs += logs;
    }
};

void add_to(hs_sums& sums, const hs_sums& other) {
    sums.count += other.count;
    sums.total += other.total;
    sums.squares += other.squares;
    sums.largest = std::max(sums.largest, other.largest);
    sums.logs += other.logs;
    sums.not_finite += other.not_finite;
}

// Into how many parts the work on n elements is divided.
int64_t parts_of(int64_t n, int threads) {
    return std::max<int64_t>(1, std::min({int64_t{threads}, n / kLeastPerThread, kMostThreads}));
}

// Calls work(part, first, end), block numbers, for parts that together are all blocks; each in a thread of its own.
template <class Work>
void in_parallel(int64_t n, int threads, const Work& work) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    const int64_t parts = parts_of(n, threads);
    const auto do_part = [&](int64_t part) { work(part, blocks * part / parts, blocks * (part + 1) / parts); };
    std::vector<std::thread> helpers;
    helpers.reserve(parts - 1);
    int64_t mine = 1;
    try {
        for (; mine < parts; ++mine) helpers.emplace_back(do_part, mine);
    } catch (const std::system_error&) {
        // The system has no more threads: what remains is done here.
    }
    for (; mine < parts; ++mine) do_part(mine);
    do_part(0);
    for (auto& helper : helpers) helper.join();
}

// Calls block(part, begin, end, sums) for every block and adds up the sums in the order of the blocks.
template <class Block>
void sum_blocks(int64_t n, int threads, hs_sums* sums, const Block& block) {
    std::vector<hs_sums> partial((n + kBlock - 1) / kBlock, hs_sums{});
    in_parallel(n, threads, [&](int64_t part, int64_t first, int64_t end) {
        for (int64_t number = first; number < end; ++number) {
            const int64_t begin = number * kBlock;
            block(part, begin, std::min(begin + kBlock, n), partial[number]);
        }
    });
    *sums = hs_sums{};
    for (const auto& one : partial) add_to(*sums, one);
}

// --- gradients of any type, a block at a time ---

INLINE float from_bfloat16(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float number;
    std::memcpy(&number, &wide, sizeof number);
    return number;
}

INLINE float from_float16(uint16_t half) {
    const uint32_t sign = uint32_t{half & 0x8000u} << 16, magnitude = half & 0x7fffu;
    // Denormal halves are made of integers: denormal floats would be zero to a processor that is set to flush those.
    const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    uint32_t small_bits;
    std::memcpy(&small_bits, &small, sizeof small_bits);
    // The others' exponent is moved into float32's place and its bias corrected, by twice as much for infinity and NaN.
    // Masks, because compilers make no vectors of a branch.
    const uint32_t normal = -uint32_t{magnitude >= 0x0400u}, infinite = -uint32_t{magnitude >= 0x7c00u};
    const uint32_t moved = (magnitude << 13) + 0x38000000u + (infinite & 0x38000000u);
    const uint32_t bits = sign | (normal & moved) | (~normal & small_bits);
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

template <class T>
INLINE void convert(const void* gradient, int type, int64_t begin, int64_t count, T* to) {
    if (type == HS_FLOAT32) {
        const float* from = static_cast<const float*>(gradient) + begin;
        for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
    } else if (type == HS_FLOAT64) {
        const double* from = static_cast<const double*>(gradient) + begin;
        for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
    } else if (type == HS_BFLOAT16) {
        const uint16_t* from = static_cast<const uint16_t*>(gradient) + begin;
        for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from_bfloat16(from[i]));
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(gradient) + begin;
        for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from_float16(from[i]));
    }
}

template <class T>
constexpr int kOwnType = sizeof(T) == 4 ? HS_FLOAT32 : HS_FLOAT64;

// What a block does with 64 bytes of residual, velocity and gradient.
template <class T>
struct Plain {
    INLINE Vector<T> operator()(Vector<T> residual, Vector<T>&, Vector<T> gradient) const {
        return residual + gradient;
    }
    static constexpr bool has_velocity = false;
};

template <class T>
struct Momentum {
    T momentum;
    INLINE Vector<T> operator()(Vector<T> residual, Vector<T>& velocity, Vector<T> gradient) const {
        velocity = velocity * momentum + gradient;
        return residual + velocity;
    }
    static constexpr bool has_velocity = true;
};

template <class T>
struct Nesterov {
    T momentum;
    INLINE Vector<T> operator()(Vector<T> residual, Vector<T>& velocity, Vector<T> gradient) const {
        velocity = (velocity + gradient) * momentum;
        return (residual + gradient) + velocity;
    }
    static constexpr bool has_velocity = true;
};

// What is found out about a block while it accumulates.
template <class T>
struct Findings {
    Sums<T> sums;
    Bits<T> bad = {};
};

template <class T, class Update>
INLINE void accumulate_piece(T* residual, T* velocity, const T* gradient, int64_t count, Update update,
                             Findings<T>& findings) {
    const Bits<T> finite = all_lanes<T>(Type<T>::infinity - 1);
    Sums<T> sums;
    Bits<T> bad = {};
    const auto step = [&](T* r, T* v, const T* g) ALWAYS {
        Vector<T> gradients = load<T>(g), velocities = Update::has_velocity ? load<T>(v) : Vector<T>{};
        const Bits<T> wrong = above<T>(magnitude_bits<T>(gradients), finite);
        bad -= wrong;
        gradients = (Vector<T>)((Bits<T>)gradients & ~wrong);
        const Vector<T> updated = update(load<T>(r), velocities, gradients);
        if (Update::has_velocity) store<T>(v, velocities);
        store<T>(r, updated);
        sums.add(updated);
    };
    int64_t i = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) {
        ask_for_what_follows(residual + i);
        ask_for_what_follows(gradient + i);
        if (Update::has_velocity) ask_for_what_follows(velocity + i);
        step(residual + i, velocity + i, gradient + i);
    }
    if (i < count) {
        // Lanes beyond the end are zero, which counts nowhere.
        T r[kLanes<T>] = {}, v[kLanes<T>] = {}, g[kLanes<T>] = {};
        const size_t bytes = (count - i) * sizeof(T);
        std::memcpy(r, residual + i, bytes);
        if (Update::has_velocity) std::memcpy(v, velocity + i, bytes);
        std::memcpy(g, gradient + i, bytes);
        step(r, v, g);
        std::memcpy(residual + i, r, bytes);
        if (Update::has_velocity) std::memcpy(velocity + i, v, bytes);
    }
    findings.bad += bad;
    findings.sums.add(sums);
}

// Adds all of x to sums: `Sums` or `Tail`.
template <class T, class Statistics>
INLINE void measure_block(const T* x, int64_t count, Statistics sums, hs_sums& out) {
    int64_t i = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) sums.add(load<T>(x + i));
    if (i < count) {
        // Zeros are in no sum.
        T rest[kLanes<T>] = {};
        std::memcpy(rest, x + i, (count - i) * sizeof(T));
        sums.add(load<T>(rest));
    }
    sums.write(out);
}

template <class T>
INLINE void count_block(const T* x, int64_t count, const double* thresholds, int number, int64_t* counts) {
    Bits<T> limits[kMostThresholds], found[kMostThresholds] = {};
    for (int j = 0; j < number; ++j) limits[j] = all_lanes<T>(limit_bits<T>(thresholds[j]));
    int64_t i = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) {
        const Bits<T> bits = magnitude_bits<T>(load<T>(x + i));
        for (int j = 0; j < number; ++j) found[j] -= above<T>(bits, limits[j]);
    }
    for (int j = 0; j < number; ++j) {
        for (int64_t lane = 0; lane < kLanes<T>; ++lane) counts[j] += found[j][lane];
        for (int64_t rest = i; rest < count; ++rest) {
            typename Type<T>::Bit bits;
            std::memcpy(&bits, x + rest, sizeof bits);
            counts[j] += (bits & Type<T>::magnitude) > limits[j][0];
        }
    }
}

// Up to so many more are written than are found.
constexpr int64_t kSlack = 16;

// The entries of a piece that are above a bound, and their positions counted from `first`; how many.
template <class T>
INLINE int64_t find_above(const T* x, int64_t count, typename Type<T>::Bit bound, int32_t first, int32_t* positions,
                          T* values) {
    constexpr int64_t kStep = kGroup * kLanes<T>;
    const Bits<T> limit = all_lanes<T>(bound);
    int64_t number = 0;
    const auto scan = [&](int64_t from, int64_t end) ALWAYS {
        // Every entry is written, and kept if it qualifies: no branch that would be mispredicted.
        for (int64_t i = from; i < end; ++i) {
            typename Type<T>::Bit bits;
            std::memcpy(&bits, x + i, sizeof bits);
            positions[number] = first + static_cast<int32_t>(i);
            values[number] = x[i];
            number += (bits & Type<T>::magnitude) > bound;
        }
    };
    int64_t i = 0;
    for (; i + kStep <= count; i += kStep) {
        Bits<T> either = {};
        for (int64_t part = 0; part < kStep; part += kLanes<T>)
            either |= limit - magnitude_bits<T>(load<T>(x + i + part));
        // The sign bits of the differences say who is above.
        if (__builtin_expect(!any<T>(either >> (8 * sizeof(T) - 1)), 1)) continue;
        for (int64_t part = i; part < i + kStep; part += kLanes<T>)
            if (any<T>(above<T>(magnitude_bits<T>(load<T>(x + part)), limit))) scan(part, part + kLanes<T>);
    }
    scan(i, count);
    return number;
}

#ifdef HAS_COMPRESS
#define COMPRESSING __attribute__((target("arch=x86-64-v4")))

COMPRESSING inline __mmask16 above_mask(__m512 x, __m512i limit) {
    return _mm512_cmpgt_epi32_mask(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(Type<float>::magnitude)),
                                   limit);
}

COMPRESSING inline int64_t write_found(__m512 x, int32_t first, __mmask16 mask, int32_t* positions, float* values) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i here = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
    _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(mask, here));
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(mask, x));
    return __builtin_popcount(mask);
}

// `many`: there are likely some in every few vectors, so that looking for those without any costs more than it brings.
COMPRESSING int64_t find_above_compressing(const float* x, int64_t count, int32_t bound, bool many, int32_t first,
                                           int32_t* positions, float* values) {
    const __m512i limit = _mm512_set1_epi32(bound);
    int64_t number = 0;
    int32_t i = 0;
    for (; i + 64 <= count; i += 64) {
        __m512 parts[4];
        __mmask16 masks[4];
        for (int part = 0; part < 4; ++part) {
            parts[part] = _mm512_loadu_ps(x + i + 16 * part);
            masks[part] = above_mask(parts[part], limit);
        }
        if (!many && (masks[0] | masks[1] | masks[2] | masks[3]) == 0) continue;
        for (int part = 0; part < 4; ++part)
            number += write_found(parts[part], first + i + 16 * part, masks[part], positions + number, values + number);
    }
    for (; i < count; i += 16) {
        const auto valid = static_cast<__mmask16>(count - i < 16 ? (1u << (count - i)) - 1 : 0xffffu);
        const __m512 part = _mm512_maskz_loadu_ps(valid, x + i);
        number += write_found(part, first + i, above_mask(part, limit) & valid, positions + number, values + number);
    }
    return number;
}
#endif

template <class T>
INLINE bool finite_block(const T* x, int64_t count) {
    const Bits<T> finite = all_lanes<T>(Type<T>::infinity - 1);
    Bits<T> bad = {};
    int64_t i = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) bad |= above<T>(magnitude_bits<T>(load<T>(x + i)), finite);
    for (; i < count; ++i)
        if (!std::isfinite(x[i])) return false;
    return !any<T>(bad);
}

}  // namespace

// --- for each type of residual a set of functions, compiled for several processors ---

#define FUNCTIONS(T, NAME)                                                                                             \
    CLONES static void NAME##_accumulate(T* r, const T* g, int64_t n, Findings<T>& found) {                            \
        accumulate_piece(r, r, g, n, Plain<T>{}, found);                                                               \
    }                                                                                                                  \
    CLONES static void NAME##_momentum(T* r, T* v, const T* g, int64_t n, T m, Findings<T>& found) {                   \
        accumulate_piece(r, v, g, n, Momentum<T>{m}, found);                                                           \
    }                                                                                                                  \
    CLONES static void NAME##_nesterov(T* r, T* v, const T* g, int64_t n, T m, Findings<T>& found) {                   \
        accumulate_piece(r, v, g, n, Nesterov<T>{m}, found);                                                           \
    }                                                                                                                  \
    CLONES static void NAME##_measure(const T* x, int64_t n, hs_sums& out) { measure_block<T>(x, n, Sums<T>{}, out); } \
    CLONES static void NAME##_tail(const T* x, int64_t n, Type<T>::Bit bound, double cut, hs_sums& out) {              \
        measure_block<T>(x, n, Tail<T, false>{all_lanes<T>(bound), cut}, out);                                         \
    }                                                                                                                  \
    CLONES static void NAME##_tail_logs(const T* x, int64_t n, Type<T>::Bit bound, double cut, hs_sums& out) {         \
        measure_block<T>(x, n, Tail<T, true>{all_lanes<T>(bound), cut}, out);                                          \
    }                                                                                                                  \
    CLONES static void NAME##_count(const T* x, int64_t n, const double* thresholds, int number, int64_t* counts) {    \
        count_block<T>(x, n, thresholds, number, counts);                                                              \
    }                                                                                                                  \
    CLONES static int64_t NAME##_find(const T* x, int64_t n, Type<T>::Bit bound, int32_t first, int32_t* positions,    \
                                      T* values) {                                                                     \
        return find_above<T>(x, n, bound, first, positions, values);                                                   \
    }                                                                                                                  \
    CLONES static bool NAME##_finite(const T* x, int64_t n) { return finite_block<T>(x, n); }                          \
    CLONES static void NAME##_convert(const void* from, int type, int64_t begin, int64_t n, T* to) {                   \
        convert<T>(from, type, begin, n, to);                                                                          \
    }                                                                                                                  \
    template <>                                                                                                        \
    struct Functions<T> {                                                                                              \
        static constexpr auto accumulate = NAME##_accumulate;                                                          \
        static constexpr auto momentum = NAME##_momentum;                                                              \
        static constexpr auto nesterov = NAME##_nesterov;                                                              \
        static constexpr auto measure = NAME##_measure;                                                                \
        static constexpr auto tail = NAME##_tail;                                                                      \
        static constexpr auto tail_logs = NAME##_tail_logs;                                                            \
        static constexpr auto count = NAME##_count;                                                                    \
        static constexpr auto find = NAME##_find;                                                                      \
        static constexpr auto finite = NAME##_finite;                                                                  \
        static constexpr auto convert = NAME##_convert;                                                                \
    };

namespace {
template <class T>
struct Functions;
FUNCTIONS(float, float32)
FUNCTIONS(double, float64)

// Calls work(pointer to a piece of `count` elements of type T, in their place or converted).
template <class T, class Work>
void with_piece(const void* x, int type, int64_t begin, int64_t count, const Work& work) {
    if (type == kOwnType<T>) {
        work(static_cast<const T*>(x) + begin);
    } else {
        T converted[kPiece];
        Functions<T>::convert(x, type, begin, count, converted);
        work(converted);
    }
}

template <class T>
int64_t find(const T* x, int64_t count, typename Type<T>::Bit bound, bool, int32_t first, int32_t* positions,
             T* values) {
    return Functions<T>::find(x, count, bound, first, positions, values);
}

#ifdef HAS_COMPRESS
template <>
int64_t find<float>(const float* x, int64_t count, int32_t bound, bool many, int32_t first, int32_t* positions,
                    float* values) {
    static const bool compresses = __builtin_cpu_supports("x86-64-v4");
    return compresses ? find_above_compressing(x, count, bound, many, first, positions, values)
                      : Functions<float>::find(x, count, bound, first, positions, values);
}
#endif

// Entries above a bound, as far as there is room, in ascending order. Each part of the work has its own share of the room.
template <class T, class Index>
class Collector {
public:
    // `values` may be null. Indices are counted from `first`.
    Collector(double threshold, int64_t first, Index* indices, T* values, int64_t room, int64_t parts)
        : bound_(limit_bits<T>(threshold)), first_(first), indices_(indices), values_(values), room_(room),
          numbers_(parts), last_(parts) {}

    // Those of a piece.
    void add(int64_t part, const T* piece, int64_t begin, int64_t count) {
        const int64_t start = start_of(part) + numbers_[part], left = start_of(part + 1) - start;
        const bool many = last_[part] > count / 128;
        if constexpr (std::is_same_v<Index, int32_t>) {
            if (left >= count + kSlack) {
                const auto first = static_cast<int32_t>(first_ + begin);
                last_[part] = find<T>(piece, count, bound_, many, first, indices_ + start, values_ + start);
                numbers_[part] += last_[part];
                return;
            }
        }
        int32_t positions[kPiece + kSlack];
        T values[kPiece + kSlack];
        last_[part] = find<T>(piece, count, bound_, many, 0, positions, values);
        const int64_t kept = std::min(last_[part], std::max<int64_t>(0, left));
        for (int64_t j = 0; j < kept; ++j) indices_[start + j] = static_cast<Index>(first_ + begin + positions[j]);
        if (values_ != nullptr) std::copy_n(values, kept, values_ + start);
        numbers_[part] += last_[part];
    }

    // Closes the gaps between the parts; how many entries are above the bound. They are there, or the first `room` of
    // them with one part, unless some part's are more than its share: then `complete` says no.
    int64_t finish() {
        int64_t end = 0, number = 0;
        for (int64_t part = 0; part < static_cast<int64_t>(numbers_.size()); ++part) {
            const int64_t start = start_of(part), kept = std::min(numbers_[part], start_of(part + 1) - start);
            std::copy_n(indices_ + start, kept, indices_ + end);
            if (values_ != nullptr) std::copy_n(values_ + start, kept, values_ + end);
            end += kept;
            number += numbers_[part];
        }
        complete = end == number;
        return number;
    }

    bool complete = false;

private:
    int64_t start_of(int64_t part) const { return room_ * part / static_cast<int64_t>(numbers_.size()); }

    const typename Type<T>::Bit bound_;
    const int64_t first_;
    Index* const indices_;
    T* const values_;
    const int64_t room_;
    // Found by each part, so far and in its last piece.
    std::vector<int64_t> numbers_, last_;
};

template <class T>
void accumulate(T* residual, T* velocity, const void* gradient, int type, int64_t n, double momentum, bool nesterov,
                int threads, hs_sums* sums, hs_above* above) {
    using F = Functions<T>;
    const T m = static_cast<T>(momentum);
    Collector<T, int32_t> collector(above->cut, above->first, above->indices, static_cast<T*>(above->values),
                                    above->room, parts_of(n, threads));
    sum_blocks(n, threads, sums, [&](int64_t part, int64_t begin, int64_t end, hs_sums& out) {
        Findings<T> findings;
        for (int64_t i = begin; i < end; i += kPiece) {
            const int64_t count = std::min(kPiece, end - i);
            with_piece<T>(gradient, type, i, count, [&](const T* g) {
                if (velocity == nullptr)
                    F::accumulate(residual + i, g, count, findings);
                else if (nesterov)
                    F::nesterov(residual + i, velocity + i, g, count, m, findings);
                else
                    F::momentum(residual + i, velocity + i, g, count, m, findings);
            });
            if (above->room > 0) collector.add(part, residual + i, i, count);
        }
        findings.sums.write(out);
        for (int64_t lane = 0; lane < kLanes<T>; ++lane) out.not_finite += findings.bad[lane];
    });
    above->found = collector.finish();
    above->complete = collector.complete;
}

template <class T>
void measure(const T* x, int64_t n, int threads, hs_sums* sums) {
    sum_blocks(n, threads, sums, [&](int64_t, int64_t begin, int64_t end, hs_sums& out) {
        Functions<T>::measure(x + begin, end - begin, out);
    });
}

template <class T>
void measure_tail(const T* x, int64_t n, double cut, bool with_logs, int threads, hs_sums* sums) {
    const auto block = with_logs ? Functions<T>::tail_logs : Functions<T>::tail;
    const auto bound = limit_bits<T>(cut);
    const double rounded = static_cast<double>(static_cast<T>(cut));
    sum_blocks(n, threads, sums, [&](int64_t, int64_t begin, int64_t end, hs_sums& out) {
        block(x + begin, end - begin, bound, rounded, out);
    });
}

template <class T>
void count_above(const T* x, int64_t n, const double* thresholds, int number, int threads, int64_t* counts) {
    std::vector<int64_t> partial(kMostThreads * kMostThresholds);
    in_parallel(n, threads, [&](int64_t part, int64_t first, int64_t end) {
        for (int64_t block = first; block < end; ++block)
            Functions<T>::count(x + block * kBlock, std::min(kBlock, n - block * kBlock), thresholds, number,
                                &partial[part * kMostThresholds]);
    });
    for (int j = 0; j < number; ++j) {
        counts[j] = 0;
        for (int64_t part = 0; part < kMostThreads; ++part) counts[j] += partial[part * kMostThresholds + j];
    }
}

template <class T>
int64_t select_above(const T* x, int64_t n, double threshold, int64_t* indices, int64_t room, int threads,
                     int* complete) {
    Collector<T, int64_t> collector(threshold, 0, indices, nullptr, room, parts_of(n, threads));
    in_parallel(n, threads, [&](int64_t part, int64_t first, int64_t end) {
        for (int64_t i = first * kBlock; i < std::min(n, end * kBlock); i += kPiece)
            collector.add(part, x + i, i, std::min(kPiece, n - i));
    });
    const int64_t found = collector.finish();
    *complete = collector.complete;
    return found;
}

bool in_range(const int64_t* indices, int64_t count, int64_t n) {
    return std::all_of(indices, indices + count, [n](int64_t index) { return 0 <= index && index < n; });
}

template <class T>
void take(T* x, const int64_t* indices, int64_t count, float* values) {
    constexpr double largest = std::numeric_limits<float>::max();
    for (int64_t i = 0; i < count; ++i) {
        T& entry = x[indices[i]];
        values[i] = static_cast<float>(std::min(std::max<double>(entry, -largest), largest));
        entry -= static_cast<T>(values[i]);
    }
}

template <>
void take<float>(float* x, const int64_t* indices, int64_t count, float* values) {
    for (int64_t i = 0; i < count; ++i) {
        values[i] = x[indices[i]];
        x[indices[i]] = 0;
    }
}

template <class T, class V>
void scatter_add(T* target, const int64_t* indices, const V* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) target[indices[i]] += static_cast<T>(values[i]);
}

bool ascends(const int64_t* indices, int64_t count) {
    return std::adjacent_find(indices, indices + count, std::greater_equal<>()) == indices + count;
}

template <class T>
void assemble(T* target, int64_t n, int parts, const hs_part* entries) {
    std::vector<int64_t> done(parts);
    for (int64_t begin = 0; begin < n; begin += kStretch) {
        const int64_t end = std::min(begin + kStretch, n);
        std::memset(target + begin, 0, (end - begin) * sizeof(T));
        for (int part = 0; part < parts; ++part) {
            const hs_part& of = entries[part];
            const int64_t first = done[part];
            const int64_t last = std::lower_bound(of.indices + first, of.indices + of.count, end) - of.indices;
            if (of.type == HS_FLOAT32)
                scatter_add(target, of.indices + first, static_cast<const float*>(of.values) + first, last - first);
            else
                scatter_add(target, of.indices + first, static_cast<const double*>(of.values) + first, last - first);
            done[part] = last;
        }
    }
}
}  // namespace

void hs_accumulate(void* residual, void* velocity, int type, const void* gradient, int gradient_type, int64_t n,
                   double momentum, int nesterov, int threads, hs_sums* sums, hs_above* above) {
    if (type == HS_FLOAT32)
        accumulate(static_cast<float*>(residual), static_cast<float*>(velocity), gradient, gradient_type, n, momentum,
                   nesterov != 0, threads, sums, above);
    else
        accumulate(static_cast<double*>(residual), static_cast<double*>(velocity), gradient, gradient_type, n, momentum,
                   nesterov != 0, threads, sums, above);
}

void hs_measure(const void* x, int type, int64_t n, int threads, hs_sums* sums) {
    if (type == HS_FLOAT32)
        measure(static_cast<const float*>(x), n, threads, sums);
    else
        measure(static_cast<const double*>(x), n, threads, sums);
}

void hs_measure_tail(const void* x, int type, int64_t n, double cut, int with_logs, int threads, hs_sums* sums) {
    if (type == HS_FLOAT32)
        measure_tail(static_cast<const float*>(x), n, cut, with_logs != 0, threads, sums);
    else
        measure_tail(static_cast<const double*>(x), n, cut, with_logs != 0, threads, sums);
}

void hs_counts(const void* x, int type, int64_t n, const double* thresholds, int number, int threads, int64_t* counts) {
    if (type == HS_FLOAT32)
        count_above(static_cast<const float*>(x), n, thresholds, number, threads, counts);
    else
        count_above(static_cast<const double*>(x), n, thresholds, number, threads, counts);
}

int hs_all_finite(const void* x, int type, int64_t n, int threads) {
    std::vector<char> bad(kMostThreads);
    in_parallel(n, threads, [&](int64_t part, int64_t first, int64_t end) {
        const int64_t last = std::min(n, end * kBlock);
        for (int64_t i = first * kBlock; i < last && !bad[part]; i += kPiece) {
            const int64_t count = std::min(kPiece, last - i);
            if (type == HS_FLOAT64)
                bad[part] = !Functions<double>::finite(static_cast<const double*>(x) + i, count);
            else
                with_piece<float>(x, type, i, count,
                                  [&](const float* piece) { bad[part] = !Functions<float>::finite(piece, count); });
        }
    });
    return std::none_of(bad.begin(), bad.end(), [](char one) { return one != 0; });
}

int64_t hs_select_above(const void* x, int type, int64_t n, double threshold, int64_t* indices, int64_t room,
                        int threads, int* complete) {
    if (type == HS_FLOAT32)
        return select_above(static_cast<const float*>(x), n, threshold, indices, room, threads, complete);
    return select_above(static_cast<const double*>(x), n, threshold, indices, room, threads, complete);
}

int hs_take(void* x, int type, int64_t n, const int64_t* indices, int64_t count, float* values) {
    if (!in_range(indices, count, n)) return 0;
    if (type == HS_FLOAT32)
        take(static_cast<float*>(x), indices, count, values);
    else
        take(static_cast<double*>(x), indices, count, values);
    return 1;
}

int hs_scatter_add(void* target, int type, int64_t n, const int64_t* indices, const void* values, int values_type,
                   int64_t count) {
    if (!in_range(indices, count, n)) return 0;
    const auto* floats = static_cast<const float*>(values);
    const auto* doubles = static_cast<const double*>(values);
    if (type == HS_FLOAT32)
        values_type == HS_FLOAT32 ? scatter_add(static_cast<float*>(target), indices, floats, count)
                                  : scatter_add(static_cast<float*>(target), indices, doubles, count);
    else
        values_type == HS_FLOAT32 ? scatter_add(static_cast<double*>(target), indices, floats, count)
                                  : scatter_add(static_cast<double*>(target), indices, doubles, count);
    return 1;
}

int hs_assemble(void* target, int type, int64_t n, int parts, const hs_part* entries) {
    for (int part = 0; part < parts; ++part) {
        const hs_part& of = entries[part];
        if (!in_range(of.indices, of.count, n) || !ascends(of.indices, of.count)) return 0;
    }
    if (type == HS_FLOAT32)
        assemble(static_cast<float*>(target), n, parts, entries);
    else
        assemble(static_cast<double*>(target), n, parts, entries);
    return 1;
}
