"""deepspeed: DeepSpeed's own launcher, over pdsh and ssh where hosts are named."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from vitscale.base.interpreter import parse_module_command, python_module
from vitscale.errors import RequestError, shown
from vitscale.launchers.base import Launcher, Spawn, hostfile, lacking
from vitscale.machine.hosts import Host, is_this_machine
from vitscale.trial.trial import World

_HOSTFILE = "deepspeed.hostfile"
_EXPORTED = ("MLFLOW", "MV2", "NCCL", "PYTHON", "UCX")
"""Prefixes of variables that DeepSpeed writes into the remote shells' line (deepspeed/launcher/runner.py,
EXPORT_ENVS, and `export_envs` of its accelerators). Ranks have theirs from the run's launch file."""
_UNQUOTED = "DeepSpeed writes it unquoted into a line for remote shells (deepspeed/launcher/multinode_runner.py)"
_WAY_OUT = "change it, or use launcher = 'torchrun'"
# As in Python's shlex.quote, without %: pdsh replaces %h, %n and %u.
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


class DeepSpeed(Launcher):
    """`python -m deepspeed.launcher.runner`, which is what `deepspeed` runs, under the ranks' own interpreter."""

    def launch(self, world: World, spawn: Spawn) -> Spawn:
        """Return the command of one runner, which starts a launcher of its own on each host.

        On this machine it starts it as a child, on other hosts by pdsh over ssh.

        Raises:
            RequestError: remote shells would change the interpreter, the run's folder or an argument.
        """
        rank = parse_module_command(spawn.rank_command)
        here = _is_here(spawn.hosts)
        names = ["localhost"] if here else [host.name for host in spawn.hosts]
        options = [
            # Without a hostfile the runner counts GPUs, and stops where there are none.
            f"--hostfile={spawn.run_folder / _HOSTFILE}",
            f"--num_nodes={world.nodes}",
            f"--num_gpus={world.ranks_per_node}",
            f"--master_addr={'127.0.0.1' if here else names[0]}",
            f"--master_port={spawn.master_port}",
            *(["--no_ssh_check"] if here else ["--launcher=pdsh", "--force_multi"]),
            "--no_local_rank",
            *("--module", rank.module, *rank.arguments),
        ]
        if not here:
            folder = str(spawn.run_folder)
            words = [
                ("the run's folder" if word == folder else "the ranks' argument", word)
                for word in (rank.module, *rank.arguments)
            ]
            if reason := first_unfit([("the interpreter", rank.interpreter), *words]):
                what = f"launch.launcher = 'deepspeed' cannot be used: {reason}; {_UNQUOTED}; {_WAY_OUT}"
                raise RequestError(what)
        return replace(
            spawn,
            commands=(python_module("deepspeed.launcher.runner", *options, interpreter=rank.interpreter),),
            files=((_HOSTFILE, hostfile(world, names)),),
            # A .deepspeed_env in the home or the working folder would be written into the remote shell's line too.
            environment={"DS_ENV_FILE": os.devnull},
            drop_variables=() if here else _EXPORTED,
            # On SIGTERM the runner ends all of DeepSpeed's launchers on these hosts: `pkill -f` by module name.
            kill_at_once=not here,
        )

    def unfit(self, world: World, hosts: tuple[Host, ...]) -> str | None:
        """Return why DeepSpeed's launcher cannot start this world; None where it can.

        Named hosts are reached by pdsh, and everything passed to it must survive their shells unquoted.
        """
        if reason := lacking(world, hosts) or _other_gpus(world):
            return reason
        if _is_here(hosts):
            return None
        if missing := [program for program in ("pdsh", "ssh") if shutil.which(program) is None]:
            return f"{missing[0]} not found: install it, or use launcher = 'torchrun'"
        if colon := next((host.name for host in hosts if ":" in host.name), None):
            return f"pdsh cannot reach '{colon}' by an address with colons; give the host a name"
        reason = first_unfit([("the interpreter", sys.executable), ("the working folder", str(Path.cwd()))])
        return f"{reason}; {_UNQUOTED}; {_WAY_OUT}" if reason else None


def _is_here(hosts: tuple[Host, ...]) -> bool:
    return not hosts or (len(hosts) == 1 and is_this_machine(hosts[0].name))


def _other_gpus(world: World) -> str | None:
    """Return why CUDA_VISIBLE_DEVICES is in the way; None where it is not.

    DeepSpeed always numbers its ranks' GPUs from 0, and would replace it.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    given = ",".join(map(str, range(world.ranks_per_node)))
    if not seen or f"{seen},".startswith(f"{given},"):
        return None
    return (
        f"DeepSpeed's launcher replaces CUDA_VISIBLE_DEVICES={seen} by {given}; "
        "unset it and set it in [launch.environment], which reaches the ranks, or use launcher = 'torchrun'"
    )


def first_unfit(values: Iterable[tuple[str, str]]) -> str | None:
    """Return a message on the first text that a shell would change; None where no text is changed.

    Args:
        values: (the text's name in the message, the text).
    """
    for what, text in values:
        if not _PLAIN.fullmatch(text):
            return f"{what} {shown(text)} has characters other than letters, digits and _@+=:,./-"
    return None
