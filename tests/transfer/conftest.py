"""Sides, and a server between them: when a test is over, nobody holds a block any more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transfer_support import Side, eventually

from kvpool.transfer import KvReceiver


@pytest.fixture
def make_side() -> Iterator[Callable[..., Side]]:
    """Makes sides. At the end no block of theirs is used, and all three structures agree."""
    sides: list[Side] = []

    def make(n_blocks: int = 64, **options: Any) -> Side:
        sides.append(Side(n_blocks, **options))
        return sides[-1]

    yield make
    for side in sides:
        if not side.pool.closed:
            eventually(lambda s=side: s.pool.stats.used == 0, f"held: {side.pool.stats}")
            side.manager.check()
            side.pool.check()


@pytest.fixture
def make_receiver(make_side: Callable[..., Side]) -> Iterator[Callable[..., KvReceiver]]:
    """Makes receivers. At the end they are closed, and their accounts are even."""
    receivers: list[KvReceiver] = []

    def make(side: Side, **options: Any) -> KvReceiver:
        receivers.append(KvReceiver(side.manager, **options))
        return receivers[-1]

    yield make
    for receiver in receivers:
        receiver.close()
        eventually(lambda r=receiver: r.stats.held_blocks == 0, f"{receiver.stats}")
        assert receiver.stats.n_pushing == receiver.stats.n_pending == 0


@pytest.fixture
def prefill(make_side: Callable[..., Side]) -> Side:
    return make_side()


@pytest.fixture
def decode(make_side: Callable[..., Side]) -> Side:
    return make_side()


@pytest.fixture
def receiver(decode: Side, make_receiver: Callable[..., KvReceiver]) -> KvReceiver:
    return make_receiver(decode)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Servers and clients of a test: closed before the receivers and the pools are looked at."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def make_server(
    make_receiver: Callable[..., KvReceiver], stack: contextlib.ExitStack
) -> Callable[..., Any]:
    """A KvServer for a receiver, closed at the end."""
    pytest.importorskip("grpc", reason="needs kvpool[transfer]")
    from kvpool.transfer import KvServer

    return lambda receiver, *args, **options: stack.enter_context(
        KvServer(receiver, *args, **options)
    )


@pytest.fixture
def make_client(stack: contextlib.ExitStack) -> Callable[..., Any]:
    """A KvClient, closed at the end."""
    pytest.importorskip("grpc", reason="needs kvpool[transfer]")
    from kvpool.transfer import KvClient

    return lambda target, **options: stack.enter_context(KvClient(target, **options))


@pytest.fixture
def loop(stack: contextlib.ExitStack) -> Any:
    pytest.importorskip("grpc", reason="needs kvpool[transfer]")
    from transfer_aio import InLoop

    loop = InLoop()
    stack.callback(loop.close)
    return loop


@pytest.fixture(params=["threads", "asyncio"])
def serve(
    request: pytest.FixtureRequest, stack: contextlib.ExitStack, loop: Any
) -> Callable[..., Any]:
    """Starts a server of one kind or the other."""

    def start(receiver: KvReceiver, *args: Any, **options: Any) -> Any:
        if request.param == "threads":
            from kvpool.transfer import KvServer

            return stack.enter_context(KvServer(receiver, *args, **options))
        if "handover" in options:
            generate = options["handover"]

            async def generate_async(handover: Any, seq: Any) -> Any:
                for answer in generate(handover, seq):
                    yield answer

            options["handover"] = generate_async
        from kvpool.transfer import AioKvServer

        server = AioKvServer(receiver, *args, **options)
        loop.run(server.start())
        stack.callback(lambda: loop.run(server.close()))
        return server

    return start


@pytest.fixture(params=["threads", "asyncio"])
def connect(
    request: pytest.FixtureRequest, stack: contextlib.ExitStack, loop: Any
) -> Callable[..., Any]:
    """Connects with a client of one kind or the other."""

    def start(target: str, **options: Any) -> Any:
        if request.param == "threads":
            from kvpool.transfer import KvClient

            return stack.enter_context(KvClient(target, **options))
        from transfer_aio import AioClientInThread

        client = AioClientInThread(loop, target, **options)
        stack.callback(client.close)
        return client

    return start
