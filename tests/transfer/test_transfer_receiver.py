"""The decode side without a network: what it takes, what it refuses, and what it gives back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transfer_support import ENVELOPE_BYTES, SHAPE, Side, altered, send, unchanged

import kvpool
from kvpool.transfer import Chunk, KvReceiver, Limits, TransferRefused, chunks

NINE = list(range(1, 10))


def refused(code: str, call: Callable[[], Any], match: str | None = None) -> None:
    with pytest.raises(TransferRefused, match=match) as caught:
        call()
    assert caught.value.code == code, caught.value


# ---- a push that goes well ----------------------------------------------------------------------


def test_a_claimed_push_is_the_sequence_that_was_sent(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    assert send(receiver, "a", prefill.prefill(NINE)) == ("a", 3, 0)
    [pending] = receiver.pending()
    assert pending[:3] == ("a", 3, 9)
    with receiver.claim("a", NINE) as seq:
        assert decode.holds(seq, NINE)
        assert seq.n_computed == 9
        assert seq.append(7) == []  # and it goes on like one of the engine's own
    assert decode.manager.can_allocate(NINE).n_cached == 8
    assert receiver.stats[:6] == (3 * ENVELOPE_BYTES, 3, 0, 1, 0, 1)


def test_what_is_cached_is_taken_by_name_and_not_sent(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    decode.cache(NINE[:4])
    seq = prefill.prefill(NINE)
    names = kvpool.block_hashes(NINE, 4).tolist()
    present = receiver.has_blocks(names).tolist()
    assert present == [True, False]
    assert decode.pool.stats.used == 0  # HasBlocks takes no reference
    assert send(receiver, "a", seq, present=present) == ("a", 2, 1)
    assert receiver.stats.bytes == 2 * ENVELOPE_BYTES  # the protocol's example: 344
    with receiver.claim("a", NINE) as mine:
        assert decode.holds(mine, NINE)


@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
def test_a_full_block_without_a_name_gets_it_from_the_chunk(
    prefix_cache: str, make_side: Callable[..., Side], decode: Side, receiver: KvReceiver
) -> None:
    """With prefix_cache="none" the prefill side registers nothing; with "hash", another block may
    hold the name. The envelope then says 0, and the chunk says what it is."""
    prefill = make_side(prefix_cache=prefix_cache)
    first = prefill.prefill(NINE)
    second = prefill.manager.allocate(NINE, max_cached_tokens=0)
    prefill.pool.slab[second.blocks] = prefill.content(NINE)
    second.commit()
    sent = list(chunks("a", second))
    assert [bytes(c.payload[28:36]) for c in sent] == [bytes(8)] * 3
    assert [c.block_hash for c in sent] == [*kvpool.block_hashes(NINE, 4).tolist(), 0]
    first.free()
    assert send(receiver, "a", second) == ("a", 3, 0)
    with receiver.claim("a", NINE) as seq:
        assert decode.holds(seq, NINE)
        assert decode.pool.hash(seq.blocks[:2]).tolist() == [c.block_hash for c in sent[:2]]


def test_a_truncated_tail_travels_as_what_is_left_of_it(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    seq = prefill.prefill(NINE)
    seq.truncate(6)  # into the second block, which is full, registered and cached on
    assert send(receiver, "a", seq) == ("a", 2, 0)
    with receiver.claim("a", NINE[:6]) as mine:
        assert decode.holds(mine, NINE[:6])


def test_namespaces_travel_with_the_names(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    root = kvpool.namespace(model="m", salt="tenant")
    decode.cache(NINE)  # another namespace: must not be mixed up with it
    send(receiver, "a", prefill.prefill(NINE, root))
    with receiver.claim("a", NINE, root) as seq:
        assert decode.holds(seq, NINE, root)
    send(receiver, "b", prefill.prefill(NINE, root))
    with unchanged(decode), pytest.raises(kvpool.NotFound):
        receiver.claim("c", NINE, root)
    with pytest.raises(kvpool.CorruptEnvelope, match="block 0 came as"):
        receiver.claim("b", NINE)
    assert decode.pool.stats.used == 0


# ---- every chunk that is refused ----------------------------------------------------------------


def flip(data: Any, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def sealed(data: bytes) -> bytes:
    return data[:-4] + kvpool.crc32c(data[:-4]).to_bytes(4, "little")


def patched(chunk: Chunk, at: int, new: bytes) -> Chunk:
    """An envelope with other bytes and a right checksum: what an evil sender makes."""
    data = bytes(chunk.payload)
    return altered(chunk, payload=sealed(data[:at] + new + data[at + len(new) :]))


def le(value: int, n_bytes: int = 4) -> bytes:
    return value.to_bytes(n_bytes, "little")


Alter = Callable[[Chunk], Chunk]


def fields(**found: Any) -> Alter:
    return lambda chunk: altered(chunk, **found)


def bit(at: int) -> Alter:
    """One bit of the payload, and the checksum as it was."""
    return lambda chunk: chunk._replace(payload=flip(chunk.payload, at))


def put(at: int, new: bytes) -> Alter:
    return lambda chunk: patched(chunk, at, new)


def made_of(make: Callable[[bytes], bytes]) -> Alter:
    return lambda chunk: altered(chunk, payload=make(bytes(chunk.payload)))


NO_BLOCK = made_of(lambda data: sealed(data[:8] + le(0) + data[12:28] + bytes(4)))
FAULTS: dict[str, tuple[str, str, Alter]] = {
    "wrong format": ("FAILED_PRECONDITION", "kv_format 2", fields(kv_format=2)),
    "no format": ("FAILED_PRECONDITION", "kv_format 0", fields(kv_format=0)),
    "out of order": ("INVALID_ARGUMENT", "block_index 7", fields(block_index=7)),
    "duplicated": ("INVALID_ARGUMENT", "block_index", fields(block_index=0)),
    "total changed": ("INVALID_ARGUMENT", "n_blocks_total 4", fields(n_blocks_total=4)),
    "total 0": ("INVALID_ARGUMENT", "n_blocks_total 0", fields(n_blocks_total=0)),
    "handle changed": ("INVALID_ARGUMENT", "handle_id 'b'", fields(handle_id="b")),
    "flipped bit in the payload": ("DATA_LOSS", "CRC-32C", bit(500)),
    "flipped bit, checksum of it": (
        "DATA_LOSS", "does not end in its own CRC", made_of(lambda data: flip(data, 500)),
    ),
    "flipped bit in the envelope's CRC": ("DATA_LOSS", "CRC-32C", bit(8 * 171)),
    "flipped bit in crc32c": ("DATA_LOSS", "crc32c", lambda c: altered(c, crc32c=c.crc32c ^ 1)),
    "no checksum": ("DATA_LOSS", "crc32c 00000000", fields(crc32c=0)),
    "flipped bit in the header": ("DATA_LOSS", "length", bit(8 * 13)),
    "version 2": ("DATA_LOSS", "version 2", put(4, b"\2\0")),
    "wrong shape": ("DATA_LOSS", "n_layers 1", put(16, le(1) + le(2))),
    "cut payload": ("DATA_LOSS", "length 164", made_of(lambda data: sealed(data[:-8]))),
    "a payload of one byte": ("DATA_LOSS", "its own CRC", fields(payload=b"x")),
    "two blocks in one": ("DATA_LOSS", "n_blocks 2", put(8, b"\2")),
    "no block in one": ("DATA_LOSS", "n_blocks 0", NO_BLOCK),
    "another name inside": ("INVALID_ARGUMENT", "its envelope says", put(28, le(5, 8))),
    "a block that is not full": ("INVALID_ARGUMENT", "3 tokens", put(28, bytes(8) + b"\3")),
    "neither payload nor name": ("INVALID_ARGUMENT", "neither", fields(payload=b"", block_hash=0)),
    "a name that is not here": ("NOT_FOUND", "is not here", fields(payload=b"")),
    "a checksum of nothing": ("DATA_LOSS", "without a payload", fields(payload=b"", crc32c=1)),
    "too large": ("INVALID_ARGUMENT", "4194305 bytes", fields(payload=bytes(4194305))),
}  # fmt: skip


# The first chunk of a push says what handle and total are.
NOT_IN_THE_FIRST = ("handle changed", "total changed", "duplicated")


@pytest.mark.parametrize(
    ("fault", "at"),
    [(f, at) for f in FAULTS for at in (0, 1) if at or f not in NOT_IN_THE_FIRST],
)
def test_a_chunk_that_breaks_a_rule_ends_the_push_and_leaves_nothing(
    fault: str, at: int, prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    code, match, alter = FAULTS[fault]
    decode.cache([5, 5, 5, 5, 5])
    prefill.cache(NINE)
    with unchanged(decode, prefill), prefill.prefill(NINE) as seq:
        sent = list(chunks("a", seq))
        with receiver.begin() as push:
            for chunk in sent[:at]:
                push.add(chunk)
            wrong = alter(sent[at])
            refused(code, lambda: push.add(wrong), match)
            assert decode.pool.stats.used == 0  # at once, not at the end of the stream
            refused("FAILED_PRECONDITION", lambda: push.add(wrong), "has ended")
        assert receiver.pending() == []
        assert receiver.stats.failed == 1


def test_every_flipped_bit_of_a_chunk_is_refused(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    with prefill.prefill(NINE[:4]) as seq:
        [chunk] = chunks("a", seq)
    for bit in range(8 * ENVELOPE_BYTES):
        with receiver.begin() as push:
            with pytest.raises(TransferRefused):
                push.add(chunk._replace(payload=flip(chunk.payload, bit)))
    assert decode.blocks == (64, 0, 0)


def test_one_name_twice_in_a_push_is_refused(decode: Side, receiver: KvReceiver) -> None:
    decode.cache(NINE[:5])
    name = int(kvpool.block_hashes(NINE, 4)[0])
    with unchanged(decode), receiver.begin() as push:
        push.add(Chunk("a", name, 0, 2, 1, b"", 0))
        again = Chunk("a", name, 1, 2, 1, b"", 0)
        refused("INVALID_ARGUMENT", lambda: push.add(again), "second block")


@pytest.mark.parametrize("handle", ["", "x" * 129, "line\nbreak", "\x00"])
def test_handles_are_short_and_printable(
    handle: str, prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    with prefill.prefill(NINE) as seq, receiver.begin() as push:
        chunk = next(iter(chunks(handle, seq)))
        refused("INVALID_ARGUMENT", lambda: push.add(chunk), "handle_id")


def test_a_stream_that_ends_early_was_cut(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    """5 of 10 blocks, and then an end like any other: only the last index completes a push."""
    tokens = list(range(40))
    decode.cache(tokens[:9])
    with unchanged(decode), prefill.prefill(tokens) as seq:
        with receiver.begin() as push:
            for chunk in list(chunks("a", seq, [True, True]))[:5]:
                assert push.add(chunk) is None
            assert receiver.pending() == []
        with pytest.raises(kvpool.NotFound):
            receiver.claim("a", tokens[:20])


def test_two_pushes_cannot_have_one_handle(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    with prefill.prefill(NINE) as seq:
        first, second = list(chunks("a", seq)), list(chunks("a", seq))
        with receiver.begin() as one, receiver.begin() as two:
            one.add(first[0])
            refused("ALREADY_EXISTS", lambda: two.add(second[0]), "in use")
            one.add(first[1])
            assert one.add(first[2]) is not None
        refused("ALREADY_EXISTS", lambda: send(receiver, "a", seq.fork()), "in use")
        with receiver.claim("a", NINE) as mine:  # the first is as if there had been no other
            assert decode.holds(mine, NINE)
        assert send(receiver, "a", seq.fork()) is not None  # free again
        assert receiver.release("a")


# ---- claims and releases ------------------------------------------------------------------------


def test_a_handle_is_claimed_once_and_released_any_number_of_times(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    send(receiver, "a", prefill.prefill(NINE))
    receiver.claim("a", NINE).free()
    with unchanged(decode):
        with pytest.raises(kvpool.NotFound, match="'a'"):
            receiver.claim("a", NINE)
        assert not receiver.release("a")
        send(receiver, "b", prefill.prefill([*NINE, 10, 11]))
        assert receiver.release("b")
        assert not receiver.release("b")
        assert not receiver.release("never")
        with pytest.raises(kvpool.NotFound):
            receiver.claim("b", NINE)


def test_a_release_ends_a_push_in_flight(prefill: Side, decode: Side, receiver: KvReceiver) -> None:
    told = threading.Event()
    with unchanged(decode), prefill.prefill(NINE) as seq:
        first, second, _ = chunks("a", seq)
        with receiver.begin(on_abort=told.set) as push:
            push.add(first)
            assert receiver.release("a")
            assert told.is_set()
            refused("CANCELLED", lambda: push.add(second), "released")


def test_nobody_claims_after_the_time_to_live(
    prefill: Side, decode: Side, make_receiver: Callable[..., KvReceiver]
) -> None:
    now = [0.0]
    receiver = make_receiver(decode, limits=Limits(ttl_s=5, idle_s=2), clock=lambda: now[0])
    decode.cache(NINE[:5])
    with unchanged(decode):
        send(receiver, "a", prefill.prefill(NINE), present=[True])
        now[0] = 4.9
        assert receiver.expire() == 0
        assert receiver.pending()[0].age_s == 4.9
        now[0] = 5.0
        with pytest.raises(kvpool.NotFound):
            receiver.claim("a", NINE)
        assert receiver.stats.expired == 1
    told = threading.Event()
    with unchanged(decode), prefill.prefill(NINE) as seq:
        with receiver.begin(on_abort=told.set) as push:
            push.add(next(iter(chunks("b", seq))))
            now[0] = 6.9
            assert receiver.expire() == 0
            now[0] = 7.0
            assert receiver.expire() == 1
            assert told.is_set()


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        (NINE[:8], "8 tokens, the push brought 9"),
        ([*NINE, 10], "10 tokens"),
        ([], "0 tokens"),
        ([2, *NINE[1:]], "block 0 came as"),
        ([*NINE[:4], 0, *NINE[5:]], "block 1 came as"),
    ],
)
def test_a_claim_with_other_tokens_frees_everything(
    tokens: list[int], match: str, prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    decode.cache(NINE[:5])
    with unchanged(decode):
        send(receiver, "a", prefill.prefill(NINE), present=[True])
        with pytest.raises(kvpool.CorruptEnvelope, match=match):
            receiver.claim("a", tokens)
        with pytest.raises(kvpool.NotFound):
            receiver.claim("a", NINE)


def test_a_claim_with_bad_arguments_leaves_the_handle(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    send(receiver, "a", prefill.prefill(NINE))
    for tokens, root in (([1.5], 0), ([2**32], 0), (NINE, -1), (None, 0)):
        with pytest.raises((kvpool.InvalidArgument, TypeError)):
            receiver.claim("a", tokens, root)  # type: ignore[arg-type]
    with receiver.claim("a", NINE) as seq:
        assert decode.holds(seq, NINE)


# ---- names prove nothing ------------------------------------------------------------------------

VICTIM = [1, 734, 29889, 4061, 310, 14991, 278, 3186, 29892, 1438, 338, 278, 5613, 9508, 310, 278]
FORGED = [*VICTIM[:9], 3724, 7590, 12543, 11406, 4726, 890, 3852]  # has the victim's name


def test_a_forged_name_is_refused_when_the_claim_brings_the_tokens(
    make_side: Callable[..., Side], make_receiver: Callable[..., KvReceiver]
) -> None:
    """The victim's block is cached, and a prompt was made that has its name. Pushed by name alone
    it would be answered from the victim's K and V."""
    assert kvpool.block_hashes(FORGED).tolist() == kvpool.block_hashes(VICTIM).tolist()
    prefill, decode = make_side(block_tokens=16), make_side(block_tokens=16)
    receiver = make_receiver(decode)
    decode.cache([*VICTIM, 7])
    with unchanged(decode):
        send(receiver, "a", prefill.prefill([*FORGED, 7]), present=[True])
        with pytest.raises(kvpool.CorruptEnvelope, match="computed from other tokens"):
            receiver.claim("a", [*FORGED, 7])
    send(receiver, "b", prefill.prefill([*FORGED, 7]))  # with its payload it is what it says
    with receiver.claim("b", [*FORGED, 7]) as seq:
        assert decode.holds(seq, [*FORGED, 7])
    with decode.manager.allocate([*VICTIM, 8]) as seq:  # and the victim still hits its own
        assert seq.n_cached == 16
        assert (decode.pool.block(seq.blocks[0]) == decode.content(VICTIM)[0]).all()


def test_a_block_nobody_has_claimed_cannot_be_taken_by_its_name(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    """The attack: push other values under the name of a prompt that somebody will send, claim
    nothing, and wait for the other push to take the block by its name."""
    evil = prefill.prefill(NINE)
    prefill.pool.slab[evil.blocks] = 666.0
    send(receiver, "evil", evil)
    prefill.manager.reset()
    name = int(kvpool.block_hashes(NINE, 4)[0])
    assert not receiver.has_blocks([name])[0]
    assert decode.pool.lookup(name) is None  # it has no name here at all
    refused("NOT_FOUND", lambda: send(receiver, "a", prefill.prefill(NINE), present=[True]))
    send(receiver, "a", prefill.prefill(NINE))
    with receiver.claim("a", NINE) as seq:
        assert decode.holds(seq, NINE)
    assert receiver.release("evil")
    with decode.manager.allocate([*NINE[:8], 99]) as seq:  # nothing evil was ever findable
        assert seq.n_cached == 8
        assert (decode.pool.slab[seq.blocks[:2]] == decode.content(NINE)[:2]).all()


def test_a_name_without_proof_is_not_deduplicated(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    """Imported under its name and not adopted: the pool would find it, the receiver must not."""
    with prefill.prefill(NINE) as seq:
        ids = decode.manager.import_(seq.export())
    name = int(kvpool.block_hashes(NINE, 4)[0])
    decode.pool.unref(decode.pool.lookup(name) or 0)
    assert not receiver.has_blocks([name])[0]
    refused("NOT_FOUND", lambda: send(receiver, "a", prefill.prefill(NINE), present=[True]))
    decode.pool.unref(ids)


def test_a_reset_between_push_and_claim_ends_what_was_taken_by_name(
    prefill: Side, decode: Side, receiver: KvReceiver
) -> None:
    decode.cache(NINE)
    send(receiver, "a", prefill.prefill(NINE), present=[True, True])
    decode.manager.reset()  # other weights from now on: the cached blocks are no longer right
    with pytest.raises(kvpool.CorruptEnvelope, match="nothing proves"):
        receiver.claim("a", NINE)
    send(receiver, "b", prefill.prefill(NINE))
    assert receiver.clear() == 1
    assert receiver.pending() == []


def test_a_deduplicated_block_survives_until_it_is_claimed(
    prefill: Side, make_side: Callable[..., Side], make_receiver: Callable[..., KvReceiver]
) -> None:
    decode = make_side(4)
    receiver = make_receiver(decode)
    decode.cache(NINE[:5])
    send(receiver, "a", prefill.prefill(NINE), present=[True])
    with decode.manager.allocate(list(range(50, 54))):  # all there is left
        assert decode.pool.stats.free == 0
        with receiver.claim("a", NINE) as seq:
            assert decode.holds(seq, NINE)


# ---- bounds -------------------------------------------------------------------------------------


def test_a_full_pool_refuses_halfway_and_gives_back(
    prefill: Side, make_side: Callable[..., Side], make_receiver: Callable[..., KvReceiver]
) -> None:
    decode = make_side(4)
    receiver = make_receiver(decode)
    with decode.manager.allocate([1] * 8), unchanged(decode):
        refused(
            "RESOURCE_EXHAUSTED",
            lambda: send(receiver, "a", prefill.prefill(NINE)),
            "chunk 2: .* blocks needed",
        )


def test_each_limit_has_its_refusal(
    prefill: Side, decode: Side, make_receiver: Callable[..., KvReceiver]
) -> None:
    limits = Limits(max_pushes=2, max_handles=3, max_blocks=4, max_held_blocks=7, max_hashes=5)
    receiver = make_receiver(decode, limits=limits)
    refused("RESOURCE_EXHAUSTED", lambda: receiver.has_blocks(range(6)), "6 names")
    too_long = prefill.prefill(list(range(17)))
    refused("RESOURCE_EXHAUSTED", lambda: send(receiver, "a", too_long), "n_blocks_total 5")
    with receiver.begin(), receiver.begin():
        refused("RESOURCE_EXHAUSTED", receiver.begin, "2 pushes are in flight")
    for handle in "abc":
        send(receiver, handle, prefill.prefill([1, 2, 3]))
    refused("RESOURCE_EXHAUSTED", lambda: send(receiver, "d", prefill.prefill([1])), "3 handles")
    receiver.release("c")
    receiver.release("b")
    with unchanged(decode), prefill.prefill(list(range(16))) as seq:
        with receiver.begin() as one, receiver.begin() as two:  # "a" holds 1 block: 6 are left
            for x, y in list(zip(chunks("x", seq), chunks("y", seq), strict=True))[:3]:
                one.add(x)
                two.add(y)
            refused("RESOURCE_EXHAUSTED", lambda: two.add(list(chunks("y", seq))[3]), "7 blocks")
            assert one.add(list(chunks("x", seq))[3]) is not None  # there is room now
            receiver.release("x")
    assert receiver.stats.held_blocks == 1
    assert not receiver.has_blocks([1, 2, 3, 4, 5]).any()


def test_the_watermark_is_left_alone(
    prefill: Side, make_side: Callable[..., Side], make_receiver: Callable[..., KvReceiver]
) -> None:
    decode = make_side(8, watermark=6)
    receiver = make_receiver(decode)
    refused("RESOURCE_EXHAUSTED", lambda: send(receiver, "a", prefill.prefill(NINE)), "2 blocks")


def test_a_block_that_no_payload_can_carry_is_refused_when_the_receiver_is_made() -> None:
    pool = kvpool.Pool(1, block_tokens=16, n_layers=64, n_kv_heads=16, head_dim=65)
    with pytest.raises(kvpool.InvalidArgument, match="at most 4194304"):
        KvReceiver(kvpool.BlockManager(pool))


def test_a_closed_receiver_takes_nothing(prefill: Side, decode: Side, receiver: KvReceiver) -> None:
    send(receiver, "a", prefill.prefill(NINE))
    with unchanged(prefill), prefill.manager.allocate([3]):
        push = receiver.begin()
        receiver.close()
        assert decode.pool.stats.used == 0
        refused("UNAVAILABLE", receiver.begin, "closed")
        chunk = Chunk("b", 1, 0, 1, 1, b"", 0)
        refused("CANCELLED", lambda: push.add(chunk), "cleared")
    with pytest.raises(kvpool.NotFound):
        receiver.claim("a", NINE)


def test_a_closed_pool_ends_a_push_with_unavailable(
    prefill: Side, make_side: Callable[..., Side], make_receiver: Callable[..., KvReceiver]
) -> None:
    decode = make_side()
    receiver = make_receiver(decode)
    with prefill.prefill(NINE) as seq, receiver.begin() as push:
        first, second, _ = chunks("a", seq)
        push.add(first)
        decode.pool.close()
        refused("UNAVAILABLE", lambda: push.add(second), "closed")


# ---- many at once -------------------------------------------------------------------------------


def test_pushes_claims_and_releases_from_many_threads(
    make_side: Callable[..., Side], make_receiver: Callable[..., KvReceiver]
) -> None:
    prefill, decode = make_side(256), make_side(96)
    receiver = make_receiver(decode, limits=Limits(max_pushes=16))
    errors: list[BaseException] = []
    outcomes = {"claimed": 0, "released": 0, "cut": 0, "full": 0}
    lock = threading.Lock()

    def work(thread: int) -> None:
        rng = np.random.default_rng(thread)
        try:
            for i in range(40):
                rest = rng.integers(9, size=rng.integers(1, 14)).tolist()
                tokens = [int(rng.integers(3))] * 4 + rest
                handle = f"{thread}-{i}"
                with prefill.prefill(tokens) as seq:
                    present = receiver.has_blocks(kvpool.block_hashes(tokens, 4)).tolist()
                    sent = list(chunks(handle, seq, present))
                    if rng.random() < 0.3:
                        sent = sent[:-1]
                    outcome = "cut"
                    try:
                        with receiver.begin() as push:
                            for chunk in sent:
                                if push.add(chunk) is not None:
                                    outcome = "claimed" if rng.random() < 0.7 else "released"
                    except TransferRefused as error:
                        assert error.code in ("RESOURCE_EXHAUSTED", "NOT_FOUND"), error
                        outcome = "full"
                if outcome == "claimed":
                    with receiver.claim(handle, tokens) as mine:
                        assert decode.holds(mine, tokens)
                elif outcome == "released":
                    assert receiver.release(handle)
                with lock:
                    outcomes[outcome] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert min(outcomes["claimed"], outcomes["released"], outcomes["cut"]) > 20, outcomes
    stats = receiver.stats
    assert (stats.claimed, stats.released) == (outcomes["claimed"], outcomes["released"])
    assert decode.pool.stats.used == 0


def test_the_example_of_the_protocol_adds_up() -> None:
    side = Side()
    assert side.pool.block_bytes == 128
    assert side.pool.export_bytes(1) == ENVELOPE_BYTES
    assert SHAPE["block_tokens"] == 4
