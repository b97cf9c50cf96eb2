// Attention of one query row a sequence over a paged context: the speed of memory is the limit.
//
// The context is split at fixed positions, so that a long one fills the GPU and a row's result depends on its own sequence
// alone. All query heads of a KV head are computed together, so K and V are read once (grouped-query attention). Each split
// gives a partial softmax; `combine_splits` joins them (Flash-Decoding, Dao et al. 2023).
#include "common.cuh"

struct Decode {
    const bf16 *q;             // [rows, heads, DIM]
    bf16 *out;                 // likewise
    Pool pool;
    const int *rows;           // each sequence's row of q
    const int *contexts;       // tokens that it sees, itself included; 0 is padding
    const int *table_starts;   // where its block table starts in `tables`
    const int *tables;
    const int *split_starts;   // where its splits start in `stats` and `partials`
    float *stats;              // [splits, heads, 2]: maximum (log2), sum
    float *partials;           // [splits, heads, DIM], not yet divided by the sum
    int heads;                 // query heads
    float scale;               // of scores, in units of log2: log2(e) / sqrt(DIM)
};

namespace decode {

constexpr int SPLIT = 128;   // tokens: 8 KV heads of 1,024 tokens are 64 blocks
constexpr int WARPS = 4;
constexpr int UNROLL = 4;    // tokens whose K and V a lane has under way

// Sequence blockIdx.z, GROUP query heads of a KV head, split blockIdx.x. DIM / 8 lanes share a token, 16 bytes each.
template <int DIM, int GROUP>
__device__ __forceinline__ void attend(const Decode &p) {
    constexpr int LANES = DIM / 8, AT_ONCE = 32 / LANES, STEP = WARPS * AT_ONCE * UNROLL, WIDTH = DIM + 2;
    const int context = p.contexts[blockIdx.z], split = blockIdx.x, first = split * SPLIT;
    if (first >= context) return;
    const int end = min(first + SPLIT, context);
    const int group = p.heads / p.pool.heads, parts = (group + GROUP - 1) / GROUP;
    const int kv_head = blockIdx.y / parts, head = kv_head * group + blockIdx.y % parts * GROUP;
    const int used = min(GROUP, (kv_head + 1) * group - head);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, piece = lane % LANES * 8;
    const int *table = p.tables + p.table_starts[blockIdx.z];

    float q[GROUP][8], sum[GROUP][8], top[GROUP], total[GROUP];
    const bf16 *query = p.q + (int64_t(p.rows[blockIdx.z]) * p.heads + head) * DIM + piece;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        unpack(g < used ? load16(query + g * DIM) : make_uint4(0, 0, 0, 0), q[g]);
        top[g] = MINUS_INFINITY, total[g] = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) q[g][i] *= p.scale, sum[g][i] = 0.f;
    }
    for (int base = first + warp * AT_ONCE + lane / LANES; base - lane / LANES < end; base += STEP) {
        uint4 keys[UNROLL], values[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int token = base + u * WARPS * AT_ONCE;
            if (token < end) {
                const bf16 *from = p.pool.layer + piece +
                                   p.pool.at<DIM>(table[token / p.pool.block_size], token % p.pool.block_size, kv_head);
                keys[u] = load16_once(from);
                values[u] = load16_once(from + p.pool.values(DIM));
            } else {
                keys[u] = values[u] = make_uint4(0, 0, 0, 0);
            }
        }
        float scores[UNROLL][GROUP];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float key[8];
            unpack(keys[u], key);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float score = 0.f;
#pragma unroll
                for (int i = 0; i < 8; i++) score += q[g][i] * key[i];
#pragma unroll
                for (int bits = LANES / 2; bits; bits /= 2) score += __shfl_xor_sync(ALL, score, bits);
                scores[u][g] = base + u * WARPS * AT_ONCE < end ? score : MINUS_INFINITY;
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float now = top[g];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) now = fmaxf(now, scores[u][g]);
            // Lanes that saw no token yet: any finite maximum makes weights of zero.
            const float safe = now == MINUS_INFINITY ? 0.f : now, keep = exp2_fast(top[g] - safe);
            top[g] = now;
            total[g] *= keep;
#pragma unroll
            for (int i = 0; i < 8; i++) sum[g][i] *= keep;
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                scores[u][g] = exp2_fast(scores[u][g] - safe);
                total[g] += scores[u][g];
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float value[8];
            unpack(values[u], value);
#pragma unroll
            for (int g = 0; g < GROUP; g++)
#pragma unroll
                for (int i = 0; i < 8; i++) sum[g][i] += scores[u][g] * value[i];
        }
    }

    // The lanes of a warp that hold the same piece, then the warps.
    SHARED_MEMORY(memory);
    float *of_warps = reinterpret_cast<float *>(memory);   // [WARPS][GROUP][WIDTH]
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        float now = top[g];
#pragma unroll
        for (int bits = LANES; bits < 32; bits *= 2) now = fmaxf(now, __shfl_xor_sync(ALL, now, bits));
        const float keep = exp2_fast(top[g] - (now == MINUS_INFINITY ? 0.f : now));
        total[g] *= keep;
#pragma unroll
        for (int bits = LANES; bits < 32; bits *= 2) total[g] += __shfl_xor_sync(ALL, total[g], bits);
        float *mine = of_warps + (warp * GROUP + g) * WIDTH;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float value = sum[g][i] * keep;
#pragma unroll
            for (int bits = LANES; bits < 32; bits *= 2) value += __shfl_xor_sync(ALL, value, bits);
            if (lane < LANES) mine[2 + piece + i] = value;
        }
        if (lane == 0) mine[0] = now, mine[1] = total[g];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < used * DIM; i += blockDim.x) {
        const int g = i / DIM, element = i % DIM;
        float now = MINUS_INFINITY, all = 0.f, value = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) now = fmaxf(now, of_warps[(w * GROUP + g) * WIDTH]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float *other = of_warps + (w * GROUP + g) * WIDTH;
            const float weight = exp2_fast(other[0] - now);
            all += other[1] * weight;
            value += other[2 + element] * weight;
        }
        if (context <= SPLIT) {
            p.out[(int64_t(p.rows[blockIdx.z]) * p.heads + head + g) * DIM + element] = __float2bfloat16_rn(value / all);
            continue;
        }
        const int64_t slot = int64_t(p.split_starts[blockIdx.z] + split) * p.heads + head + g;
        p.partials[slot * DIM + element] = value;
        if (element == 0) p.stats[2 * slot] = now, p.stats[2 * slot + 1] = all;
    }
}

}  // namespace decode

// Joins the splits of head blockIdx.x of sequence blockIdx.y; a thread an element.
extern "C" __global__ void __launch_bounds__(128) combine_splits(Decode p) {
    const int context = p.contexts[blockIdx.y], splits = (context + decode::SPLIT - 1) / decode::SPLIT;
    if (splits <= 1) return;
    const int64_t slot = int64_t(p.split_starts[blockIdx.y]) * p.heads + blockIdx.x;
    const float *stats = p.stats + 2 * slot, *partials = p.partials + slot * blockDim.x + threadIdx.x;
    float top = MINUS_INFINITY, total = 0.f, value = 0.f;
    for (int i = 0; i < splits; i++) top = fmaxf(top, stats[2 * i * p.heads]);
    for (int i = 0; i < splits; i++) {
        const float *stat = stats + 2 * i * p.heads;
        const float weight = exp2_fast(stat[0] - top);
        total += stat[1] * weight;
        value += partials[int64_t(i) * p.heads * blockDim.x] * weight;
    }
    const int64_t to = (int64_t(p.rows[blockIdx.y]) * p.heads + blockIdx.x) * blockDim.x + threadIdx.x;
    p.out[to] = __float2bfloat16_rn(value / total);
}
EXPORT(combine_splits)

#define DECODE(dim, group)                                                                                         \
    /* Blocks for a multiprocessor: as many as leave enough registers for the heads that a thread holds. */        \
    extern "C" __global__ void __launch_bounds__(decode::WARPS * 32, group <= 2 ? 4 : 2)                           \
        decode_attention_##dim##_##group(Decode p) {                                                               \
        decode::attend<dim, group>(p);                                                                             \
    }                                                                                                              \
    EXPORT(decode_attention_##dim##_##group)

DECODE(32, 1)
DECODE(32, 2)
DECODE(32, 4)
DECODE(64, 1)
DECODE(64, 2)
DECODE(64, 4)
DECODE(64, 8)
DECODE(128, 1)
DECODE(128, 2)
DECODE(128, 4)
DECODE(128, 8)
