from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from check_factory import checked, facts, record, request
from study_factory import EIGHT_CORES, summary, write_study
from vitscale.preflight import pace_warnings
from vitscale.runner import Plan, plan
from vitscale.store.checks import CheckRecord, HostAnswer, check_folder, write_check


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    return plan(write_study(tmp_path), EIGHT_CORES, lambda _: summary())


def on(host: str) -> CheckRecord:
    """Two ranks of unlike pace on one host."""
    return record(*(checked(n, pace=pace, facts=facts(n, host=host)) for n, pace in enumerate((100.0, 31.0))))


def test_a_slow_rank_of_the_last_check_is_told_before_the_study(planned: Plan, tmp_path: Path) -> None:
    write_check(check_folder(tmp_path / "results"), on("node0"))
    told = pace_warnings(planned, tmp_path / "results")
    assert "rank 1 (NVIDIA A100, node0) computes at 0.31 of the others" in told[0]
    assert "rank_speeds = [1.0, 0.31]" in told[0]


def test_a_check_of_other_hosts_says_nothing_of_these(planned: Plan, tmp_path: Path) -> None:
    write_check(check_folder(tmp_path / "results"), on("elsewhere"))
    assert pace_warnings(planned, tmp_path / "results") == []


def test_a_check_of_the_gpus_says_nothing_of_a_study_on_the_cores(planned: Plan, tmp_path: Path) -> None:
    on_gpus = on("node0").model_copy(update={"request": request(device="cuda")})
    write_check(check_folder(tmp_path / "results"), on_gpus)
    assert pace_warnings(planned, tmp_path / "results") == []


def test_where_slurm_will_choose_the_hosts_nothing_is_known_of_them(tmp_path: Path, planned: Plan) -> None:
    """The check is of the login node, which does not train."""
    write_check(check_folder(tmp_path / "results"), on("node0"))
    changes: dict[str, dict[str, Any]] = {
        "launch": {"scheduler": "slurm", "launcher": "srun"},
        "node": {"cores": 8, "fast_bf16": False},
    }
    submitted = plan(write_study(tmp_path, changes), None, lambda _: summary())
    assert pace_warnings(submitted, tmp_path / "results") == []
    assert pace_warnings(planned, tmp_path / "results") != []


def test_a_check_is_known_by_the_names_of_the_hostfile(tmp_path: Path, planned: Plan) -> None:
    """Ranks call themselves node0, and the file names an address. Of hosts that did not answer a check says nothing."""
    whole = on("node0")
    del planned
    (tmp_path / "hosts").write_text("192.0.2.1 slots=2\n")
    listed = plan(write_study(tmp_path, {"launch": {"hostfile": "hosts"}}), EIGHT_CORES, lambda _: summary())
    for seconds, told in ((None, 0), (0.1, 1)):
        answers = (
            HostAnswer(name="192.0.2.1", address="192.0.2.1", seconds=seconds),
            HostAnswer(name="192.0.2.2", address="192.0.2.2", seconds=None),
        )
        write_check(check_folder(tmp_path / "results"), whole.model_copy(update={"hosts": answers}))
        assert len(pace_warnings(listed, tmp_path / "results")) == told


def test_without_a_check_or_with_ranks_alike_nothing_is_told(planned: Plan, tmp_path: Path) -> None:
    assert pace_warnings(planned, tmp_path / "results") == []
    alike = record(*(checked(n, facts=facts(n, host="node0")) for n in (0, 1)))
    write_check(check_folder(tmp_path / "results"), alike)
    assert pace_warnings(planned, tmp_path / "results") == []
