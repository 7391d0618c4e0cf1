from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from advice_factory import ASKED, COUNTS, NO_NOISE, advised, evidence, forecaster, step_seconds
from evidence_factory import UNKNOWN, make_evidence, make_point
from vitscale.advice import forecast_table
from vitscale.advice.candidates import candidates
from vitscale.advice.comparable_series import comparable_series
from vitscale.advice.pipeline import Advice, advise
from vitscale.advice.request import NoiseScale, Option, Request
from vitscale.advice.study_text import advised_trial
from vitscale.engines.variants import EngineVariant
from vitscale.errors import RequestError
from vitscale.prediction.configurations import Candidate, Evaluated
from vitscale.prediction.evaluating import ROUGH
from vitscale.prediction.evidence import Evidence, MeasuredPoint, Series
from vitscale.prediction.finishing import interruptions, time_to_finish
from vitscale.prediction.fitting import DRAWS, fit
from vitscale.prediction.workloads import evaluate_all
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import world_of_hosts


def answer(advice: Advice, kind: str) -> Option:
    return next(one.option for one in advice.answers if one.kind == kind)


def test_the_law_comes_out_as_counted_by_hand() -> None:
    front = advised().front

    assert [option.gpus for option in front] == [20, 10, 5, 4, 2, 1]
    assert [option.seconds.value for option in front] == pytest.approx([1450, 1900, 2800, 3250, 5500, 10_000])
    assert [3600 * option.gpu_hours.value for option in front] == pytest.approx(
        [29_000, 19_000, 14_000, 13_000, 11_000, 10_000]
    )
    assert front[1].seconds.high == pytest.approx(1900 * 1.05)
    assert front[1].efficiency.value == pytest.approx(1 / 1.9)


def test_without_limits_the_fastest_the_cheapest_and_the_knee() -> None:
    advice = advised()

    assert {one.kind: one.option.gpus for one in advice.answers} == {"fastest": 20, "cheapest": 1, "knee": 10}
    assert not advice.answers[-1].at_the_end
    assert advice.met


def test_a_knee_at_the_last_count_says_that_it_may_lie_beyond() -> None:
    advice = advised(replace(ASKED, gpus=(1, 2, 4)))

    assert answer(advice, "knee").gpus == 4
    assert advice.answers[-1].at_the_end


@pytest.mark.parametrize(
    ("deadline", "ranks", "bolder"),
    [
        (2940.0, 5, None),  # 2,800 s, at most 2,940: to the second
        (2939.0, 10, 5),  # 5 ranks only probably make it, and cost a quarter less
        (1523.0, 20, None),
    ],
)
def test_the_cheapest_under_a_deadline_is_judged_by_the_interval(
    deadline: float, ranks: int, bolder: int | None
) -> None:
    found = advised(replace(ASKED, deadline_seconds=deadline)).answers[0]

    assert (found.kind, found.option.gpus, found.option.verdict) == ("cheapest", ranks, "meets")
    assert (None if found.riskier is None else found.riskier.gpus) == bolder
    assert found.riskier is None or found.riskier.verdict == "probably"


@pytest.mark.parametrize("price", [None, 2.5])
def test_the_fastest_under_a_budget_in_gpu_hours_or_money(price: float | None) -> None:
    hours = 13_650 / 3600  # 13,000 GPU-seconds of 4 ranks, 5 % more at most
    budget = hours * (price or 1.0)
    asked = replace(ASKED, budget=budget * 1.0001, price_per_gpu_hour=price)

    found = advised(asked).answers[0]

    assert (found.kind, found.option.gpus, found.option.verdict) == ("fastest", 4, "meets")
    assert (found.option.cost is None) == (price is None)
    if price is not None and found.option.cost is not None:
        assert found.option.cost.value == pytest.approx(13_000 / 3600 * price)
    assert advised(replace(asked, budget=budget * 0.9999)).answers[0].option.gpus == 2


def test_most_ranks_above_an_efficiency() -> None:
    # Of 4 ranks 0.7692, at least 0.7616 by the mean's interval.
    sure = advised(replace(ASKED, min_efficiency=0.761)).answers[0]
    perhaps = advised(replace(ASKED, min_efficiency=0.765)).answers[0]

    assert (sure.kind, sure.option.gpus, sure.option.verdict) == ("most", 4, "meets")
    assert (perhaps.option.gpus, perhaps.option.verdict) == (2, "meets")
    assert perhaps.riskier is not None
    assert (perhaps.riskier.gpus, perhaps.riskier.verdict) == (4, "probably")


def test_most_ranks_are_no_more_than_pay() -> None:
    def grows(one: Candidate) -> float:
        return step_seconds(one) * (3.0 if one.gpus == 20 else 1.0)  # 20 ranks are slower than 5

    assert answer(advised(replace(ASKED, min_efficiency=0.01), forecaster(grows)), "most").gpus == 10


def test_all_limits_hold_for_every_answer() -> None:
    advice = advised(replace(ASKED, deadline_seconds=4000.0, budget=15_000 / 3600, min_efficiency=0.7))

    assert {one.kind: one.option.gpus for one in advice.answers} == {
        "fastest": 5, "cheapest": 4, "most": 5, "knee": 10,
    }  # fmt: skip
    assert set(answer(advice, "fastest").verdicts) == {"deadline", "budget", "efficiency"}
    assert answer(advice, "knee").verdict == "misses"


def test_where_nothing_meets_the_limits_the_nearest_is_named_and_each_limit_alone() -> None:
    advice = advised(replace(ASKED, deadline_seconds=2000.0, budget=12_000 / 3600))

    assert not advice.met
    assert [one.kind for one in advice.answers] == ["knee"]
    # Over the deadline and the budget: 5 ranks by 1.40 and 1.17, 10 by 0.95 and 1.58, 4 by 1.63 and 1.08.
    assert advice.closest is not None
    assert advice.closest.gpus == 5
    assert advice.chosen is advice.closest
    assert {limit: option.gpus for limit, option in advice.alone.items()} == {"deadline": 10, "budget": 2}
    assert advice.never == ()


def test_a_limit_that_nothing_meets_by_itself() -> None:
    advice = advised(replace(ASKED, deadline_seconds=100.0))

    assert advice.closest is not None
    assert advice.closest.gpus == 20
    assert advice.never == ("deadline",)


def test_an_engine_that_nobody_measured_is_no_answer_but_a_hint() -> None:
    def better_fsdp2(one: Candidate) -> float:
        return step_seconds(one) * (0.6 if one.engine == "fsdp2" else 1.0)  # 0.78 of ddp's

    advice = advised(replace(ASKED, budget=13_700 / 3600), forecaster(better_fsdp2))
    found = advice.answers[0]

    assert (found.option.candidate.engine, found.option.gpus) == ("ddp", 4)
    assert found.riskier is not None
    assert (found.riskier.candidate.engine, found.riskier.measured_engine) == ("fsdp2", False)
    assert {option.candidate.engine for option in advice.front} == {"ddp"}


def test_an_engine_that_nobody_measured_is_the_answer_where_no_measured_one_will_do() -> None:
    def replicas(one: Candidate) -> float:
        return 1.0 if one.variant == EngineVariant("deepspeed", (("zero_stage", 3),)) else 100.0

    found = answer(advised(forecast=forecaster(memory=replicas, capacity=10.0)), "fastest")

    assert (found.candidate.variant, found.measured_engine) == (EngineVariant("deepspeed", (("zero_stage", 3),)), False)


def test_the_global_batch_stays_the_study_s_unless_told_otherwise() -> None:
    asked = replace(ASKED, gpus=(1, 2, 4, 5, 10))
    kept, free = advised(asked), advised(replace(asked, any_batch=True))

    assert all(one.option.keeps_batch and one.option.global_batch == 64 * one.option.gpus for one in kept.answers)
    assert kept.other_batch is not None
    assert kept.other_batch.global_batch == 5120
    # 10 ranks take 10 steps of an epoch at 64, at 512 one and a quarter of 5.9 times as long.
    assert answer(free, "fastest").global_batch == 5120
    assert free.other_batch is None


def swept(*micro_batches: int) -> Evidence:
    """One series for each micro-batch, as a study that varies it has them."""

    def of(micro_batch: int) -> tuple[MeasuredPoint, ...]:
        return tuple(make_point(n, 0.9 + 0.1 * n, micro_batch=micro_batch, images=640_000, per_node=20) for n in (1, 2))

    return Evidence(tuple(Series(f"mb {b}", "strong-micro", {"b": b}, of(b)) for b in micro_batches), UNKNOWN)


def test_every_batch_that_was_measured_is_a_candidate_and_keeps_the_study_s() -> None:
    advice = advise(swept(8, 16, 64), replace(ASKED, gpus=(1, 2)), NoiseScale.unknown(""), forecaster())

    # A step of 64 images takes 1.64 times as long as one of 16, and trains four times as many.
    assert answer(advice, "fastest").candidate.micro_batch == 64
    assert answer(advice, "fastest").series == "mb 64"
    assert advice.origins == ("mb 64",)
    assert advice.reference == "mb 8"


def test_measured_configurations_of_another_policy_are_candidates_too() -> None:
    weak = replace(evidence("weak").series[0], name="weak", points=(make_point(3, 1.2, micro_batch=5, per_node=20),))
    both = Evidence((*evidence().series, weak), UNKNOWN)

    def only_that(one: Candidate) -> float:
        return 1e-9 if (one.gpus, one.micro_batch) == (3, 5) else step_seconds(one)

    advice = advise(both, replace(ASKED, gpus=(1, 3)), NoiseScale.unknown(""), forecaster(only_that))
    assert answer(advice, "fastest").series == "weak"


def test_large_batches_are_marked_and_no_answer_unless_asked_for() -> None:
    # 6,400 images are 100 steps of one rank, 50 of two: only one rank makes as many as a hundred.
    plain, large = advised(replace(ASKED, large_batch=False)), advised()

    assert {one.option.gpus for one in plain.answers} == {1}
    assert plain.large_batch is not None
    assert plain.large_batch.gpus == 20
    assert [option.large_batch for option in plain.front] == [True] * 5 + [False]
    assert answer(large, "fastest").gpus == 20
    assert large.large_batch is None


def test_a_batch_of_more_than_ten_times_the_noise_scale_is_large() -> None:
    many = Request(gpus=COUNTS, ranks_per_node=20, epochs=1, images=6_400_000)

    def fastest(noise: float) -> int:
        return answer(advise(swept(64), many, NoiseScale(noise), forecaster()), "fastest").gpus

    # 10 x 64 images are ten times 64, 20 x 64 twenty times.
    assert (fastest(64.0), fastest(63.0), fastest(128.0)) == (10, 5, 20)


def test_where_all_batches_are_large_the_study_s_smallest_is_not() -> None:
    few = advise(swept(8, 64), Request(gpus=(1, 2), epochs=1, images=640), NoiseScale.unknown(""), forecaster())

    assert answer(few, "fastest").global_batch == 8


def test_what_roughly_looks_hopeless_would_not_have_been_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = make_evidence([make_point(n, (0.2 + 0.002 * n, 0.2 + 0.002 * n)) for n in (1, 2, 4)])
    fitted = fit(measured)
    asked = Request(gpus=(1, 2, 4, 8, 16), epochs=3, any_batch=True, min_efficiency=0.9)

    def advice(draws: int) -> Advice:
        def forecast(series: str, some: Sequence[Candidate], rough: bool) -> Evaluated:
            return evaluate_all(fitted, series, some, draws=draws if rough else DRAWS)

        return advise(measured, asked, NO_NOISE, forecast)

    screened = advice(ROUGH)
    monkeypatch.setattr(forecast_table, "_MOST_TIMES_THE_BEST", 1e9)
    whole = advice(DRAWS)
    assert screened.answers == whole.answers
    assert screened.front == whole.front


def test_failures_and_checkpoints_are_in_the_time() -> None:
    trial = evidence().series[0].points[0].trial
    often = interruptions(trial, None, checkpoint_seconds=10.0, node_mtbf_seconds=3600.0)
    assert often is not None
    advice = advise(evidence(), ASKED, NO_NOISE, forecaster(), {"ddp": often})

    twenty = next(option for option in advice.front if option.gpus == 20)
    assert twenty.seconds.value == pytest.approx(time_to_finish(1450.0, 1, 10.0, 610.0, 3600.0).wall_seconds)
    assert twenty.seconds.value > 1.1 * 1450
    (_, low, high), steps = often.of_a_run((1450.0, 0.95 * 1450, 1.05 * 1450), 1, 0.0), twenty.training.ends
    assert twenty.seconds.ends == pytest.approx((low, high))
    assert low < steps[0] < steps[1] < high  # what measurements can narrow is without luck
    assert advice.interruptions_known
    assert not advised().interruptions_known


def test_strong_global_keeps_one_global_batch_and_names_counts_that_do_not_divide_it() -> None:
    advice = advise(evidence("strong-global"), replace(ASKED, gpus=(1, 2, 3, 4)), NoiseScale.unknown(""), forecaster())

    # The series' largest trial has 4 ranks x 64.
    assert {one.option.global_batch for one in advice.answers} == {256}
    assert advice.indivisible == (3,)


def test_under_weak_scaling_the_work_is_that_of_the_largest_trial() -> None:
    weak = evidence("weak")
    points = tuple(replace(point, images=1600 * point.gpus) for point in weak.series[0].points)
    advice = advise(
        replace(weak, series=(replace(weak.series[0], points=points),)), ASKED, NoiseScale.unknown(""), forecaster()
    )

    assert advice.work.images == 6400
    assert answer(advice, "cheapest").seconds.value == pytest.approx(10_000)


def test_what_does_not_fit_is_dropped_and_counted_and_accumulation_keeps_the_batch() -> None:
    def memory(one: Candidate) -> float:
        return one.micro_batch / (4 if one.activation_checkpointing else 1)

    advice = advised(forecast=forecaster(memory=memory, capacity=32.0))
    found = answer(advice, "fastest").candidate

    # 2 x 32 takes 2 (0.3 + 0.35) = 1.3 steps; 64 with checkpointing 1.33.
    assert (found.micro_batch, found.grad_accum, found.activation_checkpointing) == (32, 2, False)
    [(why, count)] = advice.dropped.items()
    assert "will not fit" in why
    # Micro-batch 64 at the study's global batch: six counts and six engines, with checkpointing it fits.
    assert count == len(COUNTS) * 6


def test_checkpointing_is_looked_at_only_where_memory_needs_it() -> None:
    def memory(one: Candidate) -> float:
        return 1.0 if one.activation_checkpointing else 100.0

    tight = advised(forecast=forecaster(memory=memory, capacity=10.0))
    roomy = advised(forecast=forecaster(memory=memory, capacity=1000.0))

    assert all(one.option.candidate.activation_checkpointing for one in tight.answers)
    assert not any(one.option.candidate.activation_checkpointing for one in roomy.answers)
    assert not any(option.candidate.activation_checkpointing for option in advised().by_count)


def test_where_memory_is_unknown_checkpointing_stays_as_it_was_measured() -> None:
    plain = evidence()
    points = [
        replace(point, trial=point.trial.model_copy(update={
            "train": point.trial.train.model_copy(update={"activation_checkpointing": True})
        }))
        for point in plain.series[0].points
    ]  # fmt: skip
    checkpointed = replace(plain, series=(replace(plain.series[0], points=tuple(points)),))

    advice = advise(checkpointed, ASKED, NoiseScale.unknown(""), forecaster())

    assert all(option.candidate.activation_checkpointing for option in advice.front)


def test_time_to_the_same_loss_by_hand() -> None:
    noise = NoiseScale(images=640.0)
    advice = advised(noise=noise)

    # The study's smallest global batch is 64: at 10 ranks B = 640, (640 + 640) / (64 + 640) times the images.
    ten = next(option for option in advice.front if option.gpus == 10)
    assert ten.same_loss_seconds == pytest.approx(1900 * 1280 / 704)
    assert advised().front[0].same_loss_seconds is None


def test_with_any_batch_and_a_known_noise_scale_the_time_to_the_same_loss_decides() -> None:
    asked = replace(ASKED, any_batch=True)
    throughput = answer(advised(asked), "fastest")
    to_loss = answer(advised(asked, noise=NoiseScale(images=10.0)), "fastest")

    # With so little noise every image more in a batch is lost: the smallest batches learn most from an image.
    assert to_loss.global_batch < throughput.global_batch


def test_start_up_is_part_of_the_time_and_the_cost_but_not_of_the_knee() -> None:
    plain = evidence()
    series = plain.series[0]
    slow = replace(series, points=tuple(replace(point, startup_seconds=(1000.0,)) for point in series.points))
    advice = advise(replace(plain, series=(slow,)), ASKED, NoiseScale.unknown(""), forecaster())

    assert answer(advice, "fastest").seconds.value == pytest.approx(2450)
    assert answer(advice, "fastest").gpu_hours.value == pytest.approx(20 * 2450 / 3600)
    assert answer(advice, "knee").gpus == 10


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (replace(ASKED, series="nobody"), "unknown series 'nobody'"),
        (replace(ASKED, gpus=(3,), ranks_per_node=2), "3 ranks do not fill hosts of 2"),
        (replace(ASKED, max_gpus=1, gpus=(2,)), "no rank count is left"),
    ],
)
def test_what_cannot_be_asked(asked: Request, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        advised(asked)


def test_a_study_of_some_steps_needs_epochs() -> None:
    found = evidence()
    trials = [point.trial for point in found.series[0].points]
    stepwise = [
        replace(point, trial=trial.model_copy(update={"train": trial.train.model_copy(update={"epochs": None})}))
        for point, trial in zip(found.series[0].points, trials, strict=True)
    ]
    series = replace(found.series[0], points=tuple(stepwise))

    with pytest.raises(RequestError, match="Give --epochs"):
        advise(replace(found, series=(series,)), replace(ASKED, epochs=None), NoiseScale.unknown(""), forecaster())


@settings(max_examples=30, deadline=None)
@example([1.0] * 6 + [0.234375] + [1.0] * 5, None, None, False)  # GPU-hours that differ in their last bit
@given(
    st.lists(st.floats(0.2, 5.0), min_size=12, max_size=12),
    st.sampled_from([None, 1500.0, 3000.0, 6000.0]),
    st.sampled_from([None, 2.0, 4.0, 8.0]),
    st.booleans(),
)
def test_nothing_that_is_rejected_dominates_an_answer(
    factors: list[float], deadline: float | None, budget: float | None, any_batch: bool
) -> None:
    def step(one: Candidate) -> float:
        stage: int = one.changes["zero_stage"]
        place = COUNTS.index(one.gpus) + 3 * one.micro_batch + 5 * stage + one.grad_accum
        return step_seconds(one) * factors[place % len(factors)]

    asked = replace(ASKED, gpus=(1, 4, 10), deadline_seconds=deadline, budget=budget, any_batch=any_batch)
    advice = advised(asked, forecaster(step))
    rivals = [option for option in advice.by_count if option.measured_engine]
    for one in advice.answers:
        chosen = one.option
        equals = [rival for rival in rivals if _rank(rival) >= _rank(chosen) or one.kind == "knee"]
        assert not any(_dominates(rival, chosen) for rival in equals)


def _rank(option: Option) -> int:
    return ("misses", "probably", "meets").index(option.verdict)


def _dominates(one: Option, other: Option) -> bool:
    ours, theirs = (np.array([option.seconds.value, option.gpu_hours.value]) for option in (one, other))
    return bool((ours <= theirs * (1 + 1e-12)).all() and (ours < theirs * (1 - 1e-9)).any())


def test_a_knee_before_large_batches_is_no_end_of_what_was_looked_at() -> None:
    """Two and more ranks take fewer than a hundred steps an epoch: they are looked at, and are no answers."""
    advice = advised(replace(ASKED, large_batch=False))

    assert answer(advice, "knee").gpus == 1
    assert not advice.answers[-1].at_the_end


def test_where_only_large_batches_meet_the_limits_that_is_told() -> None:
    within = replace(ASKED, large_batch=False, deadline_seconds=2000.0, budget=20_000 / 3600)
    advice = advised(within)

    assert advice.closest is not None
    assert advice.closest.gpus == 1
    assert advice.large_batch is not None
    assert (advice.large_batch.gpus, advice.large_batch.verdict) == (10, "meets")
    assert advised(replace(within, budget=15_000 / 3600)).large_batch is None  # nor do those


def test_a_host_that_was_not_full_is_advised_as_equal_hosts() -> None:
    """No study asks for 4 ranks and 2: what was measured there is no candidate, however fast."""
    uneven = make_point(6, 0.5, micro_batch=64, images=6400, per_node=4)
    trial = uneven.trial.model_copy(update={"world": world_of_hosts(6, 4, 1)})
    uneven = replace(uneven, trial=trial, trial_id=trial.identity())
    points = (*(make_point(n, 0.9 + 0.1 * n, micro_batch=64, images=6400, per_node=4) for n in (1, 2, 4)), uneven)
    measured = Evidence((Series("ddp", "strong-micro", {}, points),), UNKNOWN)

    advice = advise(measured, Request(gpus=(6,), epochs=100, large_batch=True), NO_NOISE, forecaster())

    option = answer(advice, "fastest")
    assert (option.gpus, option.nodes, option.candidate.ranks_per_node) == (6, 2, 3)
    assert advised_trial(option, trial, advice.work).world.size == 6


def test_after_runs_that_share_a_model_each_rank_keeps_its_part_of_the_batch() -> None:
    """Two ranks to a model, 64 images each: 32 images a rank, whoever shares what."""
    halves = ParallelSpec(tensor=2)
    points = tuple(
        make_point(n, 1.0 + n / 80, engine="fsdp2", micro_batch=64, images=6400, parallel=halves) for n in (2, 4)
    )
    measured = Evidence((Series("fsdp2", "strong-micro", {}, points),), UNKNOWN)
    asked = Request(gpus=(2, 4), ranks_per_node=8, epochs=100, large_batch=True, split=True)

    advice = advise(measured, asked, NO_NOISE, forecaster(memory=lambda _: 1.0, capacity=2.0))

    assert {(option.gpus, option.global_batch) for option in advice.by_count} == {(2, 64), (4, 128)}
    assert all(option.keeps_batch for option in advice.by_count)


def test_needed_checkpointing_is_kept_where_ranks_share_models_in_two_ways() -> None:
    """Tensors only fit with it, sequences without: a pair is one split with and without."""
    points = {split: make_point(4, 1.0, engine="fsdp2", micro_batch=64, images=6400, parallel=split)
              for split in (ParallelSpec(tensor=2), ParallelSpec(sequence=2))}  # fmt: skip
    series = tuple(Series(f"fsdp2 {n}", "strong-micro", {}, (own,)) for n, own in enumerate(points.values()))
    found = candidates(comparable_series(Evidence(series, UNKNOWN), None), ((4, 4),)).combinations
    oom = np.array([0.9 if one.parallel.tensor == 2 and not one.activation_checkpointing else 0.0 for one in found])

    needless = forecast_table._needless_checkpointing(found, oom, False)

    assert {
        (one.parallel.tensor, one.activation_checkpointing)
        for one, without_need in zip(found, needless, strict=True)
        if one.parallel.ranks_per_model == 2 and not without_need
    } == {(2, False), (2, True), (1, False)}


def test_advice_is_from_what_trains_the_same_model_for_the_fewest_gpu_seconds_an_image() -> None:
    """ViT-B/16 on an H200 took 169 ms in fp32 (three runs) and 29 in bf16 (two): nobody rents six times as long. A
    smaller model is faster still, and other work; so is what another optimizer learns."""
    three = (0.170, 0.170, 0.170)
    some = {
        "fp32": make_point(1, three, precision="fp32"),
        "bf16": make_point(1, (0.029, 0.029), precision="bf16"),
        "bf16, twice the batch": make_point(1, (0.060,), precision="bf16", micro_batch=128),
        "small": make_point(1, (0.005,), model="vit-ti16"),
        "sgd": make_point(1, (0.028,), optimizer="sgd"),
    }
    series = tuple(Series(name, "strong-micro", {}, (point,)) for name, point in some.items())
    measured = Evidence(series, UNKNOWN)
    assert comparable_series(measured, None).reference.name == "bf16"
    assert comparable_series(measured, "fp32").reference.name == "fp32"
    longer = Series(
        "fp32 on 1 and 2", "strong-micro", {}, tuple(make_point(n, three, precision="fp32") for n in (1, 2))
    )
    assert comparable_series(Evidence((*series, longer), UNKNOWN), None).reference is longer
