"""KV blocks from a prefill engine to a decode engine: tl.kv.v1 over gRPC.

Prefill computes K and V of a prompt, decode goes on from there, on another machine; what travels
are one-block envelopes (formats/kv-block.md), and only those that the other side has not got.

    prefill side                                   decode side
      KvClient.push(seq)  -- HasBlocks, PushKv -->   KvServer --> KvReceiver
      KvClient.hand_over  -- Continue ----------->     claim(handle, tokens) --> Sequence

    kv_transfer.proto   the protocol          handover.proto   what goes with it: tokens, sampling
    receiver            KvReceiver            all of the decode side but its network
    sender              Plan, chunks          all of the prefill side but its network
    server, aio_server  KvServer, AioKvServer
    client, aio_client  KvClient, AioKvClient, push

::

    # decode                                       # prefill
    receiver = KvReceiver(manager)                 result = push("decode:5100", seq, token="...")
    with KvServer(receiver, "0.0.0.0:5100",
                  tls=..., token="..."):
        seq = receiver.claim(handle, tokens)

docs/transfer.md has the flow, every error, and what is believed whom. The receiver and the sender
need nothing but kvpool; the network needs the extra ``transfer``:
``pip install 'kvpool[transfer]'``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ._chunk import Chunk
from ._session import Push
from .limits import Ack, Limits, Pending, TransferRefused, TransferStats
from .receiver import KvReceiver
from .sender import Plan, chunks

if TYPE_CHECKING:
    from .aio_client import AioKvClient
    from .aio_server import AioKvServer
    from .client import KvClient, push
    from .handover import Handover
    from .server import KvServer
    from .settings import ClientSettings, ClientTls, PushResult, ServerTls, keep_freed_memory

logging.getLogger("kvpool.transfer").addHandler(logging.NullHandler())

__all__ = [
    "Ack",
    "AioKvClient",
    "AioKvServer",
    "Chunk",
    "ClientSettings",
    "ClientTls",
    "Handover",
    "KvClient",
    "KvReceiver",
    "KvServer",
    "Limits",
    "Pending",
    "Plan",
    "Push",
    "PushResult",
    "ServerTls",
    "TransferRefused",
    "TransferStats",
    "chunks",
    "keep_freed_memory",
    "push",
]

_NEED_GRPC = {
    "AioKvClient": "aio_client",
    "AioKvServer": "aio_server",
    "ClientSettings": "settings",
    "ClientTls": "settings",
    "Handover": "handover",
    "KvClient": "client",
    "KvServer": "server",
    "PushResult": "settings",
    "ServerTls": "settings",
    "keep_freed_memory": "settings",
    "push": "client",
}


def __getattr__(name: str) -> Any:
    """Loads what needs gRPC when it is asked for."""
    if name not in _NEED_GRPC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f".{_NEED_GRPC[name]}", __name__), name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("grpc", "google", "grpc_health"):
            raise ImportError(
                f"kvpool.transfer.{name} needs grpcio: pip install 'kvpool[transfer]'",
                name=error.name,
            ) from error
        raise
