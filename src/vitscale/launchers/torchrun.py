"""torchrun: PyTorch's own launcher, one agent per node."""

from __future__ import annotations

from dataclasses import replace

from vitscale.base.interpreter import parse_module_command, python_module
from vitscale.launchers.base import Launcher, Spawn
from vitscale.trial.trial import World

_RENDEZVOUS_SECONDS = 300
"""How long an agent waits for the others, which first import torch, perhaps all from one slow file server."""


class Torchrun(Launcher):
    """`python -m torch.distributed.run`, which is what `torchrun` runs, under the ranks' own interpreter.

    No restarts: a rank that fails ends the run, and the driver decides what comes next.
    """

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """Return the command of an agent for each node; on a single node the agent picks a free port by itself."""
        agents = tuple(self._agent_command(world, spawn, node) for node in range(world.nodes))
        return replace(spawn, commands=agents, per_host=bool(spawn.hosts))

    def _agent_command(self, world: World, spawn: Spawn, node: int) -> tuple[str, ...]:
        """Return the command of a node's agent. Several nodes meet by static rendezvous.

        In a static rendezvous node 0's agent is the store, and node K's ranks follow those of node K-1. torch's other
        rendezvous (c10d) ignores `--node-rank`, and each agent compares names to find out whether it is the store's
        host (torch 2.13, `c10d_rendezvous_backend.py`).
        """
        rank = parse_module_command(spawn.rank_command)
        if world.nodes == 1:
            rendezvous_options = ["--standalone"]
        else:
            rendezvous_options = [
                f"--nnodes={world.nodes}",
                f"--node-rank={node}",
                "--rdzv-backend=static",
                f"--rdzv-conf=timeout={_RENDEZVOUS_SECONDS}",
                f"--master-addr={spawn.hosts[0].name}",
                f"--master-port={spawn.master_port}",
            ]
        options = [*rendezvous_options, f"--nproc-per-node={world.ranks_per_node}", "--max-restarts=0"]
        program = ("-m", rank.module, *rank.arguments)
        return python_module("torch.distributed.run", *options, *program, interpreter=rank.interpreter)
