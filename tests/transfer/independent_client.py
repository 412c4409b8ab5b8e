"""A prefill side that shares nothing with the package but the .proto and the page of the format.

    independent_client.py PROTO KVWIRE_FOLDER TARGET HANDLE < case.json

It generates its own code from the .proto, writes envelopes with the second writing of
formats/kv-block.md (conformance/drivers/kvwire.py, standard library only), asks HasBlocks, pushes
what is missing, and prints what it was answered.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

proto, kvwire_folder, target, handle = sys.argv[1:]
sys.path.insert(0, kvwire_folder)

import grpc  # noqa: E402
import kvwire  # noqa: E402
from grpc_tools import protoc  # noqa: E402

with tempfile.TemporaryDirectory() as folder:
    shutil.copy(proto, Path(folder) / "theirs.proto")
    out = [f"--{kind}={folder}" for kind in ("python_out", "grpc_python_out")]
    assert protoc.main(["protoc", f"-I{folder}", *out, "theirs.proto"]) == 0
    sys.path.insert(0, folder)
    pb: Any = importlib.import_module("theirs_pb2")
    stubs: Any = importlib.import_module("theirs_pb2_grpc")

case = json.load(sys.stdin)
shape, blocks = kvwire.shape_of(case), kvwire.blocks_of(case)
names = [block.block_hash for block in blocks]

with grpc.insecure_channel(target) as channel:
    stub = stubs.KvTransferServiceStub(channel)
    asked = pb.HasBlocksRequest(block_hashes=[n for n in names if n], kv_format=1)
    present = list(stub.HasBlocks(asked).present)
    sent = 0

    def chunks() -> Any:
        global sent
        for i, block in enumerate(blocks):
            payload = b""
            if not (block.block_hash and present[i]):
                payload = kvwire.write(shape, [block])
                sent += len(payload)
            yield pb.KvChunk(
                handle_id=handle,
                block_hash=block.block_hash,
                block_index=i,
                n_blocks_total=len(blocks),
                kv_format=1,
                payload=payload,
                crc32c=kvwire.crc32c(payload) if payload else 0,
            )

    ack = stub.PushKv(chunks())
    stub.Release(pb.ReleaseRequest(handle_id="never pushed"))

assert "kvpool" not in sys.modules
print(
    json.dumps(
        {
            "present": present,
            "bytes": sent,
            "ack": [ack.handle_id, ack.blocks_received, ack.blocks_deduped],
        }
    )
)
