"""Pods of a Kubernetes JobSet or TrainJob as hosts: each serves commands itself, and none needs ssh.

The manifest (`pod_manifests`) gives each pod a hostfile of all, and the container's program (`vitscale.runner.pod`)
runs the driver in the first pod and a shell for it in the others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitscale.errors import RequestError
from vitscale.launchers.base import Spawn
from vitscale.machine.batch_systems import KUBERNETES, PODS_VARIABLE
from vitscale.machine.hardware import Machine
from vitscale.machine.hosts import Host, read_hostfile
from vitscale.processes.pod_shell import TORCHRUN_PREFIX, call_command
from vitscale.schedulers.base import Placement, described
from vitscale.schedulers.hostfile import Hostfile
from vitscale.study.sections import NodeSection
from vitscale.trial.trial import World

KEY_FILE_VARIABLE = "VITSCALE_PODS_KEY_FILE"
"""Variable of the driver with the path of the key by which it starts commands on other pods."""
_SSH_LAUNCHERS = ("deepspeed", "mpirun")
"""Launchers that reach other hosts by ssh themselves."""


def _refusal(launcher: str, world: World) -> str | None:
    """Return why a launcher cannot start a world on pods; None where it can."""
    if launcher == "srun":
        return "srun takes its hosts from Slurm, and pods are none; use torchrun"
    if launcher in _SSH_LAUNCHERS and world.nodes > 1:
        return f"{launcher} reaches other hosts by ssh, and pods serve none; use torchrun"
    return None


class Pods(Hostfile):
    """The pods of the set around this process, which is the first pod's driver."""

    title = "this set of pods"

    def refuses(self, launcher: str, world: World) -> str | None:
        """Refuse launchers that reach hosts by srun or ssh."""
        return _refusal(launcher, world)

    def limited_to(self, hosts: Sequence[Host]) -> Pods:
        """Return a placement with only these pods."""
        return Pods(tuple(hosts), self._machine)

    def adapt(self, spawn: Spawn) -> Spawn:
        """Wrap the command of each other pod, and keep from torchrun what Kubeflow sets for all pods of a TrainJob."""
        adapted = super().adapt(spawn)
        return replace(adapted, drop_variables=(*adapted.drop_variables, TORCHRUN_PREFIX))

    def reach(self, host: str, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the argv that runs `argv` on a pod, in this process's working folder."""
        return call_command(os.environ.get(KEY_FILE_VARIABLE, ""), host, argv)

    def reach_anywhere(self, host: str, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the argv that runs `argv` on a pod; all pods have the working folder, which is in their volume."""
        return self.reach(host, argv)


class PlannedPods(Placement):
    """The pods of a set that a manifest will ask for: they can be planned for, and nothing is started on them."""

    title = "a set of pods"
    needs_manifest = True

    def __init__(self, machine: Machine | None) -> None:
        """`machine`: what one pod will offer; None: the study does not say."""
        self._machine = machine

    def machine(self) -> Machine:
        """Return the machine that [node] describes.

        Raises:
            RequestError: there is no such section.
        """
        if self._machine is None:
            raise RequestError(
                f"launch.scheduler = '{KUBERNETES}' plans for pods on nodes that this machine knows nothing of",
                next_step="Describe one of them: add [node] with cores = 64 and gpus = 8, to the study or to the "
                "site file",
            )
        return self._machine

    def slots(self) -> int | None:
        """Return the ranks that a pod takes: one on each GPU; None without GPUs, where cores limit them."""
        return len(self.machine().gpus) or None

    def hosts(self, world: World) -> tuple[Host, ...]:
        """Return names that stand for the pods, whose own follow from the set's name."""
        return tuple(Host(f"pod{number}.invalid") for number in range(world.nodes))

    def refuses(self, launcher: str, world: World) -> str | None:
        """Refuse launchers that reach hosts by srun or ssh."""
        return _refusal(launcher, world)

    def adapt(self, spawn: Spawn) -> Spawn:
        """Return the commands of all pods: each runs in its own."""
        return spawn

    def pool(self) -> tuple[Host, ...]:
        """Refuse to name pods that do not run yet.

        Raises:
            RequestError: always; runs side by side, and checks, need hosts that are there.
        """
        raise RequestError(
            "pods are known in their cluster alone: neither measure.parallel_runs nor `vitscale check` can use them "
            "from here",
            next_step="Leave out measure.parallel_runs; start the pods with the manifest that `vitscale plan STUDY "
            "--commands` prints",
        )


def make_pods(node: NodeSection | None) -> Pods | PlannedPods:
    """Return the pods of the set around this process; outside any, pods to plan for.

    Raises:
        RequestError: the set's hostfile cannot be read.
    """
    hostfile = os.environ.get(PODS_VARIABLE)
    if not hostfile:
        return PlannedPods(described(node))
    return Pods(read_hostfile(Path(hostfile)), described(node))
