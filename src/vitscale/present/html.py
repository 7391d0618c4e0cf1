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
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from vitscale.present import document as doc
from vitscale.present import drawing
from vitscale.present.data import nonfinite_as_null
from vitscale.present.units import unbroken

_PACKAGE_FOLDER = Path(__file__).parent
_INTERVAL_ELEMENT = re.compile('<span class="bounds">([^<]*)</span>')
_DEEPEST_HEADING = 4
"""Depth of the deepest headings, `<h4>`."""
_MANY_CLAUSES = 4
"""Number of clauses from which each has a line of its own."""
_PAGE_TEMPLATE = """<!doctype html>
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
    """Return the document as a page; a folded section opens on request.

    Args:
        document: the document.
        brand: a line above its title.
        subtitle: a line below its title.
    """
    page_figures = list(figures(document.blocks))
    stills = drawing.stills([figure.views[0].spec for figure in page_figures])
    body = "\n".join(_block_element(block, 2) for block in document.blocks)
    last = _escaped_format('<p class="last">{}</p>', " ".join(document.last)) if document.last else ""
    scripts = _page_scripts(page_figures)
    return _PAGE_TEMPLATE.format(
        policy=_security_policy(scripts.digests),
        title=Markup.escape(f"{document.title}: {brand}"),
        css=(_PACKAGE_FOLDER / "page.css").read_text(encoding="utf-8"),
        brand=Markup.escape(brand),
        heading=Markup.escape(document.title),
        subtitle=_escaped_format('<p class="muted">{}</p>', subtitle) if subtitle else "",
        links=_section_links(document.blocks),
        body="\n".join((_with_pictures(body, page_figures, stills()), last)),
        scripts="\n".join(scripts.elements),
    )


def _section_links(blocks: Iterable[doc.Block]) -> str:
    """Return links to the folded sections, which a reader may not find otherwise."""
    links = []
    for block in blocks:
        if isinstance(block, doc.Section) and block.folded:
            links.append(_escaped_format('<a href="#{}">{}</a> ', slug(block.title), block.title))
    return "".join(links)


def to_fragment(document: doc.Document) -> str:
    """Return the document as HTML for a notebook: no page, script or style sheet around it.

    A folded section opens on request. Everything that a user could write is escaped.
    """
    page_figures = list(figures(document.blocks))
    stills = drawing.stills([figure.views[0].spec for figure in page_figures])
    title = _escaped_format("<h3>{}</h3>\n", document.title) if document.title else ""
    body = "\n".join(_block_element(block, _DEEPEST_HEADING) for block in document.blocks)
    last = "\n".join(_escaped_format("<p>{}</p>", line) for line in document.last)
    # The style sheet puts an interval below its figure; without it the two would touch.
    readable = _INTERVAL_ELEMENT.sub(r" (\1)", body)
    return f"<div>\n{title}{_with_pictures(readable, page_figures, stills())}\n{last}\n</div>"


def slug(text: str) -> str:
    """Return the name of a heading's place: "where-the-time-goes" of "Where the time goes"."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


def figures(blocks: Iterable[doc.Block]) -> Iterator[doc.Figure]:
    """Yield all figures of some blocks, at any depth."""
    for block in blocks:
        if isinstance(block, doc.Section):
            yield from figures(block.blocks)
        elif isinstance(block, doc.Figure):
            yield block


def _escaped_format(text: str, *values: object) -> str:
    """Return `text` with each value escaped, except for HTML of our own (`_trusted_html`)."""
    return str(Markup(text).format(*values))  # noqa: S704  # each `text` is written in this file


def _trusted_html(text: str) -> Markup:
    """Mark HTML of our own, which `_escaped_format` takes as it is."""
    return Markup(text)  # noqa: S704  # made by the functions of this file


def _block_elements(blocks: Iterable[doc.Block], depth: int) -> Markup:
    return _trusted_html("\n".join(_block_element(block, depth) for block in blocks))


def _block_element(block: doc.Block, depth: int) -> str:
    """Return the HTML of a block. `depth`: 2 for a heading `<h2>`, and so on."""
    match block:
        case doc.Section(folded=True):
            inner = _block_elements(block.blocks, min(depth + 1, _DEEPEST_HEADING))
            return _escaped_format(
                '<details class="section" id="{}"><summary><h{}>{}</h{}></summary>\n{}\n</details>',
                slug(block.title), depth, block.title, depth, inner,
            )  # fmt: skip
        case doc.Section():
            inner = _block_elements(block.blocks, min(depth + 1, _DEEPEST_HEADING))
            return _escaped_format(
                '<section id="{}">\n<h{}>{}</h{}>\n{}\n</section>',
                slug(block.title), depth, block.title, depth, inner,
            )  # fmt: skip
        case doc.Paragraph():
            return _escaped_format('<p class="{}">{}</p>', block.tone, unbroken(block.text))
        case doc.Bullets():
            items = _trusted_html("".join(_escaped_format("<li>{}</li>", unbroken(item)) for item in block.items))
            return _escaped_format('<ul class="{}">{}</ul>', block.tone, items)
        case doc.Finding():
            return _finding_element(block)
        case doc.Code():
            return _escaped_format("<pre>{}</pre>", "\n".join(block.lines))
        case doc.Table():
            return _table_element(block, depth)
        case doc.Figure():
            return _figure_element(block, depth)


def _finding_element(finding: doc.Finding) -> str:
    """Return a finding as HTML; the trials that it concerns unfold."""
    trials = " ".join(finding.about.trials)
    which_trials = ""
    if trials:
        which_trials = _escaped_format('<details><summary>which</summary><p class="mono">{}</p></details>', trials)
    key = _escaped_format("<code>{}</code>: ", doc.shown_key(finding.about.key)) if finding.about.key else ""
    return _escaped_format(
        '<div class="finding {}"><p><span class="tag">{}</span> {}{} <span class="muted">{}</span></p>{}</div>',
        finding.severity, finding.severity, _trusted_html(key), _message_html(finding.message),
        _sentence_text(finding.advice), _trusted_html(which_trials),
    )  # fmt: skip


def _message_html(text: str) -> str | Markup:
    """Return a sentence; one with many clauses has each of them on a line of its own."""
    head, *clauses = text.split("; ")
    if len(clauses) < _MANY_CLAUSES:
        return _sentence_text(text)
    lines = [escape(unbroken(head)), *(escape(_sentence_text(clause)) for clause in clauses)]
    return _trusted_html("<br>".join(lines))


def _sentence_text(text: str) -> str:
    return unbroken(f"{text.rstrip('.')}.") if text else ""


def _table_element(table: doc.Table, depth: int) -> str:
    """Return a table with its title as heading, or as the summary that unfolds it."""
    headings = []
    for column in table.columns:
        css_class = _class_attribute("words" if column.words else "")
        headings.append(_escaped_format('<th scope="col"{}>{}</th>', css_class, column.heading))
    bodies = [_table_body_element(table, group) for group in table.groups]
    content = _escaped_format(
        '<div class="scroll"><table><thead><tr>{}</tr></thead>{}</table></div>',
        _trusted_html("".join(headings)), _trusted_html("\n".join(bodies)),
    )  # fmt: skip
    if table.notes:
        notes = "".join(_escaped_format("<li>{}</li>", note) for note in table.notes)
        content += _escaped_format('<ul class="notes">{}</ul>', _trusted_html(notes))
    if table.folded:
        title = table.title or "Table"
        return _escaped_format(
            '<details class="table"><summary>{}</summary>{}</details>', title, _trusted_html(content)
        )
    heading = _escaped_format("<h{}>{}</h{}>", depth, table.title, depth) if table.title else ""
    return heading + content


def _table_body_element(table: doc.Table, group: doc.RowGroup) -> str:
    """Return the rows of a group, below its label where it has one."""
    label = ""
    if group.label:
        label = _escaped_format(
            '<tr class="group"><th colspan="{}" scope="rowgroup">{}</th></tr>', len(table.columns), group.label
        )
    rows = "".join(f"<tr>{''.join(_cell_elements(table, row))}</tr>\n" for row in group.rows)
    return f"<tbody>{label}{rows}</tbody>"


def _class_attribute(names: str) -> Markup:
    return _trusted_html(f' class="{names}"' if names else "")


def _cell_elements(table: doc.Table, row: Sequence[doc.Cell]) -> Iterator[str]:
    """Yield the elements of a row's cells, the intervals of each below its text."""
    position = 0
    for cell in row:
        has_words = table.columns[position].words or cell.spans > 1
        class_names = ["words"] if has_words else []
        if cell.state:
            class_names.append(cell.state)
        css_class = _class_attribute(" ".join(class_names))
        spans = f' colspan="{cell.spans}"' if cell.spans > 1 else ""
        intervals = [interval for interval in (cell.bounds, cell.run) if interval]
        bounds = "".join(f'<span class="bounds">{escape(interval)}</span>' for interval in intervals)
        yield f"<td{css_class}{spans}>{escape(unbroken(cell.text))}{bounds}</td>"
        position += cell.spans


def _figure_element(figure: doc.Figure, depth: int) -> str:
    """Return a figure as HTML: its first view, with a placeholder for the picture, and its rows as a table."""
    view = figure.views[0]
    return _escaped_format(
        '<figure id="figure-{0}" data-figure="{0}">\n<figcaption><h{1}>{2}</h{1}>'
        '<p class="muted small subtitle">{3}</p></figcaption>\n<div class="controls"></div>\n'
        '<div class="picture" role="img" aria-label="{4}">{5}</div>\n<p class="summary">{4}</p>\n'
        '<details class="rows"><summary>As a table</summary><div class="scroll">{6}</div></details>\n</figure>',
        figure.name, min(depth + 1, _DEEPEST_HEADING), view.title, view.subtitle, view.summary,
        _trusted_html(_PICTURE_PLACEHOLDER.format(escape(figure.name))), _trusted_html(_rows_table(view)),
    )  # fmt: skip


_PICTURE_PLACEHOLDER = "<!-- {} -->"
"""Placeholder of a figure until it is drawn; text of users is escaped and holds none."""


def _with_pictures(body: str, figures_of_page: Sequence[doc.Figure], pictures: Sequence[str]) -> str:
    """Return the body with its SVGs; the identities in each are made unique, as those of all figures share one page."""
    for figure, picture in zip(figures_of_page, pictures, strict=True):
        for identity in dict.fromkeys(re.findall(r'\bid="([\w-]+)"', picture)):
            unique = f"{figure.name}-{identity}"
            picture = picture.replace(f'id="{identity}"', f'id="{unique}"')
            picture = picture.replace(f"url(#{identity})", f"url(#{unique})")
        body = body.replace(_PICTURE_PLACEHOLDER.format(escape(figure.name)), picture, 1)
    return body


def _rows_table(view: doc.FigureView) -> str:
    """Return the rows that a view draws as a table."""
    headings = "".join(_escaped_format('<th scope="col">{}</th>', heading) for heading in view.columns.values())
    rows = []
    for row in view.rows:
        values = ["" if row.get(name) is None else row[name] for name in view.columns]
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        rows.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{headings}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


class _Scripts(NamedTuple):
    """The scripts of a page."""

    elements: Sequence[str] = ()
    digests: Sequence[str] = ()
    """SHA-256 of each script that may run, in base64."""


def _page_scripts(figures_of_page: Sequence[doc.Figure]) -> _Scripts:
    """Return the script elements of a page with these figures: data, library, and our own script; none without figures.

    Data and library are compressed; our script unpacks them.
    """
    if not figures_of_page:
        return _Scripts()
    data = {
        "figures": {figure.name: _figure_data(figure) for figure in figures_of_page},
        "themes": {"light": drawing.LIGHT, "dark": drawing.DARK},
    }
    packed_data = gzip.compress(json.dumps(nonfinite_as_null(data), allow_nan=False).encode(), 9, mtime=0)
    packed_library = drawing.library()
    our_script = (_PACKAGE_FOLDER / "page.js").read_text(encoding="utf-8")
    elements = [
        _packed_element("data", packed_data),
        _packed_element("library", packed_library),
        f"<script>{our_script}</script>",
    ]
    return _Scripts(
        elements, [_digest_of_script(gzip.decompress(packed_library)), _digest_of_script(our_script.encode())]
    )


def _packed_element(name: str, content: bytes) -> str:
    encoded = base64.b64encode(content).decode()
    return f'<script type="application/gzip" id="vitscale-{name}">{encoded}</script>'


def _figure_data(figure: doc.Figure) -> Mapping[str, Any]:
    """Return a figure as `page.js` reads it."""
    return {
        "series": figure.series,
        "controls": {name: slug(name) for name in figure.controls},
        "views": [_view_data(view) for view in figure.views],
    }


def _view_data(view: doc.FigureView) -> Mapping[str, Any]:
    """Return a view as `page.js` reads it."""
    return {
        "title": view.title,
        "subtitle": view.subtitle,
        "summary": view.summary,
        "columns": list(view.columns.items()),
        "choices": {name: [choice.value, choice.label] for name, choice in view.choices.items()},
        "spec": view.spec,
    }


def _digest_of_script(script: bytes) -> str:
    return base64.b64encode(hashlib.sha256(script).digest()).decode()


def _security_policy(digests: Sequence[str]) -> str:
    """Return a content security policy: our scripts by their hashes and no others, nothing from elsewhere.

    Vega compiles its expressions, which needs 'unsafe-eval'; it compiles our own figures only.
    """
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    script_source = f"{allowed} 'unsafe-eval'" if digests else "'none'"
    return f"default-src 'none'; script-src {script_source}; style-src 'unsafe-inline'; img-src data: blob:"
