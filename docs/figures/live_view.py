"""The picture of the live view in README.md: one moment of a real run with SmolLM2.

    python docs/figures/live_view.py [--at PASS]        writes live-view.svg beside this file

Speeds in it are those of the machine it ran on.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

from kvpool import BlockManager, Pool
from kvpool.cli import _parser
from kvpool.cli._live import LiveView
from kvpool.cli.generate import Prompt, Run, _request
from kvpool.engine.engine import Engine, Step
from kvpool.engine.gguf_file import ModelFile, default_model_path
from kvpool.engine.llama import Llama
from kvpool.engine.tokenizer import Tokenizer

TEXTS = (
    "Why is the sky blue?",
    "What does a compiler do?",
    "Write a haiku about rivers.",
    "Repeat after me: one two three, one two three, one two three.",
    "How do bees find their way home?",
    "Name three uses of copper.",
    "What is a hash table?",
    "Tell me about the Alps.",
    "Who was Ada Lovelace?",
)
OPTIONS = "--max-tokens 48 --batch 6 --chunk 48 --blocks 48 --draft 3"


class _Enough(Exception):
    """The moment has come."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", type=int, default=22, help="the pass to be shown")
    at = parser.parse_args().at
    args = _parser().parse_args(["generate", *OPTIONS.split(), *TEXTS])
    file = ModelFile(default_model_path())
    model, tokenizer, cfg = Llama(file), Tokenizer(file), file.config
    console = Console(record=True, file=io.StringIO(), width=112, height=33, force_terminal=True)
    pool = Pool(
        args.blocks, n_layers=cfg.n_layers, n_kv_heads=cfg.n_kv_heads, head_dim=cfg.head_dim
    )
    requests = [_request(args, tokenizer, text) for text in TEXTS]
    with (
        BlockManager(pool) as manager,
        Engine(
            model,
            manager,
            max_seqs=args.batch,
            max_step_tokens=args.chunk,
            n_drafts=args.draft,
        ) as engine,
    ):
        prompts = [Prompt(*pair) for pair in zip(TEXTS, requests, strict=True)]
        run = Run(args, model, file.name, file.path, engine, prompts)
        view = LiveView(console, run, tokenizer)

        def on_step(step: Step) -> None:
            run.steps.append(step)
            view.note(step)
            if len(run.steps) == at:
                raise _Enough

        for request in requests:
            engine.add(request)
        try:
            while engine.is_busy:
                on_step(engine.step())
        except _Enough:
            console.print(view.view())
    svg = console.export_svg(title="kvpool generate")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # nothing is fetched to show it
    svg = svg.replace("Fira Code", "ui-monospace, Menlo, Consolas")
    head, rest = svg.split(">", 1)
    title = "<title>kvpool generate: requests that run, and the pool</title>"
    path = Path(__file__).resolve().parent / "live-view.svg"
    path.write_text(f"{head}>{title}{rest}", encoding="utf-8")


if __name__ == "__main__":
    main()
