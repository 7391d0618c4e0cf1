"""Amounts as lines in the number of images, and those that can be the highest."""

from __future__ import annotations

from itertools import combinations

import pytest

from vitscale.models.tracing import TraceError
from vitscale.models.tracing.lines import line, upper_envelope
from vitscale.trial.model_card import PerImage

LINES = [PerImage(fixed, per_image) for fixed in range(-4, 5) for per_image in range(4)]
NUMBERS = range(1, 10)
"""No two of these lines cross behind it."""


def test_a_line_goes_through_both_amounts() -> None:
    assert line(7, 11) == PerImage(3, 2)
    assert line(5, 1) == PerImage(9, -2)
    with pytest.raises(TraceError, match="7 at 2 images and 12 at 4: no line"):
        line(7, 12)


def test_the_envelope_is_the_lines_that_are_the_highest_for_some_number_of_images() -> None:
    """For all sets of three lines that cross at few images; there, lines are the highest at one number alone."""
    for lines in combinations(LINES, 3):
        envelope = upper_envelope(lines)
        highest_lines = set()
        for images in NUMBERS:
            highest = max(lines, key=lambda each: (each.of(images), each.per_image))
            assert max(each.of(images) for each in envelope) == highest.of(images)
            highest_lines.add(highest)
        assert highest_lines == {*envelope}


def test_equal_lines_are_one() -> None:
    assert upper_envelope([PerImage(1, 2)] * 3) == (PerImage(1, 2),)
    assert upper_envelope([]) == ()
