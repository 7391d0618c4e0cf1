from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from results_factory import (
    explained_run,
    failed_run,
    make_curve,
    make_results,
    make_trial,
    one_curve,
    rich_study,
    steady_run,
)
from vitscale.analysis import Analysis, analyse
from vitscale.report import terminal_table, to_markdown, words
from vitscale.trial.trial import Mode


def terminal(analysis: Analysis, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(terminal_table(analysis))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


RICH = analyse(rich_study())


@pytest.mark.parametrize("width", [80, 100])
def test_the_terminal_table_fits_and_cuts_nothing_off(width: int) -> None:
    lines = terminal(RICH, width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    assert sum("deepspeed" in line for line in lines) >= 3


def test_the_terminal_shows_the_baselines_absolute_time_and_start_up_apart() -> None:
    text = terminal(analyse(one_curve({1: [0.1, 0.1], 2: [0.0625, 0.0625]})), 100)
    assert "ddp: the baseline is 1 rank, 12.8 s an epoch" in text
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("2 "))
    # In the order of the columns: ranks and runs first, the start-up last.
    assert row == ["2", "2", "x", "189", "62.5", "4.00", "256", "3.20", "1.60", "6.00"]


def test_outcomes_stand_in_the_table_and_reasons_below() -> None:
    text = " ".join(terminal(RICH, 100).split())
    assert "oom: rank 0 ran out of memory: 11.2 GiB asked for, 3.1 GiB free" in text
    assert "unfinished: not run yet" in text


def test_user_text_is_shown_in_the_terminal_and_never_obeyed() -> None:
    trial = make_trial()
    hostile = "\x1b[2J\x1b]0;owned\x07[bold red]x[/bold red]\r\nnext"
    run = failed_run(trial, "failed", hostile)
    curve = make_curve([trial], train__note=hostile)
    text = terminal(analyse(make_results([(curve, [trial])], [run])), 200)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold red]x[/bold red]" in text
    assert "\\x1b[2J" in text


def test_markdown_has_tables_verdicts_and_failures() -> None:
    text = to_markdown(RICH)
    assert text.startswith("# rich\n")
    assert "## Strong scaling, micro-batch per rank fixed (strong-micro)" in text
    assert "- **too-few-repeats**: " in text
    assert "gloo: connection reset by peer" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table[:11]}) == 1


def test_user_text_does_not_break_markdown() -> None:
    trial = make_trial()
    hostile = "a|b\n## x <script>alert(1)</script> `c` [d](http://e)"
    curve = make_curve([trial], train__note=hostile)
    results = make_results([(curve, [trial])], [failed_run(trial, "failed", hostile)], name=hostile)
    text = to_markdown(analyse(results))
    assert "<script>" not in text
    assert "\n## x" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "[d](" not in text


def test_headlines_of_strong_and_weak_curves() -> None:
    strong = words.headlines(analyse(one_curve({1: [0.1, 0.1, 0.1], 2: [0.125, 0.125, 0.125]})))
    assert strong == (
        "ddp, strong-micro: 2 ranks are 1.60x as fast as 1 (efficiency 0.80; 95 % interval 0.80 to 0.80).",
    )
    (weak,) = words.headlines(analyse(one_curve({1: [0.1] * 3, 4: [0.125] * 3}, mode="weak")))
    assert weak == (
        "ddp, weak: 4 ranks train 4x the images in 1.25x the time of 1 (efficiency 0.80; 95 % interval 0.80 to 0.80)."
    )
    (slower,) = words.headlines(analyse(one_curve({1: [0.1] * 3, 2: [0.4] * 3})))
    assert "2 ranks are slower than 1: 0.50x" in slower
    (unclear,) = words.headlines(analyse(one_curve({1: [0.1, 0.2, 0.15], 2: [0.2, 0.4, 0.3]})))
    assert "2 ranks are not significantly faster or slower than 1: 1.00x" in unclear


@pytest.mark.parametrize("mode", ["strong-micro", "weak"])
@pytest.mark.parametrize(("base", "more"), [([0.1], [0.4]), ([0.1, 0.1], [0.4, 0.4]), ([0.1], [0.05] * 3)])
def test_one_run_or_two_have_a_measured_ratio_and_no_direction(
    mode: Mode, base: list[float], more: list[float]
) -> None:
    (found,) = words.headlines(analyse(one_curve({1: base, 2: more}, mode=mode)))
    assert f"{mode}: 2 ranks against 1: too few runs to tell (efficiency " in found
    assert "x measured" in found
    assert not any(word in found for word in ("faster", "slower", "as fast", "the time of"))


def explained_study() -> Analysis:
    """Two ranks that reach 80 % of ideal, for the transfer; explained steps last 3 % longer."""
    trials = [make_trial(gpus=gpus) for gpus in (1, 2)]
    computing = {"forward": 0.0412, "backward": 0.0412}
    runs = [
        explained_run(trials[0], [computing], 0.08),
        explained_run(trials[1], [computing | {"wire": 0.02}] * 2, 0.1),
    ]
    return analyse(make_results([(make_curve(trials), trials)], runs))


@pytest.mark.parametrize("show", [to_markdown, lambda analysis: terminal(analysis, 80)])
def test_the_waterfall_and_what_explaining_cost_stand_in_terminal_and_markdown(show: Callable[[Analysis], str]) -> None:
    text = " ".join(show(explained_study()).split())
    assert (
        "ddp, strong-micro: 2 ranks measured at 80 % of ideal (one run: too few to tell): 20 points are the transfer."
        in text
    )
    assert "Explaining slowed its steps by 2 to 3 % (those steps are in no reported time)." in text


def test_markdown_has_the_sentence_of_every_trial_and_both_say_why_there_is_none() -> None:
    assert "## From ideal to measured" in to_markdown(explained_study())
    light = analyse(one_curve({1: [0.1], 2: [0.125], 4: [0.125]}))
    why = "Where the efficiency goes is unknown at 2 of 2 points: no step was explained."
    assert why in to_markdown(light)
    assert why in " ".join(terminal(light, 80).split())
    assert "Where the efficiency goes" not in to_markdown(explained_study())


def test_comparisons_are_sentences() -> None:
    curves, runs = [], []
    for engine, pace in (("ddp", 0.1), ("deepspeed", 0.2)):
        trial = make_trial(engine)
        curves.append((make_curve([trial]), [trial]))
        runs += [steady_run(trial, pace * jitter, repeat) for repeat, jitter in enumerate([1.0, 1.01, 0.99])]
    (sentence,) = words.headlines(analyse(make_results(curves, runs)))
    assert sentence.startswith("strong-micro, 1 rank: ddp is 2.00x as fast as deepspeed (95 % interval 1.9")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, words.UNKNOWN), (0.0, "0"), (1.0, "1.00"), (12.345, "12.3"), (123.4, "123"), (1234.5, "1,234"),
        (0.01234, "0.0123"), (9.999, "10.0"), (99.96, "100"), (1e-7, "1.00e-07"), (float("nan"), words.UNKNOWN),
    ],
)  # fmt: skip
def test_numbers_have_three_significant_digits(value: float | None, text: str) -> None:
    assert words.number(value) == text


@given(st.floats(min_value=1e-3, max_value=1e8))
def test_a_shown_number_is_within_half_a_percent(value: float) -> None:
    assert float(words.number(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize(
    ("value", "text"), [(0.083, "83.0 ms"), (5.1, "5.10 s"), (900, "15.0 min"), (90_000, "25.0 h")]
)
def test_times_carry_their_unit(value: float, text: str) -> None:
    assert words.seconds(value) == text


def test_an_empty_study_has_its_tables_too() -> None:
    nothing = analyse(make_results([], []))
    assert terminal(nothing, 80).strip() == ""
    assert to_markdown(nothing).startswith("# example")
