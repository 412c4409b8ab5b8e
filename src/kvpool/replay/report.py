"""The report: one HTML page with everything in it, for a browser on any screen, online or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from kvpool import __version__

from .charts import COLORS, TEXT_CSS, count, duration, percent
from .figures import figures, size_text
from .study import Study

__all__ = ["render"]

_WIDE, _NARROW = 760, 348


def render(study: Study) -> str:
    """The page. It loads nothing from anywhere, and works without its script, which only reads the
    hit curve out where one points at it."""
    sections = "".join(
        f"<section class='card' id='{chart.name}' data-x='{chart.x.low},{chart.x.high}'><h2>{escape(chart.title)}</h2>"
        f"<p class='about'>{escape(about)}</p>"
        f"{_READOUT if chart.name == 'curve' else ''}"
        f"{chart.svg(_WIDE, css='wide')}{chart.svg(_NARROW, css='narrow')}</section>"
        for chart, about in figures(study)
    )
    title = f"KV cache replay: {study.name}"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<link rel='icon' href='data:,'>"
        f"<title>{escape(title)}</title><style>{_css()}</style></head><body><main>"
        f"<header><p class='kicker'>kvpool replay</p><h1>{escape(study.name)}</h1>"
        f"<p class='about'>{escape(_subtitle(study))}</p>{_notes(study)}</header>"
        f"<div class='tiles'>{_tiles(study)}</div>{sections}{_tables(study)}"
        f"<footer>kvpool {__version__}. {escape(_footer(study))}</footer></main>"
        f"<script type='application/json' id='data'>{_data(study)}</script>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _subtitle(study: Study) -> str:
    reuse = study.reuse
    text = (
        f"{reuse.requests:,} requests, {study.primary.prompt_tokens:,} prompt tokens in "
        f"{reuse.blocks:,} blocks of {study.block_tokens}"
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
            (percent(round(study.ceiling, 4)), "ceiling", "by blocks, if nothing is ever evicted")
        )
        about = "blocks for 90% of that" + (f": {second(knee)}" if second else "")
        tiles.append((count(knee), "to buy", about))
    tiles.append((count(result.occupancy.peak), "peak in use", f"blocks held at once, of {size}"))
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
            [f"{result.waited:,}", f"{result.preemptions:,}", duration(wait) if wait == wait else ""]
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
        tables.append(("What to buy", head, knees))
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
    tables.append(("Sessions with most requests", ["session", "requests", "blocks", "hit"], sessions))
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


_READOUT = "<p class='readout' id='readout'>Point at the curve, or tap it, to read it.</p>"

# Which point of the curve is nearest to the pointer, in words and as a mark.
_SCRIPT = """
(function(){
var d=JSON.parse(document.getElementById('data').textContent),c=d.curve,box=document.getElementById('curve');
if(!box||!c.length)return;
function n(x){return x>=1e6?(x/1e6).toPrecision(3)+'M':x>=1e3?(x/1e3).toPrecision(3)+'k':''+x}
box.querySelectorAll('svg.chart').forEach(function(svg){
var g=function(k){return +svg.getAttribute('data-'+k)},mark=document.createElementNS(svg.namespaceURI,'path');
mark.setAttribute('stroke','var(--muted)');mark.setAttribute('id','mark-'+svg.getAttribute('width'));
svg.appendChild(mark);
function move(e){
var r=svg.getBoundingClientRect(),x=(e.clientX-r.left)*svg.viewBox.baseVal.width/r.width;
var s=box.getAttribute('data-x').split(','),lo=Math.log(+s[0]),hi=Math.log(+s[1]);
var size=Math.exp(lo+(hi-lo)*Math.min(1,Math.max(0,(x-g('left'))/(g('right')-g('left')))));
var i=0;while(i<c.length-1&&c[i+1][0]<=size)i++;
size=Math.max(Math.round(size),c[0][0]);
var text=n(size)+' blocks ('+n(size*d.tokens)+' tokens'+(d.bytes?', '+(size*d.bytes/1073741824).toPrecision(3)+' GiB':'')+'): '+(100*c[i][1]).toFixed(1)+'% of blocks hit';
document.getElementById('readout').textContent=text;
var px=g('left')+(Math.log(size)-lo)/(hi-lo)*(g('right')-g('left'));
mark.setAttribute('d','M'+px.toFixed(1)+' '+g('top')+'V'+g('bottom'));}
svg.addEventListener('pointermove',move);svg.addEventListener('pointerdown',move);
svg.style.touchAction='pan-y';});
})();
"""


def _css() -> str:
    light = ";".join(f"--{name}:{colors[0]}" for name, colors in COLORS.items())
    dark = ";".join(f"--{name}:{colors[1]}" for name, colors in COLORS.items())
    return (
        f":root{{{light};--page:#f3f5f8;color-scheme:light dark}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark};--page:#0e1319}}}}"
        "*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);"
        "font:15px/1.5 ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,"
        "sans-serif}main{max-width:840px;margin:0 auto;padding:20px 16px 40px}"
        "h1{font-size:26px;line-height:1.2;margin:2px 0 6px;overflow-wrap:anywhere}"
        "h2{font-size:17px;margin:0 0 4px}.kicker{margin:0;color:var(--blue);font-weight:600;"
        "font-size:13px;letter-spacing:.02em}.about{margin:0 0 12px;color:var(--muted)}"
        ".note{margin:8px 0 0;padding:8px 12px;border-left:3px solid var(--amber);"
        "background:var(--paper);border-radius:4px}"
        ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;"
        "margin:16px 0}.tile,.card{background:var(--paper);border:1px solid var(--grid);"
        "border-radius:12px}.tile{padding:12px 14px}.tile b{display:block;font-size:25px;"
        "line-height:1.2;font-variant-numeric:tabular-nums}.tile span{display:block;"
        "font-weight:600}.tile small{color:var(--muted);font-size:12.5px;display:block;"
        "line-height:1.35}.card{padding:16px;margin:12px 0}svg.chart{display:block;max-width:100%;"
        "height:auto}.narrow{display:none!important}.readout{margin:0 0 8px;font-weight:600;"
        "font-variant-numeric:tabular-nums;min-height:1.5em}.scroll{overflow-x:auto}"
        "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;"
        "white-space:nowrap}th,td{text-align:right;padding:6px 10px;border-bottom:1px solid "
        "var(--grid)}th{color:var(--muted);font-weight:500;font-size:13px}"
        "th:first-child,td:first-child{text-align:left;padding-left:0}footer{color:var(--muted);"
        "font-size:13px;margin-top:18px}"
        "@media(max-width:560px){main{padding:14px 10px 30px}.card{padding:14px 12px}"
        ".wide{display:none!important}.narrow{display:block!important}"
        ".tiles{grid-template-columns:1fr 1fr;gap:10px}h1{font-size:22px}}"
        f"{TEXT_CSS}"
    )
