"""The whole page: one HTML file that needs no network, no script and no font, and fits a phone as well as a laptop."""

from __future__ import annotations

from html import escape

from gem_core.report.run import Run
from gem_core.report.sections import SECTIONS

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:2.2rem 0 .6rem;border-bottom:1px solid var(--line)}
h3{font-size:1rem;margin:1.2rem 0 .3rem}nav{display:flex;flex-wrap:wrap;gap:.3rem .9rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}.pairs td{text-align:left;white-space:normal;overflow-wrap:break-word}
.pairs td:first-child{vertical-align:top;min-width:7rem}.pairs{table-layout:auto;max-width:100%}
figure{margin:.4rem 0;max-width:44rem}svg{width:100%;height:auto;display:block}
svg text{font-size:13px;fill:currentColor}svg text.in{fill:#fff;font-size:15px}.g{stroke:var(--line)}
figcaption{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.9rem}
figcaption i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
@media(max-width:36rem){svg text{font-size:19px}td,th{padding:.25rem .4rem}.pairs{table-layout:fixed;width:100%}
.pairs td:first-child{width:36%}.pairs td{overflow-wrap:anywhere}
.grid td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:7rem}
.grid td,.grid th{white-space:normal;overflow-wrap:break-word;padding:.25rem .3rem;font-size:.92rem}}
pre{overflow-x:auto;background:var(--soft);padding:.8rem;font-size:.85rem}.none{opacity:.7}
"""


def page(*runs: Run) -> str:
    """The HTML of the report of the first run, the others compared with it."""
    made = [section for build in SECTIONS if (section := build(runs)) is not None]
    name = " and ".join(escape(run.label) for run in runs)
    links = "".join(f"<a href='#{_anchor(title)}'>{escape(title)}</a>" for title, _ in made)
    body = "".join(f"<section id='{_anchor(title)}'><h2>{escape(title)}</h2>{text}</section>" for title, text in made)
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{name}</title><style>{_STYLE}</style>"
    )
    return f"<!doctype html><html lang='en'><head>{head}</head><body><h1>{name}</h1><nav>{links}</nav>{body}</body></html>\n"


def _anchor(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower())
