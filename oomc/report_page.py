"""The frame of a report's page: its style, its script, and where the sections go."""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<h1>$title</h1>
$summary
$body
</main>
<div id="tip"></div>
<script>$script</script>
</body>
</html>
"""

STYLE = """
:root { --ink: #1b1f24; --soft: #59636e; --page: #ffffff; --card: #f6f8fa; --rule: #d1d9e0; --mark: #0969da;
  --forward: #4878cf; --recompute: #d6a100; --backward: #6a51a3; --weights: #2ca02c; --gradients: #d1495b;
  --values: #17a2b8; --update: #b5651d; --wait: #b9c0c7; --other: #8a94a0; --budget: #cf222e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --page: #0d1117; --card: #161b22; --rule: #30363d; --mark: #4493f8;
    --forward: #6ea0f5; --recompute: #e3b93f; --backward: #a48be0; --weights: #56c156; --gradients: #f2788a;
    --values: #4cc9dc; --update: #d98c4a; --wait: #49525c; --other: #7d8691; --budget: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 80px; }
h1 { font-size: 22px; } h2 { font-size: 18px; margin: 36px 0 8px; border-bottom: 1px solid var(--rule); }
h3 { font-size: 14px; margin: 18px 0 6px; } p { margin: 6px 0; } small, .hint, .keys { color: var(--soft); }
.hint, .keys { font-size: 13px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 12px 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 20px; } .tile span { display: block; } .tile small { display: block; }
.legend { display: flex; flex-wrap: wrap; gap: 14px; font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; border-radius: 2px; }
.keys i { display: inline-block; width: 18px; border-top: 2px solid; margin: 0 5px 4px 0; }
.chart { display: flex; } .labels { flex: 0 0 84px; font-size: 12px; color: var(--soft); }
.labels span { display: block; line-height: 22px; overflow: hidden; } .labels .tier { height: auto; line-height: 1.3; }
.plot { flex: 1; min-width: 0; position: relative; cursor: crosshair; user-select: none; }
.plot svg { display: block; width: 100%; background: var(--card); }
.axis { display: flex; justify-content: space-between; font-size: 11px; color: var(--soft); }
.band { position: absolute; top: 0; background: var(--mark); opacity: .2; pointer-events: none; }
.k.forward { fill: var(--forward); background: var(--forward); }
.k.recompute { fill: var(--recompute); background: var(--recompute); }
.k.backward { fill: var(--backward); background: var(--backward); }
.k.weights { fill: var(--weights); background: var(--weights); }
.k.gradients { fill: var(--gradients); background: var(--gradients); }
.k.values { fill: var(--values); background: var(--values); }
.k.update { fill: var(--update); background: var(--update); }
.k.wait { fill: var(--wait); background: var(--wait); }
.k.other { fill: var(--other); background: var(--other); }
svg .k:hover { opacity: .7; }
svg path { vector-effect: non-scaling-stroke; } .end { stroke: var(--ink); stroke-dasharray: 4 3; fill: none; }
.area { fill: var(--forward); fill-opacity: .35; stroke: var(--forward); }
.line { fill: none; stroke-width: 1.5; }
.line.projected { stroke: var(--mark); border-color: var(--mark); stroke-dasharray: 5 3; }
.line.measured { stroke: var(--weights); border-color: var(--weights); }
.line.allowed { stroke: var(--budget); border-color: var(--budget); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; margin: 8px 0; }
th, td { padding: 4px 12px 4px 0; text-align: left; border-bottom: 1px solid var(--rule); white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.bar { display: inline-block; width: 160px; height: 9px; background: var(--card); border: 1px solid var(--rule); }
.bar i { display: block; height: 100%; background: var(--mark); }
pre { background: var(--card); border: 1px solid var(--rule); padding: 12px; overflow-x: auto; max-height: 70vh;
  font: 12px/1.45 ui-monospace, monospace; } summary { cursor: pointer; }
td span[data-t] { border-bottom: 1px dotted var(--soft); }
#tip { position: fixed; display: none; max-width: 420px; padding: 4px 8px; font-size: 12px; background: var(--ink);
  color: var(--page); border-radius: 4px; pointer-events: none; z-index: 9; overflow-wrap: anywhere; }
"""

SCRIPT = """
(function () {
  var tip = document.getElementById('tip'), charts = document.querySelectorAll('.chart');
  function seconds(s) {
    if (Math.abs(s) >= 1) return s.toFixed(3) + ' s';
    if (Math.abs(s) >= 1e-3) return (s * 1e3).toFixed(2) + ' ms';
    return s ? (s * 1e6).toFixed(1) + ' us' : '0 s';
  }
  function bytes(n) {
    var units = [['GiB', 1073741824], ['MiB', 1048576], ['KiB', 1024]];
    for (var i = 0; i < 3; i++) if (n >= units[i][1]) return (n / units[i][1]).toFixed(2) + ' ' + units[i][0];
    return n + ' B';
  }
  function box(svg) { return svg.viewBox.baseVal; }
  function moment(svg, x) {
    var r = svg.getBoundingClientRect(), b = box(svg);
    return b.x + Math.min(1, Math.max(0, (x - r.left) / r.width)) * b.width;
  }
  function at(path, x) {
    var value = 0, parts = path.dataset.curve.split('|');
    for (var i = 0; i < parts.length; i++) {
      var p = parts[i].split(':');
      if (+p[0] > x) break;
      value = +p[1];
    }
    return value;
  }
  document.addEventListener('mousemove', function (e) {
    var shape = e.target.closest ? e.target.closest('[data-t],[data-curve]') : null;
    if (!shape) { tip.style.display = 'none'; return; }
    var text = shape.dataset.t;
    if (shape.dataset.curve) {
      var svg = shape.ownerSVGElement, x = moment(svg, e.clientX);
      var span = +svg.closest('.chart').dataset.span;
      text = shape.dataset.name + ': ' + bytes(at(shape, x)) + ' at ' + seconds(x / 10000 * span);
    }
    tip.textContent = text;
    tip.style.display = 'block';
    tip.style.left = Math.min(e.clientX + 12, Math.max(0, window.innerWidth - tip.offsetWidth - 8)) + 'px';
    tip.style.top = Math.min(e.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + 'px';
  });
  function show(span, from, to) {
    charts.forEach(function (chart) {
      if (chart.dataset.span !== span) return;
      var svg = chart.querySelector('svg'), b = box(svg);
      svg.setAttribute('viewBox', from + ' 0 ' + (to - from) + ' ' + b.height);
      chart.querySelectorAll('.axis span').forEach(function (tick, i) {
        tick.textContent = seconds((from + (to - from) * i / 4) / 10000 * +span);
      });
    });
  }
  charts.forEach(function (chart) {
    var plot = chart.querySelector('.plot'), svg = chart.querySelector('svg'), begun = null, band = null;
    svg.addEventListener('mousedown', function (e) {
      begun = e.clientX;
      band = document.createElement('div');
      band.className = 'band';
      band.style.height = svg.getBoundingClientRect().height + 'px';
      plot.appendChild(band);
      e.preventDefault();
    });
    window.addEventListener('mousemove', function (e) {
      if (begun === null) return;
      band.style.left = Math.min(begun, e.clientX) - plot.getBoundingClientRect().left + 'px';
      band.style.width = Math.abs(e.clientX - begun) + 'px';
    });
    window.addEventListener('mouseup', function (e) {
      if (begun === null) return;
      var a = moment(svg, Math.min(begun, e.clientX)), b = moment(svg, Math.max(begun, e.clientX));
      var far = Math.abs(e.clientX - begun) > 4;
      band.remove();
      begun = null;
      if (far && b - a > 1) show(chart.dataset.span, a, b);
    });
    svg.addEventListener('dblclick', function () { show(chart.dataset.span, 0, 10000); });
  });
})();
"""
