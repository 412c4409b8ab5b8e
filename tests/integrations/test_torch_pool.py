"""TorchPool: a pool whose slab is a tensor of the user's, against the Pool of the C library."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool

torch = pytest.importorskip("torch", reason="needs torch")

from kvpool.integrations.torch import TorchPool, slab_tensor  # noqa: E402

L, H, B, D = 2, 3, 4, 8
SHAPE: dict[str, int] = {"block_tokens": B, "n_layers": L, "n_kv_heads": H, "head_dim": D}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]


def make(n: int = 6, layout: Any = "HND", device: str = "cpu", dtype: Any = None) -> TorchPool:
    pool = TorchPool.empty(n, **SHAPE, dtype=dtype or torch.float16, device=device, layout=layout)
    pool.slab.copy_(torch.randn(pool.slab.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def hnd(pool: TorchPool) -> Any:
    """The slab's values in the layout of format 1, on the host."""
    slab = pool.slab if pool.layout == "HND" else pool.slab.transpose(3, 4)
    return slab.cpu().numpy()


# ---- against Pool ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_envelopes_are_those_of_a_pool(layout: str, device: str) -> None:
    pool, twin = make(layout=layout, device=device), kvpool.Pool(6, **SHAPE)
    twin.slab[:] = hnd(pool)
    for p in (pool, twin):
        ids = p.alloc(4)
        p.set_fill(ids, [B, B, B, 1])
        p.register(ids[:2], [77, 2**64 - 1])
        p.ref(int(ids[3]))
        assert p.cow(int(ids[3])) == 4
    row = [0, 4, 2, 1, 0]
    envelope = twin.export(row)
    assert pool.export(row) == envelope
    assert pool.export_bytes(5) == len(envelope)
    buffer = bytearray(len(envelope) + 3)
    assert pool.export_into(row, buffer) == len(envelope)
    assert buffer[:-3] == envelope
    assert b"".join(pool.export_iter(row, 1000)) == envelope
    assert b"".join(pool.export_pieces(np.array(row))) == envelope
    assert pool.export([]) == twin.export([])
    assert pool.refs(range(6)).tolist() == twin.refs(range(6)).tolist()

    other, other_twin = make(8, layout=layout, device=device), kvpool.Pool(8, **SHAPE)
    arrived, expected = other.import_(envelope), other_twin.import_(envelope)
    assert arrived.tolist() == expected.tolist()
    assert other.export(arrived) == other_twin.export(expected)
    assert other.hash(range(8)).tolist() == other_twin.hash(range(8)).tolist()
    assert other.fill(arrived).tolist() == [B, 1, B, B, B]
    for p in (pool, twin, other, other_twin):
        p.check()


class Twins:
    """A TorchPool and a Pool that get the same calls, and must give the same answers."""

    def __init__(self, layout: str) -> None:
        torch_pool, pool = make(layout=layout), kvpool.Pool(6, **SHAPE)
        pool.slab[:] = hnd(torch_pool)
        self.pools: list[Any] = [torch_pool, pool]

    def do(self, call: Callable[[Any], Any]) -> Any:
        answers = []
        for pool in self.pools:
            try:
                answer = call(pool)
            except kvpool.KvPoolError as e:
                answer = type(e)
            answers.append(answer.tolist() if isinstance(answer, np.ndarray) else answer)
        assert answers[0] == answers[1]
        assert self.pools[0].stats == self.pools[1].stats
        return answers[0]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["HND", "NHD"]),
    st.lists(
        st.tuples(
            st.sampled_from(["alloc", "ref", "unref", "cow", "fill", "name", "lookup", "export",
                             "import"]),
            st.lists(st.integers(0, 6), max_size=3), st.integers(0, 5),
        ),
        max_size=40,
    ),
)  # fmt: skip
def test_the_same_calls_give_the_same_answers_and_bytes(
    layout: str, steps: list[tuple[str, list[int], int]]
) -> None:
    twins = Twins(layout)
    envelopes: list[bytes] = []
    for step, ids, x in steps:
        one = ids[0] if ids else x
        calls: dict[str, Callable[[Any], Any]] = {
            "alloc": lambda p, x=x: p.alloc(x),
            "ref": lambda p, ids=ids: p.ref(ids),
            "unref": lambda p, ids=ids: p.unref(ids),
            "cow": lambda p, ids=ids: p.cow(ids),
            "fill": lambda p, ids=ids, x=x: p.set_fill(ids, min(x, B)),
            "name": lambda p, one=one, x=x: p.register(one, x),
            "lookup": lambda p, x=x: p.lookup(x),
            "export": lambda p, ids=ids: p.export(ids),
            "import": lambda p: p.import_(envelopes[-1] if envelopes else b""),
        }
        answer = twins.do(calls[step])
        if step == "export" and isinstance(answer, bytes):
            envelopes.append(answer)
    torch_pool, pool = twins.pools
    held = [i for i in range(6) if pool.refs(i) and pool.fill(i)]
    assert torch_pool.export(held) == pool.export(held)
    torch_pool.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_a_managers_forks_are_copied_bit_for_bit(dtype: Any, layout: str, device: str) -> None:
    pool = make(8, layout=layout, device=device, dtype=dtype)
    pool.slab[0].fill_(float("nan"))
    pool.slab[1].fill_(-0.0)
    mgr = kvpool.BlockManager(pool)
    before = pool.slab.clone()
    with mgr.allocate(range(B + 2)) as seq, seq.fork() as fork, seq.fork() as other:
        copies = mgr.append([seq, fork, other], [7, 8, 9])
        assert len(copies) == 2
        bits = torch.int16 if dtype != torch.float32 else torch.int32
        for src, dst in copies:
            assert bool((pool.slab[dst].view(bits) == before[src].view(bits)).all())
            before[dst] = before[src]
        assert bool((pool.slab.view(bits) == before.view(bits)).all())  # and nothing else
    assert pool.stats.used == 0
    mgr.check()


def test_attributes() -> None:
    pool = make(layout="NHD", dtype=torch.bfloat16)
    assert (pool.dtype, pool.layout, str(pool.device)) == ("bfloat16", "NHD", "cpu")
    assert pool.block_bytes == L * 2 * H * B * D * 2
    assert (pool.n_layers, pool.n_kv_heads, pool.block_tokens, pool.head_dim) == (L, H, B, D)
    assert not pool.has_slab
    assert make(dtype=torch.float32).block_bytes == L * 2 * H * B * D * 4
    assert pool.block(2).data_ptr() == pool.slab[2].data_ptr()
    with pytest.raises(kvpool.InvalidArgument, match="out of range"):
        pool.block(6)
    assert slab_tensor(pool) is pool.slab


# ---- sequences of a manager --------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("n", [1, B, B + 1, 2 * B, 3 * B - 1])
def test_sequences_travel(layout: str, n: int) -> None:
    pool, twin = make(layout=layout), kvpool.Pool(6, **SHAPE)
    twin.slab[:] = hnd(pool)
    tokens = list(range(100, 100 + 3 * B))
    managers = [kvpool.BlockManager(p) for p in (pool, twin)]
    seqs = [mgr.allocate(tokens, namespace=5) for mgr in managers]
    for seq in seqs:
        seq.commit()
        seq.truncate(n)  # into a registered block
    envelope = seqs[1].export()
    assert pool.export_sequence(seqs[0]) == envelope

    other = make(8, layout=layout)
    mgr = kvpool.BlockManager(other)
    with other.import_sequence(mgr, envelope, tokens[:n], namespace=5) as seq:
        assert (len(seq), seq.n_computed) == (n, n)
        assert other.export_sequence(seq) == envelope
        blocks = seq.blocks.tolist()
    with other.import_sequence(mgr, envelope, tokens[:n], namespace=5) as again:
        assert again.blocks.tolist()[: n // B] == blocks[: n // B]  # shared, not written again
        assert other.export_sequence(again) == envelope
    with mgr.allocate(tokens, namespace=5) as hit:
        assert hit.n_cached == n // B * B
    mgr.check()
    assert other.stats.used == 0


def test_an_envelope_of_other_tokens_is_refused_and_changes_nothing() -> None:
    pool = make()
    mgr = kvpool.BlockManager(pool)
    tokens = list(range(2 * B + 1))
    with mgr.allocate(tokens) as seq:
        seq.commit()
        envelope = pool.export_sequence(seq)
    stats = pool.stats
    for wrong, text in [
        ([*tokens[:-2], 99, 99], "block 1 is named .* its tokens give"),
        (tokens[:-1], "positions in the envelope's blocks, 8 tokens"),
        ([*tokens, 1, 2, 3, 4], "13 tokens"),
        ([], "0 tokens"),
    ]:
        with pytest.raises(kvpool.CorruptEnvelope, match=text):
            pool.import_sequence(mgr, envelope, wrong)
    with pytest.raises(kvpool.CorruptEnvelope, match="is named"):
        pool.import_sequence(mgr, envelope, tokens, namespace=3)
    with pytest.raises(kvpool.CorruptEnvelope, match="CRC-32C"):
        pool.import_sequence(mgr, envelope[:-1] + b"?", tokens)
    other = make()
    with pytest.raises(kvpool.InvalidArgument, match="expected one over this pool"):
        other.import_sequence(mgr, envelope, tokens)
    assert pool.stats == stats
    mgr.check()


# ---- hostile inputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_float16_travels(dtype: Any) -> None:
    envelope = make().export([])
    pool = make(dtype=dtype)
    mgr = kvpool.BlockManager(pool)
    block = pool.alloc(1)
    pool.set_fill(block, 1)
    for call in (
        lambda: pool.export(block), lambda: pool.export_into(block, bytearray(9999)),
        lambda: pool.export_iter(block), lambda: pool.export_pieces(block),
        lambda: pool.import_(envelope), lambda: pool.import_sequence(mgr, envelope, []),
    ):  # fmt: skip
        with pytest.raises(
            kvpool.Unsupported, match=f"carries float16 and this slab is {pool.dtype}"
        ):
            call()
    with mgr.allocate([1]) as seq, pytest.raises(kvpool.Unsupported, match="would be rounded"):
        pool.export_sequence(seq)


GOOD = (6, L, 2, H, B, D)


@pytest.mark.parametrize(("slab", "error", "text"), [
    (lambda: np.zeros(GOOD, np.float16), kvpool.ArgumentTypeError, r"\(ndarray\)"),
    (lambda: None, kvpool.ArgumentTypeError, "found None"),
    (lambda: torch.zeros(GOOD, dtype=torch.float64), kvpool.DtypeMismatch, "found torch.float64"),
    (lambda: torch.zeros(GOOD, dtype=torch.int16), kvpool.DtypeMismatch, "found torch.int16"),
    (lambda: torch.zeros(6, L, 2, H, B * D), kvpool.InvalidArgument, r"found \(6, 2, 2, 3, 32\)"),
    (lambda: torch.zeros(6, 2, 3, H, B, D), kvpool.InvalidArgument, r"found \(6, 2, 3, 3, 4, 8\)"),
    (lambda: torch.zeros(0, *GOOD[1:]), kvpool.InvalidArgument, r"at least 1, found \(0, "),
    (lambda: torch.zeros(6, L, 2, B, H, D).transpose(3, 4), kvpool.InvalidArgument, "strides"),
    (lambda: torch.zeros(12, *GOOD[1:])[::2], kvpool.InvalidArgument, "strides"),
    (lambda: torch.zeros(1, *GOOD[1:]).expand(GOOD), kvpool.InvalidArgument, "strides"),
    (lambda: torch.zeros(GOOD, device="meta"), kvpool.InvalidArgument, "on meta"),
    (lambda: torch.zeros(GOOD).to_sparse(), kvpool.InvalidArgument, "sparse"),
    (lambda: torch.zeros(GOOD, requires_grad=True), kvpool.InvalidArgument, "requires_grad"),
], ids=["numpy", "None", "float64", "int16", "five-dims", "three", "no-blocks", "transposed",
        "strided", "expanded", "meta", "sparse", "grad"])  # fmt: skip
def test_other_things_are_no_slab(
    slab: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        TorchPool(slab())


@pytest.mark.parametrize("layout", ["nhd", "", None, 1, "HNDD"])
def test_layouts_have_two_names(layout: Any) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="expected 'HND' or 'NHD', found"):
        TorchPool(torch.zeros(GOOD), layout=layout)


@pytest.mark.parametrize("how", ["resize", "storage", "set"])
def test_a_tensor_that_was_resized_is_told_not_read(how: str) -> None:
    pool = make()
    block = pool.alloc(1)
    pool.set_fill(block, 1)
    pool.ref(block)
    envelope = pool.export(block)
    if how == "resize":
        pool.slab.resize_(2, *GOOD[1:])
    elif how == "storage":
        pool.slab.untyped_storage().resize_(0)
    else:
        pool.slab.set_(torch.zeros(GOOD, dtype=torch.float16))
    for call in (pool.export, pool.cow):
        with pytest.raises(kvpool.InvalidArgument, match="the tensor was resized or moved"):
            call(block)
    with pytest.raises(kvpool.InvalidArgument, match="resized"):
        pool.import_(envelope)


@pytest.mark.parametrize(("ids", "text"), [
    ([0, 6], r"ids\[1\] is block 6, out of range"), ([1], "nobody holds"), ([0.0], "float"),
    (0, "expected a row of block ids, found 0"), ([[0]], "expected a row"), (True, "a row"),
    ([-1], "-1"), ([2**40], "1099511627776"), ("0", "expected a row"),
])  # fmt: skip
def test_ids_are_checked_before_anything_is_read(ids: Any, text: str) -> None:
    pool = make()
    pool.set_fill(pool.alloc(), 1)
    with pytest.raises(kvpool.InvalidArgument, match=text):
        pool.export(ids)
    assert pool.refs(0) == 1


def test_a_block_without_a_fill_is_not_exported() -> None:
    pool = make()
    ids = pool.alloc(3)
    pool.set_fill(ids, [1, 0, 2])
    with pytest.raises(kvpool.InvalidArgument, match=r"block 1 \(position 2\) has fill 0"):
        pool.export([0, 2, 1])
    assert pool.refs(ids).tolist() == [1, 1, 1]


def test_refused_envelopes_change_nothing() -> None:
    big = make(9)
    ids = big.alloc(9)
    big.set_fill(ids, B)
    big.register(ids, range(1, 10))
    envelope = big.export(ids)
    pool = make()
    pool.alloc(2)
    before, stats = pool.slab.clone(), pool.stats
    for data, error, text in [
        (envelope, kvpool.PoolFull, "9 blocks needed, the pool has 6"),
        (big.export(ids[:5]), kvpool.PoolFull, "5 blocks needed, 4 are free"),
        (envelope[:-1], kvpool.CorruptEnvelope, "length"),
        (envelope[:-1] + b"!", kvpool.CorruptEnvelope, "CRC-32C"),
        (b"", kvpool.CorruptEnvelope, "length 0"),
        (memoryview(envelope)[::2], kvpool.InvalidArgument, "contiguous"),
        (torch.zeros(40, dtype=torch.uint8), kvpool.InvalidArgument, "found Tensor"),
        (7, kvpool.ArgumentTypeError, "found int"),
        (kvpool.Pool(1, B, n_layers=1, n_kv_heads=1, head_dim=1).export([]), kvpool.ShapeMismatch,
         "n_layers 1"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            pool.import_(data)
        assert pool.stats == stats
        assert bool((pool.slab == before).all())
    assert len(pool.import_(pool.export([]))) == 0
    pool.check()


def test_a_scatter_that_fails_gives_the_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make()
    block = pool.alloc(1)
    pool.set_fill(block, B)
    pool.register(block, [5])
    envelope = pool.export(block)
    other = make()
    monkeypatch.setattr(other._values, "scatter", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        other.import_(envelope)
    mgr = kvpool.BlockManager(other)
    with pytest.raises(kvpool.CorruptEnvelope):
        other.import_sequence(mgr, envelope, range(B))
    assert other.stats == (6, 0, 0, 0)
    assert other.lookup(5) is None


# ---- lifetime and threads ----------------------------------------------------------------------


def test_the_pool_keeps_the_tensor_and_leaves_no_cycle() -> None:
    slab = torch.zeros(GOOD)
    tensor, pool = weakref.ref(slab), TorchPool(slab)
    del slab
    assert tensor() is not None
    view = pool.layer(0)
    gone = weakref.ref(pool)
    gc.disable()
    try:
        del pool
        assert gone() is None
    finally:
        gc.enable()
    view[:] = 1.0
    assert tensor() is None or view.shape == (6, 2, H, B, D)


def test_views_outlive_close() -> None:
    pool = make()
    view = pool.layer(1)
    pool.close()
    view[:] = 2.0
    with pytest.raises(kvpool.InvalidArgument, match="closed"):
        pool.alloc()
    with pytest.raises(kvpool.InvalidArgument, match="closed"):
        pool.export([0])
    host = kvpool.Pool(4, **SHAPE)
    tensor = slab_tensor(host)
    assert tensor.data_ptr() == host.slab.ctypes.data
    tensor[3] = 5.0
    assert (host.block(3) == 5.0).all()
    host.close()
    del host
    gc.collect()
    tensor[:] = 1.0
    assert float(tensor.sum()) == tensor.numel()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(100, *GOOD[1:])


def test_a_tensor_is_a_slab_of_a_pool_of_the_c_library() -> None:
    tensor = torch.zeros(GOOD, dtype=torch.float16)
    pool = kvpool.Pool(6, **SHAPE, slab=tensor.numpy())
    pool.block(2)[:] = 1.0
    assert bool((tensor[2] == 1.0).all())
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(100, *GOOD[1:])
    del tensor
    gc.collect()
    assert (pool.block(2) == 1.0).all()


def test_inference_mode_in_and_out() -> None:
    with torch.inference_mode():
        inside = make()
    outside = make()
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            for pool in (inside, outside):
                block = pool.alloc()
                pool.set_fill(block, 1)
                pool.ref(block)
                pool.slab_before = pool.slab[block].clone()
                copy = pool.cow(block)
                assert bool((pool.slab[copy] == pool.slab_before).all())
                pool.unref(pool.import_(pool.export([copy])))
                pool.unref([block, copy])


def test_two_threads() -> None:
    pool = make(64)
    mgr = kvpool.BlockManager(pool)
    errors: list[BaseException] = []

    def work(me: int) -> None:
        try:
            for i in range(60):
                with mgr.allocate([me, i]) as seq, seq.fork() as fork:
                    pool.slab[seq.blocks[0]] = me * 100 + i
                    seq.commit()
                    fork.append(1)
                    copied = pool.slab[fork.blocks[0]]
                    assert bool((copied == me * 100 + i).all())
                    envelope = pool.export_sequence(seq)
                    with pool.import_sequence(mgr, envelope, [me, i]) as again:
                        assert pool.export_sequence(again) == envelope
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[0]
    assert pool.stats.used == 0
    mgr.check()


def test_importing_kvpool_does_not_import_torch() -> None:
    code = "import kvpool, kvpool.integrations, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
