"""What a machine lacks is said in one line with what to install, and fails where all is meant to be there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import browser
import needs

CI = (Path(__file__).parent.parent / ".ci/run").read_text()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no program is installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VITSCALE_TESTS_MUST_RUN", raising=False)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "Slurm": (
        lambda: needs.programs("srun", "slurmctld"),
        "not installed: srun, slurmctld; apt-get install slurm-client slurmctld",
    ),
    "sshd": (
        lambda: needs.root_and("ssh", "sshd"),
        "not installed: ssh, sshd; apt-get install openssh-client openssh-server",
    ),
    "Open MPI": (lambda: needs.programs("mpirun"), "not installed: mpirun; apt-get install openmpi-bin"),
    "Chromium": (
        lambda: browser.drawn(Path("/no/page.html")),
        "not installed: chromium; apt-get install chromium",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("bare")
def test_what_is_not_installed_is_skipped_with_what_to_install(name: str) -> None:
    ask, line = CASES[name]
    with pytest.raises(pytest.skip.Exception) as skipped:
        ask()
    assert str(skipped.value) == line


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("bare")
def test_where_all_is_meant_to_be_there_it_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITSCALE_TESTS_MUST_RUN", "1")
    ask, line = CASES[name]
    with pytest.raises(pytest.fail.Exception) as failed:
        ask()
    assert str(failed.value) == line


def test_all_that_may_be_missing_is_installed_where_it_must_not_be() -> None:
    """`util-linux` is on every Debian machine."""
    packages = {package for several in needs.PACKAGES.values() for package in several.split()} - {"util-linux"}
    assert {package for package in packages if package not in CI} == set()
