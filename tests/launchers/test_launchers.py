from __future__ import annotations

import pytest

from launching import FOLDER, PYTHON, hosts, launch, world
from vitscale.errors import RequestError
from vitscale.launchers import LAUNCHERS, usable_launcher
from vitscale.machine.hosts import Host


def test_local_starts_any_number_of_ranks_here_and_nowhere_else() -> None:
    """The ranks' own arguments follow: `python -m vitscale.processes.local_ranks` starts what `python -m` would."""
    here = launch(LAUNCHERS["local"], world(1, 3))
    argv = (PYTHON, "-P", "-m", "vitscale.processes.local_ranks", "3", "29500", "vitscale.worker", str(FOLDER))
    assert (here.commands, here.per_host, here.from_prepared) == ((argv,), False, True)
    with pytest.raises(RequestError, match="it starts ranks on this machine alone, and hosts are named; use launcher"):
        usable_launcher("local", world(1, 2), hosts(1))


@pytest.mark.parametrize("launcher", ["local", "torchrun", "deepspeed"])
def test_what_needs_only_our_own_packages_starts_one_rank(launcher: str) -> None:
    assert usable_launcher(launcher, world(1, 1)) is LAUNCHERS[launcher]


@pytest.mark.parametrize(
    ("launcher", "ranks", "nodes", "said"),
    [
        (
            "aprun",
            1,
            1,
            "unknown launcher 'aprun'. Did you mean 'mpirun'? Valid: deepspeed, local, mpirun, srun, torchrun",
        ),
        ("torchrum", 1, 1, "Did you mean 'torchrun'?"),
        ("in-process", 1, 1, "unknown launcher 'in-process'. Valid: deepspeed, local, mpirun, srun, torchrun. Write "),
        ("local", 1, 2, "2 nodes need 2 hosts, and none are named; name them with launch.hostfile = 'FILE'"),
        ("torchrun", 1, 2, "2 nodes need 2 hosts, and none are named; name them with launch.hostfile = 'FILE'"),
        ("deepspeed", 1, 2, "2 nodes need 2 hosts, and none are named"),
    ],
)
def test_what_cannot_start_is_refused(launcher: str, ranks: int, nodes: int, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        usable_launcher(launcher, world(nodes, ranks))
    assert said in str(caught.value)


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize("name", ["localhost", "127.0.1.1", "::1"])
def test_several_hosts_need_names_that_mean_the_same_everywhere(launcher: str, name: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is another machine on each of 2 hosts; name it in the hostfile"):
        usable_launcher(launcher, world(2, 1), (Host(name), Host("node1")))
    assert usable_launcher(launcher, world(1, 1), (Host("localhost"),))


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("mpirun", "mpirun not found: install Open MPI, or use launcher = 'torchrun'"),
        ("srun", "srun not found: use it on a Slurm cluster, or use launcher = 'torchrun'"),
    ],
)
def test_a_program_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch, launcher: str, said: str) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RequestError, match=said):
        usable_launcher(launcher, world(1, 1))
