// CUDA's language on a CPU, as far as the kernels use it: the very sources compile as C++ and run block after block.
//
// A thread of the block is a fiber with a stack of its own. A warp runs until it waits for its block, so the others are
// as far behind or ahead as they can be; the order of warps is the caller's, and a barrier that is missing shows in one
// or the other. A shuffle that not all lanes reach, an index beyond an array, a misaligned load and an address that is
// nobody's end the launch with an error.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define BATON_EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static  // blocks run one at a time

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Index { unsigned x, y, z; };

static Index threadIdx, blockIdx, blockDim, gridDim;

static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

template <typename To, typename From>
static inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
static inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
static inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }

static inline float half_to_float(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                                      : std::ldexp((float)mantissa, -24);
    return bits & 0x8000 ? -size : size;
}
static inline unsigned short float_to_half(float x) {  // the nearest, ties to even
    const unsigned short sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return sign | 0x7E00;
    if (std::fabs(x) >= 65520.0f) return sign | 0x7C00;
    const int exponent = x == 0.0f ? -14 : std::max(std::ilogb(x), -14);
    return sign | (((exponent + 14) << 10) + (int)std::nearbyint(std::ldexp(std::fabs(x), 10 - exponent)));
}

namespace emulation {

constexpr int WARP_SIZE = 32;
constexpr int MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 64 << 10;

enum Error { NONE, WRONG_ARGUMENTS, WAITS_FOR_EVER, TRAPPED };
enum class State { READY, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool begun;
    State state;
    unsigned exchanges;  // how many shuffles it has made
    float deposited[2];  // those who read the last one may still be behind
};

static std::vector<Fiber> fibers;
static std::vector<char> stacks;
static std::function<void()> body;
static int current, num_live;
static jmp_buf scheduler;
static sigjmp_buf launch;

static void begin() {
    body();
    fibers[current].state = State::DONE;
    --num_live;
    _longjmp(scheduler, 1);
}

static void resume(int index) {
    Fiber& fiber = fibers[index];
    current = index;
    threadIdx = {(unsigned)index, 0, 0};
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.at, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
}

static void release_if_all(State state, int first, int end, int expected) {
    int waiting = 0;
    for (int i = first; i < end; ++i) waiting += fibers[i].state == state;
    if (waiting < expected) return;
    for (int i = first; i < end; ++i) {
        if (fibers[i].state == state) fibers[i].state = State::READY;
    }
}

static void wait_as(State state) {
    const int me = current;
    fibers[me].state = state;
    if (!_setjmp(fibers[me].at)) _longjmp(scheduler, 1);
}

// Runs a warp until each of its fibers waits for the block or is done; false where some wait for a warp that never comes.
static bool run_warp(int first, int end, bool backwards) {
    for (bool ran = true; ran;) {
        ran = false;
        for (int k = first; k < end; ++k) {
            const int i = backwards ? first + end - 1 - k : k;
            if (fibers[i].state != State::READY) continue;
            ran = true;
            resume(i);
        }
        release_if_all(State::AT_WARP, first, end, WARP_SIZE);
    }
    for (int i = first; i < end; ++i) {
        if (fibers[i].state == State::AT_WARP) return false;
    }
    return true;
}

static bool run_block(int num_threads, bool backwards) {
    num_live = num_threads;
    for (int i = 0; i < num_threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.begun = false, fiber.state = State::READY, fiber.exchanges = 0;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = &stacks[i * STACK_BYTES];
        fiber.start.uc_stack.ss_size = STACK_BYTES;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, begin, 0);
    }
    while (num_live) {
        for (int k = 0; k < num_threads; k += WARP_SIZE) {
            const int first = backwards ? num_threads - WARP_SIZE - k : k;
            if (!run_warp(first, first + WARP_SIZE, backwards)) return false;
        }
        release_if_all(State::AT_BLOCK, 0, num_threads, num_live);
    }
    return true;
}

static void on_trap(int) { siglongjmp(launch, 1); }

template <typename T>
constexpr char kind_of() {
    return std::is_pointer_v<T> ? 'p' : std::is_same_v<T, int> ? 'i' : std::is_same_v<T, float> ? 'f' : '?';
}

template <typename... A, size_t... I>
int run(void (*kernel)(A...), Index grid, int num_threads, const char* kinds, void** arguments, bool backwards,
        std::index_sequence<I...>) {
    const char expected[] = {kind_of<A>()..., 0};
    if (std::strcmp(kinds, expected) || num_threads % WARP_SIZE || num_threads > MAX_THREADS) return WRONG_ARGUMENTS;
    fibers.resize(MAX_THREADS), stacks.resize(MAX_THREADS * STACK_BYTES);
    gridDim = grid, blockDim = {(unsigned)num_threads, 1, 1};
    body = [=] { kernel(*static_cast<std::decay_t<A>*>(arguments[I])...); };
    struct sigaction trap = {}, before_ill, before_segv;
    trap.sa_handler = on_trap;
    sigaction(SIGILL, &trap, &before_ill);
    sigaction(SIGSEGV, &trap, &before_segv);
    int error = NONE;
    if (sigsetjmp(launch, 1)) {
        error = TRAPPED;
    } else {
        const unsigned num_blocks = grid.x * grid.y * grid.z;
        for (unsigned k = 0; k < num_blocks && error == NONE; ++k) {
            const unsigned b = backwards ? num_blocks - 1 - k : k;
            blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
            if (!run_block(num_threads, backwards)) error = WAITS_FOR_EVER;
        }
    }
    sigaction(SIGILL, &before_ill, nullptr);
    sigaction(SIGSEGV, &before_segv, nullptr);
    return error;
}

template <typename... A>
int run(void (*kernel)(A...), Index grid, int num_threads, const char* kinds, void** arguments, bool backwards) {
    return run(kernel, grid, num_threads, kinds, arguments, backwards, std::index_sequence_for<A...>());
}

}  // namespace emulation

static inline void __syncthreads() { emulation::wait_as(emulation::State::AT_BLOCK); }

static inline float __shfl_xor_sync(unsigned mask, float value, int lane_mask) {
    using namespace emulation;
    (void)mask;  // always all lanes
    const int me = current;
    const unsigned slot = fibers[me].exchanges++ % 2;
    fibers[me].deposited[slot] = value;
    wait_as(State::AT_WARP);
    return fibers[me ^ lane_mask].deposited[slot];
}

// What Python calls: an Error.
#define EMULATED(name, ...)                                                                                     \
    extern "C" int name(unsigned x, unsigned y, unsigned z, int num_threads, const char* kinds, void** arguments, \
                        int backwards) {                                                                        \
        return emulation::run(&__VA_ARGS__, Index{x, y, z}, num_threads, kinds, arguments, backwards);           \
    }
