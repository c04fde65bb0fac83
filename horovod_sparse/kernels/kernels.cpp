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
#include <limits>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

// One build runs on every x86-64: the functions marked so are compiled for several generations of it, and the system's
// loader picks. Elsewhere the compiler's baseline has vectors of its own. (Other compilers learnt these names later.)
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(HOROVOD_SPARSE_PORTABLE)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
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

// Elements per partial sum, and the most of a gradient that is converted at once: within the first-level cache.
constexpr int64_t kBlock = 4096;
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
    Sum tail_total, tail_squares;
    Bits<T> tail_count = {};
    double tail_logs = 0;

    INLINE void add(Vector<T> x) {
        const Bits<T> bits = magnitude_bits<T>(x);
        total.add((Vector<T>)bits);
        squares.add_squares((Vector<T>)bits);
        count -= above<T>(bits, Bits<T>{});
        const Bits<T> larger = above<T>(bits, largest);
        largest = (bits & larger) | (largest & ~larger);
    }

    template <bool kLogs>
    INLINE void add_tail(Vector<T> x, Bits<T> limit, double cut) {
        const Bits<T> bits = magnitude_bits<T>(x), tail = above<T>(bits, limit);
        const auto magnitude = (Vector<T>)bits;
        tail_count -= tail;
        tail_total.add_excesses(magnitude, tail, cut, tail_squares);
        if (kLogs) {
            for (int64_t lane = 0; lane < kLanes<T>; ++lane)
                if (tail[lane]) tail_logs += std::log(static_cast<double>(magnitude[lane]) - cut);
        }
    }

    // Of kGroup vectors; lanes beyond the end are zero, which counts nowhere.
    template <bool kLogs>
    INLINE void add_group(const Vector<T>* x, Bits<T> limit, double cut) {
        Bits<T> either = {};
        for (int part = 0; part < kGroup; ++part) {
            add(x[part]);
            either |= limit - magnitude_bits<T>(x[part]);
        }
        // The sign bits of the differences say who is above; most groups have nobody above a cut worth its name.
        if (!any<T>(either >> (8 * sizeof(T) - 1))) return;
        for (int part = 0; part < kGroup; ++part) add_tail<kLogs>(x[part], limit, cut);
    }

    INLINE void write(hs_sums& sums) const {
        const auto magnitudes = (Vector<T>)largest;
        sums.total = total.value();
        sums.squares = squares.value();
        for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
            sums.count += count[lane];
            sums.tail_count += tail_count[lane];
            sums.largest = std::max<double>(sums.largest, magnitudes[lane]);
        }
        sums.tail_total = tail_total.value();
        sums.tail_squares = tail_squares.value();
        sums.tail_logs = tail_logs;
    }
};

void add_to(hs_sums& sums, const hs_sums& other) {
    sums.count += other.count;
    sums.total += other.total;
    sums.squares += other.squares;
    sums.largest = std::max(sums.largest, other.largest);
    sums.tail_count += other.tail_count;
    sums.tail_total += other.tail_total;
    sums.tail_squares += other.tail_squares;
    sums.tail_logs += other.tail_logs;
    sums.not_finite += other.not_finite;
}

// Calls work(part, first, end), block numbers, for parts that together are all blocks; each in a thread of its own.
template <class Work>
void in_parallel(int64_t n, int threads, const Work& work) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    const int64_t parts = std::max<int64_t>(1, std::min({int64_t{threads}, n / kLeastPerThread, kMostThreads}));
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

// Calls block(begin, count, sums) for every block and adds up the sums in the order of the blocks.
template <class Block>
void sum_blocks(int64_t n, int threads, hs_sums* sums, const Block& block) {
    std::vector<hs_sums> partial((n + kBlock - 1) / kBlock, hs_sums{});
    in_parallel(n, threads, [&](int64_t, int64_t first, int64_t end) {
        for (int64_t number = first; number < end; ++number) {
            const int64_t begin = number * kBlock;
            block(begin, std::min(kBlock, n - begin), partial[number]);
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

template <class T, class Update>
INLINE void accumulate_block(T* residual, T* velocity, const T* gradient, int64_t count, Update update,
                             double threshold, hs_sums& out) {
    const auto bound = limit_bits<T>(threshold);
    const Bits<T> limit = all_lanes<T>(bound), finite = all_lanes<T>(Type<T>::infinity - 1);
    const double cut = static_cast<double>(static_cast<T>(threshold));
    Sums<T> sums;
    Bits<T> bad = {};
    constexpr int64_t kStep = kGroup * kLanes<T>;
    const auto step = [&](T* r, T* v, const T* g) ALWAYS {
        Vector<T> updated[kGroup];
        for (int part = 0; part < kGroup; ++part) {
            const int64_t at = part * kLanes<T>;
            Vector<T> gradients = load<T>(g + at), velocities = Update::has_velocity ? load<T>(v + at) : Vector<T>{};
            const Bits<T> wrong = above<T>(magnitude_bits<T>(gradients), finite);
            bad -= wrong;
            gradients = (Vector<T>)((Bits<T>)gradients & ~wrong);
            updated[part] = update(load<T>(r + at), velocities, gradients);
            if (Update::has_velocity) store<T>(v + at, velocities);
            store<T>(r + at, updated[part]);
        }
        sums.template add_group<false>(updated, limit, cut);
    };
    int64_t i = 0;
    for (; i + kStep <= count; i += kStep) step(residual + i, velocity + i, gradient + i);
    if (i < count) {
        T r[kStep] = {}, v[kStep] = {}, g[kStep] = {};
        const size_t bytes = (count - i) * sizeof(T);
        std::memcpy(r, residual + i, bytes);
        if (Update::has_velocity) std::memcpy(v, velocity + i, bytes);
        std::memcpy(g, gradient + i, bytes);
        step(r, v, g);
        std::memcpy(residual + i, r, bytes);
        if (Update::has_velocity) std::memcpy(velocity + i, v, bytes);
    }
    sums.write(out);
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) out.not_finite += bad[lane];
}

template <class T, bool kLogs>
INLINE void measure_block(const T* x, int64_t count, double threshold, hs_sums& out) {
    const Bits<T> limit = all_lanes<T>(limit_bits<T>(threshold));
    const double cut = static_cast<double>(static_cast<T>(threshold));
    constexpr int64_t kStep = kGroup * kLanes<T>;
    Sums<T> sums;
    const auto step = [&](const T* from) ALWAYS {
        Vector<T> group[kGroup];
        for (int part = 0; part < kGroup; ++part) group[part] = load<T>(from + part * kLanes<T>);
        sums.template add_group<kLogs>(group, limit, cut);
    };
    int64_t i = 0;
    for (; i + kStep <= count; i += kStep) step(x + i);
    if (i < count) {
        T rest[kStep] = {};
        std::memcpy(rest, x + i, (count - i) * sizeof(T));
        step(rest);
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

// Appends the indices of the entries above the limit, which are those of `x` plus `begin`, while there are fewer than
// `capacity`; says how many entries are above the limit.
template <class T>
INLINE int64_t select_block(const T* x, int64_t begin, int64_t count, typename Type<T>::Bit bound, int64_t capacity,
                            std::vector<int64_t>& found) {
    constexpr int64_t kStep = 4 * kLanes<T>;
    const Bits<T> limit = all_lanes<T>(bound);
    int64_t indices[kBlock], number = 0;
    const auto scan = [&](int64_t from, int64_t end) ALWAYS {
        // Every index is written, and kept if it qualifies: no branch that would be mispredicted.
        for (int64_t i = from; i < end; ++i) {
            typename Type<T>::Bit bits;
            std::memcpy(&bits, x + i, sizeof bits);
            indices[number] = begin + i;
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
    found.insert(found.end(), indices, indices + std::min<int64_t>(number, capacity - found.size()));
    return number;
}

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
    CLONES static void NAME##_accumulate(T* r, const T* g, int64_t n, double cut, hs_sums& out) {                      \
        accumulate_block<T>(r, r, g, n, Plain<T>{}, cut, out);                                                         \
    }                                                                                                                  \
    CLONES static void NAME##_momentum(T* r, T* v, const T* g, int64_t n, T m, double cut, hs_sums& out) {             \
        accumulate_block<T>(r, v, g, n, Momentum<T>{m}, cut, out);                                                     \
    }                                                                                                                  \
    CLONES static void NAME##_nesterov(T* r, T* v, const T* g, int64_t n, T m, double cut, hs_sums& out) {             \
        accumulate_block<T>(r, v, g, n, Nesterov<T>{m}, cut, out);                                                     \
    }                                                                                                                  \
    CLONES static void NAME##_measure(const T* x, int64_t n, double cut, hs_sums& out) {                               \
        measure_block<T, false>(x, n, cut, out);                                                                       \
    }                                                                                                                  \
    CLONES static void NAME##_measure_logs(const T* x, int64_t n, double cut, hs_sums& out) {                          \
        measure_block<T, true>(x, n, cut, out);                                                                        \
    }                                                                                                                  \
    CLONES static void NAME##_count(const T* x, int64_t n, const double* thresholds, int number, int64_t* counts) {    \
        count_block<T>(x, n, thresholds, number, counts);                                                              \
    }                                                                                                                  \
    CLONES static int64_t NAME##_select(const T* x, int64_t begin, int64_t n, Type<T>::Bit bound, int64_t capacity,    \
                                        std::vector<int64_t>& found) {                                                 \
        return select_block<T>(x, begin, n, bound, capacity, found);                                                   \
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
        static constexpr auto measure_logs = NAME##_measure_logs;                                                      \
        static constexpr auto count = NAME##_count;                                                                    \
        static constexpr auto select = NAME##_select;                                                                  \
        static constexpr auto finite = NAME##_finite;                                                                  \
        static constexpr auto convert = NAME##_convert;                                                                \
    };

namespace {
template <class T>
struct Functions;
FUNCTIONS(float, float32)
FUNCTIONS(double, float64)

// Calls work(pointer to `count` elements of type T, in their place or converted).
template <class T, class Work>
void with_block(const void* x, int type, int64_t begin, int64_t count, const Work& work) {
    if (type == kOwnType<T>) {
        work(static_cast<const T*>(x) + begin);
    } else {
        T converted[kBlock];
        Functions<T>::convert(x, type, begin, count, converted);
        work(converted);
    }
}

template <class T>
void accumulate(T* residual, T* velocity, const void* gradient, int type, int64_t n, double momentum, bool nesterov,
                double cut, int threads, hs_sums* sums) {
    using F = Functions<T>;
    const T m = static_cast<T>(momentum);
    sum_blocks(n, threads, sums, [&](int64_t begin, int64_t count, hs_sums& out) {
        with_block<T>(gradient, type, begin, count, [&](const T* g) {
            if (velocity == nullptr)
                F::accumulate(residual + begin, g, count, cut, out);
            else if (nesterov)
                F::nesterov(residual + begin, velocity + begin, g, count, m, cut, out);
            else
                F::momentum(residual + begin, velocity + begin, g, count, m, cut, out);
        });
    });
}

template <class T>
void measure(const T* x, int64_t n, double cut, bool with_logs, int threads, hs_sums* sums) {
    const auto block = with_logs ? Functions<T>::measure_logs : Functions<T>::measure;
    sum_blocks(n, threads, sums,
               [&](int64_t begin, int64_t count, hs_sums& out) { block(x + begin, count, cut, out); });
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
int64_t select_above(const T* x, int64_t n, double threshold, int64_t* indices, int64_t capacity, int threads) {
    const auto bound = limit_bits<T>(threshold);
    std::vector<std::vector<int64_t>> found(kMostThreads);
    std::vector<int64_t> numbers(kMostThreads);
    in_parallel(n, threads, [&](int64_t part, int64_t first, int64_t end) {
        for (int64_t block = first; block < end; ++block)
            numbers[part] += Functions<T>::select(x + block * kBlock, block * kBlock,
                                                  std::min(kBlock, n - block * kBlock), bound, capacity, found[part]);
    });
    int64_t written = 0;
    for (const auto& part : found) {
        const int64_t room = std::min<int64_t>(part.size(), capacity - written);
        std::copy_n(part.begin(), room, indices + written);
        written += room;
    }
    return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
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
}  // namespace

void hs_accumulate(void* residual, int type, const void* gradient, int gradient_type, int64_t n, double cut,
                   int threads, hs_sums* sums) {
    if (type == HS_FLOAT32)
        accumulate<float>(static_cast<float*>(residual), nullptr, gradient, gradient_type, n, 0, false, cut, threads,
                          sums);
    else
        accumulate<double>(static_cast<double*>(residual), nullptr, gradient, gradient_type, n, 0, false, cut, threads,
                           sums);
}

void hs_accumulate_velocity(void* residual, void* velocity, int type, const void* gradient, int gradient_type,
                            int64_t n, double momentum, int nesterov, double cut, int threads, hs_sums* sums) {
    if (type == HS_FLOAT32)
        accumulate<float>(static_cast<float*>(residual), static_cast<float*>(velocity), gradient, gradient_type, n,
                          momentum, nesterov != 0, cut, threads, sums);
    else
        accumulate<double>(static_cast<double*>(residual), static_cast<double*>(velocity), gradient, gradient_type, n,
                           momentum, nesterov != 0, cut, threads, sums);
}

void hs_measure(const void* x, int type, int64_t n, double cut, int with_logs, int threads, hs_sums* sums) {
    if (type == HS_FLOAT32)
        measure(static_cast<const float*>(x), n, cut, with_logs != 0, threads, sums);
    else
        measure(static_cast<const double*>(x), n, cut, with_logs != 0, threads, sums);
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
        for (int64_t block = first; block < end && !bad[part]; ++block) {
            const int64_t begin = block * kBlock, count = std::min(kBlock, n - begin);
            if (type == HS_FLOAT64)
                bad[part] = !Functions<double>::finite(static_cast<const double*>(x) + begin, count);
            else
                with_block<float>(x, type, begin, count,
                                  [&](const float* block) { bad[part] = !Functions<float>::finite(block, count); });
        }
    });
    return std::none_of(bad.begin(), bad.end(), [](char one) { return one != 0; });
}

int64_t hs_select_above(const void* x, int type, int64_t n, double threshold, int64_t* indices, int64_t capacity,
                        int threads) {
    if (type == HS_FLOAT32)
        return select_above(static_cast<const float*>(x), n, threshold, indices, capacity, threads);
    return select_above(static_cast<const double*>(x), n, threshold, indices, capacity, threads);
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
