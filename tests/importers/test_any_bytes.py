"""Whatever a file holds, the readers find results or say why there are none; junk between known rows loses no row."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from importers.logs import configuration, epoch_rows, epoch_table, steady
from vitscale.errors import RequestError, StoreError
from vitscale.importers.contents import FORMATS, ImportOptions, LogContents, LogFormat
from vitscale.importers.deepspeed import read as read_deepspeed
from vitscale.importers.epochs import read as read_epochs
from vitscale.importers.importing import guess, import_logs
from vitscale.importers.plain_csv import read as read_csv
from vitscale.importers.trainer_state import read as read_state

READERS: dict[LogFormat, Callable[..., LogContents]] = {
    "epochs": read_epochs,
    "deepspeed": read_deepspeed,
    "csv": read_csv,
    "trainer-state": read_state,
}
HINTS = [
    b"gpus,epoch_seconds,micro_batch\n",
    b"gpus,step_seconds\n",
    b'{"log_history": [',
    b'{"train_runtime": 1e400, "step": 2}]}',
    b"[Rank 0] time (ms) | fwd: 1.00 | bwd: 2.00 | step: 3.00\n",
    b"[2024-13-99 99:99:99,999] [Rank 1] time (ms) | fwd_microstep: 1.00 | bwd_microstep: 2.00 | step_microstep: 3.00",
    b"world_size .... 2\n",
    b"2,1.5,8\n",
    b'"2,1.5',
    b"| GPUs | 1 | 2 GPUs | img/s |\n",
    b"images/s <table><tr><th colspan=99>1 GPU<td rowspan=2>2 GPUs<tr>",
    b"images/s \\begin{tabular}{l} 1 GPU & \\multicolumn{2}{c}{2 GPUs} \\\\ \\hline 3 & 4 & 5 \\end{tabular}",
    b"\x00\xff\xfe",
    b"\n",
]
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("log_format", FORMATS)
@QUICK
@given(pieces=st.lists(st.sampled_from(HINTS) | st.binary(max_size=40), max_size=12))
def test_any_bytes(log_format: LogFormat, pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.log"
        path.write_bytes(b"".join(pieces))
        try:
            import_logs([path], log_format, ImportOptions(gpus=2, micro_batch=8), Path(folder) / "results")
        except (RequestError, StoreError):
            assert not (Path(folder) / "results").exists()
        else:
            assert (Path(folder) / "results" / "study.json").exists()


@QUICK
@given(content=st.binary(max_size=300))
def test_guessing_any_bytes(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.log"
        path.write_bytes(content)
        with suppress(RequestError):
            assert guess([path]) in FORMATS


JUNK = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r"), max_size=60).filter(
    lambda text: "time (ms)" not in text and text.count(",") != 12
)


@QUICK
@given(junk=st.lists(JUNK, max_size=8))
def test_rows_survive_junk_between_them(junk: list[str]) -> None:
    known = epoch_rows(2, [[100.0, 110.0], [120.0, 90.0], [95.0, 105.0]])
    mixed = [line for pair in itertools.zip_longest(known, junk) for line in pair if line is not None]
    with tempfile.TemporaryDirectory() as folder:
        clean = read_epochs([epoch_table(Path(folder) / "clean.csv", known)], ImportOptions())
        dirty = read_epochs([epoch_table(Path(folder) / "dirty.csv", mixed)], ImportOptions())
    assert [run.ranks for run in dirty.runs] == [run.ranks for run in clean.runs]
    assert bool(dirty.problems) == any(text.strip() for text in junk)


@QUICK
@given(junk=st.lists(JUNK.filter(lambda text: "[20" not in text), max_size=20))
def test_timers_survive_junk_between_them(junk: list[str]) -> None:
    known = steady(0, 20)
    mixed = [line for pair in itertools.zip_longest(known, junk) for line in pair if line is not None]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.log"
        path.write_text("\n".join([*configuration(2), *mixed]) + "\n", encoding="utf-8")
        (run,) = read_deepspeed([path], ImportOptions()).runs
    assert len(run.ranks[0].steps) == 20


def test_a_line_of_any_length(tmp_path: Path) -> None:
    known = epoch_rows(1, [[100.0], [101.0]])
    path = epoch_table(tmp_path / "epochs.csv", [known[0], "x" * 3_000_000, known[1]])
    found = read_epochs([path], ImportOptions())
    assert len(found.runs[0].ranks[0].epochs) == 2
    assert any("line 3" in problem for problem in found.problems)
