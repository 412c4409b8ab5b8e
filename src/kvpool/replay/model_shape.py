"""How many bytes of KV cache a token takes in a model, from its config.json or GGUF file.

    attention         2 (K and V) x layers x KV heads x head_dim x bytes        (GQA, MQA, MHA)
    latent (MLA)      layers x (kv_lora_rank + qk_rope_head_dim) x bytes        one vector for both
    sliding window    a layer needs its last `window` tokens only

Layers without a cache that grows (linear attention, Mamba) count as none; layers that share the
cache of another count once. A model whose attention this page does not know is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import TraceError
from .gguf_header import read_gguf

__all__ = ["KV_DTYPES", "ModelShape", "read_shape"]

KV_DTYPES = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1, "int8": 1}
_MAX_CONFIG = 1 << 24  # bytes of a config.json
_FULL = ("full_attention", "attention", "global", "global_attention")
_SLIDING = ("sliding_attention", "local", "local_attention", "chunked_attention")
_NO_CACHE = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe", "mlp")


@dataclass(frozen=True)
class ModelShape:
    """A model as far as its KV cache is concerned.

    ``element_bytes`` of one number; ``layer_elements``: numbers a token takes in one layer;
    ``full_layers`` keep all tokens, ``window_layers`` the last ``window`` ones.
    """

    name: str
    full_layers: int
    window_layers: int
    window: int
    layer_elements: int
    element_bytes: int
    how: str  # the formula of layer_elements, in words
    max_tokens: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Layers with a cache."""
        return self.full_layers + self.window_layers

    @property
    def bytes_per_token(self) -> int:
        """In a pool whose blocks hold all layers."""
        return self.layers * self.layer_elements * self.element_bytes

    def sequence_bytes(self, n_tokens: int, block_tokens: int, windows: bool = False) -> int:
        """What a sequence takes, in whole blocks; ``windows``: window layers free what they have
        left behind (a pool for each kind of layer)."""
        per_layer = self.layer_elements * self.element_bytes
        blocks = -(-n_tokens // block_tokens) * block_tokens
        if not windows or not self.window_layers:
            return self.layers * per_layer * blocks
        # The window, and what of a block is before it.
        kept = min(blocks, -(-(self.window - 1) // block_tokens) * block_tokens + block_tokens)
        return per_layer * (self.full_layers * blocks + self.window_layers * kept)

    def formula(self) -> str:
        """How ``bytes_per_token`` comes about."""
        return (
            f"{self.layers} layers x {self.how} x {self.element_bytes} bytes = "
            f"{self.bytes_per_token:,} bytes a token"
        )


def read_shape(path: str, kv_dtype: str = "auto") -> ModelShape:
    """From transformers' config.json (or the folder with it), or a GGUF file.

    Raises TraceError: no such file, a field that is missing or makes no sense, attention that is
    not known.
    """
    if kv_dtype != "auto" and kv_dtype not in KV_DTYPES:
        raise TraceError(f"KV dtype {kv_dtype!r}: expected auto, {', '.join(KV_DTYPES)}")
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        with file.open("rb") as opened:
            text = opened.read(4)
            if text != b"GGUF":
                text += opened.read(_MAX_CONFIG)
        if text == b"GGUF":
            return _from_gguf(read_gguf(file), str(file), kv_dtype)
        if len(text) > _MAX_CONFIG:
            raise TraceError(f"{file}: no configuration: more than {_MAX_CONFIG} bytes")
        config = json.loads(text.decode("utf-8"))
    except OSError as error:
        raise TraceError(f"{file}: {error.strerror or error}") from error
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file}: neither JSON nor GGUF ({error})") from error
    if not isinstance(config, dict):
        raise TraceError(f"{file}: expected a JSON object, found {type(config).__name__}")
    return _from_config(config, str(file), kv_dtype)


class _Fields:
    """Numbers of a configuration by any of their names."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self.path = values, path

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                raise TraceError(f"{self.path}: {name} is {value!r}, expected a positive integer")
            return value
        if default is None:
            raise TraceError(f"{self.path}: no {' or '.join(names)} in it")
        return default


def _from_config(config: dict[str, Any], path: str, kv_dtype: str) -> ModelShape:
    kind = str(config.get("model_type", "model"))
    if isinstance(config.get("text_config"), dict):  # a model that also sees or hears
        config = {**config, **config["text_config"]}
    fields = _Fields(config, path)
    layers = fields.number("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    notes = []
    shared = config.get("num_kv_shared_layers") or 0
    if isinstance(shared, int) and 0 < shared < layers:
        notes.append(f"{shared} of {layers} layers use the cache of another layer")
    else:
        shared = 0
    dtype = config.get("dtype") or config.get("torch_dtype")
    size = KV_DTYPES[kv_dtype] if kv_dtype != "auto" else 4 if dtype == "float32" else 2
    if config.get("kv_lora_rank") is not None:
        rank, rope = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
        elements, how = rank + rope, f"({rank} kv_lora_rank + {rope} qk_rope_head_dim)"
        notes.append("MLA: one latent vector a token and layer, shared by all heads, is K and V")
    else:
        heads = fields.number("num_attention_heads", "n_head", "n_heads")
        kv_heads = _kv_heads(config, fields, heads)
        hidden = fields.number("hidden_size", "n_embd", "d_model", default=heads)
        dim = fields.number("head_dim", "kv_channels", default=max(hidden // heads, 1))
        v_dim = fields.number("v_head_dim", default=dim)
        elements = kv_heads * (dim + v_dim)
        how = (
            f"2 (K and V) x {kv_heads} KV heads x {dim} head_dim"
            if v_dim == dim
            else f"{kv_heads} KV heads x ({dim} + {v_dim})"
        )
    full, sliding, window = _split(config, fields, layers, notes)
    if shared >= full + sliding:
        raise TraceError(
            f"{path}: num_kv_shared_layers is {shared}, of {full + sliding} layers with a KV cache"
        )
    cut = min(shared, sliding)  # which layers share is not told in one way: window ones first
    limit = fields.number("max_position_embeddings", "n_positions", "max_seq_len", default=2**30)
    return ModelShape(
        kind, full - (shared - cut), sliding - cut, window, elements, size, how,
        None if limit == 2**30 else limit, tuple(notes),
    )  # fmt: skip


def _kv_heads(config: dict[str, Any], fields: _Fields, heads: int) -> int:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    kv = fields.number(
        "num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", default=heads
    )
    if heads % kv:
        raise TraceError(f"{fields.path}: {heads} attention heads are not shared by {kv} KV heads")
    return kv


def _split(
    config: dict[str, Any], fields: _Fields, layers: int, notes: list[str]
) -> tuple[int, int, int]:
    """Layers that keep everything, layers with a window, and the window."""
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    if not isinstance(window, int) or window < 0:
        raise TraceError(f"{fields.path}: sliding_window is {window!r}")
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, list):
        known = (*_FULL, *_SLIDING, *_NO_CACHE)
        strange = sorted({str(kind) for kind in types if kind not in known})
        if strange or len(types) != layers:
            what = f"of a kind not known here: {', '.join(strange)}" if strange else "missing"
            raise TraceError(f"{fields.path}: layers {what}")
        sliding = sum(kind in _SLIDING for kind in types)
        none = sum(kind in _NO_CACHE for kind in types)
        if none:
            notes.append(f"{none} of {layers} layers keep a state of fixed size, not counted")
        if sliding and not window:
            raise TraceError(f"{fields.path}: sliding layers, and no sliding_window")
        if layers - none == 0:
            raise TraceError(f"{fields.path}: no layer has a KV cache")
        return layers - sliding - none, sliding, window
    for field in ("ssm_cfg", "attn_layer_period", "hybrid_override_pattern", "linear_attn_config"):
        if config.get(field) is not None:
            raise TraceError(
                f"{fields.path}: {field}: which layers have a KV cache is not known here"
            )
    if not window or config.get("use_sliding_window") is False:
        return layers, 0, 0
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:  # every pattern-th layer keeps everything
        return layers // pattern, layers - layers // pattern, window
    if config.get("model_type") == "gemma2":
        return layers // 2, layers - layers // 2, window
    first = config.get("max_window_layers")  # qwen2: full up to there
    if isinstance(first, int) and config.get("use_sliding_window"):
        return min(first, layers), layers - min(first, layers), window
    return 0, layers, window


def _from_gguf(pairs: dict[str, Any], path: str, kv_dtype: str) -> ModelShape:
    arch = str(pairs.get("general.architecture", ""))
    own = {key[len(arch) + 1 :]: v for key, v in pairs.items() if key.startswith(f"{arch}.")}
    heads_kv = own.get("attention.head_count_kv")
    by_layer = heads_kv if isinstance(heads_kv, list) else None
    heads = own.get("attention.head_count")
    numbers = {k: (max(v) if isinstance(v, list) and v else v) for k, v in own.items()}
    fields = _Fields(numbers, path)
    layers = fields.number("block_count")
    if "ssm.state_size" in own and by_layer is None:
        raise TraceError(f"{path}: {arch}: which layers have a KV cache is not known here")
    size = KV_DTYPES.get(kv_dtype, 2)
    notes = []
    full = layers
    if own.get("attention.kv_lora_rank") is not None:
        rank, rope = fields.number("attention.kv_lora_rank"), fields.number("rope.dimension_count")
        elements, how = rank + rope, f"({rank} kv_lora_rank + {rope} rope.dimension_count)"
        notes.append("MLA: one latent vector a token and layer, shared by all heads, is K and V")
    else:
        n_heads = fields.number("attention.head_count")
        kv = fields.number("attention.head_count_kv", default=n_heads)
        even = fields.number("embedding_length", default=n_heads) // n_heads
        k = fields.number("attention.key_length", default=max(even, 1))
        v = fields.number("attention.value_length", default=k)
        elements = kv * (k + v)
        how = f"2 (K and V) x {kv} KV heads x {k}" if k == v else f"{kv} KV heads x ({k} + {v})"
        if by_layer is not None:
            present = [n for n in by_layer if n]
            if len(by_layer) != layers or len(set(present)) > 1 or not present:
                raise TraceError(f"{path}: attention.head_count_kv is {by_layer!r}")
            full = len(present)
            notes.append(f"{layers - full} of {layers} layers have no KV cache")
    del heads
    window = fields.number("attention.sliding_window", default=2**30)
    if window != 2**30:
        notes.append(f"a window of {window} tokens in some layers, not told which: none counted")
    limit = fields.number("context_length", default=2**30)
    return ModelShape(
        str(pairs.get("general.name", arch)), full, 0, 0, elements, size, how,
        None if limit == 2**30 else limit, tuple(notes),
    )  # fmt: skip
