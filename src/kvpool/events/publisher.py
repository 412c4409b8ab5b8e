"""Batches out over ZMQ: PUB for everybody, ROUTER for who has missed some."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from ..errors import InvalidArgument
from .encoder import EventEncoder, Record
from .wire import END, KVEvent, KVEventBatch

__all__ = ["KVEventPublisher", "import_zmq"]


class _Drained(Protocol):
    def drain_events(self) -> Iterable[Record]: ...


def import_zmq() -> Any:
    try:
        import zmq
    except ImportError as error:  # pragma: no cover
        raise ImportError(
            "KVEventPublisher and KVEventSubscriber need pyzmq: pip install 'kvpool[events]'"
        ) from error
    return zmq


class KVEventPublisher:
    """Publishes batches of events, and repeats those a subscriber has missed.

    Args:
        endpoint: where subscribers connect, PUB. Port 0 takes a free one; ``.endpoint`` tells it.
        replay_endpoint: where they ask for batches again, ROUTER; None for no replay. A request is
            an empty frame and a number (8 bytes, big-endian); the answer is every batch kept from
            that number on, as ``empty | topic | number | payload``, and one whose number is -1.
        topic: the first frame of each message.
        keep: batches kept for replay.
        high_water_mark: messages a slow subscriber may fall behind before it loses some.
        encoder: turns records into events; needed by `pump`.
        data_parallel_rank: put into every batch.

    A message is handed to ZMQ before `publish` returns; sending never waits for a subscriber. Any
    thread may publish: a lock keeps the order of numbers the order of batches. Close it, or use it
    in a ``with`` block.

    Raises ``zmq.ZMQError`` when an endpoint cannot be bound, ``ImportError`` without pyzmq.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        keep: int = 10_000,
        high_water_mark: int = 100_000,
        encoder: EventEncoder | None = None,
        data_parallel_rank: int | None = None,
    ) -> None:
        if keep < 0 or high_water_mark < 0:
            raise InvalidArgument("KVEventPublisher: keep and high_water_mark cannot be negative")
        zmq = import_zmq()
        context = zmq.Context.instance()
        self._encoder = encoder
        self._rank = data_parallel_rank
        self._topic = topic.encode()
        self._pack = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._next = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self.replay_endpoint: str | None = None
        self._pub: Any = context.socket(zmq.PUB)
        try:
            self._pub.set_hwm(high_water_mark)
            self.endpoint: str = _bind(self._pub, endpoint)
            if replay_endpoint is not None:
                self._start_replay(zmq, context, replay_endpoint, keep)
        except BaseException:
            self._pub.close(linger=0)
            raise

    def _start_replay(self, zmq: Any, context: Any, endpoint: str, keep: int) -> None:
        router = context.socket(zmq.ROUTER)
        try:
            # A whole replay and its end fit; peers acknowledge only every half mark, hence twice.
            router.setsockopt(zmq.SNDHWM, 2 * (keep + 1))
            self.replay_endpoint = _bind(router, endpoint)
        except BaseException:
            router.close(linger=0)
            raise
        wake = f"inproc://kvpool-events-{id(self)}"
        self._stop = context.socket(zmq.PAIR)
        self._stop.bind(wake)
        stopped = context.socket(zmq.PAIR)
        stopped.connect(wake)
        self._thread = threading.Thread(
            target=self._replay, args=(zmq, router, stopped), name="kvpool-events", daemon=True
        )
        self._thread.start()

    def publish(self, events: Iterable[KVEvent], ts: float | None = None) -> int | None:
        """Sends one batch and returns its number; None, and nothing is sent, for no events."""
        with self._lock:
            return self._publish(list(events), ts)

    def pump(self, manager: _Drained) -> int:
        """Sends what the manager has recorded since the last call, as one batch: how many events.

        Raises InvalidArgument without an encoder, and what ``drain_events`` raises.
        """
        if self._encoder is None:
            raise InvalidArgument("KVEventPublisher.pump: made without an encoder")
        with self._lock:
            self._check_open()
            events = self._encoder.encode(manager.drain_events())
            self._publish(events, None)
        return len(events)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("KVEventPublisher: closed")

    def _publish(self, events: list[KVEvent], ts: float | None) -> int | None:
        self._check_open()
        if not events:
            return None
        batch = KVEventBatch(time.time() if ts is None else ts, events, self._rank)
        payload = self._pack.encode(batch)
        number = self._next
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._next += 1
        self._kept.append((number, payload))
        return number

    def _replay(self, zmq: Any, router: Any, stopped: Any) -> None:
        """The thread that owns the ROUTER socket."""
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        while stopped not in dict(poller.poll()):
            client, *request = router.recv_multipart()
            batches: list[tuple[int, bytes]] = []
            if len(request) == 2 and len(request[1]) == 8:  # anything else gets the end alone
                start = int.from_bytes(request[1], "big")
                with self._lock:
                    first = self._next - len(self._kept)
                    batches = list(itertools.islice(self._kept, max(0, start - first), None))
            for number, payload in batches:
                router.send_multipart(
                    (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                )
            router.send_multipart((client, b"", b"", END, b""))
        router.close(linger=0)
        stopped.close(linger=0)

    def close(self) -> None:
        """Ends the replay and closes the sockets; messages on their way get a second to leave."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._pub.close(linger=1000)
        if self._thread is not None:
            self._stop.send(b"")
            self._thread.join()
            self._stop.close(linger=0)

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _bind(socket: Any, endpoint: str) -> str:
    """Binds and returns where: with the port that was free, if any would do."""
    socket.bind(endpoint[:-1] + "*" if endpoint.endswith(":0") else endpoint)
    return str(socket.last_endpoint.decode())
