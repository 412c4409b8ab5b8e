"""Events: vLLM's bytes, merged runs, gaps, and an index rebuilt over real sockets."""

from __future__ import annotations

import doctest
import importlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import kvpool

pytest.importorskip("msgspec")

import msgspec

from kvpool.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventEncoder,
    KVEventBatch,
    KVEventPublisher,
    KVEventSubscriber,
    NamespaceLabel,
    PrefixIndex,
)

STORED, REMOVED, CLEARED = 1, 2, 3


class Record(NamedTuple):
    number: int
    type: int
    hash: int = 0
    parent: int = 0
    block: int = 0
    tokens: Any = ()


def numbered(*records: Record, start: int = 0) -> list[Record]:
    return [record._replace(number=start + i) for i, record in enumerate(records)]


def stored(hash: int, parent: int, *tokens: int) -> Record:
    return Record(0, STORED, hash, parent, 0, tokens)


def removed(hash: int) -> Record:
    return Record(0, REMOVED, hash)


# ---- what a subscriber of vLLM 0.33 decodes with: fields of vllm/distributed/kv_events.py --------


class TheirEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class TheirStored(TheirEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class TheirRemoved(TheirEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class TheirCleared(TheirEvent, tag="AllBlocksCleared"):
    pass


class TheirBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[TheirStored | TheirRemoved | TheirCleared]
    data_parallel_rank: int | None = None


def test_a_subscriber_of_vllm_decodes_what_we_write() -> None:
    label = NamespaceLabel(lora_name="sql", lora_id=3, salt="tenant")
    root = kvpool.namespace(adapter="sql", salt="tenant")
    encoder = EventEncoder(2, labels={root: label})
    events = encoder.encode(
        numbered(
            stored(2**64 - 1, 0, 1, 2),
            stored(12, 2**64 - 1, 3, 4),
            stored(21, root, 1, 2),
            stored(22, 21, 3, 4),
            removed(12),
            Record(0, CLEARED),
        )
    )
    data = msgspec.msgpack.encode(KVEventBatch(1.5, events, 2))
    batch = msgspec.msgpack.decode(data, type=TheirBatch)
    assert batch == TheirBatch(
        1.5,
        [
            TheirStored([2**64 - 1, 12], None, [1, 2, 3, 4], 2, None, "GPU", None),
            TheirStored(
                [21, 22], None, [1, 2, 3, 4], 2, 3, "GPU", "sql", [("sql", "tenant"), ("sql",)]
            ),
            TheirRemoved([12], "GPU"),
            TheirCleared(),
        ],
        2,
    )


def test_we_decode_what_vllm_writes() -> None:
    theirs = TheirBatch(
        2.0,
        [
            TheirStored([b"\x01" * 32], b"\x02" * 32, [7, 8], 2, None, "GPU", None, group_idx=0),
            TheirRemoved([b"\x01" * 32], "CPU", group_idx=0),
            TheirCleared(),
        ],
    )
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(theirs), type=KVEventBatch)
    assert batch.events == [
        BlockStored(
            block_hashes=[b"\x01" * 32],
            parent_block_hash=b"\x02" * 32,
            token_ids=[7, 8],
            block_size=2,
            medium="GPU",
        ),
        BlockRemoved(block_hashes=[b"\x01" * 32], medium="CPU"),
        AllBlocksCleared(),
    ]


def test_an_event_is_a_map_and_a_batch_an_array() -> None:
    batch = KVEventBatch(1.0, [BlockRemoved(block_hashes=[5], medium="GPU"), AllBlocksCleared()])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.0,
        [
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        None,
    ]


# ---- the encoder ---------------------------------------------------------------------------------


def test_runs_are_merged_and_breaks_are_kept() -> None:
    encoder = EventEncoder(1)
    events = encoder.encode(
        numbered(
            stored(11, 0, 1), stored(12, 11, 2), stored(31, 0, 9), stored(13, 12, 3),
            removed(31), removed(13), stored(32, 31, 8),
        )
    )  # fmt: skip
    assert [
        (e.block_hashes, e.parent_block_hash, e.token_ids)
        if isinstance(e, BlockStored)
        else getattr(e, "block_hashes", None)
        for e in events
    ] == [
        ([11, 12], None, [1, 2]),
        ([31], None, [9]),
        ([13], 12, [3]),
        [31, 13],
        ([32], 31, [8]),
    ]


def test_a_gap_clears_what_was_told_before() -> None:
    encoder = EventEncoder(1)
    assert encoder.encode(numbered(stored(11, 0, 1)))[0].block_hashes == [11]  # type: ignore[union-attr]
    events = encoder.encode([*numbered(removed(11), start=1), *numbered(removed(12), start=5)])
    assert [type(e).__name__ for e in events] == [
        "BlockRemoved",
        "AllBlocksCleared",
        "BlockRemoved",
    ]
    # a gap between two drains, the first of which ended before it
    events = encoder.encode(numbered(stored(11, 0, 1), start=9))
    assert list(map(type, events)) == [AllBlocksCleared, BlockStored]


def test_a_root_without_a_label_is_an_unknown_parent() -> None:
    root = kvpool.namespace(salt="s")
    event = EventEncoder(1).encode(numbered(stored(11, root, 1)))[0]
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.extra_keys) == (root, None)


def test_a_label_follows_the_chain_until_its_block_is_gone() -> None:
    root = kvpool.namespace(adapter="x")
    encoder = EventEncoder(1, labels={root: NamespaceLabel(lora_name="x")})
    encoder.encode(numbered(stored(11, root, 1)))
    later = encoder.encode(numbered(stored(12, 11, 2), removed(11), stored(11, 0, 1), start=1))
    assert [e.lora_name for e in later if isinstance(e, BlockStored)] == ["x", None]
    assert [e.parent_block_hash for e in later if isinstance(e, BlockStored)] == [11, None]


def test_a_salt_goes_with_the_first_block_only() -> None:
    root = kvpool.namespace(salt="s")
    encoder = EventEncoder(1, labels={root: NamespaceLabel(salt="s")})
    event = encoder.encode(numbered(stored(11, root, 1), stored(12, 11, 2)))[0]
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [("s",), None]


def test_wrong_use_is_told() -> None:
    with pytest.raises(kvpool.InvalidArgument, match="root 0"):
        EventEncoder(1, labels={0: NamespaceLabel()})
    with pytest.raises(kvpool.InvalidArgument, match="unknown type 9"):
        EventEncoder(1).encode([Record(0, 9)])


def test_an_encoder_of_another_block_size_is_refused_and_takes_nothing(make_pool: Any) -> None:
    manager = kvpool.BlockManager(make_pool(8, block_tokens=4), events=True)
    with manager.allocate(list(range(9))) as sequence:
        sequence.commit()
    records = manager.drain_events()
    with pytest.raises(kvpool.InvalidArgument, match=r"a block of 4 tokens.*block_tokens=8"):
        EventEncoder(8).encode(records)
    encoder = EventEncoder(1)
    with pytest.raises(kvpool.InvalidArgument, match=r"a block of 2 tokens.*block_tokens=1"):
        encoder.encode(numbered(stored(11, 0, 1), stored(12, 11, 2, 3)))
    (event,) = encoder.encode(numbered(stored(11, 0, 1)))
    assert isinstance(event, BlockStored)
    assert (event.block_size, event.token_ids) == (1, [1])


class Source:
    """Stands in for a manager: blocks come and go, and it knows what is there."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.parents: dict[int, int] = {}
        self.records: list[Record] = []
        self.number = 0
        self.lock = threading.Lock()

    def record(self, record: Record) -> None:
        self.records.append(record._replace(number=self.number))
        self.number += 1

    def step(self) -> None:
        with self.lock:
            if self.parents and self.random.random() < 0.4:
                gone = self.random.choice(list(self.parents))
                del self.parents[gone]
                self.record(removed(gone))
            elif self.random.random() < 0.01:
                self.parents.clear()
                self.record(Record(0, CLEARED))
            else:
                new = self.random.randrange(1, 2**64)
                parent = self.random.choice([0, *self.parents])
                self.parents[new] = parent
                self.record(stored(new, parent, self.random.randrange(2**32)))

    def drain_events(self) -> list[Record]:
        with self.lock:
            records, self.records = self.records, []
        return records


@pytest.mark.parametrize("seed", range(5))
def test_an_index_follows_the_encoded_events(seed: int) -> None:
    source, encoder, index = Source(seed), EventEncoder(1), PrefixIndex()
    for _ in range(300):
        for _ in range(source.random.randrange(5)):
            source.step()
        for event in encoder.encode(source.drain_events()):
            index.apply(event)
        assert {h: p or 0 for h, p in index.parents.items()} == source.parents


# ---- over sockets --------------------------------------------------------------------------------

ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture
def zmq() -> Any:
    return pytest.importorskip("zmq")


@pytest.fixture
def publisher(zmq: Any) -> Iterator[KVEventPublisher]:
    with KVEventPublisher(ANY_PORT, ANY_PORT, encoder=EventEncoder(1)) as publisher:
        yield publisher


def subscribe(publisher: KVEventPublisher, **options: Any) -> KVEventSubscriber:
    return KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint, **options)


def connected(publisher: KVEventPublisher, subscriber: KVEventSubscriber) -> None:
    """Publishes until the subscription has arrived: PUB drops what nobody has subscribed to."""
    deadline = time.monotonic() + 10
    while not subscriber.poll(0.02):
        publisher.publish([AllBlocksCleared()])
        assert time.monotonic() < deadline
    settle(subscriber, publisher)


def settle(subscriber: KVEventSubscriber, publisher: KVEventPublisher) -> None:
    deadline = time.monotonic() + 10
    while subscriber.next < publisher._next:
        subscriber.poll(0.05)
        assert time.monotonic() < deadline


def block(hash: int, parent: int | None = None) -> BlockStored:
    return BlockStored(block_hashes=[hash], parent_block_hash=parent, token_ids=[1], block_size=1)


def test_an_index_is_rebuilt_over_sockets(publisher: KVEventPublisher) -> None:
    source = Source(7)
    with subscribe(publisher) as subscriber:
        connected(publisher, subscriber)
        for _ in range(200):
            for _ in range(source.random.randrange(10)):
                source.step()
            publisher.pump(source)
        settle(subscriber, publisher)
        assert {h: p or 0 for h, p in subscriber.index.parents.items()} == source.parents
        assert subscriber.lost == 0


def test_a_late_subscriber_asks_for_what_it_missed(publisher: KVEventPublisher) -> None:
    for i in range(50):
        publisher.publish([block(i + 1, i or None)])
    with subscribe(publisher) as subscriber:
        missed = subscriber.catch_up()
        assert [batch.events[0].block_hashes for batch in missed] == [[i + 1] for i in range(50)]  # type: ignore[union-attr]
        assert subscriber.index.match(range(1, 60)) == 50
        connected(publisher, subscriber)
        assert subscriber.lost == 0


def test_a_gap_is_closed_by_the_next_batch(publisher: KVEventPublisher) -> None:
    source = Source(3)
    with subscribe(publisher) as subscriber:
        for _ in range(100):  # before the subscription has arrived, most likely
            source.step()
            publisher.pump(source)
        deadline = time.monotonic() + 10
        while subscriber.next < publisher._next:
            source.step()
            publisher.pump(source)
            subscriber.poll(0.05)
            assert time.monotonic() < deadline
        assert {h: p or 0 for h, p in subscriber.index.parents.items()} == source.parents
        assert subscriber.lost == 0


def test_what_cannot_be_had_again_empties_the_index(zmq: Any) -> None:
    for replay in (ANY_PORT, None):
        with KVEventPublisher(ANY_PORT, replay, keep=2) as publisher:
            for i in range(10):
                publisher.publish([block(i)])
            with subscribe(publisher) as subscriber:
                deadline = time.monotonic() + 10
                while not subscriber.poll(0.02):
                    publisher.publish([block(99)])
                    assert time.monotonic() < deadline
                assert subscriber.lost >= 8
                assert subscriber.index.match([0]) == 0
                assert subscriber.index.match([99]) == 1


@pytest.mark.parametrize("unheard", [0, 1, 2, 3, 50])
def test_another_publisher_at_the_same_place_is_noticed(zmq: Any, unheard: int) -> None:
    """With fewer, as many and more batches sent than the subscriber has heard of the first."""
    with KVEventPublisher(ANY_PORT, ANY_PORT) as first:
        endpoint, replay = first.endpoint, first.replay_endpoint
        subscriber = subscribe(first)
        connected(first, subscriber)
        first.publish([block(1)])
        settle(subscriber, first)
        assert len(subscriber.index) == 1
    with subscriber:
        deadline = time.monotonic() + 10
        while True:  # the port may take a moment to be free
            try:
                second = KVEventPublisher(endpoint, replay)
                break
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with second:
            for i in range(unheard):  # the subscriber has not come back yet
                second.publish([block(100 + i)])
            while not subscriber.poll(0.05):
                second.publish([block(3)])
                assert time.monotonic() < deadline
            settle(subscriber, second)
            assert subscriber.index.match([1]) == 0
            assert subscriber.index.match(range(100, 100 + unheard)) == unheard
            assert subscriber.lost == 0


def test_the_frames_are_those_of_vllm(zmq: Any) -> None:
    """A raw SUB and a raw REQ socket, as a subscriber of vLLM opens them."""
    context = zmq.Context.instance()
    with KVEventPublisher(ANY_PORT, ANY_PORT, topic="kv", data_parallel_rank=1) as publisher:
        sub = context.socket(zmq.SUB)
        sub.setsockopt_string(zmq.SUBSCRIBE, "kv")
        sub.connect(publisher.endpoint)
        deadline = time.monotonic() + 10
        while not sub.poll(20):
            publisher.publish([block(7)], ts=1.0)
            assert time.monotonic() < deadline
        topic, number, payload = sub.recv_multipart()
        assert (topic, len(number)) == (b"kv", 8)
        assert int.from_bytes(number, "big") < publisher._next
        batch = msgspec.msgpack.decode(payload, type=TheirBatch)
        assert (batch.ts, batch.data_parallel_rank) == (1.0, 1)
        assert batch.events == [TheirStored([7], None, [1], 1, None, None, None)]
        sub.close(linger=0)

        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay_endpoint)
        last = publisher._next - 1
        dealer.send_multipart((b"", last.to_bytes(8, "big")))
        assert dealer.poll(10_000)
        assert dealer.recv_multipart() == [b"", b"kv", last.to_bytes(8, "big"), payload]
        assert dealer.poll(10_000)
        assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        for nonsense in ([b"", b"short"], [b"x"], [b"", b"12345678", b"more"]):
            dealer.send_multipart(nonsense)
            assert dealer.poll(10_000)
            assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        dealer.close(linger=0)


def test_numbers_are_in_the_order_of_events_with_many_threads(publisher: KVEventPublisher) -> None:
    source = Source(11)

    def work() -> None:
        for _ in range(100):
            source.step()
            publisher.pump(source)

    with subscribe(publisher) as subscriber:
        connected(publisher, subscriber)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settle(subscriber, publisher)
        assert {h: p or 0 for h, p in subscriber.index.parents.items()} == source.parents


def test_the_publisher_tells_wrong_use(zmq: Any) -> None:
    publisher = KVEventPublisher(ANY_PORT)
    assert publisher.endpoint.startswith("tcp://127.0.0.1:")
    assert not publisher.endpoint.endswith((":0", ":*"))
    assert publisher.replay_endpoint is None
    assert publisher.publish([]) is None
    assert publisher.publish([AllBlocksCleared()]) == 0
    with pytest.raises(kvpool.InvalidArgument, match="without an encoder"):
        publisher.pump(Source(0))
    with pytest.raises(zmq.ZMQError):
        KVEventPublisher(publisher.endpoint)
    with pytest.raises(zmq.ZMQError):
        KVEventPublisher(ANY_PORT, publisher.endpoint)
    publisher.close()
    publisher.close()
    with pytest.raises(kvpool.InvalidArgument, match="closed"):
        publisher.publish([AllBlocksCleared()])
    with pytest.raises(kvpool.InvalidArgument, match="negative"):
        KVEventPublisher(ANY_PORT, keep=-1)


@pytest.mark.parametrize("module", ["wire", "encoder", "publisher", "subscriber"])
def test_the_examples_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"kvpool.events.{module}"))
    assert found.failed == 0
    assert found.attempted or module in ("wire", "publisher")
