"""Findings of a check about links against the hardware that is there: NVLink, PCIe, peer access, InfiniBand adapters.

A bus bandwidth is held against what the links carry in one direction (`link_rates`), by nccl-tests' convention the same
for any number of ranks. The causes come from NVML, the kernel, variables, and NCCL's own log of the check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vitscale.machine.gpu_links import SWITCH
from vitscale.preflight.fit import LARGE_MESSAGE_BYTES
from vitscale.preflight.link_rates import (
    NvlinkGeneration,
    adapter_bytes_per_second,
    nvlink_board,
    nvlink_generation,
    pcie_bytes_per_second,
    pcie_generation,
)
from vitscale.preflight.verdict import concerning, finding, host_of, hosts_of, note, ranks_named, warning
from vitscale.present.document import About, Finding
from vitscale.present.units import counted, listed, rate
from vitscale.store.checks import CheckedRank, CheckGroup, CheckRecord, CollectiveFit, GpuLinks, InfinibandPort

_NVLINK_SHARE = 0.5
"""Share of NCCL's own rate of NVLink that an all-reduce should reach; well set up hosts reach 0.9 and more."""
_PCIE_SHARE = 0.25
"""Share of a PCIe link's rate that an all-reduce should reach: 0.6 to 0.8 from GPU to GPU, less across sockets."""
_ADAPTER_SHARE = 0.5
"""Share of an adapter's rate that an all-reduce across nodes should reach; well set up ones reach 0.9."""
_LONG_MESSAGE_SECONDS = 0.05
"""A bandwidth is judged where a message took this long, or was as large as `LARGE_MESSAGE_BYTES`: smaller ones show
latency."""
_MOST_FACTS_NAMED = 4


def _gpu_ranks_by_host(record: CheckRecord) -> dict[str, list[CheckedRank]]:
    """Return host -> its ranks that use NCCL, with their facts."""
    by_host: dict[str, list[CheckedRank]] = {}
    for rank in record.ranks:
        host = host_of(rank)
        is_on_nccl = rank.facts is not None and rank.facts.environment.backend == "nccl"
        if host is not None and is_on_nccl:
            by_host.setdefault(host, []).append(rank)
    return by_host


def _gpu_name(rank: CheckedRank) -> str:
    return rank.facts.environment.device.name if rank.facts is not None else ""


def _links(rank: CheckedRank) -> GpuLinks:
    """Return the links of a rank's GPU; those of the general record where a check of an older format has no more."""
    if rank.facts is None:
        return GpuLinks()
    if rank.facts.gpu_links is not None:
        return rank.facts.gpu_links
    settings = rank.facts.environment.device.settings
    if settings is None:
        return GpuLinks()
    return GpuLinks.model_construct(
        pcie_generation=settings.pcie_generation, pcie_width=settings.pcie_width, nvlinks_up=settings.nvlinks
    )


def _setting(rank: CheckedRank, variable: str) -> str:
    """Return the value of a variable on a rank's host; empty where it is not set."""
    return rank.facts.environment.settings.get(variable, "") if rank.facts is not None else ""


def _all_reduce_fit(record: CheckRecord, group: CheckGroup) -> CollectiveFit | None:
    """Return the fit of an all-reduce in a group; None where there is none, or only of small messages."""
    for fit in record.fits:
        if fit.group == group and fit.operation == "all_reduce":
            is_large = fit.largest_size_bytes >= LARGE_MESSAGE_BYTES or fit.largest_seconds >= _LONG_MESSAGE_SECONDS
            return fit if is_large else None
    return None


def nvlinks_down(record: CheckRecord) -> Iterable[Finding]:
    """Warns of GPUs with fewer NVLinks up than their board has, or than the other GPUs of that type have."""
    for ranks in _gpu_ranks_by_host(record).values():
        if len(ranks) < 2:  # a single GPU that was rented may have its links to others cut
            continue
        lacking = [rank for rank in ranks if _missing_nvlinks(rank, ranks) > 0]
        if not lacking:
            continue
        first = lacking[0]
        up = _links(first).nvlinks_up or 0
        yield warning(
            kind="nvlink-down",
            message=f"{ranks_named([rank.rank for rank in lacking])} ({listed(hosts_of(lacking))}): {up} of "
            f"{up + _missing_nvlinks(first, ranks)} NVLinks of {_gpu_name(first)} are up",
            advice="nvidia-smi nvlink --status, dmesg (Xid 74) and systemctl status nvidia-fabricmanager show why; "
            "have the host looked at",
            about=concerning(lacking),
        )


def _missing_nvlinks(rank: CheckedRank, ranks: Sequence[CheckedRank]) -> int:
    """Return how many NVLinks of a rank's GPU are not up; 0 where that is not known.

    `ranks`: those of its host.
    """
    links_up = _links(rank).nvlinks_up
    if links_up is None:
        return 0
    board = nvlink_board(_gpu_name(rank))
    if board is not None:
        return max(0, board.links - links_up)
    links_of_like_gpus = [_links(other).nvlinks_up or 0 for other in ranks if _gpu_name(other) == _gpu_name(rank)]
    return max(links_of_like_gpus) - links_up


class _InsideLink(NamedTuple):
    """The link by which the GPUs of a host reach each other."""

    described: str
    """ "18 NVLinks by NCCL's reckoning (peak 450 GB/s)", "PCIe 4 x16"."""
    bytes_per_second: float
    """What an all-reduce could reach on it."""
    expected_share: float
    """The share of it that is asked for."""

    @property
    def least_bytes_per_second(self) -> float:
        return self.expected_share * self.bytes_per_second


def slow_inside_nodes(record: CheckRecord) -> Iterable[Finding]:
    """Warns of an all-reduce inside hosts far below what the NVLinks, or the PCIe links, of their GPUs carry."""
    fit = _all_reduce_fit(record, "inside nodes")
    if fit is None:
        return
    ranks_by_host = {host: ranks for host, ranks in _gpu_ranks_by_host(record).items() if len(ranks) > 1}
    links = [link for link in map(_inside_link, ranks_by_host.values()) if link is not None]
    if not links:
        return
    link = min(links, key=lambda link: link.least_bytes_per_second)
    bandwidth = fit.bandwidth_bytes_per_second
    if bandwidth >= link.least_bytes_per_second:
        return
    share = bandwidth / link.bytes_per_second
    yield warning(
        kind="slow-inside-nodes",
        message=f"all-reduce inside nodes reaches {rate(bandwidth, 'B/s')}, {share:.2f} of the "
        f"{rate(link.bytes_per_second, 'B/s')} of {link.described}",
        advice=_advice_inside(ranks_by_host),
        about=About(hosts=tuple(ranks_by_host)),
    )


def _advice_inside(ranks_by_host: Mapping[str, Sequence[CheckedRank]]) -> str:
    """Return the first cause that is known of a slow all-reduce inside hosts; else where to look."""
    for ranks in ranks_by_host.values():
        obstacle = _peer_obstacle(ranks)
        if obstacle is not None:
            return obstacle.advice
        if any(rank.nccl is not None and rank.nccl.channels.get("SHM") for rank in ranks):
            return (
                "NCCL goes through the host's memory (SHM in its log): see that every rank sees all GPUs of its host "
                "(CUDA_VISIBLE_DEVICES), nvidia-smi topo -p2p r, and ACS and IOMMU of the BIOS"
            )
    return (
        "See nvidia-smi topo -m, nvidia-smi topo -p2p r and nvidia-smi nvlink --status, NCCL_P2P_DISABLE and "
        "NCCL_P2P_LEVEL, ACS and IOMMU of the BIOS, and what else uses the host"
    )


def _inside_link(ranks: Sequence[CheckedRank]) -> _InsideLink | None:
    """Return the link between the GPUs of a host's ranks: NVLink where it connects all of them, else PCIe.

    None where neither is known.
    """
    nvlink = _nvlink_between(ranks)
    return nvlink if nvlink is not None else _pcie_between(ranks)


def _nvlink_between(ranks: Sequence[CheckedRank]) -> _InsideLink | None:
    """Return the NVLinks of the rank that has the fewest to others; None where they do not connect all ranks."""
    if not _are_connected(ranks):
        return None
    links = [_nvlinks_of_rank(rank, ranks) for rank in ranks]
    known = [link for link in links if link is not None]
    if len(known) < len(ranks):
        return None
    return min(known, key=lambda link: link.bytes_per_second)


def _nvlinks_of_rank(rank: CheckedRank, ranks: Sequence[CheckedRank]) -> _InsideLink | None:
    """Return a rank's NVLinks that lead to switches or to other ranks; None where it has none."""
    links = _links(rank)
    count = len(_neighbours_among(rank, ranks)) if links.nvlink_neighbours else links.nvlinks_up
    if not count:
        return None
    generation: NvlinkGeneration | None = nvlink_generation(_gpu_name(rank), links.nvlink_generation)
    if generation is None:
        return None
    peak = rate(count * generation.peak_bytes_per_second, "B/s")
    described = f"{counted(count, 'NVLink')} by NCCL's reckoning (peak {peak})"
    return _InsideLink(described, count * generation.nccl_bytes_per_second, _NVLINK_SHARE)


def _neighbours_among(rank: CheckedRank, ranks: Sequence[CheckedRank]) -> list[str]:
    """Return the neighbours of a rank's NVLinks that are switches or the GPUs of these ranks, once for each link."""
    addresses = {_links(other).pci_address for other in ranks}
    return [neighbour for neighbour in _links(rank).nvlink_neighbours if neighbour in addresses | {SWITCH}]


def _are_connected(ranks: Sequence[CheckedRank]) -> bool:
    """Whether NVLinks lead from every rank to every other one, over switches or over other ranks' GPUs.

    True where it is not known where the links lead.
    """
    if not all(_links(rank).nvlink_neighbours for rank in ranks):
        return True
    unreached = {rank.rank: {_links(rank).pci_address, *_neighbours_among(rank, ranks)} for rank in ranks[1:]}
    reached = {_links(ranks[0]).pci_address, *_neighbours_among(ranks[0], ranks)}
    has_grown = True
    while unreached and has_grown:
        adjacent = [number for number, addresses in unreached.items() if reached & addresses]
        for number in adjacent:
            reached |= unreached.pop(number)
        has_grown = bool(adjacent)
    return not unreached


def _pcie_between(ranks: Sequence[CheckedRank]) -> _InsideLink | None:
    """Return the slowest PCIe link of a host's ranks; None where one is not known."""
    slowest: _InsideLink | None = None
    for rank in ranks:
        links = _links(rank)
        bytes_per_second = pcie_bytes_per_second(links.pcie_generation, links.pcie_width)
        if bytes_per_second is None:
            return None
        if slowest is None or bytes_per_second < slowest.bytes_per_second:
            described = f"PCIe {links.pcie_generation} x{links.pcie_width}"
            slowest = _InsideLink(described, bytes_per_second, _PCIE_SHARE)
    return slowest


class _PeerObstacle(NamedTuple):
    """What keeps the GPUs of a host from each other's memory."""

    cause: str
    advice: str
    is_avoidable: bool
    """Whether the hardware could do better."""


def peer_access_off(record: CheckRecord) -> Iterable[Finding]:
    """Warns of hosts whose GPUs cannot read each other's memory; a note where the hardware cannot do it."""
    hosts_by_obstacle: dict[_PeerObstacle, list[str]] = {}
    for host, ranks in _gpu_ranks_by_host(record).items():
        obstacle = _peer_obstacle(ranks) if len(ranks) > 1 else None
        if obstacle is not None:
            hosts_by_obstacle.setdefault(obstacle, []).append(host)
    for obstacle, hosts in hosts_by_obstacle.items():
        yield finding(
            "warning" if obstacle.is_avoidable else "note",
            kind="peer-access-off",
            message=f"GPUs of {listed(hosts)} exchange through the host's memory: {obstacle.cause}",
            advice=obstacle.advice,
            about=About(hosts=tuple(hosts)),
        )


def _peer_obstacle(ranks: Sequence[CheckedRank]) -> _PeerObstacle | None:
    """Return what keeps the GPUs of a host's ranks from each other's memory; None where nothing is known to."""
    first = ranks[0]
    disable = _setting(first, "NCCL_P2P_DISABLE")
    if disable not in ("", "0"):
        return _PeerObstacle(f"NCCL_P2P_DISABLE = {disable}", "Unset NCCL_P2P_DISABLE", is_avoidable=True)
    level = _setting(first, "NCCL_P2P_LEVEL")
    if level.upper() in ("LOC", "0"):
        return _PeerObstacle(f"NCCL_P2P_LEVEL = {level}", "Unset NCCL_P2P_LEVEL", is_avoidable=True)
    status = _refused_peer_status(ranks)
    if status is not None:
        has_nvlinks = any(_links(rank).nvlinks_up for rank in ranks)
        is_by_setting = "driver setting" in status
        return _PeerObstacle(
            f"peer access is off ({status})",
            "nvidia-smi topo -p2p r shows the pairs; see the driver's settings, and ACS, IOMMU and Resizable BAR of "
            "the BIOS",
            is_avoidable=has_nvlinks or is_by_setting,
        )
    problems = [problem for rank in ranks if rank.nccl is not None for problem in rank.nccl.problems]
    if problems:
        return _PeerObstacle(
            f"NCCL says: {problems[0]}", "nvidia-smi topo -p2p r; see ACS and IOMMU of the BIOS", is_avoidable=True
        )
    return None


def _refused_peer_status(ranks: Sequence[CheckedRank]) -> str | None:
    """Return why a rank's GPU may not read that of another rank of its host; None where all may, or it is not known."""
    addresses = {_links(rank).pci_address for rank in ranks}
    for rank in ranks:
        for address, status in _links(rank).peers.items():
            if address in addresses and status not in ("ok", "unknown"):
                return status
    return None


def _active_ports(ranks: Sequence[CheckedRank]) -> list[InfinibandPort]:
    """Return the active ports of the host of these ranks that are as fast as its fastest."""
    facts = ranks[0].facts
    ports = [port for port in facts.infiniband if port.active] if facts is not None else []
    fastest = max((adapter_bytes_per_second(port.rate) or 0.0 for port in ports), default=0.0)
    return [port for port in ports if fastest > 0 and adapter_bytes_per_second(port.rate) == fastest]


def _infiniband_hosts(record: CheckRecord) -> dict[str, list[CheckedRank]]:
    """Return host -> ranks of those with an active port, where there are several hosts on NCCL."""
    ranks_by_host = _gpu_ranks_by_host(record)
    if len(ranks_by_host) < 2:
        return {}
    return {host: ranks for host, ranks in ranks_by_host.items() if _active_ports(ranks)}


def network_over_sockets(record: CheckRecord) -> Iterable[Finding]:
    """Warns of hosts with an active InfiniBand or RoCE port where NCCL's log says that it takes TCP sockets."""
    hosts = []
    for host, ranks in _infiniband_hosts(record).items():
        disable = _setting(ranks[0], "NCCL_IB_DISABLE")
        networks = {rank.nccl.network for rank in ranks if rank.nccl is not None}
        if "Socket" in networks and disable in ("", "0"):  # else `infiniband-unused` says so
            hosts.append(host)
    if not hosts:
        return
    port = _active_ports(_infiniband_hosts(record)[hosts[0]])[0]
    yield warning(
        kind="network-over-sockets",
        message=f"{listed(hosts)}: NCCL talks over TCP sockets, and the adapter {port.name} ({port.rate}) is active",
        advice="See that libibverbs and the network's NCCL plugin are on LD_LIBRARY_PATH, in a container too, that "
        "/dev/infiniband is there, and that NCCL_NET and NCCL_IB_HCA are right",
        about=About(hosts=tuple(hosts)),
    )


def no_gpu_direct(record: CheckRecord) -> Iterable[Finding]:
    """Warns of hosts where adapters do not read GPU memory, by NCCL's log; a note where only a module is missing."""
    hosts_by_cause: dict[str, list[str]] = {}
    hosts_by_slow_adapters: dict[str, list[str]] = {}
    hosts_without_module: list[str] = []
    for host, ranks in _infiniband_hosts(record).items():
        log = _NetworkLog.of(ranks)
        if log.is_through_host_memory:
            hosts_by_cause.setdefault(_cause_of_no_gpu_direct(ranks, log), []).append(host)
        elif log.adapters_without_gpu_direct:
            hosts_by_slow_adapters.setdefault(listed(log.adapters_without_gpu_direct), []).append(host)
        elif not log.is_known and _lacks_gpu_direct_module(ranks):
            hosts_without_module.append(host)
    for cause, hosts in hosts_by_cause.items():
        yield warning(
            kind="no-gpu-direct",
            message=f"{listed(hosts)}: adapters do not read GPU memory ({cause}), so that all traffic between hosts "
            "takes the host's memory",
            advice="sudo modprobe nvidia_peermem, or the open GPU kernel modules with a kernel from 5.12 on (dma-buf); "
            "unset NCCL_NET_GDR_LEVEL; switch ACS off",
            about=About(hosts=tuple(hosts)),
        )
    for adapters, hosts in hosts_by_slow_adapters.items():
        yield warning(
            kind="no-gpu-direct",
            message=f"{listed(hosts)}: NCCL's log has GPU Direct RDMA disabled for {adapters}, which ranks use, so "
            "that what these adapters carry takes the host's memory",
            advice="Leave them out with NCCL_IB_HCA, or load the driver that the other adapters have",
            about=About(hosts=tuple(hosts)),
        )
    if hosts_without_module:
        yield note(
            kind="no-gpu-direct",
            message=f"{listed(hosts_without_module)}: nvidia_peermem is not loaded; adapters then read GPU memory only "
            "by dma-buf",
            advice="NCCL_DEBUG=INFO shows it: look for GDRDMA; else sudo modprobe nvidia_peermem",
            about=About(hosts=tuple(hosts_without_module)),
        )


def _cause_of_no_gpu_direct(ranks: Sequence[CheckedRank], log: _NetworkLog) -> str:
    """Return why the adapters of these ranks' host do not read GPU memory, as far as it is known.

    Args:
        ranks: those of the host.
        log: theirs, together.
    """
    level = _setting(ranks[0], "NCCL_NET_GDR_LEVEL")
    if level:
        return f"NCCL_NET_GDR_LEVEL = {level}"
    if _lacks_gpu_direct_module(ranks):
        return "nvidia_peermem is not loaded"
    if log.adapters_without_gpu_direct:
        return f"NCCL's log has GPU Direct RDMA disabled for {listed(log.adapters_without_gpu_direct)}"
    return "no GDRDMA in NCCL's log"


def _lacks_gpu_direct_module(ranks: Sequence[CheckedRank]) -> bool:
    """Whether none of the modules is loaded on the host of these ranks; False where that is not known."""
    facts = ranks[0].facts
    return facts is not None and facts.gpu_direct_modules == ()


class _NetworkLog(NamedTuple):
    """What the logs of a host's ranks say of the way to other hosts."""

    direct: int
    """Connections by which adapters read GPU memory."""
    indirect: int
    """Connections through the host's memory."""
    adapters_without_gpu_direct: tuple[str, ...]
    """Adapters in use of which NCCL says that they do not read GPU memory, by name."""

    @classmethod
    def of(cls, ranks: Sequence[CheckedRank]) -> _NetworkLog:
        """Return the sums over the ranks that have a log of InfiniBand."""
        logs = [rank.nccl for rank in ranks if rank.nccl is not None and rank.nccl.network != "Socket"]
        slow_adapters: set[str] = set()
        for log in logs:
            slow_adapters |= set(log.adapters_in_use) & set(log.adapters_without_gpu_direct)
        return cls(
            direct=sum(log.channels.get("NET/GDRDMA", 0) for log in logs),
            indirect=sum(log.channels.get("NET", 0) for log in logs),
            adapters_without_gpu_direct=tuple(sorted(slow_adapters)),
        )

    @property
    def is_known(self) -> bool:
        return self.direct + self.indirect > 0

    @property
    def is_through_host_memory(self) -> bool:
        """Whether all connections to other hosts go through the host's memory."""
        return self.indirect > 0 and self.direct == 0


def adapters_unused(record: CheckRecord) -> Iterable[Finding]:
    """Warns of hosts where NCCL takes less than half of the adapters that its ranks could use."""
    hosts_by_fact: dict[str, list[str]] = {}
    for host, ranks in _infiniband_hosts(record).items():
        active = {port.name.partition(":")[0]: port for port in _active_ports(ranks)}
        usable = min(len(active), len(ranks))
        taken = _taken_adapters(ranks, list(active))
        if not taken or 2 * len(taken) >= usable:
            continue
        hca_setting = _setting(ranks[0], "NCCL_IB_HCA")
        cause = f" (NCCL_IB_HCA is '{hca_setting}')" if hca_setting else ""
        port_rate = next(iter(active.values())).rate
        fact = (
            f"{len(taken)} of {len(active)} active adapters of {port_rate}, {listed(taken)}{cause}, for "
            f"{counted(len(ranks), 'rank')}"
        )
        hosts_by_fact.setdefault(fact, []).append(host)
    for fact, hosts in hosts_by_fact.items():
        yield warning(
            kind="adapters-unused",
            message=f"{listed(hosts)}: NCCL takes {fact}",
            advice="Unset NCCL_IB_HCA, or name all adapters between the hosts in it; nvidia-smi topo -m shows which "
            "adapter is near which GPU",
            about=About(hosts=tuple(hosts)),
        )


def _taken_adapters(ranks: Sequence[CheckedRank], active: Sequence[str]) -> list[str]:
    """Return the active adapters that NCCL takes, by its log, else by NCCL_IB_HCA; empty where neither is known.

    `active`: their names without port, as "mlx5_0".
    """
    in_use: set[str] = set()
    for rank in ranks:
        for name in rank.nccl.adapters_in_use if rank.nccl is not None else ():
            in_use.update(part.partition(":")[0] for part in name.split("+"))
    logged = [name for name in active if name in in_use]
    if logged:
        return logged
    setting = _setting(ranks[0], "NCCL_IB_HCA")
    return [name for name in active if _allows_adapter(setting, name)] if setting else []


def _allows_adapter(setting: str, name: str) -> bool:
    """Whether NCCL_IB_HCA allows an adapter: "mlx5" prefixes, "=mlx5_0:1,mlx5_1" whole names, "^" all but these.

    Source: NCCL user guide, environment variables.
    """
    excludes = setting.startswith("^")
    word_list = setting.removeprefix("^")
    are_whole_names = word_list.startswith("=")
    words = [word.partition(":")[0] for word in word_list.removeprefix("=").split(",") if word]
    is_listed = name in words if are_whole_names else name.startswith(tuple(words))
    return is_listed != excludes


def slow_adapters(record: CheckRecord) -> Iterable[Finding]:
    """Warns of an all-reduce between hosts far below what their InfiniBand adapters carry."""
    ranks_by_host = _infiniband_hosts(record)
    if not ranks_by_host or len(ranks_by_host) < len(_gpu_ranks_by_host(record)):
        return
    adapter_rates = []
    total_rates = []
    for ranks in ranks_by_host.values():
        ports = _active_ports(ranks)
        adapter_rate = adapter_bytes_per_second(ports[0].rate) or 0.0
        adapter_rates.append(adapter_rate)
        total_rates.append(adapter_rate * min(len(ports), len(ranks)))
    yield from _slow_network(record, "across nodes", min(adapter_rates), "an adapter")
    inside = _all_reduce_fit(record, "inside nodes")
    possible = min(total_rates)
    if inside is not None and inside.bandwidth_bytes_per_second < possible:
        yield from _slow_network(record, "all ranks", inside.bandwidth_bytes_per_second, "the same inside nodes")
    else:
        yield from _slow_network(record, "all ranks", possible, "the adapters of a host")


def _slow_network(record: CheckRecord, group: CheckGroup, bytes_per_second: float, described: str) -> Iterable[Finding]:
    """Warn of an all-reduce in a group below `_ADAPTER_SHARE` of what it could reach."""
    fit = _all_reduce_fit(record, group)
    if fit is None or fit.bandwidth_bytes_per_second >= _ADAPTER_SHARE * bytes_per_second:
        return
    share = fit.bandwidth_bytes_per_second / bytes_per_second
    yield warning(
        kind="slow-link",
        message=f"all-reduce {group} reaches {rate(fit.bandwidth_bytes_per_second, 'B/s')}, {share:.2f} of the "
        f"{rate(bytes_per_second, 'B/s')} of {described}",
        advice="ib_write_bw between two hosts tells the network from NCCL; see ibstat for errors and the rate, and "
        "what else uses the network",
    )


def narrow_pcie(record: CheckRecord) -> Iterable[Finding]:
    """Warns of GPUs and adapters whose PCIe link has fewer lanes, or is slower, than they need; notes older slots."""
    narrow = [rank for rank in record.ranks if _has_narrow_pcie(_links(rank))]
    if narrow:
        links = _links(narrow[0])
        yield warning(
            kind="pcie-narrow",
            message=f"the PCIe link of {ranks_named([rank.rank for rank in narrow])} ({listed(hosts_of(narrow))}) has "
            f"{links.pcie_width} of {links.pcie_gpu_width} lanes",
            advice="nvidia-smi -q -d PCIE; have the card and its riser seated anew, and see the slot's setting in the "
            "BIOS",
            about=concerning(narrow),
        )
    in_older_slot = [rank for rank in record.ranks if _is_in_older_slot(_links(rank))]
    if in_older_slot:
        links = _links(in_older_slot[0])
        yield note(
            kind="pcie-narrow",
            message=f"the slot of {ranks_named([rank.rank for rank in in_older_slot])} "
            f"({listed(hosts_of(in_older_slot))}) allows PCIe {links.pcie_generation}, and the GPU "
            f"{links.pcie_gpu_generation}",
            advice="See the BIOS's setting of the slot (Gen5, Auto); it matters where GPUs exchange over PCIe, and for "
            "copies from the host",
            about=concerning(in_older_slot),
        )
    yield from _slow_adapter_slots(record)


def _slow_adapter_slots(record: CheckRecord) -> Iterable[Finding]:
    """Warn of adapters that are faster than their PCIe links."""
    facts_of_adapters: list[str] = []
    hosts: list[str] = []
    for host, ranks in _gpu_ranks_by_host(record).items():
        slow = [text for text in map(_slow_adapter_slot, _active_ports(ranks)) if text is not None]
        if slow:
            hosts.append(host)
            facts_of_adapters += [f"{host}: {text}" for text in slow]
    if hosts:
        yield warning(
            kind="pcie-narrow",
            message=f"adapters are faster than their PCIe links: {'; '.join(facts_of_adapters[:_MOST_FACTS_NAMED])}",
            advice="lspci -vv (LnkSta) shows it; have the adapter moved to a slot with more lanes",
            about=About(hosts=tuple(hosts)),
        )


def _has_narrow_pcie(links: GpuLinks) -> bool:
    """Whether a GPU uses fewer lanes than it and its slot have."""
    if not links.pcie_width or not links.pcie_gpu_width:
        return False
    return links.pcie_width < links.pcie_gpu_width


def _is_in_older_slot(links: GpuLinks) -> bool:
    """Whether a GPU could use a later generation of PCIe than its slot."""
    if not links.pcie_generation or not links.pcie_gpu_generation:
        return False
    return links.pcie_generation < links.pcie_gpu_generation


def _slow_adapter_slot(port: InfinibandPort) -> str | None:
    """Return "mlx5_0:1 at 50.0 GB/s on PCIe 4 x8, 15.8 GB/s"; None where the slot is fast enough, or not known."""
    generation = pcie_generation(port.pcie_speed)
    slot_rate = pcie_bytes_per_second(generation, port.pcie_width)
    port_rate = adapter_bytes_per_second(port.rate)
    if slot_rate is None or port_rate is None or slot_rate >= port_rate:
        return None
    slot = f"PCIe {generation} x{port.pcie_width}, {rate(slot_rate, 'B/s')}"
    return f"{port.name} at {rate(port_rate, 'B/s')} on {slot}"


def adapters_differ(record: CheckRecord) -> Iterable[Finding]:
    """Warns of adapters that are down, or slower, on some hosts and not on others."""
    ranks_by_host = _gpu_ranks_by_host(record)
    if len(ranks_by_host) < 2:
        return
    rates_by_port: dict[str, dict[str, str]] = {}
    for host, ranks in ranks_by_host.items():
        facts = ranks[0].facts
        for port in facts.infiniband if facts is not None else ():
            state = port.rate if port.active else "down"
            rates_by_port.setdefault(port.name, {})[host] = state
    differences = []
    for name, rate_by_host in rates_by_port.items():
        if len(set(rate_by_host.values())) > 1:
            states = [f"{state} on {host}" for host, state in rate_by_host.items()]
            differences.append(f"{name} is {listed(states, 4)}")
    if differences:
        yield warning(
            kind="adapters-differ",
            message=f"adapters are not alike on all hosts: {'; '.join(differences[:_MOST_FACTS_NAMED])}",
            advice="ibstat shows state and rate: have the cable, the switch's port or the adapter looked at; NCCL's "
            "rings go at the pace of the slowest host",
            about=About(hosts=tuple(ranks_by_host)),
        )
