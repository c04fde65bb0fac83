// Work on the parts of an array at the same time, in threads of an OpenMP runtime or in threads of our own.

#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Elements per block: a part of the work is a number of whole blocks.
constexpr int64_t kBlock = 1 << 14;
// A thread that handles fewer elements costs more time than it saves.
constexpr int64_t kLeastPerThread = 1 << 18;
constexpr int64_t kMostThreads = 64;

// Returns the number of parts into which the work on n elements is divided.
int64_t parts_of(int64_t n, int threads) {
    return std::max<int64_t>(1, std::min({int64_t{threads}, n / kLeastPerThread, kMostThreads}));
}

// An OpenMP runtime that the process has loaded, by the functions that compilers call.
struct OpenMP {
    void (*run)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    int (*thread)() = nullptr;
    int (*threads)() = nullptr;

    OpenMP() {
        for (const char* library : {"libgomp.so.1", "libiomp5.so"}) {
            void* const handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
            if (handle == nullptr) continue;
            thread = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_thread_num"));
            threads = reinterpret_cast<int (*)()>(dlsym(handle, "omp_get_num_threads"));
            if (thread == nullptr || threads == nullptr) continue;
            run = reinterpret_cast<decltype(run)>(dlsym(handle, "GOMP_parallel"));
            if (run != nullptr) return;
        }
    }
};

// The runtime whose threads are used; null if threads of our own are.
std::atomic<const OpenMP*> shared{nullptr};
// A process that was forked has none of the runtime's threads, and would wait for them forever.
std::atomic<bool> forked{false};

// Calls work(part) for each part, in the threads of an OpenMP runtime.
template <class Work>
void run_parts(const OpenMP& openmp, int64_t parts, const Work& work) {
    auto share = [&] {
        // There may be fewer threads than parts.
        for (int64_t part = openmp.thread(); part < parts; part += openmp.threads()) work(part);
    };
    const auto body = [](void* pointer) { (*static_cast<decltype(share)*>(pointer))(); };
    // All threads of the pool, not one for each part: the runtime would end those that are left over, and start them again.
    openmp.run(body, &share, 0, 0);
}

// Calls work(part) for each part, in threads of its own.
template <class Work>
void run_parts(int64_t parts, const Work& work) {
    std::vector<std::thread> helpers;
    helpers.reserve(parts - 1);
    int64_t mine = 1;
    try {
        for (; mine < parts; ++mine) helpers.emplace_back(work, mine);
    } catch (const std::system_error&) {
        // The system has no more threads: this thread does the remaining parts.
    }
    for (; mine < parts; ++mine) work(mine);
    work(0);
    for (auto& helper : helpers) helper.join();
}

// Calls work(part, first, end) for parts that together cover all blocks and may run at the same time. first and end number blocks.
template <class Work>
void in_parallel(int64_t n, int threads, const Work& work) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    const int64_t parts = parts_of(n, threads);
    const auto do_part = [&](int64_t part) { work(part, blocks * part / parts, blocks * (part + 1) / parts); };
    const OpenMP* const openmp = shared.load();
    if (parts == 1)
        do_part(0);
    else if (openmp != nullptr)
        run_parts(*openmp, parts, do_part);
    else
        run_parts(parts, do_part);
}

}  // namespace
