// Whole blocks of the KV pool, 16 bytes a thread at a time: each is contiguous, over all layers.
#include "common.cuh"

// Writes each row's keys and values (`[rows, heads, dim]` each, `row` elements a row, a multiple of 8) to its slot. A
// negative slot is padding. A block a row.
extern "C" __global__ void __launch_bounds__(256)
    reshape_and_cache(const bf16 *keys, const bf16 *values, const int64_t *slots, Pool pool, int row) {
    const int64_t slot = slots[blockIdx.x];
    if (slot < 0) return;
    bf16 *to = pool.layer + slot / pool.block_size * pool.block + slot % pool.block_size * row;
    const int64_t from = int64_t(blockIdx.x) * row, half = int64_t(pool.block_size) * row;
    for (int i = threadIdx.x * 8; i < row; i += blockDim.x * 8) {
        store16(to + i, load16(keys + from + i));
        store16(to + half + i, load16(values + from + i));
    }
}
EXPORT(reshape_and_cache)

// to[to_ids[i]] = from[from_ids[i]] for blocks of `bytes`, a multiple of 16; null ids count up. Both may be the pool, if no
// block is both read and written. grid.x blocks share each copy, grid.y is the number of blocks.
extern "C" __global__ void __launch_bounds__(256)
    copy_blocks(unsigned char *to, const int *to_ids, const unsigned char *from, const int *from_ids, int64_t bytes) {
    const int i = blockIdx.y;
    to += (to_ids ? to_ids[i] : i) * bytes;
    from += (from_ids ? from_ids[i] : i) * bytes;
    const int64_t step = int64_t(gridDim.x) * blockDim.x * 16;
    for (int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 16; at < bytes; at += step)
        store16(to + at, load16_once(from + at));
}
EXPORT(copy_blocks)
