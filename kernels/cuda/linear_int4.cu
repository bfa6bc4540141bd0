// x times 4-bit weights, a few rows at a time: each weight is read once for ROWS rows. Panels [P, blocks, 256], a block
// being 32 columns of 16 outputs; a word holds 8 columns of one output. width is a multiple of 8.
#include "numbers.cuh"
#include "packed_sums.cuh"

constexpr int BLOCK = 32;
constexpr int PAIR = 8;     // columns of a word: the low halves of its bytes hold the first four
constexpr int LOADS = 16;   // of four words each, to a block

template <int ROWS>
__global__ void __launch_bounds__(THREADS) linear_int4(
    const float* x, const uint4* panels, const Half* scales, const float* bias, float* out, int num_rows, int num_out,
    int width
) {
    const int first_row = blockIdx.y * ROWS, num_blocks = (width + BLOCK - 1) / BLOCK;
    const float* row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row[r] = x + (long long)min(first_row + r, num_rows - 1) * width;
    const uint4* panel = panels + (long long)blockIdx.x * num_blocks * LOADS;
    const Half* of_panel = scales + (long long)blockIdx.x * num_blocks * 2 * PANEL;
    float sums[ROWS][4] = {};
#pragma unroll 2
    for (int i = threadIdx.x; i < num_blocks * LOADS; i += THREADS) {
        const int block = i / LOADS, column = block * BLOCK + i % LOADS / QUADS * PAIR;
        if (column >= width) continue;  // the rest of the last block is filled up
        const uint4 raw = panel[i];
        const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
        float step[4], least[4];
        load4(of_panel + block * 2 * PANEL + i % QUADS * 4, step);
        load4(of_panel + (block * 2 + 1) * PANEL + i % QUADS * 4, least);
        float weight[4][PAIR];
#pragma unroll
        for (int o = 0; o < 4; ++o) {
#pragma unroll
            for (int k = 0; k < PAIR; ++k) {
                weight[o][k] = small_integer(words[o] >> (8 * (k % 4) + 4 * (k / 4)) & 0xFu, 8388608.0f);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float low[4], high[4];
            load4(row[r] + column, low);
            load4(row[r] + column + 4, high);
            float whole = 0.0f;
            for (int k = 0; k < 4; ++k) whole += low[k] + high[k];
#pragma unroll
            for (int o = 0; o < 4; ++o) {
                float sum = 0.0f;
                for (int k = 0; k < 4; ++k) sum += low[k] * weight[o][k] + high[k] * weight[o][4 + k];
                sums[r][o] += step[o] * sum + least[o] * whole;
            }
        }
    }
    finish_panel<ROWS>(sums, nullptr, bias, out, first_row, num_rows, num_out);
}
