// ReuseStack and policy_hits: tinyllm/replay.h with Python's arguments and results around it.
#include "replay.hpp"

#include <algorithm>
#include <vector>

#include <nanobind/nanobind.h>

#include "args.hpp"
#include "numpy_api.hpp"
#include "support.hpp"

#include <tinyllm/kv_pool_ext.h>
#include <tinyllm/replay.h>

namespace kvpool {

using namespace nb::literals;

namespace {

namespace docs {

constexpr const char *stack =
    R"(Blocks by how recently they were used, for streams of any length.

The depth of a block is the size of the smallest least-recently-used pool that would still hold it, so
one pass over a trace gives the hits of every pool size (Mattson et al., Evaluation techniques for
storage hierarchies, 1970). O(log n) a block.

Args:
    max_blocks: remember so many of the most recently used at least; what lies deeper may be
        forgotten, so memory stays bounded (about 150 bytes each at most).

Raises:
    InvalidArgument: ``max_blocks`` is 0 or above 2**31.
    MemoryError: no memory.

>>> from kvpool.replay import ReuseStack
>>> stack = ReuseStack(1000)
>>> stack.use([7, 8, 9], 0.0)[0]                 # nothing was used before
array([0, 0, 0], dtype=uint64)
>>> stack.use([5], 1.0)[0], stack.use([7, 8], 2.5)
(array([0], dtype=uint64), (array([2, 3], dtype=uint64), array([0., 0.])))
>>> len(stack)
4
)";

constexpr const char *use =
    R"(One request: the depth of each block before it, and when it was last used.

``keys`` names the request's blocks from the first one on, uint64, each together with everything before
it. Returns ``(depths, stamps)``: uint64 ``(n,)`` with 0 for a block that is not remembered, and
float64 ``(n,)`` with NaN for it. Then all of them are used at the time ``now``, the last one first.

Raises:
    InvalidArgument: a key is out of range.
    MemoryError: no memory; nothing has changed.
)";

constexpr const char *use_batch =
    R"(Many requests in one call: ``use`` for each, with the names of their blocks worked out here.

Args:
    tokens: uint32, the prompts one after the other, ``block_tokens`` tokens a block.
    n_blocks: uint64 ``(n,)``, the blocks of each.
    times: float64 ``(n,)``, when each comes.
    block_tokens: tokens of a block; the names are the format's chained hashes.

Returns ``(names, depths, stamps)`` of all blocks, one request after the other.

Raises:
    InvalidArgument: the lengths do not add up, or a value is out of range; nothing has changed.
    MemoryError: no memory; the requests before that point are used.
)";

constexpr const char *read =
    R"(The blocks at depths ``depth`` to ``depth + n - 1``; the newest is 1.

Returns ``(keys, firsts, lasts)``: uint64, and float64 with when each was first used since it is
remembered, and last. Shorter than ``n`` at the end of the stack.
)";

constexpr const char *policy_hits =
    R"(How many blocks of a trace a cache of one size hits under one order of eviction.

Args:
    policy: 0 LRU (the pool's), 1 FIFO, 2 LFU, 3 position, 4 S3-FIFO, 5 W-TinyLFU, 6 optimal.
    blocks: uint32, the requests' blocks one after the other, numbered from 0.
    starts: uint64 ``(n_requests + 1,)``: where each request begins.
    parents: uint32 ``(n_blocks,)``: the block before each, or 2**32 - 1 where it begins a prompt.
    capacity: blocks of the cache.
    first_counted: the first request whose hits count; the ones before it warm the cache up.
    match_last: count the last block of a request, too.

The GIL is released.

Raises:
    InvalidArgument: the arrays do not describe a trace.
    MemoryError: no memory.

>>> from kvpool.replay import policy_hits
>>> none = 2**32 - 1
>>> policy_hits(0, [0, 1, 2, 0, 1], [0, 2, 3, 5], [none, 0, none], 2), \
...     policy_hits(6, [0, 1, 2, 0, 1], [0, 2, 3, 5], [none, 0, none], 2)
(1, 2)
)";

} // namespace docs

[[noreturn]] void raise_now(tl_status status) {
    Failure failure;
    failure.capture(status);
    raise(failure);
}

class ReuseStack {
  public:
    explicit ReuseStack(nb::handle max_blocks) {
        const tl_status st = tl_stack_create(
            static_cast<size_t>(scalar_arg<uint64_t>(max_blocks, "max_blocks")), &stack_);
        if (st != TL_OK) {
            raise_now(st);
        }
    }
    ReuseStack(const ReuseStack &) = delete;
    ReuseStack &operator=(const ReuseStack &) = delete;
    ~ReuseStack() {
        tl_stack_destroy(stack_);
    }

    nb::object use(nb::handle keys, double now) {
        Ints<uint64_t> in(keys, "keys", Form::array);
        nb::object depths = new_array(in.size(), NPY_UINT64);
        nb::object stamps = new_array(in.size(), NPY_DOUBLE);
        tl_status st;
        {
            nb::ft_lock_guard guard(mutex_);
            st = tl_stack_use(stack_, in.data(), in.size(), now, array_data<uint64_t>(depths),
                              array_data<double>(stamps));
        }
        if (st != TL_OK) {
            raise_now(st);
        }
        return nb::make_tuple(depths, stamps);
    }

    nb::object use_batch(nb::handle tokens, nb::handle n_blocks, nb::handle times,
                         nb::handle block_tokens) {
        Ints<uint32_t> toks(tokens, "tokens", Form::array);
        Ints<uint64_t> lengths(n_blocks, "n_blocks", Form::array);
        const uint32_t size = scalar_arg<uint32_t>(block_tokens, "block_tokens");
        nb::object when = checked(PyArray_FROM_OTF(times.ptr(), NPY_DOUBLE, NPY_ARRAY_IN_ARRAY));
        auto *array = reinterpret_cast<PyArrayObject *>(when.ptr());
        if (PyArray_NDIM(array) != 1 ||
            static_cast<size_t>(PyArray_DIM(array, 0)) != lengths.size()) {
            raise_value("times: expected %zu in one dimension", lengths.size());
        }
        if (size == 0) {
            raise_value("block_tokens: expected at least 1, found 0");
        }
        const size_t total = toks.size() / size;
        size_t left = total;
        for (size_t i = 0; i < lengths.size(); i++) {
            if (lengths[i] > left) {
                raise_value("n_blocks: expected a sum of %zu, found more", total);
            }
            left -= lengths[i];
        }
        if (left != 0 || toks.size() % size != 0) {
            raise_value("n_blocks: expected a sum of %zu, found %zu", total, total - left);
        }
        nb::object names = new_array(total, NPY_UINT64);
        nb::object depths = new_array(total, NPY_UINT64);
        nb::object stamps = new_array(total, NPY_DOUBLE);
        uint64_t *const name = array_data<uint64_t>(names);
        std::vector<tl_kv_prompt> prompts(lengths.size());
        for (size_t i = 0, at = 0; i < lengths.size(); at += lengths[i++]) {
            prompts[i] = {toks.data() + at * size, lengths[i] * size, 0, name + at};
        }
        tl_status st = tl_kv_block_hashes_batch(prompts.data(), prompts.size(), size);
        const double *const now = array_data<double>(when);
        {
            nb::ft_lock_guard guard(mutex_);
            for (size_t i = 0; st == TL_OK && i < lengths.size(); i++) {
                const auto at = static_cast<size_t>(prompts[i].out - name);
                st = tl_stack_use(stack_, name + at, lengths[i], now[i],
                                  array_data<uint64_t>(depths) + at,
                                  array_data<double>(stamps) + at);
            }
        }
        if (st != TL_OK) {
            raise_now(st);
        }
        return nb::make_tuple(names, depths, stamps);
    }

    nb::object read(nb::handle depth, nb::handle n) {
        const uint64_t first = scalar_arg<uint64_t>(depth, "depth");
        const uint64_t wanted = scalar_arg<uint64_t>(n, "n");
        nb::ft_lock_guard guard(mutex_);
        const size_t len = tl_stack_len(stack_);
        const size_t count =
            first == 0 || first > len ? 0 : std::min<uint64_t>(wanted, len - first + 1);
        nb::object keys = new_array(count, NPY_UINT64);
        nb::object firsts = new_array(count, NPY_DOUBLE);
        nb::object lasts = new_array(count, NPY_DOUBLE);
        tl_stack_read(stack_, first, count, array_data<uint64_t>(keys), array_data<double>(firsts),
                      array_data<double>(lasts));
        return nb::make_tuple(keys, firsts, lasts);
    }

    size_t len() {
        nb::ft_lock_guard guard(mutex_);
        return tl_stack_len(stack_);
    }

  private:
    tl_stack *stack_ = nullptr;
    nb::ft_mutex mutex_;
};

uint64_t policy_hits(nb::handle policy, nb::handle blocks, nb::handle starts, nb::handle parents,
                     nb::handle capacity, nb::handle first_counted, nb::handle match_last) {
    const bool last = flag_arg(match_last, "match_last");
    const uint32_t which = scalar_arg<uint32_t>(policy, "policy");
    Ints<uint32_t> block_ids(blocks, "blocks", Form::array);
    Ints<uint64_t> begins(starts, "starts", Form::array);
    Ints<uint32_t> before(parents, "parents", Form::array);
    const uint32_t size = scalar_arg<uint32_t>(capacity, "capacity");
    const uint64_t first = scalar_arg<uint64_t>(first_counted, "first_counted");
    if (begins.size() == 0 || begins[begins.size() - 1] != block_ids.size()) {
        raise_value("starts: expected its last element to be len(blocks), %zu", block_ids.size());
    }
    if (before.size() > UINT32_MAX) {
        raise_value("parents: expected at most 4294967295 blocks, found %zu", before.size());
    }
    if (which >= TL_N_POLICIES) {
        raise_value("policy: expected 0 to %zd, found %zu", Py_ssize_t{TL_N_POLICIES - 1},
                    size_t{which});
    }
    const tl_trace trace = {block_ids.data(), begins.data(), before.data(), begins.size() - 1,
                            static_cast<uint32_t>(before.size())};
    uint64_t hits = 0;
    call_alone(Work::bulk, [&] {
        return tl_policy_hits(static_cast<tl_policy>(which), &trace, size, first, last, &hits);
    });
    return hits;
}

} // namespace

void bind_replay(nb::module_ &m) {
    nb::class_<ReuseStack>(m, "ReuseStack", docs::stack)
        .def(nb::init<nb::handle>(), "max_blocks"_a.none(),
             nb::sig("def __init__(self, max_blocks: Int) -> None"))
        .def("use", &ReuseStack::use, "keys"_a.none(), "now"_a,
             nb::sig("def use(self, keys: Array, now: float) -> tuple[NDArray[numpy.uint64], "
                     "NDArray[numpy.float64]]"),
             docs::use)
        .def("use_batch", &ReuseStack::use_batch, "tokens"_a.none(), "n_blocks"_a.none(),
             "times"_a.none(), "block_tokens"_a.none(),
             nb::sig("def use_batch(self, tokens: Array, n_blocks: Array, times: "
                     "NDArray[numpy.float64], block_tokens: Int) -> tuple[NDArray[numpy.uint64], "
                     "NDArray[numpy.uint64], NDArray[numpy.float64]]"),
             docs::use_batch)
        .def("read", &ReuseStack::read, "depth"_a.none(), "n"_a.none(),
             nb::sig("def read(self, depth: Int, n: Int) -> tuple[NDArray[numpy.uint64], "
                     "NDArray[numpy.float64], NDArray[numpy.float64]]"),
             docs::read)
        .def("__len__", &ReuseStack::len);
    m.def("policy_hits", &policy_hits, "policy"_a.none(), "blocks"_a.none(), "starts"_a.none(),
          "parents"_a.none(), "capacity"_a.none(), "first_counted"_a.none() = 0,
          "match_last"_a.none() = true,
          nb::sig("def policy_hits(policy: Int, blocks: Array, starts: Array, parents: Array, "
                  "capacity: Int, first_counted: Int = 0, match_last: bool = True) -> int"),
          docs::policy_hits);
}

} // namespace kvpool
