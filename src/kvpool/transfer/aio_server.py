"""The same server for asyncio: a push costs a task and not a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ..errors import KvPoolError
from . import handover_pb2 as handover_pb
from . import kv_transfer_pb2 as pb
from .handover import Answer, Handover
from .limits import TransferRefused
from .receiver import KvReceiver
from .server import ack_message, has_blocks, status_of, take_chunk
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

__all__ = ["AioKvServer"]

#: Like `Continue` for threads, but an asynchronous generator.
AioContinue = Callable[[Handover, Any], AsyncIterator[Answer]]
_END: Any = grpc.aio.EOF


class _Guard(grpc.aio.ServerInterceptor):
    """See server._Guard."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._refuse: Any = grpc.stream_stream_rpc_method_handler(self._abort)

    @staticmethod
    async def _abort(requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid bearer token")

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        if details.method.startswith(f"/{HEALTH}/") or is_allowed(
            self._token, details.invocation_metadata
        ):
            return await continuation(details)
        return self._refuse


class AioKvServer:
    """``KvServer`` for asyncio: the same arguments and errors; ``start`` and ``close`` are awaited.

    ``async with AioKvServer(receiver) as server`` does both. A chunk is imported in the event loop,
    which takes about 0.1 ms for 1 MiB. ``handover`` is an asynchronous generator function.
    """

    def __init__(
        self,
        receiver: KvReceiver,
        address: str = "127.0.0.1:0",
        *,
        tls: ServerTls | None = None,
        token: str | None = None,
        insecure: bool = False,
        handover: AioContinue | None = None,
    ) -> None:
        check_address(address, tls, token, insecure)
        self.receiver, self.address = receiver, address
        self._tls, self._token, self._handover = tls, token, handover
        self._server: Any = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens; ``.address`` has the port from now on.

        Raises:
            TransferError: the address cannot be listened on.
        """
        n_calls = 2 * self.receiver.limits.max_pushes + 32
        self._server = grpc.aio.server(
            interceptors=(_Guard(self._token),),
            options=server_options(n_calls),
            maximum_concurrent_rpcs=n_calls,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers(self._handlers())
        try:
            port = (
                self._server.add_insecure_port(self.address)
                if self._tls is None
                else self._server.add_secure_port(self.address, self._tls.credentials())
            )
        except RuntimeError as error:
            raise cannot_listen(self.address, error) from error
        if port == 0:
            raise cannot_listen(self.address)
        self.address = bound_address(self.address, port)
        await self._server.start()
        await self._set_serving(True)
        self._sweeper = asyncio.create_task(self._sweep())
        log.info("serving %s on %s", SERVICE, self.address)

    async def _set_serving(self, serving: bool) -> None:
        name = "SERVING" if serving else "NOT_SERVING"
        for service in ("", SERVICE):
            await self._health.set(
                service, health_pb2.HealthCheckResponse.ServingStatus.Value(name)
            )

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        transfer: dict[str, Any] = {
            "HasBlocks": grpc.unary_unary_rpc_method_handler(
                self._has_blocks,
                pb.HasBlocksRequest.FromString,
                pb.HasBlocksResponse.SerializeToString,
            ),
            "PushKv": grpc.stream_unary_rpc_method_handler(
                self._push, None, pb.KvAck.SerializeToString
            ),
            "Release": grpc.unary_unary_rpc_method_handler(
                self._release, pb.ReleaseRequest.FromString, pb.ReleaseResponse.SerializeToString
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

    async def _has_blocks(self, request: pb.HasBlocksRequest, context: Any) -> Any:
        try:
            return has_blocks(self.receiver, request)
        except KvPoolError as error:
            await context.abort(*status_of(error))

    async def _push(self, requests: Any, context: Any) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        told = False

        def on_abort() -> None:  # from the sweeper, or from a thread that released the handle
            nonlocal told
            told = True
            loop.call_soon_threadsafe(task.cancel)

        try:
            with self.receiver.begin(on_abort) as push:
                try:
                    while (data := await context.read()) is not _END:
                        ack = take_chunk(push, data)
                        if ack is not None:
                            return ack_message(ack)
                except asyncio.CancelledError:
                    if not told:
                        raise  # the caller has gone
                    raise TransferRefused(
                        "CANCELLED", f"the push has ended: {push.ended}"
                    ) from None
            raise TransferRefused("INVALID_ARGUMENT", "the stream ended before the last block")
        except (KvPoolError, MemoryError) as error:
            await context.abort(*status_of(error))

    async def _release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self.receiver.release(request.handle_id)
        return pb.ReleaseResponse()

    async def _continue(self, request: handover_pb.ContinueRequest, context: Any) -> Any:
        assert self._handover is not None
        try:
            handover = Handover.of(request)
            sequence = self.receiver.claim(handover.handle_id, handover.tokens, handover.namespace)
            with sequence:
                async for answer in self._handover(handover, sequence):
                    yield handover_pb.ContinueReply(tokens=answer.tokens, finish=answer.finish)
        except (KvPoolError, MemoryError) as error:
            await context.abort(*status_of(error))

    async def _sweep(self) -> None:
        limits = self.receiver.limits
        while True:
            await asyncio.sleep(min(1.0, limits.ttl_s / 4, limits.idle_s / 4))
            self.receiver.expire()

    async def close(self, grace_s: float | None = None) -> None:
        """Takes no new call, and ends those there are after ``grace_s`` seconds, or now."""
        if self._server is None:
            return
        await self._set_serving(False)
        await self._server.stop(grace_s)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper

    async def __aenter__(self) -> AioKvServer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
