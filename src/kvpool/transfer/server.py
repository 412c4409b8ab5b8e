"""The decode side's server, in threads. What it does with a chunk is the receiver's business."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from ..errors import CorruptEnvelope, InvalidArgument, KvPoolError, NotFound, PoolFull
from . import handover_pb2 as handover_pb
from . import kv_transfer_pb2 as pb
from ._chunk import decode_chunk
from .handover import Continue, Handover
from .limits import Ack, TransferRefused
from .receiver import KvReceiver, Push
from .settings import (
    HANDOVER,
    HEALTH,
    SERVICE,
    ServerTls,
    check_address,
    is_allowed,
    listen,
    log,
    server_options,
)

__all__ = ["KvServer"]

_SPARE_THREADS = 32  # for calls other than pushes
MAX_CHECKS = 16  # health checks in flight: half of those threads, since anybody may call it
CHECK_S = 5.0  # that a health check may be silent
_CODES: dict[type[Exception], str] = {
    NotFound: "NOT_FOUND",
    CorruptEnvelope: "DATA_LOSS",
    PoolFull: "RESOURCE_EXHAUSTED",
    MemoryError: "RESOURCE_EXHAUSTED",
    InvalidArgument: "INVALID_ARGUMENT",
}


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status and the text that a peer is told."""
    if isinstance(error, TransferRefused):
        return grpc.StatusCode[error.code], error.details
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return grpc.StatusCode[code], str(error)
    log.exception("a call failed", exc_info=error)
    return grpc.StatusCode.INTERNAL, type(error).__name__


def take_chunk(push: Push, data: bytes) -> Ack | None:
    """Reads a message and adds its chunk."""
    try:
        chunk = decode_chunk(data)
    except ValueError as error:
        push.abort("a malformed message")
        raise TransferRefused("INVALID_ARGUMENT", f"KvChunk: {error}") from error
    return push.add(chunk)


def parse(kind: Any, data: bytes | None) -> Any:
    """The one message of a call."""
    name = kind.DESCRIPTOR.name
    if data is None:
        raise TransferRefused("INVALID_ARGUMENT", f"{name}: the call has no message")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise TransferRefused("INVALID_ARGUMENT", f"{name}: {error}") from error


def has_blocks(receiver: KvReceiver, request: pb.HasBlocksRequest) -> pb.HasBlocksResponse:
    """The answer to HasBlocks."""
    present = receiver.has_blocks(request.block_hashes, request.kv_format)
    return pb.HasBlocksResponse(present=present.tolist())


def ack_message(ack: Ack) -> pb.KvAck:
    """An Ack as its message."""
    return pb.KvAck(**ack._asdict())


def set_serving(servicer: Any, serving: bool) -> None:
    """Tells the health service."""
    name = "SERVING" if serving else "NOT_SERVING"
    for service in ("", SERVICE):
        servicer.set(service, health_pb2.HealthCheckResponse.ServingStatus.Value(name))


def method_handlers(
    has_blocks: Any, push: Any, release: Any, check: Any, watch: Any, go_on: Any | None
) -> tuple[grpc.GenericRpcHandler, ...]:
    """What answers which call; without ``go_on`` there is no Continue.

    All are streams here, also those of one message, which look the same on the wire: gRPC then
    leaves the waiting to us.
    """
    services: dict[str, dict[str, Any]] = {
        SERVICE: {
            "HasBlocks": grpc.stream_unary_rpc_method_handler(
                has_blocks, None, pb.HasBlocksResponse.SerializeToString
            ),
            "PushKv": grpc.stream_unary_rpc_method_handler(push, None, pb.KvAck.SerializeToString),
            "Release": grpc.stream_unary_rpc_method_handler(
                release, None, pb.ReleaseResponse.SerializeToString
            ),
        },
        HEALTH: {
            "Check": grpc.stream_unary_rpc_method_handler(
                check, None, health_pb2.HealthCheckResponse.SerializeToString
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                watch,
                health_pb2.HealthCheckRequest.FromString,
                health_pb2.HealthCheckResponse.SerializeToString,
            ),
        },
    }
    if go_on is not None:
        services[HANDOVER] = {
            "Continue": grpc.stream_stream_rpc_method_handler(
                go_on, None, handover_pb.ContinueReply.SerializeToString
            )
        }
    return tuple(grpc.method_handlers_generic_handler(*item) for item in services.items())


class _Waiting:
    """The calls whose one message has not come yet. gRPC would wait for ever, each in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[grpc.ServicerContext, float] = {}

    def message(self, requests: Iterator[bytes], context: Any, for_s: float) -> bytes | None:
        """It; None if the call ends without one."""
        with self._lock:
            self._calls[context] = time.monotonic() + for_s
        try:
            return next(requests, None)
        finally:
            with self._lock:
                del self._calls[context]

    def expire(self) -> None:
        """Ends those that have waited too long."""
        with self._lock:
            late = [call for call, until in self._calls.items() if time.monotonic() >= until]
        for call in late:
            call.cancel()


class _Guard(grpc.ServerInterceptor):
    """Refuses calls without the token before a message of theirs is read. Health is for anybody."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        # A stream to stream handler: gRPC reads nothing for it before it runs.
        self._refuse: Any = grpc.stream_stream_rpc_method_handler(self._abort)

    @staticmethod
    def _abort(requests: Any, context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid bearer token")
        raise AssertionError  # abort raises

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.startswith(f"/{HEALTH}/") or is_allowed(
            self._token, details.invocation_metadata
        ):
            return continuation(details)
        return self._refuse


class KvServer:
    """Serves tl.kv.v1 for a receiver, with the gRPC health service beside it.

    Args:
        receiver: where pushes go. The server does not close it.
        address: "host:port", or "unix:/path"; port 0 takes a free one, ``.address`` tells it.
            Only this machine can connect unless it says otherwise.
        tls: certificate and key; with a client CA, mutual TLS.
        token: what each call has to carry as ``authorization: Bearer <token>``.
        insecure: allow an address that others can reach without TLS and without a token.
        handover: also serve kvpool.handover.v1: called with a `Handover` and the claimed Sequence,
            which it frees; yields `Answer` parts. Runs in a thread of the server.

    Starts at once. ``close``, or the end of a ``with`` block, ends it: pushes in flight are cut.

    Raises:
        InvalidArgument: an address that others can reach, and nothing to keep strangers out; an
            empty token.
        TransferError: the address cannot be listened on.

    Source: seed section 6 (L10.6); docs/transfer.md.
    """

    def __init__(
        self,
        receiver: KvReceiver,
        address: str = "127.0.0.1:0",
        *,
        tls: ServerTls | None = None,
        token: str | None = None,
        insecure: bool = False,
        handover: Continue | None = None,
    ) -> None:
        check_address(address, tls, token, insecure)
        self.receiver = receiver
        self._handover = handover
        n_threads = receiver.limits.max_pushes + _SPARE_THREADS
        self._server = grpc.server(
            futures.ThreadPoolExecutor(n_threads, thread_name_prefix="kvpool-transfer"),
            interceptors=[_Guard(token)],
            options=server_options(2 * n_threads),
            maximum_concurrent_rpcs=2 * n_threads,
        )
        self._waiting = _Waiting()
        self._checks = threading.BoundedSemaphore(MAX_CHECKS)
        self._health = health.HealthServicer()
        self._server.add_generic_rpc_handlers(
            method_handlers(
                self._answer(self._has_blocks),
                self._answer(self._push),
                self._answer(self._release),
                self._answer(self._check),
                self._health.Watch,  # waits without a thread
                self._continue if handover is not None else None,
            )
        )
        self.address = listen(self._server, address, tls)
        self._server.start()
        set_serving(self._health, True)
        self._stop = threading.Event()
        self._sweeper = threading.Thread(
            target=self._sweep, name="kvpool-transfer-sweep", daemon=True
        )
        self._sweeper.start()
        log.info("serving %s on %s", SERVICE, self.address)

    @staticmethod
    def _answer(behavior: Callable[[Any, grpc.ServicerContext], Any]) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behavior(request, context)
            except (KvPoolError, MemoryError) as error:
                context.abort(*status_of(error))

        return answer

    def _one(self, kind: Any, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        return parse(kind, self._waiting.message(messages, context, self.receiver.limits.idle_s))

    def _check(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        if not self._checks.acquire(blocking=False):
            raise TransferRefused("RESOURCE_EXHAUSTED", f"{MAX_CHECKS} health checks: the limit")
        try:
            data = self._waiting.message(messages, context, CHECK_S)
            return self._health.Check(parse(health_pb2.HealthCheckRequest, data), context)
        finally:
            self._checks.release()

    def _has_blocks(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        return has_blocks(self.receiver, self._one(pb.HasBlocksRequest, messages, context))

    def _push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> pb.KvAck:
        with self.receiver.begin(on_abort=context.cancel) as push:
            for data in messages:
                ack = take_chunk(push, data)
                if ack is not None:
                    return ack_message(ack)
        raise TransferRefused("INVALID_ARGUMENT", "the stream ended before the last block")

    def _release(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        self.receiver.release(self._one(pb.ReleaseRequest, messages, context).handle_id)
        return pb.ReleaseResponse()

    def _continue(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[handover_pb.ContinueReply]:
        assert self._handover is not None
        try:
            handover = Handover.of(self._one(handover_pb.ContinueRequest, messages, context))
            sequence = self.receiver.claim(handover.handle_id, handover.tokens, handover.namespace)
            with sequence, contextlib.ExitStack() as stack:
                answers = self._handover(handover, sequence)
                if hasattr(answers, "close"):  # a generator ends before its blocks go
                    stack.callback(answers.close)
                for answer in answers:
                    yield handover_pb.ContinueReply(tokens=answer.tokens, finish=answer.finish)
        except (KvPoolError, MemoryError) as error:
            context.abort(*status_of(error))

    def _sweep(self) -> None:
        limits = self.receiver.limits
        while not self._stop.wait(min(1.0, limits.ttl_s / 4, limits.idle_s / 4)):
            self._waiting.expire()
            try:
                self.receiver.expire()
            except Exception:  # of one push; the others still have to end with their time
                log.exception("what has waited too long could not be ended")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until ``close``, or so many seconds; True if it is closed."""
        return not self._server.wait_for_termination(timeout_s)

    def close(self, grace_s: float | None = None) -> None:
        """Takes no new call, and ends those there are after ``grace_s`` seconds, or now."""
        set_serving(self._health, False)
        self._server.stop(grace_s).wait()
        self._stop.set()
        self._sweeper.join()

    def __enter__(self) -> KvServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
