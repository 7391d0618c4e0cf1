"""What a check measures where: ranks, threads and sizes, from what is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from check_factory import trial
from vitscale.errors import RequestError
from vitscale.machine.hardware import Gpu, Machine
from vitscale.preflight.running import CheckTarget, check_target, request
from vitscale.schedulers import Hostfile, LocalHost


def machine(cores: int = 8, gpus: int = 0) -> Machine:
    found = tuple(Gpu(f"GPU-{n}", "GPU", None, None, (8, 0)) for n in range(gpus))
    return Machine(cores, None, found, cpu_has_fast_bf16=False)


def place(tmp_path: Path, found: Machine, hosts: str = "") -> CheckTarget:
    (tmp_path / "hosts").write_text(hosts or "unused\n")
    whole = check_target(None, {"launch": {"hostfile": str(tmp_path / "hosts")} if hosts else {"scheduler": "local"}})
    return replace(whole, scheduler=Hostfile(whole.hosts, found) if hosts else LocalHost(found))


@pytest.mark.parametrize(
    ("found", "hosts", "nodes", "ranks_per_node", "threads"),
    [
        (machine(8), "", 1, 2, 4),
        (machine(1), "", 1, 1, 1),
        (machine(8, gpus=4), "", 1, 4, 2),
        (machine(8), "a\nb\nc\n", 3, 1, 8),
        (machine(8), "a slots=2\nb slots=4\n", 2, 2, 4),
        (machine(8, gpus=4), "a slots=8\nb slots=8\n", 2, 4, 2),
        (machine(8, gpus=4), "a slots=2\nb slots=2\n", 2, 2, 4),
    ],
)
def test_ranks_and_threads(
    tmp_path: Path, found: Machine, hosts: str, nodes: int, ranks_per_node: int, threads: int
) -> None:
    world = request(place(tmp_path, found, hosts), ranks_per_node=None, quick=False).world
    assert (world.nodes, world.ranks_per_node, world.threads_per_rank) == (nodes, ranks_per_node, threads)


def test_what_is_asked_for_comes_first_and_then_the_study(tmp_path: Path) -> None:
    with_study = replace(place(tmp_path, machine(8)), trial=trial(workers=2))
    assert request(with_study, ranks_per_node=None, quick=False).world == trial().world
    asked = request(with_study, ranks_per_node=4, quick=False)
    assert (asked.world.ranks_per_node, asked.world.threads_per_rank) == (4, 2)
    told = {"launch": {"scheduler": "local", "threads_per_rank": 1}}
    named = replace(check_target(None, told), scheduler=with_study.scheduler)
    for target in (named, replace(named, trial=trial())):
        assert request(target, ranks_per_node=4, quick=False).world.threads_per_rank == 1, "what the study or site says"
    with pytest.raises(RequestError, match="--ranks-per-node is 5000"):
        request(with_study, ranks_per_node=5000, quick=False)


def test_the_device_and_its_fast_arithmetic(tmp_path: Path) -> None:
    on_gpu = request(place(tmp_path, machine(8, gpus=1)), ranks_per_node=None, quick=False)
    assert (on_gpu.device, on_gpu.precision) == ("cuda", "bf16")
    on_cpu = request(place(tmp_path, machine(8)), ranks_per_node=None, quick=False)
    assert (on_cpu.device, on_cpu.precision) == ("cpu", "fp32")


def test_sizes_reach_from_1_kib_to_512_mib_and_quick_ones_to_4_mib(tmp_path: Path) -> None:
    here = place(tmp_path, machine(8))
    sizes = request(here, ranks_per_node=None, quick=False).sweep.sizes_bytes
    assert (sizes[0], sizes[1], sizes[-2], sizes[-1]) == (1024, 4096, 256 << 20, 512 << 20)
    assert list(sizes) == sorted(sizes)
    assert request(here, ranks_per_node=None, quick=True).sweep.sizes_bytes[-1] == 4 << 20


def test_hosts_that_do_not_answer_are_left_out_in_order(tmp_path: Path) -> None:
    left = place(tmp_path, machine(8), "a slots=2\nb slots=4\nc slots=4\n").without({"b"})
    assert ([host.name for host in left.hosts], left.nodes, left.scheduler.slots()) == (["a", "c"], 2, 2)
    assert left.without({"a", "c"}).nodes == 0
