// The scheduler of the emulated GPU, and the C function that starts a kernel by name.
#include "machine.h"

#include <algorithm>
#include <numeric>

#include "registry.h"

#if defined(__x86_64__)
// Saves the callee-saved registers on one stack and restores them from another.
asm(R"(
.text
.globl kvferry_emu_switch
.type kvferry_emu_switch,@function
kvferry_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp,(%rdi)
    movq %rsi,%rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size kvferry_emu_switch,.-kvferry_emu_switch
)");
#else
#error "the CUDA emulator switches stacks on x86_64 only"
#endif

namespace emu {
namespace {

[[noreturn]] __attribute__((noinline)) void start() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block->host_stack, &block->host_stack_size);
#endif
    block->entry(block->argument);
    copy_commit();
    copy_wait(0);
    self->state = State::Done;
    block->live--;
    self->warp->live &= ~(1u << self->lane);
    yield(true);
    std::abort();
}

void resume(Block &b, Thread &thread) {
    self = &thread;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&b.host_fake_stack, thread.stack, kStack);
#endif
    kvferry_emu_switch(&b.scheduler, thread.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(b.host_fake_stack, nullptr, nullptr);
#endif
    self = nullptr;
}

// The stacks of a block's threads. They stay for the next launch: mapping 256 KiB for each thread, and marking it for
// AddressSanitizer, takes longer than most tests' kernels.
struct Stacks {
    char *memory = nullptr;
    size_t size = 0;

    char *of(unsigned threads) {
        if (size < kStack * threads) {
            free(memory);
            size = kStack * threads;
            memory = static_cast<char *>(aligned_alloc(64, size));
        }
        return memory;
    }

    // What a launch that failed left in the middle of its frames is no longer marked as such.
    void abandon() {
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(memory, size);
#endif
    }

    ~Stacks() { free(memory); }
};

// All threads of the block at the kernel's first instruction.
void prepare(Block &b) {
    b.live = b.threads.size();
    b.at_barrier = 0;
    for (Warp &warp : b.warps) warp = Warp{};
    for (unsigned i = 0; i < b.threads.size(); i++) {
        Thread &thread = b.threads[i];
        thread.index = {i % b.dim.x, i / b.dim.x % b.dim.y, i / (b.dim.x * b.dim.y)};
        thread.lane = i % kWarp;
        thread.warp = &b.warps[i / kWarp];
        thread.warp->lanes[thread.lane] = &thread;
        thread.warp->live |= 1u << thread.lane;
        thread.state = State::Ready;
        thread.open.clear();
        thread.groups.clear();
#if defined(__SANITIZE_ADDRESS__)
        // The thread of the block before never returned from its first frames; what they marked is gone with it.
        __asan_unpoison_memory_region(thread.stack + kStack - 32 * 1024, 32 * 1024);
#endif
        // What the first switch pops: six registers and the address of `start`, with the stack as a call leaves it.
        void **top = reinterpret_cast<void **>(thread.stack + kStack - 64);
        *--top = nullptr;
        *--top = reinterpret_cast<void *>(start);
        for (int i = 0; i < 6; i++) *--top = nullptr;
        thread.stack_pointer = top;
    }
    std::memset(b.shared, 0xff, b.shared_size);
}

// The order in which ready threads run: forward, backward, or shuffled by the schedule's number.
void arrange(std::vector<unsigned> &order, const Block &b, uint32_t &random) {
    if (b.schedule == 0) return;
    if (b.schedule == 1) return std::reverse(order.begin(), order.end());
    for (size_t i = order.size() - 1; i > 0; i--) {
        random = random * 1664525u + 1013904223u;
        std::swap(order[i], order[(random >> 8) % (i + 1)]);
    }
}

bool warps_race(const Block &b) { return b.schedule & 2; }

// Resumes every thread of the warp that can run. False if none can.
bool run_warp(Block &b, Warp &warp) {
    bool ran = false;
    for (Thread *thread : warp.lanes) {
        if (!thread || thread->state != State::Ready) continue;
        ran = true;
        resume(b, *thread);
        if (b.error[0]) return true;
    }
    return ran;
}

bool run_block(Block &b) {
    prepare(b);
    std::vector<unsigned> order(b.threads.size());
    std::iota(order.begin(), order.end(), 0);
    uint32_t random = b.schedule * 2654435761u + b.index.x * 97 + b.index.y * 31 + b.index.z;
    if (b.schedule == 1) arrange(order, b, random);
    while (b.live) {
        if (b.schedule > 1) arrange(order, b, random);
        bool ran = false;
        for (unsigned i : order) {
            if (b.threads[i].state != State::Ready) continue;
            ran = true;
            resume(b, b.threads[i]);
            if (b.error[0]) return false;
            // A racing warp goes on until nothing of it can run, however far behind the others are.
            while (warps_race(b) && run_warp(b, *b.threads[i].warp))
                if (b.error[0]) return false;
            if (b.error[0]) return false;
        }
        if (b.at_barrier && b.at_barrier == b.live) {
            for (Thread &thread : b.threads)
                if (thread.state == State::AtBarrier) thread.state = State::Ready;
            b.at_barrier = 0;
        } else if (!ran && b.live) {
            std::snprintf(b.error, sizeof b.error,
                          "kernel %s, block (%u,%u,%u): deadlock of %u threads, %u of them at a barrier", b.kernel,
                          b.index.x, b.index.y, b.index.z, b.live, b.at_barrier);
            return false;
        }
    }
    return true;
}

}  // namespace

bool run(Block &b) {
    const unsigned threads = b.dim.x * b.dim.y * b.dim.z;
    if (!threads || threads > kMaxThreads || b.shared_size > kMaxShared || b.grid.x == 0 || b.grid.y == 0 || b.grid.z == 0 ||
        b.grid.y > 65535 || b.grid.z > 65535) {
        std::snprintf(b.error, sizeof b.error, "kernel %s: %u threads, %zu bytes of shared memory, grid (%u,%u,%u)",
                      b.kernel, threads, b.shared_size, b.grid.x, b.grid.y, b.grid.z);
        return false;
    }
    b.threads.resize(threads);
    b.warps.resize((threads + kWarp - 1) / kWarp);
    // Of exactly its size, so that AddressSanitizer sees what lies beyond.
    b.shared = static_cast<unsigned char *>(aligned_alloc(128, (b.shared_size + 127) / 128 * 128 + (b.shared_size ? 0 : 128)));
    static thread_local Stacks stacks;
    char *memory = stacks.of(threads);
    for (unsigned i = 0; i < threads; i++) b.threads[i].stack = memory + kStack * i;
    block = &b;
    bool done = true;
    for (b.index.z = 0; done && b.index.z < b.grid.z; b.index.z++)
        for (b.index.y = 0; done && b.index.y < b.grid.y; b.index.y++)
            for (b.index.x = 0; done && b.index.x < b.grid.x; b.index.x++) done = run_block(b);
    block = nullptr;
    if (!done) stacks.abandon();
    free(b.shared);
    return done;
}

}  // namespace emu

// Runs `kernel` on `grid` blocks of `dim` threads. `arguments` are pointers to the parameters, `sizes` their bytes, for a
// check against the kernel's own. Returns 0, or 1 with a message of at most `error_size` bytes in `error`.
extern "C" int kvferry_emu_launch(const char *kernel, const unsigned *grid, const unsigned *dim, size_t shared,
                                  void **arguments, const size_t *sizes, size_t count, unsigned schedule, char *error,
                                  size_t error_size) {
    emu::Block b;
    b.kernel = kernel;
    b.grid = {grid[0], grid[1], grid[2]};
    b.dim = {dim[0], dim[1], dim[2]};
    b.shared_size = shared;
    b.schedule = schedule;
    const emu::Entry *entry = emu::find(kernel);
    if (!entry) std::snprintf(b.error, sizeof b.error, "there is no kernel %s", kernel);
    else if (entry->start(b, arguments, sizes, count)) return 0;
    std::snprintf(error, error_size, "%s", b.error);
    return 1;
}
