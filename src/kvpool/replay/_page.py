"""The style and the script of the report's page."""

from __future__ import annotations

from .charts import COLORS, TEXT_CSS

__all__ = ["CSS", "READOUT", "SCRIPT"]

READOUT = "<p class='readout' id='readout'>Point at the curve, or tap it, to read it.</p>"

# Reads the curve where the pointer is, in words and as a mark. The page works without it.
SCRIPT = """
(function () {
  var data = JSON.parse(document.getElementById('data').textContent), curve = data.curve;
  var box = document.getElementById('curve');
  if (!box || !curve.length) return;
  var ends = box.getAttribute('data-x').split(',').map(Number).map(Math.log);
  function short(x) {
    return x >= 1e6 ? (x / 1e6).toPrecision(3) + 'M' : x >= 1e3 ? (x / 1e3).toPrecision(3) + 'k'
      : '' + x;
  }
  box.querySelectorAll('svg.chart').forEach(function (svg) {
    var left = +svg.dataset.left, right = +svg.dataset.right;
    var mark = document.createElementNS(svg.namespaceURI, 'path');
    mark.setAttribute('stroke', 'var(--muted)');
    svg.appendChild(mark);
    function read(event) {
      var seen = svg.getBoundingClientRect();
      var x = (event.clientX - seen.left) * svg.viewBox.baseVal.width / seen.width;
      var part = Math.min(1, Math.max(0, (x - left) / (right - left)));
      var size = Math.round(Math.exp(ends[0] + (ends[1] - ends[0]) * part));
      size = Math.max(size, curve[0][0]);
      var i = 0;
      while (i < curve.length - 1 && curve[i + 1][0] <= size) i++;
      var text = short(size) + ' blocks (' + short(size * data.tokens) + ' tokens';
      if (data.bytes) text += ', ' + (size * data.bytes / 1073741824).toPrecision(3) + ' GiB';
      text += '): ' + (100 * curve[i][1]).toFixed(1) + '% of blocks hit';
      document.getElementById('readout').textContent = text;
      part = (Math.log(size) - ends[0]) / (ends[1] - ends[0]);
      var at = (left + part * (right - left)).toFixed(1);
      mark.setAttribute('d', 'M' + at + ' ' + svg.dataset.top + 'V' + svg.dataset.bottom);
    }
    svg.addEventListener('pointermove', read);
    svg.addEventListener('pointerdown', read);
    svg.style.touchAction = 'pan-y';
  });
})();
"""

_LIGHT = ";".join(f"--{name}:{colors[0]}" for name, colors in COLORS.items())
_DARK = ";".join(f"--{name}:{colors[1]}" for name, colors in COLORS.items())

CSS = (
    f":root{{{_LIGHT};--page:#f3f5f8;color-scheme:light dark}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_DARK};--page:#0e1319}}}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
  font:15px/1.5 ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}
main{max-width:840px;margin:0 auto;padding:20px 16px 40px}
h1{font-size:26px;line-height:1.2;margin:2px 0 6px;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 4px}
.kicker{margin:0;color:var(--blue);font-weight:600;font-size:13px;letter-spacing:.02em}
.about{margin:0 0 12px;color:var(--muted)}
.note{margin:8px 0 0;padding:8px 12px;border-left:3px solid var(--amber);background:var(--paper);
  border-radius:4px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;
  margin:16px 0}
.tile,.card{background:var(--paper);border:1px solid var(--grid);border-radius:12px}
.tile{padding:12px 14px}
.tile b{display:block;font-size:24px;line-height:1.2;white-space:nowrap;
  font-variant-numeric:tabular-nums}
.tile span{display:block;font-weight:600}
.tile small{color:var(--muted);font-size:12.5px;display:block;line-height:1.35}
.card{padding:16px;margin:12px 0}
svg.chart{display:block;max-width:100%;height:auto}
.narrow{display:none!important}
.readout{margin:0 0 8px;font-weight:600;font-variant-numeric:tabular-nums;min-height:1.5em}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{text-align:right;padding:6px 10px;border-bottom:1px solid var(--grid)}
th{color:var(--muted);font-weight:500;font-size:13px}
th:first-child,td:first-child{text-align:left;padding-left:0}
footer{color:var(--muted);font-size:13px;margin-top:18px}
@media(max-width:560px){
  main{padding:14px 10px 30px}
  .card{padding:14px 12px}
  .wide{display:none!important}
  .narrow{display:block!important;width:100%;max-width:460px}
  .tiles{grid-template-columns:1fr 1fr;gap:10px}
  h1{font-size:22px}
}
"""
    + TEXT_CSS
)
