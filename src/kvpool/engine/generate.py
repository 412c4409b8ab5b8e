"""The simple ways in: one prompt from start to end, or only its first or its second half.

generate    a prompt, and out come its samples
prefill     K and V of a prompt and the logits behind it: what a prefill engine sends away
generate(..., generated=, sequence=)
            goes on where others stopped: what a decode engine does with it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import kvpool
from kvpool import BlockManager, InvalidArgument

from .engine import Engine
from .llama import Array, Llama
from .paged import BatchMaker, Span
from .request import Request, whole

__all__ = ["generate", "prefill"]


def generate(
    model: Llama,
    manager: BlockManager,
    prompt: Sequence[int],
    *,
    max_step_tokens: int = 256,
    n_drafts: int = 0,
    check: Callable[[], None] | None = None,
    **options: Any,
) -> Request:
    """Answers one prompt; ``options`` are those of :class:`~kvpool.engine.request.Request`.

    ``check()`` is called before every pass. Whatever it or ``on_token`` raises ends the generation;
    this is the clean way to stop it. To go on with a sequence whose K and V are there already, with
    k of its tokens generated elsewhere::

        generate(model, manager, prompt, sequence=imported, generated=first_k_tokens, seed=...)

    Returns the finished request. Whether it returns or raises, no block is held afterwards.

    Raises:
        PoolFull: the prompt does not fit; the text has the numbers.
        InvalidArgument: as Request and ``Engine.add``.
    """
    request = Request(prompt, **options)
    width, max_step_tokens = request.width, whole("max_step_tokens", max_step_tokens, 1)
    with Engine(
        model,
        manager,
        max_seqs=width,
        max_step_tokens=max(width, max_step_tokens),
        n_drafts=n_drafts,
    ) as engine:
        engine.add(request)
        engine.run(check)
    if request.error is not None:
        raise request.error
    return request


def prefill(
    model: Llama,
    manager: BlockManager,
    prompt: Sequence[int],
    *,
    namespace: int = 0,
    max_step_tokens: int = 256,
    check: Callable[[], None] | None = None,
) -> tuple[kvpool.Sequence, Array]:
    """Computes a prompt, from the end of its cached prefix on.

    Returns the sequence, committed, which the caller frees, and the logits (vocab_size,) of what
    comes next: ``Sampler(...).pick(logits)`` is the first token that ``generate`` would pick.

    Raises:
        PoolFull: not enough blocks.
        InvalidArgument: an empty prompt, or a token that is none of the model's; max_step_tokens
            is below 1.

        No block is held then.
    """
    tokens, n_vocab = [whole("prompt", token) for token in prompt], model.config.vocab_size
    max_step_tokens = whole("max_step_tokens", max_step_tokens, 1)
    if not tokens or not 0 <= min(tokens) <= max(tokens) < n_vocab:
        raise InvalidArgument(f"prompt: at least one token, each in 0..{n_vocab - 1}")
    maker = BatchMaker(manager)
    sequence = manager.allocate(tokens, namespace=namespace)
    try:
        while True:
            if check is not None:
                check()
            start = sequence.n_computed
            piece = tokens[start : start + max_step_tokens]
            hidden = model.forward(maker.make([Span(sequence, piece)])[0])
            sequence.commit(start + len(piece))
            if sequence.n_computed == len(tokens):
                return sequence, model.logits(hidden[-1:])[0]
    except BaseException:
        sequence.free()
        raise
