"""deepspeed: DeepSpeed's own launcher, over pdsh and ssh where hosts are named."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitscale.base.interpreter import ModuleCommand, parse_module_command, python_module
from vitscale.errors import RequestError, shown
from vitscale.launchers.base import Launcher, Spawn, hostfile, hosts_refusal
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.trial.trial import World

_HOSTFILE = "deepspeed.hostfile"
_EXPORTED_PREFIXES = ("MLFLOW", "MV2", "NCCL", "PYTHON", "UCX")
"""Prefixes of variables that DeepSpeed writes into the remote shells' line (deepspeed/launcher/runner.py,
EXPORT_ENVS, and `export_envs` of its accelerators). Ranks have theirs from the run's launch file."""
_UNQUOTED = "DeepSpeed writes it unquoted into a line for remote shells (deepspeed/launcher/multinode_runner.py)"
_REMEDY = "change it, or use launcher = 'torchrun'"
# As in Python's shlex.quote, without %: pdsh replaces %h, %n and %u.
_UNCHANGED_BY_SHELLS = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


class DeepSpeed(Launcher):
    """`python -m deepspeed.launcher.runner`, which is what `deepspeed` runs, under the ranks' own interpreter."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """Return the command of one runner, which starts a launcher of its own on each host.

        On this machine it starts it as a child, on other hosts by pdsh over ssh.

        Raises:
            RequestError: remote shells would change the interpreter, the run's folder or an argument.
        """
        rank = parse_module_command(spawn.rank_command)
        is_local = _is_this_machine_alone(spawn.hosts)
        if not is_local:
            _refuse_words_that_shells_change(rank, spawn.run_folder)
        route = _LOCAL_ROUTE if is_local else _route_over_ssh(spawn.hosts)
        runner_options = _runner_options(world, spawn, route)
        rank_words = ["--module", rank.module, *rank.arguments]
        command = python_module("deepspeed.launcher.runner", *runner_options, *rank_words, interpreter=rank.interpreter)
        return replace(
            spawn,
            commands=(command,),
            files=((_HOSTFILE, hostfile(world, route.host_names)),),
            # A .deepspeed_env in the home or the working folder would be written into the remote shell's line too.
            environment={"DS_ENV_FILE": os.devnull},
            drop_variables=() if is_local else _EXPORTED_PREFIXES,
            # On SIGTERM the runner ends all of DeepSpeed's launchers on these hosts: `pkill -f` by module name.
            kill_at_once=not is_local,
        )

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Return why DeepSpeed's launcher cannot start this world; None where it can.

        Named hosts are reached by pdsh, and everything passed to it must survive their shells unquoted.
        """
        reason = hosts_refusal(world, hosts) or _visible_devices_refusal(world)
        if reason is not None:
            return reason
        if _is_this_machine_alone(hosts):
            return None
        missing_programs = [program for program in ("pdsh", "ssh") if shutil.which(program) is None]
        if missing_programs:
            return f"{missing_programs[0]} not found: install it, or use launcher = 'torchrun'"
        names_with_colons = [host.name for host in hosts if ":" in host.name]
        if names_with_colons:
            return f"pdsh cannot reach '{names_with_colons[0]}' by an address with colons; give the host a name"
        reason = changed_by_shells([("the interpreter", sys.executable), ("the working folder", str(Path.cwd()))])
        return f"{reason}; {_UNQUOTED}; {_REMEDY}" if reason else None


class _Route(NamedTuple):
    """How DeepSpeed's runner reaches the hosts on which ranks start."""

    host_names: list[str]
    """Names for its hostfile, one for each node."""
    master_address: str
    """Address of the first host, where all ranks meet."""
    options: list[str]
    """Options that make the runner take this route."""


_LOCAL_ROUTE = _Route(["localhost"], master_address="127.0.0.1", options=["--no_ssh_check"])
"""The route to this machine alone: the runner starts a child, and is not to try ssh."""


def _route_over_ssh(hosts: tuple[Host, ...]) -> _Route:
    """Return the route to named hosts, by pdsh; also where there is only one, which the runner would take for local."""
    names = [host.name for host in hosts]
    return _Route(names, master_address=names[0], options=["--launcher=pdsh", "--force_multi"])


def _runner_options(world: World, spawn: Spawn, route: _Route) -> list[str]:
    """Return the options of DeepSpeed's runner, which come before the module that ranks run."""
    return [
        # Without a hostfile the runner counts GPUs, and stops where there are none.
        f"--hostfile={spawn.run_folder / _HOSTFILE}",
        f"--num_nodes={world.nodes}",
        f"--num_gpus={world.ranks_per_node}",
        f"--master_addr={route.master_address}",
        f"--master_port={spawn.master_port}",
        *route.options,
        "--no_local_rank",  # ranks know theirs by the environment, and take no such argument
    ]


def _is_this_machine_alone(hosts: tuple[Host, ...]) -> bool:
    """Whether no other host is named, so that nothing is reached by pdsh."""
    return not hosts or (len(hosts) == 1 and is_this_machine(hosts[0].name))


def _refuse_words_that_shells_change(rank: ModuleCommand, run_folder: Path) -> None:
    """Raise RequestError where a remote shell would change a word of the command of every rank."""
    words = [("the interpreter", rank.interpreter)]
    for word in (rank.module, *rank.arguments):
        words.append(("the run's folder" if word == str(run_folder) else "the ranks' argument", word))
    reason = changed_by_shells(words)
    if reason is not None:
        raise RequestError(f"launch.launcher = 'deepspeed' cannot be used: {reason}; {_UNQUOTED}; {_REMEDY}")


def _visible_devices_refusal(world: World) -> str | None:
    """Return why CUDA_VISIBLE_DEVICES is in the way; None where it is not.

    DeepSpeed always numbers its ranks' GPUs from 0, and would replace it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    deepspeed_devices = ",".join(map(str, range(world.ranks_per_node)))
    if not visible or f"{visible},".startswith(f"{deepspeed_devices},"):
        return None
    return (
        f"DeepSpeed's launcher replaces CUDA_VISIBLE_DEVICES={visible} by {deepspeed_devices}; "
        "unset it and set it in [launch.environment], which reaches the ranks, or use launcher = 'torchrun'"
    )


def changed_by_shells(words: Iterable[tuple[str, str]]) -> str | None:
    """Return a message on the first word that a shell would change; None where no word is changed.

    Args:
        words: (the word's name in the message, the word).
    """
    for name, word in words:
        if not _UNCHANGED_BY_SHELLS.fullmatch(word):
            return f"{name} {shown(word)} has characters other than letters, digits and _@+=:,./-"
    return None
