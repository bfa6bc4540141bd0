// The gated activation: silu(gate) * up, of rows [gate, up] of 2 * width. width is a multiple of 4.
#include "numbers.cuh"

template <typename X>
__global__ void silu_mul(const X* gate_up, X* out, int num_rows, int width) {
    const long long i = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= (long long)num_rows * width) return;
    const X* from = gate_up + i / width * 2 * width + i % width;
    float gate[4], up[4];
    load4(from, gate);
    load4(from + width, up);
    for (int j = 0; j < 4; ++j) gate[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
    store4(out + i, gate);
}
