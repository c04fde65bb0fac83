// The search of large entries: those above a bound, and the k largest, whatever the distribution is.
//
// The k-th largest magnitude is found digit by digit: a pass counts how often each value of a digit occurs among the entries
// whose higher digits are known. Three passes find it among float32, six among float64. A sample saves them in most cases: a
// bound that somewhat more than k entries exceed leaves few to search. Where the bound itself occurs so often that fewer than k
// exceed it, the first ones that equal it are the rest.

#pragma once

#include "parallel.h"
#include "variants.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

namespace {

// Every so many-th entry is in a sample: odd, so that it does not lock on to the rows of a layer.
constexpr int64_t kStride = 511;
// Room for entries above a threshold, as a multiple of those that are wanted.
constexpr int64_t kSpare = 16;

// Returns the bits that a magnitude must exceed to be above the threshold. All are above a negative threshold, none above NaN.
template <class T>
INLINE typename Type<T>::Bit limit_bits(double threshold) {
    // A threshold beyond the type's range becomes infinity. A tiny negative threshold becomes negative zero, whose bits
    // are not those of a magnitude.
    T limit = static_cast<T>(threshold);
    if (limit < 0) return -1;
    if (std::isnan(limit)) return Type<T>::magnitude;
    return bits_as<typename Type<T>::Bit>(std::abs(limit));
}

template <class T>
INLINE typename Type<T>::Bit bits_of(T entry) {
    return bits_as<typename Type<T>::Bit>(entry) & Type<T>::magnitude;
}

// The number of entries that were read since the process began, in all passes over arrays.
std::atomic<int64_t> entries_read{0};

// Collects entries above a bound in ascending order, as far as there is room. Each part of the work has its share of the room.
template <class T>
struct Collector {
    const typename Type<T>::Bit bound;
    // Indices are counted from here.
    const int64_t first;
    int32_t* const indices;
    T* const values;
    const int64_t room;
    // The number of entries that each part has found so far.
    std::vector<int64_t> numbers;
    bool complete = true;

    int64_t start_of(int64_t part) const { return room * part / static_cast<int64_t>(numbers.size()); }

    // Adds the entries of a piece that are above the bound; all of those are in these groups. Returns false, and adds nothing any
    // more, if this part has found more than its share of the room.
    bool add(int64_t part, const T* piece, int64_t begin, int64_t count, uint32_t groups) {
        const int64_t start = start_of(part) + numbers[part], left = start_of(part + 1) - start;
        if (groups == 0 || left < 0) return left >= 0;
        int32_t positions[kPiece + kSlack];
        T entries[kPiece + kSlack];
        const auto origin = static_cast<int32_t>(first + begin);
        const int64_t found = loops<T>().find(piece, count, groups, bound, origin, positions, entries);
        const int64_t kept = std::min(left, found);
        std::copy_n(positions, kept, indices + start);
        std::copy_n(entries, kept, values + start);
        numbers[part] += found;
        return found <= left;
    }

    // Closes the gaps between the parts and returns how many entries are there. `complete` becomes false if these are not all
    // that are above the bound, because a part found more than its share.
    int64_t finish() {
        int64_t end = 0;
        for (int64_t part = 0; part < static_cast<int64_t>(numbers.size()); ++part) {
            const int64_t start = start_of(part), kept = std::min(numbers[part], start_of(part + 1) - start);
            std::copy_n(indices + start, kept, indices + end);
            std::copy_n(values + start, kept, values + end);
            end += kept;
            complete = complete && kept == numbers[part];
        }
        return end;
    }
};

// Some entries of an array, in ascending order of their indices.
template <class T>
struct Few {
    std::unique_ptr<int32_t[]> indices;
    std::unique_ptr<T[]> values;
    int64_t number;
    // False if there was no room for all that were asked for.
    bool complete;
};

// The bits of the k-th largest magnitude, and how many exceed it.
template <class T>
struct Kth {
    typename Type<T>::Bit bits;
    int64_t above;
};

// An array that is searched. k is in [1, n].
template <class T>
struct Searched {
    using Bit = typename Type<T>::Bit;
    const T* const x;
    const int64_t n;
    const int threads;

    // Calls work(part, i, count) for all pieces, until it returns false in this part.
    template <class Work>
    void each_piece(const Work& work) const {
        in_parallel(n, threads, [&](int64_t part, int64_t first, int64_t end) {
            const int64_t begin = first * kBlock, stop = std::min(n, end * kBlock);
            int64_t i = begin;
            for (bool goes_on = true; goes_on && i < stop; i += kPiece) goes_on = work(part, i, std::min(kPiece, stop - i));
            entries_read += std::min(i, stop) - begin;
        });
    }

    // Returns the entries above a bound. Each part of the work has room for so many, and ends when it finds more.
    Few<T> above(Bit bound, int64_t room) const {
        // No part has two blocks more than its share.
        const int64_t parts = parts_of(n, threads), all = std::min(room * parts, n + 2 * kBlock * parts);
        Few<T> few{std::unique_ptr<int32_t[]>(new int32_t[all]), std::unique_ptr<T[]>(new T[all]), 0, true};
        Collector<T> collector{bound, 0, few.indices.get(), few.values.get(), all, std::vector<int64_t>(parts)};
        each_piece([&](int64_t part, int64_t i, int64_t count) {
            return collector.add(part, x + i, i, count, loops<T>().groups_above(x + i, count, bound));
        });
        few.number = collector.finish();
        few.complete = collector.complete;
        return few;
    }

    int64_t count_above(Bit bound) const {
        std::atomic<int64_t> number{0};
        each_piece([&](int64_t, int64_t i, int64_t count) {
            number += loops<T>().count_above(x + i, count, bound);
            return true;
        });
        return number;
    }

    // Writes the indices of the first entries of this magnitude, up to `count` of them. Returns their number.
    int64_t equal(Bit bits, int64_t count, int32_t* indices) const {
        int64_t number = 0;
        Searched{x, n, 1}.each_piece([&](int64_t, int64_t i, int64_t size) {
            int32_t positions[kPiece + kSlack];
            T entries[kPiece + kSlack];
            const uint32_t groups = loops<T>().groups_above(x + i, size, bits - 1);
            const auto first = static_cast<int32_t>(i);
            const int64_t found = loops<T>().find(x + i, size, groups, bits - 1, first, positions, entries);
            for (int64_t one = 0; one < found && number < count; ++one)
                if (bits_of(entries[one]) == bits) indices[number++] = positions[one];
            return number < count;
        });
        return number;
    }

    // Returns the k-th largest, digit by digit.
    Kth<T> kth_largest(int64_t k) const {
        std::vector<Digits> counted(parts_of(n, threads));
        Kth<T> kth{0, 0};
        constexpr int all = 8 * sizeof(T) - 1;
        for (int known = 0, width; known < all; known += width) {
            width = std::min(all - known, kDigitBits);
            const int shift = all - known - width;
            const Bit last = kth.bits | Type<T>::magnitude >> known;
            std::memset(counted.data(), 0, counted.size() * sizeof(Digits));
            each_piece([&](int64_t part, int64_t i, int64_t count) {
                loops<T>().count_digits(x + i, count, kth.bits, last, shift, counted[part]);
                return true;
            });
            Bit digit = (Bit{1} << width) - 1;
            for (;; --digit) {
                int64_t number = 0;
                for (const Digits& digits : counted) number += digits.number(digit);
                if (kth.above + number >= k) break;
                kth.above += number;
            }
            kth.bits += digit << shift;
        }
        return kth;
    }

    // Returns the k-th largest of every stride-th entry.
    Bit kth_of_sample(int64_t k, int64_t stride) const {
        const int64_t size = (n + stride - 1) / stride;
        const std::unique_ptr<T[]> sample(new T[size]);
        for (int64_t one = 0; one < size; ++one) sample[one] = x[one * stride];
        return Searched{sample.get(), size, threads}.kth_largest(k).bits;
    }

    // Writes the indices of the k largest of some entries. Returns the smallest magnitude of these.
    Bit choose(const Few<T>& among, int64_t k, int64_t* indices) const {
        const Kth<T> kth = Searched{among.values.get(), among.number, threads}.kth_largest(k);
        int64_t equal = k - kth.above;
        for (int64_t one = 0; one < among.number; ++one) {
            const Bit bits = bits_of(among.values[one]);
            if (bits > kth.bits || (bits == kth.bits && equal-- > 0)) *indices++ = among.indices[one];
        }
        return kth.bits;
    }

    // Writes the indices of the k largest entries, if no more than `room` of them exceed the bound, or if fewer than k do and the
    // rest equals it. Returns the smallest magnitude of these, or -1.
    Bit select_by(Bit bound, int64_t k, int64_t room, int64_t* indices) const {
        const Few<T> few = above(bound, room);
        if (!few.complete) return -1;
        if (few.number >= k) return choose(few, k, indices);
        const int64_t wanted = k - few.number;
        const std::unique_ptr<int32_t[]> rest(new int32_t[wanted]);
        if (equal(bound, wanted, rest.get()) < wanted) return -1;
        std::merge(few.indices.get(), few.indices.get() + few.number, rest.get(), rest.get() + wanted, indices);
        return bound;
    }

    // Writes the indices of the k largest entries; of equals the first. Returns the smallest magnitude of these.
    Bit select_largest(int64_t k, int64_t* indices) const {
        // So many entries of a sample are hardly ever among the k largest.
        const double expected = static_cast<double>(k) / kStride;
        const auto wanted = static_cast<int64_t>(expected + 4 * std::sqrt(expected) + 4);
        if (2 * wanted * kStride < n) {
            const Bit smallest = select_by(kth_of_sample(wanted, kStride), k, 4 * wanted * kStride, indices);
            if (smallest >= 0) return smallest;
        }
        return select_by(kth_largest(k).bits, k, k, indices);
    }

    // Writes the indices of the entries above a bound, or of the `capacity` largest of these. Returns how many are above it.
    int64_t select_above(Bit bound, int64_t capacity, int64_t* indices) const {
        const Few<T> few = above(bound, kSpare * capacity);
        if (!few.complete) {
            select_largest(capacity, indices);
            return count_above(bound);
        }
        if (few.number > capacity)
            choose(few, capacity, indices);
        else
            std::copy_n(few.indices.get(), few.number, indices);
        return few.number;
    }
};

}  // namespace
