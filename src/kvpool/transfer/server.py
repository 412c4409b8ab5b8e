"""The decode side's server, in threads. What it does with a chunk is the receiver's business."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

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
    bound_address,
    cannot_listen,
    check_address,
    is_allowed,
    log,
    server_options,
)

__all__ = ["KvServer"]

_SPARE_THREADS = 16  # for calls other than pushes
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
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers(self._handlers())
        try:
            port = (
                self._server.add_insecure_port(address)
                if tls is None
                else self._server.add_secure_port(address, tls.credentials())
            )
        except RuntimeError as error:
            raise cannot_listen(address, error) from error
        if port == 0:
            raise cannot_listen(address)
        self.address = bound_address(address, port)
        self._server.start()
        set_serving(self._health, True)
        self._stop = threading.Event()
        self._sweeper = threading.Thread(
            target=self._sweep, name="kvpool-transfer-sweep", daemon=True
        )
        self._sweeper.start()
        log.info("serving %s on %s", SERVICE, self.address)

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        transfer: dict[str, Any] = {
            "HasBlocks": grpc.unary_unary_rpc_method_handler(
                self._answer(lambda request, _: has_blocks(self.receiver, request)),
                pb.HasBlocksRequest.FromString,
                pb.HasBlocksResponse.SerializeToString,
            ),
            "PushKv": grpc.stream_unary_rpc_method_handler(
                self._answer(self._push), None, pb.KvAck.SerializeToString
            ),
            "Release": grpc.unary_unary_rpc_method_handler(
                self._answer(self._release),
                pb.ReleaseRequest.FromString,
                pb.ReleaseResponse.SerializeToString,
            ),
        }
        found = [grpc.method_handlers_generic_handler(SERVICE, transfer)]
        if self._handover is not None:
            method = grpc.unary_stream_rpc_method_handler(
                self._continue,
                handover_pb.ContinueRequest.FromString,
                handover_pb.ContinueReply.SerializeToString,
            )
            found.append(grpc.method_handlers_generic_handler(HANDOVER, {"Continue": method}))
        return tuple(found)

    @staticmethod
    def _answer(behavior: Callable[[Any, grpc.ServicerContext], Any]) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return behavior(request, context)
            except (KvPoolError, MemoryError) as error:
                context.abort(*status_of(error))

        return answer

    def _push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> pb.KvAck:
        with self.receiver.begin(on_abort=context.cancel) as push:
            for data in messages:
                ack = take_chunk(push, data)
                if ack is not None:
                    return ack_message(ack)
        raise TransferRefused("INVALID_ARGUMENT", "the stream ended before the last block")

    def _release(self, request: pb.ReleaseRequest, _: Any) -> pb.ReleaseResponse:
        self.receiver.release(request.handle_id)
        return pb.ReleaseResponse()

    def _continue(
        self, request: handover_pb.ContinueRequest, context: grpc.ServicerContext
    ) -> Iterator[handover_pb.ContinueReply]:
        assert self._handover is not None
        try:
            handover = Handover.of(request)
            sequence = self.receiver.claim(handover.handle_id, handover.tokens, handover.namespace)
            with sequence, contextlib.closing(self._handover(handover, sequence)) as answers:  # type: ignore[type-var]
                for answer in answers:
                    yield handover_pb.ContinueReply(tokens=answer.tokens, finish=answer.finish)
        except (KvPoolError, MemoryError) as error:
            context.abort(*status_of(error))

    def _sweep(self) -> None:
        limits = self.receiver.limits
        while not self._stop.wait(min(1.0, limits.ttl_s / 4, limits.idle_s / 4)):
            self.receiver.expire()

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
