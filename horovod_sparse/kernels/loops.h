// The loops over a piece of an array, in vectors of WIDTH bytes. variants.h includes this file once for each variant, within
// the variant's namespace and with its instructions allowed. Therefore it has no guard. It uses nothing of the standard
// library, which would be compiled for these instructions too and then run on processors without them.
//
// Sums do not depend on the width: element i of a piece belongs to chain i % 8, and each chain adds its elements in order.

namespace detail {

template <class T>
struct Vectors {
    typedef T Vector __attribute__((vector_size(WIDTH)));
    typedef typename Type<T>::Bit Bits __attribute__((vector_size(WIDTH)));
};
template <class T>
using Vector = typename Vectors<T>::Vector;
template <class T>
using Bits = typename Vectors<T>::Bits;
using Wide = Vector<double>;

template <class T>
constexpr int kLanes = WIDTH / sizeof(T);
// Vectors that hold the chains' sums.
constexpr int kParts = kChains * sizeof(double) / WIDTH;

template <class V, class T>
INLINE V load(const T* from) {
    V vector;
    __builtin_memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class V, class T>
INLINE void store(T* to, V vector) {
    __builtin_memcpy(to, &vector, sizeof vector);
}

template <class T>
INLINE Bits<T> magnitude_bits(Vector<T> x) {
    return (Bits<T>)x & Type<T>::magnitude;
}

template <class V>
INLINE V larger(V a, V b) {
    return a > b ? a : b;
}

// --- operations that the compiler's own vectors do not have, or that are slow there ---

#if WIDTH == 64
INLINE void widen(Vector<float> x, Wide& low, Wide& high) {
    // Does not use the function for it, because GCC 12 warns about that function.
    typedef float Half __attribute__((vector_size(32)));
    Half halves[2];
    __builtin_memcpy(halves, &x, sizeof x);
    low = __builtin_convertvector(halves[0], Wide);
    high = __builtin_convertvector(halves[1], Wide);
}
INLINE bool any_above(Bits<float> bits, Bits<float> limit) {
    return _mm512_cmpgt_epi32_mask((__m512i)bits, (__m512i)limit) != 0;
}
INLINE bool any_above(Bits<double> bits, Bits<double> limit) {
    return _mm512_cmpgt_epi64_mask((__m512i)bits, (__m512i)limit) != 0;
}

// Writes the lanes that are above the limit, and their positions. Returns their number. May overwrite all lanes of both.
INLINE int write_above(Vector<float> x, Bits<float> limit, int32_t position, int32_t* positions, float* values) {
    const __mmask16 mask = _mm512_cmpgt_epi32_mask((__m512i)magnitude_bits<float>(x), (__m512i)limit);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(mask, lanes + _mm512_set1_epi32(position)));
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(mask, (__m512)x));
    return __builtin_popcount(mask);
}
#elif WIDTH == 32
INLINE void widen(Vector<float> x, Wide& low, Wide& high) {
    low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
}
template <class B>
INLINE bool any_above(B bits, B limit) {
    return _mm256_movemask_epi8((__m256i)(bits > limit)) != 0;
}

INLINE int write_above(Vector<float> x, Bits<float> limit, int32_t position, int32_t* positions, float* values) {
    const int mask = _mm256_movemask_ps((__m256)(magnitude_bits<float>(x) > limit));
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSetLanes.of[mask])));
    store(positions, (Bits<float>)lanes + position);
    store(values, _mm256_permutevar8x32_ps((__m256)x, lanes));
    return __builtin_popcount(mask);
}
#else
#ifdef __SSE2__
INLINE void widen(Vector<float> x, Wide& low, Wide& high) {
    low = _mm_cvtps_pd(x);
    high = _mm_cvtps_pd(_mm_movehl_ps(x, x));
}
#else
INLINE void widen(Vector<float> x, Wide& low, Wide& high) {
    low = Wide{x[0], x[1]};
    high = Wide{x[2], x[3]};
}
#endif
template <class B>
INLINE bool any_above(B bits, B limit) {
    typedef int64_t Longs __attribute__((vector_size(16)));
    const auto both = (Longs)(bits > limit);
    return (both[0] | both[1]) != 0;
}
#endif

// Without such an instruction, writes every lane and keeps it if it is above: this avoids a branch that is mispredicted.
template <class T>
INLINE int write_above(Vector<T> x, Bits<T> limit, int32_t position, int32_t* positions, T* values) {
    const Bits<T> bits = magnitude_bits<T>(x);
    int number = 0;
    for (int lane = 0; lane < kLanes<T>; ++lane) {
        positions[number] = position + lane;
        values[number] = x[lane];
        number += bits[lane] > limit[lane];
    }
    return number;
}

// --- sums ---

// The sums of a piece in registers.
template <class T>
struct Running {
    Wide total[kParts], squares[kParts];
    Bits<T> count, largest;

    INLINE explicit Running(const Totals<T>& totals)
        : count(load<Bits<T>>(totals.count)), largest(load<Bits<T>>(totals.largest)) {
        for (int part = 0; part < kParts; ++part) {
            total[part] = load<Wide>(totals.total + part * kLanes<double>);
            squares[part] = load<Wide>(totals.squares + part * kLanes<double>);
        }
    }

    INLINE void write(Totals<T>& totals) const {
        for (int part = 0; part < kParts; ++part) {
            store(totals.total + part * kLanes<double>, total[part]);
            store(totals.squares + part * kLanes<double>, squares[part]);
        }
        store(totals.count, count);
        store(totals.largest, largest);
    }

    INLINE void add_wide(int part, Wide magnitudes) {
        total[part] += magnitudes;
        squares[part] += magnitudes * magnitudes;
    }

    // Adds vector `number` of a group: the excesses of its magnitudes over the cut, and how many are above the cut's bits.
    INLINE void add(int number, Bits<float> bits, Bits<float> limit, double cut) {
        Wide low, high;
        widen((Vector<float>)bits, low, high);
        add_wide(2 * number % kParts, low - cut);
        add_wide((2 * number + 1) % kParts, high - cut);
        count -= bits > limit;
    }
    INLINE void add(int number, Bits<double> bits, Bits<double> limit, double cut) {
        add_wide(number % kParts, (Wide)bits - cut);
        count -= bits > limit;
    }
};

// Calls work(number) for each vector of a group. Each call has its own code, in which the number is a constant.
template <class T, int kNumber = 0, class Work>
INLINE void each_vector(const Work& work) {
    if constexpr (kNumber < kGroup / kLanes<T>) {
        work(kNumber);
        each_vector<T, kNumber + 1>(work);
    }
}

// Returns a group that has `left` elements before the end of the array: itself, or a copy in `rest` that ends in zeros.
template <class T>
INLINE const T* whole_group(const T* group, int64_t left, T* rest) {
    if (left >= kGroup) return group;
    __builtin_memset(rest, 0, kGroup * sizeof(T));
    __builtin_memcpy(rest, group, left * sizeof(T));
    return rest;
}

// --- the loops ---

// Returns the new residual and updates the velocity.
template <class T, Form kForm>
INLINE Vector<T> updated(Vector<T> residual, Vector<T>& velocity, Vector<T> gradient, Rates<T> rates) {
    if (kForm == kPlain) return residual + gradient;
    if (kForm != kMoving) return residual + gradient * rates.rate;
    velocity = velocity * rates.momentum + gradient;
    return residual + velocity * rates.rate;
}

// Returns how far entries have moved from their start, as hs_part says.
template <class T>
INLINE Vector<T> distance(Vector<T> now, Vector<T> start, Rates<T> rates) {
    return (now - start) * rates.growth + start * rates.pull;
}

// Copies the finite entries of a group of a gradient, and zeros for the others. Returns the number of the others.
template <class T>
__attribute__((noinline)) int64_t clean(const T* gradient, T* cleaned) {
    int64_t bad = 0;
    for (int i = 0; i < kGroup; ++i) {
        const bool good = (bits_as<typename Type<T>::Bit>(gradient[i]) & Type<T>::magnitude) < Type<T>::infinity;
        cleaned[i] = good ? gradient[i] : T{0};
        bad += !good;
    }
    return bad;
}

// Returns a mask with a bit for each group that has an entry above the bound. `kWanted` is hs_notes.wanted. `second` is the
// velocity, or where the gradient's entries began.
template <class T, int kWanted, Form kForm>
uint32_t accumulate(T* residual, T* second, const T* gradient, int64_t count, bool asks, Rates<T> rates,
                    typename Type<T>::Bit bound, Totals<T>& totals) {
    constexpr int kVectors = kGroup / kLanes<T>;
    constexpr bool kVelocity = kForm == kMoving, kSecond = kForm >= kMoving;
    Running<T> sums(totals);
    const Bits<T> limit = Bits<T>{} + bound;
    uint32_t groups = 0;
    const auto do_group = [&](int64_t number, T* r, T* s, const T* g) ALWAYS {
        Vector<T> now[kVectors], velocities[kVectors];
        const auto given = [&](int at) ALWAYS {
            const auto vector = load<Vector<T>>(g + at);
            return kForm == kMoved ? distance<T>(vector, load<Vector<T>>(s + at), rates) : vector;
        };
        const auto update = [&](const auto& taken_in) ALWAYS {
            Bits<T> most = {};
            each_vector<T>([&](int part) ALWAYS {
                const int at = part * kLanes<T>;
                velocities[part] = kVelocity ? load<Vector<T>>(s + at) : Vector<T>{};
                now[part] = updated<T, kForm>(load<Vector<T>>(r + at), velocities[part], taken_in(at), rates);
                most = larger(most, magnitude_bits<T>(now[part]));
            });
            return most;
        };
        Bits<T> most = update(given);
        if (__builtin_expect(any_above(most, Bits<T>{} + (Type<T>::infinity - 1)), 0)) {
            // An entry of the gradient is not finite, or a sum has left the range of the type.
            T raw[kGroup], cleaned[kGroup];
            each_vector<T>([&](int part) ALWAYS { store(raw + part * kLanes<T>, given(part * kLanes<T>)); });
            totals.bad += clean(raw, cleaned);
            most = update([&](int at) ALWAYS { return load<Vector<T>>(cleaned + at); });
        }
        each_vector<T>([&](int part) ALWAYS {
            if (kVelocity) store(s + part * kLanes<T>, velocities[part]);
            store(r + part * kLanes<T>, now[part]);
            if (kWanted == 1) sums.count -= magnitude_bits<T>(now[part]) > Bits<T>{};
            if (kWanted == 2) sums.add(part, magnitude_bits<T>(now[part]), Bits<T>{}, 0.0);
        });
        sums.largest = larger(sums.largest, most);
        groups |= uint32_t{any_above(most, limit)} << number;
    };
    int64_t number = 0;
    for (; (number + 1) * kGroup <= count; ++number) {
        const int64_t i = number * kGroup;
        for (int line = 0; asks && line < kGroup; line += 64 / static_cast<int>(sizeof(T))) {
            ask_for_what_follows(residual + i + line);
            ask_for_what_follows(gradient + i + line);
            if (kSecond) ask_for_what_follows(second + i + line);
        }
        do_group(number, residual + i, second + i, gradient + i);
    }
    if (number * kGroup < count) {
        // Lanes beyond the end are zero, which adds to no result.
        const int64_t i = number * kGroup;
        const size_t bytes = (count - i) * sizeof(T);
        T r[kGroup] = {}, s[kGroup] = {}, g[kGroup] = {};
        __builtin_memcpy(r, residual + i, bytes);
        if (kSecond) __builtin_memcpy(s, second + i, bytes);
        __builtin_memcpy(g, gradient + i, bytes);
        do_group(number, r, s, g);
        __builtin_memcpy(residual + i, r, bytes);
        if (kVelocity) __builtin_memcpy(second + i, s, bytes);
    }
    sums.write(totals);
    return groups;
}

// Adds up magnitude - cut where that is positive. `bound` holds the cut's bits, and the cut is finite.
template <class T, bool kLogs>
void measure(const T* x, int64_t count, typename Type<T>::Bit bound, double cut, Totals<T>& totals) {
    Running<T> sums(totals);
    const Bits<T> limit = Bits<T>{} + bound;
    for (int64_t i = 0; i < count; i += kGroup) {
        T rest[kGroup];
        const T* const group = whole_group(x + i, count - i, rest);
        each_vector<T>([&](int part) ALWAYS {
            const Bits<T> bits = magnitude_bits<T>(load<Vector<T>>(group + part * kLanes<T>));
            // Magnitudes that are not above the cut are replaced by the cut, and add nothing.
            sums.add(part, larger(bits, limit), limit, cut);
            sums.largest = larger(sums.largest, bits);
            if (kLogs && any_above(bits, limit)) {
                for (int lane = 0; lane < kLanes<T>; ++lane)
                    if (bits[lane] > bound)
                        totals.logs += __builtin_log(static_cast<double>(((Vector<T>)bits)[lane]) - cut);
            }
        });
    }
    sums.write(totals);
}

// Returns how many entries are above the bound.
template <class T>
int64_t count_above(const T* x, int64_t count, typename Type<T>::Bit bound) {
    Bits<T> found = {};
    int64_t i = 0, number = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) found -= magnitude_bits<T>(load<Vector<T>>(x + i)) > bound;
    for (int lane = 0; lane < kLanes<T>; ++lane) number += found[lane];
    for (; i < count; ++i) number += (bits_as<typename Type<T>::Bit>(x[i]) & Type<T>::magnitude) > bound;
    return number;
}

// Counts the digits, from bit `shift` on, of what magnitudes in [low, last] are beyond `low`.
template <class T>
void count_digits(const T* x, int64_t count, typename Type<T>::Bit low, typename Type<T>::Bit last, int shift,
                  Digits& digits) {
    using Bit = typename Type<T>::Bit;
    int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup) {
        Bit group[kGroup];
        Bits<T> some = {};
        each_vector<T>([&](int part) ALWAYS {
            const Bits<T> bits = magnitude_bits<T>(load<Vector<T>>(x + i + part * kLanes<T>));
            const Bits<T> inside = (bits >= low) & (bits <= last);
            store(group + part * kLanes<T>, ((bits - low) >> shift & inside) | (Digits::kOther & ~inside));
            some |= inside & 1;
        });
        if (!any_above(some, Bits<T>{})) continue;
        for (int one = 0; one < kGroup; ++one) ++digits.banks[one % Digits::kBanks][group[one]];
    }
    for (; i < count; ++i) {
        const Bit bits = bits_as<Bit>(x[i]) & Type<T>::magnitude;
        if (low <= bits && bits <= last) ++digits.banks[0][(bits - low) >> shift];
    }
}

// Returns a mask with a bit for each group of a piece that has an entry above the bound.
template <class T>
uint32_t groups_above(const T* x, int64_t count, typename Type<T>::Bit bound) {
    const Bits<T> limit = Bits<T>{} + bound;
    uint32_t groups = 0;
    for (int64_t number = 0; number * kGroup < count; ++number) {
        Bits<T> most = {};
        T rest[kGroup];
        const T* const group = whole_group(x + number * kGroup, count - number * kGroup, rest);
        each_vector<T>([&](int part) ALWAYS {
            most = larger(most, magnitude_bits<T>(load<Vector<T>>(group + part * kLanes<T>)));
        });
        groups |= uint32_t{any_above(most, limit)} << number;
    }
    return groups;
}

// Writes the entries of these groups that are above the bound, and their positions, counted from `first`. Returns their number.
// All are above a negative bound.
template <class T>
int64_t find(const T* x, int64_t count, uint32_t groups, typename Type<T>::Bit bound, int32_t first, int32_t* positions,
             T* values) {
    const Bits<T> limit = Bits<T>{} + bound;
    int64_t number = 0;
    for (; groups != 0; groups &= groups - 1) {
        const int32_t begin = kGroup * __builtin_ctz(groups);
        T rest[kGroup];
        const T* const group = whole_group(x + begin, count - begin, rest);
        for (int at = 0; at < kGroup; at += kLanes<T>) {
            const auto vector = load<Vector<T>>(group + at);
            const bool lane_by_lane = WIDTH < 32 || sizeof(T) > sizeof(float);
            if (lane_by_lane && !any_above(magnitude_bits<T>(vector), limit)) continue;
            number += write_above(vector, limit, first + begin + at, positions + number, values + number);
        }
    }
    // The zeros behind the last entry may be above the bound too.
    while (number > 0 && static_cast<uint32_t>(positions[number - 1]) - static_cast<uint32_t>(first) >= count) --number;
    return number;
}

template <class T>
void convert(const void* gradient, int type, int64_t begin, int64_t count, T* to) {
    const auto each = [&](const auto* from, const auto& number_of) ALWAYS {
        for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(number_of(from[begin + i]));
    };
    if (type == HS_FLOAT32)
        each(static_cast<const float*>(gradient), [](float number) ALWAYS { return number; });
    else if (type == HS_FLOAT64)
        each(static_cast<const double*>(gradient), [](double number) ALWAYS { return number; });
    else if (type == HS_BFLOAT16)
        each(static_cast<const uint16_t*>(gradient), [](uint16_t half) ALWAYS { return from_bfloat16(half); });
    else
        each(static_cast<const uint16_t*>(gradient), [](uint16_t half) ALWAYS { return from_float16(half); });
}

template <class T>
constexpr Loops<T> loops() {
    return {{{accumulate<T, 0, kPlain>, accumulate<T, 1, kPlain>, accumulate<T, 2, kPlain>},
             {accumulate<T, 0, kRated>, accumulate<T, 1, kRated>, accumulate<T, 2, kRated>},
             {accumulate<T, 0, kMoving>, accumulate<T, 1, kMoving>, accumulate<T, 2, kMoving>},
             {accumulate<T, 0, kMoved>, accumulate<T, 1, kMoved>, accumulate<T, 2, kMoved>}},
            measure<T, false>, measure<T, true>, count_above<T>, count_digits<T>,
            groups_above<T>, find<T>, convert<T>};
}

}  // namespace detail

constexpr Variant variant{detail::loops<float>(), detail::loops<double>()};
