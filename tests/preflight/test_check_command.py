"""`vitscale check` as a user meets it: one launch of real ranks on this machine, and every wrong request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from driving import processes_naming, start, tree, vitscale
from processes import wait_until
from vitscale import cli
from vitscale.preflight.fit import points
from vitscale.store.checks import OPERATIONS, STAGES, latest

STUDY = """
name = "checked"
[model]
name = "vit-ti16"
image_size = 16
patch_size = 8
layers = 2
heads = 4
[data]
name = "digits"
workers = 1
[train]
micro_batch = 16
epochs = 1
device = "cpu"
precision = "fp32"
[parallel]
pipeline = 2
schedule = "gpipe"
[scaling]
gpus = [2]
[launch]
threads_per_rank = 1
"""
SIZES = [1024 * 4**power for power in range(7)]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The results folder, what was printed as JSON, and what was said meanwhile."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "study.toml").write_text(STUDY)
    # Every interpreter that starts says what it runs.
    (folder / "sitecustomize.py").write_text(
        f"import sys; print(*sys.orig_argv[1:4], file=open({str(folder / 'interpreters.txt')!r}, 'a'))"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        answer = vitscale("check", folder / "study.toml", "-o", folder / "results", "--quick", "--json")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder / "results", json.loads(answer.stdout), answer.stderr


@pytest.mark.ranks
def test_both_ranks_measure_everything(checked: tuple[Path, dict[str, Any], str]) -> None:
    _, told, said = checked
    assert said == "Checking 2 ranks; this takes some seconds.\n"
    check = told["check"]
    assert [rank["rank"] for rank in check["ranks"]] == [0, 1]
    for rank in check["ranks"]:
        done = [stage["name"] for stage in rank["stages"]]
        assert done == [stage for stage in STAGES if stage != "network" or rank["rank"] == 1]
        assert {stage["ending"] for stage in rank["stages"]} == {"done"}
        assert rank["broken"] == []
        assert rank["facts"]["environment"]["threads"] == 1
        assert len(rank["facts"]["environment"]["cores_allowed"]) == 1
        assert rank["facts"]["host_cores"] >= 2
        assert rank["matmul"]["flops_per_second"] > 0
        assert len(rank["compute"]["pieces_per_second"]) == 3
        assert rank["loader"]["images_per_second"] > 0
        assert rank["loader"]["workers"] == 1
        assert rank["disk"]["seen_seconds"] is not None
    assert check["ranks"][1]["reach"]["seconds"] is not None
    assert check["log"] == ""
    assert told["rank_speeds"] is not None


@pytest.mark.ranks
def test_ranks_of_a_check_are_forks_of_one_process_too(checked: tuple[Path, dict[str, Any], str]) -> None:
    """Two interpreters less that import torch at the same time."""
    started = (checked[0].parent / "interpreters.txt").read_text().splitlines()
    assert started.count("-P -m vitscale.worker.prepared") == 1
    assert "-P -m vitscale.worker" not in started


@pytest.mark.ranks
def test_every_operation_is_swept_inside_the_node_and_fitted(checked: tuple[Path, dict[str, Any], str]) -> None:
    """Fitted where its times grow with the size: on a busy machine those of an operation may not."""
    check = checked[1]["check"]
    lines = [line for rank in check["ranks"] for line in rank["collectives"] if line["group"] != "pipeline"]
    assert {line["group"] for line in lines} == {"inside nodes"}
    assert {line["ranks"] for line in lines} == {2}
    operations = {line["operation"] for line in lines}
    assert operations == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    for operation in operations:
        both = [
            [line["size_bytes"] for line in rank["collectives"] if line["operation"] == operation]
            for rank in check["ranks"]
        ]
        assert both[0] == both[1] == SIZES[: len(both[0])] != []  # a busy machine ends it early
    stored = latest(checked[0])
    assert stored is not None
    grows = set()
    for operation in OPERATIONS:
        _, found = points(stored.ranks, "inside nodes", operation)
        seconds = [point.seconds for point in found if point.size_bytes * 16 >= found[-1].size_bytes]
        if len(seconds) > 1 and all(shorter < longer for shorter, longer in pairwise(seconds)):
            grows.add(operation)
    assert grows <= {fit["operation"] for fit in check["fits"] if fit["group"] != "pipeline"} <= operations


@pytest.mark.ranks
def test_stages_send_to_each_other(checked: tuple[Path, dict[str, Any], str]) -> None:
    """The groups of [parallel], with the operation that they will train with, and no other group twice."""
    for rank in checked[1]["check"]["ranks"]:
        lines = [line for line in rank["collectives"] if line["group"] == "pipeline"]
        assert {(line["operation"], line["ranks"]) for line in lines} == {("send_recv", 2)}
        assert [line["size_bytes"] for line in lines] == SIZES[: len(lines)] != []
        assert all(seconds > 0 for line in lines for seconds in line["seconds"])


@pytest.mark.ranks
def test_the_loader_is_held_against_what_arithmetic_allows(checked: tuple[Path, dict[str, Any], str]) -> None:
    assert checked[1]["check"]["loader_need"]["source"] == "arithmetic"


@pytest.mark.ranks
def test_it_is_stored_and_nothing_else_is_left(checked: tuple[Path, dict[str, Any], str]) -> None:
    results, told, _ = checked
    assert list(tree(results)) == [f"checks/{told['check']['id']}.json"]
    stored = latest(results)
    assert stored is not None
    assert stored.model_dump(mode="json") == told["check"]
    assert processes_naming(results) == []


@pytest.mark.ranks
def test_a_rank_that_is_killed_is_named_and_what_was_measured_till_then_is_kept(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "vitscale", "check", "-o", tmp_path, "--json")
    check = start(*command, cwd=tmp_path)

    def victim() -> psutil.Process | None:
        """Rank 1, once it has timed something: who writes its file. (What variables a fork has is not seen outside.)"""
        lines = {str(path) for path in tmp_path.glob("checks/*/rank-1.jsonl") if '"collective"' in path.read_text()}
        ranks = processes_naming(tmp_path) if lines else []
        return next((rank for rank in ranks if lines & {file.path for file in rank.open_files()}), None)

    wait_until(lambda: victim() is not None, "rank 1 has timed a collective")
    found = victim()
    assert found is not None
    found.kill()
    printed, _ = check.communicate(timeout=300)
    told = json.loads(printed[printed.index("{") :])
    assert check.returncode == 1
    assert told["check"]["guilty_rank"] == 1
    first = told["verdicts"][0]
    assert (first["kind"], first["severity"]) == ("rank-stopped", "error")
    assert "rank 1 was ended by SIGKILL" in first["message"]
    assert [bool(rank["collectives"]) for rank in told["check"]["ranks"]] == [True, True]
    assert latest(tmp_path) is not None
    assert processes_naming(tmp_path) == []


# --- wrong requests ------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls `vitscale check ARGUMENTS` in this process; it must be refused, and write nothing. Returns the message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "own"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("COLUMNS", "1000")

    def call(*arguments: str) -> str:
        before = tree(tmp_path)
        monkeypatch.setattr(sys, "argv", ["vitscale", "check", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert ended.value.code == 2
        assert out == ""
        assert "Traceback" not in err
        assert tree(tmp_path) == before
        return err

    return call


def test_what_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    (tmp_path / "site.toml").write_text("[train]\nengine = 'ddp'\n")
    assert "--ranks-per-node is 0. Valid: 1 to 4,096." in refused("--ranks-per-node", "0")
    assert "no-such.toml" in refused("no-such.toml")
    assert "no-hosts" in refused("--hostfile", "no-hosts")
    assert "unknown launcher 'ssh'" in refused("--launcher", "ssh")
    assert "[train]" not in refused("--site", "no-site.toml")
    assert "Valid: [launch], [slurm], [kubernetes], [node]" in refused("--site", "site.toml")
    assert "srun" in refused("--launcher", "srun")
    assert "login node" in refused("--scheduler", "slurm")
    assert "login node: PBS" in refused("--scheduler", "pbs")
    assert "launch.scheduler" in refused("--scheduler", "sge")


def test_a_folder_that_cannot_be_written(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Give a folder you may write to with -o." in refused("-o", "file")
