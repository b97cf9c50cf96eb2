// What all kernels share: bf16, 16-byte accesses, reductions, tensor core instructions.
//
// Kernels are plain functions with C names, launched through the driver API. The same sources run on the CPU in tests
// (emu/): there g++ is given emu/cuda.h before each file, and EXPORT registers a kernel by name.
#pragma once

#ifdef KVFERRY_EMU
#include "emu/tensor.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]
#define EXPORT(kernel)
#endif

using bf16 = __nv_bfloat16;

constexpr unsigned ALL = 0xffffffffu;
constexpr float MINUS_INFINITY = -__builtin_huge_valf();

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two values rounded to bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
#ifdef KVFERRY_EMU
    return __float2bfloat16_rn(low).bits | uint32_t(__float2bfloat16_rn(high).bits) << 16;
#else
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
#endif
}

// What rounding two values to `pair` left of them, rounded.
__device__ __forceinline__ uint32_t pack_left(uint32_t pair, float low, float high) {
    return pack(low - low_half(pair), high - high_half(pair));
}

__device__ __forceinline__ void unpack(const uint4 &eight, float to[8]) {
    to[0] = low_half(eight.x), to[1] = high_half(eight.x), to[2] = low_half(eight.y), to[3] = high_half(eight.y);
    to[4] = low_half(eight.z), to[5] = high_half(eight.z), to[6] = low_half(eight.w), to[7] = high_half(eight.w);
}

#ifdef KVFERRY_EMU
static inline uint4 load16(const void *at) { return *static_cast<const uint4 *>(emu_aligned(at)); }
static inline uint4 load16_once(const void *at) { return load16(at); }
static inline void store16(void *at, uint4 value) { *static_cast<uint4 *>(emu_aligned(at)) = value; }
#else
__device__ __forceinline__ uint4 load16(const void *at) { return *static_cast<const uint4 *>(at); }
__device__ __forceinline__ void store16(void *at, uint4 value) { *static_cast<uint4 *>(at) = value; }

// For what a step reads once and no kernel of it writes: weights and cached KV leave L1 to activations.
__device__ __forceinline__ uint4 load16_once(const void *at) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(at));
    return value;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float exp_fast(float x) { return __expf(x); }

__device__ __forceinline__ uint32_t shared_address(const void *at) { return uint32_t(__cvta_generic_to_shared(at)); }

// d (16 x 8, f32) += a (16 x 16, bf16, by rows) * b (16 x 8, bf16, by columns).
__device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory; lane 8 i + r gives the address of row r of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t to[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t to[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)));
}

// 16 bytes into shared memory, or zeros; done when `copy_wait` says so.
__device__ __forceinline__ void copy_async(void *to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }
// Waits for this thread's committed copies but the last BUT groups. Other threads' need a barrier besides.
template <int BUT>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(BUT) : "memory");
}
#endif

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int bits = 16; bits; bits >>= 1) value += __shfl_xor_sync(ALL, value, bits);
    return value;
}

// The sum over the block, in every thread. `room`: a float for each warp, free again after the next barrier.
__device__ __forceinline__ float block_sum(float value, float *room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = warp_sum(value);
    if (lane == 0) room[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? room[lane] : 0.f);
}

// Rows of CHUNKS 16-byte chunks in shared memory, each row's chunks permuted so that the eight rows that ldmatrix reads
// together lie in different banks.
template <int CHUNKS>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    static_assert(CHUNKS == 4 || CHUNKS % 8 == 0, "rows of 64 or a multiple of 128 bytes");
    return (row * CHUNKS + (CHUNKS == 4 ? chunk ^ (row / 2 & 3) : chunk ^ (row & 7))) * 16;
}

// The KV pool as one layer sees it: `[block][this layer][K|V][token][head][dim]`.
struct Pool {
    bf16 *layer;         // this layer's keys in block 0
    int64_t block;       // elements from a block to the next
    int block_size;      // tokens in a block
    int heads;           // KV heads

    // Where a head of a token's keys is; its values are `values()` elements further.
    template <int DIM>
    __device__ __forceinline__ int64_t at(int id, int token, int head) const {
        return id * block + (int64_t(token) * heads + head) * DIM;
    }
    __device__ __forceinline__ int64_t values(int dim) const { return int64_t(block_size) * heads * dim; }
};
