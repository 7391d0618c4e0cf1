from __future__ import annotations

import errno
import os
import string
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from processes import wait_until
from results_factory import make_run, make_trial
from small_disks import fill_with_files
from vitscale import store
from vitscale.store import RankLog, new_run_folder, read_rank, write_outcome
from vitscale.store.lines import IfThere, RankLine, RankLines, read_lines
from vitscale.store.records import (
    DeviceRecord,
    EndLine,
    Environment,
    EpochLine,
    ErrorLine,
    ModelLine,
    PhaseLine,
    RankRecord,
    StartLine,
    StepLine,
)
from vitscale.store.results import Outcome


def step(number: int, loss: float | None = 0.5) -> StepLine:
    return StepLine(step=number, epoch=0, seconds=0.1, images=8, loss=loss, warmup=False)


def error(message: str = "no", **changes: Any) -> ErrorLine:
    fields: dict[str, Any] = {
        "error_type": "OSError", "message": message, "traceback": f"Traceback\n{message}",
        "out_of_memory": False, "disk_full": False, "unix_seconds": 1.0,
    }  # fmt: skip
    return ErrorLine(**(fields | changes))


def run_folder(results: Path, gpus: int = 1) -> Path:
    return new_run_folder(results, make_run(make_trial(gpus=gpus), []).header)


def test_lines_are_read_back_in_order_and_the_reserve_is_given_back(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    log = RankLog(folder, 0)
    for number in range(500):
        log.write(step(number))
    log.write(EndLine())
    log.close()
    record = read_rank(log.path)
    assert [line.step for line in record.steps] == list(range(500))
    assert record.ended
    assert record.broken == ()
    assert not (folder / ".rank-0.reserve").exists()


def test_a_loss_that_is_not_finite_is_unknown(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    for value in (float("nan"), float("inf"), -float("inf")):
        log.write(step(0, loss=value))
    log.close()
    record = read_rank(log.path)
    assert [line.loss for line in record.steps] == [None] * 3
    assert record.broken == ()


def test_a_second_log_of_the_same_rank_is_refused(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    with pytest.raises(FileExistsError):
        RankLog(tmp_path, 0)
    log.close()


def test_lines_are_on_disk_soon_without_closing(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    log.write(step(0))
    wait_until(lambda: log.path.stat().st_size > 0, "the line is written")
    log.write(step(1))
    wait_until(lambda: log.path.read_bytes().count(b"\n") == 2, "the second is written too")
    log.close()


def test_the_last_word_follows_what_is_queued(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 3)
    for number in range(10):
        log.write(step(number))
    log.end_with(error("lost"))
    record = read_rank(log.path)
    assert record.rank == 3
    assert len(record.steps) == 10
    assert record.error == error("lost")
    assert not record.ended


def test_the_last_word_may_hold_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A path with undecodable bytes in an error's message is a lone surrogate in Python."""
    log = RankLog(tmp_path, 0)
    log.end_with(error("no such file: \udcff"))
    record = read_rank(log.path)
    assert record.broken == ()
    assert record.error is not None
    assert record.error.message == "no such file: \\udcff"


def test_a_line_that_cannot_be_written_is_an_error_and_no_silence(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0)
    log.write(step(0))
    log.write(error("\udcff"))
    with pytest.raises(Exception, match=r"surrogates|unicode|utf-8"):
        log.close()
    log.end_with(error("the last word"))
    record = read_rank(log.path)
    assert record.error == error("the last word")


# --- disks that do not take it -------------------------------------------------------------------------------------


class SlowDisk:
    """Stands in for `os.write`: takes nothing until it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()

    def __call__(self, file: int, data: bytes) -> int:
        assert self.let.wait(60.0)
        return len(data)


def test_training_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a disk that does not answer, `write` and `check` return all the same."""
    disk = SlowDisk()
    log = RankLog(tmp_path, 0)
    monkeypatch.setattr("vitscale.store.writing.os.write", disk)
    for number in range(10_000):
        log.write(step(number))
        log.check()
    assert not disk.let.is_set()  # all of it returned before a single byte was taken
    disk.let.set()
    log.close()


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("vitscale.store.writing.os.write", lambda file, data: write(file, data[:7]))
    log = RankLog(tmp_path, 0)
    for number in range(20):
        log.write(step(number))
    log.close()
    assert len(read_rank(log.path).steps) == 20


def write_and_check(log: RankLog) -> None:
    for number in range(1_000_000):
        log.write(step(number))
        log.check()


def write_until_it_fails(log: RankLog) -> OSError:
    with pytest.raises(OSError, match="No space left") as caught:
        write_and_check(log)
    return caught.value


def test_a_disk_that_fills_up(small_disk: Path) -> None:
    """The reason is raised in the training thread, whole lines stay, the last word and the outcome are still told."""
    folder = run_folder(small_disk)
    log = RankLog(folder, 0)
    reason = write_until_it_fails(log)
    assert reason.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        log.close()
    before = log.path.read_bytes()
    log.end_with(error(str(reason), traceback="x" * 16_000, disk_full=True))
    write_outcome(folder, Outcome(kind="failed", reason="disk full", started_unix_seconds=1.0, wall_seconds=1.0))

    assert log.path.read_bytes().startswith(before)
    record = read_rank(log.path)
    steps = [line.step for line in record.steps]
    assert len(steps) > 1000
    assert steps == list(range(len(steps)))
    assert record.error is not None
    assert record.error.disk_full
    assert len(record.broken) <= 1  # the line the full disk cut off
    assert (folder / "outcome.json").exists()


def test_every_rank_has_its_last_word_on_a_full_disk(small_disk: Path) -> None:
    folder = run_folder(small_disk, gpus=2)
    logs = [RankLog(folder, rank) for rank in range(2)]
    for log in logs:
        write_until_it_fails(log)
    for rank, log in enumerate(logs):
        log.end_with(error(f"rank {rank}", disk_full=True))
    assert [record.error.message for log in logs if (record := read_rank(log.path)).error] == ["rank 0", "rank 1"]


def test_a_disk_that_takes_nothing_at_all_does_not_stop_a_rank_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = RankLog(tmp_path, 0)
    monkeypatch.setattr("vitscale.store.writing.os.write", full)
    log.write(step(0))
    log.end_with(error())
    assert log.path.read_bytes() == b""


def test_killed_at_any_moment_whole_lines_stay(tmp_path: Path) -> None:
    program = (
        "import sys, itertools; from pathlib import Path\n"
        "from vitscale.store.records import StepLine; from vitscale.store import RankLog\n"
        "log = RankLog(Path(sys.argv[1]), 0)\n"
        "for n in itertools.count():\n"
        "  log.write(StepLine(step=n, epoch=0, seconds=0.1, images=8, loss=0.5, warmup=False))\n"
        "  if n % 1000 == 0: print(n, flush=True)\n"
    )
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with subprocess.Popen(
            [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(3 + attempt):
                writer.stdout.readline()
            writer.kill()
        record = read_rank(folder / "rank-0.jsonl")
        steps = [line.step for line in record.steps]
        assert steps == list(range(len(steps)))
        assert all("cut off" in broken for broken in record.broken)


# --- every line there is -------------------------------------------------------------------------------------------

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
WORD = st.text(alphabet=string.ascii_letters, max_size=8)
COUNT = st.integers(0, 2**53)
SECONDS = st.floats(0.0, 1e9)
MAYBE_NUMBER = st.none() | st.floats(allow_nan=False, allow_infinity=False)
MAYBE_COUNT = st.none() | COUNT

ENVIRONMENT = st.builds(
    Environment, host=TEXT, cores_allowed=st.lists(COUNT, max_size=4).map(tuple), threads=COUNT,
    device=st.builds(DeviceRecord, type=st.sampled_from(["cpu", "cuda"]), name=TEXT, memory_bytes=MAYBE_COUNT),
    cpu_quota_cores=MAYBE_NUMBER, versions=st.dictionaries(WORD, st.none() | TEXT, max_size=3),
    backend=st.none() | TEXT,
    settings=st.dictionaries(WORD, TEXT, max_size=3), git_revision=st.none() | TEXT,
)  # fmt: skip
START = st.builds(StartLine, format=st.just(1), trial=WORD, rank=COUNT, world_size=COUNT, environment=ENVIRONMENT)
PHASE = st.builds(PhaseLine, name=st.sampled_from(["launch", "imports", "data", "model", "engine"]), seconds=SECONDS)
MODEL = st.builds(
    ModelLine, parameters=COUNT, gradient_dtype=st.none() | TEXT, synchronised_timing=st.booleans(),
    dataset_fingerprint=TEXT, train_samples=COUNT, held_out_samples=COUNT,
)  # fmt: skip
STEP = st.builds(
    StepLine, step=COUNT, epoch=COUNT, seconds=SECONDS, images=COUNT, loss=MAYBE_NUMBER, warmup=st.booleans()
)  # fmt: skip
EPOCH = st.builds(
    EpochLine, epoch=COUNT, steps=COUNT, images=COUNT, seconds=SECONDS, complete=st.booleans(), train_loss=MAYBE_NUMBER,
    train_accuracy=MAYBE_NUMBER, held_out_loss=MAYBE_NUMBER, held_out_accuracy=MAYBE_NUMBER, peak_bytes=MAYBE_COUNT,
)  # fmt: skip
ERROR = st.builds(
    ErrorLine, error_type=TEXT, message=TEXT, traceback=TEXT, out_of_memory=st.booleans(), disk_full=st.booleans(),
    unix_seconds=SECONDS,
)  # fmt: skip
LINES = st.lists(START | PHASE | MODEL | STEP | EPOCH | ERROR | st.builds(EndLine), max_size=8)


def of(kind: type[Any], lines: list[RankLine]) -> list[Any]:
    return [line for line in lines if isinstance(line, kind)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES)
def test_every_kind_of_line_is_read_back_as_it_was_written(tmp_path: Path, lines: list[RankLine]) -> None:
    log = RankLog(tmp_path, 5)
    for line in lines:
        log.write(line)
    log.close()
    expected = RankRecord(
        rank=5,
        start=(of(StartLine, lines) or [None])[-1],
        model=(of(ModelLine, lines) or [None])[-1],
        phases=tuple(of(PhaseLine, lines)),
        steps=tuple(of(StepLine, lines)),
        epochs=tuple(of(EpochLine, lines)),
        error=(of(ErrorLine, lines) or [None])[-1],
        ended=bool(of(EndLine, lines)),
        broken=(),
    )
    assert read_rank(log.path) == expected
    log.path.unlink()


class Hum(RankLine):
    kind: Literal["hum"] = "hum"
    hertz: float


class Heard(RankLines):
    """A record of one kind of line of its own, taken in each of the three ways."""

    rank: int
    hums: tuple[Hum, ...]
    phase: PhaseLine | None
    ended: Annotated[bool, IfThere(EndLine)]
    broken: tuple[str, ...]


def test_a_field_of_the_record_is_all_that_a_kind_of_line_takes(tmp_path: Path) -> None:
    path = tmp_path / "rank-7.jsonl"
    launch, model = (PhaseLine(name=name, seconds=1.0) for name in ("launch", "model"))
    lines: list[RankLine] = [Hum(hertz=50.0), launch, Hum(hertz=60.0), model, step(1)]
    path.write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
    heard = read_lines(path, Heard, lambda raw, line: None)
    assert (heard.rank, heard.hums, heard.phase, heard.ended) == (7, (lines[0], lines[2]), model, False)
    assert len(heard.broken) == 1
    assert heard.broken[0].startswith("rank-7.jsonl:5: ")  # a step is no line of this record
    assert "'hum', 'phase', 'end'" in heard.broken[0]
    path.write_text(EndLine().model_dump_json() + "\n")
    assert read_lines(path, Heard, lambda raw, line: None).ended


def test_a_rank_s_record_begins_in_the_file_reserved_for_its_last_words(disk_of_few_files: Path) -> None:
    header = make_run(make_trial(gpus=1), []).header
    folder = store.new_run_folder(disk_of_few_files, header)
    fill_with_files(disk_of_few_files)
    assert store.is_full(folder)
    log = store.RankLog(folder, 0)
    with pytest.raises(FileExistsError):
        store.RankLog(folder, 0)
    log.write(EndLine())
    log.close()
    assert store.read_ranks(folder)[0].ended
    store.write_outcome(folder, Outcome(kind="completed", reason="", started_unix_seconds=1.0, wall_seconds=2.0))
