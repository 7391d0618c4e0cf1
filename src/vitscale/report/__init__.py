"""The report: what a results folder says, as a page, pictures, tables and data.

words       numbers and findings as a reader wants them
tables      the scaling tables as text; markdown and terminal lay them out; detail_tables has the page's others
contract    JSON with a version, and CSV
*_data      what charts draw, as plain rows
*_charts    one definition per chart; charts puts them together, style colours them, drawing writes them to files
page        one self-contained HTML file
prediction_*  what nobody has measured, as words, tables, charts and data, for the page and for `vitscale predict`
"""

from vitscale.report.contract import to_csv, to_json
from vitscale.report.drawing import FIGURE_FORMATS, write_figures
from vitscale.report.markdown import to_markdown
from vitscale.report.outputs import FORMATS, write
from vitscale.report.page import write_html
from vitscale.report.terminal import terminal_table

__all__ = [
    "FIGURE_FORMATS",
    "FORMATS",
    "terminal_table",
    "to_csv",
    "to_json",
    "to_markdown",
    "write",
    "write_figures",
    "write_html",
]
