// Pool.export_into, export_iter and export_pieces: envelopes without a new buffer for each.
#include "pool.hpp"

#include <algorithm>
#include <vector>

#include "args.hpp"
#include "wire_docs.hpp"

namespace kvpool {

using namespace nb::literals;

namespace {

template <class Op> tl_status run(Pool &pool, Work work, Op &&op, tl_status quiet = TL_OK) {
    Failure failure;
    call(*pool.locked(), work, op, failure);
    if (failure.status != TL_OK && failure.status != quiet) {
        raise(failure);
    }
    return failure.status;
}

// The ids of an envelope; and its size, once they are known to be exportable.
class Envelope {
  public:
    Envelope(Pool &pool, nb::handle ids) : ids_(ids, "ids", Form::array) {
        if (ids_.size() > UINT32_MAX) {
            raise_value("ids: an envelope holds at most 4294967295 blocks, found %zu", ids_.size());
        }
        run(pool, ids_.size() >= bulk_items ? Work::bulk : Work::constant,
            [&](tl_kv_pool *p) -> tl_status {
                tl_status st = tl_kv_export(p, ids_.data(), n(), nullptr, 0, &size_);
                if (st == TL_EFULL) {
                    st = size_ <= PY_SSIZE_T_MAX ? TL_OK
                                                 : fail(TL_ENOMEM, "export: %zu bytes", size_);
                }
                return st;
            });
    }

    const uint32_t *ids() const {
        return ids_.data();
    }
    uint32_t n() const {
        return static_cast<uint32_t>(ids_.size());
    }
    size_t size() const {
        return size_;
    }

  private:
    Ints<uint32_t> ids_;
    size_t size_ = 0;
};

// A writable C-contiguous buffer, held for as long as the object lives.
class WritableBuffer {
  public:
    WritableBuffer(nb::handle value, const char *name) {
        if (PyObject_GetBuffer(value.ptr(), &view_, PyBUF_CONTIG) < 0) {
            nb::python_error cause;
            raise_type_from(cause, "%s: expected a writable C-contiguous buffer, found %s", name,
                            Py_TYPE(value.ptr())->tp_name);
        }
    }
    WritableBuffer(const WritableBuffer &) = delete;
    WritableBuffer &operator=(const WritableBuffer &) = delete;
    ~WritableBuffer() {
        PyBuffer_Release(&view_);
    }

    void *data() const {
        return view_.buf;
    }
    size_t size() const {
        return static_cast<size_t>(view_.len);
    }

  private:
    Py_buffer view_;
};

size_t export_into(Pool &pool, nb::handle ids, nb::handle buffer) {
    Envelope envelope(pool, ids);
    WritableBuffer out(buffer, "buffer");
    if (out.size() < envelope.size()) {
        raise_value("buffer: expected at least %zu bytes, found %zu", envelope.size(), out.size());
    }
    size_t written = 0;
    run(pool, bytes_work(envelope.size()), [&](tl_kv_pool *p) {
        const tl_status st =
            outside_slab(p, pool.slab_bytes(), out.data(), out.size(), "export_into");
        return st != TL_OK ? st
                           : tl_kv_export(p, envelope.ids(), envelope.n(), out.data(), out.size(),
                                          &written);
    });
    return written;
}

// ---- parts --------------------------------------------------------------------------------------

class ExportParts {
    struct Busy { // true while it lives, whatever ends it
        explicit Busy(bool &flag) : flag_(flag) {
            flag_ = true;
        }
        Busy(const Busy &) = delete;
        Busy &operator=(const Busy &) = delete;
        ~Busy() {
            flag_ = false;
        }
        bool &flag_;
    };

  public:
    ExportParts(nb::object pool, nb::handle ids, nb::handle chunk_bytes)
        : owner_(std::move(pool)), pool_(nb::cast<Pool &>(owner_)) {
        const uint64_t chunk = scalar_arg<uint64_t>(chunk_bytes, "chunk_bytes");
        Envelope envelope(pool_, ids);
        ids_.assign(envelope.ids(), envelope.ids() + envelope.n());
        const uint64_t blocks = chunk / (pool_.block_bytes() + 12);
        blocks_ = static_cast<uint32_t>(std::clamp<uint64_t>(blocks, 1, UINT32_MAX));
    }

    nb::object next() {
        nb::ft_lock_guard guard(mutex_);
        if (busy_) { // the GIL is released while a part is made; one reader, as for a generator
            raise_value("export_iter: another thread is taking a part of this envelope");
        }
        const uint32_t n = static_cast<uint32_t>(ids_.size());
        if (done_) {
            throw nb::stop_iteration();
        }
        const uint32_t count = std::min(blocks_, n - first_);
        const bool last = first_ + count == n;
        const size_t size =
            (first_ == 0 ? 28 : 0) + count * (pool_.block_bytes() + 12) + (last ? 4 : 0);
        nb::object bytes =
            checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
        char *out = PyBytes_AS_STRING(bytes.ptr());
        const Busy busy(busy_);
        run(pool_, bytes_work(size), [&](tl_kv_pool *p) {
            size_t written;
            return tl_kv_export_part(p, ids_.data(), n, first_, count, out, size, &written, &crc_);
        });
        first_ += count;
        done_ = last;
        return bytes;
    }

  private:
    nb::object owner_;
    Pool &pool_;
    nb::ft_mutex mutex_;
    std::vector<uint32_t> ids_;
    uint32_t blocks_, first_ = 0, crc_ = 0;
    bool done_ = false, busy_ = false;
};

// ---- pieces -------------------------------------------------------------------------------------

// A read-only memoryview of n bytes that keeps `base` alive.
nb::object view_of(nb::handle base, const void *data, size_t n) {
    npy_intp dim = static_cast<npy_intp>(n);
    nb::object array = checked(PyArray_NewFromDescr(
        &PyArray_Type, PyArray_DescrFromType(NPY_UINT8), 1, &dim, nullptr, const_cast<void *>(data),
        NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED, nullptr));
    auto *a = reinterpret_cast<PyArrayObject *>(array.ptr());
    if (PyArray_SetBaseObject(a, nb::borrow(base).release().ptr()) < 0) { // steals
        throw nb::python_error();
    }
    return checked(PyMemoryView_FromObject(array.ptr()));
}

nb::list export_pieces(Pool &pool, nb::handle ids) {
    nb::object slab = pool.slab(); // first: the memory stays, whatever happens to the pool
    Envelope envelope(pool, ids);
    nb::object scratch;
    std::vector<tl_kv_piece> pieces;
    size_t scratch_cap = 0, scratch_bytes = 0, n_pieces = 0;
    for (;;) { // once to ask for the sizes; again if another thread changes a fill in between
        char *out = scratch_cap == 0 ? nullptr : PyBytes_AS_STRING(scratch.ptr());
        const tl_status st = run(
            pool, scratch_cap == 0 ? Work::constant : bytes_work(envelope.size()),
            [&](tl_kv_pool *p) {
                return tl_kv_export_pieces(p, envelope.ids(), envelope.n(), out, scratch_cap,
                                           pieces.data(), pieces.size(), &scratch_bytes, &n_pieces);
            },
            TL_EFULL);
        if (st == TL_OK) {
            break;
        }
        scratch_cap = scratch_bytes;
        pieces.resize(n_pieces);
        scratch = checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(scratch_cap)));
    }
    const char *own = PyBytes_AS_STRING(scratch.ptr());
    nb::list views;
    for (size_t i = 0; i < n_pieces; i++) {
        const char *at = static_cast<const char *>(pieces[i].ptr);
        const bool is_own = at >= own && at < own + scratch_cap;
        views.append(view_of(is_own ? scratch : slab, at, pieces[i].len));
    }
    return views;
}

} // namespace

void bind_wire(nb::module_ &m) {
    namespace d = docs;
    nb::class_<ExportParts>(m, "_ExportParts", d::export_parts)
        .def(
            "__iter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __iter__(self) -> Iterator[bytes]"))
        .def("__next__", &ExportParts::next, nb::sig("def __next__(self) -> bytes"));

    nb::borrow<nb::class_<Pool>>(m.attr("Pool"))
        .def("export_into", &export_into, "ids"_a.none(), "buffer"_a.none(),
             nb::sig("def export_into(self, ids: Array, buffer: Buffer | NDArray[Any]) -> int"),
             d::export_into)
        .def(
            "export_iter",
            [](nb::object self, nb::handle ids, nb::handle chunk_bytes) {
                return new ExportParts(std::move(self), ids, chunk_bytes);
            },
            "ids"_a.none(), "chunk_bytes"_a.none() = 1 << 20,
            nb::sig("def export_iter(self, ids: Array, chunk_bytes: Int = 1048576) -> "
                    "Iterator[bytes]"),
            d::export_iter)
        .def("export_pieces", &export_pieces, "ids"_a.none(),
             nb::sig("def export_pieces(self, ids: Array) -> list[memoryview]"), d::export_pieces);
}

} // namespace kvpool
