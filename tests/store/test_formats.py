"""Results of the oldest format that is read, exactly as it wrote them; older and newer ones are refused by name.

`format_11` is a study that the last program of format 11 (the parent of commit 73a2422f) ran on a CPU: DDP on 1 and 2
ranks, exported with `--redact`, without logs. Its check is of format 4, by the same program.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from results_factory import make_trial
from vitscale.analysis import analyse
from vitscale.errors import StoreError
from vitscale.store import load, packs, reading
from vitscale.store.checks import load_checks, read_check
from vitscale.store.formats import LAST_READER_OF_OLDER
from vitscale.store.lines import RankLine, kinds_of
from vitscale.store.packs import pack_runs
from vitscale.store.reading import RunIndex
from vitscale.store.records import FORMAT, OLDEST_FORMAT, MeterLine, RankRecord
from vitscale.store.results import Run
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import TrainSpec, Trial

FORMAT_11 = Path(__file__).parent / "format_11"
RUNS = ("6482682950ea-r0-a0", "b67a62bbc6ef-r0-a0")
CHECK = "20260102T030405-abcdef.json"
REMOVED = {"onebit_freeze_steps"}
"""Fields of format 11 that may be gone: they had a meaning for optimizers alone that no DeepSpeed has any more."""
RECORDED_TRIAL = json.loads((FORMAT_11 / "runs" / RUNS[0] / "trial.json").read_text())["trial"]
ADDED = (TrainSpec.model_fields.keys() - RECORDED_TRIAL["train"].keys()) | (
    ParallelSpec.model_fields.keys() - RECORDED_TRIAL["parallel"].keys()
)
"""Fields of [train] and [parallel] that came since: a record without them has their defaults."""
ADDED |= {"host_memory_bytes"}  # of the environment: unknown in older records
RENAMED = {"probes": "meters"}
NEW_IN_12 = {"trial.json": {"vitscale"}, "study.json": {"vitscale", "factory_digests", "cards"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the folder, which tests may change."""
    return Path(shutil.copytree(FORMAT_11, tmp_path / "results"))


def written(path: Path) -> Any:
    return json.loads(path.read_text())


def set_format(path: Path, number: int) -> None:
    path.write_text(json.dumps(written(path) | {"format": number}))


def shared(record: BaseModel, content: Mapping[str, Any]) -> tuple[Any, Any]:
    """A record and what the file has of it, as JSON: without fields that it lacks or that are gone, by new names."""
    read = json.loads(record.model_dump_json())
    return _without_removed({key: value for key, value in read.items() if key in content}), _without_removed(content)


def _with_keys_of(read: Any, content: Any) -> Any:
    """What was read without fields that the file lacks, at any depth."""
    if isinstance(read, dict) and isinstance(content, Mapping):
        return {key: _with_keys_of(value, content[key]) for key, value in read.items() if key in content}
    if isinstance(read, list) and isinstance(content, list) and len(read) == len(content):
        return [_with_keys_of(value, written_value) for value, written_value in zip(read, content, strict=True)]
    return read


def _without_removed(content: Any) -> Any:
    if not isinstance(content, Mapping):
        return content
    left_out = REMOVED | ADDED
    return {RENAMED.get(key, key): _without_removed(value) for key, value in content.items() if key not in left_out}


class WrittenLine(NamedTuple):
    """A line as it was read, and as the file has it."""

    record: RankLine
    content: dict[str, Any]


def lines_of(run: Run) -> Iterator[WrittenLine]:
    """Each line of a run but those of steps, which are read as columns."""
    for rank in run.ranks:
        path = FORMAT_11 / "runs" / run.header.folder / f"rank-{rank.rank}.jsonl"
        for line in path.read_bytes().splitlines():
            record = RankRecord.parse(line)
            if record.kind != "step":
                yield WrittenLine(record, json.loads(line))


def test_the_folder_is_what_format_11_wrote() -> None:
    """Not one of today: it lacks what format 12 brought, and has a line of each kind that a run without a failure and
    without other packages' meters writes."""
    for name, fields in NEW_IN_12.items():
        for path in FORMAT_11.rglob(name):
            assert written(path)["format"] == OLDEST_FORMAT == 11
            assert not written(path).keys() & fields
    assert written(FORMAT_11 / "checks" / CHECK)["format"] == 4
    lines = [json.loads(line) for path in FORMAT_11.rglob("rank-*.jsonl") for line in path.read_bytes().splitlines()]
    kinds = {str(kind.model_fields["kind"].default) for kind in kinds_of(RankRecord)}
    assert kinds - {line["kind"] for line in lines} == {"meter", "error"}


def test_a_folder_of_format_11_reads_back_value_by_value() -> None:
    results = load(FORMAT_11)
    assert results.problems == ()
    assert [run.header.folder for run in results.runs] == sorted(RUNS)
    study = written(FORMAT_11 / "study.json")
    read, content = shared(results.study, study)
    assert read == content
    for run in results.runs:
        own = FORMAT_11 / "runs" / run.header.folder
        pairs = [(run.header, written(own / "trial.json")), (run.outcome, written(own / "outcome.json"))]
        for record, content in [*pairs, *lines_of(run)]:
            read, content = shared(record, content)
            assert read == content
        for rank in run.ranks:
            lines = [json.loads(line) for line in (own / f"rank-{rank.rank}.jsonl").read_bytes().splitlines()]
            steps = [line for line in lines if line["kind"] == "step"]
            assert [json.loads(step.model_dump_json()) for step in rank.steps] == steps


def test_trials_of_format_11_keep_their_identity() -> None:
    """By it a study that format 11 began goes on in its folder."""
    trials = load(FORMAT_11).study.trials
    assert len(trials) == 2
    assert {trial_id: trial.identity() for trial_id, trial in trials.items()} == {one: one for one in trials}


def test_results_of_format_11_are_analysed() -> None:
    """Epochs as the program that ran them showed them: 0.524 s on two ranks, 2.19 times as fast as one."""
    (curve,) = analyse(load(FORMAT_11)).curves
    one, two = curve.points
    assert one.speedup is not None
    assert two.speedup is not None
    assert one.speedup.value == 1.0
    assert two.speedup.value == pytest.approx(2.19, abs=0.005)


def test_packed_runs_of_format_11_read_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(folder)
    monkeypatch.setattr(reading, "PACK_RUNS", 2)
    reading.pack_finished(folder)
    assert len(RunIndex(folder).packs) == 2
    assert load(folder) == before


def test_a_check_of_format_4_reads_back() -> None:
    checks = load_checks(FORMAT_11 / "checks")
    assert checks.problems == ()
    (check,) = checks.records
    read, content = shared(check, written(FORMAT_11 / "checks" / CHECK))
    assert _with_keys_of(read, content) == content


def assert_names_the_last_reader(message: str) -> None:
    assert f"Commit {LAST_READER_OF_OLDER} of vitscale is the last that reads it" in message
    assert "run the study again in a new folder" in message


@pytest.mark.parametrize("number", range(OLDEST_FORMAT))
def test_a_folder_of_an_older_format_is_refused_with_the_last_program_that_reads_it(folder: Path, number: int) -> None:
    set_format(folder / "study.json", number)
    with pytest.raises(StoreError) as caught:
        load(folder)
    message = str(caught.value)
    assert f"study.json has record format {number}, and this vitscale reads 11 to {FORMAT}" in message
    assert_names_the_last_reader(message)


@pytest.mark.parametrize("name", ["trial.json", "outcome.json"])
def test_a_run_of_an_older_format_in_a_newer_study_is_left_out_by_name(folder: Path, name: str) -> None:
    set_format(folder / "runs" / RUNS[0] / name, 10)
    results = load(folder)
    assert [run.header.folder for run in results.runs] == [RUNS[1]]
    (problem,) = [problem for problem in results.problems if "record format" in problem]
    assert f"{RUNS[0]}/{name} has record format 10" in problem
    assert_names_the_last_reader(problem)


@pytest.mark.parametrize("part", ["header", "outcome"])
@pytest.mark.parametrize("number", [10, FORMAT + 1])
def test_a_pack_with_a_run_of_another_format_is_left_out_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, number: int
) -> None:
    runs = {run.header.folder: run for run in load(folder).runs}
    changed = {
        name: run.model_copy(update={part: getattr(run, part).model_copy(update={"format": number})})
        for name, run in runs.items()
    }
    monkeypatch.setattr(packs, "_read_back", lambda _: changed)  # its writer would notice
    path = pack_runs(folder, changed)
    results = load(folder)
    assert results.runs == ()
    (problem,) = [problem for problem in results.problems if "record format" in problem]
    assert f"a run in packs/{path.name} has record format {number}" in problem


def test_what_format_11_calls_probes_are_meters() -> None:
    line = RankRecord.parse(b'{"kind": "probe", "probe": "power", "epoch": 2, "values": {"watts": 3.5}}')
    assert isinstance(line, MeterLine)
    assert (line.meter, line.epoch, line.values) == ("power", 2, {"watts": 3.5})
    trial = make_trial("ddp", 2)
    window = trial.window.model_copy(update={"meters": ("power",)})
    content = trial.model_copy(update={"window": window}).model_dump(mode="json")
    content["window"]["probes"] = content["window"].pop("meters")
    assert Trial.model_validate(content).window.meters == ("power",)


def test_a_check_of_format_3_reads_back(folder: Path) -> None:
    """Format 4 brought what groups exchange: the first program of results format 11 had not got that."""
    path = folder / "checks" / CHECK
    content = written(path)
    del content["request"]["exchanges"]
    content["request"]["format"] = 3
    path.write_text(json.dumps(content | {"format": 3}))
    assert read_check(path).request.exchanges == {}


@pytest.mark.parametrize("number", [1, 2])
def test_a_check_of_an_older_format_is_refused_with_the_last_program_that_reads_it(folder: Path, number: int) -> None:
    set_format(folder / "checks" / CHECK, number)
    with pytest.raises(StoreError, match=f"has check format {number}, and this vitscale reads 3 to 6") as caught:
        read_check(folder / "checks" / CHECK)
    assert LAST_READER_OF_OLDER in str(caught.value)
