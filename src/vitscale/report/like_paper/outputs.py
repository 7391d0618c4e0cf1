"""Where the figures go: one self-contained page, pictures, JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from vitscale.analysis import Analysis
from vitscale.errors import RequestError, explain, shown, unknown
from vitscale.report.drawing import FIGURE_FORMATS, draw
from vitscale.store import write_whole

FORMATS = ("html", "json", *FIGURE_FORMATS)
FOLDER = "like-paper"


def write(analysis: Analysis, results: Path, formats: Sequence[str], output: Path | None) -> list[Path]:
    """Writes all figures in each of `formats`.

    Args:
        analysis: what to draw.
        results: the results folder, where files go without `output`: like-paper/.
        formats: some of html, json, png, svg, pdf.
        output: the folder; or, for one of html and json alone, a file with that ending. Without it, JSON alone goes to
            standard output.

    Returns:
        The files written: like-paper.html, like-paper.json, figure-04-... and so on.

    Raises:
        RequestError: a format is none of these, or a file cannot be written.
    """
    for wanted in formats:
        if wanted not in FORMATS:
            raise unknown("format of --like-paper", wanted, FORMATS)
    try:
        if output is None and list(formats) == ["json"]:
            sys.stdout.write(_json(analysis))
            return []
        return _write(analysis, output or results / FOLDER, formats)
    except BrokenPipeError:
        raise  # nobody reads on: no error
    except OSError as error:
        raise RequestError(
            explain(
                f"the figures cannot be written to {shown(str(error.filename or output or results))}: "
                f"{error.strerror or error}",
                next_step="Name another folder with -o",
            )
        ) from error


def findings(analysis: Analysis) -> list[str]:
    """What the two claims come to on these results, a sentence each."""
    from vitscale.report.like_paper.claims import accuracy_sentences, claims, hosts_sentence
    from vitscale.report.like_paper.series import all_series

    tested = claims(all_series(analysis))
    return [
        *accuracy_sentences(tested),
        *(f"{pair.name}: {hosts_sentence(pair.test)}" for pair in tested.hosts),
    ]


def _write(analysis: Analysis, place: Path, formats: Sequence[str]) -> list[Path]:
    from vitscale.report.like_paper.claims import claims
    from vitscale.report.like_paper.contract import to_json
    from vitscale.report.like_paper.drawn import draw_all  # altair takes half a second to import
    from vitscale.report.like_paper.page import to_html
    from vitscale.report.like_paper.series import all_series

    found = all_series(analysis)
    drawn, tested = draw_all(analysis, found), claims(found)
    texts = {"html": lambda: to_html(analysis, drawn, tested), "json": lambda: to_json(drawn, tested)}
    one_file = len(formats) == 1 and formats[0] in texts and place.suffix == f".{formats[0]}" and not place.is_dir()
    (place.parent if one_file else place).mkdir(parents=True, exist_ok=True)
    written = []
    for kind in (one for one in formats if one in texts):
        path = place if one_file else place / f"{FOLDER}.{kind}"
        write_whole(path, texts[kind]())
        written.append(path)
    pictures = [kind for kind in formats if kind in FIGURE_FORMATS]
    return [*written, *(draw([one.figure for one in drawn], place, pictures) if pictures else [])]


def _json(analysis: Analysis) -> str:
    from vitscale.report.like_paper.claims import claims
    from vitscale.report.like_paper.contract import to_json
    from vitscale.report.like_paper.drawn import draw_all
    from vitscale.report.like_paper.series import all_series

    found = all_series(analysis)
    return to_json(draw_all(analysis, found), claims(found))
