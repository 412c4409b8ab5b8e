// kvpool.BlockManager and kvpool.Sequence: Python's arguments and results around tl_kv_mgr.
//
//   BlockManager --+--> ManagerCore --> LockedPool --> tl_kv_mgr, tl_kv_pool
//        |         |        ^
//        v         |        |
//   Pool (Python)  |     Sequence (any number)
//
// A sequence shares the core and no Python object, so sequences, managers and pools can be dropped
// in any order, and no cycle of references runs through a sequence.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include <nanobind/nanobind.h>

#include "args.hpp"
#include "slab.hpp"
#include "support.hpp"

namespace kvpool {

namespace nb = nanobind;

// What a manager and its sequences share. Everything but run() and the constants is done under the
// pool's mutex, by an op of run().
class ManagerCore {
  public:
    ManagerCore(std::shared_ptr<LockedPool> pool, std::shared_ptr<Copies> copies,
                const tl_kv_cfg &cfg, size_t block_bytes, const tl_kv_mgr_options &options);
    ManagerCore(const ManagerCore &) = delete;
    ManagerCore &operator=(const ManagerCore &) = delete;
    ~ManagerCore();

    // Runs op(tl_kv_mgr *, tl_kv_pool *) -> tl_status under the mutex; errors go to failure.
    template <class Op> void call(Work work, Op &&op, Failure &failure) {
        kvpool::call(*pool_, work, managed(op), failure);
    }
    // The same when the mutex is free at once; false, and nothing done, when it is not.
    template <class Op> bool try_call(Op &&op, Failure &failure) {
        return pool_->try_run(managed(op), failure);
    }
    // The same; raises what failed, except for this status, which it returns.
    template <class Op> tl_status run(Work work, Op &&op, tl_status quiet = TL_OK) {
        Failure failure;
        call(work, op, failure);
        if (failure.status != TL_OK && failure.status != quiet) {
            raise(failure);
        }
        return failure.status;
    }

    void close() noexcept;

    // Commits as tl_kv_seq_commit_batch does, and tells the tiers, if there are any, which blocks
    // became findable. roots[i] is the namespace of seqs[i].
    void commit(const tl_kv_seq *seqs, const uint64_t *roots, size_t n, const size_t *n_computed);
    // From now on commit tells `tiers`, for as long as that lives.
    void set_tiers(nb::handle tiers);

    // Under the mutex: keeps the committed full blocks of s from eviction until `until`.
    tl_status pin(tl_kv_seq s, uint64_t root, std::chrono::steady_clock::time_point until) noexcept;
    // Under the mutex: lets go of the pins whose time has come, or of all (under one root).
    void release_pins(bool all, const uint64_t *root = nullptr) noexcept;
    size_t n_pins() const noexcept {
        return pins_.size();
    }

    uint32_t block_tokens() const {
        return cfg_.block_tokens;
    }
    const tl_kv_cfg &cfg() const {
        return cfg_;
    }
    size_t block_bytes() const {
        return block_bytes_;
    }
    size_t slab_bytes() const {
        return cfg_.n_blocks * block_bytes_;
    }
    size_t blocks_for(size_t n_tokens) const {
        return n_tokens / cfg_.block_tokens + (n_tokens % cfg_.block_tokens != 0);
    }
    const tl_kv_mgr_options &options() const {
        return options_;
    }

    // How an append of n sequences is to be run: it copies blocks only where one was ever shared.
    Work append_work(size_t n) const {
        return may_copy_.load(std::memory_order_relaxed) ? bytes_work(n * block_bytes_)
                                                         : Work::constant;
    }
    // After an append: what a pool of ids asked for.
    void finish_copies() {
        if (copies_ != nullptr) {
            copies_->finish(*pool_);
        }
    }
    void expect_copies() {
        may_copy_.store(true, std::memory_order_relaxed);
    }

  private:
    template <class Op> auto managed(Op &op) {
        return [this, &op](tl_kv_pool *p) -> tl_status {
            if (mgr_ == nullptr) {
                return fail(TL_EINVAL, "the manager is closed");
            }
            if (!pins_.empty()) {
                release_pins(false);
            }
            return op(mgr_, p);
        };
    }

    void commit_and_tell(const tl_kv_seq *seqs, const uint64_t *roots, size_t n,
                         const size_t *n_computed);

    struct Pin {
        std::chrono::steady_clock::time_point until;
        tl_kv_seq held;
        uint64_t root;
    };

    const std::shared_ptr<LockedPool> pool_;
    const std::shared_ptr<Copies> copies_;
    const tl_kv_cfg cfg_;
    const size_t block_bytes_;
    const tl_kv_mgr_options options_;
    tl_kv_mgr *mgr_ = nullptr; // NULL once closed; guarded by the mutex, like the pins
    std::vector<Pin> pins_;
    std::atomic<bool> may_copy_{false};
    nb::object tiers_; // a weak reference, set before anybody else sees the core; or nothing
};

using CorePtr = std::shared_ptr<ManagerCore>;

// One request's handle. 0 once it is freed.
class Sequence {
  public:
    Sequence(CorePtr core, tl_kv_seq handle, uint64_t root)
        : core_(std::move(core)), root_(root), handle_(handle) {}
    Sequence(const Sequence &) = delete;
    Sequence &operator=(const Sequence &) = delete;
    ~Sequence();

    // A new Python object for a sequence that was just made; frees it if that fails.
    static nb::object make(const CorePtr &core, tl_kv_seq handle, uint64_t root);

    nb::object append(nb::handle tokens);
    nb::object fork();
    void truncate(nb::handle n);
    void commit(nb::handle n_computed);
    void found(nb::handle n_found, nb::handle counted);
    void free();
    void free_if_alive();
    void pin(nb::handle seconds);
    tl_kv_seq_info info();
    bool is_freed();
    nb::object blocks();
    nb::object tokens();
    nb::object slot_mapping(nb::handle first, nb::handle n, nb::handle pad);
    nb::object export_();
    nb::object export_iter(nb::handle chunk_bytes);
    nb::object export_block(nb::handle index, nb::handle before, nb::handle after);
    size_t block_tokens() const {
        return core_->block_tokens();
    }
    nb::object repr();

    uint64_t root() const {
        return root_;
    }
    const CorePtr &core() const {
        return core_;
    }
    tl_kv_seq handle() const {
        return handle_.load(std::memory_order_relaxed);
    }
    // Takes the handle away, for whoever frees the sequence: 0 when somebody else has it.
    tl_kv_seq take() {
        return handle_.exchange(0, std::memory_order_relaxed);
    }
    void give_back(tl_kv_seq handle) {
        handle_.store(handle, std::memory_order_relaxed);
    }

  private:
    tl_kv_seq alive() const; // the handle; raises when the sequence is freed
    template <class Read>
    nb::object copy_out(int typenum, size_t tl_kv_seq_info::*count, Read &&read);

    const CorePtr core_;
    const uint64_t root_;
    std::atomic<tl_kv_seq> handle_;
};

// The sequences of one call: a list or tuple (or any iterable) of live ones of this manager. A
// position that is anything else is told.
class Handles {
  public:
    Handles(const CorePtr &core, nb::handle seqs);

    size_t size() const {
        return handles_.size();
    }
    const tl_kv_seq *data() const {
        return handles_.data();
    }
    const uint64_t *roots() const {
        return roots_.data();
    }
    tl_kv_seq operator[](size_t i) const {
        return handles_[i];
    }

  private:
    std::vector<tl_kv_seq> handles_;
    std::vector<uint64_t> roots_;
};

// The tokens of a prompt. A uint32 array is read in place while the GIL keeps it as it is; own()
// copies it before the GIL is given up. Nothing that may run Python code comes between making one
// and the last look at it or own(), so it is made after all scalars are read: an __index__ may
// resize the array.
class Tokens {
  public:
    explicit Tokens(nb::handle value);

    size_t size() const {
        return size_;
    }
    const uint32_t *data() const {
        return data_;
    }
    void own();

  private:
    const uint32_t *data_;
    size_t size_;
    bool borrowed_ = false;
    std::optional<Ints<uint32_t>> read_;
    std::unique_ptr<uint32_t[]> copy_;
};

class BlockManager {
  public:
    BlockManager(nb::handle pool, nb::handle prefix_cache, nb::handle watermark, nb::handle events,
                 nb::handle tiers);
    BlockManager(const BlockManager &) = delete;
    BlockManager &operator=(const BlockManager &) = delete;
    ~BlockManager();

    // In the pool alone: what BlockManager.allocate is without tiers.
    nb::object allocate(nb::handle tokens, nb::handle root, nb::handle max_cached_tokens,
                        nb::handle resumed, nb::handle match_last);
    nb::object can_allocate(nb::handle tokens, nb::handle root, nb::handle max_cached_tokens,
                            nb::handle match_last);
    nb::object append(nb::handle seqs, nb::handle tokens);
    void commit(nb::handle seqs, nb::handle n_computed);
    void free(nb::handle seqs);
    nb::object block_tables(nb::handle seqs, nb::handle out, nb::handle scale);
    nb::object slot_mapping(nb::handle seqs, nb::handle first, nb::handle n, nb::handle pad);
    nb::object seq_lens(nb::handle seqs);
    void reset(nb::handle root);
    void evict(nb::handle ids);
    nb::object adopt(nb::handle ids, nb::handle tokens, nb::handle root, nb::handle proven);
    nb::object import_(nb::handle buffer, nb::handle named);
    nb::object find(nb::handle hashes, nb::handle take);
    nb::object import_sequence(nb::handle buffer, nb::handle tokens, nb::handle root);
    nb::object drain_events(nb::handle max);
    nb::object stats();
    size_t meta_bytes();
    void check();
    void close();
    bool closed();
    nb::object pool();
    nb::object repr(nb::handle self);

    const ManagerCore &core() const {
        return *core_;
    }
    // Python objects; empty only while a cycle of garbage is taken apart.
    nb::object pool_;
    nb::object tiers_; // what kvpool.tiers.attach gave, or None

  private:
    CorePtr core_;
};

// Copies made by an append, as a list of (source, destination).
nb::object copies_list(const tl_kv_copy *copies, size_t n);

// One integer from -2^63 to 2^63 - 1.
int64_t int64_arg(nb::handle value, const char *name);

void bind_sequence(nb::module_ &m);
void bind_manager(nb::module_ &m);

} // namespace kvpool
