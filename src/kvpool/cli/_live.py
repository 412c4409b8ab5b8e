"""The live view of ``kvpool generate`` on a terminal: every sequence, the pool, the speed."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from kvpool.engine.errors import MissingPackage

from ._show import clean, rate, short, size

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise MissingPackage.named(error.name) from error

if TYPE_CHECKING:
    from kvpool.engine.engine import Step
    from kvpool.engine.tokenizer import Tokenizer

    from .generate import Prompt, Run

__all__ = ["LiveView"]

_COLORS = {"used": "green", "cached": "blue", "free": "bright_black"}
_FRAME = 20  # lines that are no request: the panel, the table's head, answers above them
_RECENT_S = 2.0  # the speed shown is that of so many seconds


class LiveView:
    """Requests that run, with the pool's occupancy above them; answers scroll by as they are done.

    ``view`` is what is shown now, as rich sees it: the documentation's picture is made of it.
    """

    def __init__(self, console: Console, run: Run, tokenizer: Tokenizer) -> None:
        self._console, self._run, self._tokenizer = console, run, tokenizer
        self._pending = list(run.prompts)
        self._recent: list[tuple[float, int]] = []
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()
        for prompt in self._pending:
            if prompt.request.n_tokens:
                self._print_answer(prompt)

    def on_step(self, step: Step) -> None:
        """Shows the answers that are done, and the rest as it is."""
        for prompt in self.note(step):
            self._print_answer(prompt)
        self._live.update(self.view(), refresh=True)

    def note(self, step: Step) -> list[Prompt]:
        """Counts a step; gives the prompts that are answered now."""
        now = time.perf_counter()
        self._recent = [entry for entry in self._recent if now - entry[0] < _RECENT_S]
        self._recent.append((now, step.n_tokens))
        done = [prompt for prompt in self._pending if prompt.request.is_done]
        self._pending = [prompt for prompt in self._pending if not prompt.request.is_done]
        return done

    def view(self) -> RenderableType:
        """The pool and the requests that wait or run."""
        rows = max(3, self._console.height - _FRAME)
        return Group(self._pool(), self._requests(rows))

    def _print_answer(self, prompt: Prompt) -> None:
        print_ = self._live.console.print
        print_(Text(f"> {clean(prompt.text)}", style="bold cyan"))
        samples = prompt.request.samples
        for i, sample in enumerate(samples, start=1):
            number = Text(f"[{i}] " if len(samples) > 1 else "", style="dim")
            print_(number + Text(clean(self._tokenizer.decode(sample.tokens)), style=""))
        print_()

    def _pool(self) -> Panel:
        run = self._run
        pool, stats, manager = run.pool, run.pool.stats, run.manager.stats
        width = max(20, min(60, self._console.width - 50))
        bar = Text()
        for name, n in (("used", stats.used), ("cached", stats.cached)):
            cells = round(width * n / pool.n_blocks)
            bar.append("\u2588" * min(cells, width - len(bar)), style=_COLORS[name])
        bar.append("\u2591" * (width - len(bar)), style=_COLORS["free"])
        for name in _COLORS:
            bar.append(f"  {name} ", style=_COLORS[name]).append(str(getattr(stats, name)))
        seconds = sum(step.seconds for step in run.steps[-len(self._recent) :])
        speed = rate(sum(n for _, n in self._recent), seconds)
        preempted = sum(len(step.preempted) for step in run.steps)
        drafted = sum(step.n_drafted for step in run.steps)
        facts = [
            f"{speed:.1f} tokens/s",
            f"prefix hits {manager.hit_tokens} of {manager.prompt_tokens} tokens",
            f"{len(run.steps)} passes",
            f"{preempted} preempted",
        ]
        if drafted:
            right = sum(step.n_accepted for step in run.steps)
            facts.append(f"drafts {right} of {drafted}")
        title = f"{pool.n_blocks} blocks of {pool.block_tokens} tokens, "
        title += size(pool.n_blocks * pool.block_bytes)
        return Panel(Group(bar, Text("   ".join(facts))), title=title, title_align="left")

    def _requests(self, n_rows: int) -> Table:
        table = Table(box=None, pad_edge=False, expand=True)
        table.add_column("prompt", no_wrap=True, width=26)
        table.add_column("state", no_wrap=True, width=9)
        table.add_column("computed", width=14)
        table.add_column("blocks", justify="right", width=6)
        table.add_column("tokens", justify="right", width=9)
        table.add_column("answer", no_wrap=True, overflow="ellipsis", ratio=1)
        running = self._run.engine.scheduler.running
        ordered = sorted(self._pending, key=lambda prompt: prompt.request not in running)
        for prompt in ordered[:n_rows]:
            request = prompt.request
            total = len(request.prompt) + request.max_tokens
            computed = max((s.n_computed for s in request.sequences()), default=0)
            state, style = "waiting", "yellow"
            if request in running:
                state, style = ("prefill", "magenta") if request.trunk else ("decode", "green")
            elif request.n_preempted:
                state, style = "preempted", "red"
            first = request.samples[0].tokens
            blocks = {int(block) for s in request.sequences() for block in s.blocks}
            answer = " ".join(clean(self._tokenizer.decode(first[-40:])).split())
            n = max(len(sample.tokens) for sample in request.samples)
            many = f"{request.width}\u00d7" if request.width > 1 else ""
            table.add_row(
                Text(short(prompt.text, 26)),
                Text(state, style=style),
                ProgressBar(total=total, completed=computed, width=14),
                str(len(blocks)),
                f"{many}{n}/{request.max_tokens}",
                Text(answer[-60:], style="dim"),
            )
        if len(ordered) > n_rows:
            table.add_row(Text(f"and {len(ordered) - n_rows} more", style="dim"))
        return table
