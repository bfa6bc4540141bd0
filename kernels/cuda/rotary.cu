// Rotary embedding of queries and keys, and the write of new keys and values into their pages. One block a token, one
// warp a head at a time.
#include "kv_rows.cuh"

// Element d of a head as it is stored.
template <typename X>
struct Plain {
    const X* head;
    __device__ __forceinline__ float operator()(int d) const { return widened(head[d]); }
};

// Element d of a head, turned half-split: d and d + half are a pair.
template <typename X>
struct Turned {
    const X* head;
    const X* cos_sin;  // [2 * half]
    int half;
    __device__ __forceinline__ float operator()(int d) const {
        const int pair = d < half ? d : d - half;
        const float cosine = widened(cos_sin[pair]), sine = widened(cos_sin[half + pair]);
        const float own = widened(head[d]), other = widened(head[d < half ? d + half : pair]);
        return d < half ? own * cosine - other * sine : own * cosine + other * sine;
    }
};

template <typename KV, typename Elements>
__device__ void store_row(KV* row, const Elements& elements, int head_dim) {
    const int lane = threadIdx.x % WARP;
    if constexpr (sizeof(KV) == 1) {
        float top = 0.0f, spoiled = 0.0f;
        for (int d = lane; d < head_dim; d += WARP) {
            const float x = elements(d);
            top = fmaxf(top, fabsf(x));
            spoiled += x * 0.0f;  // NaN where x is no number: the whole row then is none
        }
        top = lanes_max(top) + lanes_sum(spoiled);
        if (lane == 0) *reinterpret_cast<float*>(row + head_dim) = top / FP8_MAX;
        const float factor = FP8_MAX / fmaxf(top, FP8_SMALLEST);
        for (int d = lane; d < head_dim; d += WARP) row[d] = narrowed<Code>(elements(d) * factor);
    } else {
        for (int d = lane; d < head_dim; d += WARP) row[d] = narrowed<KV>(elements(d));
    }
}

template <typename X, typename KV>
__global__ void rotary_and_store(
    const X* q, const X* k, const X* v, int q_stride, int k_stride, int v_stride, const X* cos_sin,
    const long long* positions, KV* kv_layer, const int* block_tables, int table_width, const int* query_start,
    int num_sequences, X* out, int num_heads, int num_kv_heads, int head_dim, int page_tokens
) {
    const int t = blockIdx.x;
    const long long token = t;
    const int position = (int)positions[t];
    if (position < 0) return;  // padding has no page
    const int sequence = sequence_of(query_start, num_sequences, t);
    const X* angles = cos_sin + (long long)position * head_dim;
    for (int head = threadIdx.x / WARP; head < num_heads + 2 * num_kv_heads; head += blockDim.x / WARP) {
        if (head < num_heads) {
            const Turned<X> turned{q + token * q_stride + head * head_dim, angles, head_dim / 2};
            store_row(out + (token * num_heads + head) * head_dim, turned, head_dim);
            continue;
        }
        const int kv_head = (head - num_heads) % num_kv_heads;
        const KvPlace place{
            block_tables + (long long)sequence * table_width, num_kv_heads, kv_head, page_tokens,
            row_size<KV>(head_dim)
        };
        KV* row = kv_layer + place.key(position);
        if (head < num_heads + num_kv_heads) {
            store_row(row, Turned<X>{k + token * k_stride + kv_head * head_dim, angles, head_dim / 2}, head_dim);
        } else {
            store_row(row + place.value_distance(), Plain<X>{v + token * v_stride + kv_head * head_dim}, head_dim);
        }
    }
}
