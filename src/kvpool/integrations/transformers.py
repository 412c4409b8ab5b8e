"""transformers: a cache for ``model.generate`` whose K and V are in the blocks of a pool.

    store = PagedStore(model, n_blocks=512)                      once for a model
    out = model.generate(**inputs, cache=store.open(**inputs))   each time

A :class:`PagedStore` has the pool, its slab on the model's device, and the index of prefixes. A
:class:`PagedCache` is one batch: it begins with what the index has of its prompts, so that
``generate`` computes only the rest, and what it computes is found by the next one. Beams and return
sequences share the blocks of their prompt; rejected drafts are cut off again.

The keyword is ``cache=``; ``past_key_values=``, its older name, means the same. The store sees
which tokens a forward pass is given by a hook on the model, so pass the cache to that model's
``generate`` or ``forward``, not to a part of it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

import kvpool
from kvpool import ArgumentTypeError, BlockManager, InvalidArgument, Unsupported

from ._rows import Forward, Rows, as_prompts
from .torch import TorchPool

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PagedCache", "PagedStore"]

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
# Tensors that decide nothing about K and V beyond what is checked of them.
HARMLESS = {"attention_mask", "cache_position", "labels", "logits_to_keep", "position_ids"}


class PagedStore:
    """Blocks for the K and V of one model, and the prefixes that are in them.

    Args:
        model: a decoder of transformers whose layers all have attention with one number of KV heads
            and one head_dim (Llama, Mistral, Qwen, Gemma and their like).
        n_blocks: blocks in the pool; a block has ``block_tokens`` positions of every layer.
        block_tokens: only full blocks are found again.
        dtype: what K and V are kept as; the model's own by default, which changes nothing: the
            tokens are those of a DynamicCache. float16 for a float32 model halves the memory, and
            its blocks can be exported; K and V are then rounded to 11 significant bits, a relative
            error of 2**-11 at most, as in a float16 model.
        device: where the slab is; the model's own by default.

    Attributes:
        pool: the :class:`TorchPool`; ``pool.stats`` counts blocks.
        manager: its :class:`kvpool.BlockManager`; ``manager.stats`` counts hits.

    A sliding window is the model's own doing: all positions are kept, the mask hides the others.
    ``close`` (or a ``with`` block) ends it, and all caches it opened.

    Raises:
        Unsupported: the model is no such decoder, or of a dtype that no slab has.
        InvalidArgument: a number is out of range.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    ... )).eval()
    >>> prompt = torch.tensor([[1, *range(10, 50)]])
    >>> store = PagedStore(model, n_blocks=32)
    >>> for _ in range(2):
    ...     cache = store.open(prompt)
    ...     out = model.generate(prompt, cache=cache, max_new_tokens=4, do_sample=False)
    ...     print(cache.n_skipped, "of", prompt.shape[1], "tokens were there")
    ...     cache.close()
    0 of 41 tokens were there
    32 of 41 tokens were there
    >>> store.pool.stats.used
    0
    >>> store.close()
    """

    def __init__(
        self, model: torch.nn.Module, n_blocks: int, block_tokens: int = 16, *,
        dtype: torch.dtype | None = None, device: torch.device | str | int | None = None,
    ) -> None:  # fmt: skip
        n_layers, n_kv_heads, head_dim = _dimensions(model)
        of_model: Any = model
        kept_as = of_model.dtype if dtype is None else dtype
        if kept_as not in (torch.float16, torch.bfloat16, torch.float32):
            raise Unsupported(f"dtype: expected float16, bfloat16 or float32, found {kept_as}")
        self.pool = TorchPool.empty(
            n_blocks, block_tokens, n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim,
            dtype=kept_as,
            device=of_model.device if device is None else device,
        )  # fmt: skip
        self.manager = BlockManager(self.pool)
        self._opened: weakref.WeakSet[PagedCache] = weakref.WeakSet()
        hook = model.register_forward_pre_hook(_tell(self._opened), with_kwargs=True)
        self._unhook = weakref.finalize(self, hook.remove)
        self._shares = not _depends_on_length(of_model.config)

    def open(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        namespace: int = 0,
        **others: Any,
    ) -> PagedCache:
        """A cache for ``model.generate``, with what is there of its prompts.

        Args:
            input_ids: ``(rows, tokens)``, what ``generate`` will be given:
                ``store.open(**inputs)``. Without it the cache is empty, and ``generate`` computes
                the whole prompt; blocks of known prefixes are shared all the same.
            attention_mask: ``(rows, tokens)``, 0 for padding on the left.
            namespace: of ``kvpool.namespace``, where tokens alone do not say what is computed: an
                adapter that is switched on, a tenant.
            others: further inputs. If there are any (images, token types), the tokens do not say
                all: nothing is taken from the index, and nothing becomes findable.

        Raises:
            PoolFull: not enough blocks for the prompts; nothing has changed.
            InvalidArgument: the store is closed; input_ids are not ``(rows, tokens)`` integers, or
                the mask is not of that shape with its padding on the left.
        """
        if self.manager.closed:
            raise InvalidArgument("the store is closed")
        rows = Rows(self.pool, self.manager, namespace, self._shares)
        if input_ids is not None:
            tokens = _matrix(input_ids, "input_ids")
            mask = None if attention_mask is None else _matrix(attention_mask, "attention_mask")
            prompts, pads = as_prompts(tokens, mask)
            private = not self._shares or any(value is not None for value in others.values())
            rows.open(prompts, pads, private)
            rows.skip_cached(tokens.shape[1])
        return self._cache_of(rows)

    def close(self) -> None:
        """Ends the store and its caches, and takes the hook off the model. Again does nothing."""
        self._unhook()
        for cache in list(self._opened):
            cache.close()
        self.manager.close()
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PagedStore({self.pool!r})"

    def _cache_of(self, rows: Rows) -> PagedCache:
        cache = PagedCache(rows, self)
        self._opened.add(cache)
        return cache


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer, as transformers asks for it; its values are in the pool."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, rows: Rows, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self._index = rows, index
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows.update(key_states, value_states, self._index)

    def get_seq_length(self, *args: Any) -> int:
        return self._rows.n_columns

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        # the number of new positions; older releases give the positions themselves
        n = query.shape[0] if isinstance(query, torch.Tensor) else query
        return self._rows.n_columns + n, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its older name

    def lazy_initialization(self, *args: Any) -> None: ...

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...


class PagedCache(Cache):
    """One batch of a PagedStore, for ``model.generate`` and ``model.forward``.

    Made by ``PagedStore.open``. It is what a DynamicCache is to transformers: greedy and sampled
    generation, beams, return sequences, assisted and prompt-lookup decoding and chunked prefill
    work on it, and passing it on with a longer conversation continues. ``copy.deepcopy`` forks it:
    the copy shares the blocks until it writes.

    ``close``, a ``with`` block, or dropping it gives the blocks back: full ones stay findable.

    A row whose tokens do not determine its values is private, its blocks are never found by another
    one: embeddings instead of tokens, images, positions that do not count a row's tokens from 0, a
    mask that hides more than the padding on the left, a model in training, or one whose rotary
    frequencies change with the length of the sequence (rope types dynamic and longrope).
    """

    def __init__(self, rows: Rows, store: PagedStore) -> None:
        super().__init__(layers=[_Layer(rows, i) for i in range(rows.pool.n_layers)])
        self._rows, self._store = rows, store

    @property
    def n_skipped(self) -> int:
        """Columns of the prompt that were in the pool: ``generate`` does not compute them."""
        return self._rows.n_skipped

    @property
    def sequences(self) -> list[kvpool.Sequence]:
        """The sequence of each row, without its padding; for reading."""
        return list(self._rows.seqs)

    @property
    def is_private(self) -> bool:
        """Whether its blocks are kept from other caches."""
        return self._rows.private

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before there are any."""
        return len(self._rows.seqs) or -1

    def close(self) -> None:
        """Gives the blocks back; again does nothing. Later forward passes raise."""
        self._rows.clear()
        self._rows.closed = True

    def reset(self) -> None:
        """Gives the blocks back; the cache is empty then, and can be used again."""
        self._rows.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: forked, freed, nothing copied yet."""
        self._rows.select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._rows.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, by forks."""
        self._rows.select(i for i in range(len(self._rows.seqs)) for _ in range(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Cuts the last columns off: ``-n`` removes n, as transformers 5.24 has it.

        A positive number is the length to keep, as older releases have it.
        """
        n = tokens_to_remove
        if n:
            self._rows.crop(n if n > 0 else max(0, self._rows.n_columns + n))

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self._store._cache_of(self._rows.fork())

    def __copy__(self) -> PagedCache:
        return self._store._cache_of(self._rows.fork())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        rows = self.__dict__.get("_rows")
        if rows is not None:
            rows.clear()

    def __repr__(self) -> str:
        rows = self._rows
        return f"PagedCache(rows={len(rows.seqs)}, columns={rows.n_columns}, pool={rows.pool!r})"


# ---- what the model is given -------------------------------------------------------------------


def _tell(opened: weakref.WeakSet[PagedCache]) -> Any:
    """The hook: tells a cache of this store what a forward pass is given, before it begins."""

    def hook(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache")
        cache = kwargs.get("past_key_values") if cache is None else cache
        if isinstance(cache, PagedCache) and cache in opened:
            cache._rows.begin(_forward(model, args, kwargs))

    return hook


def _forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    ids = args[0] if args else kwargs.get("input_ids")
    embeds = kwargs.get("inputs_embeds")
    if not isinstance(ids, torch.Tensor) and not isinstance(embeds, torch.Tensor):
        raise InvalidArgument("input_ids: expected them as the first argument or by name")
    given: Any = ids if isinstance(ids, torch.Tensor) else embeds
    n_rows, n = given.shape[:2]
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    known = {"input_ids", "inputs_embeds", "cache", "past_key_values", *HARMLESS}
    plain = (
        not model.training
        and len(args) <= 1
        and (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2))
        and (positions is None or (isinstance(positions, torch.Tensor) and positions.ndim == 2))
        and all(k in known or _is_setting(v) for k, v in kwargs.items())
    )
    return Forward(
        tokens=ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else None,
        n_rows=n_rows,
        n=n,
        mask=mask.detach().cpu().numpy() if plain and mask is not None else None,
        positions=positions.detach().cpu().numpy() if plain and positions is not None else None,
        plain=plain,
    )


def _is_setting(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _matrix(value: Any, name: str) -> NDArray[np.int64]:
    """(rows, tokens) integers, from a tensor, an array or lists."""
    try:
        array = (
            value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        )
    except ValueError as e:
        raise InvalidArgument(f"{name}: expected (rows, tokens), found rows that differ") from e
    if array.ndim != 2:
        raise InvalidArgument(f"{name}: expected (rows, tokens), found shape {array.shape}")
    if array.dtype.kind not in "iub":
        raise ArgumentTypeError(f"{name}: expected integers, found {array.dtype}")
    return array.astype(np.int64)


def _dimensions(model: Any) -> tuple[int, int, int]:
    """The model's n_layers, n_kv_heads and head_dim."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ArgumentTypeError(f"model: expected a model of transformers, found {model!r:.100}")
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"model: {type(model).__name__} has an encoder: expected a decoder")
    text = config.get_text_config(decoder=True)
    strange = set(getattr(text, "layer_types", None) or ()) - ATTENTION
    if strange or any(mode == "reuse" for mode in getattr(text, "kv_sharing_modes", None) or ()):
        what = f"layers of {sorted(strange)}" if strange else "layers that share K and V"
        raise Unsupported(f"model: {type(model).__name__} has {what}: expected K and V in each")
    heads = text.num_attention_heads
    return (
        text.num_hidden_layers,
        getattr(text, "num_key_value_heads", None) or heads,
        getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def _depends_on_length(config: Any) -> bool:
    """Whether K of a token depends on how long its sequence gets: rotary frequencies that change.

    Then K of a prefix is not a function of the prefix, and nothing can be shared.
    """

    def kinds(rope: Any) -> set[object]:
        if not isinstance(rope, dict):
            return set()
        found = {rope.get("rope_type"), rope.get("type")}
        return found.union(*map(kinds, rope.values()))

    text = config.get_text_config(decoder=True)
    ropes = (getattr(text, "rope_parameters", None), getattr(text, "rope_scaling", None))
    return bool(set().union(*map(kinds, ropes)) & {"dynamic", "longrope"})
