// The array operations that read or write whole residuals, at the speed of the memory. This file includes no header of Python,
// PyTorch or TensorFlow, so that one build serves them all. Every function has its twin in horovod_sparse/numpy/ops.py.
//
// Sums are float64, in chains and blocks whose order is fixed: they have the same bits on every run, on every processor, with
// every variant and with any number of threads. Magnitudes are compared by their bits. Bits have the same order as the numbers,
// denormal ones too, whatever the processor is set to do with those.

#include "search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

// Elements that are set to zero, and then added to, while they are in the second-level cache.
constexpr int64_t kStretch = 1 << 14;
// The index in rows of a message that are not in use, and in the first row of a worker whose gradient is not finite.
constexpr int32_t kPadding = -1, kNotFinite = -2, kBadCounts = -3;
// Entries that are asked for before they are needed.
constexpr int64_t kAhead = 32;

void add_to(hs_sums& sums, const hs_sums& other) {
    sums.count += other.count;
    sums.total += other.total;
    sums.squares += other.squares;
    sums.largest = std::max(sums.largest, other.largest);
    sums.logs += other.logs;
}

// Calls block(part, begin, end, sums) for every block, and returns all sums, added up in the order of the blocks.
template <class Block>
hs_sums sum_blocks(int64_t n, int threads, const Block& block) {
    std::vector<hs_sums> partial((n + kBlock - 1) / kBlock, hs_sums{});
    in_parallel(n, threads, [&](int64_t part, int64_t first, int64_t end) {
        for (int64_t number = first; number < end; ++number) {
            const int64_t begin = number * kBlock;
            block(part, begin, std::min(begin + kBlock, n), partial[number]);
        }
    });
    hs_sums sums{};
    for (const auto& one : partial) add_to(sums, one);
    return sums;
}

// Sets infinite entries to the largest number of the type, and returns their number.
template <class T>
int64_t keep_finite(T* x, int64_t n) {
    int64_t number = 0;
    for (T* entry = x; entry != x + n; ++entry) {
        if (std::isfinite(*entry)) continue;
        *entry = std::copysign(std::numeric_limits<T>::max(), *entry);
        ++number;
    }
    return number;
}

// Takes in one gradient. `residual` and `velocity` point to its part.
template <class T>
void accumulate(T* residual, T* velocity, hs_part& gradient, Rates<T> rates, int threads, hs_notes& notes) {
    const bool has_start = gradient.start != 0;
    const Form form = has_start ? kMoved : velocity != nullptr ? kMoving : rates.rate == 1 ? kPlain : kRated;
    rates.growth = static_cast<T>(gradient.growth);
    rates.pull = static_cast<T>(gradient.pull);
    const auto loop = loops<T>().accumulate[form][notes.wanted];
    const bool asks = asks_ahead.load(std::memory_order_relaxed);
    constexpr int own_type = sizeof(T) == 4 ? HS_FLOAT32 : HS_FLOAT64;
    const auto piece_at = [&](uintptr_t address, int64_t begin, int64_t count, T* room) -> const T* {
        const void* const given = reinterpret_cast<const void*>(address);
        if (gradient.type == own_type) return static_cast<const T*>(given) + begin;
        loops<T>().convert(given, gradient.type, begin, count, room);
        return room;
    };
    const int64_t n = gradient.n, parts = parts_of(n, threads);
    const int64_t room = notes.complete ? notes.room - notes.found : 0;
    std::vector<int64_t> not_finite(parts), numbers(parts);
    T* const values = static_cast<T*>(notes.values) + notes.found;
    Collector<T> collector{limit_bits<T>(notes.cut), gradient.first, notes.indices + notes.found, values, room, numbers};
    const hs_sums sums = sum_blocks(n, threads, [&](int64_t part, int64_t begin, int64_t end, hs_sums& out) {
        Totals<T> totals;
        for (int64_t i = begin; i < end; i += kPiece) {
            const int64_t count = std::min(kPiece, end - i);
            T converted[kPiece], begun[kPiece];
            const T* const piece = piece_at(gradient.address, i, count, converted);
            T* second = velocity == nullptr ? nullptr : velocity + i;
            // It is only read.
            if (has_start) second = const_cast<T*>(piece_at(gradient.start, i, count, begun));
            const uint32_t groups = loop(residual + i, second, piece, count, asks, rates, collector.bound, totals);
            if (room > 0) collector.add(part, residual + i, i, count, groups);
        }
        totals.write(out);
        not_finite[part] += totals.bad;
    });
    gradient.not_finite = std::accumulate(not_finite.begin(), not_finite.end(), int64_t{0});
    if (!std::isfinite(sums.largest)) {
        gradient.not_finite += keep_finite(residual, n);
        if (velocity != nullptr) keep_finite(velocity, n);
        notes.valid = 0;
    }
    add_to(notes.sums, sums);
    notes.found += collector.finish();
    // Without room, entries may have been missed.
    notes.complete = room > 0 && collector.complete;
    gradient.found = notes.found;
}

template <class T>
hs_sums measure(const T* x, int64_t n, double cut, bool with_logs, int threads) {
    const auto loop = with_logs ? loops<T>().measure_with_logs : loops<T>().measure;
    const double rounded = static_cast<double>(static_cast<T>(cut));
    if (!std::isfinite(rounded)) return {};
    return sum_blocks(n, threads, [&](int64_t, int64_t begin, int64_t end, hs_sums& out) {
        Totals<T> totals;
        loop(x + begin, end - begin, limit_bits<T>(cut), rounded, totals);
        totals.write(out);
    });
}

// Returns the entry rounded to float32, and subtracts it from the entry.
float take_out(double& entry) {
    constexpr double largest = std::numeric_limits<float>::max();
    const auto value = static_cast<float>(std::min(std::max(entry, -largest), largest));
    entry -= static_cast<double>(value);
    return value;
}

float take_out(float& entry) {
    const float value = entry;
    entry = 0;
    return value;
}

void write_padding(hs_pair* message, int64_t row, int64_t capacity) {
    std::fill(message + row, message + capacity, hs_pair{kPadding, 0});
}

// Message 4 in memory: see horovod_sparse/exchange/wire.py.
struct Packed {
    int16_t* header;
    uint8_t *lower, *upper, *codes;

    Packed(int32_t* message, int64_t length, int64_t chunks) : header(reinterpret_cast<int16_t*>(message)) {
        const int64_t numbers = (3 * chunks + 1) / 2, room = (length - numbers) / 7 * 16;
        lower = reinterpret_cast<uint8_t*>(message + numbers);
        upper = lower + room;
        codes = upper + room / 2;
    }
};

constexpr int64_t kChunkBits = 12;

// The bits of the level of some magnitudes of a chunk, by their sum and extremes.
struct Level {
    double sum = 0, largest = 0, smallest = std::numeric_limits<double>::infinity();
    int64_t count = 0;

    void add(double magnitude) {
        sum += magnitude;
        largest = std::max(largest, magnitude);
        smallest = std::min(smallest, magnitude);
        ++count;
    }

    uint32_t bits() const {
        if (count == 0) return 0;
        const double level = std::min(sum / static_cast<double>(count), 2 * smallest);
        if (largest > 32768 * level) return 0;
        return bits_as<uint32_t>(static_cast<float>(level)) & 0xffff0000u;
    }
};

double magnitude_of(const hs_pair& entry) { return std::abs(static_cast<double>(entry.value)); }

template <class T>
void write_packed(T* x, int64_t chunks, hs_pair* message, int64_t capacity, int32_t* packed, int64_t length) {
    std::memset(packed, 0, length * sizeof *packed);
    const Packed to(packed, length, chunks);
    for (int64_t row = 0, end; row < capacity && message[row].index >= 0; row = end) {
        const int32_t chunk = message[row].index >> kChunkBits;
        double sum = 0;
        for (end = row; end < capacity && message[end].index >= 0 && message[end].index >> kChunkBits == chunk; ++end)
            sum += magnitude_of(message[end]);
        const double mean = sum / static_cast<double>(end - row);
        Level levels[2];
        for (int64_t one = row; one < end; ++one) {
            const double magnitude = magnitude_of(message[one]);
            levels[magnitude > mean].add(magnitude);
        }
        const uint32_t bits[] = {levels[0].bits(), levels[1].bits()};
        to.header[chunk] = static_cast<int16_t>(end - row);
        for (const int64_t size : {0, 1}) to.header[chunk + (1 + size) * chunks] = static_cast<int16_t>(bits[size] >> 16);
        for (int64_t one = row; one < end; ++one) {
            auto& [index, value] = message[one];
            const uint32_t is_large = magnitude_of(message[one]) > mean, sign = bits_as<uint32_t>(value) >> 31;
            const uint32_t position = index & 0xfff;
            const float sent = bits_as<float>(bits[is_large] | sign << 31);
            x[index] += value - sent;
            value = sent;
            to.lower[one] = static_cast<uint8_t>(position);
            to.upper[one / 2] |= static_cast<uint8_t>(position >> 8 << 4 * (one % 2));
            to.codes[one / 4] |= static_cast<uint8_t>((sign | is_large << 1) << 2 * (one % 4));
        }
    }
    if (message[0].index == kNotFinite) to.header[0] = kNotFinite;
}

// Writes the message of pairs that a packed one stands for.
void unquantize(const Packed& from, int64_t chunks, hs_pair* message, int64_t capacity) {
    const auto is_bad = [](int16_t count) { return count < 0; };
    int64_t row = 0;
    const bool good = std::none_of(from.header, from.header + chunks, is_bad) &&
                      std::accumulate(from.header, from.header + chunks, int64_t{0}) <= capacity;
    for (int64_t chunk = 0; good && chunk < chunks; ++chunk)
        for (const int64_t end = row + from.header[chunk]; row < end; ++row) {
            const int32_t upper = from.upper[row / 2] >> 4 * (row % 2) & 0xf;
            const uint32_t code = from.codes[row / 4] >> 2 * (row % 4) & 3;
            const uint32_t level = static_cast<uint16_t>(from.header[chunk + (1 + (code >> 1)) * chunks]);
            const int32_t index = static_cast<int32_t>(chunk << kChunkBits) + (upper << 8 | from.lower[row]);
            message[row] = {index, bits_as<float>(level << 16 | code << 31)};
        }
    write_padding(message, row, capacity);
    if (!good) message[0].index = from.header[0] == kNotFinite ? kNotFinite : kBadCounts;
}

// The rows of a message of pairs that belong to a target: [from, to).
struct Range {
    const hs_pair *from, *to;

    // The message's indices must ascend.
    Range(const hs_pair* rows, int64_t used, int64_t first, int64_t n) {
        const auto is_below = [](const hs_pair& row, int64_t bound) { return row.index < bound; };
        from = std::lower_bound(rows, rows + used, first, is_below);
        to = std::lower_bound(from, rows + used, first + n, is_below);
    }

    // Returns whether the indices of these rows ascend and are all in the target.
    bool ascends(int64_t first, int64_t n) const {
        int64_t before = first - 1;
        for (const hs_pair* row = from; row != to; ++row) {
            if (row->index <= before) return false;
            before = row->index;
        }
        return before < first + n;
    }
};

// Adds the entries with indices in [begin, end) to a stretch, and removes them from the ranges.
template <class T>
void add_entries(T* stretch, int64_t begin, int64_t end, std::vector<Range>& ranges, float divisor) {
    for (Range& range : ranges) {
        // These are copies, because the stretch cannot overlap copies.
        const hs_pair *row = range.from, *const to = range.to;
        for (; row != to && row->index < end; ++row) stretch[row->index - begin] += static_cast<T>(row->value / divisor);
        range.from = row;
    }
}

int64_t rows_in_use(const int32_t* indices, int64_t stride, int64_t rows, int64_t n) {
    if (rows > 0 && indices[0] == kNotFinite) return kNotFinite;
    int64_t used = 0, before = -1;
    for (; used < rows && indices[used * stride] != kPadding; ++used) {
        const int64_t index = indices[used * stride];
        if (index <= before || index >= n) return -1;
        before = index;
    }
    for (int64_t row = used; row < rows; ++row)
        if (indices[row * stride] != kPadding) return -1;
    return used;
}

template <class T>
void assemble(T* target, int64_t n, int64_t first, std::vector<Range> ranges, float divisor) {
    for (int64_t begin = 0; begin < n; begin += kStretch) {
        const int64_t end = std::min(begin + kStretch, n);
        std::memset(target + begin, 0, (end - begin) * sizeof(T));
        add_entries(target + begin, first + begin, first + end, ranges, divisor);
    }
}

// Calls work with the entries of an array as what their type says: float32 or float64.
template <class Work>
auto typed(void* x, int type, const Work& work) {
    return type == HS_FLOAT32 ? work(static_cast<float*>(x)) : work(static_cast<double*>(x));
}
template <class Work>
auto typed(const void* x, int type, const Work& work) {
    return type == HS_FLOAT32 ? work(static_cast<const float*>(x)) : work(static_cast<const double*>(x));
}

template <class Pointer>
using entry_type = std::remove_const_t<std::remove_pointer_t<Pointer>>;

}  // namespace

const char* hs_variant(int number) {
    for (const Named& one : kVariants)
        if (one.runs() && number-- == 0) return one.name;
    return nullptr;
}

int hs_choose(const char* name) {
    for (const Named& one : kVariants) {
        if (std::strcmp(one.name, name) != 0 || !one.runs()) continue;
        chosen.store(one.variant);
        return 1;
    }
    return 0;
}

int hs_ask_ahead(int wanted) {
    const bool asks = wanted < 0 ? helps_to_ask_ahead() : wanted != 0;
    asks_ahead.store(asks);
    return asks;
}

int hs_share_threads(void) {
    static const OpenMP openmp;
    static const int handler = pthread_atfork(nullptr, nullptr, [] {
        shared.store(nullptr);
        forked.store(true);
    });
    if (openmp.run == nullptr || handler != 0 || forked.load()) return 0;
    shared.store(&openmp);
    return 1;
}

int hs_accumulate(void* residual, void* velocity, int type, int64_t numel, hs_part* gradients, int64_t number,
                  double momentum, double rate, int threads, hs_notes* notes) {
    for (const hs_part* one = gradients; one != gradients + number; ++one) {
        if (one->first < 0 || one->n < 0 || one->first > numel - one->n) return 0;
        if (one->start != 0 && velocity != nullptr) return 0;
    }
    hs_notes none{};
    hs_notes& of_these = notes == nullptr ? none : *notes;
    typed(residual, type, [&](auto* entries) {
        using T = entry_type<decltype(entries)>;
        const Rates<T> rates{static_cast<T>(momentum), static_cast<T>(rate), 0, 0};
        for (hs_part* one = gradients; one != gradients + number; ++one) {
            T* const moved = velocity == nullptr ? nullptr : static_cast<T*>(velocity) + one->first;
            accumulate(entries + one->first, moved, *one, rates, threads, of_these);
        }
    });
    return 1;
}

void hs_measure(const void* x, int type, int64_t n, double cut, int with_logs, int threads, hs_sums* sums) {
    *sums = typed(x, type, [&](const auto* entries) { return measure(entries, n, cut, with_logs != 0, threads); });
}

int64_t hs_select_above(const void* x, int type, int64_t n, double threshold, int64_t capacity, int threads,
                        int64_t* indices) {
    return typed(x, type, [&](const auto* entries) {
        using T = entry_type<decltype(entries)>;
        return Searched<T>{entries, n, threads}.select_above(limit_bits<T>(threshold), capacity, indices);
    });
}

double hs_select_largest(const void* x, int type, int64_t n, int64_t count, int threads, int64_t* indices) {
    return typed(x, type, [&](const auto* entries) -> double {
        using T = entry_type<decltype(entries)>;
        return bits_as<T>(Searched<T>{entries, n, threads}.select_largest(count, indices));
    });
}

double hs_sampled_largest(const void* x, int type, int64_t n, int64_t stride, int64_t count, int threads) {
    return typed(x, type, [&](const auto* entries) -> double {
        using T = entry_type<decltype(entries)>;
        return bits_as<T>(Searched<T>{entries, n, threads}.kth_of_sample(count, stride));
    });
}

int64_t hs_entries_read(void) { return entries_read; }

int hs_take(void* x, int type, int64_t n, const int64_t* indices, int64_t count, float* values, hs_pair* message,
            int64_t capacity) {
    const auto in_range = [n](int64_t index) { return 0 <= index && index < n; };
    if (!std::all_of(indices, indices + count, in_range)) return 0;
    typed(x, type, [&](auto* all) {
        for (int64_t i = 0; i < count; ++i) {
            // Hardly any entry is in the cache.
            __builtin_prefetch(all + indices[std::min(i + kAhead, count - 1)], 1);
            auto& entry = all[indices[i]];
            const float value = take_out(entry);
            if (message != nullptr) message[i] = {static_cast<int32_t>(indices[i]), value};
            else values[i] = value;
        }
    });
    if (message != nullptr) write_padding(message, count, capacity);
    return 1;
}

int hs_assemble(const hs_part* targets, int64_t number, const hs_pair* messages, int64_t capacity, int64_t world,
                const int64_t* used, float divisor) {
    const auto ranges_of = [&](const hs_part& target) {
        std::vector<Range> ranges;
        ranges.reserve(world);
        for (int64_t sender = 0; sender < world; ++sender)
            ranges.emplace_back(messages + capacity * sender, used[sender], target.first, target.n);
        return ranges;
    };
    for (const hs_part* one = targets; one != targets + number; ++one)
        for (const Range& range : ranges_of(*one))
            if (!range.ascends(one->first, one->n)) return 0;
    for (const hs_part* one = targets; one != targets + number; ++one) {
        typed(reinterpret_cast<void*>(one->address), one->type,
              [&](auto* target) { assemble(target, one->n, one->first, ranges_of(*one), divisor); });
    }
    return 1;
}

void hs_quantize(void* x, int type, int64_t n, hs_pair* message, int64_t capacity, int32_t* packed, int64_t length) {
    const int64_t chunks = std::max<int64_t>((n + (1 << kChunkBits) - 1) >> kChunkBits, 1);
    typed(x, type, [&](auto* entries) { write_packed(entries, chunks, message, capacity, packed, length); });
}

void hs_unquantize(int32_t* packed, int64_t length, int64_t chunks, int64_t world, hs_pair* messages, int64_t capacity) {
    for (int64_t sender = 0; sender < world; ++sender)
        unquantize(Packed(packed + sender * length, length, chunks), chunks, messages + sender * capacity, capacity);
}

void hs_rows_in_use(const int32_t* indices, int64_t stride, int64_t capacity, int64_t world, int64_t n, int64_t* used) {
    for (int64_t sender = 0; sender < world; ++sender)
        used[sender] = rows_in_use(indices + sender * capacity * stride, stride, capacity, n);
}

int64_t hs_union(const int32_t* messages, int64_t length, int64_t header, int64_t world, int64_t n, int64_t* merged) {
    std::vector<int64_t*> ends{merged};
    for (const int32_t* one = messages; one != messages + world * length; one += length) {
        const int64_t used = rows_in_use(one + header, 1, length - header, n);
        if (used < 0) return -1;
        ends.push_back(std::copy_n(one + header, used, ends.back()));
    }
    // Merge the ascending runs, of which number r is [ends[r], ends[r + 1]).
    const size_t runs = ends.size() - 1;
    for (size_t width = 1; width < runs; width *= 2)
        for (size_t first = 0; first + width < runs; first += 2 * width)
            std::inplace_merge(ends[first], ends[first + width], ends[std::min(runs, first + 2 * width)]);
    return std::unique(merged, ends.back()) - merged;
}
