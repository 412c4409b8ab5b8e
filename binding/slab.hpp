// Where a pool's values are when they are not in memory of its own.
//
//   slab   a buffer of the caller's: held until nobody can look at it any more
//   copy   nowhere here: the pool is one of ids, and a Python function copies blocks
//
// The library calls for a copy under the pool's mutex, where no Python code may run. So it is noted
// there, with a reference on both blocks, which keeps either from being handed out again; and made
// as soon as the mutex is free, before the call that asked for it returns:
//
//   append, cow --> mutex { tl_kv_... --> ask(src, dst): noted, both held }
//               --> finish(): one thread at a time, in the order they were asked for
//                       copy(sources, destinations)                        with the GIL
//                       mutex { both blocks let go }
//
// A copy that raises stays noted, its blocks stay held, and the next call tries it again: a block
// whose contents are missing is never taken for a good one.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "locked_pool.hpp"

namespace kvpool {

namespace nb = nanobind;

class Copies {
  public:
    // Room for one copy of each block is made here: a block is the destination of one at most.
    Copies(nb::object copy, uint32_t n_blocks);
    Copies(const Copies &) = delete;
    Copies &operator=(const Copies &) = delete;

    // tl_kv_options.copy and .user. The pool is known once it is made.
    static void ask(void *self, uint32_t src, uint32_t dst);
    void serve(tl_kv_pool *pool) {
        pool_ = pool;
    }

    // Makes the copies that were asked for. With the GIL, without the mutex; throws what copy
    // raises.
    void finish(LockedPool &pool);

    PyObject *function() const {
        return copy_.ptr();
    }
    void forget_function() { // what the garbage collector does to a cycle
        copy_.reset();
    }

  private:
    nb::object copy_;
    tl_kv_pool *pool_ = nullptr;
    std::vector<std::pair<uint32_t, uint32_t>> asked_; // guarded by the pool's mutex
    std::atomic<size_t> n_asked_{0};                   // its size, for a look without the mutex
    std::mutex turn_;
    std::atomic<std::thread::id> whose_turn_{};
};

// The writable buffer behind `slab`: float16 values or bytes. `keep` holds it, from any thread.
struct SlabBuffer {
    void *data;
    size_t size;
    std::shared_ptr<void> keep;
};
SlabBuffer slab_buffer(nb::handle slab);

} // namespace kvpool
