#include "pool.hpp"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "args.hpp"
#include "docs.hpp"

namespace kvpool {

using namespace nb::literals;

namespace {

PyObject *stats_class; // kvpool._stats.Stats, kept for the life of the process

constexpr const char *owner_name = "kvpool.memory";

extern "C" void drop_owner(PyObject *capsule) {
    delete static_cast<std::shared_ptr<Memory> *>(PyCapsule_GetPointer(capsule, owner_name));
}

[[noreturn]] void refuse_copy(const char *what) {
    PyErr_Format(
        PyExc_TypeError,
        "a Pool cannot be %s: its blocks are shared by reference counts inside one process. "
        "Move contents with export() and import_(), or create a new Pool",
        what);
    throw nb::python_error();
}

void same_size(size_t n, size_t m, const char *what) {
    if (n != m) {
        raise_value("%s: expected one for each id, %zu, found %zu", what, n, m);
    }
}

} // namespace

// ---- life ---------------------------------------------------------------------------------------

Pool::Pool(nb::handle n_blocks, nb::handle block_tokens, nb::handle n_layers, nb::handle n_kv_heads,
           nb::handle head_dim, nb::handle touch, nb::handle huge_pages, nb::handle slab,
           nb::handle copy) {
    cfg_.n_blocks = scalar_arg<uint32_t>(n_blocks, "n_blocks");
    cfg_.block_tokens = scalar_arg<uint32_t>(block_tokens, "block_tokens");
    cfg_.n_layers = scalar_arg<uint32_t>(n_layers, "n_layers");
    cfg_.n_kv_heads = scalar_arg<uint32_t>(n_kv_heads, "n_kv_heads");
    cfg_.head_dim = scalar_arg<uint32_t>(head_dim, "head_dim");
    cfg_.dtype = TL_F16;
    cfg_.format = TL_KV_FORMAT_V1;
    tl_kv_options options = {0};
    options.flags |= flag_arg(touch, "touch") ? TL_KV_TOUCH : 0;
    options.flags |= flag_arg(huge_pages, "huge_pages") ? 0 : TL_KV_NO_HUGE;
    if (!slab.is_none() && !copy.is_none()) {
        raise_value("slab, copy: a pool has values in a slab, or a function that copies them: "
                    "expected one of the two");
    }
    std::shared_ptr<void> keep;
    if (!copy.is_none()) {
        copies_ = std::make_shared<Copies>(nb::borrow(copy), cfg_.n_blocks);
        options.copy = Copies::ask;
        options.user = copies_.get();
    } else if (!slab.is_none()) { // last of the arguments: see Buffer in args.hpp
        SlabBuffer buffer = slab_buffer(slab);
        options.slab = buffer.data;
        options.slab_bytes = buffer.size;
        keep = std::move(buffer.keep);
    }

    Failure failure;
    tl_kv_pool *pool = nullptr;
    {
        nb::gil_scoped_release nogil; // records for every block, and with touch all of the slab
        tl_status st = tl_kv_pool_create_opt(&cfg_, &options, &pool);
        if (st != TL_OK) {
            failure.capture(st);
        }
    }
    if (failure.status != TL_OK) {
        raise(failure);
    }
    if (copies_ != nullptr) {
        copies_->serve(pool);
    }
    auto memory = std::make_shared<Memory>(pool, std::move(keep));
    block_bytes_ = tl_kv_block_bytes(pool);
    meta_bytes_ = tl_kv_meta_bytes(pool);
    const uint32_t dims[6] = {cfg_.n_blocks,   cfg_.n_layers,     2,
                              cfg_.n_kv_heads, cfg_.block_tokens, cfg_.head_dim};
    npy_intp stride = sizeof(uint16_t);
    for (int i = 5; i >= 0; i--) {
        dims_[i] = dims[i];
        strides_[i] = stride;
        stride *= dims_[i];
    }
    locked_ = std::make_shared<LockedPool>(memory);
    auto share = std::make_unique<std::shared_ptr<Memory>>(memory);
    owner_ = checked(PyCapsule_New(share.get(), owner_name, drop_owner)).release().ptr();
    share.release();
}

Pool::~Pool() {
    Py_XDECREF(owner_);
}

void Pool::close() {
    std::shared_ptr<Memory> memory;
    {
        nb::gil_scoped_release nogil; // until the call that is under way is done
        memory = locked_->close();
    }
    PyObject *owner;
    {
        nb::ft_lock_guard guard(owner_mutex_);
        owner = std::exchange(owner_, nullptr);
    }
    Py_XDECREF(owner);
    nb::gil_scoped_release nogil; // the last share unmaps the slab
    memory.reset();
}

bool Pool::closed() {
    return locked_->closed();
}

// ---- calling the library ------------------------------------------------------------------------

template <class Op> tl_status Pool::run(Work work, Op &&op, tl_status quiet) {
    Failure failure;
    call(*locked_, work, op, failure);
    if (failure.status != TL_OK && failure.status != quiet) {
        raise(failure);
    }
    return failure.status;
}

// ---- references ---------------------------------------------------------------------------------

nb::object Pool::alloc(nb::handle n) {
    if (n.is_none()) {
        uint32_t id;
        run(Work::constant, [&](tl_kv_pool *p) { return tl_kv_alloc(p, 1, &id); });
        return int_object(id);
    }
    uint32_t count = scalar_arg<uint32_t>(n, "n");
    // More than the pool has is refused by the library before it writes anything: no array needed.
    nb::object ids = new_array(std::min(count, cfg_.n_blocks), NPY_UINT32);
    uint32_t *out = array_data<uint32_t>(ids);
    run(Work::constant, [=](tl_kv_pool *p) { return tl_kv_alloc(p, count, out); });
    return ids;
}

void Pool::ref(nb::handle ids) {
    if (is_plain_int(ids)) {
        uint32_t id = scalar_arg<uint32_t>(ids, "ids");
        run(Work::constant, [=](tl_kv_pool *p) { return tl_kv_ref_many(p, &id, 1); });
        return;
    }
    Ints<uint32_t> in(ids, "ids");
    run(Work::constant, [&](tl_kv_pool *p) { return tl_kv_ref_many(p, in.data(), in.size()); });
}

void Pool::unref(nb::handle ids) {
    if (is_plain_int(ids)) {
        uint32_t id = scalar_arg<uint32_t>(ids, "ids");
        run(Work::constant, [=](tl_kv_pool *p) { return tl_kv_unref(p, id); });
        return;
    }
    Ints<uint32_t> in(ids, "ids");
    run(Work::constant, [&](tl_kv_pool *p) { return tl_kv_unref_many(p, in.data(), in.size()); });
}

nb::object Pool::cow(nb::handle ids) {
    Ints<uint32_t> in(ids, "ids");
    if (in.is_scalar()) {
        uint32_t id = in[0], copy = 0;
        run(bytes_work(block_bytes_),
            [id, &copy](tl_kv_pool *p) { return tl_kv_cow(p, id, &copy); });
        finish_copies();
        return int_object(copy);
    }
    size_t n = in.size();
    nb::object copies = new_array(n, NPY_UINT32);
    uint32_t *out = array_data<uint32_t>(copies);
    std::vector<uint32_t> sorted(in.data(), in.data() + n);
    std::sort(sorted.begin(), sorted.end());
    run(bytes_work(n * block_bytes_), [&](tl_kv_pool *p) -> tl_status {
        // All or nothing: what can fail is found first. k mentions of a block with r references
        // make min(k, r - 1) copies; the mention that is left alone with the block writes in place.
        size_t needed = 0;
        for (size_t i = 0, k; i < n; i += k) {
            uint32_t id = sorted[i], unused;
            k = 1;
            while (i + k < n && sorted[i + k] == id) {
                k++;
            }
            size_t r = id < cfg_.n_blocks ? tl_kv_refs(p, id) : 0;
            if (r == 0) {
                return tl_kv_cow(p, id, &unused); // fails, and says why
            }
            needed += std::min(k, r - 1);
        }
        tl_kv_stats stats;
        tl_kv_stats_get(p, &stats);
        if (needed > size_t{stats.free} + stats.cached) {
            return fail(TL_EFULL, "cow: %zu copies asked for, %u blocks free and %u cached", needed,
                        stats.free, stats.cached);
        }
        for (size_t i = 0; i < n; i++) {
            tl_status st = tl_kv_cow(p, in[i], &out[i]);
            if (st != TL_OK) {
                return st; // cannot happen
            }
        }
        return TL_OK;
    });
    finish_copies();
    return copies;
}

// ---- a block's state ----------------------------------------------------------------------------

// read(pool, id, i) for each id, after all are known to be in range. A scalar's result is i = 0.
template <class Read> nb::object Pool::read_each(nb::handle ids, int typenum, Read &&read) {
    Ints<uint32_t> in(ids, "ids");
    uint64_t one = 0;
    nb::object result;
    if (!in.is_scalar()) {
        result = new_array(in.size(), typenum);
    }
    void *out = in.is_scalar() ? &one : array_data<void>(result);
    run(in.size() >= bulk_items ? Work::bulk : Work::constant, [&](tl_kv_pool *p) -> tl_status {
        for (size_t i = 0; i < in.size(); i++) {
            if (in[i] >= cfg_.n_blocks) {
                return in.is_scalar() ? fail(TL_EINVAL,
                                             "id %u is out of range: the pool has %u "
                                             "blocks",
                                             in[i], cfg_.n_blocks)
                                      : fail(TL_EINVAL,
                                             "ids[%zu] = %u is out of range: the pool "
                                             "has %u blocks",
                                             i, in[i], cfg_.n_blocks);
            }
        }
        for (size_t i = 0; i < in.size(); i++) {
            read(p, in[i], out, i);
        }
        return TL_OK;
    });
    if (!in.is_scalar()) {
        return result;
    }
    return int_object(typenum == NPY_UINT32 ? *static_cast<uint32_t *>(out) : one);
}

nb::object Pool::refs(nb::handle ids) {
    return read_each(ids, NPY_UINT32, [](tl_kv_pool *p, uint32_t id, void *out, size_t i) {
        static_cast<uint32_t *>(out)[i] = tl_kv_refs(p, id);
    });
}

nb::object Pool::fill(nb::handle ids) {
    return read_each(ids, NPY_UINT32, [](tl_kv_pool *p, uint32_t id, void *out, size_t i) {
        static_cast<uint32_t *>(out)[i] = tl_kv_fill(p, id);
    });
}

nb::object Pool::hash(nb::handle ids) {
    nb::object result =
        read_each(ids, NPY_UINT64, [](tl_kv_pool *p, uint32_t id, void *out, size_t i) {
            static_cast<uint64_t *>(out)[i] = tl_kv_hash(p, id);
        });
    if (PyLong_CheckExact(result.ptr()) && PyObject_Not(result.ptr())) {
        return nb::none();
    }
    return result;
}

void Pool::set_fill(nb::handle ids, nb::handle n_tokens) {
    Ints<uint32_t> in(ids, "ids");
    Ints<uint32_t> fills(n_tokens, "n_tokens", in.is_scalar() ? Form::scalar : Form::either);
    if (in.is_scalar()) {
        run(Work::constant, [&](tl_kv_pool *p) { return tl_kv_set_fill(p, in[0], fills[0]); });
        return;
    }
    std::vector<uint32_t> all;
    const uint32_t *each = fills.data();
    if (fills.is_scalar()) {
        all.assign(in.size(), fills[0]);
        each = all.data();
    } else {
        same_size(in.size(), fills.size(), "n_tokens");
    }
    run(Work::constant,
        [&](tl_kv_pool *p) { return tl_kv_set_fill_many(p, in.data(), each, in.size()); });
}

// ---- the prefix index ---------------------------------------------------------------------------

nb::object Pool::register_(nb::handle ids, nb::handle hashes) {
    Ints<uint32_t> in(ids, "ids");
    Ints<uint64_t> names(hashes, "hashes", in.is_scalar() ? Form::scalar : Form::array);
    if (in.is_scalar()) {
        tl_status st = run(
            Work::constant, [&](tl_kv_pool *p) { return tl_kv_register(p, in[0], names[0]); },
            TL_EBUSY);
        return nb::bool_(st == TL_OK);
    }
    same_size(in.size(), names.size(), "hashes");
    nb::object registered = new_array(in.size(), NPY_BOOL);
    uint8_t *out = array_data<uint8_t>(registered);
    run(Work::constant, [&](tl_kv_pool *p) {
        return tl_kv_register_many(p, in.data(), names.data(), in.size(), out);
    });
    return registered;
}

nb::object Pool::lookup(nb::handle hashes) {
    auto one = [&](uint64_t hash) -> nb::object {
        uint32_t id;
        tl_status st = run(
            Work::constant, [&](tl_kv_pool *p) { return tl_kv_lookup(p, hash, &id); },
            TL_ENOTFOUND);
        return st == TL_OK ? int_object(id) : nb::object(nb::none());
    };
    if (is_plain_int(hashes)) {
        return one(scalar_arg<uint64_t>(hashes, "hashes"));
    }
    Ints<uint64_t> in(hashes, "hashes");
    if (in.is_scalar()) {
        return one(in[0]);
    }
    nb::object ids = new_array(in.size(), NPY_INT64);
    int64_t *out = array_data<int64_t>(ids);
    run(Work::constant,
        [&](tl_kv_pool *p) { return tl_kv_lookup_many(p, in.data(), in.size(), out); });
    return ids;
}

// ---- views --------------------------------------------------------------------------------------

// Taken before the memory is looked at, so that a close() in between cannot unmap it.
nb::object Pool::owner() {
    nb::ft_lock_guard guard(owner_mutex_);
    return owner_ == nullptr ? nb::object(nb::none()) : nb::borrow(owner_);
}

nb::object Pool::view(nb::object owner, void *data, int first_dim) {
    nb::object array = checked(PyArray_NewFromDescr(
        &PyArray_Type, PyArray_DescrFromType(NPY_HALF), 6 - first_dim, dims_ + first_dim,
        strides_ + first_dim, data, NPY_ARRAY_CARRAY, nullptr));
    auto *a = reinterpret_cast<PyArrayObject *>(array.ptr());
    if (PyArray_SetBaseObject(a, owner.release().ptr()) < 0) { // steals, also when it fails
        throw nb::python_error();
    }
    return array;
}

nb::object Pool::block(nb::handle id_arg) {
    uint32_t id = scalar_arg<uint32_t>(id_arg, "id");
    nb::object base = owner();
    void *data = nullptr;
    run(Work::constant, [&](tl_kv_pool *p) -> tl_status {
        data = tl_kv_block_ptr(p, id, 0, 0);
        return data != nullptr ? TL_OK
               : copies_ != nullptr && id < cfg_.n_blocks
                   ? fail(TL_EUNSUPPORTED, "block: a pool of ids has no values to look at")
                   : TL_EINVAL;
    });
    return view(std::move(base), data, 1);
}

nb::object Pool::slab() {
    nb::object base = owner();
    void *data = nullptr;
    run(Work::constant, [&](tl_kv_pool *p) -> tl_status {
        data = tl_kv_block_ptr(p, 0, 0, 0);
        return data != nullptr
                   ? TL_OK
                   : fail(TL_EUNSUPPORTED, "slab: a pool of ids has no values to look at");
    });
    return view(std::move(base), data, 0);
}

// ---- the wire -----------------------------------------------------------------------------------

nb::object Pool::export_(nb::handle ids) {
    Ints<uint32_t> in(ids, "ids", Form::array);
    if (in.size() > UINT32_MAX) {
        raise_value("ids: an envelope holds at most 4294967295 blocks, found %zu", in.size());
    }
    uint32_t n = static_cast<uint32_t>(in.size());
    size_t size = 0;
    run(in.size() >= bulk_items ? Work::bulk : Work::constant, [&](tl_kv_pool *p) -> tl_status {
        // Asks for the size, and checks the ids before a byte is allocated for them.
        tl_status st = tl_kv_export(p, in.data(), n, nullptr, 0, &size);
        if (st == TL_EFULL) {
            st = size <= PY_SSIZE_T_MAX ? TL_OK : fail(TL_ENOMEM, "export: %zu bytes", size);
        }
        return st;
    });
    nb::object bytes = checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    char *out = PyBytes_AS_STRING(bytes.ptr());
    run(bytes_work(size), [&](tl_kv_pool *p) {
        size_t written;
        return tl_kv_export(p, in.data(), n, out, size, &written);
    });
    return bytes;
}

size_t Pool::export_bytes(nb::handle n) {
    uint32_t count = scalar_arg<uint32_t>(n, "n");
    size_t size = 0;
    run(Work::constant, [&](tl_kv_pool *p) -> tl_status {
        size = tl_kv_export_bytes(p, count);
        return size == SIZE_MAX ? fail(TL_EINVAL, "export_bytes: %u blocks overflow", count)
                                : TL_OK;
    });
    return size;
}

nb::object Pool::import_(nb::handle buffer) {
    Buffer in(buffer, "buffer");
    // An envelope that passes has exactly as many blocks as its length says, whatever its header
    // claims, and a pool never returns more than it has.
    size_t n = in.size() < 32 ? 0 : (in.size() - 32) / (block_bytes_ + 12);
    nb::object ids = new_array(std::min<size_t>(n, cfg_.n_blocks), NPY_UINT32);
    uint32_t *out = array_data<uint32_t>(ids);
    run(bytes_work(in.size()), [&](tl_kv_pool *p) {
        const tl_status st = outside_slab(p, slab_bytes(), in.data(), in.size(), "import_");
        return st != TL_OK ? st : tl_kv_import(p, in.data(), in.size(), out);
    });
    return ids;
}

// ---- the pool -----------------------------------------------------------------------------------

nb::object Pool::stats() {
    tl_kv_stats s;
    run(Work::constant, [&](tl_kv_pool *p) {
        tl_kv_stats_get(p, &s);
        return TL_OK;
    });
    // What tuple.__new__ does for a subclass, without the detour through Stats.__new__.
    auto *type = reinterpret_cast<PyTypeObject *>(stats_class);
    nb::object result = checked(type->tp_alloc(type, 4));
    const uint32_t fields[4] = {s.free, s.used, s.cached, s.evictions};
    for (Py_ssize_t i = 0; i < 4; i++) {
        PyTuple_SET_ITEM(result.ptr(), i, int_object(fields[i]).release().ptr());
    }
    return result;
}

void Pool::check() {
    Failure failure;
    call(
        *locked_, cfg_.n_blocks >= bulk_items ? Work::bulk : Work::constant,
        [](tl_kv_pool *p) { return tl_kv_check(p); }, failure);
    if (failure.status == TL_OK) {
        return;
    }
    if (closed()) {
        raise(failure);
    }
    raise_corrupt_pool(failure);
}

nb::object Pool::repr(nb::handle self) {
    tl_kv_stats s{};
    Failure failure;
    call(
        *locked_, Work::constant,
        [&](tl_kv_pool *p) {
            tl_kv_stats_get(p, &s);
            return TL_OK;
        },
        failure);
    char text[320];
    int n = std::snprintf(
        text, sizeof text, "(n_blocks=%u, block_tokens=%u, n_layers=%u, n_kv_heads=%u, head_dim=%u",
        cfg_.n_blocks, cfg_.block_tokens, cfg_.n_layers, cfg_.n_kv_heads, cfg_.head_dim);
    if (failure.status == TL_OK) {
        std::snprintf(text + n, sizeof text - n, "; free=%u, used=%u, cached=%u, evictions=%u)",
                      s.free, s.used, s.cached, s.evictions);
    } else {
        std::snprintf(text + n, sizeof text - n, "; closed)");
    }
    return checked(
        PyUnicode_FromFormat("%U%s", nb::object(self.type().attr("__name__")).ptr(), text));
}

// ---- the class ----------------------------------------------------------------------------------

namespace {

// A copy function may refer back to its pool: the collector must see that cycle.
int pool_traverse(PyObject *self, visitproc visit, void *arg) {
#if PY_VERSION_HEX >= 0x03090000
    Py_VISIT(Py_TYPE(self));
#endif
    if (nb::inst_ready(self)) {
        const auto &copies = nb::inst_ptr<Pool>(self)->copies();
        if (copies != nullptr) {
            Py_VISIT(copies->function());
        }
    }
    return 0;
}

int pool_clear(PyObject *self) {
    if (nb::inst_ready(self) && nb::inst_ptr<Pool>(self)->copies() != nullptr) {
        nb::inst_ptr<Pool>(self)->copies()->forget_function();
    }
    return 0;
}

PyType_Slot pool_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void *>(pool_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(pool_clear)},
    {0, nullptr},
};

} // namespace

void bind_pool(nb::module_ &m) {
    namespace d = docs;
    stats_class = nb::object(nb::module_::import_("kvpool._stats").attr("Stats")).release().ptr();

    nb::class_<Pool>(m, "Pool", nb::is_weak_referenceable(), nb::type_slots(pool_slots), d::pool)
        .def(
            "__init__",
            [](Pool *self, nb::handle n_blocks, nb::handle block_tokens, nb::handle n_layers,
               nb::handle n_kv_heads, nb::handle head_dim, nb::handle touch, nb::handle huge_pages,
               nb::handle slab, nb::handle copy) {
                new (self) Pool(n_blocks, block_tokens, n_layers, n_kv_heads, head_dim, touch,
                                huge_pages, slab, copy);
            },
            "n_blocks"_a.none(), "block_tokens"_a.none() = 16, nb::kw_only(), "n_layers"_a.none(),
            "n_kv_heads"_a.none(), "head_dim"_a.none(), "touch"_a.none() = false,
            "huge_pages"_a.none() = true, "slab"_a.none() = nb::none(),
            "copy"_a.none() = nb::none(),
            nb::sig("def __init__(self, n_blocks: Int, block_tokens: Int = 16, *, n_layers: Int, "
                    "n_kv_heads: Int, head_dim: Int, touch: bool = False, "
                    "huge_pages: bool = True, slab: Buffer | NDArray[Any] | None = None, "
                    "copy: Callable[[NDArray[numpy.uint32], NDArray[numpy.uint32]], object] | None "
                    "= None) -> None"))

        .def("alloc", &Pool::alloc, "n"_a.none() = nb::none(),
             nb::sig("def alloc(self, n: int | None = None) -> object"), d::alloc)
        .def("ref", &Pool::ref, "ids"_a.none(), nb::sig("def ref(self, ids: Ints) -> None"), d::ref)
        .def("unref", &Pool::unref, "ids"_a.none(), nb::sig("def unref(self, ids: Ints) -> None"),
             d::unref)
        .def("refs", &Pool::refs, "ids"_a.none(), nb::sig("def refs(self, ids: Ints) -> object"),
             d::refs)
        .def("cow", &Pool::cow, "ids"_a.none(), nb::sig("def cow(self, ids: Ints) -> object"),
             d::cow)
        .def("set_fill", &Pool::set_fill, "ids"_a.none(), "n_tokens"_a.none(),
             nb::sig("def set_fill(self, ids: Ints, n_tokens: Ints) -> None"), d::set_fill)
        .def("fill", &Pool::fill, "ids"_a.none(), nb::sig("def fill(self, ids: Ints) -> object"),
             d::fill)
        .def("register", &Pool::register_, "ids"_a.none(), "hashes"_a.none(),
             nb::sig("def register(self, ids: Ints, hashes: Ints) -> object"), d::register_)
        .def("hash", &Pool::hash, "ids"_a.none(), nb::sig("def hash(self, ids: Ints) -> object"),
             d::hash)
        .def("lookup", &Pool::lookup, "hashes"_a.none(),
             nb::sig("def lookup(self, hashes: Ints) -> object"), d::lookup)
        .def("block", &Pool::block, "id"_a.none(),
             nb::sig("def block(self, id: Int) -> NDArray[numpy.float16]"), d::block)
        .def_prop_ro("slab", &Pool::slab, nb::sig("def slab(self) -> NDArray[numpy.float16]"),
                     d::slab)
        .def("export", &Pool::export_, "ids"_a.none(),
             nb::sig("def export(self, ids: Array) -> bytes"), d::export_)
        .def("export_bytes", &Pool::export_bytes, "n"_a.none(),
             nb::sig("def export_bytes(self, n: Int) -> int"), d::export_bytes)
        .def("import_", &Pool::import_, "buffer"_a.none(),
             nb::sig("def import_(self, buffer: Buffer | NDArray[Any]) -> NDArray[numpy.uint32]"),
             d::import_)
        .def("check", &Pool::check, d::check)
        .def("close", &Pool::close, d::close)

        .def_prop_ro("stats", &Pool::stats, nb::sig("def stats(self) -> Stats"), d::stats)
        .def_prop_ro("closed", &Pool::closed, d::closed)
        .def_prop_ro(
            "n_blocks", [](const Pool &p) { return p.cfg().n_blocks; }, d::n_blocks)
        .def_prop_ro(
            "block_tokens", [](const Pool &p) { return p.cfg().block_tokens; }, d::block_tokens)
        .def_prop_ro(
            "n_layers", [](const Pool &p) { return p.cfg().n_layers; }, d::n_layers)
        .def_prop_ro(
            "n_kv_heads", [](const Pool &p) { return p.cfg().n_kv_heads; }, d::n_kv_heads)
        .def_prop_ro(
            "head_dim", [](const Pool &p) { return p.cfg().head_dim; }, d::head_dim)
        .def_prop_ro(
            "dtype", [](const Pool &) { return "float16"; }, d::dtype)
        .def_prop_ro(
            "format", [](const Pool &p) { return p.cfg().format; }, d::format)
        .def_prop_ro(
            "has_slab", [](const Pool &p) { return p.copies() == nullptr; }, d::has_slab)
        .def_prop_ro("block_bytes", &Pool::block_bytes, d::block_bytes)
        .def_prop_ro("meta_bytes", &Pool::meta_bytes, d::meta_bytes)

        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __enter__(self) -> Self"))
        .def(
            "__exit__", [](Pool &p, nb::args) { p.close(); },
            nb::sig("def __exit__(self, *exc_info: object) -> None"))
        .def(
            "__repr__",
            [](nb::handle self) {
                return nb::inst_ready(self) ? nb::inst_ptr<Pool>(self)->repr(self)
                                            : not_ready_repr(self);
            },
            nb::sig("def __repr__(self) -> str"))
        .def(
            "__reduce_ex__", [](Pool &, nb::handle) { refuse_copy("pickled"); },
            nb::sig("def __reduce_ex__(self, protocol: SupportsIndex, /) -> "
                    "NoReturn"))
        .def(
            "__copy__", [](Pool &) { refuse_copy("copied"); },
            nb::sig("def __copy__(self) -> NoReturn"))
        .def(
            "__deepcopy__", [](Pool &, nb::handle) { refuse_copy("copied"); },
            nb::sig("def __deepcopy__(self, memo: object, /) -> NoReturn"));
}

} // namespace kvpool
