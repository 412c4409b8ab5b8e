"""The figure and the tables of docs/engine.md, from real runs of the engine on a tiny model.

    python docs/figures/engine.py           writes engine-trace.svg and the tables in the page
    python docs/figures/engine.py --check   fails where a committed one differs

Which request computes what, and how many blocks are in use, depends on lengths alone, so the runs
are the same on any machine. Bytes in the tables are those of SmolLM2-135M.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "engine"))

import numpy as np
from svg import MUTED, Drawing
from tiny_llama import TinyLlama

from kvpool import BlockManager, Pool
from kvpool.engine.engine import Engine, Step
from kvpool.engine.gguf_file import ModelFile
from kvpool.engine.llama import Llama
from kvpool.engine.request import Request

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "engine.md"
BYTES_PER_TOKEN = 23_040  # SmolLM2-135M: 30 layers * 2 * 3 KV heads * 64 * 2 bytes
COLORS = {
    "waits": "#f1f4f7",
    "prefill": "#e9d5ff",
    "decode": "#c9ecc6",
    "preempted": "#ffc9bd",
    "used": "#7db8ec",
    "cached": "#f6e3b4",
}


def tiny_model() -> Llama:
    weights = TinyLlama(
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=8,
        embed_dim=8,
        ffn_dim=8,
        context_length=1024,
        eos=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        return Llama(ModelFile(weights.write(Path(folder) / "tiny.gguf")), threads=1)


class Moment(NamedTuple):
    """One pass: what it did, each request's state and rows in it, and the pool after it."""

    step: Step
    states: dict[int, tuple[str, int]]
    used: int
    cached: int
    n_waiting: int


def run(
    asked: Sequence[dict[str, Any]], n_blocks: int, block_tokens: int, **engine: int
) -> tuple[list[Moment], list[Request], BlockManager]:
    model, film = tiny_model(), []
    cfg = model.config
    pool = Pool(
        n_blocks,
        block_tokens=block_tokens,
        n_layers=cfg.n_layers,
        n_kv_heads=cfg.n_kv_heads,
        head_dim=cfg.head_dim,
    )
    manager = BlockManager(pool)
    requests = [Request(**options) for options in asked]
    with Engine(model, manager, **engine) as e:
        rows: dict[int, int] = {}
        compute = e._compute

        def noting(plan: Any) -> int:
            for work in plan:
                number = work.request.number
                rows[number] = rows.get(number, 0) + len(work.tokens)
            return compute(plan)

        e._compute = noting  # type: ignore[method-assign]
        for request in requests:
            e.add(request)
        while e.is_busy:
            rows.clear()
            was_prefilling = {r.number for r in e.scheduler.running if r.trunk is not None}
            step = e.step()
            starting = was_prefilling | {r.number for r in step.admitted}
            states: dict[int, tuple[str, int]] = {}
            for request in requests:
                number = request.number
                if request in step.preempted:
                    states[number] = ("preempted", 0)
                elif number in rows:
                    kind = "prefill" if number in starting else "decode"
                    states[number] = (kind, rows[number])
                elif not request.is_done:
                    states[number] = ("waits", 0)
            stats = pool.stats
            film.append(Moment(step, states, stats.used, stats.cached, len(e.scheduler.waiting)))
    assert pool.stats.used == 0
    return film, requests, manager


# ---- the trace ----------------------------------------------------------------------------------

TRACE_BLOCKS, TRACE_SIZE = 16, 4
TRACE_LABELS = (
    "0: 20 prompt tokens",
    "1: begins like 0",
    "2: two samples",
    "3: 26 prompt tokens",
    "4: 6 prompt tokens",
)


def trace() -> tuple[list[Moment], list[Request]]:
    """Five requests in a pool too small for all of them."""
    system = list(range(10, 26))
    asked = [
        {"prompt": [*system, 1, 2, 3, 4], "max_tokens": 12},
        {"prompt": [*system, 5, 6], "max_tokens": 8},
        {"prompt": list(range(30, 37)), "max_tokens": 9, "n": 2, "temperature": 1.0},
        {"prompt": list(range(40, 66)), "max_tokens": 4},
        {"prompt": list(range(70, 76)), "max_tokens": 5},
    ]
    film, requests, _ = run(asked, TRACE_BLOCKS, TRACE_SIZE, max_seqs=8, max_step_tokens=16)
    return film, requests


def trace_figure() -> str:
    film, requests = trace()
    left, cell, row, top = 190, 34, 34, 70
    width = left + cell * len(film) + 30
    below = top + row * len(requests) + 34
    height = below + 12 * TRACE_BLOCKS + 62
    d = Drawing(width, height, "A run of the scheduler: states of five requests, blocks in use")
    d.label(20, 28, "Each pass, and how many tokens of each request it computes", bold=True)
    for i in range(len(film)):
        d.label(left + cell * i + cell / 2, 56, str(i + 1), size=11, anchor="middle", color=MUTED)
    for request, label in zip(requests, TRACE_LABELS, strict=True):
        y = top + row * request.number
        d.label(20, y + 20, label, size=12)
        for i, moment in enumerate(film):
            if request.number in moment.states:
                state, n = moment.states[request.number]
                d.box(left + cell * i + 1, y, cell - 2, row - 6, COLORS[state], radius=3)
                if n:
                    x = left + cell * i + cell / 2
                    d.label(x, y + 18, str(n), size=11, anchor="middle", mono=True)
    d.label(20, below + 14, "blocks in use", size=12)
    d.label(20, below + 31, "and cached,", size=12, color=MUTED)
    d.label(20, below + 48, f"of {TRACE_BLOCKS}", size=12, color=MUTED)
    floor = below + 12 * TRACE_BLOCKS
    for i, moment in enumerate(film):
        x = left + cell * i + 4
        d.box(x, floor - 12 * moment.used, cell - 8, 12 * moment.used, COLORS["used"], radius=0)
        if moment.cached:
            y = floor - 12 * (moment.used + moment.cached)
            d.box(x, y, cell - 8, 12 * moment.cached, COLORS["cached"], radius=0)
        d.label(x + (cell - 8) / 2, floor + 16, str(moment.used), size=11, anchor="middle")
    d.path(f"M{left} {below} H{left + cell * len(film)}", arrow=False, dashed=True, color=MUTED)
    for i, state in enumerate(COLORS):
        d.box(20 + 130 * i, height - 28, 16, 16, COLORS[state], radius=3)
        d.label(42 + 130 * i, height - 15, state, size=12, color=MUTED)
    return d.text()


def trace_table() -> list[str]:
    film, _ = trace()
    lines = [
        "| pass | decode | prefill | admitted | preempted | finished | blocks used | cached |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def names(requests: Sequence[Request]) -> str:
        return ", ".join(str(request.number) for request in requests)

    for i, moment in enumerate(film, start=1):
        step = moment.step
        lines.append(
            f"| {i} | {step.n_decode} | {step.n_prefill} | {names(step.admitted)} | "
            f"{names(step.preempted)} | {names(step.finished)} | {moment.used} | {moment.cached} |"
        )
    return lines


# ---- memory -------------------------------------------------------------------------------------

N, PREFIX, TAIL, NEW, SIZE = 64, 500, 20, 24, 16


def memory_table() -> list[str]:
    """64 prompts that share 500 tokens, all at the same time."""
    random = np.random.default_rng(0)
    system = random.integers(3, 260, PREFIX).tolist()
    asked = [
        {"prompt": system + random.integers(3, 260, TAIL).tolist(), "max_tokens": NEW}
        for _ in range(N)
    ]
    positions = PREFIX + TAIL + NEW - 1
    film, _, manager = run(asked, N * -(-positions // SIZE), SIZE, max_seqs=N, max_step_tokens=256)
    per_array, per_block = positions * BYTES_PER_TOKEN, SIZE * BYTES_PER_TOKEN
    lines = [
        "| pass | wait | rows of prompts | rows of decode | blocks used | MB in blocks "
        "| MB in arrays | share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    n = n_done = 0
    most = max(range(len(film)), key=lambda i: film[i].used)
    shown = {*range(4), *range(5, len(film), 5), most}
    for i, moment in enumerate(film):
        n += len(moment.step.admitted)
        arrays = (n - n_done) * per_array
        n_done += len(moment.step.finished)
        if i in shown:
            blocks = max(moment.used, 1) * per_block
            lines.append(
                f"| {i + 1} | {moment.n_waiting} | {moment.step.n_prefill} | "
                f"{moment.step.n_decode} | {moment.used} | {moment.used * per_block / 1e6:.0f} | "
                f"{arrays / 1e6:.0f} | {100 * blocks / arrays:.0f} % |"
            )
    peak = manager.stats.peak_used
    lines += [
        "",
        f"At the peak {peak} blocks, {peak * per_block / 1e6:.0f} MB; {N} arrays of {positions} "
        f"positions: {N * per_array / 1e6:.0f} MB. "
        f"{100 * peak * per_block / (N * per_array):.0f} %.",
    ]
    return lines


# ---- writing ------------------------------------------------------------------------------------


def filled(page: str, name: str, lines: list[str]) -> str:
    """The page with the lines between its markers for ``name``."""
    begin, end = f"<!-- {name}: docs/figures/engine.py -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    assert after, f"the page has no markers for {name}"
    return before + begin + "\n".join(lines) + "\n" + end + after


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = {
        HERE / "engine-trace.svg": trace_figure(),
        PAGE: filled(filled(page, "trace", trace_table()), "memory", memory_table()),
    }
    if "--check" not in sys.argv[1:]:
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
        return 0
    old = [p.name for p, text in wanted.items() if not p.exists() or p.read_text("utf-8") != text]
    if old:
        print("not what the code does now:", ", ".join(old))
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
