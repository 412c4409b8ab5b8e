"""What ``kvpool generate`` shows: rich on a terminal, plain text in a pipe, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from kvpool import __version__
from kvpool.engine.errors import MissingPackage

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise MissingPackage.named(error.name) from error

if TYPE_CHECKING:
    from kvpool.engine.tokenizer import Tokenizer

    from .generate import Request, Run

OnToken = Callable[[int, int], None]
OnProgress = Callable[[int, int], None]


class Show(Protocol):
    """The three things there are to see."""

    def loading(self, name: str) -> Any:
        """Context manager, gives a callable (done, total) for the progress of loading."""

    def answers(self, prompt: str, tokenizer: Tokenizer, n: int) -> Any:
        """Context manager around one prompt, gives a callable (sample, token)."""

    def summary(self, run: Run, tokenizer: Tokenizer) -> None:
        """The sums at the end, or as far as it got."""


@contextmanager
def make_show(as_json: bool) -> Iterator[Show]:
    """The right :class:`Show` for this output."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    yield _Json() if as_json else _Text()


@contextmanager
def _progress(name: str, quiet: bool) -> Iterator[OnProgress]:
    """A bar on stderr if that is a terminal, else one line, or nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        if not quiet and sys.stderr is not None:
            print(f"loading {name} ...", file=sys.stderr, flush=True)
        yield lambda done, total: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"loading {name}", total=None)  # pulses while the file is read
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Json:
    """Collects everything and prints it once, at the end."""

    def loading(self, name: str) -> Any:
        return _progress(name, quiet=True)

    @contextmanager
    def answers(self, prompt: str, tokenizer: Tokenizer, n: int) -> Iterator[OnToken]:
        yield lambda sample, token: None

    def summary(self, run: Run, tokenizer: Tokenizer) -> None:
        print(json.dumps(_document(run, tokenizer), indent=2, ensure_ascii=False))


class _Text:
    """Answers as they come, then a table. Colors and boxes only on a terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def loading(self, name: str) -> Any:
        return _progress(name, quiet=False)

    @contextmanager
    def answers(self, prompt: str, tokenizer: Tokenizer, n: int) -> Iterator[OnToken]:
        """Streams the first sample; the others are computed beside it and follow it whole."""
        from kvpool.engine.tokenizer import TokenStream

        self._console.print(Text(f"> {_clean(prompt)}", style="bold cyan"))
        if n > 1:
            self._console.print(Text("[1] ", style="dim"), end="")
        stream = TokenStream(tokenizer)
        others: list[list[int]] = [[] for _ in range(n)]

        def on_token(sample: int, token: int) -> None:
            if sample == 0:
                self._write(stream.feed(token))
            others[sample].append(token)

        try:
            yield on_token
        finally:
            self._write(stream.end() + "\n")
        for i, tokens in enumerate(others[1:], start=2):
            self._console.print(Text(f"[{i}] ", style="dim"), end="")
            self._write(tokenizer.decode(tokens) + "\n")
        self._write("\n")

    def summary(self, run: Run, tokenizer: Tokenizer) -> None:
        if run.interrupted and sys.stderr is not None:
            done = sum(request.done for request in run.started)
            print(
                f"kvpool generate: interrupted; {done} of {len(run.requests)} prompts answered, "
                f"{_total(run)['tokens']} tokens generated, {run.pool.stats.used} blocks in use",
                file=sys.stderr,
            )
        if not run.started:
            return
        rows = [_row(run, request) for request in run.started]
        if len(rows) > 1:
            rows.append(_total_row(run))
        if self._console.is_terminal:
            self._console.print(_table(rows, self._console.width))
            self._console.print()
            self._console.print(_grid(_notes(run)))
        else:
            self._write("\n".join([*_columns(rows), "", *map(": ".join, _notes(run))]) + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(_clean(text))
        sys.stdout.flush()


def _clean(text: str) -> str:
    """Without the control characters by which a text could steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or (c.isprintable() or c == "\u00a0"))


# ---- the sums -----------------------------------------------------------------------------------

_TITLES = (
    "prompt",
    "prompt\ntokens",
    "from\ncache",
    "new\ntokens",
    "tokens/s",
    "peak\nblocks",
    "KV\nin blocks",
    "KV\ncontiguous",
)
_PROMPT_WIDTH = 40


def _table(rows: list[tuple[str, ...]], width: int) -> Table:
    """The prompts' column gets what the numbers leave of the terminal's width."""
    columns = list(zip(*rows, strict=True))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(_TITLES[0], overflow="ellipsis", no_wrap=True)
    for title, column in zip(_TITLES[1:], columns[1:], strict=True):
        needed = max(map(len, [*title.split("\n"), *column]))
        table.add_column(title, justify="right", width=needed)
        width -= needed + 3
    table.columns[0].width = max(len("prompt"), min(_PROMPT_WIDTH, width))
    for row in rows:
        table.add_row(*map(Text, row), style="bold" if row[0] == "all" else "")
    return table


def _grid(notes: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    for name, text in notes:
        grid.add_row(Text(name), Text(text))
    return grid


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """The same table as plain lines."""
    lines = [tuple(title.replace("\n", " ") for title in _TITLES), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def _size(n_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} B"


def _row(run: Run, request: Request) -> tuple[str, ...]:
    result = request.result
    prompt = " ".join(_clean(request.prompt).split())
    return (
        prompt if len(prompt) <= _PROMPT_WIDTH else prompt[: _PROMPT_WIDTH - 1] + "\u2026",
        str(result.prompt_tokens),
        str(result.cached_tokens),
        str(result.n_tokens),
        f"{_rate(result.n_tokens, result.decode_s):.1f}",
        str(request.peak_blocks),
        _size(request.peak_blocks * run.pool.block_bytes),
        _size(run.contiguous_bytes(request)),
    )


def _total_row(run: Run) -> tuple[str, ...]:
    total = _total(run)
    counts = (str(total[key]) for key in ("prompt_tokens", "cached_tokens", "tokens"))
    return ("all", *counts, f"{total['tokens_per_s']:.1f}", "", "", "")


def _notes(run: Run) -> list[tuple[str, str]]:
    """What stands under the table: (name, text)."""
    pool, args, total = run.pool, run.args, _total(run)
    stats = pool.stats
    share = 100 * run.manager.stats.hit_rate
    samples = "1 sequence" if args.n == 1 else f"{args.n} sequences"
    return [
        (
            "prefix cache",
            f"{total['cached_tokens']} of {total['prompt_tokens']} prompt tokens ({share:.0f} %)"
            + (", switched off" if args.prefix_cache == "none" else ""),
        ),
        (
            "blocks",
            f"{stats.free} free, {stats.used} used, {stats.cached} cached of {pool.n_blocks} "
            f"({pool.block_tokens} tokens, {pool.block_bytes:,} bytes each); "
            f"{stats.evictions} evicted",
        ),
        (
            "KV bytes",
            "in blocks: those in use at the prompt's peak; contiguous: "
            f"{samples} with room for the prompt and {args.max_tokens - 1} more tokens each",
        ),
    ]


def _total(run: Run) -> dict[str, Any]:
    results = [request.result for request in run.started]
    tokens = sum(result.n_tokens for result in results)
    stats = run.manager.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.hit_tokens,
        "tokens": tokens,
        "tokens_per_s": _rate(tokens, sum(result.decode_s for result in results)),
    }


def _document(run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """The JSON document; ``finish`` is null for a sample that was interrupted."""
    pool, args, cfg = run.pool, run.args, run.model.config
    stats = pool.stats
    prompts = [
        {
            "prompt": request.prompt,
            "prompt_tokens": request.result.prompt_tokens,
            "cached_tokens": request.result.cached_tokens,
            "samples": [
                {
                    "text": tokenizer.decode(sample.tokens),
                    "tokens": sample.tokens,
                    "finish": sample.finish or None,
                }
                for sample in request.result.samples
            ],
            "prefill_s": request.result.prefill_s,
            "decode_s": request.result.decode_s,
            "tokens_per_s": _rate(request.result.n_tokens, request.result.decode_s),
            "peak_blocks": request.peak_blocks,
            "peak_bytes": request.peak_blocks * pool.block_bytes,
            "contiguous_bytes": run.contiguous_bytes(request),
        }
        for request in run.started
    ]
    return {
        "kvpool": __version__,
        "model": {
            "name": run.model_name,
            "path": str(run.model_path),
            "n_layers": cfg.n_layers,
            "n_kv_heads": cfg.n_kv_heads,
            "head_dim": cfg.head_dim,
            "kv_bytes_per_token": cfg.kv_bytes_per_token,
        },
        "settings": {
            "system": args.system,
            "n": args.n,
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
            "prefix_cache": args.prefix_cache,
        },
        "prompts": prompts,
        "total": _total(run),
        "pool": {
            "n_blocks": pool.n_blocks,
            "block_tokens": pool.block_tokens,
            "block_bytes": pool.block_bytes,
            "free": stats.free,
            "used": stats.used,
            "cached": stats.cached,
            "evictions": stats.evictions,
        },
        "interrupted": run.interrupted,
    }
