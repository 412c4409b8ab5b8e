"""The report: one HTML page with everything in it, for a browser on any screen, online or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from kvpool import __version__

from ._page import CSS, READOUT, SCRIPT
from .charts import count, duration, percent
from .figures import figures, size_text
from .study import Study

__all__ = ["render"]

_WIDE, _NARROW = 760, 348


def render(study: Study) -> str:
    """The page. It loads nothing from anywhere, and works without its script, which only reads the
    hit curve out where one points at it."""
    sections = "".join(
        f"<section class='card' id='{chart.name}' data-x='{chart.x.low},{chart.x.high}'>"
        f"<h2>{escape(chart.title)}</h2>"
        f"<p class='about'>{escape(about)}</p>"
        f"{READOUT if chart.name == 'curve' else ''}"
        f"{chart.svg(_WIDE, css='wide')}{chart.svg(_NARROW, css='narrow')}</section>"
        for chart, about in figures(study)
    )
    title = f"KV cache replay: {study.name}"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<link rel='icon' href='data:,'>"
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>"
        f"<header><p class='kicker'>kvpool replay</p><h1>{escape(study.name)}</h1>"
        f"<p class='about'>{escape(_subtitle(study))}</p>{_notes(study)}</header>"
        f"<div class='tiles'>{_tiles(study)}</div>{sections}{_tables(study)}"
        f"<footer>kvpool {__version__}. {escape(_footer(study))}</footer></main>"
        f"<script type='application/json' id='data'>{_data(study)}</script>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _subtitle(study: Study) -> str:
    text = (
        f"{study.primary.requests:,} requests, {study.primary.prompt_tokens:,} prompt tokens in "
        f"{study.primary.prompt_blocks:,} blocks of {study.block_tokens}"
    )
    if study.duration_s > 0:
        text += f", over {duration(study.duration_s)}"
    return text + "."


def _notes(study: Study) -> str:
    notes = list(study.notes)
    if study.interrupted:
        notes.insert(0, "Interrupted: these are the results up to there.")
    if study.problems.count:
        notes.append(
            f"{study.problems.count:,} bad lines were left out, first {study.problems.first[0]}"
        )
    return "".join(f"<p class='note'>{escape(note)}</p>" for note in notes)


def _tiles(study: Study) -> str:
    result, reuse = study.primary, study.reuse
    second = size_text(study)
    size = f"{count(result.n_blocks)} blocks" + (f", {second(result.n_blocks)}" if second else "")
    tiles = []
    if study.has_hashes:
        knee = dict(study.knees())[0.9]
        tiles.append((percent(round(result.hit_rate, 4)), "hit rate", f"by tokens, with {size}"))
        tiles.append(
            (percent(round(study.ceiling, 4)), "ceiling", "if nothing is ever evicted, by blocks")
        )
        about = "for nine tenths of the ceiling" + (f": {second(knee)}" if second else "")
        tiles.append((count(knee), "blocks to have", about))
    tiles.append((count(result.occupancy.peak), "blocks in use", f"at the peak, of {size}"))
    if result.clock == "real time":
        wait = result.wait_s.quantile(0.99)
        about = f"99% of waits; {result.preemptions:,} preempted"
        tiles.append((duration(wait) if wait == wait else "none", "wait", about))
    elif not study.has_hashes:
        tiles.append((count(reuse.requests), "requests", f"longest: {count(reuse.longest)} blocks"))
    return "".join(
        f"<div class='tile'><b>{escape(value)}</b><span>{escape(name)}</span>"
        f"<small>{escape(about)}</small></div>"
        for value, name, about in tiles
    )


def _tables(study: Study) -> str:
    second = size_text(study)
    real = study.primary.clock == "real time"
    head = ["blocks", *(["memory"] if second else []), "hit rate", "of blocks", "hits"]
    head += ["evicted", "in use, mean", "peak", "rejected"]
    head += ["waited", "preempted", "wait p99"] if real else ["ended early"]
    rows = []
    for result in study.results:
        row = [f"{result.n_blocks:,}", *([second(result.n_blocks)] if second else [])]
        row += [percent(result.hit_rate), percent(result.block_hit_rate), f"{result.hit_blocks:,}"]
        row += [f"{result.evictions:,}", f"{result.occupancy.mean:,.0f}"]
        row += [f"{result.occupancy.peak:,}", f"{result.rejected:,}"]
        wait = result.wait_s.quantile(0.99)
        row += (
            [
                f"{result.waited:,}",
                f"{result.preemptions:,}",
                duration(wait) if wait == wait else "",
            ]
            if real
            else [f"{result.freed_early:,}"]
        )
        rows.append(row)
    tables = [("Replays", head, rows)]
    if study.has_hashes:
        knees = [
            [percent(share), f"{size:,}", *([second(size)] if second else [])]
            for share, size in study.knees()
        ]
        head = ["of what can be hit", "blocks", *(["memory"] if second else [])]
        tables.append(("What it takes", head, knees))
        kept = [
            [f"{size:,}", *(duration(h.quantile(q)) for q in (0.1, 0.5, 0.9))]
            for size, h in study.reuse.retention_s.items()
            if h.total
        ]
        tables.append(
            ("How long an unused block stays", ["blocks", "shortest 10%", "median", "90%"], kept)
        )
    if study.policy_hits:
        total = max(study.reuse.blocks, 1)
        picks = _picks(study)
        head = ["policy", *(count(study.policy_sizes[i]) for i in picks)]
        body = [
            [name, *(percent(round(hits[i] / total, 4)) for i in picks)]
            for name, hits in study.policy_hits.items()
        ]
        tables.append(("Hit rate by order of eviction and pool size, in blocks", head, body))
    prefixes = [
        [row["prefix"][:8], f"{row['blocks']:,}", f"{row['requests']:,}", f"{row['hits']:,}"]
        for row in study.reuse.top_prefixes(8)
    ]
    if study.has_hashes:
        head = ["prefix", "blocks", "requests", "hit whole"]
        tables.append(("Beginnings that are shared most", head, prefixes))
    sessions = [
        [row["session"], f"{row['requests']:,}", f"{row['blocks']:,}", f"{row['hit_blocks']:,}"]
        for row in study.reuse.top_sessions(8)
    ]
    tables.append(
        ("Sessions with most requests", ["session", "requests", "blocks", "hit"], sessions)
    )
    return "".join(_table(*table) for table in tables if table[2])


def _picks(study: Study) -> list[int]:
    n = len(study.policy_sizes)
    return sorted({round(i * (n - 1) / 4) for i in range(5)}) if n else []


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<section class='card'><h2>{escape(title)}</h2><div class='scroll'><table><thead>"
        f"<tr>{cells}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _footer(study: Study) -> str:
    settings = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in study.settings.items())
    return f"Format {study.format}; {settings}."


def _data(study: Study) -> str:
    data = {"curve": study.curve(), "bytes": study.bytes_per_block, "tokens": study.block_tokens}
    return json.dumps(data).replace("</", "<\\/")
