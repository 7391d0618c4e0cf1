"""Many engines, each with its options: which curves are compared, and which of them all others are held against."""

from __future__ import annotations

from typing import Any

from results_factory import make_curve, make_results, make_trial, steady_run
from vitscale.analysis import Analysis, analyse
from vitscale.analysis.comparisons import ENGINE, AgainstReference, against_references, pairs_tested
from vitscale.pages import sentences as words
from vitscale.pages.statements import PAIR, claim

Choice = tuple[dict[str, Any], float]
"""Swept fields of [train], and how long a step takes under them."""

ENGINES: list[Choice] = [
    ({"engine": "none"}, 0.09),
    ({"engine": "deepspeed", "zero_stage": 2}, 0.14),
    ({"engine": "ddp"}, 0.10),
    ({"engine": "deepspeed", "zero_stage": 3, "offload": "parameters"}, 0.2),
    ({"engine": "accelerate", "accelerate_backend": "fsdp2"}, 0.10),
]


def study(choices: list[Choice], repeats: int = 3, gpus: tuple[int, ...] = (1, 2)) -> Analysis:
    """One curve per choice, whose repeats differ by 1 %."""
    curves, runs = [], []
    for train, seconds in choices:
        trials = [make_trial(gpus=n, **train) for n in (gpus if train.get("engine") != "none" else gpus[:1])]
        labels = {f"train.{field}": value for field, value in train.items()}
        curves.append((make_curve(trials).model_copy(update={"labels": labels}), trials))
        runs += [steady_run(t, seconds * (1 + 0.01 * (r % 2)), r) for t in trials for r in range(repeats)]
    return analyse(make_results(curves, runs))


def against(analysis: Analysis) -> tuple[AgainstReference, ...]:
    return against_references(analysis.curves, analysis.trials, analysis.comparisons)


def test_an_engine_with_its_options_is_one_choice() -> None:
    found = study(ENGINES)
    assert len([one for one in found.comparisons if one.gpus == 1]) == 5 * 4 // 2
    assert len([one for one in found.comparisons if one.gpus == 2]) == 4 * 3 // 2
    pair = next(one for one in found.comparisons if one.first == "deepspeed ZeRO-2" and one.second.startswith("accel"))
    assert pair.fields == ("train.engine", "train.zero_stage", "train.accelerate_backend")


def test_an_engine_and_something_else_are_two_choices() -> None:
    found = study([({"engine": "ddp"}, 0.1), ({"engine": "fsdp2", "activation_checkpointing": True}, 0.1)])
    assert found.comparisons == ()
    assert against(found) == ()


def test_every_engine_is_held_against_ddp_the_fastest_first() -> None:
    one, two = against(study(ENGINES))
    assert (one.gpus, one.varies, one.reference) == (1, ENGINE, "ddp")
    assert (two.gpus, two.reference) == (2, "ddp")
    assert [other.first for other in one.others] == [
        "plain (no wrapper)", "accelerate (FSDP2)", "deepspeed ZeRO-2", "deepspeed ZeRO-3, parameters offloaded",
    ]  # fmt: skip
    assert {other.second for other in (*one.others, *two.others)} == {"ddp"}
    assert [other.result.verdict for other in one.others] == [
        "faster", "no significant difference", "slower", "slower",
    ]  # fmt: skip
    assert round(one.others[0].result.ratio.value, 2) == 1.11  # 0.10 / 0.09


def test_ddp_as_it_comes_is_the_reference_and_without_ddp_the_fastest() -> None:
    (buckets,) = against(study([({"engine": "ddp", "bucket_mib": 1}, 0.1), ({"engine": "ddp"}, 0.2)], gpus=(2,)))
    assert (buckets.reference, buckets.varies) == ("ddp", "train.bucket_mib")
    stages: list[Choice] = [({"engine": "deepspeed", "zero_stage": n}, 0.1 + 0.05 * (n - 2) ** 2) for n in range(4)]
    (fastest,) = against(study(stages, gpus=(2,)))
    assert (fastest.reference, fastest.varies) == ("deepspeed ZeRO-2", "train.zero_stage")


def test_each_batch_size_has_a_reference_of_its_own() -> None:
    choices: list[Choice] = [
        ({"engine": engine, "micro_batch": size}, 0.01 * size) for engine in ("ddp", "fsdp2") for size in (8, 16)
    ]
    found = against(study(choices, gpus=(2,)))
    assert sorted((one.varies, one.reference, [other.first for other in one.others]) for one in found) == [
        ("train.engine", "ddp, micro_batch 16", ["fsdp2, micro_batch 16"]),
        ("train.engine", "ddp, micro_batch 8", ["fsdp2, micro_batch 8"]),
        ("train.micro_batch", "ddp, micro_batch 8", ["ddp, micro_batch 16"]),
        ("train.micro_batch", "fsdp2, micro_batch 8", ["fsdp2, micro_batch 16"]),
    ]


def test_a_trial_that_two_curves_share_is_held_against_the_reference_once() -> None:
    same: list[Choice] = [({"engine": "ddp"}, 0.1), ({"engine": "deepspeed"}, 0.2),
                          ({"engine": "deepspeed", "zero_stage": 0}, 0.2)]  # fmt: skip
    (one,) = against(study(same, gpus=(2,)))
    assert len(one.others) == 1


def test_other_data_is_other_work_and_held_against_nothing() -> None:
    curves, runs = [], []
    for fraction in (0.5, 1.0):
        trial = make_trial("ddp", fraction=fraction)
        curves.append((make_curve([trial]).model_copy(update={"labels": {"data.fraction": fraction}}), [trial]))
        runs += [steady_run(trial, 0.1, repeat) for repeat in range(3)]
    found = analyse(make_results(curves, runs))
    assert found.comparisons == ()
    assert against(found) == ()


def test_faster_is_said_after_correction_for_all_pairs() -> None:
    """Ten equal choices and a pair that would be told apart if nothing else were compared."""
    # Repeats 1, 1.01, 1: a standard deviation of 0.575 % and 3 runs; 1.4 % apart t is 2.97, p = 0.041.
    apart = [({"engine": "ddp"}, 0.1), ({"engine": "fsdp2"}, 0.1014)]
    (alone,) = study(apart, gpus=(2,)).comparisons
    assert alone.result.verdict == "faster"
    assert alone.result.p == alone.result.p_adjusted
    more = [({"engine": "ddp", "bucket_mib": mib}, 0.1) for mib in range(1, 9)]
    analysis = study([*apart, *more], gpus=(2,))
    (among,) = (one for one in analysis.comparisons if (one.first, one.second) == (alone.first, alone.second))
    assert (among.result.p, among.result.ratio) == (alone.result.p, alone.result.ratio)
    assert among.result.verdict == "not significant among all comparisons"
    assert pairs_tested(analysis.comparisons) == len(analysis.comparisons)
    assert f"{len(analysis.comparisons)} pairs of trials were compared" in words.multiplicity_sentence(analysis)
    assert words.multiplicity_sentence(study(apart, gpus=(2,))) == ""
    said = claim(PAIR, among).text
    assert "no significant difference between" in said
    assert "after correction" in said
    # A table against one reference says the same of the pair.
    told = {other.first: other.result.verdict for one in against(analysis) for other in one.others}
    assert told["fsdp2"] == "not significant among all comparisons"
