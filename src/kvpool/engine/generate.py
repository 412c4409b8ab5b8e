"""The loop: a prompt through the model tile by tile, then all its samples one token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from .cache import KVCache, KVSequence
from .llama import Array, Llama, Span, key_rows
from .sampling import Sampler

__all__ = ["Generation", "Sample", "generate", "prefill"]


@dataclass
class Sample:
    """One answer. ``finish`` is "stop" (the model ended it), "length", or "" while it runs."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""


@dataclass
class Generation:
    """What became of one prompt; filled in while it is generated.

    ``prefill_s`` and ``decode_s`` are seconds; ``cached_tokens`` of the ``prompt_tokens`` came from
    the prefix cache.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    samples: list[Sample] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def n_tokens(self) -> int:
        """Tokens generated, over all samples."""
        return sum(len(sample.tokens) for sample in self.samples)


def _nothing() -> None: ...


def _ignore(sample: int, token: int) -> None: ...


def prefill(model: Llama, sequence: KVSequence, check: Callable[[], None] = _nothing) -> Array:
    """Computes every token of a sequence that is not computed yet, and commits it.

    Calls ``check()`` before each tile; it may raise. Returns the hidden state of the last token,
    (1, embed_dim).
    """
    hidden: Array = np.empty((0, model.config.embed_dim), dtype=np.float32)
    while sequence.n_computed < len(sequence.tokens):
        check()
        tile_end = key_rows(sequence.n_computed)
        n = min(tile_end, len(sequence.tokens)) - sequence.n_computed
        hidden = model.forward([Span(sequence, n)])
        sequence.commit(n)
    return hidden


def generate(
    model: Llama,
    cache: KVCache,
    prompt: Sequence[int],
    *,
    n: int = 1,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
    on_token: Callable[[int, int], None] = _ignore,
    check: Callable[[], None] = _nothing,
    result: Generation | None = None,
) -> Generation:
    """Generates n samples that continue a prompt.

    The prompt is computed once, from the end of its cached prefix; the samples are forks of it and
    share its blocks until they write. They run side by side: one forward pass gives every running
    sample its next token. A stop token ends a sample and is not part of it.

    Args:
        cache: where K and V go; any :class:`~kvpool.engine.cache.KVCache`.
        on_token: called with (sample index, token) for every token as it is picked.
        check: called before every forward pass. Whatever it or ``on_token`` raises ends the
            generation; this is the clean way to stop it.
        result: filled in as things happen, so that the caller still has it after an exception.

    Returns the result. Whether it returns or raises, no block is held afterwards.

    Raises:
        PoolFull: the pool has not enough blocks (``blocks_needed`` tells before).
    """
    result = result if result is not None else Generation()
    sequences: list[KVSequence] = []
    try:
        started = time.perf_counter()
        root = cache.open(prompt)
        sequences.append(root)
        result.prompt_tokens, result.cached_tokens = len(prompt), root.n_computed
        logits = np.repeat(model.logits(prefill(model, root, check)), n, axis=0)
        result.prefill_s = time.perf_counter() - started

        result.samples = [Sample() for _ in range(n)]
        samplers = [Sampler(temperature, seed, i) for i in range(n)]
        for _ in range(n - 1):  # one by one: after an exception the list has what is held
            sequences.append(root.fork())  # noqa: PERF401
        running = list(range(n))
        while running:
            for i, row in zip(running, logits, strict=True):
                sample, token = result.samples[i], samplers[i].pick(row)
                if token in stop_tokens:
                    sample.finish = "stop"
                    continue
                sample.tokens.append(token)
                on_token(i, token)
                if len(sample.tokens) >= max_tokens:
                    sample.finish = "length"
            for i in running:
                if result.samples[i].finish:
                    sequences[i].free()
            running = [i for i in running if not result.samples[i].finish]
            if running:
                check()
                for i in running:
                    sequences[i].append(result.samples[i].tokens[-1])
                hidden = model.forward([Span(sequences[i], 1) for i in running])
                for i in running:
                    sequences[i].commit(1)
                logits = model.logits(hidden)
            result.decode_s = time.perf_counter() - started - result.prefill_s
    finally:
        for sequence in sequences:
            sequence.free()
    return result
