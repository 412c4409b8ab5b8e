// What lower tiers are told: which blocks a commit made findable (kvpool.tiers has the rest).
//
//   commit, under the mutex    names; and for each sequence that has new ones: its tokens up to
//                              there, ids and names, and a reference on each block
//   without the mutex          tiers.written(...) copies what it wants to keep
//   under the mutex            the references go back
//
// A named block is immutable, and with the reference it stays what it is while it is copied,
// whatever other threads do to the sequence meanwhile.
#include "manager.hpp"

#include <cstring>

#include "numpy_api.hpp"

namespace kvpool {

namespace {

template <class T> using Array = std::unique_ptr<T[]>;

// Blocks of one sequence that a commit made findable: `n` of them, of which the first is block
// `first` of the sequence. A block without a name has none here either, and no reference.
struct Written {
    size_t first = 0, n = 0, n_tokens = 0;
    Array<uint32_t> tokens, ids;
    Array<uint64_t> names;

    // Under the mutex, where nothing may be thrown. Without memory nothing is told.
    void note(tl_kv_mgr *m, tl_kv_pool *p, tl_kv_seq s, size_t from, size_t to, size_t B) noexcept {
        tokens.reset(new (std::nothrow) uint32_t[to * B]);
        ids.reset(new (std::nothrow) uint32_t[to - from]);
        names.reset(new (std::nothrow) uint64_t[to - from]);
        if (!tokens || !ids || !names) {
            return;
        }
        first = from;
        n = to - from;
        n_tokens = to * B;
        std::memcpy(tokens.get(), tl_kv_seq_tokens(m, s), n_tokens * sizeof(uint32_t));
        std::memcpy(ids.get(), tl_kv_seq_blocks(m, s) + from, n * sizeof(uint32_t));
        for (size_t i = 0; i < n; i++) {
            names[i] = tl_kv_hash(p, ids[i]);
            if (names[i] != 0) {
                tl_kv_ref(p, ids[i]);
            }
        }
    }

    void let_go(tl_kv_pool *p) noexcept {
        for (size_t i = n; i-- > 0;) {
            if (names[i] != 0) {
                (void)tl_kv_unref(p, ids[i]);
            }
        }
    }
};

template <class T> nb::object array_of(const T *data, size_t n, int typenum) {
    nb::object array = new_array(n, typenum);
    std::memcpy(array_data<T>(array), data, n * sizeof(T));
    return array;
}

} // namespace

void ManagerCore::set_tiers(nb::handle tiers) {
    tiers_ = checked(PyWeakref_NewRef(tiers.ptr(), nullptr));
}

void ManagerCore::commit(const tl_kv_seq *seqs, const uint64_t *roots, size_t n,
                         const size_t *n_computed) {
    if (tiers_.is_valid()) {
        commit_and_tell(seqs, roots, n, n_computed);
        return;
    }
    run(Work::constant,
        [=](tl_kv_mgr *m, tl_kv_pool *) { return tl_kv_seq_commit_batch(m, seqs, n, n_computed); });
}

void ManagerCore::commit_and_tell(const tl_kv_seq *seqs, const uint64_t *roots, size_t n,
                                  const size_t *n_computed) {
    const size_t B = cfg_.block_tokens;
    Array<size_t> before(new size_t[n]);
    Array<Written> written(new Written[n]);
    bool any = false;
    // Of before the commit: what is told after a reset is of weights that have another name by
    // then.
    const nb::object stack = checked(PyObject_CallNoArgs(tiers_.ptr()));
    const nb::object epoch = stack.is_none() ? stack : nb::object(stack.attr("epoch"));
    run(Work::constant, [&](tl_kv_mgr *m, tl_kv_pool *p) -> tl_status {
        tl_kv_seq_info info;
        for (size_t i = 0; i < n; i++) {
            const tl_status st = tl_kv_seq_info_get(m, seqs[i], &info);
            if (st != TL_OK) {
                return st;
            }
            before[i] = info.n_computed / B;
        }
        const tl_status st = tl_kv_seq_commit_batch(m, seqs, n, n_computed);
        for (size_t i = 0; i < n && st == TL_OK; i++) {
            (void)tl_kv_seq_info_get(m, seqs[i], &info);
            const size_t now = info.n_computed / B;
            if (now > before[i]) {
                written[i].note(m, p, seqs[i], before[i], now, B);
                any = true;
            }
        }
        return st;
    });
    if (!any) {
        return;
    }
    std::exception_ptr error;
    try {
        for (size_t i = 0; i < n && !stack.is_none(); i++) {
            const Written &w = written[i];
            if (w.n > 0) {
                stack.attr("written")(epoch, int_object(roots[i]), int_object(seqs[i]),
                                      array_of(w.tokens.get(), w.n_tokens, NPY_UINT32), w.first,
                                      array_of(w.ids.get(), w.n, NPY_UINT32),
                                      array_of(w.names.get(), w.n, NPY_UINT64));
            }
        }
    } catch (...) { // not of a tier: an interrupt, or no memory
        error = std::current_exception();
    }
    Failure closed; // the manager ended meanwhile, and its pool may live on: give back all the same
    kvpool::call(
        *pool_, Work::constant,
        [&](tl_kv_pool *p) -> tl_status {
            for (size_t i = 0; i < n; i++) {
                written[i].let_go(p);
            }
            return TL_OK;
        },
        closed);
    if (error) {
        std::rethrow_exception(error);
    }
}

} // namespace kvpool
