"""A client that was written from the .proto and the format's page alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transfer_support import Side

from kvpool.transfer import KvReceiver
from kvpool.transfer.sender import Plan, messages

pytest.importorskip("grpc", reason="needs kvpool[transfer]")
pytest.importorskip("grpc_tools", reason="needs grpcio-tools")
ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "src/kvpool/transfer/kv_transfer.proto"
DRIVERS = ROOT / "conformance/drivers"


def case_of(side: Side, tokens: list[int]) -> dict[str, Any]:
    """A prompt as the conformance suite writes it: [position][layer][K, V][head][dim] patterns."""
    values = side.content(tokens)  # (block, layer, K or V, head, position, dim)
    by_position = np.moveaxis(values, 4, 1).reshape(-1, *values.shape[1:4], values.shape[5])
    return {
        "block_tokens": side.pool.block_tokens,
        "n_layers": side.pool.n_layers,
        "n_kv_heads": side.pool.n_kv_heads,
        "head_dim": side.pool.head_dim,
        "tokens": tokens,
        "values": by_position[: len(tokens)].view(np.uint16).ravel().tolist(),
    }


def test_an_independent_client_interoperates(
    decode: Side, receiver: KvReceiver, make_server: Any
) -> None:
    tokens = [1, 50_000, 2**32 - 1, 0, 7, 8, 9, 10, 11]
    decode.cache(tokens[:5])
    server = make_server(receiver)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("independent_client.py"), PROTO, DRIVERS,
         server.address, "theirs"],
        input=json.dumps(case_of(decode, tokens)), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "present": [True, False], "bytes": 344, "ack": ["theirs", 2, 1],
    }  # fmt: skip
    with receiver.claim("theirs", tokens) as seq:
        assert decode.holds(seq, tokens)


def test_our_chunks_are_what_the_independent_writer_makes(prefill: Side) -> None:
    from kvpool.transfer import kv_transfer_pb2 as pb

    sys.path.insert(0, str(DRIVERS))
    try:
        import kvwire
    finally:
        sys.path.remove(str(DRIVERS))
    tokens = list(range(1, 10))
    case = case_of(prefill, tokens)
    with prefill.prefill(tokens) as seq:
        ours = [pb.KvChunk.FromString(data) for data, _ in messages("h", seq, Plan.of(seq))]
    for i, (chunk, block) in enumerate(zip(ours, kvwire.blocks_of(case), strict=True)):
        payload = kvwire.write(kvwire.shape_of(case), [block])
        assert chunk == pb.KvChunk(
            handle_id="h", block_hash=block.block_hash, block_index=i, n_blocks_total=3,
            kv_format=1, payload=payload, crc32c=kvwire.crc32c(payload),
        )  # fmt: skip
