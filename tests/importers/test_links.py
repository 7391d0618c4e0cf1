"""Output of nccl-tests and perftest becomes a check of the network: known links go in and come out."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.base import program
from vitscale.errors import VitscaleError
from vitscale.importers.contents import LinkFormat
from vitscale.importers.importing import guess
from vitscale.importers.links import read_nccl_tests, read_perftest
from vitscale.prediction.network.checked import network_of
from vitscale.prediction.network.links import Link
from vitscale.preflight.imported import import_links
from vitscale.store.checks import Operation, bus_factor, read_check

SIZES = tuple(8 * 4**n for n in range(13))


def header(hosts: int, each: int, *, groups: bool = True) -> str:
    lines = ["# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 4(factor) warmup iters: 5 iters: 20", "#"]
    lines.append("# Using devices")
    for rank in range(hosts * each):
        group = "Group  0 " if groups else ""
        lines.append(
            f"#  Rank {rank:2} {group}Pid {4000 + rank:6} on node{rank // each} device {rank % each:2} [00:1b:0] H100"
        )
    return "\n".join(lines) + "\n"


def table(operation: Operation, ranks: int, latency: float, bandwidth: float, sizes: tuple[int, ...] = SIZES) -> str:
    names = f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
    rows = ["#", f"{names}     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong"]
    for size in sizes:
        seconds = latency + bus_factor(operation, ranks) * size / bandwidth
        rate = size / seconds / 1e9
        body = f"{seconds * 1e6:9.2f}  {rate:6.2f}  {rate * bus_factor(operation, ranks):6.2f}       0"
        rows.append(f"{size:>12}  {size // 4:>12}     float     sum      -1{body}{body}")
    return "\n".join([*rows, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3", "#", ""])


def of_check(
    folder: Path, *texts: str, name: str = "all_reduce_perf", log_format: LinkFormat = "nccl-tests"
) -> tuple[Link, Link]:
    paths = []
    for n, text in enumerate(texts):
        paths.append(folder / f"{name}-{n}.txt")
        paths[-1].write_text(text)
    taken: str = guess(paths)
    assert taken == log_format
    record, path, problems = import_links(paths, log_format, folder / "results")
    assert record.vitscale == program.identity()
    assert problems == ()
    assert read_check(path) == record
    network = network_of(record)
    return network.inside, network.across


def test_an_all_reduce_between_two_hosts_is_the_link_between_them(tmp_path: Path) -> None:
    inside, across = of_check(tmp_path, header(2, 1) + table("all_reduce", 2, 35e-6, 12e9))
    # Two ranks: both trees' halves; a call before the first hop, 2.5 of them, and two hops.
    assert across.bandwidth_bytes_per_second == pytest.approx(12e9, rel=0.1)
    assert across.latency_seconds == pytest.approx(35e-6 / 4.5, rel=0.05)
    assert across.source == "check"
    assert across.described == "nccl-tests in all_reduce_perf-0.txt: all_reduce over 2 hosts"
    assert inside.source == "assumed"


def test_inside_one_host_and_several_cycles(tmp_path: Path) -> None:
    slow, fast = (table("all_reduce", 8, 20e-6, rate * 1e9) for rate in (190, 210))
    inside, across = of_check(tmp_path, header(1, 8, groups=False) + slow + fast + table("all_reduce", 8, 20e-6, 200e9))
    assert inside.bandwidth_bytes_per_second == pytest.approx(200e9, rel=0.15)
    assert inside.described.endswith("all_reduce over 8 ranks of a host")
    assert across.source == "assumed"


def test_several_tests_in_one_file_and_labels_of_a_launcher(tmp_path: Path) -> None:
    def told(operation: Operation, program: str, bandwidth: float) -> str:
        text = header(4, 1) + table(operation, 4, 30e-6, bandwidth) + f"# Collective test concluded: {program}\n"
        return "".join(f"[1,0]<stdout>:{line}\n" for line in text.splitlines())

    path = tmp_path / "job-1.out"
    path.write_text(told("all_gather", "all_gather_perf", 10e9) + told("send_recv", "sendrecv_perf_mpi", 11e9))
    found, problems = read_nccl_tests([path])
    assert problems == []
    assert [(one.operation, one.hosts, len(one.seconds)) for one in found] == [
        ("all_gather", ("node0", "node1", "node2", "node3"), len(SIZES)),
        ("send_recv", ("node0", "node1", "node2", "node3"), len(SIZES)),
    ]
    record, _, _ = import_links([path], "nccl-tests", tmp_path / "results")
    across = network_of(record).by_operation["across", "all_gather"]
    assert across.bandwidth_bytes_per_second == pytest.approx(10e9, rel=0.05)
    assert record.imported == "nccl-tests in job-1.out"


def test_one_size_tells_a_bandwidth_and_no_latency(tmp_path: Path) -> None:
    _, across = of_check(tmp_path, header(2, 1) + table("all_reduce", 2, 0.0, 12e9, (33554432,)))
    assert across.bandwidth_bytes_per_second == pytest.approx(12e9, rel=0.1)
    assert across.latency_spread == 1.0


def test_the_json_report_says_the_same(tmp_path: Path) -> None:
    devices = [
        {"rank": n, "group": 0, "pid": 1, "hostname": f"n{n}", "device": 0, "device_info": "H100"} for n in range(2)
    ]
    results = [
        {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "-1",
         "out_of_place": {"time": 30.0 + size / 12e9 * 1e6, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0.0},
         "in_place": {"time": 1.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0.0}}
        for size in SIZES
    ]  # fmt: skip
    document = {"version": 3, "args": ["/opt/all_reduce_perf", "-b", "8"], "nccl_version": 22703,
                "config": {"devices": devices}, "results": results}  # fmt: skip
    _, across = of_check(tmp_path, json.dumps(document), name="report")
    assert across.bandwidth_bytes_per_second == pytest.approx(12e9, rel=0.1)


PERFTEST = """                    RDMA_Write{both} BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]
 2          5000             0.05               0.04               2.100000
 65536      5000             {rate:.2f}           {rate:.2f}             0.180000
---------------------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("unit", "rate", "both"),
    [("Gb/sec", 97.6, ""), ("MB/sec", 12.2e9 / 2**20, ""), ("MiB/sec", 12.2e9 / 2**20, ""),
     ("Gb/sec", 195.2, " Bidirectional")],
)  # fmt: skip
def test_a_host_writing_to_another_is_the_link_but_for_what_a_collective_reaches(
    tmp_path: Path, unit: str, rate: float, both: str
) -> None:
    _, across = of_check(tmp_path, PERFTEST.format(unit=unit, rate=rate, both=both), name="ib", log_format="perftest")
    assert across.bandwidth_bytes_per_second == pytest.approx(0.88 * 12.2e9, rel=1e-3)
    assert across.described == "perftest in ib-0.txt: rdma over 2 hosts"


def perftest_json(test: str = "RDMA_Write_BW_Test", average: float = 97.6, **results: object) -> str:
    """Line by line as perftest's `--out_json` writes it, of 65,536 bytes: 12.2e9 / 65,536 messages a second."""
    rows = {"MsgSize": 65536, "n_iterations": 5000, "BW_peak": average, "BW_average": average, "MsgRate": 0.186157}
    return json.dumps({"test_info": {"test": test, "Dual_port": "OFF"}, "results": rows | results}, indent=0)


@pytest.mark.parametrize(
    ("test", "average", "both"),
    [("RDMA_Write_BW_Test", 97.6, 1), ("Send_BW_Test", 12.2e9 / 2**20, 1),
     ("RDMA_Read_Bidirectional_Post_List_BW_Test", 195.2, 2)],
)  # fmt: skip
def test_perftests_json_says_the_same_in_either_unit(tmp_path: Path, test: str, average: float, both: int) -> None:
    text = perftest_json(test, average, MsgRate=round(both * 12.2e9 / 65536 / 1e6, 6))
    _, across = of_check(tmp_path, text, name="ib", log_format="perftest")
    assert across.bandwidth_bytes_per_second == pytest.approx(0.88 * 12.2e9, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (perftest_json("RDMA_Write_Latency_Test"), "its test is 'RDMA_Write_Latency_Test'"),
        (perftest_json(MsgRate="much"), "tells no bandwidth"),
        (perftest_json(MsgRate=0.0), "tells no bandwidth"),
        (perftest_json(MsgSize=None), "tells no bandwidth"),
        (perftest_json().replace("MsgRate", "Rate"), "it has no 'MsgRate'"),
        (perftest_json()[:-3], "no whole JSON report of perftest"),
        ('{"test_info": 4, "results": {}}', "its test is ''"),
    ],
)
def test_a_perftest_report_without_a_bandwidth_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "perftest_out.json"
    path.write_text(text)
    with pytest.raises(VitscaleError, match=why):
        import_links([path], "perftest", tmp_path / "results")


WHOLE = header(2, 1) + table("all_reduce", 2, 35e-6, 12e9)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (table("all_reduce", 2, 35e-6, 12e9), "tells of 0 ranks"),
        (header(1, 1) + table("all_reduce", 2, 35e-6, 12e9), "tells of 1 ranks"),
        (header(2, 1), "nothing in 'all_reduce_perf.txt' can be used"),
        (WHOLE.replace(".", "x"), "can be used as nccl-tests: .* broken lines left out"),
        ('{"nccl_version": 1, "results": [', "no whole JSON report"),
        ('{"nccl_version": 1, "results": 4}', "holds no results"),
    ],
)
def test_what_tells_of_no_link_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "all_reduce_perf.txt"
    path.write_text(text)
    with pytest.raises(VitscaleError, match=why):
        import_links([path], "nccl-tests", tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_test_without_a_name_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(WHOLE)
    with pytest.raises(VitscaleError, match=r"does not say which test .* Give the file the test's name"):
        import_links([path], "nccl-tests", tmp_path / "results")


def test_a_cut_off_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce_perf.txt"
    path.write_text(WHOLE[: WHOLE.index("# Out of") - 20])
    _, _, problems = import_links([path], "nccl-tests", tmp_path / "results")
    assert len(problems) == 1
    assert "1 cut-off line left out" in problems[0]


@given(st.binary(max_size=400))
def test_any_bytes_end_in_a_message(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "all_reduce_perf.bin"
    path.write_bytes(WHOLE.encode()[:900] + content)
    for read in (read_nccl_tests, read_perftest):
        with contextlib.suppress(VitscaleError):
            read([path])


def test_a_table_belongs_to_the_test_that_was_named_before_it(tmp_path: Path) -> None:
    """As `set -x` names each; the outputs have no line that ends them."""
    tests: tuple[tuple[Operation, str, float], ...] = (
        ("all_reduce", "all_reduce_perf", 10e9), ("all_gather", "all_gather_perf", 20e9),
    )  # fmt: skip
    path = tmp_path / "slurm-77.out"
    path.write_text("".join(f"+ srun ./{program} -b 8\n{header(4, 1)}{table(operation, 4, 30e-6, bandwidth)}"
                            for operation, program, bandwidth in tests) + "+ srun ./reduce_scatter_perf\n")  # fmt: skip
    found, problems = read_nccl_tests([path])
    assert problems == []
    assert [one.operation for one in found] == ["all_reduce", "all_gather"]
    slowest = [max(seconds for times in one.seconds.values() for seconds in times) for one in found]
    assert slowest[0] > 1.5 * slowest[1]
