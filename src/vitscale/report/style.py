"""How charts look: colours that colour-blind readers can tell apart, shapes that survive greyscale, two themes."""

from __future__ import annotations

# Okabe & Ito, "Color Universal Design" (2008), without black and yellow, which vanish on a dark or a light page; then
# darker and duller ones for studies of many curves, which nobody tells apart by colour alone.
SERIES_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#9467BD",
    "#A6426E", "#999933", "#A65628", "#44AA99",
)  # fmt: skip
# Seven shapes and twelve colours have no common divisor: together they tell 84 series apart before a pair comes again.
SERIES_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
# Cividis (Nunez, Anderton & Renslow, PLOS ONE 2018): lightness rises evenly, so that greyscale keeps the order.
ORDERED_COLOURS = ("#2c4a7c", "#575d6d", "#7d7c78", "#a59c74", "#d3c164", "#fee838")
# The parts of a step (`store.records.PARTS`): computing is blue, communicating orange. Any two
# neighbours in a stack differ by at least 15 in CIELAB, also as seen with protanopia, deuteranopia and tritanopia
# (simulated after Machado, Oliveira & Fernandes, IEEE TVCG 15, 2009).
PART_COLOURS = {
    "data_wait": "#CC79A7",
    "h2d": "#7A4B8C",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "wait": "#E69F00",
    "wire": "#D55E00",
    "norm": "#F2C6A0",
    "optimizer": "#009E73",
    "launch_gaps": "#8C6D46",
    "other": "#C3C8D0",
}
# In place of "wait", "wire" and "norm" where they cannot be told apart.
COMMUNICATION_COLOUR = "#8C2D04"
# Of no part of a step: steps are whole, and the data need not divide.
ROUNDING_COLOUR = "#999933"
IDEAL_COLOUR = "#8a8f98"
SOLID, DASHED = [1, 0], [5, 4]
