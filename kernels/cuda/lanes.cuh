// Sums and maxima over the lanes of a warp and the warps of a block.

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xFFFFFFFFu;
#define LOWEST __uint_as_float(0xFF800000u)  // minus infinity: below every score

// Over groups of `size` neighbouring lanes, a power of two; every lane gets it. All 32 lanes must call it.
__device__ __forceinline__ float lanes_sum(float value, int size = WARP) {
    for (int step = size / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

__device__ __forceinline__ float lanes_max(float value, int size = WARP) {
    for (int step = size / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
}

// Over a block of whole warps, 32 at most; every thread gets it. Once a kernel.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float of_warp[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    value = lanes_sum(value);
    if (lane == 0) of_warp[warp] = value;
    __syncthreads();
    return lanes_sum(lane < (int)blockDim.x / WARP ? of_warp[lane] : 0.0f);
}
