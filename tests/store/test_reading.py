from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from results_factory import error_line, make_environment, make_run, make_trial, one_curve, rich_study, write_results
from vitscale.errors import StoreError
from vitscale.store import RunIndex, load, new_run_folder, read_rank, read_ranks, read_study, write_outcome, write_study
from vitscale.store.lines import Record, Steps, read_lines, refuse_unwritable_numbers
from vitscale.store.reading import RunKey
from vitscale.store.records import FORMAT, EndLine, EpochLine, ModelLine, PhaseLine, RankRecord, StartLine, StepLine
from vitscale.store.results import Outcome

GOOD: list[Record] = [
    StartLine(format=1, trial="0" * 12, rank=0, world_size=1, environment=make_environment()),
    PhaseLine(name="imports", seconds=1.0),
    ModelLine(
        parameters=1, gradient_dtype=None, synchronised_timing=False, dataset_fingerprint="f", train_samples=8,
        held_out_samples=2,
    ),
    StepLine(step=0, epoch=0, seconds=0.1, images=8, loss=0.5, warmup=False),
    StepLine(step=1, epoch=0, seconds=0.1, images=8, loss=None, warmup=False),
    EpochLine(
        epoch=0, steps=2, images=16, seconds=0.2, complete=True, train_loss=0.5, train_accuracy=0.1, held_out_loss=None,
        held_out_accuracy=None, peak_bytes=None,
    ),
    EndLine(),
]  # fmt: skip
STEP = json.loads(GOOD[3].model_dump_json())


def rank_file(folder: Path, *lines: str | bytes, end: bytes = b"\n") -> Path:
    path = folder / "rank-0.jsonl"
    raw = [line.encode("utf-8", errors="surrogatepass") if isinstance(line, str) else line for line in lines]
    path.write_bytes(b"\n".join(raw) + (end if raw else b""))
    return path


def good_lines() -> list[str]:
    return [line.model_dump_json() for line in GOOD]


def changed(**fields: Any) -> str:
    return json.dumps(STEP | fields)


# --- one rank's lines ----------------------------------------------------------------------------------------------


def test_a_whole_record(tmp_path: Path) -> None:
    record = read_rank(rank_file(tmp_path, *good_lines()))
    assert (record.start, record.model) == (GOOD[0], GOOD[2])
    assert record.phases == (GOOD[1],)
    assert record.steps == tuple(GOOD[3:5])
    assert record.epochs == (GOOD[5],)
    assert record.ended
    assert record.broken == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "content: Invalid JSON"),
        ("null", "content"),
        ("[]", "content"),
        ('"step"', "content"),
        ("{}", "Unable to extract tag"),
        ('{"kind": "stop"}', "does not match any of the expected tags"),
        (changed(kind="epoch"), "epoch.steps: Field required"),
        (changed(extra=1), "step.extra: Extra inputs are not permitted"),
        (changed(step=-1), "step.step: Input should be greater than or equal to 0"),
        (changed(step="x"), "step.step"),
        (changed(seconds=-0.1), "step.seconds"),
        (changed(seconds=None), "step.seconds"),
        (json.dumps({key: value for key, value in STEP.items() if key != "images"}), "step.images: Field required"),
        (json.dumps(STEP)[:30], "Invalid JSON"),
        (json.dumps(STEP) + json.dumps(STEP), "Invalid JSON: trailing characters"),
        (changed(loss=float("nan")), "loss: nan is no number of vitscale's"),
        (changed(loss=float("inf")), "loss: inf is no number of vitscale's"),
        (changed(loss=0.5).replace("0.5", "1e999"), "loss: inf is no number of vitscale's"),
        (changed(seconds=float("nan")), "step.seconds"),
        (changed(step=0).replace('"step": 0', '"step": ' + "9" * 5000), "number out of range"),
        (changed(step=2**63), "step: 9223372036854775808 is no number of vitscale's"),
        ('{"kind": ' * 5000, "Invalid JSON"),
        (b"\xff\xfe" + json.dumps(STEP).encode(), "Invalid JSON"),
        (b"\x00" * 100, "Invalid JSON"),
        ('{"kind": "step", "\\ud800": 1}', "Invalid JSON"),
        (changed(**{"\x1b[2J": 1}), "Extra inputs"),
        (changed(**{"k" * 100_000: 1}), "Extra inputs"),
    ],
)
def test_a_broken_line_is_named_and_the_rest_is_kept(tmp_path: Path, line: str | bytes, said: str) -> None:
    lines = good_lines()
    record = read_rank(rank_file(tmp_path, *lines[:4], line, *lines[4:]))
    (broken,) = record.broken
    assert broken.startswith(f"{tmp_path.name}/rank-0.jsonl:5: ")
    assert said in broken
    assert broken.isprintable()
    assert len(broken) < 400
    assert record.steps == tuple(GOOD[3:5])
    assert record.ended


@pytest.mark.parametrize("kept", range(len(GOOD)))
def test_a_record_cut_off_inside_any_line_keeps_the_lines_before(tmp_path: Path, kept: int) -> None:
    lines = good_lines()
    record = read_rank(rank_file(tmp_path, *lines[:kept], lines[kept][:-1], end=b""))
    assert record.broken == (f"{tmp_path.name}/rank-0.jsonl:{kept + 1}: cut off",)
    assert (record.start is not None) == (kept > 0)
    assert len(record.steps) == min(2, max(0, kept - 3))
    assert not record.ended


def test_a_last_line_without_its_end_does_not_count_even_when_it_looks_whole(tmp_path: Path) -> None:
    """A cut through a number leaves valid JSON with another value, never without the closing brace; but the line break
    is what says that a line is whole.
    """
    record = read_rank(rank_file(tmp_path, *good_lines(), end=b""))
    assert not record.ended
    assert len(record.broken) == 1


def test_the_last_word_after_a_cut_off_line_is_read(tmp_path: Path) -> None:
    lines = good_lines()
    record = read_rank(rank_file(tmp_path, *lines[:3], lines[3][:20], error_line("disk full").model_dump_json()))
    assert record.error == error_line("disk full")
    assert [broken.partition(": ")[0] for broken in record.broken] == [f"{tmp_path.name}/rank-0.jsonl:4"]


def test_an_empty_line_is_no_broken_one(tmp_path: Path) -> None:
    assert read_rank(rank_file(tmp_path, good_lines()[3], "", good_lines()[4])).broken == ()


def test_an_empty_file_is_a_rank_that_said_nothing(tmp_path: Path) -> None:
    record = read_rank(rank_file(tmp_path))
    assert (record.start, record.steps, record.ended, record.broken) == (None, (), False, ())


def test_ranks_are_read_in_order_and_nothing_else_is(tmp_path: Path) -> None:
    for name in (
        "rank-10.jsonl",
        "rank-2.jsonl",
        "rank-0.jsonl",
        "rank-x.jsonl",
        "rank-1.json",
        ".rank-1.reserve",
        "log.txt",
    ):
        (tmp_path / name).write_text("")
    assert [record.rank for record in read_ranks(tmp_path)] == [0, 2, 10]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_anywhere_loses_only_the_lines_it_touches(tmp_path: Path, data: st.DataObject) -> None:
    lines = [STEP | {"step": number} for number in range(20)]
    content = bytearray("".join(json.dumps(line) + "\n" for line in lines).encode())
    begin = data.draw(st.integers(0, len(content) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=30))
    length = len(content) // 20
    content[begin : begin + len(damage)] = damage
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(content)
    record = read_rank(path)
    first, last = begin // (length - 2), (begin + len(damage)) // (length - 2)
    untouched = [number for number in range(20) if number < first - 2 or number > last + 2]
    steps = [line.step for line in record.steps]
    assert all(number in steps for number in untouched)


# --- whole results -------------------------------------------------------------------------------------------------


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = rich_study()
    write_results(results, tmp_path)
    found = load(tmp_path)
    assert found.study == results.study
    assert found.problems == ()
    key = {(run.header.trial_id, run.header.repeat): run for run in results.runs}
    assert {(run.header.trial_id, run.header.repeat): run for run in found.runs} == key


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_results(one_curve({1: [0.1, 0.1]}, repeats=2), tmp_path)
    return tmp_path


def run_folder(results: Path, repeat: int = 0) -> Path:
    (folder,) = results.glob(f"runs/*-r{repeat}-a0")
    return folder


def test_a_broken_line_is_told_and_its_run_is_kept(small: Path) -> None:
    path = run_folder(small) / "rank-0.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"warmup":true', b'"warmup":7x', 1))
    found = load(small)
    assert len(found.runs) == 2
    (problem,) = found.problems
    assert "rank-0.jsonl:" in problem
    assert problem.endswith("line left out")


@pytest.mark.parametrize(
    "content", ["", "{}", "null", "[" * 100_000, '{"format": ' + "9" * 5000 + "}", "\ud800", "NaN", "\x00"]
)
@pytest.mark.parametrize("name", ["outcome.json", "trial.json"])
def test_a_run_whose_files_cannot_be_read_is_named_and_left_out(small: Path, name: str, content: str) -> None:
    (run_folder(small) / name).write_bytes(content.encode("utf-8", errors="surrogatepass"))
    found = load(small)
    assert [run.header.repeat for run in found.runs] == [1]
    assert any(name in problem and "left out" in problem for problem in found.problems)
    assert all(problem.isprintable() for problem in found.problems)


@pytest.mark.parametrize("content", ["", "{}", "null", "[" * 100_000, '{"format": ' + "9" * 5000 + "}", "\x00", "NaN"])
def test_a_study_that_cannot_be_read_is_one_message(small: Path, content: str) -> None:
    (small / "study.json").write_text(content)
    with pytest.raises(StoreError, match=r"study\.json cannot be read"):
        load(small)


@pytest.mark.parametrize("field", ["repeats", "max_repeats"])
def test_a_study_of_more_runs_than_any_can_ask_for_is_refused(small: Path, field: str) -> None:
    """A bundle may be anybody's, and `watch` lists the runs that are left."""
    study = json.loads((small / "study.json").read_text())
    (small / "study.json").write_text(json.dumps(study | {field: 10**9}))
    with pytest.raises(StoreError, match=rf"study\.json cannot be read: {field}: "):
        load(small)


@pytest.mark.parametrize("kind", ["newer", "much newer"])
def test_a_newer_format_is_refused_by_name(small: Path, kind: str) -> None:
    newer = FORMAT + 1 if kind == "newer" else 10**9
    path = small / "study.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": newer, "something": "new"}))
    with pytest.raises(StoreError) as caught:
        load(small)
    assert f"study.json has record format {newer}, newer than this vitscale's {FORMAT}" in str(caught.value)
    assert "Update vitscale" in str(caught.value)


def test_a_run_of_a_newer_format_is_left_out_by_name(small: Path) -> None:
    path = run_folder(small) / "outcome.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    found = load(small)
    assert len(found.runs) == 1
    assert any(f"record format {FORMAT + 1}" in problem for problem in found.problems)


def test_a_run_without_an_outcome_was_interrupted(small: Path) -> None:
    (run_folder(small) / "outcome.json").unlink()
    found = load(small)
    assert len(found.runs) == 1
    assert found.problems == ("1 run interrupted; `vitscale run` does what is missing",)


def test_a_run_of_another_trial_in_the_wrong_folder_is_left_out(small: Path) -> None:
    (run_folder(small) / "trial.json").write_bytes((run_folder(small, 1) / "trial.json").read_bytes())
    found = load(small)
    assert [run.header.repeat for run in found.runs] == [1]
    assert any("is of another run" in problem for problem in found.problems)


def test_runs_of_an_earlier_form_of_the_study_are_named(small: Path) -> None:
    other = make_run(make_trial(gpus=4), [])
    write_outcome(new_run_folder(small, other.header), other.outcome)
    found = load(small)
    assert len(found.runs) == 2
    assert any("belongs to an earlier form of this study" in problem for problem in found.problems)
    # As the parts of a large folder are read, each by a process of its own.
    part = load(small, frozenset())
    assert part.runs == ()
    assert any("belongs to an earlier form of this study" in problem for problem in part.problems)


def test_what_is_no_run_is_named(small: Path) -> None:
    (small / "runs" / "notes").mkdir()
    (small / "runs" / f"{'0' * 12}-r0-a0").write_text("a file")
    assert "runs/notes is no run of vitscale: left out" in load(small).problems


@pytest.mark.parametrize("name", ["missing", "file", "empty", "a" * 5000, "nul\x00"])
def test_what_holds_no_results_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        StoreError, match="is no bundle" if name == "file" else r"holds no results of vitscale|cannot be read"
    ) as caught:
        load(tmp_path / name)
    assert str(caught.value).isprintable()


# --- the index -----------------------------------------------------------------------------------------------------


def attempt(results: Path, number: int, kind: str | None) -> Path:
    header = make_run(make_trial(), []).header.model_copy(update={"attempt": number})
    folder = new_run_folder(results, header)
    if kind is not None:
        reason = "" if kind == "completed" else f"reason {number}"
        outcome: dict[str, Any] = {"kind": kind, "reason": reason, "started_unix_seconds": 1.0, "wall_seconds": 1.0}
        write_outcome(folder, Outcome(**outcome))
    return folder


KEY = RunKey(make_trial().identity(), 0)


def test_the_last_attempt_with_an_outcome_counts_by_number_and_not_by_name(tmp_path: Path) -> None:
    for number in range(12):
        attempt(tmp_path, number, "failed")
    index = RunIndex(tmp_path)
    assert index.attempts == {KEY: 11}
    assert index.finished[KEY][1].reason == "reason 11"
    assert [outcome.reason for _, outcome in index.earlier[KEY]] == [f"reason {number}" for number in range(11)]


def test_every_try_is_told(tmp_path: Path) -> None:
    attempt(tmp_path, 0, "failed")
    attempt(tmp_path, 1, "completed")
    write_study(tmp_path, one_curve({1: [0.1]}).study.model_copy(update={"trials": {KEY[0]: make_trial()}}))
    found = load(tmp_path)
    assert [run.outcome.kind for run in found.runs] == ["completed"]
    assert f"runs/{KEY[0]}-r0-a0 is not used, for it was tried again: reason 0" in found.problems


def test_an_interrupted_attempt_leaves_the_one_before_in_place_and_its_number_in_use(tmp_path: Path) -> None:
    attempt(tmp_path, 0, "failed")
    attempt(tmp_path, 1, None)
    index = RunIndex(tmp_path)
    assert index.attempts == {KEY: 1}
    assert index.finished[KEY][1].reason == "reason 0"


def test_a_broken_outcome_leaves_the_one_before_in_place(tmp_path: Path) -> None:
    attempt(tmp_path, 0, "completed")
    (attempt(tmp_path, 1, "completed") / "outcome.json").write_text("{")
    index = RunIndex(tmp_path)
    assert index.finished[KEY][0].endswith("-a0")
    assert len(index.problems) == 1


def test_an_empty_folder_holds_no_runs(tmp_path: Path) -> None:
    index = RunIndex(tmp_path)
    assert (index.attempts, index.finished, index.problems) == ({}, {}, [])
    assert read_study(tmp_path) is None
    write_study(tmp_path, one_curve({1: [0.1]}).study)
    assert load(tmp_path).runs == ()


VALUES: list[Any] = [
    None, True, False, -1, 0, 3, 2**63 - 1, 2**63, 10**30, 3.0, -0.0, 0.5, -0.1, 1e308, math.inf, math.nan,
    "", "3", "0.5", "true", "light", "dark", "explained", [],
]  # fmt: skip


@pytest.mark.parametrize("field", [*STEP, "unknown"])
def test_steps_read_at_once_are_those_read_line_by_line(tmp_path: Path, field: str) -> None:
    """All of a file's steps are parsed together, by another library than single lines are."""
    without_field = {key: value for key, value in STEP.items() if key != field}
    changed = [STEP | {field: value} for value in VALUES]
    texts = [json.dumps(step, separators=(",", ":")) for step in (STEP, without_field, *changed)]
    overflowing = json.dumps(STEP | {field: "number"}, separators=(",", ":")).replace('"number"', "1e999")
    for text in (*texts, overflowing):
        path = rank_file(tmp_path, text)
        line_by_line = read_lines(path, RankRecord, lambda _, line: refuse_unwritable_numbers(line))
        at_once = read_rank(path)
        assert at_once.broken == tuple(f"{tmp_path.name}/{line}" for line in line_by_line.broken)
        assert at_once.steps == Steps.of(line_by_line.steps), text
