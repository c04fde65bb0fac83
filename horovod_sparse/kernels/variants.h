// The loops of loops.h for several processors. One variant is chosen when the program runs.

#pragma once

#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif
#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

namespace {

// What the loops need to know about a residual's type: the bits of its magnitudes.
template <class T>
struct Type {
    using Bit = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    static constexpr int mantissa = std::numeric_limits<T>::digits - 1;
    static constexpr Bit magnitude = std::numeric_limits<Bit>::max(), infinity = magnitude >> mantissa << mantissa;
};

static_assert(std::numeric_limits<float>::is_iec559 && std::numeric_limits<double>::is_iec559);

template <class To, class From>
INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Elements that are converted, changed and read again while they are in the first-level cache.
constexpr int64_t kPiece = 1024;
// Elements whose largest magnitude is compared with a cut. A piece has at most 32 groups.
constexpr int kGroup = 64;
// Number of sums that are added up side by side.
constexpr int kChains = 8;
// The loops may write up to this many more entries than they find.
constexpr int64_t kSlack = 16;

// How often each value of a digit occurs. Neighbours are counted in different banks: equal ones would wait for each other.
constexpr int kDigitBits = 11;
struct Digits {
    static constexpr int kBanks = 4, kOther = 1 << kDigitBits;
    // The last one is for entries that are not counted.
    uint32_t banks[kBanks][kOther + 1];

    int64_t number(int64_t digit) const {
        int64_t sum = 0;
        for (const auto& bank : banks) sum += bank[digit];
        return sum;
    }
};

// The sums of a block.
template <class T>
struct alignas(64) Totals {
    using Bit = typename Type<T>::Bit;
    double total[kChains] = {}, squares[kChains] = {};
    // One number for each lane of a vector.
    Bit count[64 / sizeof(T)] = {}, largest[64 / sizeof(T)] = {};
    double logs = 0;
    // Number of entries of the gradient that were not finite.
    int64_t bad = 0;

    void write(hs_sums& sums) const {
        for (int chain = 0; chain < kChains; ++chain) {
            sums.total += total[chain];
            sums.squares += squares[chain];
        }
        const Bit most = *std::max_element(std::begin(largest), std::end(largest));
        sums.largest = std::max<double>(sums.largest, bits_as<T>(most));
        for (const Bit lane : count) sums.count += lane;
        sums.logs += logs;
    }
};

// What velocities and additions to the residual are multiplied by, and what the start of what has moved is.
template <class T>
struct Rates {
    T momentum, rate, growth, pull;
};

// How a gradient gets into the residual: as it is, times the rate, through the velocity, or as the distance from its start.
// Some processors take ten times as long for a product of denormal numbers, also if the other factor is 1.
enum Form { kPlain, kRated, kMoving, kMoved, kForms };

// The loops over a piece or a block; loops.h says what they do.
template <class T>
struct Loops {
    using Bit = typename Type<T>::Bit;
    // The second array is the velocity, or the start.
    using Accumulate = uint32_t(T*, T*, const T*, int64_t, bool, Rates<T>, Bit, Totals<T>&);
    using Measure = void(const T*, int64_t, Bit, double, Totals<T>&);
    // The second index is hs_notes.wanted.
    Accumulate* accumulate[kForms][3];
    Measure *measure, *measure_with_logs;
    int64_t (*count_above)(const T*, int64_t, Bit);
    void (*count_digits)(const T*, int64_t, Bit, Bit, int, Digits&);
    uint32_t (*groups_above)(const T*, int64_t, Bit);
    int64_t (*find)(const T*, int64_t, uint32_t, Bit, int32_t, int32_t*, T*);
    void (*convert)(const void*, int, int64_t, int64_t, T*);
};

struct Variant : Loops<float>, Loops<double> {};

// Intel's own prefetching ends at the end of a page, so this reaches one page ahead: further ahead, arrays that fit into the
// last-level cache are slower. Prefetching an address that is not mapped does no harm.
INLINE void ask_for_what_follows(const void* here) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(here) + (1 << 12)));
}

INLINE float from_bfloat16(uint16_t bits) {
    return bits_as<float>(uint32_t{bits} << 16);
}

INLINE float from_float16(uint16_t half) {
    const uint32_t sign = uint32_t{half & 0x8000u} << 16, magnitude = half & 0x7fffu;
    // Denormal halves are made from integers: a processor that is set to flush denormal floats would read those as zero.
    const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    // The exponent of other halves is moved into float32's place and its bias is corrected, twice for infinity and NaN.
    // This uses masks, because compilers do not vectorize a branch.
    const uint32_t normal = -uint32_t{magnitude >= 0x0400u}, infinite = -uint32_t{magnitude >= 0x7c00u};
    const uint32_t moved = (magnitude << 13) + 0x38000000u + (infinite & 0x38000000u);
    return bits_as<float>(sign | (normal & moved) | (~normal & bits_as<uint32_t>(small)));
}

// --- the variants: the width of their vectors, and the instructions that the compiler may use ---

#define WIDTH 16
namespace baseline {
#include "loops.h"
}
#undef WIDTH

#ifdef __x86_64__
// For every mask of eight lanes: the lanes that are set, in order.
struct SetLanes {
    uint8_t of[256][8];
    constexpr SetLanes() : of() {
        for (int mask = 0; mask < 256; ++mask) {
            int number = 0;
            for (int lane = 0; lane < 8; ++lane)
                if (mask >> lane & 1) of[mask][number++] = static_cast<uint8_t>(lane);
        }
    }
};
constexpr SetLanes kSetLanes;

#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define ALLOW(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_ALLOW PRAGMA(clang attribute pop)
#else
#define ALLOW(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_ALLOW PRAGMA(GCC pop_options)
#endif

ALLOW("avx2,fma,bmi,bmi2,popcnt")
#define WIDTH 32
namespace avx2 {
#include "loops.h"
}
#undef WIDTH
END_ALLOW

ALLOW("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2,popcnt")
#define WIDTH 64
namespace avx512 {
#include "loops.h"
}
#undef WIDTH
END_ALLOW

bool runs_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}
#endif

struct Named {
    const char* name;
    const Variant* variant;
    // Whether this processor has the instructions.
    bool (*runs)();
};

// The fastest first.
const Named kVariants[] = {
#ifdef __x86_64__
    {"avx512", &avx512::variant,
     [] {
         return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vl");
     }},
    {"avx2", &avx2::variant, runs_avx2},
#endif
#ifdef __aarch64__
    {"neon", &baseline::variant, [] { return true; }},
#else
    {"baseline", &baseline::variant, [] { return true; }},
#endif
};

std::atomic<const Variant*> chosen{&baseline::variant};

// Returns whether asking ahead saves time here. On an AMD EPYC a step took up to a third longer with it.
bool helps_to_ask_ahead() {
#ifdef __x86_64__
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

// Whether the loops ask for what follows.
std::atomic<bool> asks_ahead{helps_to_ask_ahead()};

template <class T>
const Loops<T>& loops() {
    return *chosen.load(std::memory_order_relaxed);
}

}  // namespace
