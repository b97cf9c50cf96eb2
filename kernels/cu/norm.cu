// RMSNorm (Zhang & Sennrich 2019) of rows of the residual stream, rounded for the next product.
#include "common.cuh"

// y[i, :] = bf16(x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight), r = rows[i], or i where there are no `rows`.
// A block a row, `width` a multiple of 4. The residual was added to x by the product before: see skinny.cu.
extern "C" __global__ void __launch_bounds__(256)
    rms_norm(const float *x, const float *weight, const int *rows, bf16 *y, int width, float eps) {
    SHARED_MEMORY(room);
    const int row = rows ? rows[blockIdx.x] : blockIdx.x;
    const float4 *from = reinterpret_cast<const float4 *>(x + int64_t(row) * width);
    const float4 *weights = reinterpret_cast<const float4 *>(weight);
    uint2 *to = reinterpret_cast<uint2 *>(y + int64_t(blockIdx.x) * width);
    float squares = 0.f;
    for (int i = threadIdx.x; i < width / 4; i += blockDim.x) {
        const float4 v = from[i];
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float scale = rsqrtf(block_sum(squares, reinterpret_cast<float *>(room)) / width + eps);
    for (int i = threadIdx.x; i < width / 4; i += blockDim.x) {
        const float4 v = from[i], w = weights[i];
        to[i] = {pack(v.x * scale * w.x, v.y * scale * w.y), pack(v.z * scale * w.z, v.w * scale * w.w)};
    }
}
EXPORT(rms_norm)
