"""Replies of Valkey and Redis, split anywhere, cut anywhere, and hostile ones."""

from __future__ import annotations

import random

import pytest

from kvpool.tiers._resp import Replies, ReplyError, TooLong


class Socket:
    """Gives some bytes in pieces of some sizes, then the end."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes = data, sizes

    def recv_into(self, view: memoryview) -> int:
        n = min(len(view), len(self.data), self.sizes.pop(0) if self.sizes else 1 << 20)
        view[:n], self.data = self.data[:n], self.data[n:]
        return n


BIG = random.Random(1).randbytes(70_000)
STREAM = (
    b"$5\r\nhello\r\n$-1\r\n-ERR no\r\n$0\r\n\r\n$70000\r\n"
    + BIG
    + b"\r\n:17\r\n:-2\r\n-NO\r\n$1\r\nx\r\n"
)


def read(replies: Replies) -> list[object]:
    out = memoryview(bytearray(70_000))
    values = [replies.value(None, 100) for _ in range(4)]
    big = replies.value(out, 0)
    assert isinstance(big, memoryview)
    assert big.obj is out.obj
    found: list[object] = [bytes(v) if isinstance(v, memoryview) else v for v in [*values, big]]
    found += [replies.number() for _ in range(3)]
    last = replies.value(None, 1)
    assert last == b"x"
    assert replies.is_empty
    return found


def check(found: list[object]) -> None:
    assert [f if not isinstance(f, ReplyError) else str(f) for f in found] == [
        b"hello", None, "ERR no", b"", BIG, 17, -2, "NO",
    ]  # fmt: skip


def test_replies_come_in_pieces_of_any_size() -> None:
    check(read(Replies(Socket(STREAM, []))))
    check(read(Replies(Socket(STREAM, [1] * 100))))
    check(read(Replies(Socket(STREAM, [1] * len(STREAM)))))
    rng = random.Random(2)
    for _ in range(200):
        sizes = [rng.choice((1, 2, 3, 7, 1000, 16_383, 16_384, 50_000)) for _ in range(300)]
        check(read(Replies(Socket(STREAM, sizes))))


def test_a_stream_that_ends_is_told_wherever_it_ends() -> None:
    ends = [*range(60), 1000, 40_000, *range(len(STREAM) - 30, len(STREAM))]
    for end in ends:
        with pytest.raises(ConnectionError, match="closed the connection"):
            read(Replies(Socket(STREAM[:end], [])))


def test_what_is_longer_than_its_room_is_not_taken_in() -> None:
    for room, most in ((memoryview(bytearray(4)), 100), (None, 4)):
        with pytest.raises(TooLong, match="5 bytes"):
            Replies(Socket(b"$5\r\nhello\r\n", [])).value(room, most)
    with pytest.raises(TooLong):
        Replies(Socket(b"$99999999999\r\n", [])).value(None, 100)


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n", b"$\r\n", b"$-2\r\n", b"$1x\r\nx\r\n", b"$5\r\nhello!\r\n", b"*1\r\n$1\r\nx",
        b"$999999999999999\r\n", b"\r\n", b"$" + b"1" * 40_000, b"+OK\r\n", b"$ 5\r\nhello\r\n",
    ],
)  # fmt: skip
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Replies(Socket(data, [])).value(None, 100)
    with pytest.raises(ValueError):
        Replies(Socket(data, [])).number()
