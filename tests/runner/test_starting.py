"""What every rank is told: whose settings are passed on, and where rank 0 and the driver are found."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from launching import BareLauncher, hosts, world
from processes import wait_until
from vitscale.errors import RequestError
from vitscale.launchers import LAUNCHERS, Spawn
from vitscale.machine.hosts import Host
from vitscale.processes import launch_file
from vitscale.processes.heartbeat_server import HeartbeatServer
from vitscale.processes.host_agent import processes_of_run
from vitscale.runner.one_run import _PASSED_ON_PREFIXES, launch_plan, start_ranks
from vitscale.schedulers import Hostfile, Job, LocalHost
from vitscale.study.sections import LaunchSection

ELSEWHERE = Host("198.51.100.7", 4)  # set aside for documentation (RFC 5737)


@pytest.fixture(autouse=True)
def bare_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bare` starts a rank by its own command."""
    monkeypatch.setitem(LAUNCHERS, "bare", BareLauncher())


def test_settings_of_libraries_are_passed_on_and_secrets_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """launch.json lies in the results, which are copied and shown around."""
    for name in os.environ:
        if name.startswith(_PASSED_ON_PREFIXES):
            monkeypatch.delenv(name)
    networks = {
        "FI_PROVIDER": "efa",
        "OFI_NCCL_PROTOCOL": "RDMA",
        "UCX_TLS": "rc",
        "SHARP_COLL_ENABLE_SAT": "1",
        "RCCL_MSCCL_ENABLE": "0",
        "HSA_ENABLE_SDMA": "0",
        "LD_LIBRARY_PATH": "/opt/amazon/efa/lib",
    }
    given = {"NCCL_DEBUG": "INFO", "HF_HOME": "/models", "OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "lo"} | networks
    kept = {"HF_TOKEN": "hf_1", "HF_HUB_TOKEN": "hf_2", "NCCL_SECRET": "x", "TORCH_API_KEY": "k", "HOME_PAGE": "h"}
    kept |= {"FI_PASSWORD": "f", "UCX_AUTH": "u", "FIX": "x", "LD_PRELOAD": "/x.so"}
    kept |= {"HF_PAT": "p", "DS_CRED": "c", "VITSCALE_PASSPHRASE": "s", "NCCL_MY_SECRETX": "x", "TORCH_PWD": "w"}
    apart = {"CUDA_VISIBLE_DEVICES": "3", launch_file.TOKEN_VARIABLE: "around"}
    for name, value in (given | kept | apart).items():
        monkeypatch.setenv(name, value)
    section = LaunchSection(interface="eth0", environment={"HF_HOME": "/mine", "COLOUR": "blue"})
    spawn = launch_plan(LocalHost(), section, "bare", world(1, 1), tmp_path, "platform")
    started = start_ranks(spawn, LocalHost(), section, environment={"OMP_NUM_THREADS": "2"})
    try:
        wait_until(lambda: started.exit_code is not None, "it ends")
    finally:
        started.end()
    written = launch_file.read(tmp_path)
    assert written is not None
    assert (
        written.environment
        == {
            "NCCL_DEBUG": "INFO",
            "NCCL_SOCKET_IFNAME": "eth0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "HF_HOME": "/mine",
            "COLOUR": "blue",
            "OMP_NUM_THREADS": "2",
        }
        | networks
    )
    assert written.token == started.token
    assert written.study_variables == ("HF_HOME", "COLOUR")
    assert len(written.token) == 32
    assert (written.driver_pid, written.host_id) == (os.getpid(), launch_file.host_id())
    assert written.lifeline == f"127.0.0.1:{started.heartbeats.port}"


@pytest.mark.parametrize(("of_driver", "of_ranks"), [({"PYTHONPATH": "/study"}, "/mine:/study"), ({}, "/mine")])
def test_the_study_s_search_path_comes_before_the_driver_s(
    tmp_path: Path, of_driver: dict[str, str], of_ranks: str
) -> None:
    section = LaunchSection(environment={"PYTHONPATH": "/mine"})
    spawn = launch_plan(LocalHost(), section, "bare", world(1, 1), tmp_path, "platform")
    start_ranks(spawn, LocalHost(), section, environment=of_driver).end()
    written = launch_file.read(tmp_path)
    assert written is not None
    assert written.environment["PYTHONPATH"] == of_ranks


def test_threads_are_not_set_by_a_variable() -> None:
    """Each rank has those that it is planned, and pinned, with: a variable of the study's own was dropped."""
    section = LaunchSection(environment={"OMP_NUM_THREADS": "7"})
    with pytest.raises(RequestError, match=r"sets OMP_NUM_THREADS, which .* Set launch.threads_per_rank instead"):
        launch_plan(LocalHost(), section, "local", world(1, 1), Path("/r"), "x")


@pytest.mark.parametrize("on", [hosts(2), (ELSEWHERE,)])
def test_a_run_and_its_tries_have_ports_of_their_own_below_those_of_connections(on: tuple[Host, ...]) -> None:
    """So have those of the same study in another folder: two drivers of it may start at the same time."""
    section = LaunchSection()
    runs = [
        Path(f"/{results}/0123456789ab-r{repeat}-a{attempt}")
        for results in ("mine", "yours")
        for repeat in range(3)
        for attempt in range(3)
    ]
    of = world(len(on), 1)
    ports = [launch_plan(Hostfile(on), section, "torchrun", of, run, "vitscale.worker").master_port for run in runs]
    assert ports == [launch_plan(Hostfile(on), section, "torchrun", of, run, "x").master_port for run in runs]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= port < 32_000 for port in ports)


def test_a_port_that_is_taken_here_is_left_out() -> None:
    section, run = LaunchSection(), Path("/r/0123456789ab-r0-a0")
    first = launch_plan(LocalHost(), section, "torchrun", world(1, 2), run, "x").master_port
    with socket.create_server(("", first)):
        assert launch_plan(LocalHost(), section, "torchrun", world(1, 2), run, "x").master_port > first
        two = Hostfile((ELSEWHERE, Host(socket.gethostname())))
        assert launch_plan(two, section, "torchrun", world(2, 1), run, "x").master_port > first


@pytest.mark.parametrize("name", ["nobody.invalid", "a..b"])
def test_a_host_that_cannot_be_found_is_named_and_nothing_listens_any_more(tmp_path: Path, name: str) -> None:
    section = LaunchSection()
    scheduler = Hostfile((Host(name),))
    spawn = launch_plan(scheduler, section, "bare", world(1, 1), tmp_path, "x")
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(RequestError, match=f"host {name} cannot be found: .*This machine must know the name"):
        start_ranks(spawn, scheduler, section, environment={})
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert not (tmp_path / launch_file.NAME).exists()


def test_what_cannot_be_started_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the first of two commands, whose second could not be."""
    tokens: list[str] = []
    begin = subprocess.Popen

    def second_fails(argv: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        tokens.append(env[launch_file.TOKEN_VARIABLE])
        if len(tokens) == 2:
            raise BlockingIOError("fork: Resource temporarily unavailable")
        return begin(argv, env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    token = secrets.token_hex(16)
    with closing(HeartbeatServer(token, "127.0.0.1")) as heartbeats, pytest.raises(BlockingIOError):
        Job(Spawn((("sleep", "600"),) * 2, tmp_path, token=token), heartbeats)
    assert tokens == [token] * 2
    assert not processes_of_run(token)
