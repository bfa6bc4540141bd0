// What the products with packed weights have in common: a block makes the 16 outputs of one panel (kernels/packing.py)
// for ROWS rows of x. Its threads share the width out among them; each has sums of four of the outputs, quad
// `threadIdx.x % 4`.
#include "lanes.cuh"

constexpr int PANEL = 16;
constexpr int QUADS = 4;
constexpr int THREADS = 256;

// A weight 0 .. 255 as a float: put into the last bits of 2^23, which is then taken away. Cheaper than a conversion.
__device__ __forceinline__ float small_integer(unsigned value, float offset) {
    return __uint_as_float(0x4B000000u | value) - offset;
}

// The panel's outputs, from all threads' sums; `scales` of the panel's 16 outputs, or null for 1.
template <int ROWS>
__device__ void finish_panel(
    float (&sums)[ROWS][4], const float* scales, const float* bias, float* out, int first_row, int num_rows, int num_out
) {
    __shared__ float of_warp[THREADS / WARP][ROWS][PANEL];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float sum = sums[r][j];
            for (int step = WARP / 2; step >= QUADS; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
            if (lane < QUADS) of_warp[warp][r][4 * lane + j] = sum;
        }
    }
    __syncthreads();
    const int r = threadIdx.x / PANEL, o = threadIdx.x % PANEL, n = blockIdx.x * PANEL + o;
    if (r >= ROWS || first_row + r >= num_rows || n >= num_out) return;
    float sum = 0.0f;
    for (int w = 0; w < THREADS / WARP; ++w) sum += of_warp[w][r][o];
    if (scales) sum *= scales[o];
    out[(long long)(first_row + r) * num_out + n] = bias ? sum + bias[n] : sum;
}
