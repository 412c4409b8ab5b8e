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
    from kvpool.engine.engine import Step
    from kvpool.engine.tokenizer import Tokenizer, TokenStream

    from .generate import Prompt, Run

OnStep = Callable[["Step"], None]
OnProgress = Callable[[int, int], None]


class Show(Protocol):
    """The three things there are to see."""

    def loading(self, name: str) -> Any:
        """Context manager, gives a callable (done, total) for the progress of loading."""

    def answers(self, run: Run, tokenizer: Tokenizer) -> Any:
        """Context manager around all answers, gives a callable for every step of the engine."""

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
    def answers(self, run: Run, tokenizer: Tokenizer) -> Iterator[OnStep]:
        yield lambda step: None

    def summary(self, run: Run, tokenizer: Tokenizer) -> None:
        print(json.dumps(_document(run, tokenizer), indent=2, ensure_ascii=False))


class _Text:
    """Answers as they come, then a table. Colors and boxes only on a terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def loading(self, name: str) -> Any:
        return _progress(name, quiet=False)

    @contextmanager
    def answers(self, run: Run, tokenizer: Tokenizer) -> Iterator[OnStep]:
        """On a terminal, what runs as a live view and each answer as it is done; in a pipe, the
        answers one after the other, the first one that is not done as it comes."""
        if self._console.is_terminal:
            from ._live import LiveView

            with LiveView(self._console, run, tokenizer) as view:
                yield view.on_step
            return
        shown = _InOrder(run, tokenizer, self._write)
        try:
            yield shown.on_step
        finally:
            shown.end()

    def summary(self, run: Run, tokenizer: Tokenizer) -> None:
        if run.interrupted and sys.stderr is not None:
            done = sum(prompt.is_answered for prompt in run.prompts)
            print(
                f"kvpool generate: interrupted; {done} of {len(run.prompts)} prompts answered, "
                f"{_total(run)['tokens']} tokens generated, {run.pool.stats.used} blocks in use",
                file=sys.stderr,
            )
        if not run.started:
            return
        rows = [_row(run, prompt) for prompt in run.started]
        if len(rows) > 1:
            rows.append(_total_row(run))
        if self._console.is_terminal:
            self._console.print(_table(rows, self._console.width))
            self._console.print()
            self._console.print(_grid(_notes(run)))
        else:
            self._write("\n".join([*_columns(rows), "", *map(": ".join, _notes(run))]) + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(clean(text))
        sys.stdout.flush()


class _InOrder:
    """Writes the answers in the order of the prompts: of the one at hand every token as it comes,
    of those behind it what there is when their turn comes."""

    def __init__(self, run: Run, tokenizer: Tokenizer, write: Callable[[str], None]) -> None:
        self._run, self._tokenizer, self._write = run, tokenizer, write
        self._at = self._n_written = 0
        self._stream: TokenStream | None = None

    def on_step(self, step: Step) -> None:
        """Writes what is new."""
        prompts = self._run.prompts
        while self._at < len(prompts):
            prompt = prompts[self._at]
            self._write_new(prompt)
            if not prompt.request.is_done:
                return
            self._write_rest(prompt)

    def end(self) -> None:
        """What was begun and not finished."""
        for prompt in self._run.prompts[self._at :]:
            if prompt.request.n_tokens:
                self._write_new(prompt)
                self._write_rest(prompt)

    def _write_new(self, prompt: Prompt) -> None:
        from kvpool.engine.tokenizer import TokenStream

        request = prompt.request
        if request.beams and not request.is_done:
            return  # beams change places
        if self._stream is None:
            self._stream, self._n_written = TokenStream(self._tokenizer), 0
            self._write(f"> {clean(prompt.text)}\n" + ("[1] " if request.n > 1 else ""))
        new = request.samples[0].tokens[self._n_written :] if request.samples else []
        self._n_written += len(new)
        self._write("".join(map(self._stream.feed, new)))

    def _write_rest(self, prompt: Prompt) -> None:
        """The end of the first sample, and the other ones."""
        if self._stream is not None:
            self._write(self._stream.end() + "\n")
        for i, sample in enumerate(prompt.request.samples[1:], start=2):
            self._write(f"[{i}] {self._tokenizer.decode(sample.tokens)}\n")
        self._write("\n")
        self._stream, self._at = None, self._at + 1


def clean(text: str) -> str:
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


def rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def size(n_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} B"


def short(prompt: str, width: int = _PROMPT_WIDTH) -> str:
    """A prompt on one line of at most ``width`` characters."""
    text = " ".join(clean(prompt).split())
    return text if len(text) <= width else text[: width - 1] + "\u2026"


def _row(run: Run, prompt: Prompt) -> tuple[str, ...]:
    request = prompt.request
    return (
        short(prompt.text),
        str(len(request.prompt)),
        str(request.n_cached),
        str(request.n_tokens),
        f"{rate(request.n_tokens, request.decode_s):.1f}",
        str(request.peak_blocks),
        size(request.peak_blocks * run.pool.block_bytes),
        size(run.contiguous_bytes(prompt)),
    )


def _total_row(run: Run) -> tuple[str, ...]:
    total, peak = _total(run), run.manager.stats.peak_used
    counts = (str(total[key]) for key in ("prompt_tokens", "cached_tokens", "tokens"))
    contiguous = sum(map(run.contiguous_bytes, run.started))
    speed = f"{total['tokens_per_s']:.1f}"
    return ("all", *counts, speed, str(peak), size(peak * run.pool.block_bytes), size(contiguous))


def _notes(run: Run) -> list[tuple[str, str]]:
    """What stands under the table: (name, text)."""
    pool, args, total = run.pool, run.args, _total(run)
    stats = pool.stats
    share = 100 * run.manager.stats.hit_rate
    width = run.prompts[0].request.width
    samples = "1 sequence" if width == 1 else f"{width} sequences"
    notes = [
        (
            "prefix cache",
            f"{total['cached_tokens']} of {total['prompt_tokens']} prompt tokens ({share:.0f} %)"
            + (", switched off" if args.prefix_cache == "none" else ""),
        ),
        (
            "blocks",
            f"{stats.free} free, {stats.used} used, {stats.cached} cached of {pool.n_blocks} "
            f"({pool.block_tokens} tokens, {pool.block_bytes:,} bytes each); "
            f"{stats.evictions} evicted, {total['preemptions']} requests preempted",
        ),
        (
            "KV bytes",
            "in blocks: those in use at the prompt's peak, shared ones too (all: at the pool's); "
            f"contiguous: {samples} with room for the prompt and {args.max_tokens - 1} more tokens "
            "each",
        ),
    ]
    for tier in run.manager.tiers.stats() if run.manager.tiers is not None else ():
        text = f"{tier.hits} blocks found ({size(tier.hit_bytes)}), {tier.stored} stored"
        for name in ("dropped", "not_stored", "errors", "timeouts"):
            if n := getattr(tier, name):
                text += f", {n} {name.replace('_', ' ')}"
        if tier.refused:
            text += f", {sum(tier.refused.values())} refused"
        if tier.last_error:
            text += f"; {clean(tier.last_error)}"
        notes.append((clean(tier.name), text))
    if args.draft:
        text = f"{total['accepted_tokens']} of {total['drafted_tokens']} guessed tokens were right"
        notes.append(("drafts", text))
    return notes


def _total(run: Run) -> dict[str, Any]:
    tokens = sum(prompt.request.n_tokens for prompt in run.prompts)  # of beams, those kept
    stats = run.manager.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.hit_tokens,
        "tokens": tokens,
        "tokens_per_s": rate(tokens, run.elapsed_s),
        "elapsed_s": run.elapsed_s,
        "passes": len(run.steps),
        "preemptions": sum(len(step.preempted) for step in run.steps),
        "drafted_tokens": sum(step.n_drafted for step in run.steps),
        "accepted_tokens": sum(step.n_accepted for step in run.steps),
        "peak_blocks": stats.peak_used,
    }


def _document(run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """The JSON document; ``finish`` is null for a sample that was interrupted."""
    pool, args, cfg = run.pool, run.args, run.model.config
    stats = pool.stats
    prompts = [
        {
            "prompt": prompt.text,
            "prompt_tokens": len(prompt.request.prompt),
            "cached_tokens": prompt.request.n_cached,
            "samples": [
                {
                    "text": tokenizer.decode(sample.tokens),
                    "tokens": sample.tokens,
                    "finish": sample.finish if sample.finish != "abort" else None,
                    **({"score": sample.score} if args.beams else {}),
                }
                for sample in prompt.request.samples
            ],
            "prefill_s": prompt.request.prefill_s,
            "decode_s": prompt.request.decode_s,
            "tokens_per_s": rate(prompt.request.n_tokens, prompt.request.decode_s),
            "preempted": prompt.request.n_preempted,
            "peak_blocks": prompt.request.peak_blocks,
            "peak_bytes": prompt.request.peak_blocks * pool.block_bytes,
            "contiguous_bytes": run.contiguous_bytes(prompt),
        }
        for prompt in run.started
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
            "top_k": args.top_k,
            "top_p": args.top_p,
            "seed": args.seed,
            "beams": args.beams,
            "draft": args.draft,
            "batch": args.batch,
            "chunk": args.chunk,
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
        **({"tiers": _tiers(run)} if args.tier else {}),
    }


def _tiers(run: Run) -> list[dict[str, Any]]:
    fields: list[str] = ["name", "hits", "hit_bytes", "misses", "stored", "not_stored", "dropped"]
    fields += ["errors", "timeouts", "refused", "last_error"]
    tiers = run.manager.tiers
    return [
        {field: getattr(stats, field) for field in fields}
        for stats in (tiers.stats() if tiers is not None else ())
    ]
