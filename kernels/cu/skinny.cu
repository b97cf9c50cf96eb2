// Products of a few rows of activations with a large weight, `y[m, n] = x[m, :] . w[n, :]`: the speed of memory is the limit.
//
// Sixteen weight rows and up to 8 TILES activation rows meet in one tensor core instruction. A sum over k may be taken in any
// order, so a lane reads eight neighbouring elements of a weight row (16 bytes) and of the activation's, and calls them the
// elements that the instruction wants from it: no shared memory and no shuffles on the way. The warps of a block share k;
// their sums are added in a fixed order, so a row's result depends on that row alone.
//
// Around the product: RMSNorm of x before it (its scale is a factor of the whole row, so it is applied after), and after it
// the residual, or silu(gate) * up. The normalised x is f32, and goes in as two bf16 numbers, itself rounded and what that left:
// the memory is the limit, and the result is rounded once.
#include "common.cuh"

namespace few_rows {

enum class Before { Nothing, Norm };
enum class After { Store, AddToResidual, SiluMul, StoreF32 };

constexpr int WARPS = 8, ROWS = 16, DEPTH = 32;   // DEPTH: elements of k that a warp takes in a step
constexpr int STEPS = 4;                          // steps whose loads are under way together

}  // namespace few_rows

struct Skinny {
    const void *x;        // bf16 [m, k], or f32 with Before::Norm
    const float *norm;    // [k], with Before::Norm
    const bf16 *w;        // [n, k]; with SiluMul [2 n, k], gate above up
    void *y;              // [m, n]: bf16; f32 with AddToResidual and StoreF32
    int m, n, k;          // k a multiple of 32
    float eps;
};

namespace few_rows {

template <Before BEFORE, After AFTER, int TILES>
__device__ __forceinline__ void skinny(const Skinny &p) {
    constexpr int PARTS = AFTER == After::SiluMul ? 2 : 1, COLUMNS = 8 * TILES;
    SHARED_MEMORY(memory);
    float *sums = reinterpret_cast<float *>(memory);               // [WARPS][PARTS][COLUMNS][ROWS]
    float *squares = sums + WARPS * PARTS * COLUMNS * ROWS;        // [WARPS][8], with Before::Norm
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    const int first = blockIdx.x * ROWS;
    const bf16 *upper[PARTS], *lower[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        // A row beyond the last repeats it; it is not stored.
        upper[part] = p.w + (int64_t(part) * p.n + min(first + group, p.n - 1)) * p.k + 8 * quad;
        lower[part] = p.w + (int64_t(part) * p.n + min(first + group + 8, p.n - 1)) * p.k + 8 * quad;
    }
    float d[PARTS][TILES][4] = {};
    float square = 0.f;
    const int count = p.k / DEPTH;
    for (int base = warp; base < count; base += WARPS * STEPS) {
        uint4 a[STEPS][PARTS], b[STEPS][PARTS];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int at = base + step * WARPS;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                a[step][part] = at < count ? load16_once(upper[part] + at * DEPTH) : make_uint4(0, 0, 0, 0);
                b[step][part] = at < count ? load16_once(lower[part] + at * DEPTH) : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int at = (base + step * WARPS) * DEPTH + 8 * quad;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const int row = 8 * tile + group;
                uint4 x = make_uint4(0, 0, 0, 0), left = make_uint4(0, 0, 0, 0);
                if (row < p.m && at < p.k) {
                    if (BEFORE == Before::Norm) {
                        const float *from = static_cast<const float *>(p.x) + int64_t(row) * p.k + at;
                        float v[8];
#pragma unroll
                        for (int i = 0; i < 8; i++) {
                            v[i] = from[i];
                            square += v[i] * v[i];
                            v[i] *= p.norm[at + i];
                        }
                        x = {pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7])};
                        left = {pack_left(x.x, v[0], v[1]), pack_left(x.y, v[2], v[3]), pack_left(x.z, v[4], v[5]),
                                pack_left(x.w, v[6], v[7])};
                    } else {
                        x = load16(static_cast<const bf16 *>(p.x) + int64_t(row) * p.k + at);
                    }
                }
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    const uint4 &u = a[step][part], &l = b[step][part];
                    const uint32_t a0[4] = {u.x, l.x, u.y, l.y}, a1[4] = {u.z, l.z, u.w, l.w};
                    const uint32_t b0[2] = {x.x, x.y}, b1[2] = {x.z, x.w};
                    mma_bf16(d[part][tile], a0, b0);
                    mma_bf16(d[part][tile], a1, b1);
                    if (BEFORE == Before::Norm) {
                        const uint32_t c0[2] = {left.x, left.y}, c1[2] = {left.z, left.w};
                        mma_bf16(d[part][tile], a0, c0);
                        mma_bf16(d[part][tile], a1, c1);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = group + (i >= 2 ? 8 : 0), column = 8 * tile + 2 * quad + i % 2;
                sums[((warp * PARTS + part) * COLUMNS + column) * ROWS + row] = d[part][tile][i];
            }
    if (BEFORE == Before::Norm) {
        square += __shfl_xor_sync(ALL, square, 1);
        square += __shfl_xor_sync(ALL, square, 2);
        if (quad == 0) squares[warp * 8 + group] = square;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS * ROWS; i += blockDim.x) {
        const int row = first + i % ROWS, column = i / ROWS;
        if (row >= p.n || column >= p.m) continue;
        float sum[PARTS] = {}, scale = 1.f;
        for (int w = 0; w < WARPS; w++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) sum[part] += sums[(w * PARTS + part) * COLUMNS * ROWS + i];
        if (BEFORE == Before::Norm) {
            float total = 0.f;
            for (int w = 0; w < WARPS; w++) total += squares[w * 8 + column];
            scale = rsqrtf(total / p.k + p.eps);
        }
        const int64_t to = int64_t(column) * p.n + row;
        float value = sum[0] * scale;
        if (AFTER == After::SiluMul) value = value / (1.f + exp_fast(-value)) * (sum[PARTS - 1] * scale);
        if (AFTER == After::AddToResidual) static_cast<float *>(p.y)[to] += value;
        else if (AFTER == After::StoreF32) static_cast<float *>(p.y)[to] = value;
        else static_cast<bf16 *>(p.y)[to] = __float2bfloat16_rn(value);
    }
}

}  // namespace few_rows

#define SKINNY(name, before, after, tiles)                                                       \
    extern "C" __global__ void __launch_bounds__(few_rows::WARPS * 32) name(Skinny p) {          \
        using namespace few_rows;                                                                \
        skinny<Before::before, After::after, tiles>(p);                                          \
    }                                                                                            \
    EXPORT(name)

// The names say what is done before and after, and how many rows of x there may be.
SKINNY(skinny_norm_store_8, Norm, Store, 1)
SKINNY(skinny_norm_silu_8, Norm, SiluMul, 1)
SKINNY(skinny_store_8, Nothing, Store, 1)
SKINNY(skinny_silu_8, Nothing, SiluMul, 1)
SKINNY(skinny_add_8, Nothing, AddToResidual, 1)
SKINNY(skinny_f32_8, Nothing, StoreF32, 1)
SKINNY(skinny_store_16, Nothing, Store, 2)
SKINNY(skinny_silu_16, Nothing, SiluMul, 2)
SKINNY(skinny_add_16, Nothing, AddToResidual, 2)
SKINNY(skinny_f32_16, Nothing, StoreF32, 2)
SKINNY(skinny_store_32, Nothing, Store, 4)
SKINNY(skinny_silu_32, Nothing, SiluMul, 4)
SKINNY(skinny_add_32, Nothing, AddToResidual, 4)
SKINNY(skinny_f32_32, Nothing, StoreF32, 4)
