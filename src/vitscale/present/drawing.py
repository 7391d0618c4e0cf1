"""Figures to pictures: PNG, SVG and PDF, drawn by vl-convert without a browser and without a network."""

from __future__ import annotations

import contextlib
import gzip
import os
import textwrap
import zlib
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitscale.present.document import View

FIGURE_FORMATS = ("png", "svg", "pdf")
VEGA_LITE = "6.4"
"""The version that charts are written for, as vl-convert names it."""
_LETTERS = {"text": 66, "subtitle": 84}
"""In a line of a picture's title."""
_EXPORTED = "window.vegaEmbed = vegaEmbed;"


def _theme(text: str, muted: str, grid: str, background: str) -> dict[str, Any]:
    """A Vega-Lite configuration from four colours."""
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
DARK = _theme("#e6e9ee", "#a3adba", "#2b333e", "transparent")


def picture(view: View, kind: str) -> bytes:
    """A view as a file's content, with its title: png, svg, pdf, or a page of its own (html)."""
    import vl_convert

    spec = view.titled | {"config": LIGHT}
    # A picture is as wide as its chart: a longer line of its title would be cut.
    spec["title"] = {key: textwrap.wrap(text, _LETTERS[key]) for key, text in spec["title"].items()}
    drawn: str | bytes
    if kind == "png":
        drawn = vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=2)
    elif kind == "pdf":
        drawn = vl_convert.vegalite_to_pdf(spec, vl_version=VEGA_LITE)
    elif kind == "html":
        drawn = vl_convert.vegalite_to_html(spec, vl_version=VEGA_LITE, bundle=True)
    else:
        drawn = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    return drawn.encode() if isinstance(drawn, str) else drawn


def still(spec: Mapping[str, Any]) -> str:
    """A spec as SVG for a page: without the words for each mark, which the figure beside it has as a table."""
    import vl_convert

    quiet: str = vl_convert.vegalite_to_svg({**spec, "config": LIGHT | {"aria": False}}, vl_version=VEGA_LITE)
    return quiet


def draw(views: Iterable[View], folder: Path, formats: Collection[str]) -> list[Path]:
    """Draws views into `folder` in each of `formats`, which are of `FIGURE_FORMATS`; returns the files written.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for view in views:
        for kind in formats:
            written.append(folder / f"{view.name}.{kind}")
            write_bytes(written[-1], picture(view, kind))
    return written


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole, into a folder that is made where it is missing: a crash leaves the old file or the new one.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def library() -> bytes:
    """Vega, Vega-Lite and Vega-Embed as one script, compressed (gzip), that sets `vegaEmbed`; kept for the next page.

    Bundling takes seconds; what is kept is named by the versions it was made of.
    """
    import vl_convert

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitscale"
    kept = folder / f"vega-{version('vl-convert-python')}-{VEGA_LITE}.js.gz"
    try:
        content = kept.read_bytes()
        gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        script = vl_convert.javascript_bundle(_EXPORTED, vl_version=VEGA_LITE)
        content = gzip.compress(script.encode(), 9, mtime=0)
        with contextlib.suppress(OSError):  # a page can be made without a home
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(kept, content)
    return content
