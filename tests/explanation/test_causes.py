"""A cause that is planted in simulated ranks is the one that is named, with its size; where there is none, none is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hooked_factory import HOST, Seconds, SimulatedJob, samples
from vitscale.explanation.answer import ExplainAnswer, explain_ranks
from vitscale.explanation.cause import SlowCause
from vitscale.hook import lines

pytestmark = pytest.mark.computing

SPREADS = (0.01, 0.05, 0.2)
SEEDS = range(4)


def on_rank(guilty: int, seconds: float) -> Seconds:
    return lambda rank, step: seconds if rank == guilty else 0.0


def every_tenth_step(rank: int, step: int) -> float:
    return 0.3 if rank == 0 and step % 10 == 0 else 0.0


def unequal_share(rank: int, step: int) -> float:
    """Times as many images as the mean: 1.5 and 0.5 in turn."""
    return 1.5 if (rank + step) % 2 else 0.5


PLANTED: dict[str, tuple[SimulatedJob, str, float]] = {
    "a loader that takes 200 ms": (SimulatedJob(planted={"data": lambda rank, step: 0.2}), "data-wait", 0.202),
    "the same on one rank": (SimulatedJob(ranks=1, planted={"data": lambda rank, step: 0.2}), "data-wait", 0.202),
    "80 ms of own code on rank 1": (SimulatedJob(planted={"other": on_rank(1, 0.08)}), "slow-rank", 0.08),
    "80 ms in rank 1's backward": (SimulatedJob(planted={"backward": on_rank(1, 0.08)}), "slow-rank", 0.08),
    "the same in rank 5 of 8": (SimulatedJob(ranks=8, planted={"backward": on_rank(5, 0.08)}), "slow-rank", 0.08),
    "a slow link": (SimulatedJob(planted={"transfer": lambda rank, step: 0.1}), "communication", 0.103),
    "1 s of evaluation every 10 steps": (
        SimulatedJob(breaks={step: {0: 1.0, 1: 1.0} for step in range(10, 41, 10)}),
        "evaluation",
        0.1,
    ),
    "the same on rank 0 alone": (
        SimulatedJob(breaks={step: {0: 1.0} for step in range(10, 41, 10)}),
        "evaluation",
        0.1,
    ),
    "300 ms of logging every 10 steps": (SimulatedJob(planted={"other": every_tenth_step}), "periodic-work", 0.03),
    "uneven shards": (
        SimulatedJob(
            images=lambda rank, step: round(32 * unequal_share(rank, step)),
            forward=lambda rank, step: 0.03 * unequal_share(rank, step),
            backward=lambda rank, step: 0.06 * unequal_share(rank, step),
        ),
        "uneven-batches",
        0.045,
    ),
    "50 ms of own code on all ranks": (SimulatedJob(planted={"other": lambda rank, step: 0.05}), "own-code", 0.051),
    "50 ms more in the optimizer": (SimulatedJob(planted={"optimizer": lambda rank, step: 0.05}), "optimizer", 0.054),
}


def explained(job: SimulatedJob) -> ExplainAnswer:
    return explain_ranks(job.records())


def first_cause(job: SimulatedJob) -> SlowCause:
    return explained(job).causes[0]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_cause_is_named_alone_with_its_size(name: str, spread: float) -> None:
    job, kind, cost_seconds = PLANTED[name]
    for seed in SEEDS:
        causes = explained(replace(job, spread=spread, seed=seed)).causes
        assert [cause.kind for cause in causes] == [kind]
        assert causes[0].cost is not None
        assert causes[0].cost.value == pytest.approx(cost_seconds, rel=0.1)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_no_cause_is_named_where_there_is_none(ranks: int, spread: float) -> None:
    for seed in range(8):
        assert explained(SimulatedJob(ranks=ranks, spread=spread, seed=seed)).causes == ()


@pytest.mark.nightly
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_no_cause_is_named_in_two_hundred_jobs_without_one(ranks: int, spread: float) -> None:
    claims = [explained(SimulatedJob(ranks=ranks, spread=spread, seed=seed)).causes for seed in range(200)]
    assert sum(bool(causes) for causes in claims) <= 1


def test_a_loader_s_advice_follows_from_what_was_seen() -> None:
    """A batch takes 202 ms, the rest of the step some 100 ms: three workers deliver one every 67 ms, two would not."""
    job = SimulatedJob(spread=0.01, planted={"data": lambda rank, step: 0.2}, rank_fields={"cpus": 16})
    cause = first_cause(job)
    assert cause.change == "Set num_workers=3 (now 0) and persistent_workers=True"
    assert cause.gain_of(0.3) == pytest.approx(0.3 / 0.1, rel=0.03)


def test_workers_are_not_advised_beyond_the_cores_of_a_rank() -> None:
    job = SimulatedJob(planted={"data": lambda rank, step: 0.2}, rank_fields={"cpus": 4}, loader_fields={"workers": 2})
    assert first_cause(job).change.startswith("More workers would find no free core")


def test_a_slow_rank_is_named_with_its_host_its_part_and_its_line() -> None:
    usual = samples("backward", [("/home/user/train.py", 90, "main", 95)], of_all=100)
    slow = samples(
        "backward", [("/home/user/vit.py", 31, "backward", 55), ("/home/user/train.py", 90, "main", 45)], 100
    )
    job = SimulatedJob(ranks=3, planted={"backward": on_rank(1, 0.08)}, samples={0: [usual], 1: [slow], 2: [usual]})
    cause = first_cause(job)
    assert (cause.ranks, cause.hosts) == ((1,), (HOST,))
    assert str(cause.code) == "vit.py:31 in backward"
    assert "in backward" in cause.evidence
    assert "slowest in 100 % of steps" in cause.evidence


def test_a_rank_with_a_slow_loader_is_named_before_the_loaders_of_all() -> None:
    cause = first_cause(SimulatedJob(planted={"data": on_rank(1, 0.08)}))
    assert (cause.kind, cause.ranks) == ("slow-rank", (1,))
    assert "waiting for data" in cause.evidence


def test_a_slow_rank_is_found_by_the_time_to_its_first_bucket_where_its_own_backward_is_unknown() -> None:
    job = SimulatedJob(planted={"backward": on_rank(1, 0.08)}, knows_own_backward=False)
    records = []
    for record, bucket_seconds in zip(job.records(), (0.003, 0.083), strict=True):
        steps = [replace(step, first_bucket_seconds=bucket_seconds) for step in record.steps]
        records.append(replace(record, steps=steps))
    answer = explain_ranks(records)
    assert (answer.causes[0].kind, answer.causes[0].ranks) == ("slow-rank", (1,))
    assert answer.causes[0].cost is not None
    assert answer.causes[0].cost.value == pytest.approx(0.08, rel=0.05)
    assert any("they are part of backward" in what for what in answer.unavailable)


def test_more_threads_than_cores_are_named_with_the_setting() -> None:
    cause = first_cause(SimulatedJob(rank_fields={"threads": 8}))
    assert (cause.kind, cause.cost, cause.saving) == ("too-many-threads", None, None)
    assert "16 threads on 4 cores" in cause.evidence
    assert "OMP_NUM_THREADS=2" in cause.change


def test_threads_of_ranks_on_a_gpu_are_no_cause() -> None:
    job = SimulatedJob(rank_fields={"threads": 8, "device": "NVIDIA H100 80GB HBM3"})
    assert explained(job).causes == ()


@pytest.mark.parametrize(
    ("parameters", "bucket_cap_mb", "advice"),
    [
        (86_000_000, 400.0, "bucket_cap_mb=25 (now 400;"),
        (86_000_000, 25.0, "accumulate 10 micro-batches"),
        (300_000, 25.0, "accumulate 10 micro-batches"),
    ],
)
def test_advice_on_a_slow_link_depends_on_the_buckets(parameters: int, bucket_cap_mb: float, advice: str) -> None:
    """328 MiB of gradients fit one bucket of 400 MiB, and 1.1 MiB are too few to share out over several.

    103 of 200 ms: 9.4 times the other 97 ms leave a tenth of it.
    """
    job = SimulatedJob(
        planted={"transfer": lambda rank, step: 0.1},
        model_fields={"trainable_parameters": parameters, "bucket_cap_mb": bucket_cap_mb},
    )
    cause = first_cause(job)
    assert advice in cause.change
    assert "vitscale check" in cause.change


def test_an_evaluation_that_was_seen_once_is_no_cause_but_is_said() -> None:
    answer = explained(SimulatedJob(breaks={12: {0: 3.0, 1: 3.0}}))
    assert answer.causes == ()
    assert any("takes 3.00 s; it was seen once (at step 12)" in sentence for sentence in answer.seen)


def test_restarting_workers_are_told_from_a_slow_loader() -> None:
    """Every 10 steps an epoch begins, whose first batch takes 400 ms more; a loader of 2 workers waits every second
    step as a matter of course."""

    def fetch_seconds(rank: int, step: int) -> float:
        return (0.4 if step % 10 == 1 else 0.0) + (0.02 if step % 2 else 0.0)

    job = SimulatedJob(planted={"data": fetch_seconds}, loader_fields={"workers": 2})
    cause = first_cause(job)
    assert cause.kind == "loader-restarts"
    assert cause.change == "Set persistent_workers=True, so that workers outlive an epoch"
    assert cause.cost is not None
    assert cause.cost.value == pytest.approx(0.04, rel=0.1)


def test_ranks_that_take_turns_are_no_cause_but_are_said() -> None:
    answer = explained(SimulatedJob(ranks=8, spread=0.2))
    assert answer.causes == ()
    assert any("take turns at being the slowest" in sentence for sentence in answer.seen)


def test_a_fused_optimizer_is_no_cause() -> None:
    job = SimulatedJob(planted={"optimizer": lambda rank, step: 0.05}, optimizer_fields={"fused": True})
    assert explained(job).causes == ()


def test_two_causes_stand_in_the_order_of_their_cost() -> None:
    job = SimulatedJob(planted={"data": lambda rank, step: 0.1, "backward": on_rank(1, 0.04)})
    answer = explained(job)
    assert [cause.kind for cause in answer.causes] == ["data-wait", "slow-rank"]


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce GTX 1080"])
def test_bf16_is_offered_only_where_the_gpu_is_known_to_be_faster_in_it(device: str) -> None:
    tries = explained(SimulatedJob(rank_fields={"device": device})).tries
    assert any("bfloat16" in sentence for sentence in tries) == ("H100" in device)


def test_one_thread_on_many_cores_is_worth_a_try() -> None:
    tries = explained(SimulatedJob(rank_fields={"threads": 1, "cpus": 16})).tries
    assert any("OMP_NUM_THREADS=8" in sentence for sentence in tries)


def test_profiled_and_tried_steps_are_not_timed() -> None:
    job = SimulatedJob()

    def slowed(change: Callable[[lines.HookedStepLine], lines.HookedStepLine]) -> float:
        records = []
        for record in job.records():
            steps = [change(step) if 20 <= step.number < 23 else step for step in record.steps]
            records.append(replace(record, steps=steps))
        answer = explain_ranks(records)
        assert answer.parts is not None
        return answer.parts.step.value

    usual = slowed(lambda step: step)
    profiled = slowed(lambda step: replace(step, seconds=9.0, profiled=True))
    tried = slowed(lambda step: replace(step, seconds=9.0, tried="no exchange"))
    assert profiled == pytest.approx(usual, rel=0.03)
    assert tried == pytest.approx(usual, rel=0.03)


@pytest.mark.parametrize(
    ("text", "device", "is_said"),
    [
        ("    total += loss.item()", "NVIDIA H100 80GB HBM3", True),
        ("    log(float(loss))", "NVIDIA H100 80GB HBM3", True),
        ("    total += count", "NVIDIA H100 80GB HBM3", False),
        ("    total += loss.item()", "cpu", False),
    ],
)
def test_a_line_that_reads_a_tensor_is_said_on_a_gpu(text: str, device: str, is_said: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"for batch in loader:\n{text}\n")
    rows = samples("other", [(str(script), 2, "main", 70)], of_all=100)
    answer = explained(SimulatedJob(rank_fields={"device": device}, samples={0: [rows], 1: [rows]}))
    assert any("train.py:2 in main reads a tensor's value" in sentence for sentence in answer.seen) == is_said


@pytest.mark.parametrize("file", ["/dev/zero.py", "/", "missing.py", "a\0b.py", "/etc/passwd"])
@pytest.mark.parametrize("line", [-1, 0, 10**30])
def test_a_sampled_line_may_be_of_any_file(file: str, line: int) -> None:
    rows = samples("other", [(file, line, "main", 70)], of_all=100)
    answer = explained(SimulatedJob(rank_fields={"device": "a GPU"}, samples={0: [rows], 1: [rows]}))
    assert not any("reads a tensor's value" in sentence for sentence in answer.seen)
