"""The report, looked at in a browser: what is drawn, on a desk and on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli import main
from kvpool.replay import InFlight, Reuse, open_trace, synthesize
from kvpool.replay.report import render
from kvpool.replay.study import Study

BLUE, GREEN = (0x1D, 0x63, 0xD8), (0x0A, 0x87, 0x54)


def a_study(**more: Any) -> Study:
    clocks = [InFlight(n, 16) for n in (3000, 12000)]
    reuse = Reuse(sizes=[3000, 12000])
    study = Study("a <trace>", "synth", 16, True, clocks, reuse, {"in_flight": 64}, main=1, **more)
    study.run(synthesize(seed=3, requests=800))
    study.simulate(["lru", "s3-fifo", "optimal"], 8)
    return study


@pytest.fixture(scope="module", name="page")
def page_fixture() -> str:
    return render(a_study(bytes_per_block=2.0 * 2**20))


class _Tags(HTMLParser):
    VOID = ("meta", "link", "rect", "path", "circle", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(page: str) -> None:
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    assert {"curve", "policies", "occupancy", "distances", "ages"} <= set(tags.ids)
    without = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<img|<iframe|src=", without)
    assert "a &lt;trace&gt;" in page
    assert "<trace>" not in page


def test_the_page_says_what_is_not_known() -> None:
    clock, reuse = InFlight(500, 16), Reuse()
    study = Study("t", "azure", 16, False, [clock], reuse, {}, notes=["No hashes here."])
    study.run(synthesize("shared", seed=1, requests=50))
    study.interrupted = True
    text = render(study)
    assert "No hashes here." in text
    assert "Interrupted" in text
    assert "id='curve'" not in text
    assert "id='occupancy'" in text


PROBE = """
<script>
window.addEventListener('load', function () {
  var seen = [].slice.call(document.querySelectorAll('svg.chart')).filter(function (s) {
    return getComputedStyle(s).display !== 'none'; });
  var box = seen[0].getBoundingClientRect();
  seen[0].dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width * 0.6,
    clientY: box.top + box.height / 2, bubbles: true}));
  var texts = [].slice.call(document.querySelectorAll('svg.chart text')).filter(function (t) {
    return t.getBoundingClientRect().width > 0; });
  var out = seen.map(function (s) { var r = s.getBoundingClientRect();
    return {section: s.closest('section').id, left: r.left, top: r.top + scrollY, width: r.width,
            height: r.height}; });
  var probe = document.createElement('pre');
  probe.id = 'probe';
  probe.textContent = JSON.stringify({charts: out, readout:
    document.getElementById('readout').textContent, wide: document.documentElement.scrollWidth,
    inner: innerWidth, smallest: Math.min.apply(null, texts.map(function (t) {
      return t.getBoundingClientRect().height; })),
    cut: texts.filter(function (t) { var a = t.getBoundingClientRect(),
      b = t.closest('svg').getBoundingClientRect();
      return a.left < b.left - 1 || a.right > b.right + 1; }).map(function (t) {
      return t.textContent; }), height: document.documentElement.scrollHeight});
  document.body.appendChild(probe);
});
</script>"""


def browse(page: str, folder: Path, width: int) -> tuple[dict[str, Any], Any]:
    """(what the page says of itself, its picture as RGB rows) at a width in CSS pixels."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed (scripts/system-packages.sh chromium)")
    image = pytest.importorskip("PIL.Image", reason="needs Pillow, of kvpool[plot]")
    path = folder / "report.html"
    path.write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    shot = folder / f"shot-{width}.png"
    common = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},6000",
        "--virtual-time-budget=2000",
    ]  # fmt: skip
    dom = subprocess.run(
        [*common, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120,
        check=True,
    ).stdout  # fmt: skip
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)
    assert found, dom[-2000:]
    subprocess.run(
        [*common, f"--screenshot={shot}", path.as_uri()], capture_output=True, timeout=120,
        check=True,
    )  # fmt: skip
    probe = json.loads(found.group(1).replace("&lt;", "<").replace("&gt;", ">"))
    return probe, image.open(shot).convert("RGB")


def near(pixel: tuple[int, int, int], color: tuple[int, int, int]) -> bool:
    return sum(abs(a - b) for a, b in zip(pixel, color, strict=True)) < 60


@pytest.mark.parametrize("width", [1000, 500])
def test_what_a_browser_draws(page: str, tmp_path: Path, width: int) -> None:
    # 500 is the narrowest window that headless Chromium makes; the page is a phone's up to 560.
    probe, picture = browse(page, tmp_path, width)
    sections = [chart["section"] for chart in probe["charts"]]
    assert sections == ["curve", "policies", "occupancy", "distances", "ages"]  # one drawing each
    assert probe["wide"] <= probe["inner"]  # nothing sticks out sideways
    assert probe["cut"] == []  # no label leaves its drawing
    assert probe["smallest"] >= 11  # CSS pixels of a line of text
    assert re.search(r"[\d.]+k? blocks \(.* GiB\): [\d.]+% of blocks hit", probe["readout"])
    narrow = width < 560
    for chart in probe["charts"]:
        assert (chart["width"] <= 460) == narrow

    # The curve: a blue line in every tenth of the plot's width, never falling.
    box = probe["charts"][0]
    left, right = int(box["left"] + 60), int(box["left"] + box["width"] - 24)
    top, bottom = int(box["top"] + 44), int(box["top"] + box["height"] - 60)
    heights = []
    for i in range(10):
        rows = [
            y
            for x in range(left + (right - left) * i // 10, left + (right - left) * (i + 1) // 10)
            for y in range(top, bottom)
            if near(picture.getpixel((x, y)), BLUE)
        ]
        assert rows, f"no line in tenth {i} of the curve"
        heights.append(sum(rows) / len(rows))
    assert all(b <= a + 2 for a, b in pairwise(heights))
    assert heights[0] - heights[-1] > 40
    greens = sum(
        near(picture.getpixel((x, y)), GREEN)
        for x in range(left, right)
        for y in range(top, bottom)
    )
    assert greens > 50  # the bound beside it
    # Bars of the reuse distances, held ones in blue.
    box = probe["charts"][3]
    blues = sum(
        near(picture.getpixel((x, y)), BLUE)
        for x in range(int(box["left"]) + 50, int(box["left"] + box["width"]), 2)
        for y in range(int(box["top"]) + 40, int(box["top"] + box["height"]), 2)
    )
    assert blues > 200


def test_the_command_writes_page_picture_and_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "t.jsonl"
    assert main(["trace", "synth", "--requests", "300", "--out", str(trace)]) == 0
    out = {kind: tmp_path / f"out.{kind}" for kind in ("html", "png", "csv", "svg")}
    arguments = ["replay", str(trace), "--blocks", "5000", "--report", str(out["html"])]
    assert main([*arguments, "--plot", str(out["png"]), "--csv", str(out["csv"])]) == 0
    assert main(["replay", str(trace), "--blocks", "5000", "--plot", str(out["svg"])]) == 0
    assert out["png"].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in out["svg"].read_bytes()[:2000]
    assert "t.jsonl" in out["html"].read_text()
    head, *rows = out["csv"].read_text().splitlines()
    assert head == "blocks,tokens,bytes,lru_block_hit_rate"
    rates = [float(row.split(",")[3]) for row in rows]
    assert len(rates) > 20
    assert rates == sorted(rates)
    with open_trace([str(trace)]) as opened:
        reuse = Reuse()
        clock = InFlight(5000, 16)
        for batch in opened:
            reuse.feed(clock.feed(batch))
    assert rates[-1] == pytest.approx(reuse.seen_before / reuse.blocks, abs=1e-6)
