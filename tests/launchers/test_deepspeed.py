from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launching import FOLDER, PLAIN_FOLDER, PYTHON, help_of, hosts, launch, options, world
from vitscale.errors import RequestError
from vitscale.launchers import Spawn, usable_launcher
from vitscale.launchers.deepspeed import DeepSpeed
from vitscale.machine.hosts import Host

RUNNER = (PYTHON, "-P", "-m", "deepspeed.launcher.runner")


@pytest.fixture
def pdsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pdsh and ssh are found in this folder, and nothing else is."""
    (tmp_path / "bin").mkdir()
    for name in ("pdsh", "ssh"):
        (tmp_path / "bin" / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def here(ranks: int, interface: str | None = None, on: tuple[Host, ...] = ()) -> Spawn:
    return launch(DeepSpeed(), world(1, ranks), on, interface=interface)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("interface", [None, "eth0"])
def test_on_this_machine(ranks: int, interface: str | None) -> None:
    """A hostfile even so: without one it counts GPUs, and stops on a machine that has none."""
    made = here(ranks, interface)
    assert made.commands == (
        (
            *RUNNER, f"--hostfile={FOLDER}/deepspeed.hostfile", "--num_nodes=1", f"--num_gpus={ranks}",
            "--master_addr=127.0.0.1", "--master_port=29500", "--no_ssh_check", "--no_local_rank",
            "--module", "vitscale.worker", str(FOLDER),
        ),
    )  # fmt: skip
    assert made.files == (("deepspeed.hostfile", f"localhost slots={ranks}\n"),)
    assert made.environment == {"DS_ENV_FILE": os.devnull}
    assert (made.drop_variables, made.kill_at_once, made.per_host) == ((), False, False)


def test_one_host_that_is_this_machine_needs_no_ssh() -> None:
    assert replace(here(2, on=(Host(socket.gethostname()),)), hosts=()) == here(2)


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (8, 1), (2, 4)])
@pytest.mark.parametrize("interface", [None, "eth0"])
def test_on_named_hosts(nodes: int, ranks: int, interface: str | None) -> None:
    made = launch(DeepSpeed(), world(nodes, ranks), hosts(nodes), folder=PLAIN_FOLDER, interface=interface)
    assert made.commands == (
        (
            *RUNNER, f"--hostfile={PLAIN_FOLDER}/deepspeed.hostfile", f"--num_nodes={nodes}", f"--num_gpus={ranks}",
            "--master_addr=node0", "--master_port=29500", "--launcher=pdsh", "--force_multi", "--no_local_rank",
            "--module", "vitscale.worker", str(PLAIN_FOLDER),
        ),
    )  # fmt: skip
    assert made.files == (("deepspeed.hostfile", "".join(f"node{n} slots={ranks}\n" for n in range(nodes))),)
    assert made.drop_variables == ("MLFLOW", "MV2", "NCCL", "PYTHON", "UCX")
    assert made.environment == {"DS_ENV_FILE": os.devnull}
    assert (made.kill_at_once, made.per_host) == (True, False)


def test_deepspeed_knows_every_option_and_exports_no_variable_that_we_do_not_know_of() -> None:
    """Asked of DeepSpeed itself, without starting a rank."""
    several = launch(DeepSpeed(), world(2, 2), hosts(2), folder=PLAIN_FOLDER)
    given = {*options(here(1).commands[0]), *options(several.commands[0])}
    assert len(given) == 10
    helped = help_of(
        PYTHON, "-c",
        "import sys; from deepspeed.launcher import runner\n"
        "from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator\n"
        "from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator\n"
        "print('exported:', *sorted({*runner.EXPORT_ENVS, *CPU_Accelerator.export_envs(None),"
        " *CUDA_Accelerator.export_envs(None)}))\n"
        "print('file:', runner.DEEPSPEED_ENVIRONMENT_NAME)\n"
        "runner.parse_args(['--help'])",
    )  # fmt: skip
    assert [option for option in given if option not in helped] == []
    assert "exported: MLFLOW MV2 NCCL PYTHON UCX\n" in helped
    assert several.drop_variables == ("MLFLOW", "MV2", "NCCL", "PYTHON", "UCX")


@pytest.mark.parametrize("bad", ["a space", "$(id)", "semi;colon", "quo'te", "wild*", "ümlaut", "line\nbreak", "%h"])
def test_what_a_remote_shell_would_act_on_is_refused(
    pdsh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """DeepSpeed quotes nothing, and pdsh puts the host's name in for %h."""
    with pytest.raises(RequestError, match="unquoted into a line for remote shells") as caught:
        launch(DeepSpeed(), world(2, 1), hosts(2), folder=tmp_path / bad)
    assert "cannot be used: the run's folder '" in str(caught.value)
    assert launch(DeepSpeed(), world(1, 1), folder=tmp_path / bad), "no shell stands between on one machine"

    (tmp_path / bad).mkdir()
    monkeypatch.chdir(tmp_path / bad)
    with pytest.raises(RequestError, match=r"the working folder .* has characters other than letters"):
        usable_launcher("deepspeed", world(2, 1), hosts(2))
    assert usable_launcher("deepspeed", world(1, 1))
    monkeypatch.chdir(tmp_path)
    assert usable_launcher("deepspeed", world(2, 1), hosts(2))

    monkeypatch.setattr(sys, "executable", f"/opt/{bad}/python")
    with pytest.raises(RequestError, match=r"the interpreter .*; change it, or use launcher = 'torchrun'"):
        usable_launcher("deepspeed", world(2, 1), hosts(2))


def test_named_hosts_need_pdsh_and_ssh(pdsh: Path) -> None:
    assert usable_launcher("deepspeed", world(2, 1), hosts(2))
    with pytest.raises(RequestError, match="pdsh cannot reach 'fe80::1' by an address with colons"):
        usable_launcher("deepspeed", world(2, 1), (Host("node0"), Host("fe80::1")))
    for name in ("ssh", "pdsh"):
        (pdsh / name).unlink()
        with pytest.raises(RequestError, match=f"{name} not found: install it, or use launcher = 'torchrun'"):
            usable_launcher("deepspeed", world(2, 1), hosts(2))
    assert usable_launcher("deepspeed", world(1, 2))


def test_a_choice_of_gpus_that_deepspeed_would_ignore_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(
        RequestError, match=r"replaces CUDA_VISIBLE_DEVICES=2,3 by 0,1; unset it and set it in \[launch"
    ):
        usable_launcher("deepspeed", world(1, 2))
    for harmless in ("0,1", "0,1,2,3", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", harmless)
        assert usable_launcher("deepspeed", world(1, 2))
