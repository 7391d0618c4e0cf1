"""The charts: one Vega-Lite definition each, from which the page and every picture are drawn.

Only charts with data are made. Points are joined only within a curve; nothing is drawn beyond what was measured but
the ideal, and in the charts of predictions.
"""

from __future__ import annotations

from vitscale.analysis import Analysis
from vitscale.prediction.results import Forecast
from vitscale.report.accuracy_charts import accuracy_figures
from vitscale.report.breakdown_charts import breakdown_figures
from vitscale.report.chart_data import QUANTITIES
from vitscale.report.figure import Figure
from vitscale.report.prediction_charts import prediction_figures
from vitscale.report.resolution_charts import resolution_figure
from vitscale.report.resource_charts import resource_figures
from vitscale.report.scaling_charts import scaling_figure
from vitscale.report.timeline_charts import timeline_figures
from vitscale.report.training_charts import startup_figure, training_figures
from vitscale.report.waterfall_charts import waterfall_figure


def figures(analysis: Analysis, outlook: Forecast | None = None) -> list[Figure]:
    """All charts that have data, by batch policy; then what is predicted, and the start-up last."""
    found: list[Figure] = []
    measured = [c for c in analysis.curves if any(analysis.trials[point.trial_id].runs for point in c.points)]
    for mode in dict.fromkeys(curve.mode for curve in measured):
        curves = [curve for curve in measured if curve.mode == mode]
        found += [figure for quantity in QUANTITIES if (figure := scaling_figure(analysis, mode, curves, quantity))]
        found += training_figures(analysis, mode, curves)
        found += breakdown_figures(analysis, mode, curves)
        if waterfall := waterfall_figure(analysis, mode):
            found.append(waterfall)
        found += accuracy_figures(analysis, mode, curves)
    found += timeline_figures(analysis)
    if resolution := resolution_figure(analysis):
        found.append(resolution)
    found += resource_figures(analysis, measured)
    if outlook is not None:
        found += prediction_figures(analysis, outlook)
    if start := startup_figure(analysis):
        found.append(start)
    return found
