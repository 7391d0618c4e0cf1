"""Every launcher between two hosts of a lab: real sshd, pdsh and Open MPI, and names and addresses of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import needs
from arriving_driver import VALUE
from lab.hosts import vitscale_on
from processes import wait_until
from vitscale.lab import Laboratory, laboratory

pytestmark = pytest.mark.long(6)

TESTS = Path(__file__).parents[1]
MPI_ENVIRONMENTS = TESTS.parent / ".venv-mpi"
"""Made by `tools/make_mpi_environments.py`."""
ODD = "it's a $folder"
"""DeepSpeed's launcher refuses it across hosts: see tests/launchers/test_deepspeed.py."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    needs.root_and("ip", "tc", "ssh", "sshd", "pdsh", "mpirun")
    with laboratory(hosts=2, slots=2) as lab:
        yield lab


@pytest.fixture
def bystander(lab: Laboratory) -> Iterator[subprocess.Popen[bytes]]:
    """On the other host, a process that looks like the launcher of somebody else's DeepSpeed job."""
    argv = ["bash", "-c", 'exec -a "$0 -u -m deepspeed.launcher.launch" sleep 600', sys.executable]
    process = subprocess.Popen(lab.command(1, argv))
    wait_until(lambda: any(b"deepspeed.launcher" in command for command in on(lab, 1)), "it runs")
    yield process
    process.kill()
    process.wait()
    wait_until(lambda: not on(lab, 1), "it is gone")


def on(lab: Laboratory, host: int) -> list[bytes]:
    """The command lines of what runs on a host."""
    lines = []
    for pid in lab.processes(host):
        with contextlib.suppress(OSError):  # it has just ended
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return lines


@pytest.mark.ranks
@pytest.mark.parametrize(("launcher", "folder"), [("torchrun", ODD), ("mpirun", ODD), ("deepspeed", "plain")])
def test_ranks_arrive_where_they_should_and_all_end_when_one_is_killed(
    lab: Laboratory, bystander: subprocess.Popen[bytes], tmp_path: Path, launcher: str, folder: str
) -> None:
    run = tmp_path / folder
    run.mkdir()
    hostfile = lab.hostfile
    if launcher == "mpirun":  # it numbers its own host first all the same, and there the ranks are to meet
        hostfile = run / "other-host-first"
        hostfile.write_text("".join(reversed(lab.hostfile.read_text().splitlines(keepends=True))))
    argv = [sys.executable, "-m", "arriving_driver", launcher, str(hostfile), str(run)]
    driver = subprocess.run(lab.command(0, argv), cwd=TESTS, capture_output=True, text=True, timeout=120, check=False)
    assert driver.returncode == 0, driver.stderr + (run / "log.txt").read_text()

    arrived = [json.loads((run / f"arrived-{rank}.json").read_text()) for rank in range(4)]
    assert [rank["host"] for rank in arrived] == ["host0", "host0", "host1", "host1"]
    assert [rank["place"] for rank in arrived] == [[0, 4, 0], [1, 4, 1], [2, 4, 0], [3, 4, 1]]
    for number, rank in enumerate(arrived):
        variables = rank["variables"]
        assert variables.pop("MASTER_PORT").isdigit()
        assert variables == {
            "RANK": str(number),
            "LOCAL_RANK": str(number % 2),
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "host0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "ARRIVING": VALUE,
        }
    assert json.loads(driver.stdout)["unreached"] == []
    wait_until(lambda: not on(lab, 0) and len(on(lab, 1)) <= 1, "nothing of the run is left on either host")
    assert bystander.poll() is None, "what is not of the run goes on"
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder], "no shell has run the search path"


@pytest.mark.ranks
@pytest.mark.parametrize(("mpi", "ends_all"), [("mpich", True), ("intel", False)])
def test_mpirun_of_another_mpi_starts_the_same_ranks(lab: Laboratory, tmp_path: Path, mpi: str, ends_all: bool) -> None:
    """Hydra, from an environment of its own: it numbers ranks by its file. MPICH's ends all ranks with one; Intel's
    waits for the others where none has called MPI, and the driver ends them."""
    programs = MPI_ENVIRONMENTS / mpi / "bin"
    if not (programs / "mpirun").exists():
        pytest.skip(f"{mpi} is not here: run python tools/make_mpi_environments.py .venv-mpi")
    run = tmp_path / ODD
    run.mkdir()
    hostfile = run / "other-host-first"
    hostfile.write_text("".join(reversed(lab.hostfile.read_text().splitlines(keepends=True))))
    search_path = f"PATH={programs}:{os.environ['PATH']}"
    argv = ["env", search_path, sys.executable, "-m", "arriving_driver", "mpirun", str(hostfile), str(run)]
    driver = subprocess.run(lab.command(0, argv), cwd=TESTS, capture_output=True, text=True, timeout=120, check=False)
    assert driver.returncode == 0, driver.stderr + (run / "log.txt").read_text()

    arrived = [json.loads((run / f"arrived-{rank}.json").read_text()) for rank in range(4)]
    assert [rank["host"] for rank in arrived] == ["host1", "host1", "host0", "host0"]
    assert [rank["place"] for rank in arrived] == [[0, 4, 0], [1, 4, 1], [2, 4, 0], [3, 4, 1]]
    assert {rank["variables"]["MASTER_ADDR"] for rank in arrived} == {"host1"}
    assert {rank["variables"]["ARRIVING"] for rank in arrived} == {VALUE}
    exit_code = json.loads(driver.stdout)["exit_code"]
    assert exit_code != 0
    assert (exit_code is not None) == ends_all
    wait_until(lambda: not on(lab, 0) and not on(lab, 1), "nothing of the run is left on either host")


def test_open_mpi_keeps_its_files_where_no_other_lab_finds_them(lab: Laboratory) -> None:
    """It names them by host and process id, which labs have alike; /tmp is shared by all."""
    argv = ["mpirun", "-np", "2", "--hostfile", str(lab.hostfile), "--map-by", "ppr:1:node", "--bind-to", "none"]
    done = subprocess.run(
        lab.command(0, [*argv, "--allow-run-as-root", "env"]), capture_output=True, text=True, timeout=60, check=True
    )
    names = ("OMPI_MCA_orte_jobfam_session_dir=", "PMIX_SERVER_TMPDIR=")
    folders = [line.partition("=")[2] for line in done.stdout.splitlines() if line.startswith(names)]
    assert len(folders) == 4
    assert all(folder.startswith("/run/ompi.host") for folder in folders), folders


STUDY = Path(__file__).parents[2] / "examples" / "two_hosts.toml"
"""Also run by srun in an allocation and by sbatch: tests/runner/test_batch_jobs_on_ranks.py."""


# By itself, and one study after the other: of two at once a rank stood still within its imports (docs/log.md).
@pytest.mark.alone
@pytest.mark.ranks
def test_one_study_file_trains_the_same_under_every_launcher(lab: Laboratory, tmp_path: Path) -> None:
    study = tmp_path / "two_hosts.toml"
    # A rank that stands still tells where before the test gives up.
    study.write_text(STUDY.read_text().replace("[measure]\n", "[measure]\nhang_seconds = 100\n"))

    def losses(name: str, *options: str) -> list[list[float]]:
        done = vitscale_on(lab, "run", str(study), "-o", name, "--hostfile", str(lab.hostfile), *options, cwd=tmp_path)
        (run,) = (tmp_path / name / "runs").iterdir()
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}{(run / 'log.txt').read_text()}"
        assert json.loads((run / "outcome.json").read_text())["kind"] == "completed"
        ranks = [lines_of(run / f"rank-{rank}.jsonl") for rank in (0, 1)]
        assert [line["environment"]["host"] for rank in ranks for line in rank if line["kind"] == "start"] == [
            "host0",
            "host1",
        ]
        return [[line["loss"] for line in rank if line["kind"] == "step"] for rank in ranks]

    torchrun = losses("torchrun", "--launcher", "torchrun")
    assert all(len(steps) == 4 for steps in torchrun)
    assert losses("deepspeed", "--launcher", "deepspeed") == torchrun
    assert losses("mpirun", "--launcher", "mpirun") == torchrun
    wait_until(lambda: not on(lab, 0) and not on(lab, 1), "nothing is left on either host")


def lines_of(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]
