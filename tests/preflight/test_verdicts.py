"""Every verdict, on both sides of its threshold, from checks made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from check_factory import checked, compute, facts, interface, record, request, sweep, trial
from vitscale.preflight.fit import fits
from vitscale.preflight.judging import RULES, judged
from vitscale.present.document import SEVERITIES, Finding
from vitscale.store.checks import (
    STAGES,
    CheckedRank,
    CheckRecord,
    DiskLine,
    HostAnswer,
    LoaderLine,
    LoaderNeed,
    ReachLine,
    StageLine,
)
from vitscale.store.records import GpuSamples, GpuSettings, MatmulLine
from vitscale.trial.trial import World

LO = interface("lo", "127.0.0.1/8", None)


def kinds(whole: CheckRecord) -> set[str]:
    return {verdict.kind for verdict in judged(whole)}


def only(whole: CheckRecord, kind: str) -> Finding:
    (found,) = (verdict for verdict in judged(whole) if verdict.kind == kind)
    return found


def two(**second: Any) -> CheckRecord:
    """Two ranks, the second of which is as said."""
    return record(checked(0), checked(1, **second))


def test_a_good_cluster_gets_no_verdict() -> None:
    assert judged(two()) == ()


def test_the_most_severe_come_first() -> None:
    answers = (HostAnswer(name="gone", address=None, seconds=None, reason="no route"),)
    found = judged(record(checked(0), checked(1, pace=31.0, versions={"torch": "2.12.0"}), hosts=answers))
    assert [SEVERITIES.index(verdict.severity) for verdict in found] == sorted(
        SEVERITIES.index(verdict.severity) for verdict in found
    )
    assert found[0].kind == "host-unreachable"


# --- is everybody there? -------------------------------------------------------------------------------------------


def test_an_unreachable_host_is_named_and_the_others_are_still_judged() -> None:
    answers = (
        HostAnswer(name="node1", address="10.0.0.1", seconds=0.1, sees_folder=True),
        HostAnswer(name="node9", address="10.0.0.9", seconds=None, reason="no answer to ssh within 30 s"),
    )
    found = only(record(checked(0, pace=100.0), checked(1, pace=31.0), hosts=answers), "host-unreachable")
    assert (found.severity, found.about.hosts) == ("error", ("node9",))
    assert "node9 does not answer: no answer to ssh within 30 s" in found.message
    assert "slow-rank" in kinds(record(checked(0), checked(1, pace=31.0), hosts=answers))


def test_a_host_that_does_not_see_the_folder_is_told() -> None:
    answer = HostAnswer(name="node1", address="10.0.0.1", seconds=0.1, sees_folder=False)
    assert only(record(checked(0), hosts=(answer,)), "folder-not-shared").about.hosts == ("node1",)


def test_a_rank_that_never_came_and_one_that_stopped_are_told_apart() -> None:
    stopped = checked(1, 3, ended=False, stages=(StageLine(name="join", ending="done", seconds=1.0),))
    whole = record(
        checked(0, 3), stopped, request=request(3), ending="stopped", ending_reason="rank 1 was lost", log="bye"
    )
    assert only(whole, "rank-missing").about.ranks == (2,)
    assert "last words: bye" in only(whole, "rank-missing").message
    found = only(whole, "rank-stopped")
    assert (found.about.ranks, found.about.hosts) == ((1,), ("host1",))
    assert found.message == (
        "rank 1 was lost; rank 1 (host1) did not come to the end; the last finished stage of rank 1: join"
    )


def test_where_nothing_was_started_that_is_all_that_is_said_of_ranks() -> None:
    whole = record(request=request(2), ending="not started", ending_reason="no host is left to start one on")
    assert kinds(whole) == {"not-started"}


def test_ranks_that_do_not_reach_rank_0() -> None:
    reach = ReachLine(address="host0", port=29500, seconds=None, reason="TimeoutError: timed out")
    found = only(two(reach=reach), "rank-0-not-reached")
    assert found.about.ranks == (1,)
    assert "rank 1 (host1) cannot reach rank 0 at host0:29500 by TCP: TimeoutError" in found.message
    assert kinds(two(reach=ReachLine(address="host0", port=29500, seconds=0.1))) == set()


@pytest.mark.parametrize(("stage", "severity"), [("collectives", "error"), ("matmul", "warning"), ("disk", "error")])
def test_a_stage_is_told_once_with_the_rank_that_hung_first(stage: Any, severity: str) -> None:
    def ends(ending: Any, reason: str) -> tuple[StageLine, ...]:
        done = tuple(StageLine(name=name, ending="done", seconds=1.0) for name in STAGES if name != stage)
        return (*done, StageLine(name=stage, ending=ending, seconds=1.0, reason=reason))

    whole = record(
        checked(0, stages=ends("failed", "RuntimeError: Connection reset")),
        checked(1, stages=ends("timeout", "not done after 60 s")),
    )
    found = only(whole, "stage-failed")
    assert found.severity == severity
    assert found.message.startswith(
        f"{stage}: rank 1 (host1) not done after 60 s; rank 0 failed (host0: RuntimeError: Connection reset)"
    )


def test_broken_lines_are_told() -> None:
    assert "rank-1.jsonl:3: cut off" in only(two(broken=("rank-1.jsonl:3: cut off",)), "broken-lines").message


# --- the network ---------------------------------------------------------------------------------------------------


def test_a_variable_that_names_no_interface_of_a_host() -> None:
    settings = {"GLOO_SOCKET_IFNAME": "eth0"}
    there = (LO, interface("enp1s0", "10.0.0.2/24"))
    whole = record(checked(0, settings=settings), checked(1, settings=settings, interfaces=there))
    found = only(whole, "interface-missing")
    assert (found.severity, found.about.hosts) == ("error", ("host1",))
    assert "GLOO_SOCKET_IFNAME = 'eth0'" in found.message


def test_debians_own_name_at_127_0_1_1() -> None:
    found = only(two(hostname_addresses=("127.0.1.1",)), "loopback-chosen")
    assert (found.severity, found.about.hosts) == ("error", ("host1",))
    assert "127.0.1.1" in found.message
    assert 'launch.interface = "eth0"' in found.advice
    assert "loopback-chosen" not in kinds(record(checked(0, 1, hostname_addresses=("127.0.1.1",))))


def test_docker_chosen_with_the_same_address_everywhere() -> None:
    docker = (LO, interface("docker0", "172.17.0.1/16", None))
    ranks = [checked(n, interfaces=docker, hostname_addresses=("172.17.0.1",)) for n in (0, 1)]
    assert {"virtual-interface", "same-address"} <= kinds(record(*ranks))
    assert only(record(*ranks), "same-address").severity == "error"


@pytest.mark.parametrize(("speed", "told"), [(2001, True), (2000, False)])
def test_a_faster_interface_that_is_not_taken(speed: int, told: bool) -> None:
    there = (LO, interface("eth0", "10.0.0.2/24", 1000), interface("eth1", "10.1.0.2/24", speed))
    assert ("slower-interface" in kinds(two(interfaces=there))) is told


def test_infiniband_that_nobody_uses() -> None:
    port = {"name": "mlx5_0:1", "active": True, "rate": "100 Gb/sec (4X EDR)"}
    off = {"NCCL_IB_DISABLE": "1"}
    assert "infiniband-unused" in kinds(two(infiniband=(port,)))
    assert "infiniband-unused" in kinds(two(infiniband=(port,), backend="nccl", settings=off))
    assert "infiniband-unused" not in kinds(two(infiniband=(port,), backend="nccl"))
    assert "infiniband-unused" not in kinds(two(infiniband=(port | {"active": False},)))


@pytest.mark.parametrize(("share", "told"), [(0.49, True), (0.51, False)])
def test_a_link_far_below_its_interface(share: float, told: bool) -> None:
    lines = sweep("across nodes", "all_reduce", 2, 1e-4, share * 125e6)  # eth0 says 1000 Mbit/s
    ranks = [checked(n, collectives=lines) for n in (0, 1)]
    whole = record(*ranks, fits=fits(ranks))
    assert ("slow-link" in kinds(whole)) is told


# --- the pace ------------------------------------------------------------------------------------------------------


def test_the_slow_rank_in_the_words_of_the_issue() -> None:
    ranks = [checked(n, 4) for n in range(3)]
    slow = checked(3, 4, pace=31.0, name="GTX 1070")
    found = only(record(*ranks, slow), "slow-rank")
    assert found.about.ranks == (3,)
    assert found.message == (
        "rank 3 (GTX 1070, host3) computes at 0.31 of the others: with equal shares the job runs at its pace. "
        "Its matrix-multiply rate is 0.31 of the others' too: the device is slower"
    )
    assert found.advice.endswith("in [train] rank_speeds = [1.0, 1.0, 1.0, 0.31]")


@pytest.mark.parametrize(("pace", "told"), [(89.0, True), (91.0, False)])
def test_a_rank_is_slow_below_nine_tenths(pace: float, told: bool) -> None:
    assert ("slow-rank" in kinds(two(pace=pace))) is told


@pytest.mark.parametrize(("best", "told"), [(99.0, True), (100.0, False)])
def test_a_rank_that_was_disturbed_for_a_while_is_not_a_slow_one(best: float, told: bool) -> None:
    assert ("slow-rank" in kinds(two(compute=compute(50.0, 50.0, best)))) is told


def test_a_rank_whose_pace_is_too_small_for_a_number_is_slow() -> None:
    """5e-324 / 1e24 is 0."""
    ranks = [checked(rank, compute=compute(pace)) for rank, pace in enumerate((1e24, 5e-324))]
    assert only(record(*ranks), "slow-rank").about.ranks == (1,)


def test_slow_ranks_that_are_alike_are_told_together() -> None:
    ranks = [checked(n, 4, pace=100.0 if n < 2 else 50.0) for n in range(4)]
    assert only(record(*ranks), "slow-rank").about.ranks == (2, 3)


def test_why_a_rank_is_slow() -> None:
    rate = MatmulLine(dtype="fp32", size=1024, flops_per_second=1e11)
    hot = GpuSamples(
        samples=5, utilisation=1.0, sm_clock_mhz_median=600.0, sm_clock_mhz_min=600.0, temperature_celsius_max=90.0,
        power_watts_mean=100.0, throttle_reasons=("thermal (hardware)",), throttled_share=0.5,
    )  # fmt: skip
    held = compute(30.0, cpu_throttled_share=0.7)
    heated = compute(30.0, gpu=hot, gpu_reason=None)
    quota = two(compute=held, matmul=rate, cpu_quota_cores=0.3)
    assert "Its CPU quota of 0.3 cores holds it back" in only(quota, "slow-rank").message
    assert "thermal (hardware)" in only(two(compute=heated, matmul=rate), "slow-rank").message
    assert "something else takes its time" in only(two(compute=compute(30.0), matmul=rate), "slow-rank").message
    starved = two(compute=compute(30.0, cpu_share=0.31), type="cpu")
    assert "It gets 0.31 of a core: other processes take the rest" in only(starved, "slow-rank").message
    assert only(starved, "slow-rank").advice == "Stop what else runs there, and check again"
    assert {"cpu-throttled", "too-few-cores"} <= kinds(quota)
    assert "gpu-throttled" in kinds(two(compute=heated))


def test_a_quota_that_all_ranks_have_alike_is_not_why_one_of_them_is_slower() -> None:
    """Seen on two cores of which one was disturbed: both ranks had 0.8 of a core, one computed at 0.80 of the other."""
    held = [compute(pace, pace, pace, cpu_throttled_share=0.2, cpu_share=0.8) for pace in (56.0, 45.0)]
    ranks = [checked(n, compute=each, cpu_quota_cores=0.8, type="cpu") for n, each in enumerate(held)]
    assert "quota" not in only(record(*ranks), "slow-rank").message


def test_unlike_devices() -> None:
    assert "NVIDIA A100 (rank 0) and GTX 1070 (rank 1)" in only(two(name="GTX 1070"), "mixed-devices").message


def test_a_pace_that_varies_is_told() -> None:
    assert "unsteady" in kinds(two(compute=compute(100.0, 100.0, 84.0)))
    assert "unsteady" not in kinds(two(compute=compute(100.0, 100.0, 86.0)))


def test_gpus_of_one_type_at_unlike_clocks() -> None:
    def at(mhz: float) -> Any:
        gpu = GpuSamples(
            samples=5, utilisation=1.0, sm_clock_mhz_median=mhz, sm_clock_mhz_min=mhz, temperature_celsius_max=50.0,
            power_watts_mean=100.0, throttle_reasons=(), throttled_share=0.0,
        )  # fmt: skip
        return compute(100.0, gpu=gpu, gpu_reason=None)

    assert only(record(checked(0, compute=at(1400)), checked(1, compute=at(1200))), "clocks-differ").about.ranks == (1,)
    assert "clocks-differ" not in kinds(record(checked(0, compute=at(1400)), checked(1, compute=at(1300))))


def test_a_power_limit_is_told_where_it_is_below_the_default_or_was_reached() -> None:
    def limited(rank: int, watts: float | None, default: float | None, *limits: str) -> CheckedRank:
        gpu = GpuSamples(
            samples=5, utilisation=1.0, sm_clock_mhz_median=1400.0, sm_clock_mhz_min=1400.0,
            temperature_celsius_max=50.0, power_watts_mean=400.0, throttle_reasons=(), throttled_share=0.0,
            limits=limits, limited_share=0.9 if limits else 0.0,
        )  # fmt: skip
        settings = GpuSettings(power_limit_watts=watts, power_limit_default_watts=default)
        line = facts(rank, 5)
        device = line.environment.device.model_copy(update={"settings": settings})
        environment = line.environment.model_copy(update={"device": device})
        own = line.model_copy(update={"environment": environment})
        return checked(rank, 5, compute=compute(100.0, gpu=gpu, gpu_reason=None)).model_copy(update={"facts": own})

    told: list[Any] = [
        (400.0, 700.0),
        (400.0, 700.0, "power cap"),
        (700.0, 700.0, "power cap"),
        (700.0, 700.0),
        (None, 700.0),
    ]
    found = [v for v in judged(record(*(limited(n, *each) for n, each in enumerate(told)))) if v.kind == "power-limit"]
    assert [(verdict.severity, verdict.about.ranks, verdict.message) for verdict in found] == [
        ("note", (0, 1), "the GPUs of ranks 0 and 1 (host0 and host1) have a power limit of 400 W, below the default "
                         "of 700 W"),
        ("note", (2,), "the GPU of rank 2 (host2) has a power limit of 700 W, which was reached"),
    ]  # fmt: skip


# --- the hosts -----------------------------------------------------------------------------------------------------


def test_versions_and_drivers_that_differ() -> None:
    found = kinds(two(versions={"torch": "2.12.0"}, driver="535.2"))
    assert {"versions-differ", "drivers-differ"} <= found
    message = only(two(versions={"torch": "2.12.0"}), "versions-differ").message
    assert "torch 2.13.0, but 2.12.0 on host1" in message


def test_cores_for_threads_and_for_the_loader() -> None:
    world = World(nodes=1, ranks_per_node=2, threads_per_rank=4)
    ranks = [checked(n, host="host0", host_cores=8) for n in (0, 1)]
    assert kinds(record(*ranks, request=request(world=world))) == set()
    crowded = [checked(n, host="host0", host_cores=7) for n in (0, 1)]
    assert "2 x 4 threads on 7 cores" in only(record(*crowded, request=request(world=world)), "too-few-cores").message
    with_workers = record(*ranks, request=request(world=world, trial=trial(workers=2)))
    assert only(with_workers, "loader-shares-cores").about.hosts == ("host0",)


# --- data and disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "rate", "severity"),
    [("run", 99.0, "warning"), ("run", 101.0, None), ("arithmetic", 29.0, "warning"), ("arithmetic", 31.0, "note"),
     ("arithmetic", 101.0, None)],
)  # fmt: skip
def test_a_loader_slower_than_the_model(source: Any, rate: float, severity: str | None) -> None:
    loader = LoaderLine(images_per_second=rate, workers=0, batch=32)
    need = LoaderNeed(images_per_second=100.0, source=source, described="as a stored run did")
    whole = record(checked(0), checked(1, loader=loader), loader_need=need, request=request(trial=trial()))
    found = [verdict.severity for verdict in judged(whole) if verdict.kind == "loader-slow"]
    assert found == ([] if severity is None else [severity])


@pytest.mark.parametrize(
    ("free", "kind"), [(2**30, None), (2**30 - 1, "little-room"), (2**26, "little-room"), (2**26 - 1, "disk-full")]
)
def test_room_on_the_disk(free: int, kind: str | None) -> None:
    assert kinds(two(disk=disk(free_bytes=free))) == ({kind} if kind else set())


def test_slow_unshared_and_late_disks() -> None:
    assert kinds(two(disk=disk(record_seconds=(0.11,)))) == {"slow-disk"}
    assert kinds(two(disk=disk(record_seconds=(0.09,)))) == set()
    assert kinds(two(disk=disk(seen_seconds=None, seen_reason="not seen within 10 s"))) == {"folder-not-shared"}
    assert kinds(two(disk=disk(seen_seconds=None, seen_reason="the ranks did not meet"))) == set()
    assert kinds(two(disk=disk(seen_seconds=2.1))) == {"late-folder"}


def disk(**fields: Any) -> DiskLine:
    line = {"free_bytes": 10**12, "record_seconds": (0.001,), "record_bytes": 300, "seen_seconds": 0.01}
    return DiskLine.model_validate(line | fields)


# --- records that tell little --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_needs_what_was_not_measured(rule: Any) -> None:
    for ranks in ((), (CheckedRank(rank=0), CheckedRank(rank=1)), (CheckedRank(rank=0, facts=facts()),)):
        list(rule(record(*ranks, request=request(2))))
