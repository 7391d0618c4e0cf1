"""The measurements of `vitscale check`: a line for each of a rank's, and the stored check made of them. On disk:

FOLDER/ID.json          one check, written whole; FOLDER is RESULTS/checks, or the user's own folder of checks
FOLDER/.ID/             while it is measured: request.json, rank-K.jsonl

Format history (`FORMAT`):
  3  the oldest that is read (`OLDEST_FORMAT`): the first program of results format 11 wrote it.
  4  what groups of ranks that share a model exchange: CheckRequest.exchanges, empty in format 3, and groups by it.
  5  which vitscale: CheckRecord.vitscale, null in older formats; "vitscale's measuring code" among the versions of
     a rank's environment.

A reader accepts the formats from `OLDEST_FORMAT` to its own; others are refused by name (`store.formats`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from vitscale.base.files import read_record
from vitscale.errors import StoreError, shown
from vitscale.store.formats import ReadableFormats, refuse_unreadable
from vitscale.store.lines import (
    IfThere,
    RankLine,
    RankLines,
    Record,
    first_reason,
    is_beyond_64_bits,
    rank_files,
    read_lines,
)
from vitscale.store.records import EndLine, Environment, ErrorLine, GpuSamples, MatmulLine
from vitscale.store.writing import write_record
from vitscale.trial.parallel import RankLayout
from vitscale.trial.trial import DeviceName, Precision, Trial, World

FORMAT = 5
OLDEST_FORMAT = 3
READABLE_CHECKS = ReadableFormats("check", OLDEST_FORMAT, FORMAT)

# Bounded, so that arithmetic on what a file says never overflows.
CheckSeconds = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]
MOST_RATE = 1e24
Rate = Annotated[float, Field(ge=0.0, le=MOST_RATE, allow_inf_nan=False)]
CheckCount = Annotated[int, Field(ge=0, lt=2**31)]
Bytes = Annotated[int, Field(ge=0, lt=2**60)]

SplitGroup = Literal["replicas", "sequence", "tensor", "pipeline"]
"""Groups under [parallel]: ranks that exchange along one of its axes, all such groups at once. replicas: ranks among
which gradients are averaged, data x sequence."""
SPLIT_GROUPS: tuple[SplitGroup, ...] = get_args(SplitGroup)
CheckGroup = Literal["inside nodes", "across nodes", "all ranks"] | SplitGroup
"""inside nodes: the ranks of each host, all hosts at once. across nodes: one rank of each host."""
GROUPS: tuple[CheckGroup, ...] = ("inside nodes", "across nodes", "all ranks", *SPLIT_GROUPS)
Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv", "rdma"
]
"""The last four come from others' tools; send_recv also from pipeline stages, each of which sends to the next at once.
rdma: one host writes to another without any library."""
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
SWEPT: tuple[Operation, ...] = OPERATIONS[:4]
"""Operations that `vitscale check` sweeps."""
CheckStage = Literal["facts", "network", "join", "collectives", "matmul", "compute", "loader", "disk"]
STAGES: tuple[CheckStage, ...] = ("facts", "network", "join", "matmul", "compute", "collectives", "loader", "disk")


class SweepPlan(Record):
    """How collectives are swept."""

    sizes_bytes: tuple[Annotated[int, Field(ge=4, le=2**33)], ...]
    """In rising order."""
    longest_seconds: Annotated[float, Field(gt=0.0, le=1e4)]
    """Sizes stop growing where one operation would take longer than this."""
    seconds_per_size: Annotated[float, Field(gt=0.0, le=1e4)]
    """Time spent measuring each size, roughly; each is measured at least three times."""


class CheckRequest(Record):
    """request.json in a check's folder: what every rank is to do."""

    format: int = FORMAT
    world: World
    device: DeviceName
    precision: Precision
    sweep: SweepPlan
    compute_repeats: Annotated[int, Field(ge=1, le=1000)]
    compute_seconds: Annotated[float, Field(gt=0.0, le=1e4)]
    """Length of each repeat."""
    loader_seconds: Annotated[float, Field(gt=0.0, le=1e4)]
    limits: dict[CheckStage, CheckSeconds]
    """How long each stage may take; what is not done by then is skipped, and the next stage begins."""
    trial: Trial | None = None
    """A trial of the study, for its loader; null without a study."""
    dataset_fingerprint: str | None = None
    exchanges: dict[SplitGroup, tuple[Operation, ...]] = Field(default={})
    """Operations by which ranks that share the trial's model exchange; empty where none do, or no such groups exist."""

    def split_groups(self, name: SplitGroup) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each group of this kind in this world."""
        if name not in self.exchanges or self.trial is None:
            return ()
        layout = RankLayout.of(self.world.size, self.trial.parallel)
        return layout.groups("data", "sequence") if name == "replicas" else layout.groups(name)

    @property
    def longest_seconds(self) -> float:
        """The sum of all stages' limits."""
        return sum(self.limits.values())


class Interface(Record):
    """A network interface, as the kernel reports it."""

    name: str
    kind: Literal["ethernet", "infiniband", "loopback", "other"]
    up: bool
    speed_mbit: CheckCount | None
    """Null where it is not known: for links that are down, and virtual interfaces, whose speed the kernel makes up."""
    addresses: tuple[str, ...]
    """IPv4 with its prefix length ("10.0.0.1/24"), then IPv6."""


class InfinibandPort(Record):
    """A port of an InfiniBand or RoCE adapter, from /sys/class/infiniband."""

    name: str
    active: bool
    rate: str
    """In the kernel's words: "100 Gb/sec (4X EDR)"."""


class StageLine(RankLine):
    """The end of one stage of a rank."""

    kind: Literal["stage"] = "stage"
    name: CheckStage
    ending: Literal["done", "failed", "timeout", "skipped"]
    seconds: CheckSeconds
    reason: str = ""
    """Why it is not done; empty where it is."""


class FactsLine(RankLine):
    """Facts about a rank's host, taken before it talks to any other rank."""

    kind: Literal["facts"] = "facts"
    format: int = FORMAT
    rank: CheckCount
    world_size: CheckCount
    local_rank: CheckCount
    environment: Environment
    host_cores: CheckCount
    """Cores this rank could have used before it was pinned: those of all ranks of its host together."""
    cpu_throttled_seconds: CheckSeconds | None
    """Seconds for which the CPU controller has held this rank back so far; null without a quota."""
    hostname_addresses: tuple[str, ...]
    """Addresses of the host's own name, in order; empty where it resolves to nothing."""
    interfaces: tuple[Interface, ...]
    infiniband: tuple[InfinibandPort, ...]


class ReachLine(RankLine):
    """Whether this rank reaches rank 0 over TCP, at the address and port where ranks meet."""

    kind: Literal["reach"] = "reach"
    address: str
    port: CheckCount
    seconds: CheckSeconds | None
    """Duration of the connection that succeeded; null where none did."""
    reason: str = ""
    """Why no connection succeeded."""


class CollectiveLine(RankLine):
    """One collective at one size, as one rank timed it."""

    kind: Literal["collective"] = "collective"
    group: CheckGroup
    operation: Operation
    ranks: Annotated[int, Field(ge=2, lt=2**31)]
    """Number of ranks that took part."""
    size_bytes: Annotated[int, Field(ge=1, lt=2**60)]
    """Size by nccl-tests' convention: what a rank holds of the whole. For an all-gather, what each receives in all."""
    calls: Annotated[int, Field(ge=1, lt=2**31)]
    """Calls in each repeat, one right after the other."""
    seconds: Annotated[tuple[CheckSeconds, ...], Field(min_length=1)]
    """Seconds of one call in each repeat."""


class ComputeLine(RankLine):
    """A fixed piece of training repeated on all ranks at once: shows which rank is slow."""

    kind: Literal["compute"] = "compute"
    work: str
    """The piece in words; rates compare only where it is the same."""
    pieces_per_second: Annotated[tuple[Rate, ...], Field(min_length=1)]
    """Rate in each repeat."""
    cpu_throttled_share: CheckSeconds | None
    """Core-seconds per second that the CPU controller held back; null without a quota."""
    cpu_share: CheckSeconds | None = None
    """CPU seconds that this process got, per second."""
    gpu: GpuSamples | None
    gpu_reason: str | None
    """Why `gpu` is null."""


class LoaderLine(RankLine):
    """The data loader of a study by itself: no model takes its batches."""

    kind: Literal["loader"] = "loader"
    images_per_second: Rate
    workers: CheckCount
    batch: CheckCount


class DiskLine(RankLine):
    """The disk that holds the results, as one rank sees it."""

    kind: Literal["disk"] = "disk"
    free_bytes: Bytes
    record_seconds: Annotated[tuple[CheckSeconds, ...], Field(min_length=1)]
    """Seconds to append one record and force it to disk."""
    record_bytes: Bytes
    seen_seconds: CheckSeconds | None
    """Seconds until this rank saw a file of rank 0; null where it did not, or ranks had not found each other."""
    seen_reason: str = ""
    """Why `seen_seconds` is null."""


class CheckedRank(RankLines):
    """All that one rank measured; null or missing where it did not get so far."""

    rank: CheckCount
    facts: FactsLine | None = None
    reach: ReachLine | None = None
    collectives: tuple[CollectiveLine, ...] = ()
    matmul: MatmulLine | None = None
    compute: ComputeLine | None = None
    loader: LoaderLine | None = None
    disk: DiskLine | None = None
    stages: tuple[StageLine, ...] = ()
    error: ErrorLine | None = None
    """What ended the rank outside all stages."""
    ended: Annotated[bool, IfThere(EndLine)] = False
    broken: tuple[str, ...] = ()
    """Lines that could not be read, and why."""

    @property
    def last_sign(self) -> str:
        """How far the rank has come, in words."""
        return f"last stage {self.stages[-1].name}" if self.stages else "nothing recorded"


class HostAnswer(Record):
    """Whether a host answered before anything was started on it."""

    name: str
    address: str | None
    """What its name resolves to here; null where it resolves to nothing."""
    seconds: CheckSeconds | None
    """Seconds until it answered; null where it did not."""
    reason: str = ""
    """Why it did not answer."""
    sees_folder: bool | None = None
    """Whether the check's folder is seen there under the same path; null where it was not asked."""


class CollectiveFit(Record):
    """`seconds = latency_seconds + bus_bytes / bandwidth_bytes_per_second` of one operation in one group.

    `bus_bytes` is the size times `bus_factor`.
    """

    group: CheckGroup
    operation: Operation
    ranks: CheckCount
    latency_seconds: CheckSeconds
    bandwidth_bytes_per_second: Rate
    largest_size_bytes: Bytes
    largest_seconds: CheckSeconds
    worst_residual: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    """Largest distance between a measured time and the fit, as a share of that time."""
    latency_known: bool = True
    """False where only one size, or a stream of messages, was measured."""


def bus_factor(operation: Operation, ranks: int) -> float:
    """Return the factor by which size / time is multiplied to give the bandwidth of the slowest link ("bus").

    So it compares across numbers of ranks n. By nccl-tests, doc/PERFORMANCE.md: 2 (n-1)/n for all-reduce, (n-1)/n for
    all-gather, reduce-scatter and all-to-all, 1 for what passes each link once.
    """
    if operation in ("broadcast", "reduce", "send_recv", "rdma"):
        return 1.0
    passes = 2 if operation == "all_reduce" else 1  # a reduce-scatter and then an all-gather
    return passes * (ranks - 1) / ranks


class LoaderNeed(Record):
    """What a model needs from its loader."""

    images_per_second: Rate
    """Rate that one rank needs."""
    source: Literal["run", "arithmetic"]
    """run: a stored run of the same model reached it. arithmetic: the measured matrix-multiply rate / the model's
    FLOPs, which training never quite reaches."""
    described: str


class CheckRecord(Record):
    """One check as it is stored: what was measured, and what was fitted to it."""

    format: int = FORMAT
    id: str
    started_unix_seconds: Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]
    wall_seconds: CheckSeconds
    request: CheckRequest
    launcher: str
    scheduler: str
    hosts: tuple[HostAnswer, ...]
    """Hosts that the check was asked to use, by name; empty where it ran on the driver's own host."""
    ranks: tuple[CheckedRank, ...]
    fits: tuple[CollectiveFit, ...]
    loader_need: LoaderNeed | None
    ending: Literal["ended", "stopped", "not started"]
    """How the ranks' processes ended: by themselves, stopped by the driver, or never started."""
    ending_reason: str = ""
    """Why not all ranks reached their end; empty where they did."""
    guilty_rank: CheckCount | None = None
    """The rank that was lost first, where that is known."""
    log: str = ""
    """The end of what the launcher and the ranks printed; empty unless a rank is missing."""
    imported: str = ""
    """The tool and the files it was imported from; empty where `vitscale check` measured it."""
    vitscale: str | None = None
    """The program that wrote it (`base.program.identity`); null in older formats."""


_CHECK_FILE = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}\.json")


@dataclass(frozen=True)
class Checks:
    """The checks of a folder, newest first, and the files that were left out, with the reasons."""

    records: tuple[CheckRecord, ...]
    problems: tuple[str, ...]


def check_folder(results: Path | None) -> Path:
    """Return the folder of checks: of a results folder, or the user's own (`$XDG_DATA_HOME`, else `~/.local/share`)."""
    if results is not None:
        return results / "checks"
    data_home = os.environ.get("XDG_DATA_HOME", "")
    # By the XDG base directory specification, a relative path is ignored.
    base = Path(data_home) if data_home.startswith("/") else Path.home() / ".local" / "share"
    return base / "vitscale" / "checks"


def write_check(folder: Path, record: CheckRecord) -> Path:
    """Write one check whole and return its file.

    Raises:
        StoreError: the folder cannot be written.
    """
    path = folder / f"{record.id}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_record(path, record.model_dump_json(indent=1))
    except OSError as error:
        message = f"the check cannot be written to {shown(str(folder))}: {error.strerror or error}"
        raise StoreError(message, next_step="Give a folder you may write to with -o") from None
    return path


def read_check(path: Path) -> CheckRecord:
    """Read one check back, strictly.

    Raises:
        StoreError: it cannot be read, is of another format, or not what this program writes.
    """
    try:
        text = read_record(path)
        content = refuse_overflowing_numbers(json.loads(text))
        if isinstance(content, dict) and "trials" in content:
            message = f"{path} is the record of a study, and of no check"
            raise StoreError(message, next_step="Give a file of RESULTS/checks, which vitscale check writes")
        refuse_unreadable(content, READABLE_CHECKS, path)
        return CheckRecord.model_validate_json(text)
    except (OSError, RecursionError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {first_reason(error)}") from error


def load_checks(folder: Path) -> Checks:
    """Read all checks of a folder (see `check_folder`), the newest first; none where the folder is missing."""
    try:
        files = [path for path in folder.iterdir() if _CHECK_FILE.fullmatch(path.name)]
    except OSError:
        files = []
    files.sort(reverse=True)  # names begin with the time of the start
    records: list[CheckRecord] = []
    problems: list[str] = []
    for path in files:
        try:
            records.append(read_check(path))
        except StoreError as error:
            problems.append(f"{error}: left out")
    return Checks(tuple(records), tuple(problems))


def latest(
    results: Path | None,
    hosts: tuple[str, ...] | None = None,
    is_suitable: Callable[[CheckRecord], bool] = lambda _: True,
) -> CheckRecord | None:
    """Return the newest readable check that is suitable, from a results folder or else from the user's own folder.

    Return None where there is none.

    Args:
        results: the folder given with -o; None: the user's own folder of checks alone.
        hosts: only a check whose ranks ran on exactly these hosts, by the names they call themselves or those of the
            hostfile.
        is_suitable: only a check for which this is true.
    """
    folders = [check_folder(results)] if results is None else [check_folder(results), check_folder(None)]
    for folder in folders:
        for record in load_checks(folder).records:
            is_of_hosts = hosts is None or _ran_on(record, set(hosts))
            if is_of_hosts and is_suitable(record):
                return record
    return None


def _ran_on(record: CheckRecord, hosts: set[str]) -> bool:
    """Whether a check's ranks ran on exactly these hosts; a hostfile may have other names for them, or addresses."""
    recorded_names = {rank.facts.environment.host for rank in record.ranks if rank.facts is not None}
    hostfile_names = set()
    for host in record.hosts:
        has_answered = host.seconds is not None
        is_folder_missing = host.sees_folder is False  # None: it was not asked
        if has_answered and not is_folder_missing:
            hostfile_names.add(host.name)
    return bool(recorded_names) and hosts in (recorded_names, hostfile_names)


_LARGEST_NUMBER = 1e100
"""Numbers below this are read: sums and products of such numbers do not overflow."""


def read_checked_ranks(folder: Path, world_size: int) -> tuple[CheckedRank, ...]:
    """Read all that ranks of a check have written so far, by rank; broken lines are named in `broken`."""
    return tuple(read_checked_rank(path) for rank, path in rank_files(folder).items() if rank < world_size)


def read_checked_rank(path: Path) -> CheckedRank:
    """Read one rank's lines. A line that is broken, or cut off, is named and left out."""
    return read_lines(path, CheckedRank, lambda raw, _: refuse_overflowing_numbers(json.loads(raw)))


def refuse_overflowing_numbers(content: Any) -> Any:
    """Return a JSON value unless it holds a number that this program never writes, at any depth.

    These are NaN, infinity, floats of `_LARGEST_NUMBER` or more, and integers beyond 64 bits.

    Raises:
        ValueError: it holds one.
    """
    to_visit = [content]
    while to_visit:
        value = to_visit.pop()
        if isinstance(value, dict):
            to_visit += value.values()
        elif isinstance(value, list):
            to_visit += value
        elif is_beyond_64_bits(value) or _overflows(value):
            raise ValueError(f"no number of vitscale's: {shown(value)}")
    return content


def _overflows(value: object) -> bool:
    """Whether a value is a float so large that sums and products with it overflow, or NaN."""
    return isinstance(value, float) and not abs(value) < _LARGEST_NUMBER
