"""Which cores ranks get, on the topologies of known machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topologies import dgx_h100, interleaved, smt_desktop, two_sockets
from vitscale.machine.cores import PhysicalCore, is_bound, node_distances, numa_nodes, physical_cores, share_of_cores

DGX_GPUS = [0, 0, 0, 0, 1, 1, 1, 1]


def shares(
    tree: Path,
    ranks: int,
    threads: int,
    gpu_nodes: Sequence[int | None] = (),
    allowed: Iterable[int] | None = None,
    host_nodes: Sequence[int | None] = (),
) -> list[frozenset[int]]:
    """The logical cores of each rank."""
    cores = physical_cores(range(224) if allowed is None else allowed, tree)
    cores = tuple(c for c in cores if c.node is not None)  # those that the tree has
    distances = node_distances(tree)
    found = [share_of_cores(r, ranks, threads, cores, gpu_nodes, distances, host_nodes) for r in range(ranks)]
    assert all(found)
    return [frozenset(share or ()) for share in found]


def physical(tree: Path, share: Iterable[int]) -> set[int]:
    return {core.number for core in physical_cores(share, tree)}


def assert_apart(tree: Path, found: Sequence[frozenset[int]]) -> None:
    """No physical core belongs to two ranks."""
    assert sum(len(physical(tree, share)) for share in found) == len(set().union(*(physical(tree, s) for s in found)))


def test_ranks_share_no_physical_core_on_an_smt_desktop(tmp_path: Path) -> None:
    tree = smt_desktop(tmp_path)
    assert shares(tree, 1, 8) == [frozenset(range(8)) | frozenset(range(16, 24))]
    for ranks, threads in ((1, 16), (2, 8), (4, 4), (16, 1), (3, 5)):
        found = shares(tree, ranks, threads)
        assert_apart(tree, found)
        assert {len(physical(tree, share)) for share in found} == {threads}
        assert {len(share) for share in found} == {2 * threads}  # both siblings


def test_more_threads_than_physical_cores_take_both_siblings_and_still_share_none(tmp_path: Path) -> None:
    tree = smt_desktop(tmp_path)
    found = shares(tree, 2, 16)
    assert_apart(tree, found)
    assert [len(share) for share in found] == [16, 16]


def test_ranks_lie_on_one_memory_node_where_they_fit(tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    assert [numa_nodes(share, tree) for share in shares(tree, 4, 4)] == [(0,), (0,), (1,), (1,)]
    # 2 x 5 cores leave 3 on each node: a third rank of 5 finds no node with room.
    third = shares(tree, 3, 5)
    assert [numa_nodes(share, tree) for share in third] == [(0,), (1,), (0, 1)]
    assert_apart(tree, third)


def test_eight_ranks_of_a_dgx_lie_on_the_side_of_their_gpus(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    found = shares(tree, 8, 14, DGX_GPUS)
    assert [numa_nodes(share, tree) for share in found] == [(node,) for node in DGX_GPUS]
    assert_apart(tree, found)
    assert found[0] == frozenset(range(14)) | frozenset(range(112, 126))
    # Four ranks take the first four GPUs; node 1 stays free.
    assert [numa_nodes(share, tree) for share in shares(tree, 4, 14, DGX_GPUS)] == [(0,)] * 4
    # As Slurm shows each rank its own GPU alone.
    alone = [frozenset(shares(tree, 8, 14, [node])[rank]) for rank, node in enumerate(DGX_GPUS)]
    assert [numa_nodes(share, tree) for share in alone] == [(node,) for node in DGX_GPUS]
    assert_apart(tree, alone)


@pytest.mark.parametrize(
    ("machine", "threads", "gpu_nodes", "blind"),
    [
        (interleaved, 8, [0, 1, 0, 1], [0, 0, 1, 1]),  # numbered in turn: two ranks fit on a node, and none are told so
        (interleaved, 4, [0, 1, 0, 1], [0, 1, 0, 1]),  # all would fit on either
        (dgx_h100, 14, [0, 1] * 4, DGX_GPUS),  # ranks in turn, as srun -m block:cyclic has them
        (two_sockets, 4, [0, 0, 0, 0], [0, 0, 1, 1]),  # all GPUs on one socket
    ],
)
def test_ranks_that_see_only_their_own_gpu_share_no_core(
    tmp_path: Path, machine: Callable[[Path], Path], threads: int, gpu_nodes: list[int], blind: list[int]
) -> None:
    tree = machine(tmp_path)
    ranks = len(gpu_nodes)

    def alone(host_nodes: list[int]) -> list[frozenset[int]]:
        return [shares(tree, ranks, threads, [own], None, host_nodes)[n] for n, own in enumerate(gpu_nodes)]

    assert_apart(tree, alone([]))
    assert [numa_nodes(share, tree) for share in alone([])] == [(node,) for node in blind]
    # Where NVML tells of the host's GPUs all the same, as with CUDA_VISIBLE_DEVICES, nothing is lost.
    told = alone(gpu_nodes)
    assert_apart(tree, told)
    assert [numa_nodes(share, tree) for share in told] == [
        numa_nodes(share, tree) for share in shares(tree, ranks, threads, gpu_nodes)
    ]


def test_a_gpu_s_own_node_comes_before_order_and_the_nearest_after_it(tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    assert [numa_nodes(share, tree) for share in shares(tree, 2, 4, [1, 0])] == [(1,), (0,)]
    crowded = shares(tree, 3, 4, [1, 1, 1])
    assert [numa_nodes(share, tree) for share in crowded] == [(1,), (1,), (0,)]
    assert_apart(tree, crowded)
    assert shares(tree, 2, 4, [None, None]) == shares(tree, 2, 4)


def test_no_rank_straddles_where_nodes_are_numbered_in_turn(tmp_path: Path) -> None:
    tree = interleaved(tmp_path)
    found = shares(tree, 4, 8)
    assert [numa_nodes(share, tree) for share in found] == [(0,), (0,), (1,), (1,)]
    assert found[0] == frozenset(range(0, 16, 2)) | frozenset(range(32, 48, 2))
    assert [numa_nodes(share, tree) for share in shares(tree, 2, 4, [0, 1])] == [(0,), (1,)]


def test_in_a_container_with_a_cpuset_the_cores_it_has_are_shared_out(tmp_path: Path) -> None:
    """docker --cpuset-cpus=0-5,16-19: four whole cores, and two whose siblings are others'."""
    tree = smt_desktop(tmp_path)
    allowed = [*range(6), *range(16, 20)]
    found = shares(tree, 2, 3, allowed=allowed)
    assert_apart(tree, found)
    assert found == [frozenset({0, 1, 2, 16, 17, 18}), frozenset({3, 4, 5, 19})]


def test_too_few_cores_pin_nothing(tmp_path: Path) -> None:
    cores = physical_cores(range(32), smt_desktop(tmp_path))
    assert [share_of_cores(rank, 3, 11, cores) for rank in range(3)] == [None] * 3


def cores_of(nodes: Sequence[tuple[int, int]]) -> tuple[PhysicalCore, ...]:
    """(physical cores, siblings) of each node."""
    found: list[PhysicalCore] = []
    number = 0
    for node, (count, siblings) in enumerate(nodes):
        for _ in range(count):
            found.append(PhysicalCore(node, number, tuple(range(number, number + siblings))))
            number += siblings
    return tuple(found)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 2)), min_size=1, max_size=4),
    st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=9),
    st.booleans(),
    st.booleans(),
)
def test_whatever_the_host_ranks_have_logical_cores_enough_and_share_none(
    ranks: int, threads: int, nodes: list[tuple[int, int]], gpus: list[int | None], alone: bool, told: bool
) -> None:
    """Also where each sees its own GPU alone, or there are too few, and whether or not it is told of the others."""
    cores = cores_of(nodes)
    seen = [gpus[rank : rank + 1] if alone or len(gpus) < ranks else gpus for rank in range(ranks)]
    found = [
        share_of_cores(rank, ranks, threads, cores, seen[rank], None, gpus if told else ()) for rank in range(ranks)
    ]
    total = sum(len(core.logical) for core in cores)
    assert all(share is not None for share in found) == (ranks * threads <= total)
    pinned = [core for share in found for core in share or ()]
    assert len(pinned) == len(set(pinned))
    assert all(share is None or len(share) >= threads for share in found)
    if ranks * threads <= len(cores):  # enough physical cores: no two ranks on one
        homes = [{core.number for core in cores if set(core.logical) & set(share or ())} for share in found]
        assert sum(map(len, homes)) == len(set().union(*homes)) == ranks * threads


# --- what the kernel tells -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("siblings", ["", "junk", "7", "1-"])
def test_without_a_topology_each_core_is_a_physical_one(tmp_path: Path, siblings: str) -> None:
    folder = tmp_path / "cpu/cpu1/topology"
    folder.mkdir(parents=True)
    (folder / "thread_siblings_list").write_text(siblings)
    assert [core.logical for core in physical_cores({3, 1, 2}, tmp_path)] == [(1,), (2,), (3,)]
    assert share_of_cores(1, 2, 1, physical_cores({3, 1, 2}, tmp_path)) == (2,)


def nodes(folder: Path, cores_of_node: dict[str, str]) -> Path:
    for name, cores in cores_of_node.items():
        (folder / "node" / name).mkdir(parents=True)
        (folder / "node" / name / "cpulist").write_text(cores + "\n")
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
    tree = nodes(tmp_path, {"node0": "0-3,6-8", "node1": "4,5,9-11", "node10": "12", "node2": "", "nodeX": "0"})
    (tree / "node/online").write_text("0-2,10\n")
    assert numa_nodes(frozenset(cores), tree) == expected


@pytest.mark.parametrize("cpulist", ["junk", "1-", "-3"])
def test_memory_nodes_that_cannot_be_read_are_unknown(tmp_path: Path, cpulist: str) -> None:
    assert numa_nodes(frozenset({0}), nodes(tmp_path, {"node0": cpulist})) is None
    assert numa_nodes(frozenset({0}), tmp_path / "none") is None


def test_distances_are_those_of_the_firmware_or_unknown(tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    assert node_distances(tree) == {0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}}
    (tree / "node/node1/distance").write_text("21\n")
    assert node_distances(tree) == {0: {0: 10, 1: 21}}


# --- bindings of launchers -----------------------------------------------------------------------------------------

HOST = frozenset(range(32))


@pytest.mark.parametrize(
    ("own", "parent", "host", "bound"),
    [
        (frozenset({0, 16}), HOST, HOST, True),  # srun --cpu-bind=cores: slurmstepd has all, the task one core
        (frozenset(range(8)), HOST, HOST, True),  # mpirun --bind-to socket
        (HOST, HOST, HOST, False),
        (frozenset(range(8)), frozenset(range(8)), HOST, False),  # taskset around the driver, inherited
        (frozenset(range(8)), HOST, frozenset(range(8)), False),  # a job step's or a container's cpuset
        (frozenset({0, 1}), HOST, frozenset(range(8)), True),
        (frozenset({9}), frozenset({0}), HOST, False),  # not narrower: another one
    ],
)
def test_a_binding_is_told_from_what_is_inherited(
    own: frozenset[int], parent: frozenset[int], host: frozenset[int], bound: bool
) -> None:
    assert is_bound(own, parent, host) is bound


PIN = """
import json, os
from vitscale.trial.trial import World
from vitscale.worker.rank_process import RankInfo, pin
before = sorted(os.sched_getaffinity(0))
rank = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
pin(RankInfo(rank, 2, rank, None), World(ranks_per_node=2, threads_per_rank=1), "cpu")
print(json.dumps([before, sorted(os.sched_getaffinity(0))]))
"""


def pinned(command: list[str]) -> list[list[list[int]]]:
    answer = subprocess.run([*command, sys.executable, "-c", PIN], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_a_rank_that_is_bound_to_one_core_by_open_mpi_stays_there() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun not found: install openmpi-bin")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be divided")
    options = ["--allow-run-as-root", "-np", "1", "--bind-to"]
    ((before, after),) = pinned(["mpirun", *options, "hwthread"])
    assert len(before) == 1
    assert after == before
    ((before, after),) = pinned(["mpirun", *options, "none"])
    assert set(after) < set(before)


def test_what_all_ranks_inherit_is_shared_out() -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    if not others or shutil.which("taskset") is None:
        pytest.skip("one core cannot be divided, or taskset not found")
    ((before, after),) = pinned(["taskset", "-c", f"{first},{others[0]}"])
    assert before == [first, others[0]]
    assert set(after) < set(before)
