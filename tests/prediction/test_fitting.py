"""Known truth goes into the evidence and must come out of the fit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evidence_factory import MEASURED, UNKNOWN, make_evidence, make_point
from vitscale.prediction import fitting, likelihood
from vitscale.prediction.evidence import Point, StepParts
from vitscale.prediction.fitting import DRAWS, Fitted, FittedSeries, fit
from vitscale.prediction.likelihood import Likelihood
from vitscale.prediction.network.links import Link, Network
from vitscale.prediction.parameters import NAMES, priors
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.sampling import StudentT
from vitscale.prediction.step.model import Array
from vitscale.prediction.step.of_series import model_of
from vitscale.trial.model_spec import ModelSpec


def of(*points: Point, network: Network = UNKNOWN) -> FittedSeries:
    return fit(make_evidence(points, network)).series["ddp"]


def median(fitted: FittedSeries, name: str) -> float:
    return float(np.exp(np.median(fitted.draws[name])))


def test_every_parameter_is_drawn() -> None:
    fitted = of(make_point(1, 0.2))
    assert set(fitted.draws) == set(NAMES)
    assert {rows.shape for rows in fitted.draws.values()} == {(DRAWS, 1)}
    assert np.isfinite(np.concatenate(list(fitted.draws.values()))).all()


def test_the_compute_of_one_rank_is_what_its_steps_took_less_the_optimizer() -> None:
    parts = StepParts(0.19, 0.125, 0.01, 0.0, None, None, 0.0)
    fitted = of(make_point(1, (0.2, 0.2, 0.2), parts=parts))
    assert median(fitted, "compute") == pytest.approx(0.19, rel=0.01)
    assert median(fitted, "optimizer") == pytest.approx(0.01, rel=0.1)


def test_transfers_of_unknown_size_are_the_share_that_explains_the_growth() -> None:
    share = 0.15  # of compute at two ranks; 2 (N-1)/N of it at N
    steps = {n: 0.6 * (1 + share * 2 * (n - 1) / n) for n in (1, 2, 3, 4)}
    evidence = make_evidence([make_point(n, (s,) * 12, model=None, engine="unknown") for n, s in steps.items()])
    fitted = fit(evidence).series["ddp"]
    # A rank alone that is 2 % faster, and a smaller share that grows with each doubling, explain it as well.
    assert median(fitted, "transfer share") == pytest.approx(share, rel=0.2)
    low, high = np.exp(np.quantile(fitted.draws["transfer share"], [0.05, 0.95]))
    assert low < share < high
    (found,) = predict(fit(evidence), Question((8,)))
    assert found.step_seconds.value == pytest.approx(0.6 * (1 + share * 2 * 7 / 8), rel=0.02)
    assert median(fitted, "compute") == pytest.approx(0.6, rel=0.02)


def test_what_the_runs_differ_by_is_the_job_to_job_spread() -> None:
    rng = np.random.default_rng(3)
    steady = of(make_point(1, tuple(0.2 * np.exp(0.002 * rng.standard_normal(40)))))
    noisy = of(make_point(1, tuple(0.2 * np.exp(0.05 * rng.standard_normal(40)))))
    assert float(np.median(noisy.job_spread)) == pytest.approx(0.05, rel=0.25)
    assert float(np.median(steady.job_spread)) < 0.015  # the prior's 3 % still weighs as four runs
    assert steady.job_spread.min() > 0


def test_nothing_measured_leaves_a_parameter_at_its_prior() -> None:
    fitted = of(make_point(1, (0.2, 0.2)), network=MEASURED)
    across = fitted.draws["bandwidth across"]
    assert float(across.std()) == pytest.approx(MEASURED.across.bandwidth_spread, rel=0.2)
    assert float(across.mean()) == pytest.approx(0.0, abs=0.02)


def test_a_link_that_nobody_checked_is_learnt_from_steps_that_it_slows() -> None:
    """ZeRO-0 sends 4 x 85.8 M bytes after backward: at 2 GB/s and two ranks 2 (N-1)/N S/B = 0.172 s."""
    parameters = 85_806_346
    step = 0.2 + parameters * 4 / 2e9
    alone = make_point(1, (0.2, 0.2, 0.2), engine="deepspeed")
    fitted = of(alone, make_point(2, (step, step, step), engine="deepspeed"))
    assert 8e9 * median(fitted, "bandwidth inside") * 1 / median(fitted, "overlap") == pytest.approx(2e9, rel=0.1)
    assert float(fitted.draws["bandwidth inside"].std()) < 0.3  # it was 1.0
    assert float(fitted.draws["bandwidth across"].std()) == pytest.approx(1.2, rel=0.2)  # one host says nothing of it


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waits_that_steady_steps_do_not_explain_come_out_as_waits_and_not_as_transfers(device: str) -> None:
    """ZeRO-0's 343 MB at 10 GB/s take 34 ms; two ranks waited 90 ms beside, though steps of one differ by 1 %."""
    wait, wire = 0.09, 85_806_346 * 4 / 10e9
    link = Link(10e9, 1e-5, 0.05, 0.3, "check", "a check")
    how: dict[str, Any] = {"engine": "deepspeed", "precision": "fp32", "device": device, "step_spread": 0.01}
    alone = StepParts(0.39, 0.26, 0.01, 0.0, None, None, 0.0)
    together = StepParts(0.39, 0.26, 0.01, 0.0, wait, wire, wait + wire)
    evidence = make_evidence(
        [
            make_point(1, (0.4,) * 3, parts=alone, **how),
            make_point(2, (0.4 + wait + wire,) * 3, parts=together, **how),
        ],
        Network(link, link),
    )
    (found,) = predict(fit(evidence), Question((2,)))
    assert found.wait_seconds is not None
    assert found.wire_seconds is not None
    assert found.wait_seconds.value == pytest.approx(wait, rel=0.25)
    assert found.wire_seconds.value == pytest.approx(wire, rel=0.2)
    assert found.step_seconds.value == pytest.approx(0.4 + wait + wire, rel=0.02)


def test_synchronised_norms_are_a_part_of_steps_on_other_numbers_of_ranks_and_local_ones_are_none() -> None:
    """Swin with UperNet: 26 calls in a step, and next to no bytes. NCCL's tree over hosts that a check timed: before
    the first hop 2.5 of them; 7 hops of 10 us inside each of two hosts, one of 30 us between, up and down."""
    spec = ModelSpec(task="segmentation", name="swinv2-t", image_size=512)

    def inside(ranks: int) -> float:
        return 26 * (2.5 + 2 * (ranks - 1)) * 1e-5

    def point(ranks: int, norm: str) -> Point:
        taken = inside(ranks) if ranks > 1 and norm == "synchronised" else 0.0
        parts = StepParts(0.19, 0.125, 0.01, 0.0, 0.0, 0.0, taken, taken)
        return make_point(ranks, (0.2 + taken,) * 3, parts=parts, model=spec, batch_norm=norm, step_spread=0.005)

    truth = {"synchronised": 26 * (2.5 * 3e-5 + 2 * (7 * 1e-5 + 3e-5)), "local": 0.0}
    for norm, seconds in truth.items():
        evidence = make_evidence([point(ranks, norm) for ranks in (1, 2, 8)], MEASURED)
        (found,) = predict(fit(evidence), Question((16,)))
        assert found.norm_seconds is not None
        assert found.norm_seconds.value == pytest.approx(seconds, rel=0.15)
        made_of = (found.compute_seconds, found.wait_seconds, found.wire_seconds, found.norm_seconds)
        assert sum(one.value for one in made_of if one) == pytest.approx(found.step_seconds.value, rel=0.02)


def test_more_runs_narrow_the_compute() -> None:
    few = of(make_point(1, (0.2, 0.21), model=None, engine="unknown"))
    many = of(make_point(1, (0.2, 0.21) * 8, model=None, engine="unknown"))
    assert float(many.draws["compute"].std()) < float(few.draws["compute"].std())


def test_the_same_evidence_gives_the_same_draws() -> None:
    points = (make_point(1, 0.2), make_point(2, 0.21))
    one, other = of(*points), of(*points)
    assert all((one.draws[name] == other.draws[name]).all() for name in NAMES)
    assert (one.job_spread == other.job_spread).all()


def test_a_step_that_doubles_is_not_taken_for_a_slow_job() -> None:
    """One run each, 0.2 s alone and 0.5 s on two hosts: transfers, for no runs of one cell differ by that."""
    alone, together = (make_point(n, 0.2 + 0.3 * (n - 1), model=None, engine="unknown", per_node=1) for n in (1, 2))
    evidence = make_evidence([alone, together])
    fitted = fit(evidence).series["ddp"]
    assert fitted.job_spread.max() <= 0.15
    (found,) = predict(fit(evidence), Question((2,)))
    assert found.step_seconds.value == pytest.approx(0.5, rel=0.05)
    assert found.wire_seconds is not None
    assert found.wire_seconds.value == pytest.approx(0.3, rel=0.05)
    assert found.step_seconds.future_ends[0] > 0.4


@pytest.mark.parametrize("steps", [(0.228, 0.587, 0.714), (0.228, 0.565, 0.691), (0.064, 0.210, 0.281)])
def test_steps_that_grow_from_the_second_host_on_are_all_explained(steps: tuple[float, ...]) -> None:
    """Hosts of one GPU, as a published study timed them (arXiv 2602.21081): a search that lets go of what its first
    guess is far from takes the rank alone, or the others, for runs that hung."""
    points = [make_point(n, s, model=None, engine="unknown", per_node=1) for n, s in enumerate(steps, start=1)]
    fitted = of(*points)
    assert fitted.misfits == ()
    assert fitted.effective_draws >= 400
    found = predict(fit(make_evidence(points)), Question((1, 2, 3)))
    assert [one.step_seconds.value for one in found] == pytest.approx(steps, rel=0.05)


def test_two_explanations_of_one_growth_are_both_kept() -> None:
    """Without a single rank share and compute trade off; the most probable point alone would be far too sure."""
    steps = {2: 2.22, 3: 2.43, 4: 2.47}
    fitted = of(*(make_point(n, s, model=None, engine="unknown", per_node=1) for n, s in steps.items()))
    shares = np.exp(fitted.draws["transfer share"])
    low, high = np.quantile(shares, [0.05, 0.95])
    assert high / low > 5


def test_ranks_alone_on_one_device_type_are_left_out_of_a_mixture() -> None:
    alone = make_point(1, 0.23, model=None, engine="unknown", devices=("A",))
    mixed = [make_point(n, 0.6, model=None, engine="unknown", devices=("A", "B", "C")[:n]) for n in (2, 3)]
    fitted = of(alone, *mixed)
    assert [point.gpus for point in fitted.points] == [2, 3]
    assert fitted.left_out == "1 ranks ran on one device type, the others on a mixture"
    assert median(fitted, "compute") < 0.61


def test_strong_global_points_tell_the_share_that_images_do_not_change() -> None:
    fixed = 0.3
    points = []
    for gpus in (1, 2, 4, 8):
        compute = 0.2 * (fixed + (1 - fixed) / gpus)
        parts = StepParts(compute, compute * 2 / 3, 0.001, 0.0, 0.0, 0.0, 0.0)
        points.append(make_point(gpus, (compute + 0.001,) * 3, parts=parts, micro_batch=64 // gpus, engine="ddp"))
    evidence = make_evidence(points, MEASURED, mode="strong-global")
    fitted = fit(evidence).series["ddp"]
    assert median(fitted, "fixed share") == pytest.approx(fixed, rel=0.1)
    assert math.isfinite(float(fitted.job_spread.sum()))


def test_the_parts_of_a_mixture_are_those_of_its_typical_rank() -> None:
    """Two of three ranks are of the type that takes twice as long, and so is the rank in the middle."""
    parts = StepParts(0.38, 0.25, 0.02, 0.0, 0.0, 0.0, 0.0)
    mixed = make_point(3, (0.4,) * 3, parts=parts, devices=("new", "old", "old"), rank_speeds=(1.0, 0.5, 0.5))
    assert median(of(mixed, network=MEASURED), "compute") == pytest.approx(0.19, rel=0.03)


# --- runs that hang, models that do not fit, luck ---------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["ddp", "unknown"])
def test_one_run_that_hung_does_not_move_those_that_did_not(engine: str) -> None:
    """Eight runs of half a second, and one of 10.4 s: it was "677 ms, 502-878"."""
    how: dict[str, Any] = {} if engine == "ddp" else {"model": None, "engine": "unknown"}
    points = [make_point(1, (0.5, 0.51, 0.505), **how), make_point(2, (0.5, 0.52, 10.4), **how)]
    fitted = fit(make_evidence([*points, make_point(4, (0.5, 0.51, 0.52), **how)]))
    (four,) = predict(fitted, Question((4,)))
    assert four.label == "interpolated"
    assert four.step_seconds.value == pytest.approx(0.51, rel=0.03)
    assert four.step_seconds.future_ends[1] < 0.6


def test_measured_points_that_no_step_can_explain_are_named_and_the_intervals_hold_them() -> None:
    """Half a second, one and two named ddp: it was "8 ranks: 1.83 s", below the two seconds measured at 4."""
    fitted = fit(make_evidence([make_point(n, seconds) for n, seconds in ((1, 0.5), (2, 1.0), (4, 2.0))]))
    assert 4 in [misfit.gpus for misfit in fitted.series["ddp"].misfits]
    four, eight = predict(fitted, Question((4, 8)))
    assert four.label == eight.label == "does not fit"
    assert four.step_seconds.future_ends[0] < 2.0 < four.step_seconds.future_ends[1]
    assert eight.step_seconds.future_ends[1] > 2.0
    (first, *_) = eight.assumptions
    assert "4 ranks took 2 s where it has" in first.taken


def test_what_fits_is_not_said_not_to() -> None:
    rng = np.random.default_rng(5)
    points = [make_point(n, tuple(0.2 * np.exp(0.015 * rng.standard_normal(3)))) for n in (1, 2, 4)]
    assert of(*points).misfits == ()


def test_few_draws_widen_the_answer_and_say_so() -> None:
    fitted = fit(make_evidence([make_point(1, (0.2, 0.2, 0.2))]))
    series = fitted.series["ddp"]
    few = Fitted(fitted.evidence, {"ddp": replace(series, effective_draws=50.0)})
    (enough,), (widened,) = predict(fitted, Question((8,))), predict(few, Question((8,)))
    assert widened.step_seconds.value == pytest.approx(enough.step_seconds.value, rel=1e-6)
    ratio = [math.log(one.step_seconds.ends[1] / one.step_seconds.ends[0]) for one in (widened, enough)]
    assert ratio[0] / ratio[1] == pytest.approx(2.0, rel=1e-3)  # sqrt(200 / 50)
    assert "rest on 50 draws" in widened.assumptions[0].taken
    assert enough.effective_draws >= 400


def test_twenty_seeds_move_the_middle_by_a_percent_and_the_ends_by_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run each on one host and on two: transfers inside, across and a slow job may each explain it."""
    points = [make_point(n, s, model=None, engine="unknown", per_node=2) for n, s in ((1, 0.2), (2, 0.21), (4, 0.26))]
    evidence, told = make_evidence(points), []
    for seed in range(20):
        monkeypatch.setattr(fitting, "SEED", seed)
        (found,) = predict(fit(evidence), Question((16,)))
        told.append([found.step_seconds.value, *found.step_seconds.ends])
    spread = np.std(np.log(told), axis=0)
    assert spread[0] < 0.01
    assert spread[1:].max() < 0.03


@pytest.mark.parametrize("unknown", [{}, {"model": None, "engine": "unknown"}])
def test_many_runs_of_a_point_are_drawn_in_other_coordinates_and_say_the_same(
    unknown: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eleven runs on 1, 2, 4 and 8 ranks, one of which hung."""
    rng = np.random.default_rng(5)
    steps = {n: 0.2 * (1 + 0.1 * (n - 1) / n) for n in (1, 2, 4, 8)}
    runs = {n: (*(s * np.exp(0.02 * rng.standard_normal(10))).tolist(), 3 * s) for n, s in steps.items()}
    evidence = make_evidence([make_point(n, own, per_node=4, **unknown) for n, own in runs.items()])
    told: dict[str, list[list[float]]] = {"levelled": [], "as few": []}
    for how, fewest in (("levelled", likelihood._MANY_RUNS), ("as few", 1000)):
        monkeypatch.setattr(likelihood, "_MANY_RUNS", fewest)
        for seed in range(5):
            monkeypatch.setattr(fitting, "SEED", seed)
            (found,) = predict(fit(evidence), Question((32,)))
            assert found.effective_draws >= 400
            told[how].append([found.step_seconds.value, *found.step_seconds.ends])
    ours, theirs = (np.log(told[how]) for how in ("levelled", "as few"))
    assert ours.std(axis=0)[0] < 0.01
    assert ours.std(axis=0)[1:].max() < 0.03
    apart = np.abs(ours.mean(axis=0) - theirs.mean(axis=0))
    assert apart[0] < 0.01
    assert apart[1:].max() < 0.03


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("spread", "steps"), [(0.0, (0.2, 0.21)), (0.8, (0.2, 0.2)), (0.01, (0.2, 0.9, 0.1)), (0.01, (1e6, 1e6))]
)
def test_many_runs_that_are_alike_or_contradict_one_another_are_drawn_too(
    spread: float, steps: tuple[float, ...]
) -> None:
    """Equal runs, runs that differ by more than jobs elsewhere do, and steps that no model explains."""
    rng = np.random.default_rng(0)
    points = [
        make_point(2**n, (base * np.exp(spread * rng.standard_normal(12))).tolist()) for n, base in enumerate(steps)
    ]
    fitted = of(*points)
    assert fitted.effective_draws >= 400
    assert all(np.isfinite(draws).all() for draws in fitted.draws.values())
    if spread < likelihood.MOST_JOB_TO_JOB:
        assert fitted.job_spread.max() <= likelihood.MOST_JOB_TO_JOB
    else:  # these runs differ so among themselves
        assert np.median(fitted.job_spread) == pytest.approx(spread, rel=0.4)


@pytest.mark.parametrize("runs", [10, 11, 37])
def test_the_density_of_many_runs_multiplies_before_it_takes_logarithms(runs: int) -> None:
    points = [make_point(n, (0.2 * np.exp(0.02 * np.arange(runs))).tolist()) for n in (1, 2)]
    model = model_of(points, make_evidence(points))
    density = Likelihood(model, points, priors(points, UNKNOWN, True))
    rows = np.random.default_rng(2).standard_normal((200, len(density.active) + 1))
    rows[:, -1] = np.log(0.02) + 0.1 * rows[:, -1]
    assert density.many_runs
    together = density.log_density(rows)
    density.many_runs = False
    assert together == pytest.approx(density.log_density(rows), rel=1e-12)


@pytest.mark.parametrize("every_run", [True, False])
def test_the_search_ends_where_nothing_is_more_probable(every_run: bool) -> None:
    """Of runs whose log density is a square, and of runs by Student's t, one of which hung."""
    points = [make_point(n, (0.2 * n**0.1, 0.204 * n**0.1, 0.3)) for n in (1, 2, 4, 8)]
    model = model_of(points, make_evidence(points))
    density = Likelihood(model, points, priors(points, UNKNOWN, True))
    proposal = density._around_the_maximum(0.02, every_run=every_run)
    assert isinstance(proposal, StudentT)

    def improbability(rows: Array) -> Array:
        """The negative log density of each row, up to a constant, where jobs differ by 2 %."""
        of_runs, others = density.residuals(rows)
        squares = (of_runs / 0.02) ** 2
        terms = squares if every_run else 5 * np.log1p(squares / 4)
        return np.asarray((terms.sum(axis=1) + (others**2).sum(axis=1)) / 2, dtype=np.float64)

    size = len(density.active)
    along = 0.1 * np.eye(size, size + 1)
    beside = improbability(proposal.centre + np.vstack([along, -along]))
    (here,) = improbability(proposal.centre[None])
    (at_the_start,) = improbability(np.append(np.zeros(size), math.log(0.02))[None])
    assert here < at_the_start - 1
    assert here < beside.min() + 0.05


def imported(seconds: dict[int, float], engine: str, spec: ModelSpec) -> FittedSeries:
    """On hosts of 16, with the engine and the model that the user says."""
    points = [make_point(n, s, per_node=16, model=None, engine=engine, images=None) for n, s in seconds.items()]
    changes = {"model": spec, "origin": "table.csv"}
    return of(*(replace(one, trial=one.trial.model_copy(update=changes)) for one in points))


@pytest.mark.parametrize("tokens", [1, 40])
def test_what_is_told_is_set_aside_where_steps_cannot_be_as_short(tokens: int) -> None:
    """DDP with 160M parameters at 12 GB/s. 40: of a table that counts tokens where its batch counts samples, so that
    steps come out a fortieth as long, and links of no machine would be needed to send so much in them."""
    steps = {n: (0.2 + (0.64 / 12 * 2 * (n - 1) / n if n > 1 else 0.0)) / tokens for n in (1, 4, 8)}
    known = imported(steps, "ddp", ModelSpec(parameter_count=160_000_000))
    untold = imported(steps, "unknown", ModelSpec())
    assert (known.told_odds is not None) == (known.model.messages is None) == (tokens == 40)
    assert untold.told_odds is None
    (asked,) = predict(Fitted(make_evidence(known.points), {"ddp": known}), Question((16,), nodes_of=16))
    (blind,) = predict(Fitted(make_evidence(untold.points), {"ddp": untold}), Question((16,), nodes_of=16))
    (sent,) = (one for one in asked.assumptions if one.part == "what is sent")
    assert "160,000,000 parameters" in sent.taken
    assert ("set aside" in sent.taken) == (tokens == 40)
    if tokens == 40:
        assert asked.step_seconds == blind.step_seconds
        assert "in one unit" in sent.measurement


def test_what_is_told_and_fits_moves_each_number_half_of_the_way() -> None:
    steps = {1: 0.2, 4: 0.21, 8: 0.213}
    known = imported(steps, "ddp", ModelSpec(parameter_count=160_000_000))
    assert known.untold is not None
    assert known.untold.model.messages is None

    def answer(fitted: FittedSeries, **changes: Any) -> list[float]:
        question = Question((64,), nodes_of=16, **changes)
        (asked,) = predict(Fitted(make_evidence(known.points), {"ddp": fitted}), question)
        step = asked.step_seconds
        return [step.value, *step.ends, *step.future_ends]

    alone = replace(known, untold=None)
    told, untold = answer(alone), answer(known.untold)
    assert min(abs(math.log(a / b)) for a, b in zip(told, untold, strict=True)) > 0.01
    assert answer(known) == pytest.approx([math.sqrt(a * b) for a, b in zip(told, untold, strict=True)])
    # Another engine's messages are known by arithmetic alone.
    assert answer(known, changes={"engine": "fsdp2"}) == answer(alone, changes={"engine": "fsdp2"})
