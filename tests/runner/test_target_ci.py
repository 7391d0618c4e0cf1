"""Runs added for `measure.target_ci`, by the real driver; the ranks write what a script says."""

from __future__ import annotations

import io
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from driving import tree
from scripted_ranks import FAILS, Scripted
from study_factory import EIGHT_CORES, write_study
from vitscale import analysis, launchers, store
from vitscale.errors import StoreError
from vitscale.present.document import Finding, Paragraph
from vitscale.present.estimate import Estimate
from vitscale.runner import Plan, Report, RunOptions, done_before, driver, plan
from vitscale.runner import run as drive
from vitscale.runner.batch_jobs import submit_outstanding
from vitscale.runner.driver import Interrupted
from vitscale.runner.expectation import Expectations, Expected
from vitscale.runner.live import study_view, view_document
from vitscale.runner.one_run import unstarted
from vitscale.runner.plan_estimate import PlanEstimate
from vitscale.runner.preview import command_list, plan_document, plan_fields
from vitscale.runner.todo import AddedRuns, GpuHours
from vitscale.schedulers import Hostfile
from vitscale.schedulers.slurm_cluster import SlurmCluster
from vitscale.store import RunIndex, reading
from vitscale.store.reading import EndedAttempt, RunKey
from vitscale.store.results import Outcome
from vitscale.study.sections import SlurmSection

# Within 50 %, so a logarithm of 0.405: of three that agree, three more runs will do. Of 1, 1.5 and 1 the standard
# deviation is 0.234, at most 2.117 times that; 4.303 x 0.4955 / sqrt(6) = 0.87. With one more 1: 1.7276 x 0.2027, for
# which 7 runs are too few (4.303 x 0.350 / sqrt(7) = 0.57) and 8 are enough (3.182 x 0.350 / sqrt(8) = 0.394).
AT_ONCE = [1.0] * 6
AFTER_FOUR = [1.0, 1.5, *[1.0] * 6]
NEVER = [1.0, 3.0] * 4 + [1.0]
FAILING = [1.0, FAILS, 3.0]
MOST = 9


class Study:
    """A study of one trial per seed, and what its runs will say."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *scripts: list[float | None], hosts: int = 0
    ) -> None:
        """`hosts`: so many addresses of this machine pass for hosts, on which runs go on side by side."""
        monkeypatch.setattr(Hostfile, "pool", lambda self: self._hosts)
        (folder / "hosts").write_text("".join(f"127.0.0.{n + 2}\n" for n in range(hosts)))
        monkeypatch.setenv("VITSCALE_CACHE", str(folder / "cache"))
        self.results = folder / "results"
        self.launcher = Scripted(folder / "records", {})
        monkeypatch.setitem(launchers.LAUNCHERS, "scripted", self.launcher)
        path = write_study(
            folder,
            {
                "train": {"epochs": 1, "precision": "fp32"},
                "scaling": {"gpus": [1]},
                "sweep": {"train.seed": list(range(len(scripts)))},
                "launch": {"launcher": "scripted"} | ({"hostfile": "hosts"} if hosts else {}),
                "measure": {"target_ci": 0.5, "max_repeats": MOST, "warmup_steps": 0, "parallel_runs": hosts or None},
            },
        )
        self.plan: Plan = plan(path, EIGHT_CORES)
        self.trials = list(self.plan.record.trials)
        self.launcher.script.update(zip(self.trials, scripts, strict=True))
        self.said = io.StringIO()

    def run(self, *, retry_failed: bool = False) -> Report:
        self.said = io.StringIO()
        console = Console(file=self.said, width=200)
        return drive(self.plan, self.results, RunOptions(retry_failed=retry_failed), console)

    @property
    def runs(self) -> list[int]:
        """How many runs each trial has started, in the order of the seeds."""
        return [len({repeat for trial, repeat in self.launcher.started if trial == own}) for own in self.trials]

    def told(self) -> list[str]:
        """Which run of how many, as the runs of the last call were announced."""
        return [line.partition(":")[0] for line in self.said.getvalue().splitlines() if line.startswith("run ")]

    def verdict(self, kind: str) -> Finding:
        (found,) = (v for v in analysis.analyse(store.load(self.results)).findings if v.kind == kind)
        return found


Make = Callable[..., Study]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda *scripts, hosts=0: Study(tmp_path, monkeypatch, *scripts, hosts=hosts)


def test_runs_are_added_until_the_target_or_the_limit_and_never_where_one_failed(make: Make) -> None:
    study = make(AT_ONCE, AFTER_FOUR, NEVER, FAILING)
    report = study.run()
    assert study.runs == [6, 8, 9, 3]
    assert (report.done_now, len(report.outcomes)) == (26, 26)
    assert [outcome.kind for outcome in report.failures.values()] == ["failed"]
    # One at a time per trial: nobody's second added run comes before anybody's first.
    added = [(trial, repeat) for trial, repeat in study.launcher.started if repeat >= 3]
    assert [repeat for _, repeat in added] == [3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8]

    one, four, never, failing = study.trials
    assert study.verdict("target-ci-reached").about.trials == (one, four)
    assert "6 to 8 runs" in study.verdict("target-ci-reached").message
    missed = study.verdict("target-ci-missed")
    assert missed.about.trials == (never, failing)
    assert "stopped at max_repeats = 9: ddp on 1 rank, seed 2 (within 56 %)" in missed.message
    assert "no runs added, for a run failed: ddp on 1 rank, seed 3 (within" in missed.message

    # The same again has nothing to do.
    before, started = tree(study.results / "runs"), len(study.launcher.started)
    assert study.run().done_now == 0
    assert len(study.launcher.started) == started
    assert tree(study.results / "runs") == before


def test_a_study_packed_as_it_goes_decides_the_same_and_stops_where_a_pack_is_damaged(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (driver, reading):
        monkeypatch.setattr(module, "PACK_RUNS", 4)
    study = make(AT_ONCE, AFTER_FOUR, NEVER, FAILING)
    study.run()
    assert study.runs == [6, 8, 9, 3]
    packs = sorted(study.results.glob("packs/*"))
    assert len(packs) == 26 // 4
    assert len(list(study.results.glob("runs/*/outcome.json"))) == 26 % 4
    assert len(store.load(study.results).runs) == 26
    # The same again has nothing to do.
    assert study.run().done_now == 0
    packs[0].write_bytes(packs[0].read_bytes()[:-100])
    with pytest.raises(StoreError, match=f"packs/{packs[0].name} cannot be read") as caught:
        study.run()
    assert "delete it, and the same command does its runs again" in str(caught.value)
    submitter = SlurmCluster(SlurmSection(), None)
    with pytest.raises(StoreError) as by_jobs:
        submit_outstanding(study.plan, submitter, study.results, Console(file=study.said), {}, retry_failed=False)
    assert str(by_jobs.value) == str(caught.value)
    with pytest.raises(StoreError) as by_dry_run:
        command_list(study.plan, study.results)
    assert str(by_dry_run.value) == str(caught.value)
    packs[0].unlink()
    assert study.run().done_now == 4


def test_side_by_side_a_trial_gets_as_many_runs_as_alone(make: Make) -> None:
    study = make(AT_ONCE, AFTER_FOUR, NEVER, FAILING, hosts=3)
    report = study.run()
    assert study.runs == [6, 8, 9, 3]
    assert report.done_now == 26
    assert sorted(study.launcher.started) == sorted(set(study.launcher.started))
    assert study.run().done_now == 0
    # One of the first rounds that is under way may say that its trial wants more; when it has ended, that is known.
    outcomes = {key: outcome for key, (_, outcome) in RunIndex(study.results).finished.items()}
    last = RunKey(study.trials[0], 2)
    ended = outcomes.pop(last)
    del outcomes[RunKey(last.trial_id, 5)]
    added = AddedRuns(study.plan, study.results, outcomes, [last])
    due = next(iter(added))
    assert due == RunKey(last.trial_id, 5)
    outcomes[last] = outcomes[RunKey(last.trial_id, 5)] = ended
    assert not added.wants(due)


def test_how_many_runs_are_left_is_told_as_the_most_there_can_be(make: Make) -> None:
    study = make(AT_ONCE, AFTER_FOUR, AFTER_FOUR)
    study.run()
    # 3 x 9 at most. The first needs 6 and each of the others 8, which is known when they have them.
    told = [tuple(map(int, re.findall(r"\d+", line))) for line in study.told()]
    assert [number for number, _ in told] == list(range(1, 23))
    assert {most for _, most in told[:15]} == {27}
    assert [most for _, most in told[18:]] == [24, 24, 24, 23]
    lines = study.said.getvalue().splitlines()
    assert "time left unknown yet" in lines[0]
    assert all(re.search(r"; up to [\d.]+ (us|ms|s|min) left", line) for line in lines[1:] if line.startswith("run "))


def test_of_a_trial_that_failed_no_more_runs_are_expected(make: Make) -> None:
    study = make([FAILS, FAILS, FAILS])
    study.run()
    assert study.told() == ["run 1 of up to 9", "run 2 of 3", "run 3 of 3"]
    assert re.search(r"run 3 of 3: .*; about [\d.]+ (us|ms|s|min) left", study.said.getvalue())


def test_an_interrupted_study_of_runs_side_by_side_goes_on(make: Make) -> None:
    study = make(AFTER_FOUR, NEVER, hosts=2)
    study.launcher.interrupt_at = 5
    with pytest.raises(Interrupted):
        study.run()
    assert len(study.launcher.started) == 5
    finished = set(RunIndex(study.results).finished)
    assert len(finished) >= 3
    study.launcher.interrupt_at = None
    study.run()
    assert study.runs == [8, 9]
    # Twice were started those alone that Ctrl-C has ended.
    twice = {run for run in study.launcher.started if study.launcher.started.count(run) > 1}
    assert not twice & finished


@pytest.mark.parametrize("interrupted_at", [4, 6, 7])
def test_an_interrupted_study_goes_on_as_if_it_had_not_been(make: Make, interrupted_at: int) -> None:
    """In the runs that all have, before the first added one, and between two added ones."""
    study = make(AFTER_FOUR, NEVER)
    study.launcher.interrupt_at = interrupted_at
    with pytest.raises(Interrupted):
        study.run()
    assert len(study.launcher.started) == interrupted_at
    study.launcher.interrupt_at = None
    study.run()
    assert len(study.launcher.started) == len(set(study.launcher.started)) == 17
    assert study.runs == [8, 9]
    whole = study.launcher.started.copy()
    study.launcher.started.clear()
    study.results = study.results.with_name("undisturbed")
    study.run()
    assert study.launcher.started == whole


def test_an_added_run_without_an_outcome_is_done_again(make: Make) -> None:
    study = make(AFTER_FOUR)
    study.run()
    (trial,) = study.trials
    (study.results / "runs" / f"{trial}-r3-a0" / "outcome.json").unlink()
    assert study.run().done_now == 1
    assert (study.results / "runs" / f"{trial}-r3-a1" / "outcome.json").exists()


def test_added_runs_that_failed_are_done_again_when_asked_and_more_may_follow(make: Make) -> None:
    study = make([1.0, 3.0, 1.0, FAILS, 1.0])
    study.run()
    assert study.runs == [4]
    assert study.run().done_now == 0
    study.launcher.script[study.trials[0]] = NEVER
    assert study.run(retry_failed=True).done_now == 6
    assert study.runs == [9]
    assert study.told() == [f"run {number} of up to 6" for number in range(1, 7)]


def test_side_by_side_an_added_run_that_is_done_again_is_given_out_once(make: Make) -> None:
    """One that all have is missing too: until it is done, the trial may want any number."""
    study = make([1.0, 3.0, 1.0, FAILS, 1.0], hosts=2)
    study.run()
    (trial,) = study.trials
    study.launcher.script[trial] = NEVER
    shutil.rmtree(study.results / "runs" / f"{trial}-r1-a0")
    study.launcher.started.clear()
    study.run(retry_failed=True)
    assert sorted(study.launcher.started) == [(trial, repeat) for repeat in (1, 3, 4, 5, 6, 7, 8)]


def test_a_higher_limit_goes_on_from_what_is_done(make: Make, tmp_path: Path) -> None:
    study = make([*NEVER, 3.0])
    study.run()
    text = (tmp_path / "study.toml").read_text()
    (tmp_path / "study.toml").write_text(text.replace('"max_repeats" = 9', '"max_repeats" = 10'))
    study.plan = plan(tmp_path / "study.toml", EIGHT_CORES)
    assert study.run().done_now == 1
    assert study.runs == [10]


def test_the_order_of_a_round_is_random_and_the_same_again(make: Make) -> None:
    study = make(*[NEVER] * 8)
    orders = [AddedRuns(study.plan, study.results, {})._trials_in_order(repeat) for repeat in (3, 4, 3)]
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(study.trials)


def test_the_plan_says_what_may_be_added(make: Make) -> None:
    study = make(NEVER, NEVER)
    assert plan_document(study.plan).blocks[0] == Paragraph(
        "example: 2 trials, 6 runs, and up to 12 more until each epoch time is known within 50 % (measure.target_ci)",
        "strong",
    )
    content = plan_fields(study.plan)
    assert (content["runs"], content["most_runs"], content["target_ci"]) == (6, 18, 0.5)


def test_a_plan_expects_the_runs_that_are_always_added(make: Make) -> None:
    """Six a trial, if none fails: three that decide, and three more."""
    study = make(AT_ONCE, AT_ONCE)
    first, second = study.trials
    expected = Expectations(dict.fromkeys(study.trials, Expected(Estimate(60.0, 30.0, 120.0), "measured")))

    def told(done: Collection[tuple[str, int]], *skipped: str) -> tuple[int, list[str]]:
        """(runs whose time is expected, what is not in it)."""
        estimate = PlanEstimate(expected=expected, skipped=frozenset(skipped), done=frozenset(done))
        content = plan_fields(study.plan, estimate)["expected"]
        assert content is None or content["seconds"] == 60.0 * content["runs"]
        without = [line for line in estimate.lines(study.plan) if line.startswith("not in it: ")]
        return 0 if content is None else content["runs"], without

    beyond = "not in it: runs beyond 6 a trial, which measure.target_ci may add"
    four_of_first = [(first, repeat) for repeat in range(4)]
    assert told([]) == (12, [beyond])
    assert told(four_of_first) == (8, [beyond])
    assert told(four_of_first, second) == (2, ["not in it: 6 runs that are skipped", beyond])
    assert study.run().done_now == 12
    assert told(done_before(study.plan, study.results)) == (0, [])


def test_runs_that_may_be_added_are_not_denied(make: Make) -> None:
    """Ctrl-C after the runs that every trial has; then one trial's target is reached, and of another a run fails."""
    study = make(AT_ONCE, NEVER, FAILING)
    within = "until each epoch time is known within 50 % (measure.target_ci)"

    def told(most: int) -> None:
        """By plan, by run --dry-run and by watch."""
        heading = plan_document(study.plan, PlanEstimate(done=done_before(study.plan, study.results))).blocks[0]
        assert isinstance(heading, Paragraph)
        more = f", and up to {most} more {within}" if most else ""
        assert heading.text == f"example: 3 trials, 0 of 9 runs to do{more}"
        listed = command_list(study.plan, study.results)
        nothing = "# Nothing to do: every run of this study has its outcome.\n"
        assert listed == (f"# Up to {most} more runs may be added {within}.\n" if most else nothing)
        view = study_view(study.results, time.time() + 3600)
        assert (view.driver, view.may_be_added) == ("gone" if most else "none left to do", most)
        shown = view_document(view, study.results).blocks[0]
        assert isinstance(shown, Paragraph)
        more = f"; up to {most} more runs may be added (measure.target_ci)" if most else ""
        assert shown.text == f"example: 9 of 9 runs done (1 failed){more}"

    assert command_list(study.plan, study.results).endswith(f"# Up to 18 more runs may be added {within}.\n")
    study.launcher.started.clear()  # commands that are listed count there too
    for interrupted_at, most in ((9, 12), (16, 2), (None, 0)):
        study.launcher.interrupt_at = interrupted_at
        with nullcontext() if interrupted_at is None else pytest.raises(Interrupted):
            study.run()
        told(most)
    assert study.runs == [6, 9, 3]


def test_without_a_target_the_plan_says_nothing_of_it(tmp_path: Path) -> None:
    found = plan(write_study(tmp_path), EIGHT_CORES)
    assert plan_document(found).blocks[0] == Paragraph("example: 2 trials, 6 runs", "strong")
    content = plan_fields(found)
    assert (content["runs"], content["most_runs"], content["target_ci"]) == (6, 6, None)
    assert (found.record.target_ci, found.record.max_repeats) == (None, None)


# --- measure.max_gpu_hours -------------------------------------------------------------------------------------------


def limited(study: Study, hours: float) -> None:
    """The same study with another limit, as somebody edits the file."""
    measure = study.plan.measure.model_copy(update={"max_gpu_hours": hours})
    study.plan = replace(study.plan, context=replace(study.plan.context, measure=measure))


def test_at_the_limit_of_gpu_hours_a_study_ends_in_order_and_goes_on_when_it_is_raised(make: Make) -> None:
    study = make(AT_ONCE, AT_ONCE)
    limited(study, 1e-12)
    report = study.run()
    assert (report.done_now, len(study.launcher.started)) == (1, 1)
    assert report.ended.startswith("measure.max_gpu_hours = 1e-12: ")
    assert not report.failures
    assert study.verdict("unfinished").message.startswith("unfinished: 5 of 6 runs are still to be done")
    # The same again does nothing, and says why.
    again = study.run()
    assert (again.done_now, again.ended) == (0, report.ended)
    limited(study, 1.0)
    whole = study.run()
    assert (whole.done_now, whole.ended) == (11, "")
    assert study.runs == [6, 6]


def test_gpu_hours_count_every_try_and_a_run_begins_only_if_it_is_expected_to_end_within_them(make: Make) -> None:
    study = make(AT_ONCE, AT_ONCE)
    one, two = study.trials
    trial = study.plan.record.trials[two]
    wide = trial.model_copy(update={"world": trial.world.model_copy(update={"ranks_per_node": 4})})
    study.plan.record.trials[two] = wide
    limited(study, 10.0)

    def lasted(hours: float) -> Outcome:
        return unstarted("completed", "").model_copy(update={"wall_seconds": 3600 * hours})

    index = RunIndex(study.results)
    index.finished[RunKey(one, 0)] = EndedAttempt("", lasted(2.0))
    index.earlier[RunKey(one, 0)] = [EndedAttempt("", lasted(1.0))]
    spent = GpuHours(study.plan, index, study.results)
    spent.add(two, lasted(0.75))  # 4 GPUs: 6 in all
    assert spent.refusal(one) == ""
    assert spent.refusal(two) == ""
    # Beside one more run of it, of 2 hours, it just fits; beside two it does not.
    assert spent.refusal(one, [one]) == ""
    assert spent.refusal(one, [one, one]).startswith("measure.max_gpu_hours = 10: 6 GPU-hours are spent, and the next")
    spent.add(one, lasted(2.5))
    assert spent.refusal(two) == (
        "measure.max_gpu_hours = 10: 8.5 GPU-hours are spent, and the next run is expected to take 3"
    )
    # Of a trial that nobody has seen it is not known.
    assert spent.refusal("another") == ""
    spent.add(one, lasted(1.5))
    assert spent.refusal("another") == "measure.max_gpu_hours = 10: 10 GPU-hours are spent"


def test_gpu_hours_count_runs_whose_driver_was_killed(make: Make) -> None:
    """Five hours into a run: the same command again begins no other."""
    study = make(AT_ONCE)
    study.run()
    (trial,) = study.trials
    cut_off = study.results / "runs" / f"{trial}-r2-a0"
    (cut_off / "outcome.json").unlink()
    began = (cut_off / "rank-0.jsonl").stat().st_mtime - 5 * 3600
    os.utime(cut_off / "trial.json", (began, began))
    (cut_off / "latest").symlink_to("what is gone")  # a link that leads nowhere, as a script may leave one
    limited(study, 4.0)
    report = study.run()
    assert (report.done_now, report.ended) == (0, "measure.max_gpu_hours = 4: 5 GPU-hours are spent")
    limited(study, 6.0)
    assert study.run().done_now == 1
