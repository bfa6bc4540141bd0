// How keys and values lie in their pages: a layer is [pages, 2, kv heads, page tokens, row].
//
// A row is `head_dim` numbers; of codes it is followed by their float scale, which makes it head_dim + 4 bytes: rows of
// codes are aligned to 4 bytes only.
#include "numbers.cuh"
#include "lanes.cuh"

#define FP8_MAX 448.0f
#define FP8_SMALLEST 1e-30f

template <typename KV>
__device__ __forceinline__ constexpr int row_size(int head_dim) {
    return sizeof(KV) == 1 ? head_dim + 4 : head_dim;
}

// What the loaded values of a row are to be multiplied by.
template <typename KV>
__device__ __forceinline__ float row_scale(const KV* row, int head_dim) {
    if constexpr (sizeof(KV) == 1) {
        return *reinterpret_cast<const float*>(row + head_dim) * CODE_UNIT;
    } else {
        return 1.0f;
    }
}

// Where a sequence's key at `position` begins; its value is `value_distance` further on.
struct KvPlace {
    const int* pages;  // the sequence's row of the block table
    int num_kv_heads, kv_head, page_tokens, row;

    __device__ __forceinline__ long long key(int position) const {
        const int page = pages[position / page_tokens];
        return ((2LL * page * num_kv_heads + kv_head) * page_tokens + position % page_tokens) * row;
    }
    __device__ __forceinline__ long long value_distance() const { return (long long)num_kv_heads * page_tokens * row; }
};

// The sequence that token t belongs to: query_start [num_sequences + 1] ascends.
__device__ __forceinline__ int sequence_of(const int* query_start, int num_sequences, int t) {
    int low = 0, high = num_sequences;  // query_start[low] <= t < query_start[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (query_start[middle] <= t) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}
