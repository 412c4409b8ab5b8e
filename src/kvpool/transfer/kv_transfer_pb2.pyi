from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HasBlocksRequest(_message.Message):
    __slots__ = ("block_hashes", "kv_format")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    kv_format: int
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ..., kv_format: _Optional[int] = ...) -> None: ...

class HasBlocksResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, present: _Optional[_Iterable[bool]] = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("handle_id", "block_hash", "block_index", "n_blocks_total", "kv_format", "payload", "crc32c")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    handle_id: str
    block_hash: int
    block_index: int
    n_blocks_total: int
    kv_format: int
    payload: bytes
    crc32c: int
    def __init__(self, handle_id: _Optional[str] = ..., block_hash: _Optional[int] = ..., block_index: _Optional[int] = ..., n_blocks_total: _Optional[int] = ..., kv_format: _Optional[int] = ..., payload: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class KvAck(_message.Message):
    __slots__ = ("handle_id", "blocks_received", "blocks_deduped")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DEDUPED_FIELD_NUMBER: _ClassVar[int]
    handle_id: str
    blocks_received: int
    blocks_deduped: int
    def __init__(self, handle_id: _Optional[str] = ..., blocks_received: _Optional[int] = ..., blocks_deduped: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("handle_id",)
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    handle_id: str
    def __init__(self, handle_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
