"""What becomes findable in a manager, told to other processes: vLLM's KV events over ZMQ.

A router that knows which prefixes each engine holds sends a prompt where most of it is computed
already. Routers read vLLM's stream today, so this one has its field names and its bytes
(``vllm/distributed/kv_events.py``, version 0.33).

    manager --drain_events--> EventEncoder --batches--> KVEventPublisher
                                                          | PUB     topic | number | payload
                                                          | ROUTER  batches again, from a number on
                                              KVEventSubscriber --> PrefixIndex.match(block hashes)

A payload is msgpack: a batch is an array ``[ts, events, data_parallel_rank]``; an event is a map
whose ``type`` is ``BlockStored``, ``BlockRemoved`` or ``AllBlocksCleared``. The number is 8 bytes,
big-endian, from 0 on, one more for each batch.

Block hashes in the stream are the format's names, so whoever knows a prompt's tokens and its
namespace can compute them (``kvpool.block_hashes``). They can be collided on purpose, like every
FNV-1a hash: a match in an index is a hint where to send a prompt, and the engine that gets it
verifies every hit. The stream holds the tokens of prompts; sockets bind to the loopback address
unless told otherwise, and have no authentication of their own.

Needs the extra ``events``: ``pip install 'kvpool[events]'`` (msgspec, and pyzmq for the sockets).
"""

from __future__ import annotations

from .encoder import EventEncoder, NamespaceLabel
from .publisher import KVEventPublisher
from .subscriber import KVEventSubscriber, PrefixIndex
from .wire import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventEncoder",
    "KVEvent",
    "KVEventBatch",
    "KVEventPublisher",
    "KVEventSubscriber",
    "NamespaceLabel",
    "PrefixIndex",
]
