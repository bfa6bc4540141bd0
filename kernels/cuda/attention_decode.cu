// Attention of sequences with one new token each, cut along the context: split-K.
//
// A block reads its share of the keys and values of one kv head once, for all GROUP query heads over it. With few
// sequences there are more splits than one, so that all of the GPU reads; each leaves (sum of values, maximum, sum) and
// `combine_splits` makes one of them. Sequences with several new tokens are left to attention_prefill.cu, a sequence
// without context gets zeros.
#include "kv_rows.cuh"

constexpr int THREADS = 128;
constexpr int TILE = 64;  // positions between two looks at the maximum

// Of one block: what the threads tell each other.
template <int D, int GROUP>
struct alignas(16) DecodeShared {
    float queries[GROUP][D];
    float gathered[THREADS * 4];  // one head's sums of values
    long long keys[2][TILE];      // where the tile's keys lie; the other half still serves those behind
    float weights[GROUP][TILE];   // scores, then their exponentials
    float maximum[GROUP], total[GROUP], shrink[GROUP];
};

// Scores of the tile's `rows` positions. LANES lanes share a key; a team of them takes ROWS keys at once, so that a
// part of the query is read once for all and several loads are under way.
template <typename KV, int D, int GROUP>
__device__ void score_tile(DecodeShared<D, GROUP>& shared, const KV* kv_layer, const long long* keys, int rows) {
    constexpr int LANES = D % 32 == 0 ? 8 : D % 16 == 0 ? 4 : 2;
    constexpr int TEAMS = THREADS / LANES, ROWS = TILE / TEAMS;
    const int team = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    float sums[ROWS][GROUP] = {};
#pragma unroll
    for (int d = 0; d < D; d += 4 * LANES) {
        float key[ROWS][4] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = r * TEAMS + team;
            if (row < rows) load4(kv_layer + keys[row] + d + 4 * lane, key[r]);
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float query[4];
            load4(&shared.queries[g][d + 4 * lane], query);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[r][g] += query[j] * key[r][j];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = r * TEAMS + team;
        const float scale = row < rows ? row_scale(kv_layer + keys[row], D) : 0.0f;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const float score = lanes_sum(sums[r][g], LANES) * scale;
            if (lane == 0) shared.weights[g][row] = row < rows ? score : LOWEST;
        }
    }
}

// From scores to weights relative to the highest score so far; a warp takes a head.
template <int D, int GROUP>
__device__ void weigh_tile(DecodeShared<D, GROUP>& shared) {
    const int lane = threadIdx.x % WARP;
    for (int g = threadIdx.x / WARP; g < GROUP; g += THREADS / WARP) {
        const float low = shared.weights[g][lane], high = shared.weights[g][lane + WARP];
        const float before = shared.maximum[g], now = fmaxf(before, lanes_max(fmaxf(low, high)));
        const float a = expf(low - now), b = expf(high - now), sum = lanes_sum(a + b);
        shared.weights[g][lane] = a, shared.weights[g][lane + WARP] = b;
        if (lane == 0) {
            shared.shrink[g] = expf(before - now);
            shared.total[g] = shared.total[g] * shared.shrink[g] + sum;
            shared.maximum[g] = now;
        }
    }
}

template <typename X, typename KV, int D, int GROUP>
__global__ void __launch_bounds__(THREADS) decode_attention(
    const X* q, const KV* kv_layer, const int* block_tables, int table_width, const int* query_start,
    const int* context_lens, float scale, X* out, float* partials, int page_tokens
) {
    const int split = blockIdx.x, num_splits = gridDim.x, kv_head = blockIdx.y, sequence = blockIdx.z;
    const int num_kv_heads = gridDim.y, token = query_start[sequence];
    if (query_start[sequence + 1] - token != 1) return;
    const int context_len = context_lens[sequence], num_tiles = (context_len + TILE - 1) / TILE;
    const int first_tile = num_tiles * split / num_splits, end_tile = num_tiles * (split + 1) / num_splits;
    const long long first_head = ((long long)token * num_kv_heads + kv_head) * GROUP;
    const KvPlace place{
        block_tables + (long long)sequence * table_width, num_kv_heads, kv_head, page_tokens, row_size<KV>(D)
    };

    __shared__ DecodeShared<D, GROUP> shared;
    for (int i = threadIdx.x; i < GROUP * D; i += THREADS) {
        shared.queries[i / D][i % D] = widened(q[first_head * D + i]) * scale;
    }
    if (threadIdx.x < GROUP) shared.maximum[threadIdx.x] = LOWEST, shared.total[threadIdx.x] = 0.0f;

    // For the values a thread owns four columns and every SLICES-th position.
    constexpr int COLUMNS = D / 4, SLICES = THREADS / COLUMNS;
    const int column = 4 * (threadIdx.x % COLUMNS), slice = threadIdx.x / COLUMNS;
    float sums[GROUP][4] = {};
    for (int tile = first_tile; tile < end_tile; ++tile) {
        const int rows = min(TILE, context_len - tile * TILE);
        long long* keys = shared.keys[tile % 2];
        if (threadIdx.x < rows) keys[threadIdx.x] = place.key(tile * TILE + threadIdx.x);
        __syncthreads();
        score_tile<KV>(shared, kv_layer, keys, rows);
        __syncthreads();
        weigh_tile(shared);
        __syncthreads();
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            for (int j = 0; j < 4; ++j) sums[g][j] *= shared.shrink[g];
        }
        if (slice >= SLICES) continue;
#pragma unroll 4
        for (int row = slice; row < rows; row += SLICES) {
            const KV* from = kv_layer + keys[row] + place.value_distance();
            const float row_factor = row_scale(from, D);
            float value[4];
            load4(from + column, value);
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                const float weight = shared.weights[g][row] * row_factor;
                for (int j = 0; j < 4; ++j) sums[g][j] += weight * value[j];
            }
        }
    }

#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        __syncthreads();
        if (slice < SLICES) store4(&shared.gathered[slice * D + column], sums[g]);
        __syncthreads();
        const long long row = ((long long)sequence * num_kv_heads + kv_head) * GROUP + g;
        float* partial = partials + (row * num_splits + split) * (D + 2);
        for (int d = threadIdx.x; d < D; d += THREADS) {
            float value = 0.0f;
            for (int s = 0; s < SLICES; ++s) value += shared.gathered[s * D + d];
            if (num_splits == 1) {
                const float total = shared.total[g];
                out[(first_head + g) * D + d] = narrowed<X>(total == 0.0f ? 0.0f : value / total);
            } else {
                partial[d] = value;
            }
        }
        if (num_splits > 1 && threadIdx.x == 0) partial[D] = shared.maximum[g], partial[D + 1] = shared.total[g];
    }
}

// One block a query head of a sequence; a thread an element.
template <typename X>
__global__ void combine_splits(
    const float* partials, const int* query_start, X* out, int num_splits, int head_dim
) {
    const int num_heads = gridDim.x, sequence = blockIdx.y, token = query_start[sequence];
    if (query_start[sequence + 1] - token != 1) return;
    const float* of_head = partials + ((long long)sequence * num_heads + blockIdx.x) * num_splits * (head_dim + 2);
    X* target = out + ((long long)token * num_heads + blockIdx.x) * head_dim;
    float highest = LOWEST;
    for (int s = 0; s < num_splits; ++s) highest = fmaxf(highest, of_head[s * (head_dim + 2) + head_dim]);
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float value = 0.0f, total = 0.0f;
        for (int s = 0; s < num_splits; ++s) {
            const float* partial = of_head + s * (head_dim + 2);
            const float maximum = partial[head_dim];
            const float weight = maximum == highest ? 1.0f : expf(maximum - highest);  // -inf less -inf is no number
            value += weight * partial[d];
            total += weight * partial[head_dim + 1];
        }
        target[d] = narrowed<X>(total == 0.0f ? 0.0f : value / total);
    }
}
