// From the joined projection to queries and cached keys and values, in one pass: bias, norms of heads, rotary embedding
// (half-split as in GPT-NeoX; Su et al. 2021) and KV write. Everything is f32 in between and rounded once.
#include "common.cuh"

struct Heads {
    int q, kv, dim;
};

// One warp a head. `qkv`: rows of [q heads | k heads | v heads]; `bias` likewise, or null; `q_norm`, `k_norm`: `[dim]`
// each, or null. `cos`, `sin`: `[positions, dim / 2]`. A row with a negative slot is padding and writes no KV.
extern "C" __global__ void __launch_bounds__(256)
    split_qkv(const bf16 *qkv, const float *bias, const float *q_norm, const float *k_norm, const float *cos,
              const float *sin, const int *positions, const int64_t *slots, bf16 *q, Pool pool, Heads heads, float eps) {
    constexpr int PAIRS = 4;   // of a lane: heads of up to 256 elements
    const int lane = threadIdx.x % 32, head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const int row = blockIdx.x, all = heads.q + 2 * heads.kv, half = heads.dim / 2;
    if (head >= all) return;
    const bf16 *from = qkv + (int64_t(row) * all + head) * heads.dim;
    float low[PAIRS], high[PAIRS], squares = 0.f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int pair = lane + 32 * i;
        const bool inside = pair < half;
        low[i] = inside ? __bfloat162float(from[pair]) + (bias ? bias[head * heads.dim + pair] : 0.f) : 0.f;
        high[i] = inside ? __bfloat162float(from[pair + half]) + (bias ? bias[head * heads.dim + pair + half] : 0.f) : 0.f;
        squares += low[i] * low[i] + high[i] * high[i];
    }
    const bool is_value = head >= heads.q + heads.kv;
    const float *norm = is_value ? nullptr : head < heads.q ? q_norm : k_norm;
    const float scale = norm ? rsqrtf(warp_sum(squares) / heads.dim + eps) : 1.f;
    bf16 *to = q + (int64_t(row) * heads.q + head) * heads.dim;
    if (head >= heads.q) {
        const int64_t slot = slots[row];
        if (slot < 0) return;
        const int kv_head = is_value ? head - heads.q - heads.kv : head - heads.q;
        const int64_t token = slot % pool.block_size * heads.kv + kv_head;
        to = pool.layer + slot / pool.block_size * pool.block + token * heads.dim + (is_value ? pool.values(heads.dim) : 0);
    }
    const int64_t turn = int64_t(positions[row]) * half;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int pair = lane + 32 * i;
        if (pair >= half) continue;
        float a = low[i] * scale, b = high[i] * scale;
        if (norm) a *= norm[pair], b *= norm[pair + half];
        const float c = is_value ? 1.f : cos[turn + pair], s = is_value ? 0.f : sin[turn + pair];
        to[pair] = __float2bfloat16_rn(a * c - b * s);
        to[pair + half] = __float2bfloat16_rn(b * c + a * s);
    }
}
EXPORT(split_qkv)
