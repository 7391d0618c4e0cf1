"""Ends a laboratory: its processes, with them its namespaces, then its cgroups and its folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress

from vitscale.lab import entering, processes, quota
from vitscale.lab.state import PREFIX, Holder, folder_of, read


def take_down(name: str) -> bool:
    """Ends the lab of this name, however much of it is left; False where there was nothing.

    Raises:
        VitscaleError: a process or a cgroup was not gone after 10 s; the folder is kept, so that it can be tried again.
    """
    folder = folder_of(name)
    state = read(name)
    if state is not None:
        end_holders(state.holders)
    controller = quota.find_controller()
    if controller is not None:
        controller.remove(PREFIX + name)
    if not folder.exists():
        return False
    with suppress(FileNotFoundError):  # somebody else is ending it too
        shutil.rmtree(folder)
    return True


def end_holders(holders: Iterable[Holder]) -> None:
    """Ends them with everything in their namespaces, and returns when all are gone.

    Raises:
        VitscaleError: a process was not gone after 10 s.
    """
    processes.kill(one for holder in holders for one in (holder.first, holder.outside, *entering.waiting(holder.first)))
