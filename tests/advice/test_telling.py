from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from advice_factory import ASKED, advised, evidence, forecaster
from vitscale.advice.next_measurement import Measurement
from vitscale.advice.pipeline import Advice, advise
from vitscale.advice.printing import advice_document, advice_fields
from vitscale.advice.request import NoiseScale, future_run_estimate
from vitscale.advice.sentences import notes
from vitscale.errors import RequestError
from vitscale.pages.charts.advice import advice_chart, check_format, write_advice_chart
from vitscale.present.data import envelope
from vitscale.present.terminal import lines
from vitscale.present.units import DASH

CHECK = Measurement("vitscale check --hostfile HOSTS", "network between hosts", 16.0, 2.0, 1.25)


def printed(advice: Advice, width: int = 80) -> str:
    return "\n".join(line.plain for line in lines(advice_document(advice, ["torchrun ..."], None), width, verbose=True))


def test_an_answer_says_its_interval_its_verdict_and_what_it_rests_on() -> None:
    text = printed(advised(replace(ASKED, deadline_seconds=2000.0)))

    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert f"cheapest ddp 10 640 = 10 x 64\u2020 31.7 min (30.1{DASH}33.2) 5.28 0.53 yes" in rows
    assert any(row.startswith("knee of the") and row.endswith("= cheapest") for row in rows)
    full = text.partition("The answers in full\n")[2].split("\n\n")[0]
    assert "deadline: yes" in full
    assert f"5.28 (5.01{DASH}5.54)" in full
    assert [word in full for word in ("extrapolated,", "from ddp")] == [True, True]
    assert "cost" not in full


def test_the_headline_names_the_series_that_the_answers_are_from() -> None:
    assert printed(advised()).startswith("Advice from ddp: 100 epochs")
    others = replace(advised(), reference="ddp", origins=("plain", "deepspeed", "fsdp2"))
    assert printed(others).startswith("Advice from plain; deepspeed and fsdp2: 100 epochs")


def test_the_unknown_is_unavailable_with_its_reason() -> None:
    text = " ".join(printed(advised()).split())

    assert "Time to the same loss: unavailable. The gradient noise scale is unknown: not measured." in text
    assert "Memory: unavailable" in text
    assert "Start-up is unavailable" in text


def test_no_answer_says_by_how_much_and_which_limit_alone_can_be_met() -> None:
    text = printed(advised(replace(ASKED, deadline_seconds=2000.0, budget=12_000 / 3600)), width=200)

    assert "No configuration meets the limits. What comes nearest:" in text
    assert "The deadline would have to be 40 % larger." in text
    assert "The budget would have to be 16.7 % larger." in text
    assert "The deadline alone: ddp, 10 ranks" in text
    assert "31.7 min, 5.28 GPU-hours (extrapolated)." in text
    assert "The budget alone: ddp, 2 ranks" in text
    assert "The deadline would have to be 145 times as large." in printed(
        advised(replace(ASKED, deadline_seconds=10.0))
    )


def test_a_table_line_fits_a_terminal_of_80_columns() -> None:
    advice = advised(
        replace(ASKED, deadline_seconds=2000.0, price_per_gpu_hour=2.5, budget=50.0),
        noise=NoiseScale(500.0, 400.0, 600.0),
    )
    front = printed(advice).partition("Nothing else is both")[2].splitlines()[:12]
    assert any(line.lstrip().startswith("ddp") and " 1,280 = 20 x 64\u2020 " in line for line in front)
    assert max(map(len, front)) <= 80


def test_where_throughput_and_learning_disagree_both_are_told() -> None:
    text = printed(advised(noise=NoiseScale(500.0, 400.0, 600.0)), 300)

    # (1280 + 500) / (64 + 500) x 1,450 s = 76 min, and (640 + 500) / 564 x 1,900 s = 64 min.
    assert "gradient noise scale of 500 images (over the trials 400 to 600)" in text
    assert "To the same loss ddp, 10 ranks, micro-batch 64 (global batch 640) is the fastest of these: 64.0 min" in text
    assert "takes 76.3 min" in text


def test_what_was_left_out_is_counted_with_the_reason() -> None:
    advice = advised(forecast=forecaster(memory=lambda one: float(one.micro_batch), capacity=32.0))

    assert "left out: more than a 5 % chance that it will not fit in memory." in printed(advice, 200)


def test_markup_in_names_is_not_obeyed() -> None:
    found = evidence()
    advice = advise(
        replace(found, series=(replace(found.series[0], name="[red]x[/red] [/] \x1b[2J"),)),
        ASKED,
        NoiseScale(None),
        forecaster(),
    )

    assert r"[red]x[/red] [/] \x1b[2J" in printed(advice, 200)


def test_json_has_null_for_the_unavailable_and_one_object_for_each_answer() -> None:
    advice = replace(advised(replace(ASKED, deadline_seconds=2000.0)), measurements=(CHECK,))

    found = json.loads(envelope("advise", advice_fields(advice, "name = 1")))

    assert [one["question"] for one in found["answers"]] == ["cheapest", "knee"]
    first = found["answers"][0]
    assert (first["gpus"], first["cost"], first["memory_bytes"], first["verdict"]) == (10, None, None, "meets")
    assert first["seconds_low"] < first["seconds"] < first["seconds_high"]
    assert [one["gpus"] for one in found["pareto_front"]] == [20, 10, 5, 4, 2, 1]
    assert found["measurements"][0]["interval_ratio_after"] == 1.25
    assert found["limits"]["budget_unit"] == "GPU-hours"
    assert found["study"] == "name = 1"


def test_the_chart_has_every_engine_the_front_and_the_answers(tmp_path: Path) -> None:
    advice = advised(replace(ASKED, deadline_seconds=2000.0, price_per_gpu_hour=2.0))
    figure = advice_chart(advice)
    assert figure is not None
    drawn = json.dumps(figure.views[0].spec)

    assert "ddp" in drawn
    assert "fsdp2 *" in drawn
    assert "cheapest within the limits = knee of the curve" in drawn
    assert '"title": "cost"' in drawn
    write_advice_chart(advice, tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").read_bytes().startswith(b"<svg")
    assert len(list(tmp_path.iterdir())) == 1


def test_the_answers_stand_on_the_first_25_lines() -> None:
    advice = advised(
        replace(ASKED, deadline_seconds=2000.0, price_per_gpu_hour=2.5, budget=50.0),
        noise=NoiseScale(500.0, 400.0, 600.0),
    )
    shown = [line.plain for line in lines(advice_document(advice, ["torchrun ..."] * 40, None))]
    assert len(shown) <= 25
    assert any(line.startswith(("fastest", "cheapest")) for line in shown)
    assert shown[-1].endswith("-o STUDY.toml writes it as a study")


def test_a_chart_of_another_kind_or_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unknown chart format 'gif'"):
        check_format(tmp_path / "chart.gif")
    (tmp_path / "no").write_text("a file")
    with pytest.raises(RequestError, match="cannot be written"):
        write_advice_chart(advised(), tmp_path / "no" / "chart.svg")


def test_a_limit_that_alone_can_be_met_says_where_the_model_does_not_fit() -> None:
    advice = advised(replace(ASKED, deadline_seconds=2000.0, budget=12_000 / 3600))
    unfit = {limit: replace(option, label="does not fit") for limit, option in advice.alone.items()}
    text = printed(replace(advice, alone=unfit), width=200)
    assert [line for line in text.splitlines() if " alone: " in line and not line.endswith(" (does not fit).")] == []
    assert text.count("(does not fit).") == 2


def test_large_batches_that_alone_meet_the_limits_come_first() -> None:
    text = printed(advised(replace(ASKED, large_batch=False, deadline_seconds=2000.0, budget=20_000 / 3600)), width=400)

    assert "Only large-batch training meets the limits: ddp, 10 ranks, micro-batch 64 (global batch 640)" in text
    assert "--large-batch lets the answers do that. What comes nearest without it:" in text
    assert "The deadline alone: nothing meets it without large-batch training." in text
    assert "No configuration" not in text


def test_what_is_better_and_less_sure_stands_under_the_answers() -> None:
    """A deadline of 2,939 s: 10 ranks make it for certain, 5 probably, for a quarter less."""
    text = "\n".join(
        line.plain for line in lines(advice_document(advised(replace(ASKED, deadline_seconds=2939.0)), [], None), 120)
    )
    dare = next(part for part in text.split("\n- ") if part.startswith("Cheapest, if you dare: ddp, 5 ranks"))
    assert " ".join(dare.partition("\n\n")[0].split()).endswith(" GPU-hours (extrapolated).")


def test_hints_beside_the_answers_say_how_well_they_are_known() -> None:
    advice = advised(replace(ASKED, large_batch=False, gpus=(1, 2, 4)))
    option = advice.answers[0].option
    other = replace(option, label="prior-driven", seconds=future_run_estimate(1.0, 0.9, 1.1))
    told = " ".join(notes(replace(advice, other_batch=other, large_batch=other)))
    assert "would take 1.00 s (prior-driven; what that does to accuracy is unknown). --any-batch" in told
    assert "would take 1.00 s (prior-driven). --large-batch" in told
    known = replace(other, same_loss_seconds=2.0)
    assert "(prior-driven; 2.00 s to the same loss)" in " ".join(notes(replace(advice, other_batch=known)))
