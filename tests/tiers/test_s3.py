"""Blocks in packs in an S3 bucket: a real SeaweedFS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from tier_servers import Proxy, SeaweedFs, free_port
from tier_support import Engine

import kvpool
from kvpool.tiers import Key, Layout, TierStack, open_tier
from kvpool.tiers.record import ENVELOPE_AT

obstore = pytest.importorskip("obstore", reason="obstore is not installed")
s3 = pytest.importorskip("kvpool.tiers.s3")

PROMPT = list(range(1, 19))  # 4 full blocks and 2 tokens
LAYOUT = Layout(4, n_layers=2, n_kv_heads=1, head_dim=2)
PREFIXES = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any) -> Iterator[SeaweedFs]:
    server = SeaweedFs(tmp_path_factory.mktemp("weed"))
    yield server
    server.kill()


@pytest.fixture
def url(server: SeaweedFs, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of its own in the bucket, as a URL without options."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://blocks/test-{next(PREFIXES)}?endpoint=http://127.0.0.1:{server.port}"


def make_records(tokens: range, namespace: int = 0) -> list[tuple[Key, bytes]]:
    pool = kvpool.Pool(1, 4, n_layers=2, n_kv_heads=1, head_dim=2)
    items = []
    for i, key in enumerate(LAYOUT.keys(tokens, namespace)):
        [block] = pool.alloc(1).tolist()
        pool.block(block)[:] = i + namespace
        pool.set_fill(block, 4)
        pool.register(block, key.hash)
        record = memoryview(bytearray(LAYOUT.record_bytes))
        pool.export_into([block], record[ENVELOPE_AT:])
        LAYOUT.seal(record, key, i)
        items.append((key, bytes(record)))
        pool.unref(block)
    return items


def packs(tier: Any) -> dict[str, bytes]:
    found = {}
    for chunk in obstore.list(tier._store, tier._prefix):
        for meta in chunk:
            found[meta["path"]] = bytes(obstore.get(tier._store, meta["path"]).bytes())
    return found


def test_blocks_of_a_prefix_are_one_object_and_are_found_without_a_listing(url: str) -> None:
    items = make_records(range(80))
    keys = [key for key, _ in items]
    data = [record for _, record in items]
    with open_tier(url) as writer:
        assert writer.put(items[:12]) == [True] * 12
        assert writer.put(items[12:]) == [True] * 8
        assert sorted(packs(writer)) == sorted(writer._prefix + keys[i].text for i in (0, 12))
        requests = writer.stats().counts["requests"]
        assert writer.get(keys[5:15]) == data[5:15]  # it knows where they are
        assert writer.stats().counts["requests"] == requests + 2
    with open_tier(url) as reader:  # knows nothing
        assert reader.get(keys) == data
        assert reader.stats().counts["requests"] == 2
        out = [memoryview(bytearray(LAYOUT.record_bytes)) for _ in keys]
        assert reader.get(keys, out) == data
        assert reader.stats().counts["requests"] == 4
    with open_tier(url) as reader:
        other = [key for key, _ in make_records(range(80), namespace=9)]
        assert reader.get(other, out) == [None] * 20
        assert reader.stats().counts["requests"] == 1  # nothing further is asked for
        assert reader.get(keys[5:7]) == [None, None]  # the middle of a pack that it never saw
        assert reader.get(keys[:7]) == data[:7]
        assert reader.get(keys[5:7]) == data[5:7]
        assert reader.has([keys[6], keys[12], other[0]]) == [True, True, False]
        assert set(reader.keys()) == set(keys)


def test_what_is_there_is_not_written_again_and_the_first_writer_wins(url: str) -> None:
    items = make_records(range(40))
    with open_tier(url) as one, open_tier(url) as other:
        assert one.put(items[:4]) == [True] * 4
        before = packs(one)
        assert other.put(items) == [True] * 10  # a part is there: the rest is a pack of its own
        assert other.stats().counts["present"] == 1
        after = packs(one)
        assert before.items() <= after.items()
        assert len(after) == 2
        assert one.get([key for key, _ in items]) == [record for _, record in items]
        third = make_records(range(100, 116))
        look = one._probe  # type: ignore[attr-defined]

        def look_too_early(key: Key) -> bool:
            one._probe = look  # type: ignore[attr-defined]
            assert other.put(third) == [True] * 4
            return True

        one._probe = look_too_early  # type: ignore[attr-defined]
        assert one.put(third) == [True] * 4
        assert one.stats().counts["packs"] == 1


def test_records_of_several_prefixes_are_several_packs(url: str) -> None:
    a, b = make_records(range(12)), make_records(range(12), namespace=3)
    with open_tier(url) as tier:
        assert tier.put([*a, *b, (LAYOUT.keys(range(90, 94))[0], b"short")]) == [True] * 7
        assert len(packs(tier)) == 3
        assert tier.put([]) == tier.get([]) == tier.has([]) == tier.delete([]) == []


def test_a_block_is_deleted_with_its_pack(url: str) -> None:
    items = make_records(range(40))
    keys = [key for key, _ in items]
    with open_tier(url) as tier, open_tier(url) as stale:
        tier.put(items)
        stale.get(keys)
        assert tier.delete([keys[3], keys[4]]) == [True, True]
        assert tier.get(keys) == [None] * 10
        assert stale.get(keys[2:]) == [None] * 8  # it finds out
        assert tier.delete(keys[:1]) == [False]
        assert tier.put(items[3:]) == [True] * 7
        assert stale.get(keys[3:]) == [record for _, record in items[3:]]


WRONG = {
    "nothing": lambda good: b"",
    "no pack": lambda good: b"hello" * 1000,
    "a flipped bit in the table": lambda good: good[:50] + bytes([good[50] ^ 1]) + good[51:],
    "a flipped bit in a record": lambda good: good[:-30] + bytes([good[-30] ^ 1]) + good[-29:],
    "cut short": lambda good: good[:-10],
    "another pack": lambda good: s3.pack(
        [(k, memoryview(r)) for k, r in make_records(range(99))][3:9]
    )[0],
    "huge": lambda good: good + bytes(20 << 20),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_object_that_is_wrong_is_a_miss_and_is_written_anew(url: str, what: str) -> None:
    with Engine(TierStack([url], model="test", timeout_s=20)) as engine:
        [tier] = engine.tiers._tiers
        engine.answer(PROMPT)
        engine.flush()
        [(name, good)] = packs(tier).items()
        obstore.put(tier._store, name, WRONG[what](good))
        tier._forget(name)  # as a process that comes new
        engine.forget()
        # Engine.answer holds every hit against what it must be
        part = {"a flipped bit in a record": 12, "cut short": 12, "huge": 16}.get(what, 0)
        assert engine.answer(PROMPT) == part
        assert sum(engine.stats.refused.values()) == (part < 16)
        engine.flush()
        for _ in range(3):
            engine.forget()
            engine.answer(PROMPT)
            engine.flush()
        engine.forget()
        assert engine.answer(PROMPT) == 16
        assert engine.stats.errors == 0
        engine.close()


def test_tables_that_are_no_tables_are_refused() -> None:
    items = [(key, memoryview(record)) for key, record in make_records(range(20))]
    table, offsets = s3.pack(items)
    assert [entry[0] for entry in s3.unpack(memoryview(table))] == [key for key, _ in items]
    assert [entry[1] for entry in s3.unpack(memoryview(table))] == offsets
    for i in range(len(table)):
        for bad in (table[:i], table[:i] + bytes([table[i] ^ 16]) + table[i + 1 :]):
            with pytest.raises(s3._Damaged):
                s3.unpack(memoryview(bad))


def test_connections_that_are_cut_are_tried_again_and_then_told(url: str, server: Any) -> None:
    items = make_records(range(40))
    proxy = Proxy(server.port)
    try:
        where = url.split("?")[0] + f"?endpoint=http://127.0.0.1:{proxy.port}"
        with open_tier(where) as tier:
            assert tier.put(items) == [True] * 10
            keys = [key for key, _ in items]
            proxy.cut_after = 10  # in the head of a reply
            assert tier.get(keys) == [record for _, record in items]
            proxy.cut_after = 1500  # in its body
            with contextlib.suppress(kvpool.TransferError):
                assert tier.get(keys) == [record for _, record in items]
            assert proxy.n_cuts == 2
            assert tier.get(keys) == [record for _, record in items]
    finally:
        proxy.close()


def test_what_cannot_be_opened_is_told_at_once(url: str, server: Any) -> None:
    with pytest.raises(kvpool.TransferError, match="s3:blocks: open: "):
        open_tier(f"s3://blocks?endpoint=http://127.0.0.1:{free_port()}&retries=0")
    with pytest.raises(kvpool.TransferError, match="s3:other: open: "):
        open_tier(f"s3://other?endpoint=http://127.0.0.1:{server.port}")
    for text, message in (
        ("s3:", "expected s3://bucket/prefix"),
        ("s3://A_B/x", "expected s3://bucket/prefix, found 'A_B' as a bucket"),
        ("s3://blocks?timeout=0", "timeout: expected more than 0"),
        ("s3://blocks?retries=-1", "retries: expected 0 to 100, found -1"),
        ("s3://blocks?ttl=1", "unknown option ttl"),
    ):
        with pytest.raises(kvpool.InvalidArgument, match=message):
            open_tier(text)
