from __future__ import annotations

import pytest

from launching import FOLDER, PYTHON, help_of, hosts, launch, options, world
from vitscale.launchers.torchrun import Torchrun

AGENT = (PYTHON, "-P", "-m", "torch.distributed.run")
RANK = ("--max-restarts=0", "-m", "vitscale.worker", str(FOLDER))


@pytest.mark.parametrize("ranks", [1, 8])
def test_one_node_stands_alone(ranks: int) -> None:
    for on in ((), hosts(1)):
        made = launch(Torchrun(), world(1, ranks), on)
        assert made.commands == ((*AGENT, "--standalone", f"--nproc-per-node={ranks}", *RANK),)
        assert made.per_host is bool(on)
        assert not made.files


@pytest.mark.parametrize(("nodes", "ranks"), [(8, 1), (2, 4)])
@pytest.mark.parametrize("interface", [None, "eth0"])
def test_several_nodes_have_an_agent_each_that_meets_on_the_first(
    nodes: int, ranks: int, interface: str | None
) -> None:
    made = launch(Torchrun(), world(nodes, ranks), hosts(nodes), interface=interface)
    assert made.per_host
    assert made.commands == tuple(
        (
            *AGENT,
            f"--nnodes={nodes}", f"--node-rank={node}", "--rdzv-backend=static", "--rdzv-conf=timeout=300",
            "--master-addr=node0", "--master-port=29500",
            f"--nproc-per-node={ranks}", *RANK,
        )
        for node in range(nodes)
    )  # fmt: skip


def test_torchrun_knows_every_option_it_is_given() -> None:
    """Asked of torch itself, without starting a rank."""
    one = launch(Torchrun(), world(1, 2)).commands[0]
    several = launch(Torchrun(), world(2, 2), hosts(2)).commands[0]
    given = {*options(one), *options(several)}
    assert len(given) == 9
    helped = help_of(*AGENT, "--help")
    assert [option for option in given if option not in helped] == []
