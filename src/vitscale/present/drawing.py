"""Figures to pictures: PNG, SVG and PDF, drawn by vl-convert without a browser and without a network."""

from __future__ import annotations

import atexit
import contextlib
import gzip
import itertools
import json
import os
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitscale.base.files import whole_file
from vitscale.base.interpreter import python_code
from vitscale.base.processors import usable_cores
from vitscale.errors import printable
from vitscale.present.document import FigureView

FIGURE_FORMATS = ("png", "svg", "pdf")
VEGA_LITE = "6.4"
"""The version that charts are written for, as vl-convert names it."""
_LETTERS_PER_LINE = {"text": 66, "subtitle": 84}
"""Number of letters that fit in a line of a picture's title."""
_CONVERTER_OPTIONS: dict[str, dict[str, Any]] = {"png": {"scale": 2}, "html": {"bundle": True}}
"""Format -> further options of vl-convert."""
_EXPORT_STATEMENT = "window.vegaEmbed = vegaEmbed;"


def _theme(text: str, muted: str, grid: str, background: str) -> dict[str, Any]:
    """Return a Vega-Lite configuration with these four colours."""
    return {
        "background": background,
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif",
        "view": {"stroke": None},
        "axis": {
            "labelColor": muted,
            "titleColor": text,
            "titleFontWeight": 500,
            "titleFontSize": 12,
            "labelFontSize": 11,
            "gridColor": grid,
            "domainColor": muted,
            "tickColor": muted,
            "titlePadding": 8,
        },
        "legend": {
            "labelColor": text,
            "titleColor": muted,
            "titleFontWeight": 500,
            "labelFontSize": 12,
            "labelLimit": 260,
            "symbolSize": 80,
        },
        "title": {
            "color": text,
            "subtitleColor": muted,
            "anchor": "start",
            "fontSize": 14,
            "fontWeight": 600,
            "subtitleFontSize": 12,
            "offset": 10,
        },
        "text": {"color": muted},
        "rule": {"color": text},
        "tick": {"color": text},
        "header": {"labelColor": text, "labelFontSize": 12, "labelFontWeight": 500, "title": None},
    }


LIGHT = _theme("#1c2430", "#5b6573", "#e6e9ee", "#ffffff")
_STILL_THEME = LIGHT | {"aria": False, "legend": {**LIGHT["legend"], "columnPadding": 28}}
"""Columns are padded because a reader's letters may be wider than those that the still was laid out with."""
DARK = _theme("#e6e9ee", "#a3adba", "#2b333e", "transparent")


def picture(view: FigureView, file_format: str) -> bytes:
    """Return a view as the content of a file, with its title.

    Args:
        view: the view.
        file_format: "png", "svg", "pdf", or "html" for a page of its own.
    """
    import vl_convert

    spec = drawable(view.titled)
    spec["config"] = LIGHT
    if "\\\\" in json.dumps(spec):
        # Vega reads its own words for each mark as code, in which a backslash of a text would stand for something else.
        spec["config"] = LIGHT | {"aria": False}
    # A picture is as wide as its chart: a longer line of its title would be cut.
    spec["title"] = {key: textwrap.wrap(text, _LETTERS_PER_LINE[key]) for key, text in spec["title"].items()}
    drawn: str | bytes = getattr(vl_convert, f"vegalite_to_{file_format}")(
        spec, vl_version=VEGA_LITE, **_CONVERTER_OPTIONS.get(file_format, {})
    )
    return drawn.encode() if isinstance(drawn, str) else drawn


_LONGEST_TEXT = 400
"""Letters of the longest text in a chart: drawing takes time with the square of a label's length."""


def drawable(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec whose texts can be drawn, whoever wrote them.

    Control characters are written out as on terminals (`printable`): a picture is XML, which forbids most of them, and
    the library ends the process over one. Long texts keep their two ends. Texts that differ still differ.
    """
    texts = _DrawableTexts()
    return {key: _with_drawable_texts(value, texts) for key, value in spec.items()}


class _DrawableTexts:
    """The texts of one spec as they are drawn."""

    def __init__(self) -> None:
        self._drawn_by_text: dict[str, str] = {}
        self._used_texts: set[str] = set()

    def drawn(self, text: str) -> str:
        """Return a text that can be drawn: the same for the same text, and another for every other text."""
        if text not in self._drawn_by_text:
            drawn = self._unused_text(_without_middle(printable(text)))
            self._drawn_by_text[text] = drawn
            self._used_texts.add(drawn)
        return self._drawn_by_text[text]

    def _unused_text(self, text: str) -> str:
        """Return `text`, or "`text` (2)" and so on where another text is drawn so already."""
        if text not in self._used_texts:
            return text
        numbered = (f"{text} ({number})" for number in itertools.count(2))
        return next(name for name in numbered if name not in self._used_texts)


def _with_drawable_texts(value: Any, texts: _DrawableTexts) -> Any:
    """Return a part of a spec with each text in it as it is drawn; keys stay."""
    match value:
        case str():
            return texts.drawn(value)
        case Mapping():
            return {key: _with_drawable_texts(item, texts) for key, item in value.items()}
        case list() | tuple():
            return [_with_drawable_texts(item, texts) for item in value]
        case _:
            return value


def _without_middle(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}...{text[-half:]}"


_DRAWING_PROGRAM = "from vitscale.present import drawing; drawing.draw_for_parent()"
_SMALLEST_SPEC: dict[str, Any] = {"data": {"values": [{}]}, "mark": "point"}
_drawing_processes: list[subprocess.Popen[bytes]] = []
"""The process that draws for this one, until it is asked for its pictures."""


def start_drawing_process() -> None:
    """Start a process that draws the figures of the next page, where a second core is free for it.

    It is for a program that makes one page, which can do other work during the half second that the library's first
    picture takes. Further pages are drawn without such a process (`stills`).
    """
    if _drawing_processes or len(usable_cores()) < 2:
        return
    with contextlib.suppress(OSError):
        pipe = subprocess.PIPE
        process = subprocess.Popen(python_code(_DRAWING_PROGRAM), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        _drawing_processes.append(process)
        atexit.register(_drawing_processes[0].kill)


def draw_for_parent() -> None:
    """Read specs as a JSON list from standard input, and write their SVGs: the work of the process beside a program."""
    still(_SMALLEST_SPEC)
    json.dump([still(spec) for spec in json.load(sys.stdin)], sys.stdout)


def stills(specs: Sequence[Mapping[str, Any]]) -> Callable[[], Sequence[str]]:
    """Begin to draw specs as SVG for a page; the returned function waits for them."""
    if not (specs and _drawing_processes):
        return lambda: [still(spec) for spec in specs]
    process = _drawing_processes.pop()
    if process.stdin is not None:
        with contextlib.suppress(OSError), process.stdin as specs_pipe:
            specs_pipe.write(json.dumps(specs).encode())

    def drawn() -> Sequence[str]:
        """Return the SVGs of the other process; where it failed, draw them here, which raises the errors of `still`."""
        with contextlib.suppress(ValueError), process:
            answer: Sequence[str] = json.loads(process.stdout.read() if process.stdout else b"")
            return answer
        return [still(spec) for spec in specs]

    return drawn


def still(spec: Mapping[str, Any]) -> str:
    """Return a spec as SVG for a page, without a text for each mark: the page has the rows as a table."""
    import vl_convert

    drawn: str = vl_convert.vegalite_to_svg({**drawable(spec), "config": _STILL_THEME}, vl_version=VEGA_LITE)
    return drawn


def pictures(views: Iterable[FigureView], formats: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (name of a file, its content) of each view in each of `formats`, taken from `FIGURE_FORMATS`."""
    for view in views:
        for file_format in formats:
            yield f"{view.name}.{file_format}", picture(view, file_format)


def library() -> bytes:
    """Return Vega, Vega-Lite and Vega-Embed as one script, compressed (gzip), that sets `vegaEmbed`.

    Bundling takes seconds, so the script is cached for the next page, in a file named by the versions it was made of.
    """
    import vl_convert

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitscale"
    cached = folder / f"vega-{version('vl-convert-python')}-{VEGA_LITE}.js.gz"
    try:
        content = cached.read_bytes()
        gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        script = vl_convert.javascript_bundle(_EXPORT_STATEMENT, vl_version=VEGA_LITE)
        content = gzip.compress(script.encode(), 9, mtime=0)
        # A page can be made without a home.
        with contextlib.suppress(OSError), whole_file(cached, make_folder=True) as file:
            file.write(content)
    return content
