"""What every batch system reads from [slurm] alike: settings by a job's size, its nodes, container and time limit."""

from __future__ import annotations

from vitscale.errors import RequestError, shown
from vitscale.machine.hosts import Host
from vitscale.schedulers.containers import RankContainer
from vitscale.schedulers.host_lists import expand_host_list
from vitscale.study.sections import JobFields, SlurmSection

WARNING_SECONDS = 60
"""Seconds before its time limit at which a job is warned, at the latest."""
KEYS_BY_SIZE = tuple(JobFields.model_fields)
"""Keys of [slurm] that an entry of slurm.sizes may replace: "partition", "time" and others."""


def settings_for(slurm: SlurmSection, nodes: int) -> SlurmSection:
    """Return [slurm] for worlds of so many nodes: with what the entry of slurm.sizes for them replaces.

    That is the entry with the largest `min_nodes` that the world reaches; a key that the entry leaves out stays.
    """
    fitting = [size for size in slurm.sizes if size.min_nodes <= nodes]
    if not fitting:
        return slurm
    size = max(fitting, key=lambda candidate: candidate.min_nodes)
    replaced = {key: getattr(size, key) for key in KEYS_BY_SIZE if getattr(size, key) is not None}
    return slurm.model_copy(update=replaced)


def container_of(slurm: SlurmSection) -> RankContainer | None:
    """Return the container that [slurm] asks for; None where it asks for none.

    Raises:
        RequestError: a mount has another form.
    """
    return RankContainer.from_section(slurm, "slurm", without_gpus=slurm.gpus == "none")


def named_nodes(slurm: SlurmSection, nodes: int) -> list[str]:
    """Return the names of a world's nodes: the first ones of slurm.nodelist without those of slurm.exclude.

    A batch system would refuse, or not use, a longer list than the job has nodes. Empty where no nodes are named.

    Raises:
        RequestError: one of the two is no list of nodes, or too few are left.
    """
    excluded = excluded_nodes(slurm)
    if slurm.nodelist is None:
        return []
    names = [name for name in _node_names(slurm.nodelist, "slurm.nodelist") if name not in excluded]
    if len(names) < nodes:
        remaining = " without those of slurm.exclude" if excluded else ""
        raise RequestError(
            f"slurm.nodelist names {len(names)} nodes{remaining}, and a trial needs {nodes}",
            next_step="Name more nodes, or use fewer ranks in scaling.gpus",
        )
    return names[:nodes]


def excluded_nodes(slurm: SlurmSection) -> list[str]:
    """Return the names in slurm.exclude; empty where it is not set.

    Raises:
        RequestError: it is no list of nodes.
    """
    return [] if slurm.exclude is None else _node_names(slurm.exclude, "slurm.exclude")


def _node_names(text: str, key: str) -> list[str]:
    """Return the names in a list of nodes. Args: key: "slurm.nodelist", for the message.

    Raises:
        RequestError: the text is no such list.
    """
    try:
        return expand_host_list(text)
    except ValueError as error:
        raise RequestError(
            f"{key} is {shown(text)}: {error}",
            valid=["node1,node2", "node[1-4,7]"],
            next_step="Name the nodes by commas between, with at most one bracket in each",
        ) from None


def planned_hosts(slurm: SlurmSection, nodes: int) -> tuple[Host, ...]:
    """Return the hosts of a job that has not begun: the nodes that [slurm] names, else names that stand for them.

    Stand-ins are `node1.invalid`, `node2.invalid`: names under `.invalid` (RFC 6761) lead nowhere.

    Raises:
        RequestError: [slurm] names fewer nodes.
    """
    names = named_nodes(slurm, nodes)
    if not names:
        names = [f"node{number}.invalid" for number in range(1, nodes + 1)]
    return tuple(Host(name) for name in names)


def warning_seconds(limit_seconds: int | None) -> int:
    """Return the seconds before a job's time limit at which to warn it.

    Short jobs are warned later, so that no job is warned as it begins. Args: limit_seconds: None where there is none.
    """
    if limit_seconds is None:
        return WARNING_SECONDS
    return max(1, min(WARNING_SECONDS, limit_seconds // 4))


def limit_seconds(slurm: SlurmSection) -> int | None:
    """Return the time limit of jobs in seconds; None where `slurm.time` sets none."""
    return None if slurm.time is None else time_span_seconds(slurm.time)


def time_span_seconds(span: str) -> int:
    """Return the seconds of a time span in Slurm's notation.

    Example: `90` is 90 minutes, `1:30` a minute and a half, `1-2` a day and two hours.
    """
    days, dash, clock = span.rpartition("-")  # "1-02:30" has days, "90" has none
    counts = [int(count) for count in clock.split(":")]
    begins_with_hours = bool(dash) or len(counts) == 3
    unit_seconds = (3600, 60, 1) if begins_with_hours else (60, 1)
    clock_seconds = sum(count * seconds for count, seconds in zip(counts, unit_seconds, strict=False))
    return int(days or 0) * 86_400 + clock_seconds
