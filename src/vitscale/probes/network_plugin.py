"""Finds the plug-in by which NCCL or RCCL uses a network that it does not know itself, such as Slingshot by libfabric.

Without it ranks exchange over TCP, and nothing says so but the library's own log.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitscale.store.checks import NetworkPlugin

_VARIABLE = "NCCL_NET_PLUGIN"
"""The variable that names the plug-in: a library, X for libnccl-net-X.so, or "none"."""
_LONGEST_SECONDS = 30.0
_OPEN_FIRST = """
import ctypes, sys
problems = []
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        problems.append(" ".join(str(error).split()))
    else:
        print(name)
        sys.exit(0)
print(problems[0])
sys.exit(1)
"""
"""A program that opens the first of some libraries that can be opened, and prints its name; else why not the first."""


def network_plugin(names: Sequence[str], torch_folder: Path, variables: Mapping[str, str]) -> NetworkPlugin:
    """Returns the plug-in that the library of collectives would find.

    It is opened in a process of its own, for it starts its network as it is opened. That the library finds it does not
    say that it takes it: it may be made for another release.

    Args:
        names: file names for which the library looks, in its order.
        torch_folder: folder of torch's libraries, where the one of collectives may lie, and looks beside itself.
        variables: this process's.
    """
    named = variables.get(_VARIABLE, "")
    if named.lower() == "none":
        return NetworkPlugin(name=None, problem=f"{_VARIABLE} = '{named}'")
    candidates = _candidates(names, named)
    beside_torch = [str(torch_folder / name) for name in candidates if (torch_folder / name).exists()]
    command = [sys.executable, "-I", "-c", _OPEN_FIRST, *candidates, *beside_torch]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return NetworkPlugin(name=None, problem=f"it cannot be looked for: {type(error).__name__}")
    answer = ended.stdout.strip()
    if ended.returncode == 0:
        return NetworkPlugin(name=Path(answer).name, problem=None)
    return NetworkPlugin(name=None, problem=answer or f"opening it ended with exit code {ended.returncode}")


def _candidates(names: Sequence[str], named: str) -> list[str]:
    """Returns what is opened, in order, where NCCL_NET_PLUGIN is `named`; "" where it is not set."""
    if not named:
        return list(names)
    if named.endswith(".so") or "/" in named:
        return [named, *names]
    return [*(name.replace("-net.so", f"-net-{named}.so") for name in names), *names]
