// Attention of sequences with several new tokens: tiles of queries against tiles of keys, softmax kept as it goes.
//
// A block takes one query head of QUERIES tokens that lie one after another in the step, whatever sequences they are of.
// 128 threads stand as 8 rows of 16: a thread owns 4 queries, and of each tile 2 keys and then some columns of values.
#include "kv_rows.cuh"

constexpr int QUERIES = 32;
constexpr int KEYS = 32;
constexpr int ACROSS = 16;  // threads that share four queries
constexpr int THREADS = 128;

template <int D>
struct alignas(16) PrefillShared {
    static constexpr int PITCH = D + 4;  // neighbouring rows lie four banks apart
    float queries[QUERIES][PITCH];
    float rows[KEYS][PITCH];  // the tile's keys, then its values
    float weights[QUERIES][KEYS + 4];
    long long keys[KEYS];  // where they lie
};

// The tile's keys or values as floats; zeros beyond the last, so that a weight of zero makes zero of them.
template <typename KV, int D>
__device__ void load_tile(PrefillShared<D>& shared, const KV* from, int rows) {
    for (int i = threadIdx.x; i < KEYS * D / 4; i += THREADS) {
        const int row = i / (D / 4), column = 4 * (i % (D / 4));
        float values[4] = {};
        if (row < rows) {
            load4(from + shared.keys[row] + column, values);
            const float scale = row_scale(from + shared.keys[row], D);
            for (int j = 0; j < 4; ++j) values[j] *= scale;
        }
        store4(&shared.rows[row][column], values);
    }
}

// Scores of the thread's 4 queries with its 2 keys, x and x + 16 of the tile.
template <int D>
__device__ void score_tile(const PrefillShared<D>& shared, int y, int x, float (&scores)[4][2]) {
#pragma unroll 4
    for (int d = 0; d < D; d += 4) {
        float query[4][4], key[2][4];
        for (int i = 0; i < 4; ++i) load4(&shared.queries[4 * y + i][d], query[i]);
        for (int c = 0; c < 2; ++c) load4(&shared.rows[x + ACROSS * c][d], key[c]);
        for (int i = 0; i < 4; ++i) {
            for (int c = 0; c < 2; ++c) {
                for (int j = 0; j < 4; ++j) scores[i][c] += query[i][j] * key[c][j];
            }
        }
    }
}

template <typename X, typename KV, int D>
__global__ void __launch_bounds__(THREADS) prefill_attention(
    const X* q, const KV* kv_layer, const int* block_tables, int table_width, const int* query_start,
    const int* context_lens, float scale, X* out, int num_tokens, int num_sequences, int num_kv_heads, int page_tokens
) {
    // The last tokens have the most to read: they begin first.
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERIES, end = min(first + QUERIES, num_tokens);
    const int num_heads = gridDim.y, head = blockIdx.y, kv_head = head / (num_heads / num_kv_heads);
    const int y = threadIdx.x / ACROSS, x = threadIdx.x % ACROSS;
    constexpr int PARTS = (D + 4 * ACROSS - 1) / (4 * ACROSS);  // of four columns that a thread owns

    __shared__ PrefillShared<D> shared;
    for (int i = threadIdx.x; i < QUERIES * D; i += THREADS) {
        const long long token = first + i / D;
        shared.queries[i / D][i % D] = token < end ? widened(q[(token * num_heads + head) * D + i % D]) * scale : 0.0f;
    }

    for (int s = sequence_of(query_start, num_sequences, first); s < num_sequences && query_start[s] < end; ++s) {
        const int from = query_start[s], to = query_start[s + 1];
        if (to - from == 1) continue;  // attention_decode.cu has it
        const int past = context_lens[s] - to;  // a token's number in the step plus this is its position
        const int context_len = min(to, end) + past;  // that any of these queries sees
        const KvPlace place{
            block_tables + (long long)s * table_width, num_kv_heads, kv_head, page_tokens, row_size<KV>(D)
        };
        float maximum[4], total[4] = {}, sums[4][PARTS][4] = {};
        for (int i = 0; i < 4; ++i) maximum[i] = LOWEST;

        for (int tile = 0; tile * KEYS < context_len; ++tile) {
            const int rows = min(KEYS, context_len - tile * KEYS);
            if (threadIdx.x < rows) shared.keys[threadIdx.x] = place.key(tile * KEYS + threadIdx.x);
            __syncthreads();
            load_tile(shared, kv_layer, rows);
            __syncthreads();
            float scores[4][2] = {};
            score_tile(shared, y, x, scores);
            for (int i = 0; i < 4; ++i) {
                const int position = first + 4 * y + i + past;
                for (int c = 0; c < 2; ++c) {
                    if (tile * KEYS + x + ACROSS * c > position) scores[i][c] = LOWEST;
                }
                const float highest = lanes_max(fmaxf(scores[i][0], scores[i][1]), ACROSS);
                const float now = fmaxf(maximum[i], highest), shrink = expf(maximum[i] - now);
                maximum[i] = now;
                total[i] *= shrink;
                for (int c = 0; c < 2; ++c) {
                    const float weight = expf(scores[i][c] - now);
                    shared.weights[4 * y + i][x + ACROSS * c] = weight;
                    total[i] += weight;
                }
                for (int p = 0; p < PARTS; ++p) {
                    for (int j = 0; j < 4; ++j) sums[i][p][j] *= shrink;
                }
            }
            __syncthreads();  // all are done with the keys
            load_tile(shared, kv_layer + place.value_distance(), rows);
            __syncthreads();
            for (int k = 0; k < KEYS; k += 4) {
                float weight[4][4];
                for (int i = 0; i < 4; ++i) load4(&shared.weights[4 * y + i][k], weight[i]);
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    const int column = 4 * (x + ACROSS * p);
                    if (column >= D) break;
                    for (int n = 0; n < 4; ++n) {
                        float value[4];
                        load4(&shared.rows[k + n][column], value);
                        for (int i = 0; i < 4; ++i) {
                            for (int j = 0; j < 4; ++j) sums[i][p][j] += weight[i][n] * value[j];
                        }
                    }
                }
            }
        }

        for (int i = 0; i < 4; ++i) {
            const float sum = lanes_sum(total[i], ACROSS);
            const long long token = first + 4 * y + i;
            if (token < from || token >= min(to, end)) continue;
            for (int p = 0; p < PARTS; ++p) {
                const int column = 4 * (x + ACROSS * p);
                if (column >= D) break;
                for (int j = 0; j < 4; ++j) sums[i][p][j] /= sum;
                store4(out + (token * num_heads + head) * D + column, sums[i][p]);
            }
        }
    }
}
