#include "manager.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "manager_docs.hpp"
#include "numpy_api.hpp"

namespace kvpool {

using namespace nb::literals;

namespace {

PyTypeObject *sequence_type; // kept for the life of the process; final, so one comparison tells

nb::object row_item(PyObject *row, Py_ssize_t i) {
#if PY_VERSION_HEX >= 0x030D0000
    return nb::steal(PyList_Check(row) ? PyList_GetItemRef(row, i)
                                       : Py_NewRef(PyTuple_GET_ITEM(row, i)));
#else
    return nb::borrow(PySequence_Fast_GET_ITEM(row, i));
#endif
}

// The Sequence behind a Python object, or NULL.
Sequence *as_sequence(nb::handle o) {
    return Py_TYPE(o.ptr()) == sequence_type && nb::inst_ready(o) ? nb::inst_ptr<Sequence>(o)
                                                                  : nullptr;
}

[[noreturn]] void refuse_copy(const char *what, const char *instead) {
    PyErr_Format(PyExc_TypeError,
                 "a Sequence cannot be %s: its blocks belong to one manager's pool. %s", what,
                 instead);
    throw nb::python_error();
}

void unraisable_warning(const char *format, size_t n_tokens, size_t n_blocks) {
    if (PyErr_WarnFormat(PyExc_ResourceWarning, 1, format, n_tokens, n_blocks) < 0) {
        PyErr_WriteUnraisable(nullptr); // warnings are errors here, and a destructor cannot raise
    }
}

} // namespace

// ---- life ---------------------------------------------------------------------------------------

nb::object Sequence::make(const CorePtr &core, tl_kv_seq handle, uint64_t root) {
    nb::object self = nb::inst_alloc(reinterpret_cast<PyObject *>(sequence_type));
    new (nb::inst_ptr<Sequence>(self)) Sequence(core, handle, root);
    nb::inst_mark_ready(self);
    return self;
}

// Gives the blocks back. Runs when the last reference goes, with or without an error set.
Sequence::~Sequence() {
    const tl_kv_seq handle = take();
    if (handle == 0) {
        return;
    }
    tl_kv_seq_info info;
    Failure failure;
    core_->call(
        Work::constant,
        [&](tl_kv_mgr *m, tl_kv_pool *) -> tl_status {
            const tl_status st = tl_kv_seq_info_get(m, handle, &info);
            return st == TL_OK ? tl_kv_seq_free(m, handle) : st;
        },
        failure);
    if (failure.status == TL_OK) { // else the manager or the pool was closed, which freed it
        nb::error_scope keep;
        unraisable_warning("a Sequence of %zu tokens was dropped without free(); its %zu blocks "
                           "were given back only now",
                           info.n_tokens, info.n_blocks);
    }
}

tl_kv_seq Sequence::alive() const {
    const tl_kv_seq h = handle();
    if (h == 0) {
        raise_value("the sequence is freed");
    }
    return h;
}

void Sequence::free() {
    const tl_kv_seq h = take();
    if (h == 0) {
        raise_value("the sequence is freed");
    }
    core_->run(Work::constant, [=](tl_kv_mgr *m, tl_kv_pool *) { return tl_kv_seq_free(m, h); });
}

// What the end of a with block does: nothing if the sequence, or all of its manager, is gone.
void Sequence::free_if_alive() {
    const tl_kv_seq h = take();
    if (h != 0) {
        Failure failure;
        core_->call(
            Work::constant, [=](tl_kv_mgr *m, tl_kv_pool *) { return tl_kv_seq_free(m, h); },
            failure);
    }
}

bool Sequence::is_freed() {
    const tl_kv_seq h = handle();
    if (h == 0) {
        return true;
    }
    tl_kv_seq_info info;
    Failure failure;
    core_->call(
        Work::constant, [&](tl_kv_mgr *m, tl_kv_pool *) { return tl_kv_seq_info_get(m, h, &info); },
        failure);
    return failure.status != TL_OK;
}

// ---- one request --------------------------------------------------------------------------------

nb::object copies_list(const tl_kv_copy *copies, size_t n) {
    nb::object list = checked(PyList_New(static_cast<Py_ssize_t>(n)));
    for (size_t i = 0; i < n; i++) {
        nb::object pair = checked(PyTuple_New(2));
        PyTuple_SET_ITEM(pair.ptr(), 0, int_object(copies[i].src).release().ptr());
        PyTuple_SET_ITEM(pair.ptr(), 1, int_object(copies[i].dst).release().ptr());
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), pair.release().ptr());
    }
    return list;
}

nb::object Sequence::append(nb::handle tokens) {
    const tl_kv_seq h = alive();
    Ints<uint32_t> in(tokens, "tokens");
    tl_kv_copy copy;
    size_t n_copies = 0;
    core_->run(core_->append_work(1), [&](tl_kv_mgr *m, tl_kv_pool *) {
        return tl_kv_seq_append(m, h, in.data(), in.size(), &copy, &n_copies);
    });
    core_->finish_copies();
    return copies_list(&copy, n_copies);
}

nb::object Sequence::fork() {
    const tl_kv_seq h = alive();
    tl_kv_seq child = 0;
    core_->expect_copies();
    core_->run(Work::constant,
               [&](tl_kv_mgr *m, tl_kv_pool *) { return tl_kv_seq_fork(m, h, &child); });
    return make(core_, child, root_);
}

void Sequence::truncate(nb::handle n) {
    const tl_kv_seq h = alive();
    const size_t length = scalar_arg<uint64_t>(n, "n");
    core_->expect_copies(); // a cut into a registered block is followed by a copy
    core_->run(Work::constant,
               [=](tl_kv_mgr *m, tl_kv_pool *) { return tl_kv_seq_truncate(m, h, length); });
}

void Sequence::commit(nb::handle n_computed) {
    const tl_kv_seq h = alive();
    const bool all = n_computed.is_none();
    const size_t n = all ? 0 : scalar_arg<uint64_t>(n_computed, "n_computed");
    core_->commit(&h, &root_, 1, all ? nullptr : &n);
}

void Sequence::found(nb::handle n_found, nb::handle counted) {
    const tl_kv_seq h = alive();
    const size_t n = scalar_arg<uint64_t>(n_found, "n_found");
    const bool is_counted = flag_arg(counted, "counted");
    core_->run(Work::constant,
               [=](tl_kv_mgr *m, tl_kv_pool *) { return tl_kv_seq_found(m, h, n, is_counted); });
}

void Sequence::pin(nb::handle seconds) {
    const tl_kv_seq h = alive();
    PyObject *o = seconds.ptr();
    if (PyBool_Check(o) || !(PyFloat_Check(o) || PyIndex_Check(o))) {
        raise_type("seconds: expected a number, found %.100R (%s)", o, Py_TYPE(o)->tp_name);
    }
    double s = PyFloat_AsDouble(o);
    if (s == -1.0 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
            throw nb::python_error();
        }
        PyErr_Clear(); // an integer that no float holds: refused below
        s = HUGE_VAL;
    }
    constexpr double longest = 1e9; // 30 years: what a clock of nanoseconds can be asked for
    if (!(s > 0.0 && s <= longest)) {
        raise_value("seconds: expected a number above 0, up to 1e9, found %.100R", o);
    }
    const auto until = std::chrono::steady_clock::now() +
                       std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                           std::chrono::duration<double>(s));
    core_->run(Work::constant,
               [&](tl_kv_mgr *, tl_kv_pool *) { return core_->pin(h, root_, until); });
}

// ---- reading ------------------------------------------------------------------------------------

tl_kv_seq_info Sequence::info() {
    const tl_kv_seq h = alive();
    tl_kv_seq_info info;
    core_->run(Work::constant,
               [&](tl_kv_mgr *m, tl_kv_pool *) { return tl_kv_seq_info_get(m, h, &info); });
    return info;
}

// A copy of `count` uint32 elements that read(mgr, handle) points to. The array is made between two
// looks, without the mutex, so the count may have changed at the second.
template <class Read>
nb::object Sequence::copy_out(int typenum, size_t tl_kv_seq_info::*count, Read &&read) {
    const tl_kv_seq h = alive();
    size_t n = info().*count, now = n;
    for (;;) {
        nb::object array = new_array(n, typenum);
        uint32_t *out = array_data<uint32_t>(array);
        core_->run(items_work(n / 4), [&](tl_kv_mgr *m, tl_kv_pool *) -> tl_status {
            tl_kv_seq_info info;
            const tl_status st = tl_kv_seq_info_get(m, h, &info);
            now = info.*count;
            if (st == TL_OK && now == n && n > 0) {
                std::memcpy(out, read(m, h), n * sizeof *out);
            }
            return st;
        });
        if (now == n) {
            return array;
        }
        n = now;
    }
}

nb::object Sequence::blocks() {
    return copy_out(NPY_UINT32, &tl_kv_seq_info::n_blocks, tl_kv_seq_blocks);
}

nb::object Sequence::tokens() {
    return copy_out(NPY_UINT32, &tl_kv_seq_info::n_tokens, tl_kv_seq_tokens);
}

nb::object Sequence::slot_mapping(nb::handle first_arg, nb::handle n_arg, nb::handle pad_arg) {
    const tl_kv_seq h = alive();
    const size_t first = scalar_arg<uint64_t>(first_arg, "first");
    const int64_t pad = int64_arg(pad_arg, "pad");
    size_t n;
    if (n_arg.is_none()) {
        const size_t length = info().n_tokens;
        n = first < length ? length - first : 0;
    } else {
        n = scalar_arg<uint64_t>(n_arg, "n");
        if (n > static_cast<size_t>(PY_SSIZE_T_MAX) / sizeof(int64_t)) {
            raise_value("n: %zu slots are more than an array holds", n);
        }
    }
    nb::object slots = new_array(n, NPY_INT64);
    int64_t *out = array_data<int64_t>(slots);
    core_->run(items_work(n / 4), [=](tl_kv_mgr *m, tl_kv_pool *) {
        return tl_kv_seq_slot_mapping(m, h, first, n, pad, out);
    });
    return slots;
}

// ---- the wire -----------------------------------------------------------------------------------

namespace {

void put_le32(uint8_t *at, uint32_t x) {
    for (int i = 0; i < 4; i++) {
        at[i] = static_cast<uint8_t>(x >> (8 * i));
    }
}

// Whether a sequence's last block, of `tail` positions, has another record: the sequence was
// truncated into a block that it shares, or that is registered, and that holds more.
bool must_cut(const uint8_t *record, uint32_t tail) {
    uint8_t expected[12] = {0};
    put_le32(expected + 8, tail);
    return tail != 0 && std::memcmp(record, expected, sizeof expected) != 0;
}

// Cuts the block to its first n_tokens positions.
void cut_block(uint8_t *record, const tl_kv_cfg &cfg, size_t block_bytes, uint32_t n_tokens) {
    uint8_t *block = record + 12;
    std::memset(record, 0, 8); // the name is of the full block
    put_le32(record + 8, n_tokens);
    const size_t row = size_t{cfg.head_dim} * sizeof(uint16_t), slab = row * cfg.block_tokens;
    for (uint8_t *at = block; at < block + block_bytes; at += slab) {
        std::memset(at + row * n_tokens, 0, slab - row * n_tokens);
    }
}

} // namespace

nb::object Sequence::export_() {
    const tl_kv_seq h = alive();
    const size_t B = core_->block_tokens();
    for (;;) {
        // The bytes are made without the mutex; the sequence may be longer when they are there.
        const size_t n_computed = info().n_computed, n = core_->blocks_for(n_computed);
        size_t size = 0;
        core_->run(Work::constant, [&](tl_kv_mgr *, tl_kv_pool *p) -> tl_status {
            size = tl_kv_export_bytes(p, static_cast<uint32_t>(n));
            return size <= PY_SSIZE_T_MAX ? TL_OK
                                          : fail(TL_ENOMEM, "export: %zu blocks overflow", n);
        });
        nb::object bytes =
            checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
        auto *out = reinterpret_cast<uint8_t *>(PyBytes_AS_STRING(bytes.ptr()));
        bool same = false;
        core_->run(bytes_work(size), [&](tl_kv_mgr *m, tl_kv_pool *p) -> tl_status {
            tl_kv_seq_info now;
            tl_status st = tl_kv_seq_info_get(m, h, &now);
            same = st == TL_OK && now.n_computed == n_computed;
            if (!same) {
                return st;
            }
            size_t written;
            st = tl_kv_export(p, tl_kv_seq_blocks(m, h), static_cast<uint32_t>(n), out, size,
                              &written);
            return st;
        });
        if (!same) {
            continue;
        }
        const uint32_t tail = static_cast<uint32_t>(n_computed % B);
        uint8_t *record = out + size - 4 - core_->block_bytes() - 12;
        if (n > 0 && must_cut(record, tail)) {
            cut_block(record, core_->cfg(), core_->block_bytes(), tail);
            put_le32(out + size - 4, tl_crc32c(out, size - 4, 0));
        }
        return bytes;
    }
}

nb::object Sequence::export_block(nb::handle index_arg, nb::handle before_arg,
                                  nb::handle after_arg) {
    const tl_kv_seq h = alive();
    const uint64_t index = scalar_arg<uint64_t>(index_arg, "index");
    Buffer before(before_arg, "before"), after(after_arg, "after");
    const size_t B = core_->block_tokens(), size = core_->block_bytes() + 28 + 12 + 4;
    if (size > PY_SSIZE_T_MAX || before.size() > PY_SSIZE_T_MAX - size ||
        after.size() > PY_SSIZE_T_MAX - size - before.size()) {
        PyErr_NoMemory();
        throw nb::python_error();
    }
    nb::object bytes = checked(PyBytes_FromStringAndSize(
        nullptr, static_cast<Py_ssize_t>(before.size() + size + after.size())));
    auto *out = reinterpret_cast<uint8_t *>(PyBytes_AS_STRING(bytes.ptr()));
    if (before.size() > 0) {
        std::memcpy(out, before.data(), before.size());
    }
    if (after.size() > 0) {
        std::memcpy(out + before.size() + size, after.data(), after.size());
    }
    out += before.size();
    uint32_t n_tokens = 0; // of this sequence in the block
    core_->run(bytes_work(size), [&](tl_kv_mgr *m, tl_kv_pool *p) -> tl_status {
        tl_kv_seq_info now;
        tl_status st = tl_kv_seq_info_get(m, h, &now);
        if (st == TL_OK && index >= core_->blocks_for(now.n_computed)) {
            st = fail(TL_EINVAL, "export_block: index %llu, %zu tokens are computed, in %zu blocks",
                      static_cast<unsigned long long>(index), now.n_computed,
                      core_->blocks_for(now.n_computed));
        }
        if (st != TL_OK) {
            return st;
        }
        n_tokens = static_cast<uint32_t>(std::min<uint64_t>(B, now.n_computed - index * B));
        size_t written;
        return tl_kv_export(p, tl_kv_seq_blocks(m, h) + index, 1, out, size, &written);
    });
    const uint32_t tail = n_tokens < B ? n_tokens : 0;
    if (must_cut(out + 28, tail)) {
        cut_block(out + 28, core_->cfg(), core_->block_bytes(), tail);
        put_le32(out + size - 4, tl_crc32c(out, size - 4, 0));
    }
    return bytes;
}

namespace {

// The iterator of Sequence.export_iter. It has no part in the sequence: whoever frees or cuts it
// ends the iteration with an error.
class SequenceParts {
  public:
    SequenceParts(CorePtr core, tl_kv_seq handle, size_t n_computed, size_t chunk_bytes)
        : core_(std::move(core)), handle_(handle), n_computed_(n_computed),
          n_(static_cast<uint32_t>(core_->blocks_for(n_computed))),
          step_(static_cast<uint32_t>(
              std::clamp<size_t>(chunk_bytes / (core_->block_bytes() + 12), 1, UINT32_MAX))) {}

    nb::object next() {
        nb::ft_lock_guard guard(mutex_);
        if (busy_) { // the GIL is released while a part is made
            raise_value("export_iter: another thread is taking a part of this envelope");
        }
        if (done_) {
            throw nb::stop_iteration();
        }
        const size_t P = core_->block_bytes();
        const uint32_t count = std::min(step_, n_ - first_);
        const bool last = first_ + count == n_;
        const size_t size = (first_ == 0 ? 28 : 0) + count * (P + 12) + (last ? 4 : 0);
        nb::object bytes =
            checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
        auto *out = reinterpret_cast<uint8_t *>(PyBytes_AS_STRING(bytes.ptr()));
        Failure failure;
        busy_ = true;
        core_->call(
            bytes_work(size),
            [&](tl_kv_mgr *m, tl_kv_pool *p) { return part(m, p, out, size, count, last); },
            failure);
        busy_ = false;
        if (failure.status != TL_OK) {
            raise(failure);
        }
        first_ += count;
        done_ = last;
        return bytes;
    }

  private:
    tl_status part(tl_kv_mgr *m, tl_kv_pool *p, uint8_t *out, size_t size, uint32_t count,
                   bool last) {
        tl_kv_seq_info now;
        tl_status st = tl_kv_seq_info_get(m, handle_, &now);
        if (st == TL_OK && now.n_computed < n_computed_) {
            st =
                fail(TL_EINVAL, "export_iter: the sequence was cut from %zu to %zu computed tokens",
                     n_computed_, now.n_computed);
        }
        const uint32_t before = first_ == 0 ? 0 : crc_;
        size_t written;
        if (st == TL_OK) {
            st = tl_kv_export_part(p, tl_kv_seq_blocks(m, handle_), n_, first_, count, out, size,
                                   &written, &crc_);
        }
        const uint32_t tail = static_cast<uint32_t>(n_computed_ % core_->block_tokens());
        if (st == TL_OK && last && count > 0) {
            uint8_t *record = out + size - 4 - core_->block_bytes() - 12;
            if (must_cut(record, tail)) {
                cut_block(record, core_->cfg(), core_->block_bytes(), tail);
                put_le32(out + size - 4, tl_crc32c(out, size - 4, before));
            }
        }
        return st;
    }

    const CorePtr core_;
    const tl_kv_seq handle_;
    const size_t n_computed_;
    const uint32_t n_, step_;
    nb::ft_mutex mutex_;
    uint32_t first_ = 0, crc_ = 0;
    bool done_ = false, busy_ = false;
};

} // namespace

nb::object Sequence::export_iter(nb::handle chunk_bytes) {
    const tl_kv_seq h = alive();
    const size_t chunk = scalar_arg<uint64_t>(chunk_bytes, "chunk_bytes");
    return nb::cast(new SequenceParts(core_, h, info().n_computed, chunk),
                    nb::rv_policy::take_ownership);
}

nb::object Sequence::repr() {
    const tl_kv_seq h = handle();
    tl_kv_seq_info info;
    Failure failure;
    core_->call(
        Work::constant, [&](tl_kv_mgr *m, tl_kv_pool *) { return tl_kv_seq_info_get(m, h, &info); },
        failure);
    if (failure.status != TL_OK) {
        return nb::str("Sequence(freed)");
    }
    return checked(
        PyUnicode_FromFormat("Sequence(n_tokens=%zu, n_cached=%zu, n_computed=%zu, n_blocks=%zu)",
                             info.n_tokens, info.n_cached, info.n_computed, info.n_blocks));
}

// ---- rows of sequences --------------------------------------------------------------------------

namespace {

// A list or tuple as it is, another iterable as a list.
nb::object as_row(nb::handle seqs) {
    PyObject *o = seqs.ptr();
    nb::object row = nb::steal(PySequence_Fast(o, ""));
    if (!row.is_valid()) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) || PyObject_HasAttrString(o, "__iter__")) {
            throw nb::python_error(); // the iterator's own failure
        }
        PyErr_Clear();
        raise_type("seqs: expected a list or tuple of Sequences, found %.100R (%s)", o,
                   Py_TYPE(o)->tp_name);
    }
    return row;
}

} // namespace

Handles::Handles(const CorePtr &core, nb::handle seqs) {
    nb::object row = as_row(seqs);
    PyObject *o = row.ptr();
    // Nothing below runs Python code, so the row does not change while there is a GIL.
    handles_.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(o)));
    roots_.reserve(handles_.capacity());
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); i++) {
        nb::object item = row_item(o, i);
        const Sequence *s = as_sequence(item);
        if (s == nullptr && Py_TYPE(item.ptr()) == sequence_type) {
            raise_type("seqs[%zd]: the Sequence was never initialised", i);
        }
        if (s == nullptr) {
            raise_type("seqs[%zd]: expected a Sequence, found %.100R (%s)", i, item.ptr(),
                       Py_TYPE(item.ptr())->tp_name);
        }
        if (s->core() != core) {
            raise_value("seqs[%zd]: the sequence belongs to another manager", i);
        }
        const tl_kv_seq handle = s->handle();
        if (handle == 0) {
            raise_value("seqs[%zd]: the sequence is freed", i);
        }
        handles_.push_back(handle);
        roots_.push_back(s->root());
    }
}

void BlockManager::free(nb::handle seqs) {
    nb::object row = checked(PySequence_Tuple(as_row(seqs).ptr())); // nobody else changes it
    Handles handles(core_, row);
    std::vector<tl_kv_seq> taken;
    auto sequence = [&](size_t i) -> Sequence & {
        return *nb::inst_ptr<Sequence>(PyTuple_GET_ITEM(row.ptr(), static_cast<Py_ssize_t>(i)));
    };
    auto give_back = [&] {
        for (size_t i = 0; i < taken.size(); i++) {
            sequence(i).give_back(taken[i]);
        }
    };
    for (size_t i = 0; i < handles.size(); i++) {
        const tl_kv_seq h = sequence(i).take();
        if (h == 0) {
            give_back();
            raise_value("seqs[%zu]: the sequence is in the row twice", i);
        }
        taken.push_back(h);
    }
    Failure failure;
    core_->call(
        Work::constant,
        [&](tl_kv_mgr *m, tl_kv_pool *) -> tl_status {
            for (tl_kv_seq h : taken) {
                const tl_status st = tl_kv_seq_free(m, h);
                if (st != TL_OK) {
                    return st; // cannot happen: who takes a handle is the only one to free it
                }
            }
            return TL_OK;
        },
        failure);
    if (failure.status != TL_OK) {
        give_back();
        raise(failure);
    }
}

// ---- the class ----------------------------------------------------------------------------------

void bind_sequence(nb::module_ &m) {
    namespace d = manager_docs;
    nb::class_<SequenceParts>(m, "_SequenceParts", d::seq_parts)
        .def(
            "__iter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __iter__(self) -> Iterator[bytes]"))
        .def("__next__", &SequenceParts::next, nb::sig("def __next__(self) -> bytes"));
    nb::class_<Sequence> cls(m, "Sequence", nb::is_final(), nb::is_weak_referenceable(),
                             d::sequence);
    sequence_type = reinterpret_cast<PyTypeObject *>(cls.ptr());
    Py_INCREF(sequence_type);
    cls.def("append", &Sequence::append, "tokens"_a.none(),
            nb::sig("def append(self, tokens: Ints) -> list[tuple[int, int]]"), d::seq_append)
        .def("fork", &Sequence::fork, nb::sig("def fork(self) -> Sequence"), d::seq_fork)
        .def("truncate", &Sequence::truncate, "n"_a.none(),
             nb::sig("def truncate(self, n: Int) -> None"), d::seq_truncate)
        .def("commit", &Sequence::commit, "n_computed"_a.none() = nb::none(),
             nb::sig("def commit(self, n_computed: Int | None = None) -> None"), d::seq_commit)
        .def(
            "found", &Sequence::found, "n_found"_a.none(), nb::kw_only(), "counted"_a.none() = true,
            nb::sig("def found(self, n_found: Int, *, counted: bool = True) -> None"), d::seq_found)
        .def("free", &Sequence::free, d::seq_free)
        .def("pin", &Sequence::pin, "seconds"_a.none(),
             nb::sig("def pin(self, seconds: float) -> None"), d::seq_pin)
        .def("slot_mapping", &Sequence::slot_mapping, "first"_a.none() = 0,
             "n"_a.none() = nb::none(), "pad"_a.none() = -1,
             nb::sig("def slot_mapping(self, first: Int = 0, n: Int | None = None, "
                     "pad: Int = -1) -> NDArray[numpy.int64]"),
             d::seq_slot_mapping)
        .def("export", &Sequence::export_, nb::sig("def export(self) -> bytes"), d::seq_export)
        .def("export_iter", &Sequence::export_iter, "chunk_bytes"_a.none() = 1 << 20,
             nb::sig("def export_iter(self, chunk_bytes: Int = 1048576) -> Iterator[bytes]"),
             d::seq_export_iter)
        .def("export_block", &Sequence::export_block, "index"_a.none(), nb::kw_only(),
             "before"_a.none() = nb::bytes("", 0), "after"_a.none() = nb::bytes("", 0),
             nb::sig("def export_block(self, index: Int, *, before: Buffer = b'', after: Buffer = "
                     "b'') -> bytes"),
             d::seq_export_block)
        .def(
            "save",
            [](nb::handle self, nb::handle path) {
                nb::module_::import_("kvpool.wire").attr("save")(self, path);
            },
            "path"_a.none(), nb::sig("def save(self, path: str | PathLike[str]) -> None"),
            d::seq_save)

        .def_prop_ro(
            "n_tokens", [](Sequence &s) { return s.info().n_tokens; }, d::seq_n_tokens)
        .def_prop_ro(
            "n_cached", [](Sequence &s) { return s.info().n_cached; }, d::seq_n_cached)
        .def_prop_ro(
            "n_computed", [](Sequence &s) { return s.info().n_computed; }, d::seq_n_computed)
        .def_prop_ro(
            "n_blocks", [](Sequence &s) { return s.info().n_blocks; }, d::seq_n_blocks)
        .def_prop_ro("blocks", &Sequence::blocks,
                     nb::sig("def blocks(self) -> NDArray[numpy.uint32]"), d::seq_blocks)
        .def_prop_ro("tokens", &Sequence::tokens,
                     nb::sig("def tokens(self) -> NDArray[numpy.uint32]"), d::seq_tokens)
        .def_prop_ro("block_tokens", &Sequence::block_tokens, d::seq_block_tokens)
        .def_prop_ro("namespace", &Sequence::root, d::seq_namespace)
        .def_prop_ro("is_freed", &Sequence::is_freed, d::seq_is_freed)

        .def("__len__", [](Sequence &s) { return s.info().n_tokens; })
        .def(
            "__bool__", [](Sequence &) { return true; }, nb::sig("def __bool__(self) -> bool"))
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __enter__(self) -> Self"))
        .def(
            "__exit__", [](Sequence &s, nb::args) { s.free_if_alive(); },
            nb::sig("def __exit__(self, *exc_info: object) -> None"))
        .def("__repr__", &Sequence::repr, nb::sig("def __repr__(self) -> str"))
        .def(
            "__reduce_ex__",
            [](Sequence &, nb::handle) {
                refuse_copy("pickled", "Move it with export(), import_() and adopt()");
            },
            nb::sig("def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn"))
        .def(
            "__copy__", [](Sequence &) { refuse_copy("copied", "Use fork()"); },
            nb::sig("def __copy__(self) -> NoReturn"))
        .def(
            "__deepcopy__", [](Sequence &, nb::handle) { refuse_copy("copied", "Use fork()"); },
            nb::sig("def __deepcopy__(self, memo: object, /) -> NoReturn"));
}

} // namespace kvpool
