#include "slab.hpp"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "args.hpp"
#include "support.hpp"

namespace kvpool {

// ---- copies for a pool of ids -------------------------------------------------------------------

Copies::Copies(nb::object copy, uint32_t n_blocks) : copy_(std::move(copy)) {
    if (PyCallable_Check(copy_.ptr()) == 0) {
        raise_type("copy: expected a function of (sources, destinations), found %.100R (%s)",
                   copy_.ptr(), Py_TYPE(copy_.ptr())->tp_name);
    }
    asked_.reserve(n_blocks);
}

void Copies::ask(void *self, uint32_t src, uint32_t dst) {
    auto *copies = static_cast<Copies *>(self);
    tl_kv_ref(copies->pool_, src);
    tl_kv_ref(copies->pool_, dst);
    copies->asked_.emplace_back(src, dst); // within the room made at first
    copies->n_asked_.store(copies->asked_.size(), std::memory_order_release);
}

void Copies::finish(LockedPool &pool) {
    if (n_asked_.load(std::memory_order_acquire) == 0) {
        return;
    }
    const auto me = std::this_thread::get_id();
    if (whose_turn_.load() == me) {
        return; // copy() itself called the pool: the loop below, further up, sees to it
    }
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) {
        nb::gil_scoped_release nogil;
        turn.lock();
    }
    struct Turn {
        std::atomic<std::thread::id> &whose;
        ~Turn() {
            whose.store(std::thread::id());
        }
    } until_done{whose_turn_};
    whose_turn_.store(me);

    for (;;) {
        const size_t room = n_asked_.load(std::memory_order_acquire);
        if (room == 0) {
            return;
        }
        std::vector<std::pair<uint32_t, uint32_t>> asked(room);
        Failure failure;
        // Only this thread takes some away while it is its turn, so there are `room` of them.
        call(
            pool, Work::constant,
            [&](tl_kv_pool *) {
                std::copy_n(asked_.begin(), room, asked.begin());
                return TL_OK;
            },
            failure);
        if (failure.status != TL_OK) {
            return; // closed meanwhile: there is nothing left to copy
        }
        // As many as can be made in any order: a block that was copied on before the copy into it
        // was made (by another thread, or after a copy that raised) begins the next round.
        size_t n = 0;
        for (std::unordered_set<uint32_t> written; n < room && written.count(asked[n].first) == 0;
             n++) {
            written.insert(asked[n].second);
        }
        nb::object sources = new_array(n, NPY_UINT32), destinations = new_array(n, NPY_UINT32);
        std::vector<uint32_t> held; // the arrays are the function's once it has them
        for (size_t i = 0; i < n; i++) {
            held.push_back(array_data<uint32_t>(sources)[i] = asked[i].first);
            held.push_back(array_data<uint32_t>(destinations)[i] = asked[i].second);
        }
        nb::object copy = copy_;
        if (!copy.is_valid()) {
            raise_value("copy: the function was collected as garbage, with the pool that had it");
        }
        copy(sources, destinations);
        call(
            pool, Work::constant,
            [&](tl_kv_pool *p) {
                (void)tl_kv_unref_many(p, held.data(), held.size());
                asked_.erase(asked_.begin(), asked_.begin() + static_cast<std::ptrdiff_t>(n));
                n_asked_.store(asked_.size(), std::memory_order_release);
                return TL_OK;
            },
            failure);
        if (failure.status != TL_OK) {
            return;
        }
    }
}

// ---- a slab of the caller's ---------------------------------------------------------------------

SlabBuffer slab_buffer(nb::handle slab) {
    auto view = std::make_unique<Py_buffer>();
    if (PyObject_GetBuffer(slab.ptr(), view.get(), PyBUF_CONTIG | PyBUF_FORMAT) < 0) {
        nb::python_error cause;
        raise_type_from(cause,
                        "slab: expected a writable C-contiguous buffer of float16 values, found %s",
                        Py_TYPE(slab.ptr())->tp_name);
    }
    const char *format = view->format == nullptr ? "B" : view->format;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    const char *native = "@=>!";
#else
    const char *native = "@=<";
#endif
    const char *code = format + (format[0] != 0 && std::strchr(native, format[0]) != nullptr);
    // float16 of this machine, or bytes of any kind: their order is the layout of the slab.
    if (view->itemsize != 1 && std::strcmp(code, "e") != 0) {
        nb::object found = nb::steal(PyUnicode_FromString(format));
        PyBuffer_Release(view.get());
        raise_type("slab: expected float16 values (format 'e') or bytes, found format %R",
                   found.ptr());
    }
    void *data = view->buf;
    const auto size = static_cast<size_t>(view->len);
    std::shared_ptr<void> keep(view.release(), [](void *p) {
        auto *held = static_cast<Py_buffer *>(p);
        if (Py_IsInitialized()) { // else the interpreter has ended, and the memory with it
            nb::gil_scoped_acquire gil;
            PyBuffer_Release(held);
            delete held;
        }
    });
    return {data, size, std::move(keep)};
}

} // namespace kvpool
