// kvpool.wire's ground: the reader rules without a pool, whole and in steps.
#include <memory>

#include "args.hpp"
#include "envelope_docs.hpp"
#include "pool.hpp"
#include "support.hpp"

namespace kvpool {

using namespace nb::literals;

namespace {

// The four dimensions an envelope is held to (rule 5): a pool's, or a row of four integers.
class Shape {
  public:
    explicit Shape(nb::handle value) {
        Pool *pool;
        if (value.is_none()) {
            return;
        }
        given_ = true;
        if (nb::isinstance<Pool>(value) && nb::inst_ready(value) && nb::try_cast(value, pool)) {
            cfg_ = pool->cfg();
            return;
        }
        Ints<uint32_t> dims(value, "shape", Form::array);
        if (dims.size() != 4) {
            raise_value("shape: expected block_tokens, n_layers, n_kv_heads and head_dim, found "
                        "%zu integers",
                        dims.size());
        }
        cfg_.block_tokens = dims[0];
        cfg_.n_layers = dims[1];
        cfg_.n_kv_heads = dims[2];
        cfg_.head_dim = dims[3];
    }
    const tl_kv_cfg *get() const {
        return given_ ? &cfg_ : nullptr;
    }

  private:
    tl_kv_cfg cfg_{};
    bool given_ = false;
};

void must(tl_status status) {
    if (status != TL_OK) {
        Failure failure;
        failure.capture(status);
        raise(failure);
    }
}

class Header {
  public:
    Header(nb::handle header, nb::handle size_bytes) {
        const size_t len =
            size_bytes.is_none() ? SIZE_MAX : scalar_arg<uint64_t>(size_bytes, "size_bytes");
        Buffer in(header, "header");
        // A shorter buffer is all there is: rule 1 refuses it without a look.
        if (in.size() < TL_KV_ENVELOPE_HEADER && len >= TL_KV_ENVELOPE_HEADER + 4) {
            raise_value("header: expected the first 28 bytes, found %zu", in.size());
        }
        must(tl_kv_envelope_open(in.data(), len, &e_));
    }

    static Header *check(nb::handle buffer, nb::handle shape_arg) {
        const Shape shape(shape_arg);
        Buffer in(buffer, "buffer");
        auto header = std::unique_ptr<Header>(new Header());
        call_alone(bytes_work(in.size()), [&] {
            return tl_kv_envelope_check(in.size() == 0 ? "" : in.data(), in.size(), shape.get(),
                                        &header->e_);
        });
        return header.release();
    }

    void accept(nb::handle shape_arg) const {
        const Shape shape(shape_arg);
        must(tl_kv_envelope_accept(&e_, shape.get()));
    }

    void records(nb::handle first_arg, nb::handle count_arg, nb::handle buffer,
                 nb::handle stride_arg) const {
        const auto first = scalar_arg<uint32_t>(first_arg, "first");
        const auto count = scalar_arg<uint32_t>(count_arg, "count");
        const size_t stride = scalar_arg<uint64_t>(stride_arg, "stride");
        Buffer in(buffer, "records");
        if (count > 0 &&
            (in.size() < 12 || (count - 1 > 0 && stride > (in.size() - 12) / (count - 1)))) {
            raise_value("records: expected 12 bytes for each of %u blocks, %zu apart, found %zu",
                        count, stride, in.size());
        }
        must(tl_kv_envelope_records(&e_, first, count, in.data(), stride));
    }

    void crc(nb::handle stored, nb::handle computed) {
        const auto value = scalar_arg<uint32_t>(stored, "stored");
        must(tl_kv_envelope_crc(&e_, value, scalar_arg<uint32_t>(computed, "computed")));
        e_.crc = value;
    }

    nb::object shape() const {
        return nb::make_tuple(e_.block_tokens, e_.n_layers, e_.n_kv_heads, e_.head_dim);
    }

    nb::object repr() const {
        return checked(PyUnicode_FromFormat(
            "EnvelopeHeader(n_blocks=%u, block_tokens=%u, n_layers=%u, n_kv_heads=%u, head_dim=%u; "
            "%zu bytes)",
            e_.n_blocks, e_.block_tokens, e_.n_layers, e_.n_kv_heads, e_.head_dim, e_.size_bytes));
    }

    const tl_kv_envelope &get() const {
        return e_;
    }

  private:
    Header() = default;
    tl_kv_envelope e_{};
};

uint32_t crc32c_combine(nb::handle crc_a, nb::handle crc_b, nb::handle n_bytes_b) {
    const auto a = scalar_arg<uint32_t>(crc_a, "crc_a"), b = scalar_arg<uint32_t>(crc_b, "crc_b");
    return tl_crc32c_combine(a, b, scalar_arg<uint64_t>(n_bytes_b, "n_bytes_b"));
}

} // namespace

void bind_envelope(nb::module_ &m) {
    namespace d = docs;
    nb::class_<Header> cls(m, "EnvelopeHeader", nb::is_final(), d::envelope_header);
    cls.def(nb::init<nb::handle, nb::handle>(), "header"_a.none(),
            "size_bytes"_a.none() = nb::none(),
            nb::sig("def __init__(self, header: Buffer | NDArray[Any], size_bytes: Int | None = "
                    "None) -> None"))
        .def_static("check", &Header::check, "buffer"_a.none(), "shape"_a.none() = nb::none(),
                    nb::sig("def check(buffer: Buffer | NDArray[Any], shape: Pool | Array | None = "
                            "None) -> EnvelopeHeader"),
                    d::envelope_check)
        .def("accept", &Header::accept, "shape"_a.none() = nb::none(),
             nb::sig("def accept(self, shape: Pool | Array | None = None) -> None"),
             d::envelope_accept)
        .def("check_records", &Header::records, "first"_a.none(), "count"_a.none(),
             "records"_a.none(), "stride"_a.none(),
             nb::sig("def check_records(self, first: Int, count: Int, records: Buffer | "
                     "NDArray[Any], stride: Int) -> None"),
             d::envelope_records)
        .def("check_crc", &Header::crc, "stored"_a.none(), "computed"_a.none(),
             nb::sig("def check_crc(self, stored: Int, computed: Int) -> None"), d::envelope_crc)
        .def("__repr__", &Header::repr, nb::sig("def __repr__(self) -> str"));
    const struct {
        const char *name;
        uint32_t tl_kv_envelope::*field;
        const char *doc;
    } fields[] = {
        {"version", &tl_kv_envelope::version, "The format's version: 1 once accepted."},
        {"dtype", &tl_kv_envelope::dtype, "The element type: 1, float16, once accepted."},
        {"n_blocks", &tl_kv_envelope::n_blocks, "Blocks in the envelope; may be 0."},
        {"block_tokens", &tl_kv_envelope::block_tokens, "Positions in a block."},
        {"n_layers", &tl_kv_envelope::n_layers, "Layers of the model."},
        {"n_kv_heads", &tl_kv_envelope::n_kv_heads, "KV heads of the model."},
        {"head_dim", &tl_kv_envelope::head_dim, "Values in a head."},
        {"crc32c", &tl_kv_envelope::crc, "The checksum at the end; 0 until it was checked."},
    };
    for (const auto &f : fields) {
        auto field = f.field;
        cls.def_prop_ro(f.name, [field](const Header &h) { return h.get().*field; }, f.doc);
    }
    cls.def_prop_ro(
           "block_bytes", [](const Header &h) { return h.get().block_bytes; },
           "Bytes of one block's payload.")
        .def_prop_ro(
            "size_bytes", [](const Header &h) { return h.get().size_bytes; },
            "Bytes of the whole envelope.")
        .def_prop_ro("shape", &Header::shape,
                     nb::sig("def shape(self) -> tuple[int, int, int, int]"),
                     "``(block_tokens, n_layers, n_kv_heads, head_dim)``.");

    m.def("crc32c_combine", &crc32c_combine, "crc_a"_a.none(), "crc_b"_a.none(),
          "n_bytes_b"_a.none(),
          nb::sig("def crc32c_combine(crc_a: Int, crc_b: Int, n_bytes_b: Int) -> int"),
          d::crc32c_combine);
}

} // namespace kvpool
