// x times int8 weights, a few rows at a time: each weight is read once for ROWS rows. Panels [P, width, 16].
#include "packed_sums.cuh"

template <int ROWS>
__global__ void __launch_bounds__(THREADS) linear_int8(
    const float* x, const unsigned* panels, const float* scales, const float* bias, float* out, int num_rows,
    int num_out, int width
) {
    const int first_row = blockIdx.y * ROWS;
    const float* row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row[r] = x + (long long)min(first_row + r, num_rows - 1) * width;
    const unsigned* panel = panels + (long long)blockIdx.x * width * QUADS;  // a word: four outputs of one column
    float sums[ROWS][4] = {};
#pragma unroll 4
    for (int i = threadIdx.x; i < width * QUADS; i += THREADS) {
        const unsigned word = panel[i] ^ 0x80808080u;  // from -128 .. 127 to 0 .. 255
        float weight[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) weight[j] = small_integer(word >> 8 * j & 0xFFu, 8388608.0f + 128.0f);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float factor = row[r][i / QUADS];
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[r][j] += factor * weight[j];
        }
    }
    finish_panel<ROWS>(sums, scales + blockIdx.x * PANEL, bias, out, first_row, num_rows, num_out);
}
