// Activations, table lookup and casts.
#include "common.cuh"

// out[row, i] = silu(gate) * up for rows `[gate | up]` of twice `width` elements, a multiple of 8.
extern "C" __global__ void __launch_bounds__(256) silu_mul(const bf16 *gate_up, bf16 *out, int width) {
    const int64_t row = blockIdx.x;
    for (int i = (blockIdx.y * blockDim.x + threadIdx.x) * 8; i < width; i += gridDim.y * blockDim.x * 8) {
        float gate[8], up[8];
        unpack(load16(gate_up + row * 2 * width + i), gate);
        unpack(load16(gate_up + row * 2 * width + width + i), up);
#pragma unroll
        for (int j = 0; j < 8; j++) up[j] *= gate[j] / (1.f + exp_fast(-gate[j]));
        store16(out + row * width + i, {pack(up[0], up[1]), pack(up[2], up[3]), pack(up[4], up[5]), pack(up[6], up[7])});
    }
}
EXPORT(silu_mul)

// x[row, :] = table[ids[row], :], widened. `width` is a multiple of 8.
extern "C" __global__ void __launch_bounds__(128) embedding(const bf16 *table, const int *ids, float *x, int width) {
    const bf16 *from = table + int64_t(ids[blockIdx.x]) * width;
    float4 *to = reinterpret_cast<float4 *>(x + int64_t(blockIdx.x) * width);
    for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
        float v[8];
        unpack(load16(from + 8 * i), v);
        to[2 * i] = {v[0], v[1], v[2], v[3]};
        to[2 * i + 1] = {v[4], v[5], v[6], v[7]};
    }
}
EXPORT(embedding)

// x[row, i] += bias[i].
extern "C" __global__ void __launch_bounds__(256) add_bias(float *x, const float *bias, int width) {
    for (int i = threadIdx.x; i < width; i += blockDim.x) x[int64_t(blockIdx.x) * width + i] += bias[i];
}
EXPORT(add_bias)

// Checkpoints in f32 and f16 become bf16 where they are uploaded to.
template <class From, class Widen>
__device__ __forceinline__ void to_bf16(const From *from, bf16 *to, int64_t count, Widen widen) {
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        to[i] = __float2bfloat16_rn(widen(from[i]));
}
extern "C" __global__ void cast_f32_bf16(const float *from, bf16 *to, int64_t count) {
    to_bf16(from, to, count, [](float x) { return x; });
}
EXPORT(cast_f32_bf16)
extern "C" __global__ void cast_f16_bf16(const __half *from, bf16 *to, int64_t count) {
    to_bf16(from, to, count, [](__half x) { return __half2float(x); });
}
EXPORT(cast_f16_bf16)
