// From logits to token ids: argmax, or temperature, min-p, top-k, top-p and a draw.
//
// Sums of weights are integers, so the order in which threads add does not show: the same row gives the same token in every
// batch. The random number comes from the host, where it follows from the request's seed and the token's index.
#include "common.cuh"

struct SampleRow {
    double uniform;      // in [0, 1)
    float temperature;   // 0: the likeliest token
    float floor;         // ln(min_p), at least -40
    float top_p;         // 1 keeps all
    int top_k;           // 0 keeps all
};

namespace sample {

constexpr int THREADS = 1024, BINS = 256;
constexpr float UNIT = 1099511627776.f;   // 2^40: 150,000 weights of one each fit into 64 bits

// Finite floats in their order, as integers above zero; zero for what is never sampled.
__device__ __forceinline__ uint32_t ordered(float logit, bool valid) {
    const uint32_t bits = __float_as_uint(logit);
    if (!valid || (bits & 0x7fffffffu) > 0x7f800000u || logit == MINUS_INFINITY) return 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

using Mass = unsigned long long;

struct Row {
    const float *logits;
    const unsigned char *valid;
    int size;
    float top;         // the largest logit
    float temperature, floor;

    __device__ __forceinline__ Mass mass(uint32_t key) const {
        return Mass(exp_fast((from_ordered(key) - top) / temperature) * UNIT);
    }
    // 0 below the floor.
    __device__ __forceinline__ uint32_t key(int id) const {
        const uint32_t key = ordered(logits[id], valid[id]);
        return key && (from_ordered(key) - top) / temperature >= floor ? key : 0;
    }
};

// Keys above `key` are kept, and the first `equal` (by id) of those that are equal to it.
struct Threshold {
    uint32_t key;
    unsigned equal;
};

struct Room {
    Mass bins[BINS];
    Mass scan[THREADS / 32];
    Mass target;
    uint32_t prefix;
    int found;
};

// The smallest set of the largest keys (at or above `least`) whose sum of `weigh` reaches `target`, which is not 0.
// Eight bits of the key at a time, from the top.
template <class Weigh>
__device__ __forceinline__ Threshold select(const Row &row, uint32_t least, Mass target, Weigh weigh, Room &room) {
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < BINS; i += blockDim.x) room.bins[i] = 0;
        __syncthreads();
        for (int id = threadIdx.x; id < row.size; id += blockDim.x) {
            const uint32_t key = row.key(id);
            const bool inside = shift == 24 || key >> (shift + 8) == prefix >> (shift + 8);
            if (key && key >= least && inside) atomicAdd(&room.bins[key >> shift & 255], weigh(key));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = BINS - 1;
            Mass left = target;
            while (bin > 0 && room.bins[bin] < left) left -= room.bins[bin--];
            room.target = left;
            room.prefix = prefix | uint32_t(bin) << shift;
        }
        __syncthreads();
        target = room.target;
        prefix = room.prefix;
        __syncthreads();
    }
    const Mass one = weigh(prefix);
    return {prefix, unsigned((target + (one ? one : 1) - 1) / (one ? one : 1))};
}

// The sum of the values of all threads before this one; `total` is that of all.
__device__ __forceinline__ Mass before_me(Mass value, Mass &total, Room &room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Mass sum = value;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const Mass other = __shfl_up_sync(ALL, sum, by);
        if (lane >= by) sum += other;
    }
    if (lane == 31) room.scan[warp] = sum;
    __syncthreads();
    Mass before = 0;
    total = 0;
    for (int i = 0; i < THREADS / 32; i++) {
        if (i < warp) before += room.scan[i];
        total += room.scan[i];
    }
    __syncthreads();
    return before + sum - value;
}

// The token at `uniform` of the kept ones' weights, in order of ids. Each thread has neighbouring ids.
__device__ __forceinline__ int draw(const Row &row, Threshold kept, double uniform, Room &room) {
    const int each = (row.size + THREADS - 1) / THREADS, first = threadIdx.x * each, last = min(first + each, row.size);
    Mass above = 0, equal = 0, total;
    for (int id = first; id < last; id++) {
        const uint32_t key = row.key(id);
        if (key > kept.key) above += row.mass(key);
        equal += key == kept.key && key;
    }
    const Mass rank = before_me(equal, total, room), one = row.mass(kept.key);
    const Mass left = rank < kept.equal ? kept.equal - rank : 0, mine = above + min(equal, left) * one;
    const Mass before = before_me(mine, total, room);
    if (threadIdx.x == 0) room.found = -1;
    __syncthreads();
    const Mass target = min(Mass(uniform * double(total)), total - 1);
    if (before <= target && target < before + mine) {
        Mass sum = before;
        unsigned equals = 0;
        for (int id = first; id < last; id++) {
            const uint32_t key = row.key(id);
            const bool keep = key > kept.key || (key && key == kept.key && equals < left);
            equals += key == kept.key;
            if (!keep) continue;
            sum += row.mass(key);
            if (target < sum) {
                room.found = id;
                break;
            }
        }
    }
    __syncthreads();
    return room.found;
}

}  // namespace sample

// best[row] = max over ids of (ordered logit, smallest id first); `best` starts as zeros. grid.x blocks share a row.
extern "C" __global__ void __launch_bounds__(256)
    argmax(const float *logits, const unsigned char *valid, unsigned long long *best, int size) {
    logits += int64_t(blockIdx.y) * size;
    unsigned long long mine = 0;
    for (int id = blockIdx.x * blockDim.x + threadIdx.x; id < size; id += gridDim.x * blockDim.x) {
        const unsigned long long key = sample::ordered(logits[id], valid[id]);
        if (key) mine = max(mine, key << 32 | (0xffffffffu - unsigned(id)));
    }
#pragma unroll
    for (int bits = 16; bits; bits >>= 1) mine = max(mine, __shfl_xor_sync(ALL, mine, bits));
    if (threadIdx.x % 32 == 0 && mine) atomicMax(&best[blockIdx.y], mine);
}
EXPORT(argmax)

// ids[row] from argmax's result and the row's parameters; -1 where no logit is finite. A block a row.
extern "C" __global__ void __launch_bounds__(sample::THREADS, 1)
    sample_rows(const float *logits, const unsigned char *valid, const unsigned long long *best, const SampleRow *rows,
                int *ids, int size) {
    using namespace sample;
    SHARED_MEMORY(memory);
    Room &room = *reinterpret_cast<Room *>(memory);
    const SampleRow &asked = rows[blockIdx.x];
    const unsigned long long top = best[blockIdx.x];
    const int likeliest = top ? int(0xffffffffu - unsigned(top)) : -1;
    if (!top || asked.temperature == 0.f || asked.top_k == 1) {
        if (threadIdx.x == 0) ids[blockIdx.x] = likeliest;
        return;
    }
    const Row row{logits + int64_t(blockIdx.x) * size, valid, size, from_ordered(uint32_t(top >> 32)), asked.temperature, asked.floor};
    Threshold kept{0, 0};
    if (asked.top_k > 0 && asked.top_k < size)
        kept = select(row, 0, Mass(asked.top_k), [](uint32_t) { return Mass(1); }, room);
    if (asked.top_p < 1.f) {
        // What top-k left: all keys above its threshold, and some that are equal to it.
        Mass mine = 0, total;
        for (int id = threadIdx.x; id < size; id += blockDim.x) {
            const uint32_t key = row.key(id);
            if (key > kept.key) mine += row.mass(key);
        }
        before_me(mine, total, room);
        total += kept.equal * row.mass(kept.key);
        const Mass target = max(Mass(double(asked.top_p) * double(total)), Mass(1));
        kept = select(row, kept.key, target, [&](uint32_t key) { return row.mass(key); }, room);
    }
    const int id = draw(row, kept, asked.uniform, room);
    if (threadIdx.x == 0) ids[blockIdx.x] = id < 0 ? likeliest : id;
}
EXPORT(sample_rows)
