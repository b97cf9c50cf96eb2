// Products of many rows, `y[m, n] = x[m, :] . w[n, :]`, on tensor cores: for machines without cuBLASLt.
#include "common.cuh"

namespace gemm {

constexpr int TILE_M = 64, TILE_N = 64, TILE_K = 64, CHUNKS = TILE_K / 8, STAGES = 3;
constexpr int STAGE_BYTES = (TILE_M + TILE_N) * TILE_K * 2;

}  // namespace gemm

struct Gemm {
    const bf16 *x;   // [m, k], k a multiple of 8
    const bf16 *w;   // [n, k]
    void *y;         // [m, n]: bf16, or f32 where the name says so
    int m, n, k;
};

namespace gemm {

// One stage: 64 rows of x and of w, 64 elements of k; zeros beyond the matrices.
__device__ __forceinline__ void load_stage(unsigned char *stage, const Gemm &p, int m, int n, int k) {
    for (int i = threadIdx.x; i < (TILE_M + TILE_N) * CHUNKS; i += blockDim.x) {
        const int row = i / CHUNKS % TILE_M, chunk = i % CHUNKS, at = k + chunk * 8;
        const bool is_x = i < TILE_M * CHUNKS;
        const int from = is_x ? m + row : n + row;
        const bool valid = from < (is_x ? p.m : p.n) && at < p.k;
        const bf16 *source = valid ? (is_x ? p.x : p.w) + int64_t(from) * p.k + at : p.x;
        copy_async(stage + (is_x ? 0 : TILE_M * TILE_K * 2) + swizzled<CHUNKS>(row, chunk), source, valid);
    }
    copy_commit();
}

enum class To { Bf16, AddF32, F32 };

template <To TO>
__device__ __forceinline__ void multiply(const Gemm &p) {
    SHARED_MEMORY(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int m = blockIdx.y * TILE_M, n = blockIdx.x * TILE_N, steps = (p.k + TILE_K - 1) / TILE_K;
    float d[TILE_N / 8][4] = {};
    for (int s = 0; s < STAGES - 1; s++) load_stage(memory + s * STAGE_BYTES, p, m, n, s * TILE_K);
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        // Everybody's copies of this stage are there, and everybody is done with the stage that is overwritten next.
        __syncthreads();
        load_stage(memory + (step + STAGES - 1) % STAGES * STAGE_BYTES, p, m, n, (step + STAGES - 1) * TILE_K);
        const unsigned char *x = memory + step % STAGES * STAGE_BYTES, *w = x + TILE_M * TILE_K * 2;
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) {
            uint32_t a[4];
            load_matrices(a, x + swizzled<CHUNKS>(warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int j = 0; j < TILE_N / 16; j++) {
                uint32_t b[4];
                load_matrices(b, w + swizzled<CHUNKS>(j * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
                mma_bf16(d[2 * j], a, b);
                mma_bf16(d[2 * j + 1], a, b + 2);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = m + warp * 16 + lane / 4 + (i >= 2 ? 8 : 0), column = n + j * 8 + lane % 4 * 2 + i % 2;
            if (row >= p.m || column >= p.n) continue;
            const int64_t to = int64_t(row) * p.n + column;
            if (TO == To::AddF32) static_cast<float *>(p.y)[to] += d[j][i];
            else if (TO == To::F32) static_cast<float *>(p.y)[to] = d[j][i];
            else static_cast<bf16 *>(p.y)[to] = __float2bfloat16_rn(d[j][i]);
        }
}

}  // namespace gemm

#define GEMM(name, to)                                                         \
    extern "C" __global__ void __launch_bounds__(128) name(Gemm p) { gemm::multiply<gemm::To::to>(p); } \
    EXPORT(name)
GEMM(gemm_bf16, Bf16)
GEMM(gemm_add, AddF32)
GEMM(gemm_f32, F32)
