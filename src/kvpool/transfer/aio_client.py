"""The same client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc

from .. import Sequence
from . import kv_transfer_pb2 as pb
from .client import Attempt, Course, Tally, check_ack, check_present, methods, refused
from .handover import Answer, Handover
from .limits import KV_FORMAT, TransferRefused, TransferStats
from .sender import check_handle, check_names
from .settings import ClientSettings, ClientTls, PushResult, token_metadata

__all__ = ["AioKvClient"]


class AioKvClient:
    """``KvClient`` for asyncio: the same arguments, results and errors.

    A block is exported in the event loop, which takes about 0.1 ms for 1 MiB. A push that is
    cancelled leaves nothing behind, here or on the other side. Make it inside a running loop.
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
            grpc.aio.insecure_channel(target, options)
            if tls is None
            else grpc.aio.secure_channel(target, tls.credentials(), options)
        )
        self._has_blocks, self._push, self._release, self._continue = methods(self._channel)

    @property
    def stats(self) -> TransferStats:
        """What this client has sent, failed pushes as far as they came."""
        return self._tally.stats

    async def has_blocks(self, hashes: Iterable[int]) -> list[bool]:
        """See ``KvClient.has_blocks``."""
        return await self._ask(check_names(hashes), self.settings.rpc_timeout_s)

    async def _ask(self, names: list[int], left_s: float) -> list[bool]:
        if not names:
            return []
        request = pb.HasBlocksRequest(block_hashes=names, kv_format=KV_FORMAT)
        return check_present(await self._call(self._has_blocks, request, left_s), names)

    async def release(self, handle_id: str) -> None:
        """See ``KvClient.release``."""
        check_handle(handle_id)
        await self._call(self._release, pb.ReleaseRequest(handle_id=handle_id))

    async def push(
        self, seq: Sequence, *, handle_id: str | None = None, keep: bool = False
    ) -> PushResult:
        """See ``KvClient.push``."""
        try:
            with seq.fork() as held:
                return await self._push_sequence(held, check_handle(handle_id))
        finally:
            if not keep and not seq.is_freed:
                seq.free()

    async def _push_sequence(self, seq: Sequence, handle_id: str) -> PushResult:
        course = Course(seq, handle_id, self.settings, self._tally)
        while True:
            attempt = None
            try:
                present = course.present
                if present is None:
                    present = await self._ask(course.plan.full, course.left_s())
                attempt = course.attempt(present)
                await self._stream(attempt, handle_id, course.left_s())
            except TransferRefused as error:
                pause = course.after(error)
                if attempt is not None and course.is_uncertain:
                    with contextlib.suppress(TransferRefused):
                        await self.release(handle_id)
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            except BaseException:  # cancelled, or a block could not be read
                if attempt is not None:  # its last chunk may have been taken
                    with contextlib.suppress(TransferRefused):
                        await self.release(handle_id)
                raise
            else:
                return course.result(attempt)

    async def _stream(self, attempt: Attempt, handle_id: str, timeout_s: float) -> None:
        async def taken() -> AsyncIterator[bytes]:
            for data in attempt:
                yield data

        try:
            ack = await self._push(taken(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise attempt.failure(error) from error
        finally:
            attempt.stop()
        check_ack(ack, handle_id, attempt.n_sent, attempt.n_deduped)

    async def hand_over(
        self, request: Handover, timeout_s: float | None = None
    ) -> AsyncIterator[Answer]:
        """See ``KvClient.hand_over``."""
        call = self._continue(request.to_message(), timeout=timeout_s, metadata=self._metadata)
        try:
            async for reply in call:
                yield Answer(list(reply.tokens), reply.finish)
        except grpc.RpcError as error:
            raise refused(error) from error
        finally:
            call.cancel()

    async def _call(self, method: Any, request: Any, left_s: float = math.inf) -> Any:
        timeout_s = min(self.settings.rpc_timeout_s, left_s)
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise refused(error) from error

    async def close(self) -> None:
        """Ends the connection; calls in flight fail."""
        await self._channel.close()

    async def __aenter__(self) -> AioKvClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
