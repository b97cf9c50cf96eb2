// What kernels/cu uses of CUDA C++, for g++: force-included before each .cu file.
#pragma once

#define KVFERRY_EMU 1

#include <algorithm>
#include <cmath>

#include "machine.h"
#include "registry.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) unsigned char *name = emu::block->shared

#define threadIdx (emu::self->index)
#define blockIdx (emu::block->index)
#define blockDim (emu::block->dim)
#define gridDim (emu::block->grid)

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static inline void __syncthreads() { emu::sync_block(); }
static inline void __syncwarp(unsigned mask = ~0u) { emu::meet(mask, nullptr, 0); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
    static_assert(sizeof(T) <= 16, "a shuffle moves at most 16 bytes");
    auto *values = emu::meet(mask, &value, sizeof value);
    if (!(mask >> (source & 31) & 1)) emu::fail("a shuffle reads lane %d, which is not in its mask", source & 31);
    std::memcpy(&value, values[source & 31], sizeof value);
    return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return __shfl_sync(mask, value, int(emu::self->lane) ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    const int lane = emu::self->lane;
    return __shfl_sync(mask, value, lane >= int(by) ? lane - int(by) : lane);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const unsigned char bit = predicate != 0;
    auto *values = emu::meet(mask, &bit, 1);
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if ((mask >> lane & 1) && values[lane][0]) result |= 1u << lane;
    return result;
}
static inline int __popc(unsigned value) { return __builtin_popcount(value); }

template <class T, class U>
T atomicAdd(T *at, U value) {
    T old = *at;
    *at = old + T(value);
    return old;
}
template <class T, class U>
T atomicMax(T *at, U value) {
    T old = *at;
    if (T(value) > old) *at = T(value);
    return old;
}

template <class To, class From>
static inline To emu_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &value, sizeof to);
    return to;
}
static inline float __uint_as_float(unsigned bits) { return emu_bits<float>(bits); }
static inline unsigned __float_as_uint(float value) { return emu_bits<unsigned>(value); }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline float exp2_fast(float x) { return std::exp2(x); }
static inline float exp_fast(float x) { return std::exp(x); }
template <class T>
T min(T a, T b) {
    return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
    return a < b ? b : a;
}

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __half {
    uint16_t bits;
};
static inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(unsigned(value.bits) << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
static inline float __half2float(__half value) { return float(emu_bits<_Float16>(value.bits)); }

// A load or store of 16 bytes faults on a GPU where the address is not a multiple of 16.
template <class T>
T *emu_aligned(T *at) {
    if ((uintptr_t)at & 15) emu::fail("an access of 16 bytes is not aligned");
    return at;
}
