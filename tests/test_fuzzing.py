"""A little of what `python tests/fuzzing.py` does at night, and every input that once was a fault."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuzzing
from fuzz_readers import READERS

pytestmark = pytest.mark.computing

INPUTS = 60


@pytest.fixture(autouse=True)
def alarms() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, fuzzing._hung)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of files that are broken on purpose
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_answers_or_raises_its_own_error(reader: str) -> None:
    for number in range(INPUTS):
        error = fuzzing.fault(reader, fuzzing.case(reader, number))
        if error is not None:
            raise AssertionError(f"{reader} {number}") from error


def test_what_once_was_a_fault_is_none_any_more() -> None:
    for path in sorted(fuzzing.CASES.glob("*-*")):
        reader = next(name for name in READERS if path.name.rpartition("-")[0] == name.replace(" ", "-"))
        error = fuzzing.fault(reader, path.read_bytes())
        if error is not None:
            raise AssertionError(path.name) from error


@pytest.mark.parametrize("reader", READERS)
def test_sound_files_are_read(reader: str, tmp_path: Path) -> None:
    """That inputs come from something that the reader takes."""
    (tmp_path / "input").write_bytes(fuzzing._seed(reader))
    READERS[reader][1](tmp_path / "input")


def test_a_fault_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(path: Path) -> object:
        raise KeyError(path.name)

    monkeypatch.setitem(READERS, "hostfile", (lambda: b"node0 slots=4\n", broken))
    assert fuzzing.main(["--reader", "hostfile", "--inputs", "2", "--from", "7"]) == 1
    assert capsys.readouterr().out.startswith("hostfile 7: KeyError: 'input'\nhostfile 8: KeyError")
    assert fuzzing.case("site", 3) == fuzzing.case("site", 3) != fuzzing.case("site", 4)
