"""The charts: one Vega-Lite definition per view, from which the page and every picture are drawn.

Only charts with data are made. Points are joined only within a curve. Only the ideal is drawn beyond what was measured,
except in the charts of predictions and advice.
"""
