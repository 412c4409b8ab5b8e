// From a tl_status to a Python exception. The classes are defined in src/kvpool/errors.py, where
// they can be read, documented and pickled; this file only looks them up by status.
#pragma once

#include <nanobind/nanobind.h>

#include "locked_pool.hpp"

namespace kvpool {

namespace nb = nanobind;

// Fetches the classes from kvpool.errors; called once, when the module is made.
void load_errors();

// Sets the exception for a failed call, with the C library's text, and throws it.
[[noreturn]] void raise(const Failure &failure);

// For the tests: raises what `status` raises. Unknown statuses are KvPoolError.
[[noreturn]] void raise_status(tl_status status, const char *text);

// A wrong value (InvalidArgument) or a wrong kind of object (ArgumentTypeError). printf-like, with
// the formats of PyErr_Format: %R is repr(object), %zd a Py_ssize_t, ...
[[noreturn]] void raise_value(const char *format, ...);
[[noreturn]] void raise_type(const char *format, ...);

// The same with `cause` as the new exception's __cause__.
[[noreturn]] void raise_value_from(nb::python_error &cause, const char *format, ...);
[[noreturn]] void raise_type_from(nb::python_error &cause, const char *format, ...);

// The pool disagrees with itself (check()): KvPoolError.
[[noreturn]] void raise_corrupt_pool(const Failure &failure);

} // namespace kvpool
