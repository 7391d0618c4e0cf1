from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.errors import RequestError, VitscaleError, explain, nearest, printable, shown, unknown


def nested_list(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


def test_explain_says_what_the_valid_values_and_the_next_step() -> None:
    message = explain("train.engine is 'dpd'", valid=["ddp", "none"], next_step="Correct it")
    assert message == "train.engine is 'dpd'. Valid: ddp, none. Correct it."


def test_explain_leaves_out_what_is_not_known() -> None:
    assert explain("the disk is full.") == "the disk is full."


def test_unknown_names_the_nearest() -> None:
    error = unknown("engine", "deepsped", ["none", "ddp", "deepspeed"], next_step="Correct train.engine")
    assert isinstance(error, RequestError)
    assert str(error) == (
        "unknown engine 'deepsped'. Did you mean 'deepspeed'? Valid: ddp, deepspeed, none. Correct train.engine."
    )


def test_capitals_hide_no_likely_name() -> None:
    assert nearest("DDP", ["ddp", "deepspeed"]) == " Did you mean 'ddp'?"
    assert nearest("vit", ["ViT", "deepspeed"]) == " Did you mean 'ViT'?"


def test_nothing_near_is_suggested_for_nothing_alike() -> None:
    assert nearest("zzzzzz", ["ddp", "deepspeed"]) == ""


def test_a_long_value_shows_both_ends_and_its_length() -> None:
    text = shown("a" * 100_000 + "b" * 100_000)
    assert text.startswith("'aaaa")
    assert text.endswith("bbbb' (200,000 characters)")
    assert len(text) < 250


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "'plain'"),
        (64, "64"),
        ([1, "x"], "[1, 'x']"),
        ("\x1b[31mred\x07", r"'\x1b[31mred\x07'"),
        ("two\nlines", r"'two\nlines'"),
        ("\udcff", r"'\udcff'"),
        ("\u202egnp", r"'\u202egnp'"),
    ],
)
def test_a_value_is_shown_on_one_line_without_control_characters(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("value", [1 << 100_000, nested_list(100_000)], ids=["int", "list"])
def test_a_value_python_cannot_write_out_is_named_by_its_type(value: object) -> None:
    assert shown(value) == f"({type(value).__name__} too large to show)"


def test_no_message_carries_control_characters_to_the_terminal() -> None:
    error = VitscaleError("a path \x1b]0;owned\x07 and \udcff\nsecond line")
    assert str(error) == "a path \\x1b]0;owned\\x07 and \\udcff\nsecond line."


@given(st.text(alphabet=st.characters()))
def test_printable_can_always_be_printed_and_encoded(text: str) -> None:
    line = printable(text)
    assert all(c.isprintable() or c == "\n" for c in line)
    line.encode("utf-8")
