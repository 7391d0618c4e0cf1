"""Which rank a process is, in any launcher's words; and the environment that no launcher brings."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from heartbeats import TOKEN, write_launch
from results_factory import make_trial
from vitscale.machine.gpus import Gpu
from vitscale.processes import launch_file
from vitscale.processes.launch_file import ALL_NAMES, COMPLETE_VARIABLE, TOKEN_VARIABLE
from vitscale.store.results import RunHeader
from vitscale.trial.trial import World
from vitscale.worker import rank_process
from vitscale.worker.rank_process import RankInfo, now_ns, rank_info

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "torch", "MASTER_PORT": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "9", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
PALS = {"PMI_RANK": "6", "PMI_SIZE": "7", "PMI_LOCAL_RANK": "1", "PALS_RANKID": "6", "PALS_LOCAL_RANKID": "1"}
PMI_OF_SLURM = {"PMI_RANK": "7", "PMI_SIZE": "8", "PMI_FD": "9"}
SRUN = {"SLURM_PROCID": "7", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is around these tests; what a test or the code sets is taken back."""
    for name in ALL_NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def given(monkeypatch: pytest.MonkeyPatch, *environments: dict[str, str]) -> None:
    for environment in environments:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)


def told() -> list[str | None]:
    return [os.environ.get(name) for name in TOLD]


def test_without_a_launcher_it_is_the_only_rank(tmp_path: Path) -> None:
    assert rank_info(now_ns(), None) == RankInfo(0, 1, 0, None)
    rank_info(now_ns(), write_launch(tmp_path, 1, master_address="node0", master_port=7))
    assert told() == [None] * 5


def test_torchrun_and_deepspeed_tell_torch_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, TORCHRUN)
    own = rank_info(now_ns(), write_launch(tmp_path, 1, master_address="node0", master_port=7))
    assert (own.rank, own.world_size, own.local_rank) == (3, 4, 1)
    assert told() == ["3", "4", "1", "torch", "1"]


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [(MPIRUN, (5, 6, 2)), (HYDRA, (3, 9, 2)), (PALS, (6, 7, 1)), (SRUN, (7, 8, 3))],
)
def test_for_others_the_launch_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], numbers: tuple[int, int, int]
) -> None:
    given(monkeypatch, environment)
    own = rank_info(now_ns(), write_launch(tmp_path, 1, master_address="node0", master_port=7))
    assert (own.rank, own.world_size, own.local_rank) == numbers
    assert told() == [*map(str, numbers), "node0", "7"]


@pytest.mark.parametrize(
    ("environments", "rank"),
    [
        ((TORCHRUN, SRUN), 3),
        ((MPIRUN, SRUN), 5),
        ((HYDRA, SRUN), 3),
        ((PALS, SRUN), 6),
        ((TORCHRUN, HYDRA), 3),
        ((TORCHRUN, MPIRUN, SRUN), 3),
        (({"RANK": "9"}, MPIRUN), 5),
        (({"SLURM_PROCID": "0"},), 0),
    ],
)
def test_the_innermost_launcher_counts(
    monkeypatch: pytest.MonkeyPatch, environments: tuple[dict[str, str], ...], rank: int
) -> None:
    """torchrun may be started by srun, mpirun in an allocation; and half of a family is none."""
    given(monkeypatch, *environments)
    assert rank_info(now_ns(), None).rank == rank


def test_ranks_of_slurms_pmi_are_numbered_by_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """`PMI_RANK` without a rank on the host is not Hydra's: every rank would take the host's first GPU."""
    given(monkeypatch, PMI_OF_SLURM, SRUN)
    assert rank_info(now_ns(), None).local_rank == 3


def test_numbers_that_are_none_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, SRUN, {"SLURM_NTASKS": "many"})
    with pytest.raises(SystemExit, match="SLURM_PROCID='7', SLURM_NTASKS='many', SLURM_LOCALID='3'"):
        rank_info(now_ns(), None)


def test_the_start_up_is_known_where_clocks_are_the_same(tmp_path: Path) -> None:
    launch = write_launch(tmp_path, 1)
    assert rank_info(launch.started_ns + 1_500_000_000, launch).launch_seconds == 1.5
    elsewhere = launch.model_copy(update={"host_id": "another boot"})
    assert rank_info(now_ns(), elsewhere).launch_seconds is None
    assert rank_info(now_ns(), launch.model_copy(update={"host_id": ""})).launch_seconds is None


@pytest.mark.parametrize(("seen", "asked"), [([1], True), ([0, 1], False), ([], False)])
def test_the_host_s_gpus_are_asked_for_where_a_rank_sees_fewer_than_there_are_ranks(
    monkeypatch: pytest.MonkeyPatch, seen: list[int], asked: bool
) -> None:
    given: list[object] = []

    def gpus(nodes: list[int]) -> tuple[Gpu, ...]:
        return tuple(Gpu(f"GPU-{node}", "GPU", None, None, None, node) for node in nodes)

    monkeypatch.setattr(rank_process, "bound_by_launcher", lambda: False)
    monkeypatch.setattr(rank_process, "visible_gpus", lambda: gpus(seen))
    monkeypatch.setattr(rank_process, "host_gpus", lambda: gpus([0, 1]))
    monkeypatch.setattr(rank_process, "share_of_cores", lambda *told: given.extend(told))
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # taken back
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    rank_process.pin(RankInfo(1, 2, 1, None), World(ranks_per_node=2, threads_per_rank=1), "cuda")
    assert (given[4], given[6]) == (seen, [0, 1] if asked else [])


@pytest.mark.parametrize(("said", "order"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_cuda_numbers_gpus_as_nvml_does_unless_told(
    monkeypatch: pytest.MonkeyPatch, said: str | None, order: str
) -> None:
    monkeypatch.setattr(rank_process, "bound_by_launcher", lambda: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # taken back
    monkeypatch.setenv("CUDA_DEVICE_ORDER", said or "")
    if said is None:
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
    rank_process.pin(RankInfo(0, 1, 0, None), World(ranks_per_node=1, threads_per_rank=1), "cpu")
    assert os.environ["CUDA_DEVICE_ORDER"] == order


# --- real processes ------------------------------------------------------------------------------------------------

# Says what it sees, once it is what it is to be.
PROGRAM = """
import json, os, sys
from pathlib import Path
from vitscale.processes import launch_file
from vitscale.worker import rank_process
launch = launch_file.read(Path(sys.argv[1]))
print("once", flush=True)
rank_process.restart_with_environment(launch)
print(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], "dev": sys.flags.dev_mode,
                  "colour": os.environ.get("COLOUR"), "size": os.environ.get("SIZE"), "rank": os.environ["RANK"],
                  "token": os.environ.get("VITSCALE_JOB"), "seen": "COLOUR" in Path("/proc/self/environ").read_text()}))
"""


BLUE = "it's $(blue)\nand more"


@pytest.mark.parametrize(
    ("brought", "of_study", "begins", "colour"),
    [
        ({TOKEN_VARIABLE: "of the run around"}, (), 2, BLUE),
        ({TOKEN_VARIABLE: TOKEN, "COLOUR": BLUE}, ("COLOUR", "RANK"), 1, BLUE),
        ({TOKEN_VARIABLE: TOKEN, "COLOUR": "red"}, (), 1, "red"),  # an image's own, and not the study's
        ({TOKEN_VARIABLE: TOKEN, "COLOUR": "red"}, ("COLOUR", "RANK"), 2, BLUE),
        # Changed since, by what the interpreter imports as it starts: it would begin for ever.
        ({TOKEN_VARIABLE: TOKEN, COMPLETE_VARIABLE: TOKEN, "COLOUR": "red"}, ("COLOUR", "RANK"), 1, "red"),
    ],
)
def test_it_begins_anew_with_the_run_s_environment_where_the_launcher_has_not_brought_it(
    tmp_path: Path, brought: dict[str, str], of_study: tuple[str, ...], begins: int, colour: str
) -> None:
    """The same process, with its own options and words: who looks for the run's processes sees it too."""
    write_launch(tmp_path, 1, environment={"COLOUR": BLUE, "RANK": "of no launcher"}, study_variables=of_study)
    environment = {name: value for name, value in os.environ.items() if name != "COLOUR"}
    environment |= {"SIZE": "large", "RANK": "3"} | brought
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", PROGRAM, str(tmp_path), "two words", "--", "-x"],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    *begun, last = process.communicate()[0].splitlines()
    assert begun == ["once"] * begins
    assert json.loads(last) == {
        "pid": process.pid,
        "argv": [str(tmp_path), "two words", "--", "-x"],
        "colour": colour,
        "dev": True,
        "rank": "3",
        "token": TOKEN,
        "size": "large",
        "seen": True,
    }


def test_a_rank_started_by_hand_is_left_as_it_is(tmp_path: Path) -> None:
    answer = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert answer.stdout.count("once") == 1


def rank(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A rank of a world of two, as a launcher starts it; it does not come as far as importing torch."""
    trial = make_trial("ddp", 2)
    header = RunHeader(
        trial_id=trial.identity(), repeat=0, attempt=0, trial=trial, command=("x",), dataset_fingerprint="f" * 16
    )
    (folder / "trial.json").write_text(header.model_dump_json())
    inherited = {name: value for name, value in os.environ.items() if name not in ALL_NAMES}
    argv = [sys.executable, "-m", "vitscale.worker", str(folder)]
    return subprocess.run(argv, capture_output=True, text=True, env=inherited | environment, timeout=300)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "vitscale: the launcher made this rank 0 of 1, and the trial has 2\n"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "vitscale: the launcher made this rank 0 of 3, and the trial has 2\n"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "vitscale: the launcher made this rank 2 of 2, and the trial has 2\n"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "vitscale: the launcher made this rank -1 of 2, and the trial has 2\n"),
    ],
)
def test_another_world_than_was_asked_for_is_refused(tmp_path: Path, environment: dict[str, str], said: str) -> None:
    answer = rank(tmp_path, **environment)
    assert (answer.returncode, answer.stdout, answer.stderr) == (1, "", said)
    assert not [*tmp_path.glob("rank-*")]


def test_a_rank_whose_driver_cannot_be_reached_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_launch(tmp_path, port)
    answer = rank(tmp_path, RANK="1", WORLD_SIZE="2")
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"vitscale: rank 1 cannot reach the driver at 127.0.0.1:{port}: ")
    assert "Traceback" not in answer.stderr


def test_a_rank_that_comes_after_its_driver_has_gone_ends(tmp_path: Path) -> None:
    """And only where the driver's process number means the driver."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    write_launch(tmp_path, 1, driver_pid=gone.pid, lifeline=None)
    assert rank(tmp_path, RANK="0", WORLD_SIZE="3").stderr == "vitscale: the driver is gone\n"
    write_launch(tmp_path, 1, driver_pid=gone.pid, lifeline=None, host_id="another boot")
    assert "rank 0 of 3, and the trial has 2" in rank(tmp_path, RANK="0", WORLD_SIZE="3").stderr
    assert launch_file.read(tmp_path) is not None
