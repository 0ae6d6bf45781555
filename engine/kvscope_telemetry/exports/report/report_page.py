"""HTML page of a report: light and dark style, security policy, and conversion of text to HTML. Without external
resources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from kvscope_telemetry.exports.report.inks import DARK, LIGHT, ink_classes, variables
from kvscope_telemetry.printable import printable

_STYLE: Final = (
    ":root{color-scheme:light dark;" + variables(LIGHT) + "}.if-dark{display:none}"
    "@media (prefers-color-scheme:dark){:root{" + variables(DARK) + "}.if-dark{display:inline}.if-light{display:none}}"
    "@media print{:root{"
    + variables(LIGHT)
    + "}.if-dark{display:none}.if-light{display:inline}}"
    + ink_classes()
    + "*{box-sizing:border-box}"
    "body{margin:0;background:var(--page);color:var(--text);font:14px/1.5 system-ui,sans-serif}"
    "main{max-width:1040px;margin:0 auto;padding:24px 16px 48px}"
    "h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:0 0 8px}p{margin:4px 0}"
    ".soft{color:var(--soft)}.note{border-left:3px solid var(--queued);padding-left:10px}"
    "section{background:var(--paper);border:1px solid var(--edge);border-radius:8px;padding:14px 16px;margin-top:14px}"
    "section{break-inside:avoid;overflow-x:auto}"
    "dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:12px;margin:0}"
    "dt{color:var(--soft);font-size:12px}dd{margin:0;font-size:19px;font-variant-numeric:tabular-nums}"
    "dd small{display:block;font-size:12px;color:var(--soft)}"
    "svg{display:block;width:100%;height:auto}"
    ".grid{stroke:var(--grid)}.axis{stroke:var(--edge)}.label{fill:var(--soft);font-size:11px}"
    ".end{text-anchor:end}.mid{text-anchor:middle}"
    ".curve{fill:none;stroke:var(--ink);stroke-width:1.6;stroke-linecap:round;stroke-linejoin:round}"
    ".area{fill:var(--ink)}"
    ".bookmark-flag line{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:3 2}"
    ".bookmark-flag path{fill:var(--ink)}"
    ".period{fill:var(--ink);opacity:.13}"
    ".bar{fill:var(--ink)}"
    ".key{display:inline-block;margin:0 14px 4px 0;color:var(--soft);font-size:12px}"
    ".key i{display:inline-block;width:11px;height:11px;border-radius:2px;background:var(--ink);margin-right:5px}"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}"
    "th{text-align:left;font-weight:600;color:var(--soft);font-size:12px}"
    "th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--grid);vertical-align:top}"
    "td.number,th.number{text-align:right;white-space:nowrap}td.words{overflow-wrap:break-word}"
    "[data-time]{touch-action:pan-y;cursor:crosshair;user-select:none}"
    ".cursor{stroke:var(--soft);stroke-dasharray:2 2;pointer-events:none}"
    ".selection{fill:var(--bookmark);opacity:.2;pointer-events:none}"
    ".tip,.zoom{position:fixed;z-index:1;background:var(--paper);border:1px solid var(--edge);border-radius:6px}"
    ".tip{padding:6px 10px;pointer-events:none;font-size:12px}.tip .key{display:block;margin:2px 0 0}"
    ".zoom{bottom:16px;left:50%;transform:translateX(-50%);padding:6px 12px}.zoom[hidden],.tip[hidden]{display:none}"
    "button{font:inherit;color:inherit;background:var(--paper);border:1px solid var(--edge);border-radius:5px;"
    "padding:2px 9px;margin-left:8px;cursor:pointer}th button,td button{border:0;padding:0;margin:0;background:none}"
    "td button{color:var(--bookmark)}[aria-sort=ascending] button::after{content:' ▲'}"
    "[aria-sort=descending] button::after{content:' ▼'}"
    "input{font:inherit;color:inherit;background:var(--page);border:1px solid var(--edge);border-radius:5px;"
    "padding:2px 8px;width:20em;max-width:100%}@media print{.zoom,.tip{display:none}}"
    "footer{margin-top:18px;color:var(--soft);font-size:12px}"
)
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, body: Iterable[str], script: str = "", script_source: str = "'none'") -> str:
    """Return the whole page. `script` is HTML with the script elements, `script_source` the source that the page's
    security policy permits: the hash of the only script that may run.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}; script-src {script_source}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{clean(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f"\n</main>\n{script}\n</body>\n</html>\n"
    )


def clean(text: str) -> str:
    """Return text as HTML, escaped and without characters that HTML does not allow."""
    return escape(printable(text, keep="\n\t", replacement="�"), quote=True)


def section(title: str, *parts: str) -> str:
    inner = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{clean(title)}</h2>\n{inner}\n</section>" if inner else ""


def figure_list(items: Sequence[tuple[str, str, str]]) -> str:
    """Return an HTML description list. `items`: name, value and secondary text (may be empty) of each figure."""
    rows = (
        f"<div><dt>{clean(name)}</dt><dd>{clean(value)}{f'<small>{clean(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in items
    )
    return f"<dl>{''.join(rows)}</dl>"


def chart_legend(items: Sequence[tuple[str, str]]) -> str:
    """Return the legend of a chart as HTML. `items`: CSS class and text of each colour."""
    return "".join(f'<span class="key {css}"><i></i>{clean(text)}</span>' for css, text in items)


def table(header: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table. `header`: name of each column, and whether it is numeric. Cells must be HTML already."""
    kinds = ["number" if is_number else "words" for _, is_number in header]
    head = "".join(f'<th class="{kind}">{clean(name)}</th>' for kind, (name, _) in zip(kinds, header, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
