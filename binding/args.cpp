#include "args.hpp"

#include <cstring>
#include <type_traits>

#include "errors.hpp"

namespace kvpool {

namespace {

constexpr const char *row_expected = "a list, tuple, range or 1-D array of integers";

template <class T> const char *expected_range();
template <> const char *expected_range<uint32_t>() {
    return "an integer from 0 to 4294967295";
}
template <> const char *expected_range<uint64_t>() {
    return "an integer from 0 to 18446744073709551615";
}

const char *kind_of(nb::handle value) {
    return Py_TYPE(value.ptr())->tp_name;
}

bool is_bool(nb::handle value) {
    return PyBool_Check(value.ptr()) || PyArray_IsScalar(value.ptr(), Bool);
}

// A NumPy array with a mask: what is masked is no value, and __index__ and the buffer do not tell.
bool is_masked(nb::handle value) {
    return PyArray_Check(value.ptr()) && !PyArray_CheckExact(value.ptr()) &&
           nb::isinstance(value, nb::module_::import_("numpy.ma").attr("MaskedArray"));
}

// Bytes without a type: a memoryview of bytes, an mmap. array.array and ctypes say what they hold.
bool is_untyped(nb::handle value) {
    Py_buffer view;
    if (nb::hasattr(value, "typecode") ||
        PyObject_GetBuffer(value.ptr(), &view, PyBUF_FULL_RO) < 0) {
        PyErr_Clear(); // read as an array, it says what is wrong
        return false;
    }
    const bool untyped = view.format == nullptr || std::strcmp(view.format, "B") == 0 ||
                         std::strcmp(view.format, "c") == 0;
    PyBuffer_Release(&view);
    return untyped;
}

// Objects that hold an array without being one. Text and bytes are buffers too, but never ids.
bool converts_to_array(nb::handle value) {
    PyObject *o = value.ptr();
    if (PyUnicode_Check(o) || PyBytes_Check(o) || PyByteArray_Check(o) || PyType_Check(o) ||
        PyArray_IsScalar(o, Generic)) {
        return false;
    }
    return nb::hasattr(value, "__array__") || nb::hasattr(value, "__array_interface__") ||
           (PyObject_CheckBuffer(o) && !is_untyped(value));
}

// The value of a Python int. 1: in *out; 0: outside of uint64_t.
bool long_as_u64(PyObject *value, uint64_t *out) {
    int overflow;
    long long x = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow == 0) {
        *out = static_cast<uint64_t>(x);
        return x >= 0;
    }
    if (overflow < 0) {
        return false;
    }
    *out = PyLong_AsUnsignedLongLong(value);
    if (*out == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    return true;
}

nb::object list_item(PyObject *list, Py_ssize_t i) {
#if PY_VERSION_HEX >= 0x030D0000
    return nb::steal(PyList_GetItemRef(list, i));
#else
    return nb::borrow(PyList_GET_ITEM(list, i));
#endif
}

} // namespace

template <class T> [[noreturn]] void Ints<T>::bad_value(nb::handle value, Py_ssize_t position) {
    if (position < 0) {
        raise_value("%s: expected %s, found %.100R", name_, expected_range<T>(), value.ptr());
    }
    raise_value("%s[%zd]: expected %s, found %.100R", name_, position, expected_range<T>(),
                value.ptr());
}

template <class T> [[noreturn]] void Ints<T>::bad_type(nb::handle value, Py_ssize_t position) {
    if (position < 0) {
        const char *row = form_ == Form::either ? ", or " : "";
        raise_type("%s: expected %s%s%s, found %.100R (%s)", name_, expected_range<T>(), row,
                   form_ == Form::either ? row_expected : "", value.ptr(), kind_of(value));
    }
    raise_type("%s[%zd]: expected %s, found %.100R (%s)", name_, position, expected_range<T>(),
               value.ptr(), kind_of(value));
}

template <class T> [[noreturn]] void Ints<T>::not_this_form(nb::handle value) {
    if (form_ == Form::scalar) {
        raise_type("%s: expected %s, found %s", name_, expected_range<T>(), kind_of(value));
    }
    raise_type("%s: expected %s, found %.100R (%s)", name_, row_expected, value.ptr(),
               kind_of(value));
}

// Room for n values in all, keeping the first size_.
template <class T> T *Ints<T>::grow(size_t n) {
    if (n > cap_) {
        if (n > SIZE_MAX / sizeof(T)) {
            throw std::bad_alloc();
        }
        std::unique_ptr<T[]> bigger(new T[n]);
        std::memcpy(bigger.get(), data_, size_ * sizeof(T));
        heap_ = std::move(bigger);
        data_ = heap_.get();
        cap_ = n;
    }
    return data_;
}

// One value of a row, or a scalar (position -1).
template <class T> T Ints<T>::item_value(nb::handle item, Py_ssize_t position) {
    uint64_t x;
    PyObject *o = item.ptr();
    if (PyLong_CheckExact(o)) {
        if (!long_as_u64(o, &x) || x > T(-1)) {
            bad_value(item, position);
        }
        return static_cast<T>(x);
    }
    if (is_bool(item) || !PyIndex_Check(o) || is_masked(item)) {
        bad_type(item, position);
    }
    nb::object index = nb::steal(PyNumber_Index(o));
    if (!index.is_valid()) {
        // An array or tensor that is not one integer; anything but a TypeError is the object's own
        // failure and goes through.
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            throw nb::python_error();
        }
        PyErr_Clear();
        bad_type(item, position);
    }
    if (!long_as_u64(index.ptr(), &x) || x > T(-1)) {
        bad_value(item, position);
    }
    return static_cast<T>(x);
}

template <class T> void Ints<T>::read_scalar(nb::handle value) {
    scalar_ = true;
    data_[0] = item_value(value, -1);
    size_ = 1;
}

// The size is read again at every step: an item's __index__ may run code that changes the row.
template <class T>
template <class GetItem, class GetSize>
void Ints<T>::read_items(GetItem item, GetSize count) {
    grow(static_cast<size_t>(count()));
    for (Py_ssize_t i = 0; i < count(); i++) {
        nb::object x = item(i);
        if (!x.is_valid()) {
            throw nb::python_error();
        }
        T value = item_value(x, i);
        if (size_ == cap_) {
            grow(2 * cap_);
        }
        data_[size_++] = value;
    }
}

template <class T> void Ints<T>::read_range(nb::handle range) {
    Py_ssize_t n = PyObject_Size(range.ptr());
    if (n < 0) { // OverflowError, the only way in which a range has no size
        nb::python_error cause;
        raise_value_from(cause, "%s: expected fewer integers than memory can hold, found %.100R",
                         name_, range.ptr());
    }
    if (n == 0) {
        return;
    }
    // A range is monotonic: when both ends fit, so does all between them.
    nb::object first = range[0], last = range[n - 1], step = range.attr("step");
    uint64_t x = item_value(first, 0);
    item_value(last, n - 1);
    const uint64_t d = PyLong_AsUnsignedLongLongMask(step.ptr()); // as x, it may wrap around
    if (d == UINT64_MAX && PyErr_Occurred()) {
        throw nb::python_error();
    }
    T *out = grow(static_cast<size_t>(n));
    for (Py_ssize_t i = 0; i < n; i++, x += d) {
        out[i] = static_cast<T>(x);
    }
    size_ = static_cast<size_t>(n);
}

template <class T> template <class Src> void Ints<T>::copy_strided(PyArrayObject *array) {
    const char *from = PyArray_BYTES(array);
    npy_intp n = PyArray_DIM(array, 0), stride = PyArray_STRIDE(array, 0);
    for (npy_intp i = 0; i < n; i++, from += stride) {
        Src x;
        std::memcpy(&x, from, sizeof x);
        bool fits = true;
        if constexpr (std::is_signed_v<Src>) {
            fits = x >= 0;
        }
        if constexpr (sizeof(Src) > sizeof(T)) {
            fits = fits && static_cast<std::make_unsigned_t<Src>>(x) <= T(-1);
        }
        if (!fits) {
            nb::object value = nb::steal(PyArray_ToScalar(const_cast<char *>(from), array));
            nb::object index = nb::steal(PyNumber_Index(value.ptr()));
            bad_value(index, i);
        }
        data_[i] = static_cast<T>(x);
    }
}

template <class T> void Ints<T>::read_array(PyArrayObject *array) {
    constexpr int native = sizeof(T) == 4 ? NPY_UINT32 : NPY_UINT64;
    int type = PyArray_TYPE(array);
    if (PyArray_NDIM(array) != 1) {
        raise_value("%s: expected a 1-D array, found one of %d dimensions", name_,
                    PyArray_NDIM(array));
    }
    size_t n = static_cast<size_t>(PyArray_DIM(array, 0));
    if (n == 0) {
        return;
    }
    if (!PyTypeNum_ISINTEGER(type)) {
        raise_type("%s: expected integers, found an array of dtype %S", name_,
                   reinterpret_cast<PyObject *>(PyArray_DESCR(array)));
    }
    grow(n);
    nb::object swapped;
    if (!PyArray_ISNOTSWAPPED(array)) {
        swapped =
            nb::steal(PyArray_CastToType(array, PyArray_DescrFromType(type), /* fortran: */ 0));
        if (!swapped.is_valid()) {
            throw nb::python_error();
        }
        array = reinterpret_cast<PyArrayObject *>(swapped.ptr());
    }
    if (PyArray_EquivTypenums(type, native) && PyArray_IS_C_CONTIGUOUS(array)) {
        std::memcpy(data_, PyArray_DATA(array), n * sizeof(T));
    } else {
        bool is_signed = PyTypeNum_ISSIGNED(type);
        switch (PyArray_ITEMSIZE(array)) {
        case 1:
            is_signed ? copy_strided<int8_t>(array) : copy_strided<uint8_t>(array);
            break;
        case 2:
            is_signed ? copy_strided<int16_t>(array) : copy_strided<uint16_t>(array);
            break;
        case 4:
            is_signed ? copy_strided<int32_t>(array) : copy_strided<uint32_t>(array);
            break;
        default:
            is_signed ? copy_strided<int64_t>(array) : copy_strided<uint64_t>(array);
        }
    }
    size_ = n;
}

template <class T>
Ints<T>::Ints(nb::handle value, const char *name, Form form) : name_(name), form_(form) {
    PyObject *o = value.ptr();
    if (PyLong_CheckExact(o) || PyArray_IsScalar(o, Integer)) {
        if (form == Form::array) {
            not_this_form(value);
        }
        read_scalar(value);
        return;
    }
    nb::object converted;
    if (!PyArray_Check(o) && !PyList_Check(o) && !PyTuple_Check(o) && !PyRange_Check(o) &&
        converts_to_array(value)) {
        converted = nb::steal(PyArray_FROM_O(o));
        if (!converted.is_valid()) {
            nb::python_error cause;
            raise_type_from(cause, "%s: the %s cannot be read as a NumPy array", name,
                            kind_of(value));
        }
        o = converted.ptr();
    }
    if (is_masked(o)) {
        raise_type("%s: expected integers, found a masked array; fill it or compress it first",
                   name);
    }
    if (PyArray_Check(o) && PyArray_NDIM(reinterpret_cast<PyArrayObject *>(o)) > 0) {
        if (form == Form::scalar) {
            not_this_form(value);
        }
        read_array(reinterpret_cast<PyArrayObject *>(o));
    } else if (PyList_Check(o) || PyTuple_Check(o) || PyRange_Check(o)) {
        if (form == Form::scalar) {
            not_this_form(value);
        }
        if (PyList_Check(o)) {
            read_items([o](Py_ssize_t i) { return list_item(o, i); },
                       [o] { return PyList_GET_SIZE(o); });
        } else if (PyTuple_Check(o)) {
            read_items([o](Py_ssize_t i) { return nb::borrow(PyTuple_GET_ITEM(o, i)); },
                       [o] { return PyTuple_GET_SIZE(o); });
        } else {
            read_range(value);
        }
    } else if (form == Form::array) {
        not_this_form(value);
    } else {
        read_scalar(o);
    }
}

template class Ints<uint32_t>;
template class Ints<uint64_t>;

bool flag_arg(nb::handle value, const char *name) {
    if (!is_bool(value)) {
        raise_type("%s: expected True or False, found %.100R (%s)", name, value.ptr(),
                   kind_of(value));
    }
    return PyObject_IsTrue(value.ptr()) == 1;
}

Buffer::Buffer(nb::handle value, const char *name) {
    if (PyObject_GetBuffer(value.ptr(), &view_, PyBUF_SIMPLE) == 0) {
        return;
    }
    if (!PyObject_CheckBuffer(value.ptr())) {
        PyErr_Clear();
        raise_type("%s: expected bytes, bytearray, memoryview, mmap or a C-contiguous array, "
                   "found %s",
                   name, kind_of(value));
    }
    nb::python_error cause;
    raise_value_from(cause, "%s: the %s has no C-contiguous buffer to read", name, kind_of(value));
}

nb::object new_array(size_t n, int typenum) {
    npy_intp dim = static_cast<npy_intp>(n);
    nb::object array = nb::steal(PyArray_SimpleNew(1, &dim, typenum));
    if (!array.is_valid()) {
        throw nb::python_error();
    }
    return array;
}

} // namespace kvpool
