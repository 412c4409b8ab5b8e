// kvpool.attention: the kernels of tinyllm/attention.h over NumPy arrays, and their threads.
#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "args.hpp"
#include "attention_docs.hpp"
#include "pool.hpp"

namespace kvpool {

using namespace nb::literals;

namespace {

// ---- threads ------------------------------------------------------------------------------------

class ThreadPool {
  public:
    explicit ThreadPool(nb::handle n_threads) {
        uint32_t n = 0;
        if (!n_threads.is_none()) {
            n = scalar_arg<uint32_t>(n_threads, "n_threads");
            if (n == 0) {
                raise_value("n_threads: expected at least 1, or None for one a processor, found 0");
            }
        }
        tl_pool *pool = nullptr;
        const tl_status st = tl_pool_create(n, &pool);
        if (st != TL_OK) {
            Failure failure;
            failure.capture(st);
            raise(failure);
        }
        pool_ = std::shared_ptr<tl_pool>(pool, tl_pool_destroy);
        n_threads_ = tl_pool_threads(pool);
    }

    // Empty once closed. Whoever has a share may go on using it.
    std::shared_ptr<tl_pool> share() {
        nb::ft_lock_guard guard(mutex_);
        return pool_;
    }

    void close() {
        std::shared_ptr<tl_pool> pool;
        {
            nb::ft_lock_guard guard(mutex_);
            pool = std::move(pool_);
            pool_ = nullptr;
        }
        nb::gil_scoped_release nogil; // the threads may have to finish something
        pool.reset();
    }

    uint32_t n_threads() const {
        return n_threads_;
    }

  private:
    nb::ft_mutex mutex_; // nothing when there is a GIL
    std::shared_ptr<tl_pool> pool_;
    uint32_t n_threads_ = 0;
};

std::shared_ptr<tl_pool> threads_arg(nb::handle threads) {
    if (threads.is_none()) {
        return nullptr;
    }
    if (!nb::isinstance<ThreadPool>(threads) || !nb::inst_ready(threads)) {
        raise_type("threads: expected a kvpool.attention.ThreadPool or None, found %.100R (%s)",
                   threads.ptr(), Py_TYPE(threads.ptr())->tp_name);
    }
    std::shared_ptr<tl_pool> share = nb::cast<ThreadPool &>(threads).share();
    if (share == nullptr) {
        raise_value("threads: the ThreadPool is closed");
    }
    return share;
}

// ---- arrays -------------------------------------------------------------------------------------

PyArrayObject *as_array(nb::handle object) {
    return reinterpret_cast<PyArrayObject *>(object.ptr());
}

void check_floats(nb::handle value, const char *name) {
    if (!PyArray_Check(value.ptr())) {
        raise_type("%s: expected a float32 array (n, heads, head_dim), found %s", name,
                   Py_TYPE(value.ptr())->tp_name);
    }
    PyArrayObject *array = as_array(value);
    if (PyArray_TYPE(array) != NPY_FLOAT32 || !PyArray_ISNOTSWAPPED(array)) {
        raise_type("%s: expected float32, found %S", name,
                   reinterpret_cast<PyObject *>(PyArray_DESCR(array)));
    }
    if (PyArray_NDIM(array) != 3) {
        raise_value("%s: expected 3 dimensions (n, heads, head_dim), found %d", name,
                    PyArray_NDIM(array));
    }
}

// Queries: float32 (n, heads, head_dim); an array with strides is copied.
nb::object queries_arg(nb::handle value) {
    check_floats(value, "q");
    return checked(PyArray_FromArray(as_array(value), nullptr, NPY_ARRAY_CARRAY_RO));
}

// The result: a new array like q, or the caller's.
nb::object result_arg(nb::handle out, nb::handle q) {
    PyArrayObject *like = as_array(q);
    if (out.is_none()) {
        return checked(PyArray_SimpleNew(3, PyArray_DIMS(like), NPY_FLOAT32));
    }
    check_floats(out, "out");
    PyArrayObject *array = as_array(out);
    if (!PyArray_SAMESHAPE(array, like)) {
        raise_value("out: expected the shape of q, (%zd, %zd, %zd), found (%zd, %zd, %zd)",
                    PyArray_DIM(like, 0), PyArray_DIM(like, 1), PyArray_DIM(like, 2),
                    PyArray_DIM(array, 0), PyArray_DIM(array, 1), PyArray_DIM(array, 2));
    }
    if (!PyArray_ISCARRAY(array)) {
        raise_value("out: expected a writable C-contiguous array");
    }
    return nb::borrow(out);
}

// Integers with any sign in `dims` dimensions, copied: other threads may change the array while the
// kernel trusts what was checked. What does not fit becomes the nearest that does, which no pool
// has as an id.
class Int32s {
  public:
    Int32s(nb::handle value, const char *name, int dims) {
        nb::object held = nb::borrow(value);
        if (!PyArray_Check(value.ptr())) {
            held = nb::steal(PyArray_FROM_O(value.ptr()));
            if (!held.is_valid()) {
                nb::python_error cause;
                raise_type_from(cause, "%s: the %s cannot be read as a NumPy array", name,
                                Py_TYPE(value.ptr())->tp_name);
            }
        }
        PyArrayObject *array = as_array(held);
        if (PyArray_NDIM(array) != dims) {
            raise_value("%s: expected %d dimension%s, found %d", name, dims, dims == 1 ? "" : "s",
                        PyArray_NDIM(array));
        }
        if (!PyTypeNum_ISINTEGER(PyArray_TYPE(array)) && PyArray_SIZE(array) != 0) {
            raise_type("%s: expected integers, found an array of dtype %S", name,
                       reinterpret_cast<PyObject *>(PyArray_DESCR(array)));
        }
        shape[0] = PyArray_DIM(array, 0);
        shape[1] = dims == 2 ? PyArray_DIM(array, 1) : 1;
        data_.reserve(1); // data() is not null: a table without columns is just too short
        data_.resize(static_cast<size_t>(PyArray_SIZE(array)));
        if (data_.empty()) {
            return;
        }
        if (PyArray_ITEMSIZE(array) == sizeof(int32_t) && PyArray_ISCARRAY_RO(array) &&
            PyArray_ISNOTSWAPPED(array)) {
            std::memcpy(data_.data(), PyArray_DATA(array), data_.size() * sizeof(int32_t));
            return;
        }
        nb::object wide = checked(PyArray_FROMANY(held.ptr(), NPY_INT64, dims, dims,
                                                  NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
        const auto *from = static_cast<const int64_t *>(PyArray_DATA(as_array(wide)));
        for (size_t i = 0; i < data_.size(); i++) {
            data_[i] = static_cast<int32_t>(
                std::min<int64_t>(std::max<int64_t>(from[i], INT32_MIN), INT32_MAX));
        }
    }

    const int32_t *data() const {
        return data_.data();
    }
    int32_t operator[](size_t i) const {
        return data_[i];
    }
    npy_intp shape[2];

  private:
    std::vector<int32_t> data_;
};

float scale_arg(nb::handle scale, const Pool &pool) {
    if (scale.is_none()) {
        return static_cast<float>(1 / std::sqrt(static_cast<double>(pool.cfg().head_dim)));
    }
    const double x = PyFloat_AsDouble(scale.ptr());
    if (x == -1 && PyErr_Occurred()) {
        nb::python_error cause;
        raise_type_from(cause, "scale: expected a number or None, found %s",
                        Py_TYPE(scale.ptr())->tp_name);
    }
    return static_cast<float>(x);
}

// ---- the calls ----------------------------------------------------------------------------------

// Runs kernel(tl_kv_pool *) -> tl_status without the pool's mutex: it reads the configuration and
// the slab, which do not change, and a share of the memory keeps them. n_keys: how many it reads.
template <class Kernel>
void attend(Pool &pool, nb::handle out, uint64_t n_keys, Kernel &&kernel, const char *name) {
    LockedPool &locked = *pool.locked();
    std::shared_ptr<Memory> memory;
    Failure failure;
    PyArrayObject *result = as_array(out);
    call(
        locked, Work::constant,
        [&](tl_kv_pool *p) {
            memory = locked.share_locked();
            return outside_slab(p, pool.slab_bytes(), PyArray_DATA(result),
                                static_cast<size_t>(PyArray_NBYTES(result)), name);
        },
        failure);
    if (failure.status == TL_OK) {
        auto work = [&] {
            const tl_status st = kernel(memory->get());
            if (st != TL_OK) {
                failure.capture(st);
            }
        };
        const uint64_t key_bytes = uint64_t{pool.cfg().n_kv_heads} * pool.cfg().head_dim * 4;
        if (n_keys >= bulk_bytes || n_keys * key_bytes >= bulk_bytes) {
            nb::gil_scoped_release nogil;
            work();
            memory.reset();
        } else {
            work();
        }
    }
    if (failure.status != TL_OK) {
        raise(failure);
    }
}

nb::object paged_decode(nb::handle q_arg, Pool &pool, nb::handle layer_arg, nb::handle tables_arg,
                        nb::handle lens_arg, nb::handle scale_arg_, nb::handle window_arg,
                        nb::handle out_arg, nb::handle threads) {
    const uint32_t layer = scalar_arg<uint32_t>(layer_arg, "layer");
    const uint32_t window = scalar_arg<uint32_t>(window_arg, "window");
    const float scale = scale_arg(scale_arg_, pool);
    const std::shared_ptr<tl_pool> tp = threads_arg(threads);
    const Int32s tables(tables_arg, "block_tables", 2);
    const Int32s lens(lens_arg, "context_lens", 1);
    const nb::object q = queries_arg(q_arg);
    const npy_intp *dims = PyArray_DIMS(as_array(q));
    if (tables.shape[0] != dims[0]) {
        raise_value("block_tables: expected a row for each query, %zd, found %zd", dims[0],
                    tables.shape[0]);
    }
    if (lens.shape[0] != dims[0]) {
        raise_value("context_lens: expected one for each query, %zd, found %zd", dims[0],
                    lens.shape[0]);
    }
    nb::object out = result_arg(out_arg, q);
    uint64_t n_keys = 0;
    for (npy_intp i = 0; i < dims[0]; i++) {
        n_keys += static_cast<uint32_t>(std::max(lens[static_cast<size_t>(i)], 0));
    }
    attend(
        pool, out, n_keys,
        [&](tl_kv_pool *p) {
            return tl_paged_attn_decode_f32(array_data<float>(q), p, layer, tables.data(),
                                            tables.shape[1], lens.data(), array_data<float>(out),
                                            dims[0], dims[1], pool.cfg().n_kv_heads, dims[2], scale,
                                            window, tp.get());
        },
        "paged_decode");
    return out;
}

nb::object paged_prefill(nb::handle q_arg, Pool &pool, nb::handle layer_arg, nb::handle table_arg,
                         nb::handle len_arg, nb::handle scale_arg_, nb::handle window_arg,
                         nb::handle out_arg, nb::handle threads) {
    const uint32_t layer = scalar_arg<uint32_t>(layer_arg, "layer");
    const uint32_t window = scalar_arg<uint32_t>(window_arg, "window");
    const uint32_t context_len = scalar_arg<uint32_t>(len_arg, "context_len");
    const float scale = scale_arg(scale_arg_, pool);
    const std::shared_ptr<tl_pool> tp = threads_arg(threads);
    const Int32s table(table_arg, "block_table", 1);
    const nb::object q = queries_arg(q_arg);
    const npy_intp *dims = PyArray_DIMS(as_array(q));
    nb::object out = result_arg(out_arg, q);
    attend(
        pool, out, uint64_t{context_len} * static_cast<uint64_t>(dims[0]),
        [&](tl_kv_pool *p) {
            return tl_paged_attn_prefill_f32(array_data<float>(q), p, layer, table.data(),
                                             table.shape[0], context_len, array_data<float>(out),
                                             dims[0], dims[1], pool.cfg().n_kv_heads, dims[2],
                                             scale, window, tp.get());
        },
        "paged_prefill");
    return out;
}

} // namespace

void bind_attention(nb::module_ &m) {
    namespace d = docs;
    nb::class_<ThreadPool>(m, "ThreadPool", d::thread_pool)
        .def(
            "__init__",
            [](ThreadPool *self, nb::handle n_threads) { new (self) ThreadPool(n_threads); },
            "n_threads"_a.none() = nb::none(),
            nb::sig("def __init__(self, n_threads: Int | None = None) -> None"))
        .def_prop_ro("n_threads", &ThreadPool::n_threads, d::n_threads)
        .def("close", &ThreadPool::close, d::thread_pool_close)
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __enter__(self) -> Self"))
        .def(
            "__exit__", [](ThreadPool &self, nb::args) { self.close(); },
            nb::sig("def __exit__(self, *exc_info: object) -> None"))
        .def(
            "__repr__",
            [](nb::handle self) {
                if (!nb::inst_ready(self)) {
                    return not_ready_repr(self);
                }
                ThreadPool &pool = *nb::inst_ptr<ThreadPool>(self);
                return checked(PyUnicode_FromFormat("ThreadPool(%u)%s", pool.n_threads(),
                                                    pool.share() ? "" : " closed"));
            },
            nb::sig("def __repr__(self) -> str"));

    m.def("paged_decode", &paged_decode, "q"_a.none(), "pool"_a, "layer"_a.none(),
          "block_tables"_a.none(), "context_lens"_a.none(), nb::kw_only(),
          "scale"_a.none() = nb::none(), "window"_a.none() = 0, "out"_a.none() = nb::none(),
          "threads"_a.none() = nb::none(),
          nb::sig("def paged_decode(q: NDArray[numpy.float32], pool: Pool, layer: Int, "
                  "block_tables: NDArray[numpy.integer[Any]] | Row[Array], context_lens: Array, *, "
                  "scale: float | None = None, window: Int = 0, "
                  "out: NDArray[numpy.float32] | None = None, threads: ThreadPool | None = None"
                  ") -> NDArray[numpy.float32]"),
          d::paged_decode);
    m.def("paged_prefill", &paged_prefill, "q"_a.none(), "pool"_a, "layer"_a.none(),
          "block_table"_a.none(), "context_len"_a.none(), nb::kw_only(),
          "scale"_a.none() = nb::none(), "window"_a.none() = 0, "out"_a.none() = nb::none(),
          "threads"_a.none() = nb::none(),
          nb::sig("def paged_prefill(q: NDArray[numpy.float32], pool: Pool, layer: Int, "
                  "block_table: Array, context_len: Int, *, scale: float | None = None, "
                  "window: Int = 0, out: NDArray[numpy.float32] | None = None, "
                  "threads: ThreadPool | None = None) -> NDArray[numpy.float32]"),
          d::paged_prefill);
}

} // namespace kvpool
