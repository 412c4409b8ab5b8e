#include "errors.hpp"

#include <cstdarg>

namespace kvpool {

namespace {

// Borrowed for the life of the process: the classes are never unloaded.
PyObject *base_class;
PyObject *type_class;
PyObject *classes[TL_EIO + 1];

// Raises cls(message), from `cause` when there is one.
[[noreturn]] void raise_message(PyObject *cls, nb::object message, nb::python_error *cause) {
    if (!message.is_valid()) {
        throw nb::python_error(); // the text could not be made: a repr that raises, no memory
    }
    if (cause != nullptr) {
        nb::raise_from(*cause, cls, "%s", nb::borrow<nb::str>(message).c_str());
    }
    PyErr_SetObject(cls, message.ptr());
    throw nb::python_error();
}

} // namespace

void load_errors() {
    nb::module_ errors = nb::module_::import_("kvpool.errors");
    auto get = [&](const char *name) { return nb::object(errors.attr(name)).release().ptr(); };
    base_class = get("KvPoolError");
    type_class = get("ArgumentTypeError");
    nb::object by_status = errors.attr("BY_STATUS");
    for (tl_status st = TL_EINVAL; st <= TL_EIO; st++) {
        classes[st] = nb::object(by_status[nb::int_(st)]).release().ptr();
    }
}

void raise_status(tl_status status, const char *text) {
    bool known = status > TL_OK && status <= TL_EIO;
    PyErr_SetString(known ? classes[status] : base_class, text);
    throw nb::python_error();
}

void raise(const Failure &failure) {
    raise_status(failure.status, failure.text);
}

void raise_corrupt_pool(const Failure &failure) {
    PyErr_SetString(base_class, failure.text);
    throw nb::python_error();
}

#define KVPOOL_FORMATTED(format)                                                                   \
    va_list args;                                                                                  \
    va_start(args, format);                                                                        \
    nb::object message = nb::steal(PyUnicode_FromFormatV(format, args));                           \
    va_end(args)

void raise_value(const char *format, ...) {
    KVPOOL_FORMATTED(format);
    raise_message(classes[TL_EINVAL], std::move(message), nullptr);
}

void raise_type(const char *format, ...) {
    KVPOOL_FORMATTED(format);
    raise_message(type_class, std::move(message), nullptr);
}

void raise_value_from(nb::python_error &cause, const char *format, ...) {
    KVPOOL_FORMATTED(format);
    raise_message(classes[TL_EINVAL], std::move(message), &cause);
}

void raise_type_from(nb::python_error &cause, const char *format, ...) {
    KVPOOL_FORMATTED(format);
    raise_message(type_class, std::move(message), &cause);
}

} // namespace kvpool
