// Tensor core and copy instructions, with the register layouts of the PTX ISA (sections "mma.m16n8k16", "ldmatrix").
#pragma once

static inline float emu_half(uint32_t word, int high) { return __uint_as_float(high ? word & 0xffff0000u : word << 16); }

// d (16 x 8, f32) += a (16 x 16, bf16, by rows) * b (16 x 8, bf16, by columns).
static inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    auto *lanes = emu::meet(~0u, mine, sizeof mine);
    const int lane = emu::self->lane, group = lane / 4, quad = lane % 4;
    for (int i = 0; i < 4; i++) {
        const int row = group + (i >= 2 ? 8 : 0), column = quad * 2 + i % 2;
        float sum = 0;
        for (int pair = 0; pair < 8; pair++) {
            const int of_a = row % 8 * 4 + pair % 4, of_b = column * 4 + pair % 4;
            const auto *wa = reinterpret_cast<const uint32_t *>(lanes[of_a]) + (row >= 8) + 2 * (pair >= 4);
            const auto *wb = reinterpret_cast<const uint32_t *>(lanes[of_b]) + 4 + (pair >= 4);
            sum += emu_half(*wa, 0) * emu_half(*wb, 0) + emu_half(*wa, 1) * emu_half(*wb, 1);
        }
        d[i] += sum;
    }
}

// Four 8 x 8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i.
static inline void load_matrices(uint32_t to[4], const void *row) {
    auto *lanes = emu::meet(~0u, &row, sizeof row);
    const int lane = emu::self->lane;
    emu_aligned(row);
    for (int i = 0; i < 4; i++) {
        const unsigned char *from;
        std::memcpy(&from, lanes[8 * i + lane / 4], sizeof from);
        std::memcpy(&to[i], from + 4 * (lane % 4), 4);
    }
    emu::meet(~0u, nullptr, 0);
}

// The same, each matrix transposed.
static inline void load_matrices_transposed(uint32_t to[4], const void *row) {
    auto *lanes = emu::meet(~0u, &row, sizeof row);
    const int lane = emu::self->lane;
    emu_aligned(row);
    for (int i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (int j = 0; j < 2; j++) {
            const unsigned char *from;
            std::memcpy(&from, lanes[8 * i + 2 * (lane % 4) + j], sizeof from);
            std::memcpy(&pair[j], from + 2 * (lane / 4), 2);
        }
        std::memcpy(&to[i], pair, 4);
    }
    emu::meet(~0u, nullptr, 0);
}

static inline void copy_async(void *to, const void *from, bool valid) { emu::copy_async(to, valid ? from : nullptr); }
static inline void copy_commit() { emu::copy_commit(); }
template <int BUT>
static inline void copy_wait() {
    emu::copy_wait(BUT);
}
