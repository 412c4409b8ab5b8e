// Arguments that are integers: one (a scalar), or a row of them (an array), read from whatever a
// caller has at hand and checked whole before anything happens.
//
//   scalar   int, NumPy integer, 0-d integer array, anything with __index__
//   array    list, tuple, range; 1-D NumPy array of any integer dtype, byte order and stride;
//            anything with the buffer protocol or __array__ (array.array, a CPU tensor)
//
// Refused, with an error that names the argument, what was expected and what was found: bool
// (True is no block id), float (1.0 neither), None, str, bytes, sets, more than one dimension, and
// values outside 0 .. the maximum of T. An empty array is accepted whatever its dtype, because
// np.array([]) is float64.
//
// The values are always copied: a caller's array may change while another thread has the GIL, and
// a few hundred ids cost a few nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <nanobind/nanobind.h>

#include "numpy_api.hpp"

namespace kvpool {

namespace nb = nanobind;

enum class Form { scalar, array, either };

template <class T> class Ints {
  public:
    // Reads `value`, which errors call `name`. Throws nb::python_error.
    Ints(nb::handle value, const char *name, Form form = Form::either);
    Ints(const Ints &) = delete;
    Ints &operator=(const Ints &) = delete;

    bool is_scalar() const {
        return scalar_;
    }
    size_t size() const {
        return size_;
    }
    const T *data() const {
        return data_;
    }
    T operator[](size_t i) const {
        return data_[i];
    }

  private:
    static constexpr size_t inline_cap = 512;

    bool read_int(nb::handle value);
    void read_scalar(nb::handle value);
    void read_array(PyArrayObject *array);
    template <class Src> void copy_strided(PyArrayObject *array);
    template <class GetItem, class GetSize> void read_items(GetItem item, GetSize count);
    void read_range(nb::handle range);
    T item_value(nb::handle item, Py_ssize_t position);
    T *grow(size_t n);
    [[noreturn]] void bad_value(nb::handle value, Py_ssize_t position);
    [[noreturn]] void bad_type(nb::handle value, Py_ssize_t position);
    [[noreturn]] void not_this_form(nb::handle value);

    const char *name_;
    Form form_;
    bool scalar_ = false;
    size_t size_ = 0, cap_ = inline_cap;
    T *data_ = inline_;
    std::unique_ptr<T[]> heap_;
    T inline_[inline_cap];
};

extern template class Ints<uint32_t>;
extern template class Ints<uint64_t>;

// One integer 0 .. UINT32_MAX (or UINT64_MAX).
template <class T> inline T scalar_arg(nb::handle value, const char *name) {
    if (PyLong_CheckExact(value.ptr())) {
        if constexpr (sizeof(T) == 8) {
            unsigned long long x = PyLong_AsUnsignedLongLong(value.ptr());
            if (x != ~0ull || !PyErr_Occurred()) {
                return x;
            }
            PyErr_Clear();
        } else {
            int overflow;
            long long x = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
            if (overflow == 0 && x >= 0 && x <= static_cast<long long>(T(-1))) {
                return static_cast<T>(x);
            }
        }
    }
    return Ints<T>(value, name, Form::scalar)[0];
}

// True for an argument that can be read with scalar_arg at once; other scalars go through Ints.
inline bool is_plain_int(nb::handle value) {
    return PyLong_CheckExact(value.ptr());
}

// A real bool (True, False, np.True_, np.False_), for flags.
bool flag_arg(nb::handle value, const char *name);

// A C-contiguous buffer, held for as long as the object lives: nobody can free it, and nobody can
// resize it unless the object ignores that it is in use, as NumPy does for resize(refcheck=False).
// So it is taken after all arguments that may run Python code are read. Its bytes are the caller's,
// who may change them at any time in another thread: what is read twice may differ.
class Buffer {
  public:
    Buffer(nb::handle value, const char *name);
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() {
        PyBuffer_Release(&view_);
    }

    const void *data() const {
        return view_.buf;
    }
    size_t size() const {
        return static_cast<size_t>(view_.len);
    }

  private:
    Py_buffer view_;
};

// A new 1-D array of n elements, C-contiguous, not initialised.
nb::object new_array(size_t n, int typenum);

template <class T> inline T *array_data(nb::handle array) {
    return static_cast<T *>(PyArray_DATA(reinterpret_cast<PyArrayObject *>(array.ptr())));
}

} // namespace kvpool
