// What every class of the module needs to call the library and to make its results.
#pragma once

#include <cstdint>
#include <cstdio>

#include <nanobind/nanobind.h>

#include "errors.hpp"
#include "locked_pool.hpp"

namespace kvpool {

namespace nb = nanobind;

// Calls that touch at least this many bytes let other Python threads run meanwhile. Below it,
// handing the GIL over costs more than the work: 64 KiB are copied in about 5 microseconds.
constexpr size_t bulk_bytes = 64 * 1024;
// The same for calls that visit blocks or hash tokens, at 1 to 10 ns each.
constexpr size_t bulk_items = 4096;

enum class Work { constant, bulk };

inline Work bytes_work(size_t n_bytes) {
    return n_bytes >= bulk_bytes ? Work::bulk : Work::constant;
}

inline Work items_work(size_t n) {
    return n >= bulk_items ? Work::bulk : Work::constant;
}

// Runs op under the pool's mutex. Nobody waits for the mutex while holding the GIL, and nobody
// waits for the GIL while holding the mutex: a thread that has to wait for the mutex gives up the
// GIL first and takes it again after the mutex is released. op therefore must not touch a Python
// object that others may change.
template <class Op> void call(LockedPool &pool, Work work, Op &&op, Failure &failure) {
    if (work == Work::constant && pool.try_run(op, failure)) {
        return;
    }
    nb::gil_scoped_release nogil;
    pool.run(op, failure);
}

// Runs op, which needs no pool, and raises what it fails with.
template <class Op> void call_alone(Work work, Op &&op) {
    Failure failure;
    auto noted = [&] {
        const tl_status st = op();
        if (st != TL_OK) {
            failure.capture(st);
        }
    };
    if (work == Work::bulk) {
        nb::gil_scoped_release nogil;
        noted();
    } else {
        noted();
    }
    if (failure.status != TL_OK) {
        raise(failure);
    }
}

// Fails an op on the binding's own account, with a text made like the library's.
template <class... Args> tl_status fail(tl_status status, const char *format, Args... args) {
    char text[TL_LAST_ERROR_CAP];
    std::snprintf(text, sizeof text, format, args...);
    tl_set_last_error(text);
    return status;
}

// Fails when a buffer shares bytes with the pool's own slab: blocks would be copied over
// themselves, or an envelope be overwritten while it is read. Under the mutex.
inline tl_status outside_slab(tl_kv_pool *pool, size_t slab_bytes, const void *buffer, size_t size,
                              const char *call) {
    const auto at = reinterpret_cast<uintptr_t>(buffer);
    const auto slab = reinterpret_cast<uintptr_t>(tl_kv_block_ptr(pool, 0, 0, 0));
    if (size == 0 || slab == 0 || at >= slab + slab_bytes || slab >= at + size) {
        return TL_OK;
    }
    return fail(TL_EINVAL, "%s: buffer: expected memory outside the pool, found a part of its slab",
                call);
}

inline nb::object checked(PyObject *o) {
    if (o == nullptr) {
        throw nb::python_error();
    }
    return nb::steal(o);
}

// For an object whose class has an __init__ that never called ours.
inline nb::object not_ready_repr(nb::handle self) {
    return checked(
        PyUnicode_FromFormat("<%s that was never initialised>", Py_TYPE(self.ptr())->tp_name));
}

inline nb::object int_object(uint64_t x) {
    return checked(PyLong_FromUnsignedLongLong(x));
}

} // namespace kvpool
