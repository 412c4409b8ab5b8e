"""An asyncio client and server for tests that have no loop: the same calls as the threaded ones."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from kvpool.transfer import AioKvClient, Handover
from kvpool.transfer.handover import Answer

__all__ = ["AioClientInThread", "InLoop"]


class InLoop:
    """An asyncio server or client that is used from a thread without a loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class AioClientInThread:
    def __init__(self, loop: InLoop, target: str, **options: Any) -> None:
        self.loop = loop

        async def make() -> AioKvClient:
            return AioKvClient(target, **options)

        self.client = loop.run(make())

    @property
    def stats(self) -> Any:
        return self.client.stats

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.loop.run(getattr(self.client, name)(*args, **options))

    def hand_over(self, request: Handover) -> list[Answer]:
        async def collect() -> list[Answer]:
            return [answer async for answer in self.client.hand_over(request)]

        result: list[Answer] = self.loop.run(collect())
        return result
