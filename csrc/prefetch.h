// Asking for memory before it is needed.
#pragma once

namespace pagoda {

// Asks for the cache line of `p`, with 2 instead of 3 no nearer than the L2 cache. GCC takes a function that only prefetches for one that
// does nothing, and leaves its calls out; not one with a statement of assembly.
template <int kNear = 3>
inline void prefetch_line(const void* p) {
    __builtin_prefetch(p, 0, kNear);
    __asm__ volatile("");
}

}  // namespace pagoda
