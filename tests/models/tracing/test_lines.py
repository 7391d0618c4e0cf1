"""Amounts as lines in the number of images, and those that can be the highest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.models.tracing import TraceError
from vitscale.models.tracing.lines import line, upper_envelope
from vitscale.trial.model_card import PerImage

MANY = range(1, 110)
"""No two of these lines cross behind it."""
LINES = st.lists(st.builds(PerImage, st.integers(-50, 50), st.integers(-5, 5)), min_size=1, max_size=6)


def test_a_line_goes_through_both_amounts() -> None:
    assert line(7, 11) == PerImage(3, 2)
    assert line(5, 1) == PerImage(9, -2)
    with pytest.raises(TraceError, match="7 at 2 images and 12 at 4: no line"):
        line(7, 12)


@given(LINES)
def test_the_envelope_is_the_highest_for_every_number_of_images(lines: list[PerImage]) -> None:
    envelope = upper_envelope(lines)
    for images in MANY:
        assert max(each.of(images) for each in envelope) == max(each.of(images) for each in lines)


@given(LINES)
def test_each_line_of_the_envelope_is_the_highest_for_some_number_of_images(lines: list[PerImage]) -> None:
    envelope = upper_envelope(lines)
    highest = {max(envelope, key=lambda each: (each.of(images), each.per_image)) for images in MANY}
    assert highest == set(envelope)
