"""What the engine's tests share. Importing it skips the module where the model extra is missing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("gguf", "tokenizers", "jinja2", "rich"):
    pytest.importorskip(package, reason=f"the engine needs {package} (kvpool[model])")

from kvpool import BlockManager, Pool  # noqa: E402
from kvpool.engine.engine import Engine, Step  # noqa: E402
from kvpool.engine.gguf_file import ModelFile  # noqa: E402
from kvpool.engine.llama import Llama  # noqa: E402
from kvpool.engine.paged import BatchMaker, Span  # noqa: E402
from kvpool.engine.request import Request  # noqa: E402
from kvpool.engine.sampling import Sampler  # noqa: E402
from kvpool.engine.tokenizer import Tokenizer  # noqa: E402


@dataclass
class Loaded:
    """A model, its tokenizer, and pools of its dimensions."""

    path: Path
    file: ModelFile
    model: Llama
    tokenizer: Tokenizer

    def pool(self, n_blocks: int, block_tokens: int = 16) -> Pool:
        cfg = self.file.config
        return Pool(
            n_blocks,
            block_tokens=block_tokens,
            n_layers=cfg.n_layers,
            n_kv_heads=cfg.n_kv_heads,
            head_dim=cfg.head_dim,
        )


def load(path: Path, threads: int | None = None) -> Loaded:
    file = ModelFile(path)
    return Loaded(path, file, Llama(file, threads=threads), Tokenizer(file))


def compute(model: Llama, manager: BlockManager, *pieces: tuple[Any, int]) -> np.ndarray:
    """One pass over the next n tokens of each sequence, committed: logits of every row."""
    spans = [Span(s, s.tokens[s.n_computed : s.n_computed + n].tolist()) for s, n in pieces]
    batch, places = BatchMaker(manager).make(spans)
    hidden = model.forward(batch)
    manager.commit([s for s, _ in pieces], [s.n_computed + n for s, n in pieces])
    return model.logits(hidden[np.concatenate([np.arange(*place) for place in places])])


class Watching(Sampler):
    """A sampler that keeps a digest of all logits it picks from, to be compared bit by bit."""

    def __init__(self, sampler: Sampler) -> None:
        self.__dict__.update(sampler.__dict__)
        self.seen: list[str] = []

    def pick(self, logits: np.ndarray) -> int:
        self.seen.append(hashlib.sha256(logits.tobytes()).hexdigest()[:16])
        return super().pick(logits)


@dataclass
class Run:
    """For each request the tokens and the digests of each sample; and the steps."""

    requests: list[Request]
    tokens: list[list[list[int]]] = field(default_factory=list)
    logits: list[list[list[str]]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def count(self, name: str) -> int:
        """The sum over the steps of a number, or of the length of a tuple."""
        values = [getattr(step, name) for step in self.steps]
        return sum(len(v) if isinstance(v, tuple) else v for v in values)


def watch(request: Request) -> Request:
    """The request, with the logits of its samples kept."""
    for sample in request.samples:
        if sample.sampler is not None:
            sample.sampler = Watching(sample.sampler)
    return request


def run_together(
    loaded: Loaded,
    manager: BlockManager,
    asked: list[dict[str, Any]],
    *,
    model: Llama | None = None,
    **engine: Any,
) -> Run:
    """All requests in one engine; every invariant is checked after every step."""
    run = Run([watch(Request(**options)) for options in asked])
    samples = [list(request.samples) for request in run.requests]

    def on_step(step: Step) -> None:
        manager.check()
        run.steps.append(step)

    with Engine(model or loaded.model, manager, **engine) as e:
        for request in run.requests:
            e.add(request)
        e.run(on_step=on_step)
    for request in run.requests:
        if request.error is not None:
            raise request.error
    run.tokens = [[sample.tokens for sample in request.samples] for request in run.requests]
    run.logits = [[getattr(s.sampler, "seen", []) for s in group] for group in samples]
    assert manager.pool.stats.used == 0
    return run


def run_alone(loaded: Loaded, asked: list[dict[str, Any]]) -> Run:
    """The reference: each request in a pool of its own, without prefix cache and drafts."""
    whole = Run([])
    for options in asked:
        with loaded.pool(2000, 1) as pool:
            run = run_together(loaded, BlockManager(pool, prefix_cache="none"), [options])
        whole.requests += run.requests
        whole.tokens += run.tokens
        whole.logits += run.logits
    return whole
