// The module kvpool._core: the free functions, and everything put together.
#define KVPOOL_IMPORT_ARRAY
#include "numpy_api.hpp"

#include <nanobind/nanobind.h>

#include "args.hpp"
#include "attention.hpp"
#include "docs.hpp"
#include "errors.hpp"
#include "manager.hpp"
#include "pool.hpp"
#include "replay.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool {

namespace {

uint64_t block_hash(nb::handle parent, nb::handle tokens) {
    uint64_t root = scalar_arg<uint64_t>(parent, "parent");
    Ints<uint32_t> in(tokens, "tokens", Form::array);
    if (in.size() > UINT32_MAX) {
        raise_value("tokens: a block has at most 4294967295 tokens, found %zu", in.size());
    }
    return tl_kv_block_hash(root, in.data(), static_cast<uint32_t>(in.size()));
}

nb::object block_hashes(nb::handle tokens, nb::handle block_tokens, nb::handle parent) {
    Ints<uint32_t> in(tokens, "tokens", Form::array);
    uint32_t size = scalar_arg<uint32_t>(block_tokens, "block_tokens");
    uint64_t root = scalar_arg<uint64_t>(parent, "parent");
    if (size == 0) {
        raise_value("block_tokens: expected at least 1, found 0");
    }
    nb::object hashes = new_array(in.size() / size, NPY_UINT64);
    uint64_t *out = array_data<uint64_t>(hashes);
    call_alone(items_work(in.size()),
               [&] { return tl_kv_block_hashes(root, in.data(), in.size(), size, out); });
    return hashes;
}

uint32_t crc32c(nb::handle buffer, nb::handle crc) {
    uint32_t start = scalar_arg<uint32_t>(crc, "crc");
    Buffer in(buffer, "buffer");
    if (in.size() < bulk_bytes) {
        return tl_crc32c(in.data(), in.size(), start);
    }
    nb::gil_scoped_release nogil;
    return tl_crc32c(in.data(), in.size(), start);
}

int import_numpy() {
    import_array1(-1);
    return 0;
}

} // namespace

} // namespace kvpool

NB_MODULE(_core, m) {
    using namespace kvpool;
    if (import_numpy() < 0) {
        throw nb::python_error();
    }
#ifdef NDEBUG
    nb::set_leak_warnings(false); // a pool that lives until the interpreter ends is no leak
#endif
    load_errors();
    m.doc() = "The compiled part of kvpool: Pool and the functions of the wire format. Import them "
              "from kvpool.";
    m.attr("abi_version") = tl_abi_version();

    bind_pool(m);
    bind_wire(m);
    bind_envelope(m);
    bind_sequence(m);
    bind_manager(m);
    bind_attention(m);
    bind_replay(m);

    m.def("block_hash", &block_hash, "parent"_a.none(), "tokens"_a.none(),
          nb::sig("def block_hash(parent: Int, tokens: Array) -> int"), docs::block_hash);
    m.def("block_hashes", &block_hashes, "tokens"_a.none(), "block_tokens"_a.none() = 16,
          "parent"_a.none() = 0,
          nb::sig("def block_hashes(tokens: Array, block_tokens: Int = 16, parent: Int = 0) -> "
                  "NDArray[numpy.uint64]"),
          docs::block_hashes);
    m.def("crc32c", &crc32c, "buffer"_a.none(), "crc"_a.none() = 0,
          nb::sig("def crc32c(buffer: Buffer | NDArray[Any], crc: Int = 0) -> int"), docs::crc32c);
    m.def(
        "_raise_status", [](int32_t status, const char *text) { raise_status(status, text); },
        "Raises the exception of a tl_status, for the tests of that table.");
}
