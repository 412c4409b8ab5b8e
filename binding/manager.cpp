#include "manager.hpp"

#include <algorithm>
#include <cstring>

#include "manager_docs.hpp"
#include "numpy_api.hpp"
#include "pool.hpp"

namespace kvpool {

using namespace nb::literals;

namespace {

// Classes of kvpool._manager, kept for the life of the process.
PyObject *stats_class, *fit_class, *event_class, *event_types[TL_KV_CLEARED + 1];

// Prompts of at least this many tokens are hashed without the GIL: some 300 microseconds. A shorter
// one is done before another thread would have been given it.
constexpr size_t bulk_tokens = 64 * 1024;

[[noreturn]] void refuse_copy(const char *what) {
    PyErr_Format(PyExc_TypeError,
                 "a BlockManager cannot be %s: it holds blocks of one process's pool. Move "
                 "sequences with export(), import_() and adopt()",
                 what);
    throw nb::python_error();
}

uint64_t namespace_arg(nb::handle value) {
    return scalar_arg<uint64_t>(value, "namespace");
}

const char *mode_of(const tl_kv_mgr_options &options) {
    return options.flags & TL_KV_MGR_NO_PREFIX_CACHE ? "none" : "hash";
}

} // namespace

int64_t int64_arg(nb::handle value, const char *name) {
    PyObject *o = value.ptr();
    if (PyBool_Check(o) || PyArray_IsScalar(o, Bool) || !PyIndex_Check(o)) {
        raise_type("%s: expected an integer, found %.100R (%s)", name, o, Py_TYPE(o)->tp_name);
    }
    nb::object index = checked(PyNumber_Index(o));
    int overflow;
    const long long x = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow != 0) {
        raise_value("%s: expected an integer of 64 bits, found %.100R", name, o);
    }
    return x;
}

// ---- the core -----------------------------------------------------------------------------------

ManagerCore::ManagerCore(std::shared_ptr<LockedPool> pool, std::shared_ptr<Copies> copies,
                         const tl_kv_cfg &cfg, size_t block_bytes, const tl_kv_mgr_options &options)
    : pool_(std::move(pool)), copies_(std::move(copies)), cfg_(cfg), block_bytes_(block_bytes),
      options_(options) {
    Failure failure;
    {
        nb::gil_scoped_release nogil; // records for every block
        pool_->make_manager(options_, &mgr_, failure);
    }
    if (failure.status != TL_OK) {
        raise(failure);
    }
}

ManagerCore::~ManagerCore() {
    nb::gil_scoped_release nogil; // the mutex may be held, and the records are given back
    close();
}

void ManagerCore::close() noexcept {
    pool_->drop_manager(mgr_);
}

// A pin is a fork of the sequence, cut to its committed full blocks, that nobody sees.
tl_status ManagerCore::pin(tl_kv_seq s, uint64_t root,
                           std::chrono::steady_clock::time_point until) noexcept {
    tl_kv_seq_info info;
    tl_status st = tl_kv_seq_info_get(mgr_, s, &info);
    const size_t n = st == TL_OK ? info.n_computed / cfg_.block_tokens * cfg_.block_tokens : 0;
    if (n == 0) {
        return st;
    }
    try {
        pins_.reserve(pins_.size() + 1);
    } catch (const std::bad_alloc &) {
        return fail(TL_ENOMEM, "pin: no memory for another pin");
    }
    tl_kv_seq held;
    st = tl_kv_seq_fork(mgr_, s, &held);
    if (st == TL_OK) {
        (void)tl_kv_seq_truncate(mgr_, held, n);
        pins_.push_back({until, held, root});
    }
    return st;
}

void ManagerCore::release_pins(bool all, const uint64_t *root) noexcept {
    const auto now = std::chrono::steady_clock::now();
    auto over = [&](const Pin &pin) {
        if (all ? root != nullptr && pin.root != *root : pin.until > now) {
            return false;
        }
        (void)tl_kv_seq_free(mgr_, pin.held);
        return true;
    };
    pins_.erase(std::remove_if(pins_.begin(), pins_.end(), over), pins_.end());
}

// ---- life ---------------------------------------------------------------------------------------

BlockManager::BlockManager(nb::handle pool, nb::handle prefix_cache, nb::handle watermark,
                           nb::handle events, nb::handle tiers) {
    Pool *p;
    if (nb::isinstance<Pool>(pool) && !nb::inst_ready(pool)) {
        raise_type("pool: the Pool was never initialised: its class has an __init__ that does not "
                   "call Pool.__init__");
    }
    if (!nb::try_cast(pool, p) || p == nullptr) {
        raise_type("pool: expected a Pool, found %.100R (%s)", pool.ptr(),
                   Py_TYPE(pool.ptr())->tp_name);
    }
    tl_kv_mgr_options options = {0,
                                 0,
                                 tl_kv_evict,
                                 tl_kv_find,
                                 tl_kv_refs,
                                 tl_kv_prefetch,
                                 tl_kv_import_private,
                                 tl_kv_copy_block};
    if (!PyUnicode_Check(prefix_cache.ptr())) {
        raise_type("prefix_cache: expected 'hash' or 'none', found %.100R (%s)", prefix_cache.ptr(),
                   Py_TYPE(prefix_cache.ptr())->tp_name);
    }
    if (PyUnicode_CompareWithASCIIString(prefix_cache.ptr(), "none") == 0) {
        options.flags |= TL_KV_MGR_NO_PREFIX_CACHE;
    } else if (PyUnicode_CompareWithASCIIString(prefix_cache.ptr(), "hash") != 0) {
        raise_value("prefix_cache: expected 'hash' or 'none', found %.100R", prefix_cache.ptr());
    }
    options.watermark = scalar_arg<uint32_t>(watermark, "watermark");
    if (flag_arg(events, "events")) {
        options.flags |= TL_KV_MGR_EVENTS;
    }
    if (!tiers.is_none() && options.flags & TL_KV_MGR_NO_PREFIX_CACHE) {
        raise_value("tiers: with prefix_cache='none' no block has a name to be kept under");
    }
    core_ = std::make_shared<ManagerCore>(p->locked(), p->copies(), p->cfg(), p->block_bytes(),
                                          options);
    pool_ = nb::borrow(pool);
    tiers_ = nb::none();
    if (!tiers.is_none()) { // last: what it starts and opens is ours to stop and close
        tiers_ = nb::module_::import_("kvpool.tiers").attr("attach")(pool, tiers);
        core_->set_tiers(tiers_);
    }
}

BlockManager::~BlockManager() = default;

void BlockManager::close() {
    {
        nb::gil_scoped_release nogil; // until the call that is under way is done
        core_->close();
    }
    if (tiers_.is_valid() && !tiers_.is_none()) {
        tiers_.attr("close")();
    }
}

bool BlockManager::closed() {
    Failure failure;
    core_->call(Work::constant, [](tl_kv_mgr *, tl_kv_pool *) { return TL_OK; }, failure);
    return failure.status != TL_OK;
}

nb::object BlockManager::pool() {
    return pool_.is_valid() ? pool_ : nb::object(nb::none());
}

// ---- requests -----------------------------------------------------------------------------------

Tokens::Tokens(nb::handle value) {
#ifndef Py_GIL_DISABLED
    if (PyArray_CheckExact(value.ptr())) {
        auto *a = reinterpret_cast<PyArrayObject *>(value.ptr());
        if (PyArray_NDIM(a) == 1 && PyArray_TYPE(a) == NPY_UINT32 && PyArray_ISCARRAY_RO(a)) {
            data_ = static_cast<const uint32_t *>(PyArray_DATA(a));
            size_ = static_cast<size_t>(PyArray_DIM(a, 0));
            borrowed_ = true;
            return;
        }
    }
#endif
    read_.emplace(value, "tokens", Form::array);
    data_ = read_->data();
    size_ = read_->size();
}

void Tokens::own() {
    if (borrowed_) {
        copy_.reset(new uint32_t[size_]);
        std::memcpy(copy_.get(), data_, size_ * sizeof *data_);
        data_ = copy_.get();
        borrowed_ = false;
    }
}

namespace {

// Runs op, which reads `tokens`, with or without the GIL.
template <class Op>
tl_status run_with(ManagerCore &core, Tokens &tokens, Op &&op, tl_status quiet) {
    Failure failure;
    if (tokens.size() >= bulk_tokens || !core.try_call(op, failure)) {
        tokens.own();
        core.call(tokens.size() >= bulk_tokens ? Work::bulk : Work::constant, op, failure);
    }
    if (failure.status != TL_OK && failure.status != quiet) {
        raise(failure);
    }
    return failure.status;
}

tl_kv_request request_of(nb::handle root, nb::handle max_cached_tokens, bool resumed,
                         nb::handle match_last) {
    tl_kv_request req = {namespace_arg(root), SIZE_MAX, resumed, 0};
    if (!max_cached_tokens.is_none()) {
        req.max_cached = scalar_arg<uint64_t>(max_cached_tokens, "max_cached_tokens");
    }
    req.match_last = flag_arg(match_last, "match_last");
    return req;
}

} // namespace

nb::object BlockManager::allocate(nb::handle tokens, nb::handle root, nb::handle max_cached_tokens,
                                  nb::handle resumed, nb::handle match_last) {
    const tl_kv_request req =
        request_of(root, max_cached_tokens, flag_arg(resumed, "resumed"), match_last);
    Tokens in(tokens); // last: see Tokens
    tl_kv_seq handle = 0;
    run_with(
        *core_, in,
        [&](tl_kv_mgr *m, tl_kv_pool *) {
            return tl_kv_seq_allocate(m, in.data(), in.size(), &req, &handle);
        },
        TL_OK);
    return Sequence::make(core_, handle, req.root);
}

nb::object BlockManager::can_allocate(nb::handle tokens, nb::handle root,
                                      nb::handle max_cached_tokens, nb::handle match_last) {
    const tl_kv_request req = request_of(root, max_cached_tokens, false, match_last);
    Tokens in(tokens); // last: see Tokens
    size_t n_cached = 0, n_new = 0;
    const tl_status st = run_with(
        *core_, in,
        [&](tl_kv_mgr *m, tl_kv_pool *) {
            return tl_kv_seq_can_allocate(m, in.data(), in.size(), &req, &n_cached, &n_new);
        },
        TL_EFULL);
    return nb::handle(fit_class)(nb::bool_(st == TL_OK), n_cached, n_new);
}

nb::object BlockManager::append(nb::handle seqs, nb::handle tokens) {
    Handles handles(core_, seqs);
    Ints<uint32_t> in(tokens, "tokens", Form::array);
    const size_t n = handles.size();
    if (in.size() != n) {
        raise_value("tokens: expected one for each sequence, %zu, found %zu", n, in.size());
    }
    std::unique_ptr<tl_kv_copy[]> copies(new tl_kv_copy[n]);
    size_t n_copies = 0;
    core_->run(core_->append_work(n), [&](tl_kv_mgr *m, tl_kv_pool *) {
        return tl_kv_seq_append_batch(m, handles.data(), n, in.data(), copies.get(), &n_copies);
    });
    core_->finish_copies();
    return copies_list(copies.get(), n_copies);
}

void BlockManager::commit(nb::handle seqs, nb::handle n_computed) {
    Handles handles(core_, seqs);
    std::optional<Ints<uint64_t>> lengths;
    if (!n_computed.is_none()) {
        lengths.emplace(n_computed, "n_computed", Form::array);
        if (lengths->size() != handles.size()) {
            raise_value("n_computed: expected one for each sequence, %zu, found %zu",
                        handles.size(), lengths->size());
        }
    }
    static_assert(sizeof(size_t) == sizeof(uint64_t), "lengths are passed on as they are");
    const size_t *each =
        lengths.has_value() ? reinterpret_cast<const size_t *>(lengths->data()) : nullptr;
    core_->commit(handles.data(), handles.roots(), handles.size(), each);
}

// ---- for kernels --------------------------------------------------------------------------------

nb::object BlockManager::block_tables(nb::handle seqs, nb::handle out, nb::handle scale_arg) {
    Handles handles(core_, seqs);
    const uint32_t scale = scalar_arg<uint32_t>(scale_arg, "scale");
    const size_t n = handles.size();
    nb::object table;
    size_t stride = 0;
    if (!out.is_none()) {
        auto *a = reinterpret_cast<PyArrayObject *>(out.ptr());
        if (!PyArray_Check(out.ptr())) {
            raise_type("out: expected an int32 NumPy array, found %.100R (%s)", out.ptr(),
                       Py_TYPE(out.ptr())->tp_name);
        }
        if (PyArray_NDIM(a) != 2 || PyArray_TYPE(a) != NPY_INT32 || !PyArray_ISCARRAY(a)) {
            raise_value("out: expected a writable C-contiguous int32 array of 2 dimensions, found "
                        "%d of dtype %S%s",
                        PyArray_NDIM(a), reinterpret_cast<PyObject *>(PyArray_DESCR(a)),
                        PyArray_ISCARRAY(a) ? "" : ", not contiguous, aligned and writable");
        }
        if (static_cast<size_t>(PyArray_DIM(a, 0)) != n) {
            raise_value("out: expected one row for each sequence, %zu, found %zd", n,
                        static_cast<Py_ssize_t>(PyArray_DIM(a, 0)));
        }
        stride = static_cast<size_t>(PyArray_DIM(a, 1));
        table = nb::borrow(out);
        core_->run(items_work(n * stride / 16), [&](tl_kv_mgr *m, tl_kv_pool *) {
            return tl_kv_seq_block_tables(m, handles.data(), n, scale, array_data<int32_t>(table),
                                          stride);
        });
        return table;
    }
    // The table is made without the mutex, so a sequence may be longer when it is there.
    for (;;) {
        size_t widest = 0;
        auto fill = [&](tl_kv_mgr *m, tl_kv_pool *) -> tl_status {
            widest = 0;
            for (size_t i = 0; i < n; i++) {
                tl_kv_seq_info info;
                const tl_status st = tl_kv_seq_info_get(m, handles[i], &info);
                if (st != TL_OK) {
                    return st;
                }
                widest = std::max(widest, info.n_blocks);
            }
            if (!table.is_valid() || widest > stride) {
                return TL_OK;
            }
            return tl_kv_seq_block_tables(m, handles.data(), n, scale, array_data<int32_t>(table),
                                          stride);
        };
        core_->run(items_work(n * stride / 16), fill);
        if (table.is_valid() && widest <= stride) {
            return table;
        }
        stride = widest;
        npy_intp dims[2] = {static_cast<npy_intp>(n), static_cast<npy_intp>(stride)};
        table = checked(PyArray_SimpleNew(2, dims, NPY_INT32));
    }
}

nb::object BlockManager::slot_mapping(nb::handle seqs, nb::handle first_arg, nb::handle n_arg,
                                      nb::handle pad_arg) {
    Handles handles(core_, seqs);
    Ints<uint64_t> first(first_arg, "first"), count(n_arg, "n");
    const int64_t pad = int64_arg(pad_arg, "pad");
    const size_t n = handles.size();
    if (!first.is_scalar() && first.size() != n) {
        raise_value("first: expected one for each sequence, %zu, found %zu", n, first.size());
    }
    if (!count.is_scalar() && count.size() != n) {
        raise_value("n: expected one for each sequence, %zu, found %zu", n, count.size());
    }
    auto count_of = [&](size_t i) -> size_t { return count[count.is_scalar() ? 0 : i]; };
    constexpr size_t most = static_cast<size_t>(PY_SSIZE_T_MAX) / sizeof(int64_t);
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        if (count_of(i) > most - total) {
            raise_value("n: the slots of all sequences are more than an array holds");
        }
        total += count_of(i);
    }
    nb::object slots = new_array(total, NPY_INT64);
    int64_t *out = array_data<int64_t>(slots);
    core_->run(items_work(total / 4), [&](tl_kv_mgr *m, tl_kv_pool *) -> tl_status {
        int64_t *at = out;
        for (size_t i = 0; i < n; at += count_of(i), i++) {
            const tl_status st = tl_kv_seq_slot_mapping(
                m, handles[i], first[first.is_scalar() ? 0 : i], count_of(i), pad, at);
            if (st != TL_OK) {
                return st;
            }
        }
        return TL_OK;
    });
    return slots;
}

nb::object BlockManager::seq_lens(nb::handle seqs) {
    Handles handles(core_, seqs);
    nb::object lens = new_array(handles.size(), NPY_INT32);
    int32_t *out = array_data<int32_t>(lens);
    core_->run(Work::constant, [&](tl_kv_mgr *m, tl_kv_pool *) -> tl_status {
        for (size_t i = 0; i < handles.size(); i++) {
            tl_kv_seq_info info;
            const tl_status st = tl_kv_seq_info_get(m, handles[i], &info);
            if (st != TL_OK) {
                return st;
            }
            if (info.n_tokens > INT32_MAX) {
                return fail(TL_EINVAL, "seq_lens: seqs[%zu] has %zu tokens, more than int32 holds",
                            i, info.n_tokens);
            }
            out[i] = static_cast<int32_t>(info.n_tokens);
        }
        return TL_OK;
    });
    return lens;
}

// ---- the index ----------------------------------------------------------------------------------

void BlockManager::reset(nb::handle root_arg) {
    const bool all = root_arg.is_none();
    const uint64_t root = all ? 0 : namespace_arg(root_arg);
    if (!tiers_.is_none()) { // first, so that nothing old from below comes into what is new
        tiers_.attr("forget")(root_arg);
    }
    core_->run(items_work(core_->cfg().n_blocks), [&](tl_kv_mgr *m, tl_kv_pool *) {
        core_->release_pins(true, all ? nullptr : &root); // they keep what cannot be hit any more
        return tl_kv_mgr_reset(m, all ? nullptr : &root);
    });
}

void BlockManager::evict(nb::handle ids) {
    Ints<uint32_t> in(ids, "ids");
    core_->run(items_work(in.size()), [&](tl_kv_mgr *m, tl_kv_pool *) {
        return tl_kv_mgr_evict(m, in.data(), in.size());
    });
}

nb::object BlockManager::import_(nb::handle buffer, nb::handle named_arg) {
    const bool named = flag_arg(named_arg, "named");
    Buffer in(buffer, "buffer");
    // As in Pool::import_: what passes has as many blocks as its length says.
    const size_t n = in.size() < 32 ? 0 : (in.size() - 32) / (core_->block_bytes() + 12);
    nb::object ids = new_array(std::min<size_t>(n, core_->cfg().n_blocks), NPY_UINT32);
    uint32_t *out = array_data<uint32_t>(ids);
    core_->run(bytes_work(in.size()), [&](tl_kv_mgr *m, tl_kv_pool *p) {
        const tl_status st = outside_slab(p, core_->slab_bytes(), in.data(), in.size(), "import_");
        if (st != TL_OK) {
            return st;
        }
        return named ? tl_kv_mgr_import(m, in.data(), in.size(), out)
                     : tl_kv_mgr_import_private(m, in.data(), in.size(), out);
    });
    return ids;
}

nb::object BlockManager::find(nb::handle hashes, nb::handle take_arg) {
    const bool take = flag_arg(take_arg, "take");
    Ints<uint64_t> in(hashes, "hashes", Form::array);
    nb::object ids = new_array(in.size(), NPY_INT64);
    int64_t *out = array_data<int64_t>(ids);
    core_->run(items_work(in.size()), [&](tl_kv_mgr *m, tl_kv_pool *) {
        return tl_kv_mgr_find(m, in.data(), in.size(), take, out);
    });
    return ids;
}

nb::object BlockManager::adopt(nb::handle ids_arg, nb::handle tokens, nb::handle root_arg,
                               nb::handle proven_arg) {
    Ints<uint32_t> ids(ids_arg, "ids", Form::array);
    std::unique_ptr<uint8_t[]> proven(new uint8_t[ids.size()]());
    if (!proven_arg.is_none()) {
        Ints<uint32_t> positions(proven_arg, "proven", Form::array);
        for (size_t i = 0; i < positions.size(); i++) {
            if (positions[i] >= ids.size()) {
                raise_value("proven[%zu]: expected a position in ids, 0 to %zu, found %u", i,
                            ids.size() - 1, positions[i]);
            }
            proven[positions[i]] = 1;
        }
    }
    const uint64_t root = namespace_arg(root_arg);
    Tokens in(tokens); // last: see Tokens
    if (ids.size() != core_->blocks_for(in.size())) {
        raise_value("ids: %zu tokens are in %zu blocks, found %zu", in.size(),
                    core_->blocks_for(in.size()), ids.size());
    }
    tl_kv_seq handle = 0;
    run_with(
        *core_, in,
        [&](tl_kv_mgr *m, tl_kv_pool *) {
            return tl_kv_mgr_adopt_proven(m, in.data(), in.size(), root, ids.data(), proven.get(),
                                          &handle);
        },
        TL_OK);
    return Sequence::make(core_, handle, root);
}

namespace {

uint32_t le32(const uint8_t *at) {
    return uint32_t{at[0]} | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16 | uint32_t{at[3]} << 24;
}

uint64_t le64(const uint8_t *at) {
    return le32(at) | uint64_t{le32(at + 4)} << 32;
}

// Whether an envelope of the pool's own dimensions holds the blocks of these tokens. Anything else
// that is wrong with it, its checksum among them, is left to tl_kv_import.
tl_status check_envelope(const ManagerCore &core, const uint8_t *envelope, size_t n_blocks,
                         const Tokens &tokens, const uint64_t *names) {
    const size_t B = core.block_tokens(), n = tokens.size();
    if (n_blocks != core.blocks_for(n)) {
        return fail(TL_EFORMAT,
                    "import_sequence: the envelope has %zu blocks, %zu tokens are in %zu", n_blocks,
                    n, core.blocks_for(n));
    }
    for (size_t i = 0; i < n_blocks; i++) {
        const uint8_t *record = envelope + TL_KV_ENVELOPE_HEADER + i * (12 + core.block_bytes());
        const uint64_t name = le64(record);
        const size_t wanted = std::min(B, n - i * B);
        if (le32(record + 8) != wanted) {
            return fail(TL_EFORMAT,
                        "import_sequence: block %zu has %u positions in the envelope, %zu tokens",
                        i, le32(record + 8), wanted);
        }
        if (name != 0 && (wanted < B || name != names[i])) {
            return fail(TL_EFORMAT,
                        "import_sequence: block %zu is named %016llx in the envelope, its tokens "
                        "give %016llx",
                        i, static_cast<unsigned long long>(name),
                        static_cast<unsigned long long>(wanted < B ? 0 : names[i]));
        }
    }
    return TL_OK;
}

} // namespace

nb::object BlockManager::import_sequence(nb::handle buffer, nb::handle tokens_arg,
                                         nb::handle root_arg) {
    const uint64_t root = namespace_arg(root_arg);
    Tokens tokens(tokens_arg);
    tokens.own(); // the GIL is given up below, whatever their number
    Buffer in(buffer, "buffer");
    const auto *envelope = static_cast<const uint8_t *>(in.data());
    // The bytes are the caller's, who may change them meanwhile. Sizes come from the length alone;
    // the header's count only says who tells what is wrong.
    const size_t record = 12 + core_->block_bytes();
    const size_t n = in.size() < 32 ? 0 : (in.size() - 32) / record;
    const size_t n_full = tokens.size() / core_->block_tokens();
    std::unique_ptr<uint64_t[]> names(new uint64_t[n_full]);
    std::unique_ptr<uint32_t[]> ids(new uint32_t[std::min<size_t>(n, core_->cfg().n_blocks)]);
    tl_kv_seq handle = 0;
    core_->run(Work::bulk, [&](tl_kv_mgr *m, tl_kv_pool *p) -> tl_status {
        tl_status st =
            outside_slab(p, core_->slab_bytes(), in.data(), in.size(), "import_sequence");
        if (st != TL_OK) {
            return st;
        }
        const bool ours = in.size() >= 32 && (in.size() - 32) % record == 0 &&
                          le32(envelope + 8) == n; // else import refuses it, and says why
        if (ours) {
            st = tl_kv_block_hashes(root, tokens.data(), tokens.size(), core_->block_tokens(),
                                    names.get());
            if (st == TL_OK) {
                st = check_envelope(*core_, envelope, n, tokens, names.get());
            }
            if (st != TL_OK) {
                return st;
            }
        }
        st = tl_kv_mgr_import(m, envelope, in.size(), ids.get());
        if (st != TL_OK) {
            return st;
        }
        st = ours ? tl_kv_mgr_adopt(m, tokens.data(), tokens.size(), root, ids.get(), &handle)
                  : fail(TL_EFORMAT, "import_sequence: the envelope changed while it was read");
        if (st != TL_OK) { // no memory; or the bytes changed, and are not those of the tokens
            (void)tl_kv_unref_many(p, ids.get(), n);
        }
        return st;
    });
    return Sequence::make(core_, handle, root);
}

// ---- events -------------------------------------------------------------------------------------

namespace {

nb::object event_object(const tl_kv_event &e, const uint32_t *tokens, uint32_t n_tokens) {
    const bool stored = e.type == TL_KV_STORED, cleared = e.type == TL_KV_CLEARED;
    nb::object row = checked(PyTuple_New(stored ? n_tokens : 0));
    for (uint32_t i = 0; stored && i < n_tokens; i++) {
        PyTuple_SET_ITEM(row.ptr(), i, int_object(tokens[i]).release().ptr());
    }
    return nb::handle(event_class)(e.number, nb::handle(event_types[e.type]), e.hash, e.parent,
                                   cleared ? nb::object(nb::none()) : int_object(e.block), row);
}

} // namespace

nb::object BlockManager::drain_events(nb::handle max) {
    constexpr size_t chunk = 1024;
    size_t left = max.is_none() ? SIZE_MAX : scalar_arg<uint64_t>(max, "max");
    const uint32_t B = core_->block_tokens();
    std::unique_ptr<tl_kv_event[]> events(new tl_kv_event[chunk]);
    std::unique_ptr<uint32_t[]> tokens(new uint32_t[chunk * B]);
    nb::list list;
    for (;;) {
        const size_t cap = std::min(left, chunk);
        size_t n = 0;
        core_->run(Work::constant, [&](tl_kv_mgr *m, tl_kv_pool *) {
            return tl_kv_mgr_events(m, events.get(), cap, tokens.get(), &n);
        });
        for (size_t i = 0; i < n; i++) {
            list.append(event_object(events[i], tokens.get() + i * B, B));
        }
        left -= n;
        if (n < cap || left == 0) {
            return list;
        }
    }
}

// ---- the manager --------------------------------------------------------------------------------

nb::object BlockManager::stats() {
    tl_kv_mgr_stats s;
    tl_kv_stats pool;
    size_t n_pins = 0;
    core_->run(Work::constant, [&](tl_kv_mgr *m, tl_kv_pool *p) {
        tl_kv_stats_get(p, &pool);
        n_pins = core_->n_pins();
        return tl_kv_mgr_stats_get(m, &s);
    });
    const double hit_rate = s.prompt_tokens == 0 ? 0.0
                                                 : static_cast<double>(s.hit_tokens) /
                                                       static_cast<double>(s.prompt_tokens);
    return nb::handle(stats_class)(s.prompt_tokens, s.hit_tokens, hit_rate, s.hit_blocks, s.stored,
                                   s.removed, s.duplicates, s.collisions, s.unproven, s.copies,
                                   s.refused, s.events_lost, pool.evictions, s.n_seqs - n_pins,
                                   n_pins, s.n_findable, s.peak_seqs, s.peak_used);
}

size_t BlockManager::meta_bytes() {
    size_t bytes = 0;
    core_->run(Work::constant, [&](tl_kv_mgr *m, tl_kv_pool *) {
        bytes = tl_kv_mgr_bytes(m);
        return TL_OK;
    });
    return bytes;
}

void BlockManager::check() {
    Failure failure;
    bool ran = false;
    core_->call(
        items_work(core_->cfg().n_blocks),
        [&](tl_kv_mgr *m, tl_kv_pool *p) {
            ran = true;
            const tl_status st = tl_kv_mgr_check(m);
            return st == TL_OK ? tl_kv_check(p) : st;
        },
        failure);
    if (failure.status == TL_OK) {
        return;
    }
    if (!ran) {
        raise(failure); // closed
    }
    raise_corrupt_pool(failure);
}

nb::object BlockManager::repr(nb::handle self) {
    tl_kv_mgr_stats s;
    size_t n_pins = 0;
    Failure failure;
    core_->call(
        Work::constant,
        [&](tl_kv_mgr *m, tl_kv_pool *) {
            n_pins = core_->n_pins();
            return tl_kv_mgr_stats_get(m, &s);
        },
        failure);
    const tl_kv_mgr_options &opt = core_->options();
    char text[240];
    const int n =
        std::snprintf(text, sizeof text, "(prefix_cache='%s', watermark=%u, events=%s",
                      mode_of(opt), opt.watermark, opt.flags & TL_KV_MGR_EVENTS ? "True" : "False");
    if (failure.status == TL_OK) {
        std::snprintf(text + n, sizeof text - n, "; sequences=%zu, findable=%u)", s.n_seqs - n_pins,
                      s.n_findable);
    } else {
        std::snprintf(text + n, sizeof text - n, "; closed)");
    }
    return checked(
        PyUnicode_FromFormat("%U%s", nb::object(self.type().attr("__name__")).ptr(), text));
}

// ---- the class ----------------------------------------------------------------------------------

namespace {

// A user's subclass of Pool may refer back to its manager: the collector must see that cycle.
int manager_traverse(PyObject *self, visitproc visit, void *arg) {
#if PY_VERSION_HEX >= 0x03090000
    Py_VISIT(Py_TYPE(self));
#endif
    if (nb::inst_ready(self)) {
        Py_VISIT(nb::inst_ptr<BlockManager>(self)->pool_.ptr());
        Py_VISIT(nb::inst_ptr<BlockManager>(self)->tiers_.ptr());
    }
    return 0;
}

int manager_clear(PyObject *self) {
    if (nb::inst_ready(self)) {
        nb::inst_ptr<BlockManager>(self)->pool_.reset();
        nb::inst_ptr<BlockManager>(self)->tiers_.reset();
    }
    return 0;
}

PyType_Slot manager_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void *>(manager_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(manager_clear)},
    {0, nullptr},
};

} // namespace

void bind_manager(nb::module_ &m) {
    namespace d = manager_docs;
    nb::module_ classes = nb::module_::import_("kvpool._manager");
    auto get = [&](const char *name) { return nb::object(classes.attr(name)).release().ptr(); };
    stats_class = get("ManagerStats");
    fit_class = get("Fit");
    event_class = get("BlockEvent");
    for (int type = TL_KV_STORED; type <= TL_KV_CLEARED; type++) {
        event_types[type] = nb::object(classes.attr("EventType")(type)).release().ptr();
    }

    nb::class_<BlockManager>(m, "BlockManager", nb::is_weak_referenceable(),
                             nb::type_slots(manager_slots), d::manager)
        .def(
            "__init__",
            [](BlockManager *self, nb::handle pool, nb::handle prefix_cache, nb::handle watermark,
               nb::handle events, nb::handle tiers) {
                new (self) BlockManager(pool, prefix_cache, watermark, events, tiers);
            },
            "pool"_a.none(), nb::kw_only(), "prefix_cache"_a.none() = "hash",
            "watermark"_a.none() = 0, "events"_a.none() = false, "tiers"_a.none() = nb::none(),
            nb::sig("def __init__(self, pool: Pool, *, prefix_cache: Literal['hash', 'none'] = "
                    "'hash', watermark: Int = 0, events: bool = False, "
                    "tiers: TierStack | Iterable[Tier | str] | None = None) -> None"))

        .def(
            "allocate",
            [](nb::handle self, nb::handle tokens, nb::handle root, nb::handle max_cached_tokens,
               nb::handle resumed, nb::handle match_last) {
                auto &b = *nb::inst_ptr<BlockManager>(self);
                // With tiers they lead, and come back for what the pool alone would do.
                return b.tiers_.is_valid() && !b.tiers_.is_none()
                           ? nb::object(b.tiers_.attr("allocate")(
                                 self, tokens, root, max_cached_tokens, resumed, match_last))
                           : b.allocate(tokens, root, max_cached_tokens, resumed, match_last);
            },
            "tokens"_a.none(), nb::kw_only(), "namespace"_a.none() = 0,
            "max_cached_tokens"_a.none() = nb::none(), "resumed"_a.none() = false,
            "match_last"_a.none() = false,
            nb::sig("def allocate(self, tokens: Array, *, namespace: Int = 0, "
                    "max_cached_tokens: Int | None = None, resumed: bool = False, "
                    "match_last: bool = False) -> Sequence"),
            d::allocate)
        .def("_allocate_in_pool", &BlockManager::allocate, "tokens"_a.none(), "root"_a.none(),
             "max_cached_tokens"_a.none(), "resumed"_a.none(), "match_last"_a.none(),
             nb::sig("def _allocate_in_pool(self, tokens: Array, root: Int, max_cached_tokens: Int "
                     "| None, resumed: bool, match_last: bool) -> Sequence"))
        .def("can_allocate", &BlockManager::can_allocate, "tokens"_a.none(), nb::kw_only(),
             "namespace"_a.none() = 0, "max_cached_tokens"_a.none() = nb::none(),
             "match_last"_a.none() = false,
             nb::sig("def can_allocate(self, tokens: Array, *, namespace: Int = 0, "
                     "max_cached_tokens: Int | None = None, match_last: bool = False) -> Fit"),
             d::can_allocate)
        .def("append", &BlockManager::append, "seqs"_a.none(), "tokens"_a.none(),
             nb::sig("def append(self, seqs: Iterable[Sequence], tokens: Array) -> "
                     "list[tuple[int, int]]"),
             d::append)
        .def("commit", &BlockManager::commit, "seqs"_a.none(), "n_computed"_a.none() = nb::none(),
             nb::sig("def commit(self, seqs: Iterable[Sequence], n_computed: Array | None = None) "
                     "-> None"),
             d::commit)
        .def("free", &BlockManager::free, "seqs"_a.none(),
             nb::sig("def free(self, seqs: Iterable[Sequence]) -> None"), d::free)
        .def("block_tables", &BlockManager::block_tables, "seqs"_a.none(),
             "out"_a.none() = nb::none(), "scale"_a.none() = 1,
             nb::sig("def block_tables(self, seqs: Iterable[Sequence], out: NDArray[numpy.int32] | "
                     "None = None, scale: Int = 1) -> NDArray[numpy.int32]"),
             d::block_tables)
        .def("slot_mapping", &BlockManager::slot_mapping, "seqs"_a.none(), "first"_a.none(),
             "n"_a.none(), "pad"_a.none() = -1,
             nb::sig("def slot_mapping(self, seqs: Iterable[Sequence], first: Ints, n: Ints, "
                     "pad: Int = -1) -> NDArray[numpy.int64]"),
             d::slot_mapping)
        .def("seq_lens", &BlockManager::seq_lens, "seqs"_a.none(),
             nb::sig("def seq_lens(self, seqs: Iterable[Sequence]) -> NDArray[numpy.int32]"),
             d::seq_lens)
        .def("reset", &BlockManager::reset, "namespace"_a.none() = nb::none(),
             nb::sig("def reset(self, namespace: Int | None = None) -> None"), d::reset)
        .def("evict", &BlockManager::evict, "ids"_a.none(),
             nb::sig("def evict(self, ids: Ints) -> None"), d::evict)
        .def("import_", &BlockManager::import_, "buffer"_a.none(), nb::kw_only(),
             "named"_a.none() = true,
             nb::sig("def import_(self, buffer: Buffer | NDArray[Any], *, named: bool = True) -> "
                     "NDArray[numpy.uint32]"),
             d::import_)
        .def("find", &BlockManager::find, "hashes"_a.none(), nb::kw_only(), "take"_a.none() = false,
             nb::sig("def find(self, hashes: Array, *, take: bool = False) -> "
                     "NDArray[numpy.int64]"),
             d::find)
        .def("import_sequence", &BlockManager::import_sequence, "buffer"_a.none(),
             "tokens"_a.none(), "namespace"_a.none() = 0,
             nb::sig("def import_sequence(self, buffer: Buffer | NDArray[Any], tokens: Array, "
                     "namespace: Int = 0) -> Sequence"),
             d::import_sequence)
        .def(
            "load",
            [](nb::handle self, nb::handle path, nb::handle tokens, nb::handle root) {
                return nb::object(nb::module_::import_("kvpool.wire")
                                      .attr("load")(self, path, tokens, "namespace"_a = root));
            },
            "path"_a.none(), "tokens"_a.none(), nb::kw_only(), "namespace"_a.none() = 0,
            nb::sig("def load(self, path: str | PathLike[str], tokens: Array, *, namespace: Int = "
                    "0) -> Sequence"),
            d::load)
        .def("adopt", &BlockManager::adopt, "ids"_a.none(), "tokens"_a.none(),
             "namespace"_a.none() = 0, nb::kw_only(), "proven"_a.none() = nb::none(),
             nb::sig("def adopt(self, ids: Array, tokens: Array, namespace: Int = 0, *, "
                     "proven: Array | None = None) -> Sequence"),
             d::adopt)
        .def("drain_events", &BlockManager::drain_events, "max"_a.none() = nb::none(),
             nb::sig("def drain_events(self, max: Int | None = None) -> list[BlockEvent]"),
             d::drain_events)
        .def("check", &BlockManager::check, d::check)
        .def("close", &BlockManager::close, d::close)

        .def_prop_ro(
            "tiers",
            [](BlockManager &b) { return b.tiers_.is_valid() ? b.tiers_ : nb::object(nb::none()); },
            nb::sig("def tiers(self) -> TierStack | None"), d::tiers)
        .def_prop_ro("stats", &BlockManager::stats, nb::sig("def stats(self) -> ManagerStats"),
                     d::stats)
        .def_prop_ro("pool", &BlockManager::pool, nb::sig("def pool(self) -> Pool"), d::pool)
        .def_prop_ro("closed", &BlockManager::closed, d::closed)
        .def_prop_ro(
            "prefix_cache", [](const BlockManager &b) { return mode_of(b.core().options()); },
            d::prefix_cache)
        .def_prop_ro(
            "watermark", [](const BlockManager &b) { return b.core().options().watermark; },
            d::watermark)
        .def_prop_ro("meta_bytes", &BlockManager::meta_bytes, d::meta_bytes)

        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __enter__(self) -> Self"))
        .def(
            "__exit__", [](BlockManager &b, nb::args) { b.close(); },
            nb::sig("def __exit__(self, *exc_info: object) -> None"))
        .def(
            "__repr__",
            [](nb::handle self) {
                return nb::inst_ready(self) ? nb::inst_ptr<BlockManager>(self)->repr(self)
                                            : not_ready_repr(self);
            },
            nb::sig("def __repr__(self) -> str"))
        .def(
            "__reduce_ex__", [](BlockManager &, nb::handle) { refuse_copy("pickled"); },
            nb::sig("def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn"))
        .def(
            "__copy__", [](BlockManager &) { refuse_copy("copied"); },
            nb::sig("def __copy__(self) -> NoReturn"))
        .def(
            "__deepcopy__", [](BlockManager &, nb::handle) { refuse_copy("copied"); },
            nb::sig("def __deepcopy__(self, memo: object, /) -> NoReturn"));
}

} // namespace kvpool
