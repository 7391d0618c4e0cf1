"""A document as one self-contained HTML file: no server, no network, and all that a user could write escaped.

Each figure is an SVG, which needs no JavaScript. With JavaScript, a figure's controls choose among its views, curves go
on and off, and the address's fragment keeps the state.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from vitscale.present import document as doc
from vitscale.present import drawing
from vitscale.present.data import finite
from vitscale.present.units import unbroken

_HERE = Path(__file__).parent
_INTERVAL = re.compile('<span class="bounds">([^<]*)</span>')
_DEEPEST = 4
_MANY_CLAUSES = 4
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<header>
<p class="brand">{brand}</p>
<h1>{heading}</h1>
{subtitle}
<nav>{links}</nav>
</header>
<main>
{body}
</main>
{scripts}
</body>
</html>
"""


def to_html(document: doc.Document, *, brand: str = "vitscale", subtitle: str = "") -> str:
    """The document as a page; a folded section opens on request."""
    shown = list(figures(document.blocks))
    drawn = drawing.stills([figure.views[0].spec for figure in shown])
    sections = [block for block in document.blocks if isinstance(block, doc.Section)]
    links = (_format('<a href="#{}">{}</a> ', slug(part.title), part.title) for part in sections if part.folded)
    scripts, hashes = _scripts(shown)
    body = "\n".join(_block(block, 2) for block in document.blocks)
    last = _format('<p class="last">{}</p>', " ".join(document.last)) if document.last else ""
    return _PAGE.format(
        policy=_policy(hashes),
        title=Markup.escape(f"{document.title}: {brand}"),
        css=(_HERE / "page.css").read_text(encoding="utf-8"),
        brand=Markup.escape(brand),
        heading=Markup.escape(document.title),
        subtitle=_format('<p class="muted">{}</p>', subtitle) if subtitle else "",
        links="".join(links),
        body="\n".join((_with_pictures(body, shown, drawn()), last)),
        scripts="\n".join(scripts),
    )


def to_fragment(document: doc.Document) -> str:
    """The document as HTML for a notebook: no page, script or style sheet around it; a folded section opens on request.

    Everything that a user could write is escaped.
    """
    shown = list(figures(document.blocks))
    drawn = drawing.stills([figure.views[0].spec for figure in shown])
    title = _format("<h3>{}</h3>\n", document.title) if document.title else ""
    body = "\n".join(_block(block, _DEEPEST) for block in document.blocks)
    last = "\n".join(_format("<p>{}</p>", line) for line in document.last)
    # The style sheet puts an interval below its figure; without it the two would touch.
    readable = _INTERVAL.sub(r" (\1)", body)
    return f"<div>\n{title}{_with_pictures(readable, shown, drawn())}\n{last}\n</div>"


def slug(text: str) -> str:
    """A heading as the name of its place: "Where the time goes" as "where-the-time-goes"."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


def figures(blocks: Iterable[doc.Block]) -> Iterator[doc.Figure]:
    """All figures of some blocks, at any depth."""
    for block in blocks:
        if isinstance(block, doc.Section):
            yield from figures(block.blocks)
        elif isinstance(block, doc.Figure):
            yield block


def _format(text: str, *values: object) -> str:
    """`text` with each value escaped, except for HTML of our own."""
    return str(Markup(text).format(*values))  # noqa: S704  # each `text` is written in this file


def _html(text: str) -> Markup:
    return Markup(text)  # noqa: S704  # made by the functions of this file


def _blocks(blocks: Iterable[doc.Block], depth: int) -> Markup:
    return _html("\n".join(_block(block, depth) for block in blocks))


def _block(block: doc.Block, depth: int) -> str:
    match block:
        case doc.Section(folded=True):
            return _format(
                '<details class="section" id="{}"><summary><h{}>{}</h{}></summary>\n{}\n</details>',
                slug(block.title), depth, block.title, depth, _blocks(block.blocks, min(depth + 1, _DEEPEST)),
            )  # fmt: skip
        case doc.Section():
            return _format(
                '<section id="{}">\n<h{}>{}</h{}>\n{}\n</section>',
                slug(block.title), depth, block.title, depth, _blocks(block.blocks, min(depth + 1, _DEEPEST)),
            )  # fmt: skip
        case doc.Paragraph():
            return _format('<p class="{}">{}</p>', block.tone, unbroken(block.text))
        case doc.Bullets():
            items = _html("".join(_format("<li>{}</li>", unbroken(item)) for item in block.items))
            return _format('<ul class="{}">{}</ul>', block.tone, items)
        case doc.Finding():
            about = " ".join(block.about.trials)
            which = _format('<details><summary>which</summary><p class="mono">{}</p></details>', about) if about else ""
            key = _format("<code>{}</code>: ", doc.shown_key(block.about.key)) if block.about.key else ""
            return _format(
                '<div class="finding {}"><p><span class="tag">{}</span> {}{} <span class="muted">{}</span></p>{}</div>',
                block.severity, block.severity, _html(key), _message(block.message), _sentence(block.advice),
                _html(which),
            )  # fmt: skip
        case doc.Code():
            return _format("<pre>{}</pre>", "\n".join(block.lines))
        case doc.Table():
            return _table(block, depth)
        case doc.Figure():
            return _figure(block, depth)


def _message(text: str) -> str | Markup:
    """A sentence; one with many clauses has each of them on a line of its own."""
    head, *clauses = text.split("; ")
    if len(clauses) < _MANY_CLAUSES:
        return _sentence(text)
    return _html(str(escape(unbroken(head))) + "".join(f"<br>{escape(_sentence(clause))}" for clause in clauses))


def _sentence(text: str) -> str:
    return unbroken(f"{text.rstrip('.')}.") if text else ""


def _table(table: doc.Table, depth: int) -> str:
    head = _html(
        "".join(_format('<th scope="col"{}>{}</th>', _class("words" * c.words), c.heading) for c in table.columns)
    )
    bodies = []
    for group in table.groups:
        label = _format(
            '<tr class="group"><th colspan="{}" scope="rowgroup">{}</th></tr>', len(table.columns), group.label
        )
        rows = "".join(f"<tr>{''.join(_cells(table, row))}</tr>\n" for row in group.rows)
        bodies.append(f"<tbody>{label if group.label else ''}{rows}</tbody>")
    laid = _format(
        '<div class="scroll"><table><thead><tr>{}</tr></thead>{}</table></div>', head, _html("\n".join(bodies))
    )
    notes = _html("".join(_format("<li>{}</li>", note) for note in table.notes))
    whole = laid + (_format('<ul class="notes">{}</ul>', notes) if table.notes else "")
    if table.folded:
        return _format('<details class="table"><summary>{}</summary>{}</details>', table.title or "Table", _html(whole))
    return (_format("<h{}>{}</h{}>", depth, table.title, depth) if table.title else "") + whole


def _class(names: str) -> Markup:
    return _html(f' class="{names}"' if names else "")


def _cells(table: doc.Table, row: Sequence[doc.Cell]) -> Iterator[str]:
    at = 0
    for cell in row:
        names = "words " * (table.columns[at].words or cell.spans > 1) + cell.state
        spans = f' colspan="{cell.spans}"' if cell.spans > 1 else ""
        within = "".join(f'<span class="bounds">{escape(text)}</span>' for text in (cell.bounds, cell.run) if text)
        yield f"<td{_class(names.strip())}{spans}>{escape(unbroken(cell.text))}{within}</td>"
        at += cell.spans


def _figure(figure: doc.Figure, depth: int) -> str:
    view = figure.views[0]
    return _format(
        '<figure id="figure-{0}" data-figure="{0}">\n<figcaption><h{1}>{2}</h{1}>'
        '<p class="muted small subtitle">{3}</p></figcaption>\n<div class="controls"></div>\n'
        '<div class="picture" role="img" aria-label="{4}">{5}</div>\n<p class="summary">{4}</p>\n'
        '<details class="rows"><summary>As a table</summary><div class="scroll">{6}</div></details>\n</figure>',
        figure.name, min(depth + 1, _DEEPEST), view.title, view.subtitle, view.summary,
        _html(_PICTURE.format(escape(figure.name))), _html(_rows(view)),
    )  # fmt: skip


_PICTURE = "<!-- {} -->"
"""Placeholder of a figure until it is drawn; text of users is escaped and holds none."""


def _with_pictures(body: str, shown: Sequence[doc.Figure], drawn: Sequence[str]) -> str:
    """The body with its SVGs; the identities in each are made unique, as those of all figures share one page."""
    for figure, picture in zip(shown, drawn, strict=True):
        for identity in dict.fromkeys(re.findall(r'\bid="([\w-]+)"', picture)):
            own = f"{figure.name}-{identity}"
            picture = picture.replace(f'id="{identity}"', f'id="{own}"').replace(f"url(#{identity})", f"url(#{own})")
        body = body.replace(_PICTURE.format(escape(figure.name)), picture, 1)
    return body


def _rows(view: doc.View) -> str:
    head = "".join(_format('<th scope="col">{}</th>', heading) for heading in view.columns.values())
    rows = (
        "".join(f"<td>{escape('' if row.get(name) is None else row[name])}</td>" for name in view.columns)
        for row in view.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def _scripts(shown: Sequence[doc.Figure]) -> tuple[list[str], list[str]]:
    """The script elements of a page with these figures, and the hashes of what may run; none without figures."""
    if not shown:
        return [], []
    library = drawing.library()
    ours = (_HERE / "page.js").read_text(encoding="utf-8")
    data = {
        "figures": {figure.name: _figure_data(figure) for figure in shown},
        "themes": {"light": drawing.LIGHT, "dark": drawing.DARK},
    }
    packed = gzip.compress(json.dumps(finite(data), allow_nan=False).encode(), 9, mtime=0)
    elements = [
        f'<script type="application/gzip" id="vitscale-{name}">{base64.b64encode(content).decode()}</script>'
        for name, content in (("data", packed), ("library", library))
    ]
    allowed = [_digest(gzip.decompress(library)), _digest(ours.encode())]
    return [*elements, f"<script>{ours}</script>"], allowed


def _figure_data(figure: doc.Figure) -> Mapping[str, Any]:
    return {
        "series": figure.series,
        "controls": {name: slug(name) for name in figure.controls},
        "views": [
            {
                "title": view.title,
                "subtitle": view.subtitle,
                "summary": view.summary,
                "columns": list(view.columns.items()),
                "choices": {name: [choice.value, choice.label] for name, choice in view.choices.items()},
                "spec": view.spec,
            }
            for view in figure.views
        ],
    }


def _digest(script: bytes) -> str:
    return base64.b64encode(hashlib.sha256(script).digest()).decode()


def _policy(hashes: Sequence[str]) -> str:
    """A content security policy: our scripts by their hashes and no others, nothing from elsewhere.

    Vega compiles its expressions, which needs 'unsafe-eval'; it compiles our own figures only.
    """
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    script_source = f"{allowed} 'unsafe-eval'" if hashes else "'none'"
    return f"default-src 'none'; script-src {script_source}; style-src 'unsafe-inline'; img-src data: blob:"
