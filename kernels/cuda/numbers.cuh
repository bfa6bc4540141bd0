// Numbers narrower than float, as bits: loads widen to float, all sums are float, stores narrow.
//
// The compiler that builds these sources when a worker starts comes without CUDA's headers, so the conversions are here.

struct Half {
    unsigned short bits;
};
struct Bfloat {
    unsigned short bits;
};
struct Code {  // fp8, e4m3
    unsigned char bits;
};

#ifndef BATON_EMULATED  // the tests' CPU has its own two
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(Half x) { return half_to_float(x.bits); }
__device__ __forceinline__ float widened(Bfloat x) { return __uint_as_float((unsigned)x.bits << 16); }

// Where float16 has a code's bits, they are worth the code's value over this.
#define CODE_UNIT 256.0f

// In units of CODE_UNIT, which a row's scale takes up.
__device__ __forceinline__ float widened(Code x) {
    return half_to_float((unsigned short)(((x.bits & 0x80) << 8) | ((x.bits & 0x7F) << 7)));
}

template <typename T>
__device__ T narrowed(float x);

template <>
__device__ __forceinline__ float narrowed<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ Half narrowed<Half>(float x) {
    return Half{float_to_half(x)};
}
template <>
__device__ __forceinline__ Bfloat narrowed<Bfloat>(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return Bfloat{0x7FFF};  // rounding would carry a NaN over to zero
    return Bfloat{(unsigned short)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
__device__ __forceinline__ Code narrowed<Code>(float x) {  // the nearest, ties to even, of -448 .. 448
    const unsigned bits = __float_as_uint(x), size = bits & 0x7FFFFFFFu;
    unsigned code = ((size + 0x7FFFFu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
    if (size < 0x3C800000u) {  // below 2^-6 codes are 2^-9 apart, the last bit of 16384
        code = __float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u;
    }
    return Code{(unsigned char)((code < 0x7Eu ? code : 0x7Eu) | ((bits >> 24) & 0x80u))};
}

// Four in a row from memory that is aligned to four of them.
__device__ __forceinline__ void load4(const float* from, float (&to)[4]) {
    const float4 raw = *reinterpret_cast<const float4*>(from);
    to[0] = raw.x, to[1] = raw.y, to[2] = raw.z, to[3] = raw.w;
}
template <typename T>  // Half or Bfloat
__device__ __forceinline__ void load4(const T* from, float (&to)[4]) {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    to[0] = widened(T{(unsigned short)raw.x}), to[1] = widened(T{(unsigned short)(raw.x >> 16)});
    to[2] = widened(T{(unsigned short)raw.y}), to[3] = widened(T{(unsigned short)(raw.y >> 16)});
}
__device__ __forceinline__ void load4(const Code* from, float (&to)[4]) {
    const unsigned raw = *reinterpret_cast<const unsigned*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = widened(Code{(unsigned char)(raw >> 8 * i)});
}

__device__ __forceinline__ void store4(float* to, const float (&from)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}
template <typename T>
__device__ __forceinline__ void store4(T* to, const float (&from)[4]) {
    unsigned short bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = narrowed<T>(from[i]).bits;
    *reinterpret_cast<uint2*>(to) = make_uint2(bits[0] | (unsigned)bits[1] << 16, bits[2] | (unsigned)bits[3] << 16);
}
