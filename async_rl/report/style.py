"""The page's only style sheet: a light and a dark palette, colours of lines (``c0`` ...) and of states (``s-...``)."""

from async_rl.timer import STATES

_LIGHT = ("#2563eb", "#d97706", "#059669", "#c026d3", "#dc2626", "#0891b2", "#65a30d", "#6b7280")
_STATE_COLOURS = {
    "generating": "#2563eb",
    "training": "#2563eb",
    "scoring": "#0891b2",
    "reducing": "#7c3aed",
    "paused": "#d97706",
    "publishing": "#d97706",
    "checkpointing": "#059669",
    "evaluating": "#c026d3",
    "waiting_ticket": "#fca5a5",
    "waiting_data": "#f87171",
    "waiting_weights": "#fbbf24",
    "idle": "#cbd5e1",
    "starting": "#94a3b8",
}


def style_sheet() -> str:
    """The content of the ``<style>`` element."""
    lines = [f".c{i}{{fill:{c};stroke:{c}}} i.c{i}{{background:{c}}}" for i, c in enumerate(_LIGHT)]
    lines += [f".s-{s}{{fill:{_STATE_COLOURS[s]}}} i.s-{s}{{background:{_STATE_COLOURS[s]}}}" for s in STATES]
    return _BASE + "\n".join(lines)


_BASE = """
:root{--ink:#111827;--soft:#6b7280;--line:#e5e7eb;--back:#f8fafc;--card:#fff;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--soft:#9ca3af;--line:#374151;--back:#0f172a;--card:#1e293b}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1440px;margin:0 auto;padding:24px}
h1{font-size:24px;margin:0 0 4px} h2{font-size:16px;margin:0 0 10px} p{margin:0 0 10px;max-width:80ch}
.soft{color:var(--soft)} .bad{color:#dc2626;white-space:pre-wrap;font-family:ui-monospace,monospace;font-size:13px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:16px 0}
.sections{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:16px}
.card,section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px;min-width:0}
.card b{display:block;font-size:21px;font-weight:650} .card span{color:var(--soft);font-size:13px}
section.wide{grid-column:1/-1}
figure{margin:0} svg{width:100%;height:auto;display:block}
figcaption{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px;color:var(--soft);margin-top:4px}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
svg .t{fill:var(--soft);font-size:11px;stroke:none} svg .grid{stroke:var(--line);stroke-width:1}
svg .line{fill:none;stroke-width:2} svg .faint{opacity:.3;stroke-width:1}
svg .mark{stroke:#dc2626;stroke-dasharray:4 4} svg .empty{fill:var(--line);opacity:.5}
.columns{columns:3 320px} .columns details{break-inside:avoid}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14px} td,th{padding:3px 14px 3px 0;text-align:left;vertical-align:top}
th{color:var(--soft);font-weight:500} td.n{text-align:right;font-variant-numeric:tabular-nums}
pre{margin:0;font:12.5px/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
details{border-top:1px solid var(--line);padding:6px 0} summary{cursor:pointer}
.sample{border-left:3px solid var(--line);padding-left:10px;margin:6px 0}
"""
