"""A decode side or a prefill side as a process of its own, for the tests that kill it.

transfer_process.py decode PORT          serves; says its address, then answers lines of stdin:
                                         stats, check, claim HANDLE N, release HANDLE
transfer_process.py prefill TARGET N     pushes N blocks for ever, slowly; a dot for each chunk
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from transfer_support import Side

from kvpool.transfer import KvClient, KvReceiver, KvServer, Limits
from kvpool.transfer import client as client_module


def decode(port: str) -> None:
    side = Side(64)
    receiver = KvReceiver(side.manager, limits=Limits(max_pushes=64))
    with KvServer(receiver, f"127.0.0.1:{port}") as server:
        print(server.address, flush=True)
        for line in sys.stdin:
            name, *args = line.split()
            answer: Any = None
            if name == "stats":
                answer = [*side.pool.stats[:3], receiver.stats._asdict()]
            elif name == "check":
                side.manager.check()
            elif name == "claim":
                tokens = list(range(int(args[1])))
                with receiver.claim(args[0], tokens) as seq:
                    answer = side.holds(seq, tokens)
            elif name == "release":
                answer = receiver.release(args[0])
            print(json.dumps(answer), flush=True)


def prefill(target: str, n_blocks: str) -> None:
    real = client_module.messages

    def slowly(*args: Any) -> Iterator[tuple[bytes, int]]:
        for message in real(*args):
            yield message
            print(".", end="", flush=True)
            time.sleep(0.02)

    client_module.messages = slowly
    side = Side(256)
    tokens = list(range(int(n_blocks) * side.pool.block_tokens))
    with KvClient(target) as client:
        while True:
            client.push(side.prefill(tokens))


if __name__ == "__main__":
    {"decode": decode, "prefill": prefill}[sys.argv[1]](*sys.argv[2:])
