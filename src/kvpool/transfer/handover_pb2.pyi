from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ContinueRequest(_message.Message):
    __slots__ = ("handle_id", "tokens", "namespace", "picked", "max_tokens", "temperature", "seed", "sample", "draws", "top_k", "top_p")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PICKED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    handle_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    namespace: int
    picked: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    temperature: float
    seed: int
    sample: int
    draws: int
    top_k: int
    top_p: float
    def __init__(self, handle_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., namespace: _Optional[int] = ..., picked: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., seed: _Optional[int] = ..., sample: _Optional[int] = ..., draws: _Optional[int] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ...) -> None: ...

class ContinueReply(_message.Message):
    __slots__ = ("tokens", "finish")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish: str
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., finish: _Optional[str] = ...) -> None: ...
