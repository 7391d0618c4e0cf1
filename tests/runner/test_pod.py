"""The containers' program: which pod it is in, and how it ends; `tests/lab/test_pods.py` has whole studies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vitscale.runner import pod


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hostfile of two pods; this process is in one of them."""
    path = tmp_path / "hosts"
    path.write_text("localhost slots=1\nother.invalid slots=1\n")
    monkeypatch.setenv("VITSCALE_PODS", str(path))
    return path


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("index", ["2", "-1", "", "x", "\u00b2", "9" * 5000])
def test_a_number_that_no_pod_has_is_refused(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    assert pod.main([str(tmp_path / "results"), "study.toml"]) == 2
    assert "JOB_COMPLETION_INDEX is" in capsys.readouterr().out


def test_a_container_of_no_manifest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VITSCALE_PODS", raising=False)
    assert pod.main([str(tmp_path / "results"), "study.toml"]) == 2
    assert "VITSCALE_PODS is not set, so this is no pod" in capsys.readouterr().out


def test_the_only_pod_runs_the_study_and_ends_with_its_code(hosts: Path, tmp_path: Path) -> None:
    """The study is missing: 2, as `vitscale run` says."""
    hosts.write_text("localhost slots=1\n")
    argv = [
        sys.executable,
        "-P",
        "-m",
        "vitscale.runner.pod",
        str(tmp_path / "volume/results"),
        str(tmp_path / "no.toml"),
    ]
    environment = {"VITSCALE_PODS": str(hosts), "JOB_COMPLETION_INDEX": "0", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert "no.toml" in done.stderr
    assert [path.name for path in (tmp_path / "volume").iterdir()] == []
