"""Micro-batch against the parts of a step: the page's own chart of explained steps, under the study's number."""

from __future__ import annotations

import dataclasses

from vitscale.analysis import Analysis
from vitscale.report.breakdown_charts import breakdown_figures
from vitscale.report.figure import Figure
from vitscale.report.like_paper.catalogue import PaperFigure
from vitscale.report.like_paper.selection import Lack, Selection, steps_for


def time_split(figure: PaperFigure, chosen: Selection, analysis: Analysis) -> Figure | Lack:
    """Stacked bars in seconds; a lack where no step was explained."""
    curves = list({id(one.curve): one.curve for one in chosen.series}.values())
    drawn = breakdown_figures(analysis, chosen.series[0].mode, curves)
    if not drawn:
        return Lack(
            "No step of these results was explained: epoch times alone, as others' logs have them, do not say where "
            "the time of a step goes.",
            steps_for(figure),
        )
    title = f"Figure {figure.number}. {figure.title}"
    spec = drawn[0].spec | {"title": {**drawn[0].spec["title"], "text": title}}
    spec["description"] = f"{title}. {'; '.join(drawn[0].text[:12])}"
    return dataclasses.replace(drawn[0], name=figure.name, title=title, spec=spec, wide=True)
