"""`vitscale check --expect` and `--save-expect`: the file, what holds and what does not, and two real checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from check_factory import checked, record, request, sweep, trial
from driving import vitscale
from vitscale.errors import RequestError
from vitscale.preflight.delivery import HeldPromise, delivery_fields, held, measured_promises
from vitscale.preflight.fit import fits
from vitscale.preflight.promises import Promises, promises_text, read_promises
from vitscale.store.checks import (
    CheckRecord,
    DiskLine,
    InfinibandPort,
    LoaderLine,
    latest,
)
from vitscale.store.records import MatmulLine
from vitscale.trial.trial import World

pytestmark = pytest.mark.computing

Reads = Callable[[str], Promises]


@pytest.fixture
def reads(tmp_path: Path) -> Reads:
    """Reads a text as the file promised.toml."""

    def read(text: str) -> Promises:
        path = tmp_path / "promised.toml"
        path.write_text(text)
        return read_promises(path)

    return read


@pytest.mark.parametrize(
    ("table", "line", "value", "sign"),
    [
        ("bus_bandwidth.inside_nodes", 'all_reduce = "400 GB/s"', 400e9, "B/s"),
        ("bus_bandwidth.all_ranks", 'send_recv = "400 Gb/s"', 50e9, "B/s"),
        ("bus_bandwidth.across_nodes", 'all_gather = "1.5 GiB/s"', 1.5 * 2**30, "B/s"),
        ("matmul", 'bf16 = "600 TFLOP/s"', 600e12, "FLOP/s"),
        ("matmul", 'bf16 = "1.2 PFLOPS"', 1.2e15, "FLOP/s"),
        ("loader", 'rate = "2,000 images/s"', 2000.0, "images/s"),
        ("storage", 'write = "900MB/s"', 900e6, "B/s"),
        ("network", 'bandwidth = "360 Gbit/s"', 45e9, "B/s"),
    ],
)
def test_units(table: str, line: str, value: float, sign: str, reads: Reads) -> None:
    (promise,) = reads(f"[{table}]\n{line}\n").promises
    assert promise.least.value == pytest.approx(value)
    assert promise.least.sign == sign
    assert not promise.optional


def test_a_size_and_what_is_optional(reads: Reads) -> None:
    text = '[bus_bandwidth.tensor]\n"all_gather 64 KiB" = { at_least = "1 GB/s", optional = true }\n'
    (promise,) = reads(text).promises
    assert (promise.group, promise.operation, promise.size_bytes) == ("tensor", "all_gather", 65536)
    assert promise.optional
    (promise,) = reads('[network]\nadapters = "8 x 400 Gbit/s"\n').promises
    assert (promise.adapters, promise.least.value) == (8, 50e9)
    assert reads('tolerance = "5 %"\n[matmul]\nbf16 = "1 TFLOP/s"').tolerance == 0.05


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('bus_bandwidth = "400 GB/s"', "bus_bandwidth is '400 GB/s', and has to be a table"),
        ('[bus_bandwith.inside_nodes]\nall_reduce = "1 GB/s"', "Did you mean 'bus_bandwidth'?"),
        ('[bus_bandwidth.inside_node]\nall_reduce = "1 GB/s"', "Did you mean 'inside_nodes'?"),
        ('[bus_bandwidth.inside_nodes]\nallreduce = "1 GB/s"', "Did you mean 'all_reduce'?"),
        ('[bus_bandwidth.inside_nodes]\n"all_reduce big" = "1 GB/s"', "Write the size of the messages"),
        ('[matmul]\nfp8 = "1 TFLOP/s"', "Valid: bf16, fp16, tf32, fp32"),
        ("[matmul]\nbf16 = 600", "Write a figure with its unit in quotes"),
        ('[matmul]\nbf16 = "600"', '"600 TFLOP/s"'),
        ('[matmul]\nbf16 = "600 GB/s"', '"600 TFLOP/s"'),
        ('[matmul]\nbf16 = "0 TFLOP/s"', '"600 TFLOP/s"'),
        ('[matmul]\nbf16 = { atleast = "1 TFLOP/s" }', "Did you mean 'at_least'?"),
        ('[matmul]\nbf16 = { at_least = "1 TFLOP/s", optional = "yes" }', "Write true or false"),
        ('[storage]\nwrite = "2000 images/s"', '"400 GB/s" or "400 Gbit/s"'),
        ('[network]\nadapters = "eight"', "8 x 400 Gbit/s"),
        ('tolerance = 0.05\n[matmul]\nbf16 = "1 TFLOP/s"', 'in quotes, as "5 %"'),
        ('tolerance = "95 %"\n[matmul]\nbf16 = "1 TFLOP/s"', "at most 90 %"),
        ('tolerance = "5 %"', "promises nothing"),
        ("[matmul", "is no TOML"),
        ("   ", "is empty"),
    ],
)
def test_what_is_refused(text: str, words: str, reads: Reads) -> None:
    with pytest.raises(RequestError) as caught:
        reads(text)
    assert words in str(caught.value)
    assert "promised.toml" in str(caught.value)


def machine(**facts: Any) -> CheckRecord:
    """Two hosts with a rank each: 25 MB/s between them, bf16 at 10 and 8 TFLOP/s, disks of 500 and 400 MB/s."""
    lines = sweep("across nodes", "all_reduce", 2, 1e-4, 25e6)
    ranks = []
    for number in range(2):
        disk = DiskLine(
            free_bytes=10**12, record_seconds=(0.001,), record_bytes=300, seen_seconds=0.0,
            write_bytes_per_second=(500e6, 400e6)[number],
        )  # fmt: skip
        matmul = MatmulLine(dtype="bf16", size=1024, flops_per_second=(10e12, 8e12)[number])
        ports = tuple(
            InfinibandPort(name=f"mlx5_{port}:1", active=port < 3 - number, rate="400 Gb/sec (4X NDR)")
            for port in range(4)
        )
        fields: dict[str, Any] = {"collectives": lines, "disk": disk, "matmul": matmul, "infiniband": ports}
        ranks.append(checked(number, **(fields | facts)))
    return record(*ranks, fits=fits(ranks))


def statuses(whole: CheckRecord, promises: Promises) -> dict[str, tuple[str, float | None]]:
    ratios: dict[str, tuple[str, float | None]] = {}
    for each in held(whole, promises):
        ratio = round(each.ratio, 3) if each.ratio is not None else None
        ratios[each.promise.key.rpartition(".")[2]] = (each.status, ratio)
    return ratios


def only(whole: CheckRecord, promises: Promises) -> HeldPromise:
    (promise,) = held(whole, promises)
    return promise


def test_the_slowest_counts(reads: Reads) -> None:
    """By hand: 8 of 10 TFLOP/s, 400 of 500 MB/s, 25 MB/s of 200 Mbit/s."""
    text = """
    tolerance = "10 %"
    [bus_bandwidth.across_nodes]
    all_reduce = "27 MB/s"
    [matmul]
    bf16 = "10 TFLOP/s"
    [storage]
    write = "500 MB/s"
    [network]
    bandwidth = "200 Mbit/s"
    """
    found = statuses(machine(), reads(text))
    assert found == {
        "all_reduce": ("pass", 0.926),  # within the tolerance
        "bf16": ("fail", 0.8),
        "write": ("fail", 0.8),
        "bandwidth": ("pass", 1.0),
    }
    assert only(machine(), reads('[matmul]\nbf16 = "10 TFLOP/s"')).measurement.remark == "rank 1 on host1"


def test_the_bandwidth_of_one_size(reads: Reads) -> None:
    """1 MiB over two ranks takes 0.1 ms + 1 MiB / 25 MB/s = 42.04 ms: 24.94 MB/s of bus bandwidth."""
    each = only(machine(), reads('[bus_bandwidth.across_nodes]\n"all_reduce 1 MiB" = "25 MB/s"'))
    assert each.ratio == pytest.approx(0.9976, abs=1e-4)
    other = only(machine(), reads('[bus_bandwidth.across_nodes]\n"all_reduce 3 MiB" = "25 MB/s"'))
    assert (other.status, other.is_broken) == ("not measured", True)
    assert "this size was not; measured: 1 KiB, 4 KiB" in other.measurement.remark


def test_adapters_of_the_host_that_has_the_fewest(reads: Reads) -> None:
    assert only(machine(), reads('[network]\nadapters = "2 x 400 Gbit/s"')).status == "pass"
    each = only(machine(), reads('[network]\nadapters = "3 x 400 Gbit/s"'))
    assert (each.status, each.ratio, each.measurement.remark) == ("fail", 0.0, "host1: 2 active ports")


def test_what_was_not_measured_is_broken_unless_it_is_optional(reads: Reads) -> None:
    for optional in (False, True):
        line = f'rate = {{ at_least = "1 images/s", optional = {str(optional).lower()} }}'
        each = only(machine(), reads(f"[loader]\n{line}"))
        assert (each.status, each.is_broken) == ("not measured", not optional)
        assert "vitscale check STUDY.toml" in each.measurement.remark
    each = only(machine(), reads('[matmul]\nfp32 = "1 TFLOP/s"'))
    assert (each.status, each.is_broken) == ("not measured", True)
    assert "measured bf16" in each.measurement.remark
    each = only(machine(), reads('[bus_bandwidth.inside_nodes]\nall_reduce = "1 GB/s"'))
    assert "no such group in this check; it measured across nodes" in each.measurement.remark
    alone = record(checked(0, ranks=1))
    assert only(alone, reads('[network]\nbandwidth = "1 GB/s"')).measurement.remark == "there is one host"


def test_a_rank_that_lacks_a_figure(reads: Reads) -> None:
    """The slowest of those that are there would say nothing of it."""
    whole = machine()
    ranks = (whole.ranks[0], whole.ranks[1].model_copy(update={"matmul": None}))
    each = only(whole.model_copy(update={"ranks": ranks}), reads('[matmul]\nbf16 = "1 TFLOP/s"'))
    assert (each.status, each.measurement.remark) == ("not measured", "no matrix rate on 1 rank")


def test_a_loader(reads: Reads) -> None:
    loader = LoaderLine(images_per_second=1500.0, workers=1, batch=8)
    world = World(nodes=2, ranks_per_node=1, threads_per_rank=1)
    whole = machine(loader=loader).model_copy(update={"request": request(world=world, trial=trial())})
    assert statuses(whole, reads('[loader]\nrate = "2000 images/s"')) == {"rate": ("fail", 0.75)}


def test_what_is_written_reads_back_and_holds(tmp_path: Path) -> None:
    path = tmp_path / "saved.toml"
    path.write_text(promises_text(measured_promises(machine(), path)))
    promises = read_promises(path)
    assert promises.tolerance == 0.1
    assert [promise.key for promise in promises.promises] == [
        "bus_bandwidth.across_nodes.all_reduce", "bus_bandwidth.across_nodes.all_reduce 64 MiB", "matmul.bf16",
        "storage.write", "network.bandwidth", "network.adapters",
    ]  # fmt: skip
    assert {each.status for each in held(machine(), promises)} == {"pass"}
    for each in held(machine(), promises):
        assert each.ratio == pytest.approx(1.0, abs=0.01)  # three digits, rounded down
        assert each.ratio is not None
        assert each.ratio >= 1.0


# --- real checks ---------------------------------------------------------------------------------------------------

KEPT = '[matmul]\nfp32 = "1 kFLOP/s"\n[storage]\nwrite = { at_least = "1 B/s", optional = true }\n'


@pytest.mark.ranks
def test_promises_that_are_kept(tmp_path: Path) -> None:
    promised = tmp_path / "promised.toml"
    promised.write_text(KEPT)
    saved = tmp_path / "saved.toml"
    answer = vitscale(
        "check", "--quick", "--ranks-per-node", "1", "-o", tmp_path / "results", "--expect", promised, "--save-expect",
        saved,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "promised.toml: 2 pass" in answer.stdout
    stored = latest(tmp_path / "results")
    assert stored is not None
    assert {each.status for each in held(stored, read_promises(saved))} == {"pass"}


@pytest.mark.ranks
def test_promises_that_are_broken(tmp_path: Path) -> None:
    promised = tmp_path / "promised.toml"
    promised.write_text(KEPT + '[bus_bandwidth.inside_nodes]\nall_reduce = "1 EB/s"\n')
    answer = vitscale("check", "--quick", "-o", tmp_path / "results", "--expect", promised, "--json")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    answers = json.loads(answer.stdout)
    assert [each["status"] for each in answers["expected"]] == ["pass", "pass", "fail"]
    stored = latest(tmp_path / "results")
    assert stored is not None
    assert answers["expected"] == delivery_fields(held(stored, read_promises(promised)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--expect", "no-such.toml"), "no-such.toml' cannot be read"),
        (("--save-expect", "there.toml"), "is there already"),
        (("--save-expect", "missing/new.toml"), "cannot be written: there is no folder 'missing'. Make it first, or"),
        (("--expect", "there.toml", "--training"), "--expect and --save-expect are of the other check"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_measured(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / "there.toml").write_text(KEPT)
    answer = vitscale("check", *arguments, "-o", "results", cwd=tmp_path)
    assert answer.returncode == 2
    assert words in " ".join(answer.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.toml"]
