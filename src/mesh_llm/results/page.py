"""A result as one HTML page that needs nothing else: no script, no other file, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mesh_llm.results.document import Document, ResultTable

_STYLE = """
:root { color-scheme: light dark; --edge: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  background: #fff; color: #1c1e21; }
@media (prefers-color-scheme: dark) { body { background: #16181b; color: #dddfe3; } }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--edge); text-align: left; vertical-align: top; }
thead th { background: var(--soft); }
td.number { text-align: right; white-space: nowrap; }
code { background: var(--soft); padding: .15rem .35rem; border-radius: .25rem; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; } svg { width: 100%; height: auto; }
""".strip()


def page(document: Document, pictures: Sequence[str] = ()) -> str:
    """`pictures` are SVG texts, one for each plot; there may be none."""
    parts = [
        f"<h1>{escape(document.title)}</h1>",
        f"<p><code>{escape(document.command)}</code></p>",
        *(_table(each) for each in document.tables),
        *(f"<figure>{picture}</figure>" for picture in pictures),
    ]
    if document.notes:
        parts += ["<h2>Notes</h2>", f"<ul>{_items(document.notes)}</ul>"]
    parts += ["<h2>What the figures depend on</h2>", _facts(document.facts)]
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(document.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _table(table: ResultTable) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>\n" for row in table.rows)
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _cell(text: str) -> str:
    kind = ' class="number"' if text[:1].isdigit() else ""
    return f"<td{kind}>{escape(text)}</td>"


def _facts(facts: dict[str, str]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>\n'
        for name, value in facts.items()
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'
