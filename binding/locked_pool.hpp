// A tl_kv_pool that many threads may use: one mutex, and memory that outlives the pool for as long
// as somebody looks at it. Knows nothing of Python (binding/tests runs it under ThreadSanitizer).
//
//   LockedPool -- mutex
//       |
//       +--> shared_ptr<Memory> <---- one share for each view's owner
//                  |
//                  +--> tl_kv_pool (records, index, slab)
//
// close() gives up the pool's share: later operations fail, while views keep what they look at. The
// pool is destroyed with the last share. Its block manager, one at most, is destroyed by close() or
// before.
//
// A pool belongs to the process that made it. In a child of fork() the mutex may be held by a
// thread that is not there, and the records half written, so there every operation fails without a
// look at either, and what the pool holds is left to the end of the process. Views can be read and
// dropped.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <unistd.h>
#define KVPOOL_HAS_FORK
#endif

#include "tinyllm.h"

namespace kvpool {

// What a failed call left behind, copied on the thread that made the call: the error slot belongs
// to that thread and to its latest failure only. text is undefined while status is TL_OK.
struct Failure {
    tl_status status = TL_OK;
    char text[TL_LAST_ERROR_CAP];

    Failure() {}

    void capture(tl_status st) noexcept {
        status = st;
        std::strncpy(text, tl_last_error(), sizeof text - 1);
        text[sizeof text - 1] = '\0';
    }
};

class Memory {
  public:
    // keep: what holds the slab, if it is not the pool's own; let go after the pool.
    explicit Memory(tl_kv_pool *pool, std::shared_ptr<void> keep = nullptr) noexcept
        : keep_(std::move(keep)), pool_(pool) {}
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() {
        tl_kv_pool_destroy(pool_);
    }

    tl_kv_pool *get() const noexcept {
        return pool_;
    }

  private:
    const std::shared_ptr<void> keep_;
    tl_kv_pool *pool_;
};

// How many forks lie between this process and the one that loaded the library.
inline std::atomic<unsigned> fork_generation{0};

inline void count_forks() noexcept {
#ifdef KVPOOL_HAS_FORK
    static const int registered = pthread_atfork(nullptr, nullptr, [] { fork_generation++; });
    (void)registered;
#endif
}

class LockedPool {
  public:
    explicit LockedPool(std::shared_ptr<Memory> memory) noexcept : memory_(std::move(memory)) {
        count_forks();
        generation_ = fork_generation.load(std::memory_order_relaxed);
#ifdef KVPOOL_HAS_FORK
        pid_ = static_cast<long>(getpid());
#endif
    }
    LockedPool(const LockedPool &) = delete;
    LockedPool &operator=(const LockedPool &) = delete;
    ~LockedPool() {
        if (is_foreign()) {
            (void)new (std::nothrow) std::shared_ptr<Memory>(std::move(memory_)); // on purpose
            return;
        }
        tl_kv_mgr_destroy(manager_);
    }

    // In a child of fork(): the pool is its parent's.
    bool is_foreign() const noexcept {
        return generation_ != fork_generation.load(std::memory_order_relaxed);
    }

    // Runs op(tl_kv_pool *) -> tl_status under the mutex and keeps its error text in `failure`. op
    // may fail on its own account: it sets the slot with tl_set_last_error and returns the status.
    // op must not throw, and must not wait for anything that a waiter for this mutex could hold.
    template <class Op> tl_status run(Op &&op, Failure &failure) noexcept {
        if (is_foreign()) {
            return refuse(failure);
        }
        std::lock_guard<std::mutex> guard(mutex_);
        return locked(op, failure);
    }

    // The same when the mutex is free at once; false, and nothing done, when it is not.
    template <class Op> bool try_run(Op &&op, Failure &failure) noexcept {
        if (is_foreign()) {
            refuse(failure);
            return true;
        }
        std::unique_lock<std::mutex> guard(mutex_, std::try_to_lock);
        if (!guard.owns_lock()) {
            return false;
        }
        locked(op, failure);
        return true;
    }

    // The pool's share of the memory, empty when it was closed before. The caller drops it outside
    // the mutex: giving a large slab back to the system takes a while.
    std::shared_ptr<Memory> close() noexcept {
        if (is_foreign()) {
            return nullptr;
        }
        std::lock_guard<std::mutex> guard(mutex_);
        tl_kv_mgr_destroy(std::exchange(manager_, nullptr));
        return std::exchange(memory_, nullptr);
    }

    // Makes the pool's block manager, *out. TL_EBUSY: it has one. Valid until drop_manager or
    // close, and used under the mutex alone, inside run(): which does not call op once closed.
    tl_status make_manager(const tl_kv_mgr_options &options, tl_kv_mgr **out,
                           Failure &failure) noexcept {
        return run(
            [&](tl_kv_pool *pool) -> tl_status {
                if (manager_ != nullptr) {
                    tl_set_last_error("the pool has a block manager already; close that one first");
                    return TL_EBUSY;
                }
                const tl_status st = tl_kv_mgr_create(pool, &options, &manager_);
                *out = manager_;
                return st;
            },
            failure);
    }

    // Destroys the manager, unless close() has, and clears the caller's pointer to it.
    void drop_manager(tl_kv_mgr *&mgr) noexcept {
        if (is_foreign()) {
            return;
        }
        std::lock_guard<std::mutex> guard(mutex_);
        if (mgr != nullptr && mgr == manager_) {
            tl_kv_mgr_destroy(std::exchange(manager_, nullptr));
        }
        mgr = nullptr;
    }

    // A share of the memory for whoever looks at it longer; NULL when the pool is closed.
    std::shared_ptr<Memory> share() noexcept {
        if (is_foreign()) {
            return nullptr;
        }
        std::lock_guard<std::mutex> guard(mutex_);
        return memory_;
    }

    // The same inside run(), which holds the mutex.
    const std::shared_ptr<Memory> &share_locked() const noexcept {
        return memory_;
    }

    bool closed() noexcept {
        if (is_foreign()) {
            return true;
        }
        std::lock_guard<std::mutex> guard(mutex_);
        return memory_ == nullptr;
    }

  private:
    tl_status refuse(Failure &failure) const noexcept {
        char text[TL_LAST_ERROR_CAP];
        std::snprintf(text, sizeof text,
                      "the pool belongs to process %ld: a fork child cannot use it; make a pool of "
                      "its own, and move blocks with export and import_",
                      pid_);
        tl_set_last_error(text);
        failure.capture(TL_EUNSUPPORTED);
        return TL_EUNSUPPORTED;
    }

    template <class Op> tl_status locked(Op &&op, Failure &failure) noexcept {
        tl_status st;
        if (memory_ == nullptr) {
            tl_set_last_error("the pool is closed");
            st = TL_EINVAL;
        } else {
            st = op(memory_->get());
        }
        if (st != TL_OK) {
            failure.capture(st);
        }
        return st;
    }

    std::mutex mutex_;
    std::shared_ptr<Memory> memory_; // guarded by mutex_
    tl_kv_mgr *manager_ = nullptr;   // guarded by mutex_
    unsigned generation_ = 0;
    long pid_ = 0;
};

} // namespace kvpool
