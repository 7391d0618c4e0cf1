"""Reads what others' tools measured of a network: nccl-tests and perftest's bandwidths, each as text or JSON.

The forms are those that the programs print: `writeResultHeader`, `writeBenchmarkLineBody` and `writeDeviceReport` in
src/util.cu of nccl-tests 2.17 and its older columns; `RESULT_FMT` and `REPORT_FMT` in src/perftest_parameters.h of
perftest 6, whose "MB/sec" are MiB too; `write_test_info_to_file` and `REPORT_FMT_JSON` there of `--out_json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitscale.errors import RequestError, shown
from vitscale.importers.contents import BrokenLines, LinkFormat, identified, lines, parse_seconds, parse_whole
from vitscale.store.checks import Operation
from vitscale.store.results import ImportedFile

_TESTS: Mapping[str, Operation] = {
    "all_reduce_perf": "all_reduce", "all_gather_perf": "all_gather", "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all", "broadcast_perf": "broadcast", "reduce_perf": "reduce", "sendrecv_perf": "send_recv",
}  # fmt: skip
_LABELLED = re.compile(r"^(\[\d+,\d+\]<std(out|err)>:|\s*\d{1,6}:\s)")
"""The rank label that mpirun or srun puts before a line."""
_RANK = re.compile(r"#\s+Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+\d+\s+on\s+(\S{1,255})\s+device\s")
_TEST = re.compile(r"\b(?<!\w)(" + "|".join(_TESTS) + r")(_mpi)?\b")
_TIMES = ("time", "cputime")
_USUAL_TIME = 5
"""The column of the out-of-place time in a table without a header."""
_LARGEST_JSON = 64 << 20
_PERFTEST = re.compile(r"^\s*(RDMA_Write|RDMA_Read|Send)\b.*\bBW Test\b")
_PERFTEST_JSON = re.compile(r'"test"\s*:\s*"(RDMA_Write|RDMA_Read|Send)_(Bidirectional_)?(Post_List_)?BW_Test"')
_UNITS = {"Gb/sec": 1e9 / 8, "MB/sec": 2.0**20, "MiB/sec": 2.0**20}
_LARGEST_SIZE = 2**59


@dataclass
class MeasuredLink:
    """One operation between the same ranks, as one file tells it."""

    operation: Operation
    hosts: tuple[str, ...]
    """Host name of each rank."""
    file: ImportedFile
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """Size in bytes (nccl-tests' convention) to seconds of a call, one for each time it was measured."""


def guessed(text: str) -> LinkFormat | None:
    """Which of the two programs printed this line; None for neither."""
    line = _LABELLED.sub("", text)
    if line.startswith(("# nThread", "# Using devices", "# nccl-tests", "# Collective test")) or _RANK.match(line):
        return "nccl-tests"
    return "perftest" if _PERFTEST.match(line) or _PERFTEST_JSON.search(line) else None


def read_nccl_tests(paths: Sequence[Path]) -> tuple[list[MeasuredLink], list[str]]:
    """What nccl-tests measured, and what could not be used.

    Raises:
        RequestError: a file does not tell its ranks, or which test it is of.
        StoreError: a file cannot be read.
    """
    links: list[MeasuredLink] = []
    problems: list[str] = []
    for path in paths:
        told = BrokenLines(path.name)
        document = _json(path, "nccl-tests", list)
        links += _of_text(path, told) if document is None else [_of_json(path, document, told)]
        problems += told.told()
    return [link for link in links if link.seconds], problems


def _of_text(path: Path, told: BrokenLines) -> Iterator[MeasuredLink]:
    """One link for each test whose output is in the file."""
    file = identified(path)
    test: str | None = None
    again: str | None = None
    """The same test, named once more after its table's beginning."""
    hosts: dict[tuple[int, int], str] = {}
    rows: list[tuple[int, list[str], bool]] = []
    time = _USUAL_TIME
    for number, raw, whole in lines(path):
        text = _LABELLED.sub("", raw).strip()
        if match := _TEST.search(text):
            if rows and test not in (None, match[1]) and "Collective test concluded" not in text:
                yield _link(path, file, test, hosts, rows, time, told)  # the next test is named
                hosts, rows = {}, []
            again = match[1] if rows and test == match[1] else None
            test = match[1]
        if match := _RANK.match(text):
            if rows:  # the next test began
                yield _link(path, file, test, hosts, rows, time, told)
                test, again, hosts, rows = again, None, {}, []
            hosts[int(match[2] or 0), int(match[1])] = match[3]
        elif text.startswith("#"):
            names = text.lstrip("# ").split()
            time = next((n for n, name in enumerate(names) if name in _TIMES and "size" in names), time)
            if "Collective test concluded" in text and rows:
                yield _link(path, file, test, hosts, rows, time, told)
                test, hosts, rows = None, {}, []
        elif text[:1].isdigit():
            rows.append((number, text.split(), whole))
    if rows or hosts:
        yield _link(path, file, test, hosts, rows, time, told)


def _link(
    path: Path,
    file: ImportedFile,
    test: str | None,
    hosts: Mapping[tuple[int, int], str],
    rows: Iterable[tuple[int, list[str], bool]],
    time: int,
    told: BrokenLines,
) -> MeasuredLink:
    link = MeasuredLink(_operation(path, test), _of_first_group(path, hosts), file)
    for number, cells, whole in rows:
        try:
            if not whole or len(cells) < time + 3:
                raise ValueError("the file ends within it" if not whole else f"{len(cells)} columns are too few")
            size = parse_whole(cells[0], 0, _LARGEST_SIZE)
            _add(link, size, parse_seconds(cells[time]) / 1e6)
        except ValueError as error:
            told.line(number, str(error), "broken" if whole else "cut-off")
    return link


def _add(link: MeasuredLink, size: int, seconds: float) -> None:
    if size > 0:  # an all-gather with less than a byte per rank sends nothing
        link.seconds.setdefault(size, []).append(seconds)


def _operation(path: Path, test: str | None) -> Operation:
    match = _TEST.search(path.name)
    name = test or (match[1] if match else None)
    if name is None:
        what = f"{shown(path.name)} does not say which test of nccl-tests it is of"
        raise RequestError(what, valid=_TESTS, next_step="Give the file the test's name: all_reduce_perf.txt")
    return _TESTS[name]


def _of_first_group(path: Path, hosts: Mapping[tuple[int, int], str]) -> tuple[str, ...]:
    """Hosts of the ranks that rank 0 works with: the table is about its group (NCCL_TESTS_SPLIT)."""
    by_rank = {rank: (group, host) for (group, rank), host in hosts.items()}
    own = [host for _, (group, host) in sorted(by_rank.items()) if group == by_rank[min(by_rank)][0]]
    if len(own) < 2:
        raise RequestError(
            f"{shown(path.name)} tells of {len(own)} ranks ('#  Rank 0 ... on HOST device 0'): a link needs two",
            next_step="Import the whole output of nccl-tests, with its header",
        )
    return tuple(own)


def _json(path: Path, program: str, results: type) -> Mapping[str, Any] | None:
    """The JSON report of `-J FILE` or `--out_json`, with results of type `results`; None where the file is not JSON."""
    for _, text, _ in lines(path):
        if not text.lstrip().startswith("{"):
            return None
        break
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError(f"it is larger than {_LARGEST_JSON >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("results"), results):
            raise ValueError("it holds no results")
    except (OSError, RecursionError, ValueError) as error:
        raise RequestError(f"{shown(path.name)} is no whole JSON report of {program}: {str(error)[:100]}") from None
    return content


def _of_json(path: Path, document: Mapping[str, Any], told: BrokenLines) -> MeasuredLink:
    config, args = document.get("config"), document.get("args")
    devices = config.get("devices") if isinstance(config, dict) else None
    hosts = {
        (device["group"], device["rank"]): device["hostname"][:255]
        for device in (devices if isinstance(devices, list) else ())
        if isinstance(device, dict)
        and isinstance(device.get("rank"), int)
        and isinstance(device.get("group"), int)
        and isinstance(device.get("hostname"), str)
    }
    match = _TEST.search(str(args[0])[-200:]) if isinstance(args, list) and args else None
    link = MeasuredLink(
        _operation(path, match[1] if match else None), _of_first_group(path, hosts), identified(path)
    )  # fmt: skip
    for number, row in enumerate(document["results"], start=1):
        try:
            timed = next(figures for name in ("out_of_place", "in_place") if isinstance(figures := row.get(name), dict))
            seconds = parse_seconds(str(next(timed[name] for name in ("time", "cpu_time") if name in timed)))
            _add(link, parse_whole(str(row["size"]), 0, _LARGEST_SIZE), seconds / 1e6)
        except (ValueError, KeyError, AttributeError, StopIteration) as error:
            told.line(number, str(error) or "no size or no time", "broken")
    return link


def read_perftest(paths: Sequence[Path]) -> tuple[list[MeasuredLink], list[str]]:
    """What ib_write_bw, ib_read_bw or ib_send_bw measured between two hosts, and what could not be used.

    Raises:
        RequestError: a JSON report is broken, or of another test.
        StoreError: a file cannot be read.
    """
    links: list[MeasuredLink] = []
    problems: list[str] = []
    for path in paths:
        told, file = BrokenLines(path.name), identified(path)
        if (document := _json(path, "perftest", dict)) is not None:
            links.append(_of_perftest_json(path, document, file))
            continue
        directions, unit, column = 1, 0.0, 0
        for number, raw, whole in lines(path):
            text = _LABELLED.sub("", raw)
            if _PERFTEST.match(text):
                directions, unit = (2 if "Bidirectional" in text else 1), 0.0
                links.append(MeasuredLink("rdma", ("client", "server"), file))
            elif match := re.search(r"BW average\[([^\]]+)\]", text):
                unit = _UNITS.get(match[1], 0.0)
                column = len(re.split(r"\s{2,}", text[: match.start()].strip()))
            elif unit and links and text.strip()[:1].isdigit():
                cells = text.split()
                try:
                    if not whole or len(cells) <= column:
                        raise ValueError("the file ends within it")
                    size = parse_whole(cells[0], 1, _LARGEST_SIZE)
                    seconds = size * directions / (parse_seconds(cells[column]) * unit)
                    links[-1].seconds.setdefault(size, []).append(seconds)
                except ValueError as error:
                    told.line(number, str(error), "broken" if whole else "cut-off")
        problems += told.told()
    return [link for link in links if link.seconds], problems


def _of_perftest_json(path: Path, document: Mapping[str, Any], file: ImportedFile) -> MeasuredLink:
    """The link at its one size, by messages per second: the report does not say if its bandwidths are in MiB or Gb."""
    about, results = document.get("test_info"), document["results"]
    test = str(about.get("test"))[:100] if isinstance(about, dict) else ""
    match = _PERFTEST_JSON.fullmatch(f'"test":"{test}"')
    try:
        if match is None:
            raise ValueError(f"its test is {shown(test)}, none of RDMA_Write_BW_Test, RDMA_Read_BW_Test, Send_BW_Test")
        size = parse_whole(str(results["MsgSize"]), 1, _LARGEST_SIZE)
        per_second = 1e6 * parse_seconds(str(results["MsgRate"]))
    except (KeyError, ValueError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        what = f"{shown(path.name)} tells no bandwidth: {why}"
        raise RequestError(what, next_step="Give what ib_write_bw printed, or its --out_json report") from None
    directions = 2 if match[2] else 1
    return MeasuredLink("rdma", ("client", "server"), file, {size: [directions / per_second]})
