// kvpool.Pool: a LockedPool with Python's arguments and results around it.
#pragma once

#include <nanobind/nanobind.h>

#include "errors.hpp"
#include "locked_pool.hpp"
#include "numpy_api.hpp"
#include "slab.hpp"
#include "support.hpp"

namespace kvpool {

namespace nb = nanobind;

class Pool {
  public:
    Pool(nb::handle n_blocks, nb::handle block_tokens, nb::handle n_layers, nb::handle n_kv_heads,
         nb::handle head_dim, nb::handle touch, nb::handle huge_pages, nb::handle slab,
         nb::handle copy);
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;
    ~Pool();

    nb::object alloc(nb::handle n);
    void ref(nb::handle ids);
    void unref(nb::handle ids);
    nb::object refs(nb::handle ids);
    nb::object cow(nb::handle ids);
    void set_fill(nb::handle ids, nb::handle n_tokens);
    nb::object fill(nb::handle ids);
    nb::object register_(nb::handle ids, nb::handle hashes);
    nb::object hash(nb::handle ids);
    nb::object lookup(nb::handle hashes);
    nb::object block(nb::handle id);
    nb::object slab();
    nb::object export_(nb::handle ids);
    size_t export_bytes(nb::handle n);
    nb::object import_(nb::handle buffer);
    nb::object stats();
    void check();
    void close();
    bool closed();
    nb::object repr(nb::handle self);

    const tl_kv_cfg &cfg() const {
        return cfg_;
    }
    size_t block_bytes() const {
        return block_bytes_;
    }
    size_t slab_bytes() const {
        return cfg_.n_blocks * block_bytes_;
    }
    size_t meta_bytes() const {
        return meta_bytes_;
    }

    // Outlives this object for as long as a block manager works on the pool.
    const std::shared_ptr<LockedPool> &locked() const {
        return locked_;
    }
    // Who copies blocks for a pool of ids; empty for a pool with a slab.
    const std::shared_ptr<Copies> &copies() const {
        return copies_;
    }

  private:
    // Runs op under the mutex and raises when it fails; quiet: returns this status instead.
    template <class Op> tl_status run(Work work, Op &&op, tl_status quiet = TL_OK);
    template <class Read> nb::object read_each(nb::handle ids, int typenum, Read &&read);
    nb::object view(nb::object owner, void *data, int first_dim);
    nb::object owner();
    void finish_copies() {
        if (copies_ != nullptr) {
            copies_->finish(*locked_);
        }
    }

    tl_kv_cfg cfg_{};
    size_t block_bytes_ = 0, meta_bytes_ = 0;
    npy_intp dims_[6], strides_[6]; // of the slab; a block's are [1..6)
    std::shared_ptr<LockedPool> locked_;
    std::shared_ptr<Copies> copies_;
    nb::ft_mutex owner_mutex_;  // nothing when there is a GIL, which guards owner_ then
    PyObject *owner_ = nullptr; // a capsule, base of every view; NULL once closed
};

void bind_pool(nb::module_ &m);
void bind_wire(nb::module_ &m); // more of its methods; after bind_pool
void bind_envelope(nb::module_ &m);

} // namespace kvpool
