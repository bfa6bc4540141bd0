// Units of a pool, [layers, units, unit bytes], into one buffer, [layers, chosen units, unit bytes], and back.
//
// A warp takes a tile of the buffer at a time. What in it lies in one piece in the pool too, because units that follow
// each other there were chosen one after the other, is one copy, by the widest words that both sides are aligned to.
#include "lanes.cuh"

constexpr int TILE = 4096;
constexpr int AT_ONCE = 4;  // words of a lane under way: memory is slow to answer, not slow to deliver

template <typename Word>
__device__ __forceinline__ void copy_words(char* to, const char* from, int size, int lane) {
    const int head = min((int)(-(unsigned long long)to % sizeof(Word)), size);
    const int num_words = (size - head) / (int)sizeof(Word), tail = head + num_words * (int)sizeof(Word);
    if (lane < head) to[lane] = from[lane];
    if (lane < size - tail) to[tail + lane] = from[tail + lane];
    Word* const target = reinterpret_cast<Word*>(to + head);
    const Word* const source = reinterpret_cast<const Word*>(from + head);
    for (int i = lane; i < num_words; i += AT_ONCE * WARP) {
        Word held[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if (i + j * WARP < num_words) held[j] = source[i + j * WARP];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if (i + j * WARP < num_words) target[i + j * WARP] = held[j];
        }
    }
}

// By the lanes of a warp.
__device__ __forceinline__ void copy_bytes(char* to, const char* from, int size, int lane) {
    const unsigned long long apart = (unsigned long long)to - (unsigned long long)from;
    if (apart % sizeof(uint4) == 0) {
        copy_words<uint4>(to, from, size, lane);
    } else if (apart % sizeof(unsigned) == 0) {
        copy_words<unsigned>(to, from, size, lane);
    } else {
        copy_words<char>(to, from, size, lane);
    }
}

template <bool INTO_BUFFER>
__device__ __forceinline__ void move_units(
    char* pool, const long long* chosen, char* buffer, int num_layers, int num_units, int num_chosen, int unit_bytes) {
    const int lane = threadIdx.x % WARP;
    const long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const long long num_warps = (long long)gridDim.x * blockDim.x / WARP;
    const long long total = (long long)num_layers * num_chosen * unit_bytes;
    for (long long begin = warp * TILE; begin < total; begin += num_warps * TILE) {
        const int tile = total - begin < TILE ? (int)(total - begin) : TILE;
        for (int done = 0; done < tile;) {
            const long long number = (begin + done) / unit_bytes;  // of a unit of a layer in the buffer
            const int layer = (int)(number / num_chosen), first = (int)(number % num_chosen);
            const int passed = (int)((begin + done) % unit_bytes);
            int size = unit_bytes - passed;
            for (int k = first + 1; k < num_chosen && size < tile - done && chosen[k] == chosen[k - 1] + 1; ++k) {
                size += unit_bytes;
            }
            size = min(size, tile - done);
            char* const there = pool + ((long long)layer * num_units + chosen[first]) * unit_bytes + passed;
            char* const here = buffer + begin + done;
            copy_bytes(INTO_BUFFER ? here : there, INTO_BUFFER ? there : here, size, lane);
            done += size;
        }
    }
}

__global__ void gather_units(
    char* pool, const long long* chosen, char* buffer, int num_layers, int num_units, int num_chosen, int unit_bytes) {
    move_units<true>(pool, chosen, buffer, num_layers, num_units, num_chosen, unit_bytes);
}

// No unit is chosen twice.
__global__ void scatter_units(
    char* pool, const long long* chosen, char* buffer, int num_layers, int num_units, int num_chosen, int unit_bytes) {
    move_units<false>(pool, chosen, buffer, num_layers, num_units, num_chosen, unit_bytes);
}
