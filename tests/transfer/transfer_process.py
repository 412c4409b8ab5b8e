"""A decode side or a prefill side as a process of its own, for the tests that kill it.

transfer_process.py decode PORT          serves; says its address, then answers lines of stdin:
                                         stats, check, claim HANDLE N, release HANDLE
transfer_process.py prefill TARGET N     pushes N blocks for ever, slowly; a dot for each chunk
"""

from __future__ import annotations

import json
import os
import signal
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


def prefill(target: str, n_blocks: int, dots: int) -> None:
    real = client_module.messages

    def slowly(*args: Any) -> Iterator[tuple[bytes, int]]:
        for message in real(*args):
            yield message
            os.write(dots, b".")
            time.sleep(0.02)

    client_module.messages = slowly
    side = Side(256)
    tokens = list(range(n_blocks * side.pool.block_tokens))
    with KvClient(target) as client:
        while True:
            client.push(side.prefill(tokens))


def nursery() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        target, n_blocks, path = line.split()
        pid = os.fork()  # gRPC has made nothing yet in this process
        if pid == 0:
            try:
                prefill(target, int(n_blocks), os.open(path, os.O_WRONLY | os.O_CREAT))
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    {"decode": decode, "nursery": nursery}[sys.argv[1]](*sys.argv[2:])
