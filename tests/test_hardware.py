from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale import hardware
from vitscale.hardware import (
    Gpu,
    Machine,
    cores_in_order,
    cpu_quota_cores,
    cpu_throttled_seconds,
    numa_nodes,
    parse_nvidia_smi,
    select_visible,
    share_of_cores,
    this_machine,
)


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def quota(folder: Path, membership: str) -> float | None:
    (folder / "membership").write_text(membership)
    return cpu_quota_cores(folder / "membership", folder / "cgroup")


# --- CPU quota, version 2 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("150000 100000", 1.5),
        ("max 100000", None),
        ("400000 200000", 2.0),
        ("100000 0", None),
        ("junk", None),
        ("", None),
    ],
)
def test_v2_quota(tmp_path: Path, content: str, cores: float | None) -> None:
    put(tmp_path / "cgroup/job", cpu__max=content)
    assert quota(tmp_path, "0::/job\n") == cores


def test_v2_the_tightest_ancestor_binds(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/slice", cpu__max="200000 100000")
    put(tmp_path / "cgroup/slice/job", cpu__max="max 100000")
    put(tmp_path / "cgroup/slice/job/step", cpu__max="300000 100000")
    assert quota(tmp_path, "0::/slice/job/step\n") == 2.0
    put(tmp_path / "cgroup/slice/job/step", cpu__max="50000 100000")
    assert quota(tmp_path, "0::/slice/job/step\n") == 0.5


def test_v2_in_a_container_whose_path_lies_outside_its_view(tmp_path: Path) -> None:
    """The namespace shows the container's own group as the root of the mount."""
    put(tmp_path / "cgroup", cpu__max="250000 100000")
    assert quota(tmp_path, "0::/docker/4f2a\n") == 2.5
    assert quota(tmp_path, "0::/../4f2a\n") == 2.5


def test_v2_mounted_beside_v1(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/unified/job", cpu__max="100000 100000")
    assert quota(tmp_path, "3:memory:/\n0::/job\n") == 1.0


# --- version 1 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_v1_quota(tmp_path: Path, controllers: str) -> None:
    put(tmp_path / "cgroup" / controllers / "job", cpu__cfs_quota_us="350000", cpu__cfs_period_us="100000")
    assert quota(tmp_path, f"9:name=systemd:/job\n4:{controllers}:/job\n2:memory:/other\n") == 3.5


def test_v1_the_tightest_ancestor_binds_and_minus_one_is_no_limit(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    put(tmp_path / "cgroup/cpu/a", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    put(tmp_path / "cgroup/cpu/a/b", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert quota(tmp_path, "1:cpu:/a/b\n") == 1.5
    assert quota(tmp_path, "1:cpu:/\n") is None


def test_v1_a_period_of_zero_is_no_limit(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/cpu/a", cpu__cfs_quota_us="1000", cpu__cfs_period_us="0")
    assert quota(tmp_path, "1:cpu:/a\n") is None


@pytest.mark.parametrize("membership", ["", "junk\n", "1:memory:/job\n", "0::\n", "5:cpuset:/job\n"])
def test_without_a_cpu_controller_there_is_no_limit(tmp_path: Path, membership: str) -> None:
    put(tmp_path / "cgroup/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert quota(tmp_path, membership) is None


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_quota_cores(tmp_path / "none", tmp_path) is None


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real group of the CPU controller, version 1, that grants one and a half cores."""
    controller = Path("/sys/fs/cgroup/cpu")
    group = controller / f"vitscale-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made below {controller}: {error.strerror}")
    try:
        (group / "cpu.cfs_quota_us").write_text("150000")
    except OSError as error:
        group.rmdir()
        pytest.skip(f"the quota of {group} cannot be set: {error.strerror}")
    yield group
    group.rmdir()


def test_a_real_quota_of_the_kernel_is_found(limited_group: Path) -> None:
    program = "from vitscale.hardware import this_machine; m = this_machine(); print(m.cpu_quota_cores, m.cores)"
    # The shell joins the group, then becomes the program.
    join = f'echo $$ > {limited_group}/cgroup.procs && exec "$@"'
    answer = subprocess.run(
        ["/bin/sh", "-c", join, "sh", sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["1.5", "1"]


def test_a_quota_cuts_the_cores_down_and_never_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(hardware, "visible_gpus", tuple)
    for granted, cores in ((None, 8), (2.5, 2), (0.25, 1), (64.0, 8)):
        monkeypatch.setattr(hardware, "cpu_quota_cores", lambda granted=granted: granted)
        assert this_machine().cores == cores


# --- throttling ----------------------------------------------------------------------------------------------------


def throttled(folder: Path, membership: str) -> float | None:
    (folder / "membership").write_text(membership)
    return cpu_throttled_seconds(folder / "membership", folder / "cgroup")


def test_v2_throttled_time_is_in_microseconds(tmp_path: Path) -> None:
    stat = "usage_usec 900\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500000"
    put(tmp_path / "cgroup/job", cpu__max="150000 100000", cpu__stat=stat)
    assert throttled(tmp_path, "0::/job\n") == 2.5


def test_v1_throttled_time_is_in_nanoseconds(tmp_path: Path) -> None:
    stat = "nr_periods 10\nnr_throttled 4\nthrottled_time 2500000000"
    put(tmp_path / "cgroup/cpu/job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000", cpu__stat=stat)
    assert throttled(tmp_path, "4:cpu:/job\n") == 2.5


def test_throttled_time_is_that_of_the_group_whose_quota_binds(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/slice", cpu__max="100000 100000", cpu__stat="throttled_usec 3000000")
    put(tmp_path / "cgroup/slice/job", cpu__max="300000 100000", cpu__stat="throttled_usec 0")
    assert throttled(tmp_path, "0::/slice/job\n") == 3.0


def test_without_a_quota_throttled_time_is_unknown_and_not_zero(tmp_path: Path) -> None:
    put(tmp_path / "cgroup/job", cpu__max="max 100000", cpu__stat="throttled_usec 0")
    assert throttled(tmp_path, "0::/job\n") is None
    assert throttled(tmp_path, "junk\n") is None


@pytest.mark.parametrize("stat", ["", "junk", "throttled_usec", "throttled_usec many", "nr_throttled 3"])
def test_a_kernel_that_does_not_tell_of_throttling(tmp_path: Path, stat: str) -> None:
    put(tmp_path / "cgroup/job", cpu__max="100000 100000")
    assert throttled(tmp_path, "0::/job\n") is None
    put(tmp_path / "cgroup/job", cpu__stat=stat)
    assert throttled(tmp_path, "0::/job\n") is None


def test_real_throttling_by_the_kernel_is_seen(limited_group: Path) -> None:
    """A process that computes without a pause under a twentieth of a core is held back nearly all of the time; else it
    computes, or waits for a core that others use. On one core, for the kernel adds up over cores: moved to a second one
    it leaves the first held back as well."""
    (limited_group / "cpu.cfs_quota_us").write_text("5000")
    program = """
import os, pathlib, sys, time
from vitscale.hardware import cpu_throttled_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
pathlib.Path(sys.argv[1]).write_text("0")
began, before, used = time.perf_counter(), cpu_throttled_seconds(), time.process_time()
while time.perf_counter() - began < 1:
    pass
seconds = time.perf_counter() - began
print((cpu_throttled_seconds() - before) / seconds, (time.process_time() - used) / seconds)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program, limited_group / "cgroup.procs"], capture_output=True, text=True, check=True
    )
    throttled_share, computing = map(float, answer.stdout.split())
    assert 0.5 < throttled_share < 1.02 - computing


# --- cores ---------------------------------------------------------------------------------------------------------


def topology(folder: Path, siblings: dict[int, str]) -> Path:
    for core, cores in siblings.items():
        put(folder / f"cpu{core}/topology", thread_siblings_list=cores)
    return folder


def test_hyperthreads_come_after_all_physical_cores(tmp_path: Path) -> None:
    """Intel's numbering: 0 and 4 are one core; and neighbours' numbering: 0 and 1 are one."""
    far = topology(tmp_path / "far", {n: f"{n % 4},{n % 4 + 4}" for n in range(8)})
    assert cores_in_order(frozenset(range(8)), far) == [0, 1, 2, 3, 4, 5, 6, 7]
    near = topology(tmp_path / "near", {n: f"{n // 2 * 2}-{n // 2 * 2 + 1}" for n in range(8)})
    assert cores_in_order(frozenset(range(8)), near) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_sibling_that_is_not_allowed_does_not_count(tmp_path: Path) -> None:
    near = topology(tmp_path, {n: f"{n // 2 * 2}-{n // 2 * 2 + 1}" for n in range(4)})
    assert cores_in_order(frozenset({1, 2, 3}), near) == [1, 2, 3]


@pytest.mark.parametrize("siblings", ["", "junk", "7", "1-"])
def test_without_a_topology_the_cores_come_by_number(tmp_path: Path, siblings: str) -> None:
    assert cores_in_order(frozenset({3, 1, 2}), topology(tmp_path, {1: siblings})) == [1, 2, 3]


def nodes(folder: Path, cores_of: dict[str, str]) -> Path:
    for name, cores in cores_of.items():
        put(folder / name, cpulist=cores)
    return folder


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ({0, 1}, (0,)),
        ({4, 9}, (1,)),
        ({3, 4}, (0, 1)),
        ({12}, (10,)),
        ({0, 99}, None),  # of one core nobody tells
        ({99}, None),
    ],
)
def test_memory_nodes_of_cores(tmp_path: Path, cores: set[int], expected: tuple[int, ...] | None) -> None:
    """Two sockets with hyper-threads, a third numbered 10, a node of memory alone, and files that are no nodes."""
    found = nodes(tmp_path, {"node0": "0-3,6-8", "node1": "4,5,9-11", "node10": "12", "node2": "", "nodeX": "0"})
    (found / "online").write_text("0-2,10\n")
    assert numa_nodes(frozenset(cores), found) == expected


@pytest.mark.parametrize("cpulist", ["junk", "1-", "-3"])
def test_memory_nodes_that_cannot_be_read_are_unknown(tmp_path: Path, cpulist: str) -> None:
    assert numa_nodes(frozenset({0}), nodes(tmp_path, {"node0": cpulist})) is None
    assert numa_nodes(frozenset({0}), tmp_path / "none") is None


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 64))
def test_ranks_share_no_core(ranks: int, threads: int, cores: int) -> None:
    shares = [share_of_cores(rank, threads, list(range(cores))) for rank in range(ranks)]
    pinned = [core for share in shares if share is not None for core in share]
    assert len(pinned) == len(set(pinned))
    assert all((share is not None) == ((rank + 1) * threads <= cores) for rank, share in enumerate(shares))


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("processor : 0\nflags : fpu amx_bf16\n", True),
        ("flags : fpu avx2 avx512f\n", False),
        ("Features : fp asimd\n", False),
        ("", False),
    ],
)
def test_bf16_is_fast_where_the_processor_has_instructions_for_it(tmp_path: Path, cpuinfo: str, fast: bool) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    flags = hardware._cpu_flags(tmp_path / "cpuinfo")
    assert bool(flags & {"amx_bf16", "avx512_bf16"}) is fast


# --- GPUs ----------------------------------------------------------------------------------------------------------

# Written in the form nvidia-smi prints; not recorded from a machine.
H200 = "GPU-11111111-2222-3333-4444-555555555555, NVIDIA H200, 143771, 570.124.06, 1980, 9.0\n"
T4 = "GPU-66666666-7777-8888-9999-000000000000, Tesla T4, 15360, 550.90.07, 585, 7.5\n"
MIG = "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee, NVIDIA A100-SXM4-40GB, [N/A], 550.90.07, [N/A], 8.0\n"


def test_an_h200() -> None:
    (gpu,) = parse_nvidia_smi(H200)
    assert gpu == Gpu(
        "GPU-11111111-2222-3333-4444-555555555555", "NVIDIA H200", 143_771 * 2**20, "570.124.06", 1980, (9, 0)
    )


def test_what_is_not_available_is_unknown_and_not_zero() -> None:
    (gpu,) = parse_nvidia_smi(MIG)
    assert (gpu.memory_bytes, gpu.sm_clock_mhz, gpu.compute_capability) == (None, None, (8, 0))
    (gpu,) = parse_nvidia_smi("GPU-1, X, [Not Supported], [N/A], [Unknown Error], [N/A]\n")
    assert gpu == Gpu("GPU-1", "X", None, None, None, None)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "No devices were found\n", "a, b, c\n", "Unable to determine, the handle\n"]
)
def test_what_is_no_gpu_is_passed_over(text: str) -> None:
    assert parse_nvidia_smi(text) == ()


@given(st.text() | st.lists(st.text(max_size=6), min_size=6, max_size=6).map(", ".join))
def test_whatever_nvidia_smi_says_is_read(text: str) -> None:
    for gpu in parse_nvidia_smi(text):
        assert gpu.memory_bytes is None or gpu.memory_bytes >= 0


def test_bf16_is_fast_from_compute_capability_8_on_every_gpu() -> None:
    def fast(text: str) -> bool:
        return Machine(1, None, parse_nvidia_smi(text), False).fast_bf16("cuda")

    assert fast(H200)
    assert fast(H200 + MIG)
    assert not fast(T4)
    assert not fast(H200 + T4)
    assert not fast("")


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1,9,0", [1]),
        ("GPU-11111111", [0]),
        ("GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee,GPU-6", [2, 1]),
        ("GPU-", []),  # begins the name of several
        ("G", []),
        ("GPU-ffffffff", []),
        ("MIG-11111111", []),
        ("NoDevFiles", []),
        ("0,0", [0]),
        ("²", []),
        ("9" * 5000, []),
    ],
)
def test_cuda_visible_devices(visible: str | None, chosen: list[int]) -> None:
    gpus = parse_nvidia_smi(H200 + T4 + MIG)
    assert select_visible(gpus, visible) == tuple(gpus[n] for n in chosen)


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_nvidia_smi_is_asked_for_the_fields_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = "--query-gpu=uuid,name,memory.total,driver_version,clocks.sm,compute_cap --format=csv,noheader,nounits"
    fake_nvidia_smi(tmp_path, monkeypatch, f'[ "$*" = "{fields}" ] && echo "{(T4 + H200).strip()}"')
    assert [gpu.name for gpu in hardware.visible_gpus()] == ["Tesla T4", "NVIDIA H200"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.name for gpu in hardware.visible_gpus()] == ["NVIDIA H200"]


def test_an_nvidia_smi_that_fails_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, f'echo "{T4.strip()}"; exit 9')
    assert hardware.visible_gpus() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert hardware.visible_gpus() == ()
