// Causal attention of many new rows of each sequence over a paged context, on tensor cores.
//
// A tile is 64 lanes of one sequence and KV head; a lane is a (row, query head of the group) pair, so K and V are read once for
// all heads of a group. Keys come 64 at a time through shared memory, two tiles ahead of each other; softmax is online (Milakov
// & Gimelshein 2018) and the weights go from registers into the second product (FlashAttention-2, Dao 2023), as two bf16 numbers,
// rounded and what that left: rounded alone they would cost as much accuracy as rounding the result.
#include "common.cuh"

struct Prefill {
    const bf16 *q;             // [rows, heads, DIM]
    bf16 *out;                 // likewise
    Pool pool;
    const int *tiles;          // [tiles, 2]: sequence, first lane
    const int *starts;         // each sequence's first row of q
    const int *lengths;        // its rows
    const int *contexts;       // tokens that its last row sees, itself included
    const int *table_starts;   // where its block table starts in `tables`
    const int *tables;
    int heads;                 // query heads
    float scale;               // of scores, in units of log2: log2(e) / sqrt(DIM)
};

namespace prefill {

constexpr int LANES = 64, KEYS = 64;

// The K and V tiles of keys from `first`, zeros beyond `end`.
template <int DIM>
__device__ __forceinline__ void load_keys(unsigned char *stage, const Prefill &p, const int *table, int first, int end, int kv_head) {
    constexpr int CHUNKS = DIM / 8;
    for (int i = threadIdx.x; i < KEYS * CHUNKS; i += blockDim.x) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, token = first + row;
        const bool valid = token < end;
        const bf16 *from = p.pool.layer;
        if (valid) from += p.pool.at<DIM>(table[token / p.pool.block_size], token % p.pool.block_size, kv_head) + chunk * 8;
        copy_async(stage + swizzled<CHUNKS>(row, chunk), from, valid);
        copy_async(stage + KEYS * DIM * 2 + swizzled<CHUNKS>(row, chunk), from + p.pool.values(DIM), valid);
    }
    copy_commit();
}

template <int DIM>
__device__ __forceinline__ void attend(const Prefill &p) {
    constexpr int CHUNKS = DIM / 8, STAGE = 2 * KEYS * DIM * 2;
    SHARED_MEMORY(memory);
    const int seq = p.tiles[2 * blockIdx.x], first_lane = p.tiles[2 * blockIdx.x + 1], kv_head = blockIdx.y;
    const int group = p.heads / p.pool.heads, lanes = p.lengths[seq] * group;
    const int before = p.contexts[seq] - p.lengths[seq];   // tokens of the context that are not new
    const int *table = p.tables + p.table_starts[seq];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int end = before + (min(first_lane + LANES, lanes) - 1) / group + 1;   // keys that the last lane sees

    // Queries through shared memory into fragments that stay in registers.
    for (int i = threadIdx.x; i < LANES * CHUNKS; i += blockDim.x) {
        const int at = first_lane + i / CHUNKS, chunk = i % CHUNKS;
        const bool valid = at < lanes;
        const bf16 *from = p.q;
        if (valid) from += (int64_t(p.starts[seq] + at / group) * p.heads + kv_head * group + at % group) * DIM + chunk * 8;
        copy_async(memory + STAGE + swizzled<CHUNKS>(i / CHUNKS, chunk), from, valid);
    }
    copy_commit();
    load_keys<DIM>(memory, p, table, 0, end, kv_head);
    copy_wait<1>();
    __syncthreads();
    uint32_t q[DIM / 16][4];
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
        load_matrices(q[k], memory + STAGE + swizzled<CHUNKS>(warp * 16 + lane % 16, 2 * k + lane / 16));
    // Every warp has its queries before the second stage takes their place.
    __syncthreads();

    // This thread's two lanes: how many keys they see. A lane beyond the last sees none.
    int visible[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = first_lane + warp * 16 + lane / 4 + 8 * i;
        visible[i] = at < lanes ? before + at / group + 1 : 0;
    }
    float out[DIM / 8][4] = {}, top[2] = {MINUS_INFINITY, MINUS_INFINITY}, total[2] = {};
    const int steps = (end + KEYS - 1) / KEYS;
    for (int step = 0; step < steps; step++) {
        const unsigned char *keys = memory + step % 2 * STAGE, *values = keys + KEYS * DIM * 2;
        if (step + 1 < steps) {
            load_keys<DIM>(memory + (step + 1) % 2 * STAGE, p, table, (step + 1) * KEYS, end, kv_head);
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        float scores[KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
#pragma unroll
            for (int j = 0; j < KEYS / 16; j++) {
                uint32_t b[4];
                load_matrices(b, keys + swizzled<CHUNKS>(j * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
                mma_bf16(scores[2 * j], q[k], b);
                mma_bf16(scores[2 * j + 1], q[k], b + 2);
            }
        float now[2] = {top[0], top[1]};
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = step * KEYS + j * 8 + lane % 4 * 2 + i % 2;
                scores[j][i] = key < visible[i / 2] ? scores[j][i] * p.scale : MINUS_INFINITY;
                now[i / 2] = fmaxf(now[i / 2], scores[j][i]);
            }
        float safe[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            now[i] = fmaxf(now[i], __shfl_xor_sync(ALL, now[i], 1));
            now[i] = fmaxf(now[i], __shfl_xor_sync(ALL, now[i], 2));
            safe[i] = now[i] == MINUS_INFINITY ? 0.f : now[i];
            const float keep = exp2_fast(top[i] - safe[i]);
            top[i] = now[i];
            total[i] *= keep;
#pragma unroll
            for (int j = 0; j < DIM / 8; j++) out[j][2 * i] *= keep, out[j][2 * i + 1] *= keep;
        }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            // What one product's result holds is what the next one's first operand wants, lane by lane.
            uint32_t a[4], left[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *from = &scores[2 * k + i / 2][i % 2 * 2];
                const float low = exp2_fast(from[0] - safe[i % 2]), high = exp2_fast(from[1] - safe[i % 2]);
                total[i % 2] += low + high;
                a[i] = pack(low, high);
                left[i] = pack_left(a[i], low, high);
            }
#pragma unroll
            for (int j = 0; j < DIM / 16; j++) {
                uint32_t b[4];
                load_matrices_transposed(b, values + swizzled<CHUNKS>(k * 16 + lane % 16, 2 * j + lane / 16));
                mma_bf16(out[2 * j], a, b);
                mma_bf16(out[2 * j + 1], a, b + 2);
                mma_bf16(out[2 * j], left, b);
                mma_bf16(out[2 * j + 1], left, b + 2);
            }
        }
        // Nobody reads this stage any more when the next step overwrites it.
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] += __shfl_xor_sync(ALL, total[i], 1);
        total[i] += __shfl_xor_sync(ALL, total[i], 2);
        const int at = first_lane + warp * 16 + lane / 4 + 8 * i;
        if (at >= lanes) continue;
        const float scale = 1.f / total[i];
        bf16 *to = p.out + (int64_t(p.starts[seq] + at / group) * p.heads + kv_head * group + at % group) * DIM;
#pragma unroll
        for (int j = 0; j < DIM / 8; j++)
            *reinterpret_cast<uint32_t *>(to + j * 8 + lane % 4 * 2) = pack(out[j][2 * i] * scale, out[j][2 * i + 1] * scale);
    }
}

}  // namespace prefill

#define PREFILL(dim)                                                                        \
    extern "C" __global__ void __launch_bounds__(128) prefill_attention_##dim(Prefill p) {  \
        prefill::attend<dim>(p);                                                            \
    }                                                                                       \
    EXPORT(prefill_attention_##dim)

PREFILL(32)
PREFILL(64)
PREFILL(128)
