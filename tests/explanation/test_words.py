"""The first screen has 25 lines of 80 columns, begins with the answer, and leaves the rest to --verbose and --json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hooked_factory import SimulatedJob, samples
from vitscale.explanation.answer import ExplainAnswer, explain_ranks
from vitscale.explanation.words import SessionFacts, answer_document, answer_fields
from vitscale.present.data import nonfinite_as_null
from vitscale.present.terminal import lines as terminal_lines

pytestmark = pytest.mark.computing

SESSION = SessionFacts(
    Path("vitscale-explain-1"),
    files_written=("checkpoint.pt", "log.txt"),
    notes=("it was ended at step 40, as agreed",),
)
MANY = SimulatedJob(
    planted={
        "data": lambda rank, step: 0.1,
        "other": lambda rank, step: 0.3 if step % 10 == 0 else 0.0,
        "backward": lambda rank, step: 0.08 * rank,
        "optimizer": lambda rank, step: 0.05,
    },
    breaks={step: {0: 1.0, 1: 1.0} for step in range(10, 41, 10)},
)
JOBS = {
    "healthy": SimulatedJob(),
    "one rank": SimulatedJob(ranks=1),
    "loader": SimulatedJob(planted={"data": lambda rank, step: 0.2}, rank_fields={"cpus": 16}),
    "slow rank": SimulatedJob(planted={"backward": lambda rank, step: 0.08 * rank}),
    "slow link": SimulatedJob(planted={"transfer": lambda rank, step: 0.1}),
    "threads": SimulatedJob(rank_fields={"threads": 8}),
    "many causes": MANY,
    "64 ranks": SimulatedJob(ranks=64, steps=12, planted={"backward": lambda rank, step: 0.08 if rank == 63 else 0.0}),
}


def answer_to(job: SimulatedJob) -> ExplainAnswer:
    return explain_ranks(job.records())


def shown(answer: ExplainAnswer, *, verbose: bool = False) -> list[str]:
    return [line.plain for line in terminal_lines(answer_document(answer, SESSION), 80, verbose)]


@pytest.mark.parametrize("name", JOBS)
def test_the_first_screen_is_short_and_has_the_answer_and_what_to_change(name: str) -> None:
    answer = answer_to(JOBS[name])
    text = shown(answer)
    assert len(text) <= 25
    assert all(len(line) <= 80 for line in text)
    assert "a step, " in text[0]
    assert ("Next: " in "\n".join(text)) == bool(answer.causes)
    assert text[-1] == "Details: vitscale-explain-1 (--json has all figures)"


def test_the_answer_in_words() -> None:
    text = shown(answer_to(JOBS["loader"]))
    assert text[:2] == [
        "302 ms a step, 212 images/s on 2 ranks; 67 % of it waits for data: up to 3.0x",
        "faster without.",
    ]
    assert "  Next: Set num_workers=3 (now 0) and persistent_workers=True." in text


def test_a_healthy_job_is_said_to_be_healthy() -> None:
    text = " ".join(shown(answer_to(JOBS["healthy"])))
    assert "nothing stands out: 92 % is forward, backward and optimizer" in text


def test_the_slowest_rank_has_a_column_only_where_it_is_clearly_slower() -> None:
    slow = "\n".join(shown(answer_to(JOBS["slow rank"])))
    assert "Where the time of a mean step goes: mean of 2 ranks, and the slowest, rank 1" in slow
    healthy = "\n".join(shown(answer_to(JOBS["healthy"])))
    assert "Where the time of a mean step goes: mean of 2 ranks\n" in healthy


def test_all_causes_and_ranks_and_the_method_are_in_the_details() -> None:
    answer = answer_to(MANY)
    text = "\n".join(shown(answer, verbose=True))
    assert len(answer.causes) >= 4
    for cause in answer.causes:
        assert f"warning  {cause.kind}" in text
    assert "The first step is left out" in text
    assert "It was ended at step 40, as agreed" in text
    assert "MFU: the FLOPs of the model are not counted" in text


def test_json_has_the_figures() -> None:
    answer = answer_to(MANY)
    fields = json.loads(json.dumps(nonfinite_as_null(answer_fields(answer, SESSION)), allow_nan=False))
    assert fields["world_size"] == 2
    assert fields["step_seconds"] == pytest.approx(0.33, rel=0.01)
    assert fields["step_seconds_low"] < fields["step_seconds"] < fields["step_seconds_high"]
    assert fields["mean_step_seconds"] == pytest.approx(0.46, rel=0.01)
    assert fields["ranks"][0]["wait_seconds"] == pytest.approx(0.08, rel=0.05)
    assert fields["ranks"][0]["copy_seconds"] is None
    assert [work["every_steps"] for work in fields["periodic"]] == [10.0, 10.0]
    assert fields["causes"][0]["gain_bound"] == pytest.approx(0.46 / 0.36, rel=0.02)
    assert fields["mfu"] is None


def test_names_from_a_rank_s_file_cannot_move_the_cursor() -> None:
    evil = "\x1b[2J\nevil.py"
    rows = samples("data", [(evil, 3, evil, 90)], of_all=100)
    job = SimulatedJob(planted={"data": lambda rank, step: 0.2}, samples={0: [rows], 1: [rows]})
    text = shown(answer_to(job), verbose=True)
    assert not any("\x1b" in line or "\n" in line for line in text)
    assert any("\\x1b[2J evil.py:3" in line for line in text)


def test_all_files_that_were_written_are_counted_though_few_are_listed() -> None:
    listed_files = ("crop-1.png (2 kB)", "crop-2.png (1 kB)")
    session = SessionFacts(Path("r"), listed_files, number_written=5000, all_files_looked_at=False)
    document = answer_document(answer_to(JOBS["healthy"]), session)
    text = " ".join(line.plain.strip() for line in terminal_lines(document, 80, False))
    assert "The program wrote at least 5,000 files meanwhile: crop-1.png" in text
