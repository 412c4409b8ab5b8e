"""The prefill side's client: one call pushes a sequence, whatever happens on the way."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import grpc

from .. import Sequence
from ..errors import InvalidArgument
from . import handover_pb2 as handover_pb
from . import kv_transfer_pb2 as pb
from .handover import Answer, Handover
from .limits import KV_FORMAT, TransferRefused, TransferStats
from .sender import Plan, check_handle, check_names, messages
from .settings import HANDOVER, SERVICE, ClientSettings, ClientTls, PushResult, token_metadata

__all__ = ["KvClient", "push"]


def refused(error: grpc.RpcError) -> TransferRefused:
    """A failed call as the exception that users see."""
    call: Any = error  # a grpc.Call, or grpc.aio's AioRpcError, which is none
    return TransferRefused(call.code().name, call.details() or "")


def check_ack(ack: pb.KvAck, handle_id: str, n_sent: int, n_deduped: int) -> None:
    """The other side must have understood what was sent."""
    found = (ack.handle_id, ack.blocks_received, ack.blocks_deduped)
    if found != (handle_id, n_sent, n_deduped):
        raise TransferRefused(
            "INTERNAL", f"the ack says {found}, expected {(handle_id, n_sent, n_deduped)}"
        )


class Tally:
    """What a client has sent, over all its pushes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = TransferStats()

    def add(self, **counts: int) -> None:
        with self._lock:
            stats = self._stats
            self._stats = stats._replace(**{k: getattr(stats, k) + n for k, n in counts.items()})

    @property
    def stats(self) -> TransferStats:
        with self._lock:
            return self._stats


class Attempt:
    """One stream of a push: its messages, counted as gRPC takes them.

    gRPC takes them in a thread of its own, which may still ask for one after the call has failed;
    ``stop`` keeps it away from the sequence. Of an exception there gRPC tells only that there was
    one: it is kept, and the stream ends before its last block, which the other side refuses.
    """

    def __init__(
        self, handle_id: str, seq: Sequence, plan: Plan, present: list[bool], tally: Tally
    ) -> None:
        self.n_sent = self.n_deduped = self.n_bytes = 0
        self._messages = messages(handle_id, seq, plan, present)
        self._tally = tally
        self._lock = threading.Lock()
        self._stopped = False
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            if self._stopped:
                raise StopIteration
            try:
                data, n_bytes = next(self._messages)
            except StopIteration:
                raise
            except Exception as error:
                self._stopped, self._error = True, error
                raise StopIteration from None
        self.n_bytes += n_bytes
        if n_bytes:
            self.n_sent += 1
        else:
            self.n_deduped += 1
        self._tally.add(bytes=n_bytes, **{"blocks_sent" if n_bytes else "blocks_deduped": 1})
        return data

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def failure(self, error: grpc.RpcError) -> Exception:
        """Why its call failed: what happened here, or what the other side says."""
        if self._error is None:
            return refused(error)
        self._tally.add(failed=1)
        return self._error


#: After these a push may be held by the other side, although this one has no ack.
UNCERTAIN = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "UNKNOWN")


def check_present(response: pb.HasBlocksResponse, names: list[int]) -> list[bool]:
    """The answers, one for each name."""
    present = list(response.present)
    if len(present) != len(names):
        raise TransferRefused(
            "INTERNAL", f"HasBlocks: {len(present)} answers to {len(names)} names"
        )
    return present


class Course:
    """How a push goes on after each attempt; the clients differ only in how they wait."""

    def __init__(
        self, seq: Sequence, handle_id: str, settings: ClientSettings, tally: Tally
    ) -> None:
        self.plan = Plan.of(seq)
        self.present: list[bool] | None = None  # not asked yet
        self.is_uncertain = False  # the other side may hold the handle: release it
        self._seq, self._handle_id = seq, handle_id
        self._settings, self._tally = settings, tally
        self._deadline = time.monotonic() + settings.push_timeout_s
        self._attempts: list[Attempt] = []
        self._pause = settings.backoff_s
        self._n_failed = 0
        self._resent = False

    def left_s(self) -> float:
        """Seconds until the deadline, above 0 because gRPC asks for that."""
        return max(self._deadline - time.monotonic(), 0.001)

    def attempt(self, present: list[bool]) -> Attempt:
        """The next stream, without the payloads of what is present."""
        attempt = Attempt(self._handle_id, self._seq, self.plan, present, self._tally)
        self._attempts.append(attempt)
        return attempt

    def after(self, error: TransferRefused) -> float | None:
        """Seconds to wait before another attempt; None: this error is final."""
        if error.code == "NOT_FOUND" and not self._resent:
            self.present, self._resent = [], True  # a block has gone: all with their payloads
            return 0.0
        # In use by an attempt of ours, which the other side has not given up yet?
        ours = error.code == "ALREADY_EXISTS" and self._n_failed > 0
        self.is_uncertain = error.code in UNCERTAIN or ours
        self._n_failed += 1
        pause = self._pause * random.uniform(0.8, 1.2)
        if (
            (error.code == "UNAVAILABLE" or ours)
            and self._n_failed < self._settings.max_attempts
            and pause < self.left_s()
        ):
            self._pause = min(2 * self._pause, self._settings.max_backoff_s)
            self.present = [] if self._resent else None  # another process may answer now
            return pause
        self._tally.add(failed=1)
        return None

    def result(self, last: Attempt) -> PushResult:
        """Of a push whose last attempt was acknowledged."""
        self._tally.add(pushes=1)
        n_bytes = sum(attempt.n_bytes for attempt in self._attempts)
        return PushResult(
            self._handle_id, len(self.plan.names), last.n_sent, last.n_deduped, n_bytes,
            len(self._attempts),
        )  # fmt: skip


def methods(channel: Any) -> tuple[Any, Any, Any, Any]:
    """HasBlocks, PushKv (its messages come as bytes), Release and Continue of a channel."""
    method = f"/{SERVICE}/"
    return (
        channel.unary_unary(
            method + "HasBlocks",
            pb.HasBlocksRequest.SerializeToString,
            pb.HasBlocksResponse.FromString,
        ),
        channel.stream_unary(method + "PushKv", None, pb.KvAck.FromString),
        channel.unary_unary(
            method + "Release", pb.ReleaseRequest.SerializeToString, pb.ReleaseResponse.FromString
        ),
        channel.unary_stream(
            f"/{HANDOVER}/Continue",
            handover_pb.ContinueRequest.SerializeToString,
            handover_pb.ContinueReply.FromString,
        ),
    )


class KvClient:
    """A connection to one decode side.

    Args:
        target: "host:port", or "unix:/path".
        tls: what to trust; None for a connection in clear.
        token: the bearer token that the server asks for.
        settings: deadlines, retries, keepalive.

    Any thread may use it; pushes may run side by side. Nothing connects before the first call.
    ``close``, or the end of a ``with`` block, ends it.

    Source: seed section 6 (L10.6); docs/transfer.md.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        self.target = target
        self.settings = settings if settings is not None else ClientSettings()
        self._metadata = token_metadata(token)
        self._tally = Tally()
        options = self.settings.channel_options(tls)
        self._channel = (
            grpc.insecure_channel(target, options)
            if tls is None
            else grpc.secure_channel(target, tls.credentials(), options)
        )
        self._has_blocks, self._push, self._release, self._continue = methods(self._channel)

    @property
    def stats(self) -> TransferStats:
        """What this client has sent, failed pushes as far as they came."""
        return self._tally.stats

    def has_blocks(self, hashes: Iterable[int]) -> list[bool]:
        """Which of these names the other side could take from its cache now.

        Raises:
            TransferRefused: the call failed, or the answer has another length.
            InvalidArgument: a name is no integer of 64 bits.
        """
        return self._ask(check_names(hashes), self.settings.rpc_timeout_s)

    def _ask(self, names: list[int], left_s: float) -> list[bool]:
        if not names:
            return []
        request = pb.HasBlocksRequest(block_hashes=names, kv_format=KV_FORMAT)
        return check_present(self._call(self._has_blocks, request, left_s), names)

    def release(self, handle_id: str) -> None:
        """Lets go of a handle on the other side; an unknown one is no error.

        Raises:
            TransferRefused: the call failed.
            InvalidArgument: a handle cannot be like that.
        """
        check_handle(handle_id)
        self._call(self._release, pb.ReleaseRequest(handle_id=handle_id))

    def push(
        self, seq: Sequence, *, handle_id: str | None = None, keep: bool = False
    ) -> PushResult:
        """Sends what is computed of a sequence; the other side then holds it under a handle.

        Asks for all names in one HasBlocks, sends the blocks that are missing and the partial tail.
        When a block has gone meanwhile (NOT_FOUND), everything is sent once more, with payloads, in
        a new stream. On UNAVAILABLE the handle is released and the push tried again, as the
        settings say.

        Args:
            seq: its full blocks travel under their names in ``seq.namespace``. It is freed, whether
                this returns or raises.
            handle_id: 1 to 128 printable characters, new to the other side; None makes one up.
            keep: leave the sequence to the caller instead.

        Raises:
            TransferRefused: with the status of the call that failed; docs/transfer.md lists them.
                Nothing is held on the other side, or it ends with its time to live.
            InvalidArgument: nothing is computed, or a handle cannot be like that.
        """
        try:
            with seq.fork() as held:  # what the caller does to its own does not matter here
                return self._push_sequence(held, check_handle(handle_id))
        finally:
            if not keep and not seq.is_freed:
                seq.free()

    def _push_sequence(self, seq: Sequence, handle_id: str) -> PushResult:
        course = Course(seq, handle_id, self.settings, self._tally)
        while True:
            attempt = None
            try:
                present = course.present
                if present is None:
                    present = self._ask(course.plan.full, course.left_s())
                attempt = course.attempt(present)
                self._stream(attempt, handle_id, course.left_s())
            except TransferRefused as error:
                pause = course.after(error)
                if attempt is not None and course.is_uncertain:
                    with contextlib.suppress(TransferRefused):  # then its time to live ends it
                        self.release(handle_id)
                if pause is None:
                    raise
                time.sleep(pause)
            except BaseException:  # interrupted, or a block could not be read
                if attempt is not None:  # its last chunk may have been taken
                    with contextlib.suppress(TransferRefused):
                        self.release(handle_id)
                raise
            else:
                return course.result(attempt)

    def _stream(self, attempt: Attempt, handle_id: str, timeout_s: float) -> None:
        try:
            ack = self._push(attempt, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise attempt.failure(error) from error
        finally:
            attempt.stop()
        check_ack(ack, handle_id, attempt.n_sent, attempt.n_deduped)

    def hand_over(self, request: Handover, timeout_s: float | None = None) -> Iterator[Answer]:
        """The answer of the decode side to a pushed request, part by part.

        Raises:
            TransferRefused: NOT_FOUND for a handle that is gone, DATA_LOSS for tokens that the
                blocks are not of, UNIMPLEMENTED where nobody generates, or what the engine says.
        """
        call = self._continue(request.to_message(), timeout=timeout_s, metadata=self._metadata)
        try:
            for reply in call:
                yield Answer(list(reply.tokens), reply.finish)
        except grpc.RpcError as error:
            raise refused(error) from error
        finally:
            call.cancel()

    def _call(self, method: Any, request: Any, left_s: float = math.inf) -> Any:
        timeout_s = min(self.settings.rpc_timeout_s, left_s)
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise refused(error) from error

    def close(self) -> None:
        """Ends the connection; calls in flight fail."""
        self._channel.close()

    def __enter__(self) -> KvClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def push(target: str | KvClient, seq: Sequence, **options: Any) -> PushResult:
    """``KvClient.push`` to a target, by way of a connection for this one push.

    ``options``: ``handle_id`` and ``keep`` of ``KvClient.push``; ``tls``, ``token`` and
    ``settings`` of ``KvClient``, where ``target`` is none already.

    >>> import kvpool
    >>> from kvpool.transfer import KvReceiver, KvServer, push
    >>> a, b = [kvpool.BlockManager(kvpool.Pool(8, block_tokens=4, n_layers=2, n_kv_heads=1,
    ...                                         head_dim=4)) for _ in "ab"]
    >>> receiver = KvReceiver(b)
    >>> with KvServer(receiver) as server:
    ...     seq = a.allocate(range(9)); seq.commit()
    ...     result = push(server.address, seq)
    >>> result.blocks_sent, result.bytes_sent
    (3, 516)
    >>> receiver.claim(result.handle_id, list(range(9))).free()
    """
    mine = {name: options.pop(name) for name in ("handle_id", "keep") if name in options}
    if isinstance(target, KvClient):
        if options:
            raise InvalidArgument(f"push: {', '.join(options)}: the client has its own")
        return target.push(seq, **mine)
    try:
        client = KvClient(target, **options)
    except BaseException:
        if not mine.get("keep") and not seq.is_freed:
            seq.free()
        raise
    with client:
        return client.push(seq, **mine)
