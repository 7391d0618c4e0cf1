from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import explained_run, make_curve, make_results, make_trial, one_curve
from vitscale.analysis import Analysis, Factor, Waterfall, analyse
from vitscale.analysis.statistics import jackknife
from vitscale.analysis.time.breakdown import Straggler
from vitscale.analysis.time.waterfall import FACTORS
from vitscale.pages import sentences as words
from vitscale.pages.charts.axes import COMMUNICATION_COLOUR, PART_COLOURS
from vitscale.pages.charts.time import largest_loss, waterfall_chart, waterfall_rows
from vitscale.pages.sentences import contribution_clauses, whole_numbers
from vitscale.pages.statements import LOSS, WATERFALL, WORST, claim, worst_loss
from vitscale.present.estimate import Estimate
from vitscale.store.records import PARTS
from vitscale.store.results import Results

SURE = Estimate(0.71, 0.70, 0.72)


def made(efficiency: float, points: Mapping[str, float], **changes: Any) -> Waterfall:
    """A waterfall of 8 ranks with these points (of 100) and no others."""
    share = (1 - efficiency) / math.log(efficiency) if efficiency != 1 else -1.0
    factors = tuple(Factor(name, math.exp(p / 100 / share), p / 100) for name, p in points.items())
    fields: dict[str, Any] = {"interval": SURE, "straggler": None, "reason": "", "work_per_rank": 1.0}
    fields["curve"] = changes.pop("curve", "ddp")
    return Waterfall(
        fields.pop("curve"), "strong-micro", 8, "b" * 12, "a" * 12, 1, efficiency, factors, **(fields | changes)
    )


def waterfall_in_words(waterfall: Waterfall) -> str:
    return claim(WATERFALL, waterfall).text


def loss_in_words(waterfall: Waterfall) -> str:
    return claim(LOSS, waterfall).text


# --- the sentence ----------------------------------------------------------------------------------------------------


def test_the_sentence_names_the_straggler_the_transfer_and_rounding() -> None:
    one = made(0.71, {"step rounding": 4, "straggler wait": 17, "wire": 8}, straggler=Straggler(3, 1.0, 0.21))
    assert waterfall_in_words(one) == (
        "8 ranks reach 71 % of ideal: 17 points are waiting for rank 3, which computes 21 % slower; "
        "8 are the transfer; 4 are step rounding."
    )


@pytest.mark.parametrize(
    ("straggler", "text"),
    [
        (None, "waiting for the slowest rank"),
        (Straggler(3, 1.0, 0.214), "waiting for rank 3, which computes 21 % slower"),
        (Straggler(0, 0.8, 0.21), "waiting for rank 0, which computes 21 % slower and comes last in 80 % of steps"),
        (Straggler(5, 0.6, None), "waiting for rank 5, which comes last in 60 % of steps"),
        (Straggler(5, 1.0, -0.02), "waiting for rank 5"),
    ],
)
def test_who_is_waited_for_and_how_often(straggler: Straggler | None, text: str) -> None:
    one = made(0.8, {"straggler wait": 20}, straggler=straggler)
    assert contribution_clauses(one) == (f"20 points are {text}",)


def test_what_is_lost_has_a_name_each() -> None:
    names = {
        "compute scaling": "slower computing",
        "data wait": "waiting for data",
        "communication": "waiting for ranks and the transfer, which could not be told apart",
        "optimizer": "the optimizer",
    }
    one = made(0.6, {name: 13 - k for k, name in enumerate(names)} | {"launch gaps": -6})
    assert contribution_clauses(one)[1:] == (
        "12 are waiting for data",
        "11 are waiting for ranks and the transfer, which could not be told apart",
        "10 are the optimizer",
        "6 are gained by other things",
    )
    assert set(names) < set(FACTORS)
    assert contribution_clauses(made(0.9, {"launch gaps": 10})) == ("10 points are gaps between kernels",)


def test_what_is_gained_is_said_so() -> None:
    one = made(0.9, {"wire": 16, "data wait": -4, "optimizer": -2})
    assert waterfall_in_words(one) == (
        "8 ranks reach 90 % of ideal: 16 points are the transfer; 4 are gained by less waiting for data; "
        "2 are gained by a faster optimizer."
    )
    gains = made(1.1, {"straggler wait": -4, "wire": -3, "launch gaps": -2, "communication": -1})
    assert contribution_clauses(gains) == (
        "4 points are gained by less waiting for the slowest rank",
        "3 are gained by a shorter transfer",
        "2 are gained by shorter gaps between kernels",
        "1 is gained by less waiting for ranks and transfer, which could not be told apart",
    )


@pytest.mark.parametrize(
    ("work", "points", "text"),
    [
        (0.5, 10, "10 points are smaller per-rank work"),
        (0.5, -10, "10 points are gained by smaller per-rank work"),
        (1.0, 10, "10 points are slower computing"),
        (1.0, -10, "10 points are gained by faster computing"),
        (2.0, 10, "10 points are slower computing"),
    ],
)
def test_computing_is_called_smaller_work_only_where_the_work_is_smaller(work: float, points: int, text: str) -> None:
    one = made(1 - points / 100, {"compute scaling": points}, work_per_rank=work)
    assert contribution_clauses(one) == (text,)


def with_runs(waterfall: Waterfall, *runs: Mapping[str, float]) -> Waterfall:
    """The same with the points (of 100) of three runs of the trial; those of the baseline's do not differ."""
    factors = []
    for factor in waterfall.factors:
        points = [run.get(factor.name, 100 * factor.points) / 100 for run in runs]
        total = sum(points)
        without = tuple((total - value) / (len(points) - 1) for value in points)
        sides = (without, (factor.points,) * 3)
        factors.append(dataclasses.replace(factor, interval=jackknife(factor.points, sides), without=sides))
    return dataclasses.replace(waterfall, factors=tuple(factors))


def test_most_is_more_than_all_others_together_and_the_largest_part_differs_from_the_next() -> None:
    """Of 29 points 17, 8 and 4 as measured; how far three runs differ decides what may be said of them."""
    lost = made(0.71, {"wire": 17, "straggler wait": 8, "data wait": 4})
    head = "ddp on 8 ranks (strong-micro) is at 71 % of ideal (95 % interval 70 to 72 %): "
    for runs, text, cell in (
        ([{"wire": 16.9}, {"wire": 17}, {"wire": 17.1}], "most goes to the transfer (wire: 17 points).", "17 % wire"),
        # 17 less 12 is 5: with runs 3 apart the interval of that reaches below 0, and that of 17 less 8 does not.
        (
            [{"wire": 14}, {"wire": 17}, {"wire": 20}],
            "the largest part goes to the transfer (wire: 17 points, 10 to 24).",
            "17 % wire",
        ),
        (
            [{"wire": 7, "straggler wait": 12}, {"wire": 17}, {"wire": 27, "straggler wait": 4}],
            "the largest part goes to the transfer (wire: 17 points, -8 to 42), waiting for the slowest rank "
            "(straggler wait: 8 points, -2 to 18) or waiting for data (data wait: 4 points), not told apart.",
            "unsure",
        ),
    ):
        told = claim(LOSS, with_runs(lost, *runs))
        assert (told.text, told.cell) == (head + text, cell)


def test_parts_of_one_run_that_differ_alike_are_told_apart_by_their_difference() -> None:
    """17, 8 and 8 points vary by 5 from run to run, all together: the first is 9 above each other in each run."""
    lost = made(0.67, {"wire": 17, "straggler wait": 8, "data wait": 8})
    together = [{"wire": 17 + off, "straggler wait": 8 + off, "data wait": 8 + off} for off in (-5, 0, 5)]
    assert ": the largest part goes to the transfer (wire: 17 points, 5 to 29)." in loss_in_words(
        with_runs(lost, *together)
    )
    against = [{"wire": 17 + off, "straggler wait": 8 - off, "data wait": 8 - off} for off in (-5, 0, 5)]
    assert ", not told apart." in loss_in_words(with_runs(lost, *against))


def test_no_loss_is_explained_that_is_not_established() -> None:
    """74 % that may be 50 to 109 % is no loss; and of too few runs nothing is established."""
    lost = made(0.74, {"wire": 18, "straggler wait": 8}, interval=Estimate(0.74, 0.50, 1.09))
    told = claim(LOSS, lost)
    assert told.text == (
        "ddp on 8 ranks (strong-micro) is at 74 % of ideal (95 % interval 50 to 109 %): no loss is established, and so "
        "none is explained."
    )
    assert told.cell == "unsure"
    assert waterfall_in_words(lost) == (
        "8 ranks reach 74 % of ideal (95 % interval 0.50 to 1.09): no loss is established, and so none is explained."
    )
    few = claim(LOSS, made(0.74, {"wire": 18}, interval=Estimate(0.74, note="one run: no interval")))
    assert few.text == (
        "ddp on 8 ranks (strong-micro) was measured at 74 % of ideal, in too few runs to establish a loss; the largest "
        "part measured is the transfer (wire: 18 points)."
    )
    assert few.cell == "\N{EN DASH}"


def test_the_largest_loss_is_the_lowest_efficiency_and_not_the_largest_single_part() -> None:
    """One loses 40 points in three parts, the other 35 in one."""
    several = made(0.60, {"wire": 15, "straggler wait": 13, "data wait": 12}, curve="several")
    single = made(0.65, {"wire": 35}, curve="single")
    apart = [
        dataclasses.replace(several, interval=Estimate(0.60, 0.59, 0.61)),
        dataclasses.replace(single, interval=Estimate(0.65, 0.64, 0.66)),
    ]
    worst = worst_loss(apart)
    assert worst is not None
    assert (worst.waterfall.curve, largest_loss(apart)) == ("several", apart[0])
    assert claim(WORST, worst).text.startswith("Largest loss at the most ranks: several on 8 ranks")
    close = [dataclasses.replace(several, interval=Estimate(0.60, 0.55, 0.66)), apart[1]]
    worst = worst_loss(close)
    assert worst is not None
    assert claim(WORST, worst).text.startswith(
        "Largest loss measured at the most ranks, not told apart from single (strong-micro): several on 8 ranks"
    )


def test_more_than_ideal() -> None:
    assert waterfall_in_words(made(1.04, {"compute scaling": -7, "wire": 3})) == (
        "8 ranks reach 104 % of ideal: 7 points are gained by faster computing; 3 are the transfer."
    )


def test_nothing_lost_is_nothing_said() -> None:
    assert waterfall_in_words(made(1.0, {"wire": 0.3, "optimizer": -0.3})) == "8 ranks reach 100 % of ideal."


def test_four_are_named_and_the_rest_is_one() -> None:
    lost = {"compute scaling": 9, "data wait": 7, "straggler wait": 5, "wire": 4, "optimizer": 2, "other": 12}
    assert contribution_clauses(made(0.61, lost)) == (
        "9 points are slower computing",
        "7 are waiting for data",
        "5 are waiting for the slowest rank",
        "4 are the transfer",
        "14 are other things",
    )


def test_what_is_below_a_point_is_not_named() -> None:
    one = made(0.886, {"wire": 10.2, "optimizer": 0.9, "data wait": 0.3})
    assert waterfall_in_words(one) == "8 ranks reach 89 % of ideal: 10 points are the transfer; 1 is other things."
    assert contribution_clauses(made(0.896, {"wire": 10.1, "optimizer": 0.3})) == ("10 points are the transfer",)


def test_the_largest_remainders_are_rounded_up() -> None:
    assert contribution_clauses(made(0.186, {"wire": 80, "optimizer": 1.4})) == (
        "80 points are the transfer",
        "1 is the optimizer",
    )
    assert contribution_clauses(made(0.744, {"wire": 20.4, "optimizer": 5.2})) == (
        "21 points are the transfer",
        "5 are the optimizer",
    )


def test_gained_under_drop_last_says_what_it_leaves_out() -> None:
    one = made(1.02, {"step rounding": -2}, images_left_out=0.02)
    assert contribution_clauses(one) == ("2 points are gained by step rounding, which leaves 2 % of the images out",)
    lost = made(0.98, {"step rounding": 2}, images_left_out=0.02)
    assert contribution_clauses(lost) == ("2 points are step rounding",)


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        (Estimate(0.71, 0.69, 0.73), "reach 71 % of ideal"),
        (Estimate(0.71, note="one run: no interval"), "measured at 71 % of ideal (one run: too few to tell)"),
        (
            Estimate(0.71, 0.70, 0.72, note="too few repeats"),
            "measured at 71 % of ideal (too few repeats)",
        ),
        (Estimate(0.71, 0.62, 0.80), "reach 71 % of ideal (95 % interval 0.62 to 0.80)"),
    ],
)
def test_what_cannot_be_relied_on_says_so(interval: Estimate, said: str) -> None:
    one = made(0.71, {"wire": 29}, interval=interval)
    assert waterfall_in_words(one) == f"8 ranks {said}: 29 points are the transfer."


def test_without_factors_the_sentence_tells_why() -> None:
    one = dataclasses.replace(made(0.71, {}), reason="no step was explained")
    assert (
        waterfall_in_words(one) == "8 ranks reach 71 % of ideal; where the rest goes is unknown: no step was explained."
    )
    none = dataclasses.replace(one, efficiency=None, reason="not run yet")
    assert waterfall_in_words(none) == "What 8 ranks reach of ideal is unknown: not run yet."
    assert contribution_clauses(none) == ()


def numbers(one: Waterfall) -> list[int]:
    """The points of the sentence's clauses, gains negative."""
    return [int(c.split()[0]) * (-1 if "gained by" in c else 1) for c in contribution_clauses(one)]


@given(
    st.dictionaries(st.sampled_from(FACTORS), st.floats(min_value=-40, max_value=60), min_size=1),
    st.booleans(),
)
def test_named_points_and_the_rest_add_up_to_100_less_what_is_reached(points: dict[str, float], small: bool) -> None:
    lost = sum(points.values())
    if lost >= 99:
        points = {name: value * 90 / lost for name, value in points.items()}
    points = {name: value / 20 for name, value in points.items()} if small else points
    efficiency = 1 - sum(points.values()) / 100
    one = made(efficiency, points)
    assert sum(numbers(one)) == 100 - round(100 * efficiency)
    assert len(numbers(one)) <= 5
    said = [abs(value) for value in numbers(one)]
    named = said[:-1] if contribution_clauses(one) and contribution_clauses(one)[-1].endswith("other things") else said
    assert all(before >= after - 1 for before, after in itertools.pairwise(named))
    assert 0 not in said


@given(
    st.lists(st.floats(min_value=-50, max_value=50), min_size=1, max_size=6), st.floats(min_value=-0.5, max_value=0.5)
)
def test_rounding_moves_nothing_by_more_than_one(values: list[float], nudge: float) -> None:
    total = round(sum(values) + nudge)
    if abs(total - sum(values)) > 0.5:
        total = round(sum(values))
    rounded = whole_numbers(values, total)
    assert sum(rounded) == total
    assert all(abs(value - to) <= 1 for value, to in zip(values, rounded, strict=True))


# --- in the report ---------------------------------------------------------------------------------------------------

COMPUTING = {"forward": 0.03, "backward": 0.05, "optimizer": 0.02}
"""0.1 s."""


def curve_of(counts: Sequence[int], engines: Sequence[str] = ("ddp",), repeats: int = 3, **labels: Any) -> Results:
    """On N ranks the last one computes for 10 (N - 1) ms longer and the transfer takes 5 (N - 1) ms."""
    curves, runs = [], []
    for engine in engines:
        trials = [make_trial(engine, gpus) for gpus in counts]
        curves.append((make_curve(trials, **labels), trials))
        for trial in trials:
            more = trial.world.size - 1
            wire, slower = 0.005 * more, 0.01 * more
            parts = [COMPUTING | {"wire": wire, "wait": slower}] * more
            parts.append(COMPUTING | {"wire": wire, "forward": 0.03 + slower})
            runs += [explained_run(trial, parts, repeat=repeat) for repeat in range(repeats)]
    return make_results(curves, runs)


TWO = "9 points are waiting for rank 1, which computes 10 % slower; 4 are the transfer"


def test_why_efficiencies_are_not_taken_apart_is_said_once() -> None:
    light = analyse(one_curve({1: [0.1], 2: [0.125], 4: [0.125]}))
    assert words.unexplained_sentences(light) == (
        "Where the efficiency goes is unknown at 2 of 2 points: no step was explained.",
    )
    assert words.unexplained_sentences(analyse(curve_of([1, 2]))) == ()
    unfinished = make_trial(gpus=2)
    trials = [make_trial(), unfinished]
    started = make_results([(make_curve(trials), trials)], [explained_run(trials[0], [COMPUTING])])
    assert words.unexplained_sentences(analyse(started)) == ()
    assert words.unexplained_sentences(analyse(one_curve({1: [0.1]}))) == ()


def slowed(*by: float) -> Analysis:
    trials = [make_trial(gpus=gpus) for gpus in range(1, len(by) + 1)]
    runs = [explained_run(t, [COMPUTING] * t.world.size, slowdown=s) for t, s in zip(trials, by, strict=True)]
    return analyse(make_results([(make_curve(trials), trials)], runs))


@pytest.mark.parametrize(
    ("slowdowns", "how_much"),
    [
        ((0.03,), "3 %"),
        ((0.012, 0.078, 0.05), "1 to 8 %"),
        ((0.004, 0.001), "less than 1 %"),
        ((-0.2, 0.02), "0 to 2 %"),
    ],
)
def test_what_explaining_cost(slowdowns: tuple[float, ...], how_much: str) -> None:
    text = f"Explaining slowed its steps by {how_much} (those steps are in no reported time)."
    assert words.explaining_cost_sentence(slowed(*slowdowns)) == text


def test_where_nothing_was_explained_it_cost_nothing() -> None:
    assert words.explaining_cost_sentence(analyse(one_curve({1: [0.1]}))) == ""


# --- the chart -------------------------------------------------------------------------------------------------------


def rows_of(results: Results) -> list[dict[str, Any]]:
    found = waterfall_chart(analyse(results).waterfalls)
    assert found is not None
    return found.views[0].rows


def test_bars_lead_from_ideal_to_measured() -> None:
    rows = rows_of(curve_of([1, 2]))
    assert [row["step"] for row in rows] == [
        "ideal", "step rounding", "compute scaling", "data wait", "straggler wait", "wire", "optimizer", "other",
        "measured",
    ]  # fmt: skip
    assert (rows[0]["start"], rows[0]["end"]) == (0.0, 100.0)
    for before, after in itertools.pairwise(rows[:-1]):
        assert after["start"] == before["end"]
        assert before["next"] == after["step"]
    # 0.1 s on one rank, 0.115 on each of two.
    reached = 100 * 0.1 / 0.115
    assert rows[-2]["end"] == pytest.approx(reached)
    assert (rows[-1]["start"], rows[-1]["end"]) == (0.0, pytest.approx(reached))
    assert (rows[-1]["label"], rows[0]["label"], rows[1]["label"]) == ("87 %", "100 %", "0")


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_points_have_the_intervals_of_the_analysis_and_fewer_than_three_runs_none(repeats: int) -> None:
    """One rank and two, whose forward pass and transfer differ from run to run."""
    trials, runs = [make_trial(gpus=gpus) for gpus in (1, 2)], []
    for repeat, factor in enumerate((0.96, 1.0, 1.04)[:repeats]):
        alone = {"forward": 0.03 * factor, "backward": 0.05}
        runs.append(explained_run(trials[0], [alone], repeat=repeat))
        runs.append(explained_run(trials[1], [alone | {"wire": 0.02 * factor**2}] * 2, repeat=repeat))
    (waterfall,) = analyse(make_results([(make_curve(trials), trials)], runs)).waterfalls
    rows = {row["step"]: row for row in waterfall_rows(waterfall)}
    chart = waterfall_chart([waterfall])
    assert chart is not None
    assert ("95 % intervals" in chart.views[0].subtitle) == (repeats == 3)
    if repeats < 3:
        assert {row["low"] for row in rows.values()} == {None}
        return
    for factor_of_it in waterfall.factors:
        row, points = rows[factor_of_it.name], factor_of_it.interval
        assert points is not None
        low, high = points.ends
        assert (row["low"], row["high"]) == pytest.approx((row["start"] - 100 * high, row["start"] - 100 * low))
    assert waterfall.interval is not None
    low, high = waterfall.interval.ends
    assert (rows["measured"]["low"], rows["measured"]["high"]) == pytest.approx((100 * low, 100 * high))
    assert rows["wire"]["high"] - rows["wire"]["low"] > 1
    assert rows["ideal"]["low"] is None


def test_a_factor_has_the_colour_of_its_part() -> None:
    found = waterfall_chart(analyse(curve_of([1, 2])).waterfalls)
    assert found is not None
    bar = next(layer for layer in found.views[0].spec["layer"] if layer["mark"]["type"] == "bar")
    scale = bar["encoding"]["color"]["scale"]
    colours = dict(zip(scale["domain"], scale["range"], strict=True))
    assert colours["straggler wait"] == PART_COLOURS["wait"]
    assert colours["wire"] == PART_COLOURS["wire"]
    assert set(PART_COLOURS) == set(PARTS)
    drawn = [*PART_COLOURS.values(), COMMUNICATION_COLOUR]
    assert len(set(drawn)) == len(drawn)


def test_a_view_for_each_trial_and_that_which_loses_most_in_front() -> None:
    """On N ranks 10 (N - 1) ms are waiting and 5 (N - 1) ms the transfer, of 100 ms: four ranks lose more than two."""
    waterfalls = analyse(curve_of([1, 2, 4])).waterfalls
    found = waterfall_chart(waterfalls)
    assert found is not None
    assert [view.choices["trial"].label for view in found.views] == ["ddp, 4 ranks", "ddp, 2 ranks"]
    worst = largest_loss(waterfalls)
    assert worst is not None
    assert loss_in_words(worst) == (
        "ddp on 4 ranks (strong-micro) is at 69 % of ideal: most goes to waiting for rank 3, which computes 30 % "
        "slower (straggler wait: 21 points)."
    )
    assert found.views[1].summary == f"2 ranks reach 87 % of ideal: {TWO}."


def test_an_end_that_rounds_to_nothing_has_no_sign() -> None:
    """An interval of -0.4 to 46 points is told as 0 to 46: "-0" says nothing."""
    worst = largest_loss(analyse(curve_of([1, 2, 4])).waterfalls)
    assert worst is not None
    factors = tuple(
        dataclasses.replace(factor, interval=Estimate(factor.points, -0.004, 0.46)) for factor in worst.factors
    )
    told = loss_in_words(dataclasses.replace(worst, factors=factors))
    assert "(straggler wait: 21 points, 0 to 46)" in told


def test_bars_beyond_the_ideal_have_room() -> None:
    trials = [make_trial(gpus=gpus) for gpus in (1, 2)]
    runs = [explained_run(trials[0], [COMPUTING], 0.1), explained_run(trials[1], [COMPUTING] * 2, 0.04)]
    found = waterfall_chart(analyse(make_results([(make_curve(trials), trials)], runs)).waterfalls)
    assert found is not None
    bar = next(layer for layer in found.views[0].spec["layer"] if layer["mark"]["type"] == "bar")
    low, high = bar["encoding"]["x"]["scale"]["domain"]
    assert low == 0
    assert high > 250
    measured = "2 ranks measured at 250 % of ideal (one run: too few to tell): "
    assert found.views[0].summary.startswith(f"{measured}120 points are gained by faster computing; ")


def test_without_factors_there_is_no_chart() -> None:
    assert waterfall_chart(analyse(one_curve({1: [0.1], 2: [0.125]})).waterfalls) is None
