// A GPU's execution model on one CPU thread: every CUDA thread of a block is a fiber, blocks run one after another.
//
// Barriers, warp operations and shared memory behave as on a GPU. What a GPU leaves undefined is made to show: shared memory
// starts as NaNs, the order in which threads run between barriers is a parameter (a missing barrier shows as a result that
// depends on it), and a misuse that would hang or fault a GPU ends the launch with a message that names the thread.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
};

namespace emu {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
// A block's shared memory on Hopper; smaller GPUs have less, which the launchers know.
constexpr size_t kMaxShared = 227 * 1024;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStack = 256 * 1024;
#else
constexpr size_t kStack = 64 * 1024;
#endif

enum class State : uint8_t { Ready, AtBarrier, AtMeeting, Done };

// An asynchronous copy of 16 bytes into shared memory; `from` is null for zeros.
struct Copy {
    void *to;
    const void *from;
};

struct Warp;

struct Thread {
    void *stack_pointer = nullptr;
    char *stack = nullptr;
    uint3 index{};
    unsigned lane = 0;
    Warp *warp = nullptr;
    State state = State::Done;
    unsigned mask = 0;
    std::vector<Copy> open;                  // issued, not committed
    std::vector<std::vector<Copy>> groups;   // committed, not waited for
    void *fake_stack = nullptr;
};

// Where the lanes of one mask exchange values. Two rounds of slots: a lane may still read the last round's while
// another deposits for the next; none can be two rounds ahead.
struct Meeting {
    unsigned mask = 0, arrived = 0, round = 0;
    alignas(16) unsigned char slots[2][kWarp][32] = {};
};

struct Warp {
    Thread *lanes[kWarp] = {};
    unsigned live = 0;
    std::vector<Meeting> meetings;

    Meeting &meeting(unsigned mask) {
        for (auto &meeting : meetings)
            if (meeting.mask == mask) return meeting;
        meetings.emplace_back().mask = mask;
        return meetings.back();
    }
};

struct Block {
    const char *kernel = "";
    dim3 grid{}, dim{};
    uint3 index{};
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    unsigned char *shared = nullptr;
    size_t shared_size = 0;
    unsigned live = 0, at_barrier = 0;
    // 0: threads run forward, 1: backward, else shuffled. An odd number copies early; 2 in it lets each warp run as far
    // ahead of the others as barriers allow.
    unsigned schedule = 0;
    void (*entry)(void *) = nullptr;
    void *argument = nullptr;
    void *scheduler = nullptr;   // its stack pointer
    const void *host_stack = nullptr;
    size_t host_stack_size = 0;
    void *host_fake_stack = nullptr;
    char error[400] = {};
};

// Every access of a kernel to its indices goes through these: at a fixed offset from the thread's own, not by a call, which
// would take a quarter of all time under AddressSanitizer. A library that is loaded later has room for a few such words.
#define EMU_THREAD_LOCAL inline thread_local __attribute__((tls_model("initial-exec")))
EMU_THREAD_LOCAL Block *block = nullptr;
EMU_THREAD_LOCAL Thread *self = nullptr;

extern "C" void kvferry_emu_switch(void **save, void *load);

// Leaves the running fiber for the scheduler; returns when it is resumed.
inline void yield(bool for_ever = false) {
    Thread *me = self;
    (void)for_ever;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_ever ? nullptr : &me->fake_stack, block->host_stack, block->host_stack_size);
#endif
    kvferry_emu_switch(&me->stack_pointer, block->scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(me->fake_stack, &block->host_stack, &block->host_stack_size);
#endif
}

// Ends the launch: the scheduler sees the message and stops. Does not return.
[[noreturn]] inline void fail(const char *format, ...) {
    char what[256];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    std::snprintf(block->error, sizeof block->error, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): %s", block->kernel,
                  block->index.x, block->index.y, block->index.z, self->index.x, self->index.y, self->index.z, what);
    for (;;) yield();
}

inline void sync_block() {
    self->state = State::AtBarrier;
    block->at_barrier++;
    yield();
}

// Deposits `size` bytes, waits until all lanes of `mask` have, and returns what they deposited.
inline unsigned char (*meet(unsigned mask, const void *value, size_t size))[32] {
    Warp &warp = *self->warp;
    if (!(mask >> self->lane & 1)) fail("lane %u is not in the mask %08x of its warp operation", self->lane, mask);
    if (mask & ~warp.live) fail("the mask %08x names lanes that have exited or do not exist", mask);
    Meeting *meeting = &warp.meeting(mask);
    const unsigned round = meeting->round & 1;
    if (size) std::memcpy(meeting->slots[round][self->lane], value, size);
    meeting->arrived |= 1u << self->lane;
    if (meeting->arrived == mask) {
        meeting->arrived = 0;
        meeting->round++;
        for (Thread *lane : warp.lanes)
            if (lane && lane->state == State::AtMeeting && lane->mask == mask) lane->state = State::Ready;
    } else {
        self->state = State::AtMeeting;
        self->mask = mask;
        yield();
        meeting = &warp.meeting(mask);
    }
    return meeting->slots[round];
}

// Schedules with an odd number copy at once, the others when they are waited for: a GPU may do either.
inline bool copies_early() { return block->schedule & 1; }

inline void carry_out(const Copy &copy) {
    if (copy.from) std::memcpy(copy.to, copy.from, 16);
    else std::memset(copy.to, 0, 16);
}

inline void copy_async(void *to, const void *from) {
    if (((uintptr_t)to | (uintptr_t)from) & 15) fail("a copy of 16 bytes is not aligned");
    Copy copy{to, from};
    if (copies_early()) carry_out(copy);
    else self->open.push_back(copy);
}

inline void copy_commit() { self->groups.push_back(std::move(self->open)); self->open.clear(); }

inline void copy_wait(unsigned but) {
    while (self->groups.size() > but) {
        for (const Copy &copy : self->groups.front()) carry_out(copy);
        self->groups.erase(self->groups.begin());
    }
}

// Runs a grid. Returns false and leaves a message in `block.error` if a thread failed.
bool run(Block &block);

}  // namespace emu
