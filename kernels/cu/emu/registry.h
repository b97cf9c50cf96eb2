// Kernels by name. They register themselves when the library is loaded.
#pragma once

#include <type_traits>
#include <utility>

#include "machine.h"

namespace emu {

struct Entry {
    const char *name;
    bool (*start)(Block &, void **arguments, const size_t *sizes, size_t count);
    Entry *next;
};

inline Entry *&entries() {
    static Entry *first = nullptr;
    return first;
}

inline const Entry *find(const char *name) {
    for (Entry *entry = entries(); entry; entry = entry->next)
        if (!std::strcmp(entry->name, name)) return entry;
    return nullptr;
}

struct Registration {
    Entry entry;
    Registration(const char *name, decltype(Entry::start) start) : entry{name, start, entries()} { entries() = &entry; }
};

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A> *>(arguments[I])...);
}

// Checks the arguments' number and sizes, which the driver API cannot, and runs the grid.
template <class... A>
bool start(Block &block, void (*kernel)(A...), void **arguments, const size_t *sizes, size_t count) {
    const size_t expected[] = {sizeof(A)..., 0};
    if (count != sizeof...(A)) {
        std::snprintf(block.error, sizeof block.error, "kernel %s takes %zu arguments, got %zu", block.kernel, sizeof...(A), count);
        return false;
    }
    for (size_t i = 0; i < count; i++)
        if (sizes[i] != expected[i]) {
            std::snprintf(block.error, sizeof block.error, "kernel %s: argument %zu has %zu bytes, got %zu", block.kernel, i, expected[i], sizes[i]);
            return false;
        }
    struct Call {
        void (*kernel)(A...);
        void **arguments;
    } c{kernel, arguments};
    block.entry = [](void *p) {
        auto *c = static_cast<Call *>(p);
        call(c->kernel, c->arguments, std::index_sequence_for<A...>{});
    };
    block.argument = &c;
    return run(block);
}

}  // namespace emu

#define EXPORT(kernel)                                                                                             \
    static emu::Registration emu_registration_##kernel(                                                           \
        #kernel, [](emu::Block &block, void **arguments, const size_t *sizes, size_t count) {                     \
            return emu::start(block, kernel, arguments, sizes, count);                                             \
        });
