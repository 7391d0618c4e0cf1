"""Charts to files: PNG, SVG and PDF, drawn by vl-convert without a browser and without a network."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.analysis import Analysis
from vitscale.errors import unknown
from vitscale.prediction.results import Forecast
from vitscale.report.style import LIGHT
from vitscale.store import write_whole

if TYPE_CHECKING:
    from vitscale.report.figure import Figure

FIGURE_FORMATS = ("png", "svg", "pdf")


def vega_lite_version() -> str:
    """The Vega-Lite version that charts are written for, as vl-convert names it ("6.4")."""
    import altair

    return ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def write_figures(
    analysis: Analysis, folder: Path, formats: Collection[str], outlook: Forecast | None = None
) -> list[Path]:
    """Draws every chart that has data into `folder` in each of `formats` (png, svg, pdf).

    Returns:
        The files written, such as `strong-micro-speedup.png`.

    Raises:
        RequestError: a format is none of ours.
        OSError: the folder cannot be written to.
    """
    for wanted in formats:
        if wanted not in FIGURE_FORMATS:
            raise unknown("figure format", wanted, FIGURE_FORMATS)
    from vitscale.report.charts import figures  # altair takes half a second to import

    return draw(figures(analysis, outlook), folder, formats)


def draw(figures: Iterable[Figure], folder: Path, formats: Collection[str]) -> list[Path]:
    """Draws charts into `folder` in each of `formats`, which are of `FIGURE_FORMATS`; returns the files written.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(figure, folder / f"{figure.name}.{kind}", kind) for figure in figures for kind in formats]


def _write(figure: Figure, path: Path, kind: str) -> Path:
    import vl_convert

    spec, version = figure.spec | {"config": LIGHT}, vega_lite_version()
    if kind == "svg":
        write_whole(path, vl_convert.vegalite_to_svg(spec, vl_version=version))
    elif kind == "png":
        _write_bytes(path, vl_convert.vegalite_to_png(spec, vl_version=version, scale=2))
    else:
        _write_bytes(path, vl_convert.vegalite_to_pdf(spec, vl_version=version))
    return path


def _write_bytes(path: Path, content: bytes) -> None:
    """`store.write_whole` for bytes: a crash leaves the old file or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
