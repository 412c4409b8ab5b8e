// The NumPy C API, included in one way by every file: module.cpp defines KVPOOL_IMPORT_ARRAY and
// owns the table of functions, the others refer to it. Results and arguments pass through this API
// and not through nb::ndarray, which costs several hundred nanoseconds a call.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API  NPY_1_23_API_VERSION
#define NPY_TARGET_VERSION     NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL kvpool_numpy_api
#ifndef KVPOOL_IMPORT_ARRAY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
