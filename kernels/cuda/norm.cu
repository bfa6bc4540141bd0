// Root-mean-square norm of a row by one block, with and without the residual sum before it. width is a multiple of 4.
#include "numbers.cuh"
#include "lanes.cuh"

// The threads that summed an element of the row are those that read it again, so it need not be visible to others.
template <typename X>
__device__ void norm_row(const X* row, const X* weight, X* out, float squares, int width, float eps) {
    const float factor = rsqrtf(block_sum(squares) / width + eps);
    for (int i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x) {
        float x[4], w[4];
        load4(row + i, x);
        load4(weight + i, w);
        for (int j = 0; j < 4; ++j) x[j] *= factor * w[j];
        store4(out + i, x);
    }
}

template <typename X>
__global__ void rms_norm(const X* x, const X* weight, X* out, int width, float eps) {
    const X* row = x + (long long)blockIdx.x * width;
    float squares = 0.0f;
    for (int i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x) {
        float values[4];
        load4(row + i, values);
        for (int j = 0; j < 4; ++j) squares += values[j] * values[j];
    }
    norm_row(row, weight, out + (long long)blockIdx.x * width, squares, width, eps);
}

template <typename X>
__global__ void add_rms_norm(
    const X* x, const X* residual, const X* weight, X* out, X* total, int width, float eps
) {
    const long long start = (long long)blockIdx.x * width;
    float squares = 0.0f;
    for (int i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x) {
        float left[4], right[4];
        load4(x + start + i, left);
        load4(residual + start + i, right);
        for (int j = 0; j < 4; ++j) {
            left[j] = widened(narrowed<X>(left[j] + right[j]));  // what is normed is what the next layer adds to
            squares += left[j] * left[j];
        }
        store4(total + start + i, left);
    }
    norm_row(total + start, weight, out + start, squares, width, eps);
}
