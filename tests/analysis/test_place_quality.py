from __future__ import annotations

from typing import Any

import pytest

from results_factory import (
    VERSIONS,
    failed_run,
    make_curve,
    make_environment,
    make_results,
    make_trial,
    steady_run,
    steps_of_epoch,
)
from verdict_finder import THREE, kinds, three_repeats, verdict
from vitscale.analysis import analyse
from vitscale.analysis.runs.environments import RunEnvironment, differences, run_environments
from vitscale.analysis.runs.repeats import allocation_of
from vitscale.base.program import MEASURING_NAME
from vitscale.store.records import (
    Collective,
    DeviceRecord,
    GpuSamples,
    GpuSettings,
    RankRecord,
    ResourcesLine,
    TrafficLine,
)
from vitscale.store.results import Results, Run
from vitscale.trial.trial import Trial, World


@pytest.mark.parametrize(
    ("environments", "how"),
    [
        # Unpinned ranks see all cores: two threads each on a shared set of three.
        ([make_environment(r, cores_allowed=(0, 1, 2), threads=2) for r in range(2)], "2 ranks x 2 threads on 3"),
        # Pinned apart, but the quota gives them one core together.
        ([make_environment(r, cpu_quota_cores=1.0) for r in range(2)], "2 ranks x 1 thread on 1"),
        # Both ranks on one GPU.
        ([make_environment(r, device=DeviceRecord(type="cuda", name="T4", uuid="GPU-1")) for r in range(2)], "1 GPU"),
    ],
)
def test_oversubscribed(environments: list[Any], how: str) -> None:
    assert how in verdict(three_repeats(environments), "oversubscribed").message


@pytest.mark.parametrize(
    "environments",
    [
        [make_environment(r, cores_allowed=(2 * r, 2 * r + 1), threads=2) for r in range(2)],
        [make_environment(r, cores_allowed=(0,), host=f"node{r}") for r in range(2)],
        [make_environment(r, device=DeviceRecord(type="cuda", name="T4", uuid=f"GPU-{r}")) for r in range(2)],
        [make_environment(r, device=DeviceRecord(type="cuda", name="T4")) for r in range(2)],
    ],
)
def test_ranks_with_cores_or_gpus_of_their_own_are_not_oversubscribed(environments: list[Any]) -> None:
    assert "oversubscribed" not in kinds(three_repeats(environments))


def test_mixed_hardware_inside_a_run() -> None:
    environments = [make_environment(r, device=DeviceRecord(type="cpu", name=name)) for r, name in enumerate("AB")]
    assert "A and B" in verdict(three_repeats(environments), "mixed-hardware").message


def test_unlike_repeats_are_named() -> None:
    trial = make_trial()
    runs = [steady_run(trial, s, r) for r, s in enumerate(THREE)]
    runs.append(steady_run(trial, 0.1, 3, environments=[make_environment(versions={"torch": "2.12.0"})]))
    found = verdict(make_results([(make_curve([trial]), [trial])], runs), "unlike-runs")
    assert "repeat 4: torch: 2.13.0 against 2.12.0" in found.message


def test_repeats_measured_by_unlike_code_of_one_version_are_not_combined() -> None:
    """One number, 0.1.0, and steps 6 % faster: a mean over both is of neither."""
    trial = make_trial()

    def by(digest: str | None, repeat: int, seconds: float) -> Run:
        named = {"vitscale": "0.1.0"} | ({} if digest is None else {MEASURING_NAME: digest})
        environments = [make_environment(versions=VERSIONS | named)]
        return steady_run(trial, seconds, repeat, environments=environments)

    def judged(*runs: Run) -> Results:
        return make_results([(make_curve([trial]), [trial])], runs)

    mixed = judged(*(by("a" * 12, r, 0.1) for r in range(3)), by("b" * 12, 3, 0.094))
    message = f"repeat 4: {MEASURING_NAME}: {'a' * 12} against {'b' * 12}"
    assert message in verdict(mixed, "unlike-runs").message
    assert "with one vitscale" in verdict(mixed, "unlike-runs").advice
    (alone,) = analyse(mixed).trials.values()
    assert alone.step_seconds is not None
    assert alone.step_seconds.value == pytest.approx(0.1)
    (together,) = analyse(mixed, combine_unlike=True).trials.values()
    assert len(together.run_figures) == 4
    unknown = judged(*(by("a" * 12, r, 0.1) for r in range(3)), by(None, 3, 0.1), by(None, 4, 0.1))
    assert "unlike-runs" not in kinds(unknown), "records of older formats do not say"


@pytest.mark.parametrize(("samples", "told"), [(10_500, False), (10_501, True)])
def test_points_of_unlike_datasets_are_named_and_have_no_speedup(samples: int, told: bool) -> None:
    """Above 5 % of the smaller: an epoch is not the same work."""
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    runs = [
        steady_run(trial, 0.1, model={"train_samples": size})
        for trial, size in zip(trials, (10_000, samples), strict=True)
    ]
    results = make_results([(make_curve(trials), trials)], runs, repeats=1)
    assert ("unlike-runs" in kinds(results)) is told
    assert (analyse(results).curves[0].points[1].speedup is None) is told
    if told:
        assert "(2 ranks: images of the dataset: 10,000 against 10,501)" in verdict(results, "unlike-runs").message


def test_unlike_points_are_named() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    other = [make_environment(rank, device=DeviceRecord(type="cpu", name="Other CPU")) for rank in range(2)]
    runs = [steady_run(trials[0], 0.1), steady_run(trials[1], 0.1, environments=other)]
    found = verdict(make_results([(make_curve(trials), trials)], runs, repeats=1), "unlike-runs")
    assert "2 ranks: device: Example CPU against Other CPU" in found.message
    assert found.about.trials == (trials[1].identity(),)


def test_a_trial_that_failed_is_not_named_as_unlike() -> None:
    """Two ranks ran on another CPU, four ran out of memory: only the first are unlike, though neither has a speedup."""
    trials = [make_trial("ddp", gpus) for gpus in (1, 2, 4)]
    other = [make_environment(rank, device=DeviceRecord(type="cpu", name="Other CPU")) for rank in range(2)]
    runs = [steady_run(trials[0], 0.1), steady_run(trials[1], 0.1, environments=other)]
    runs.append(failed_run(trials[2], "oom", "rank 0 ran out of memory"))
    found = verdict(make_results([(make_curve(trials), trials)], runs, repeats=1), "unlike-runs")
    assert found.about.trials == (trials[1].identity(),)


def sending(results: Results, dtype: str) -> Results:
    """The same, with every rank's gradients sent in `dtype`, and a norm in fp32."""
    collectives = tuple(
        Collective(communicator="0", ranks=2, operation="all_reduce", dtype=kind, input_elements=n, output_elements=n)
        for kind, n in ((dtype, 5_500_000), ("float32", 1))
    )
    line = TrafficLine(step=9, backend="gloo", collectives=collectives)
    runs = [
        run.model_copy(update={"ranks": tuple(r.model_copy(update={"traffic": (line,)}) for r in run.ranks)})
        for run in results.runs
    ]
    return results.model_copy(update={"runs": tuple(runs)})


@pytest.mark.parametrize(("asked", "level"), [(None, "note"), ("fp32", "warning")])
def test_an_engine_that_names_another_dtype_than_the_one_that_travels(asked: str | None, level: str) -> None:
    trial = make_trial("deepspeed", 2, gradient_dtype=asked)
    results = make_results([(make_curve([trial]), [trial])], [steady_run(trial, 0.1)])
    found = verdict(sending(results, "bfloat16"), "gradient-dtype-sent")
    assert found.severity == level
    assert "in 1 trial they travel as bfloat16 where deepspeed names float32" in found.message
    assert found.about.trials == (trial.identity(),)
    assert "gradient-dtype-sent" not in kinds(sending(results, "float32"))
    assert "gradient-dtype-sent" not in kinds(results)  # nothing was counted


def test_trials_are_told_apart_by_the_dtype_that_was_sent() -> None:
    """Both engines name float32; one sends bf16."""
    trials = [make_trial("ddp", 2), make_trial("deepspeed", 2)]
    studies = [make_results([(make_curve([trial]), [trial])], [steady_run(trial, 0.1)]) for trial in trials]
    sent = [*sending(studies[0], "float32").runs, *sending(studies[1], "bfloat16").runs]
    both = make_results([(make_curve([trial]), [trial]) for trial in trials], sent)
    assert "float32 in 1 trial and bfloat16 in 1 trial" in verdict(both, "gradient-dtype").message
    assert "gradient-dtype" not in kinds(studies[0].model_copy(update={"runs": sending(studies[0], "bfloat16").runs}))


def test_gradient_dtypes_that_differ() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    runs = [steady_run(trials[0], 0.1), steady_run(trials[1], 0.1, model={"gradient_dtype": "bfloat16"})]
    found = verdict(make_results([(make_curve(trials), trials)], runs), "gradient-dtype")
    assert "float32 in 1 trial and bfloat16 in 1 trial" in found.message


def test_a_revision_that_is_not_known_is_no_other_one() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    runs = [
        steady_run(trial, 0.1, environments=[make_environment(rank, git_revision=revision) for rank in range(2)])
        for trial, revision in zip(trials, (None, "abc"), strict=True)
    ]
    results = make_results([(make_curve(trials), trials)], runs)
    assert "surroundings-changed" not in {found.kind for found in analyse(results).findings}


def test_changed_surroundings_are_a_note() -> None:
    trials = [make_trial("ddp", gpus) for gpus in (1, 2)]
    moved = [make_environment(rank, host="node2", settings={"NCCL_ALGO": "Ring"}) for rank in range(2)]
    runs = [steady_run(trials[0], 0.1), steady_run(trials[1], 0.1, environments=moved)]
    found = verdict(make_results([(make_curve(trials), trials)], runs), "surroundings-changed")
    assert "host, settings of NCCL, gloo or the network" in found.message


def run_environment(run: Run) -> RunEnvironment | None:
    return run_environments([run])[0]


def test_the_allocation_of_a_run_is_that_of_any_rank_that_names_one() -> None:
    trial = make_trial("ddp", 2)
    told = [make_environment(0), make_environment(1, allocation="slurm 4711")]
    host = told[0].host
    assert allocation_of(steady_run(trial, 0.1, environments=told)) == f"slurm 4711, {host}"
    assert allocation_of(steady_run(trial, 0.1)) == host


def on_cores(*logical: tuple[int, ...], physical: tuple[tuple[int, ...], ...], threads: int = 1) -> list[Any]:
    return [
        make_environment(rank, cores_allowed=own, physical_cores=cores, threads=threads)
        for rank, (own, cores) in enumerate(zip(logical, physical, strict=True))
    ]


@pytest.mark.parametrize(
    ("environments", "how"),
    [
        # 0 and 16 are one core: each rank has one of its threads.
        (on_cores((0,), (16,), physical=((0,), (0,))), "2 ranks with 2 threads on 1 physical core"),
        (on_cores((0, 1), (16, 17), physical=((0, 1), (0, 1)), threads=2), "4 threads on 2 physical cores"),
    ],
)
def test_ranks_on_the_same_physical_cores_are_told(environments: list[Any], how: str) -> None:
    assert how in verdict(three_repeats(environments), "shared-physical-cores").message


@pytest.mark.parametrize(
    "environments",
    [
        on_cores((0, 16), (1, 17), physical=((0,), (1,))),
        on_cores((0, 1, 2, 3), (0, 1, 2, 3), physical=((0, 1, 2, 3),) * 2, threads=2),  # not pinned, cores enough
        [make_environment(r, cores_allowed=(r,), physical_cores=(0,), host=f"node{r}") for r in range(2)],
        [make_environment(r) for r in range(2)],  # older records do not tell
    ],
)
def test_ranks_with_physical_cores_of_their_own_are_not(environments: list[Any]) -> None:
    assert "shared-physical-cores" not in kinds(three_repeats(environments))


def test_a_rank_on_the_other_socket_than_its_gpu_is_told() -> None:
    def placed(nodes: tuple[int, ...]) -> Results:
        gpu = DeviceRecord(type="cuda", name="T4", numa_node=1)
        return three_repeats([make_environment(r, device=gpu, numa_nodes=(n,)) for r, n in enumerate(nodes)])

    assert "(rank 1)" in verdict(placed((1, 0)), "far-from-gpu").message
    assert "far-from-gpu" not in kinds(placed((1, 1)))


def test_gpus_that_a_trial_on_the_cpu_left_idle_are_told() -> None:
    seen = three_repeats([make_environment(r, gpus_unused=4) for r in range(2)])
    assert "torch saw 4 CUDA device(s)" in verdict(seen, "gpus-unused").message
    assert "gpus-unused" not in kinds(three_repeats([make_environment(r, gpus_unused=0) for r in range(2)]))


def of_settings(settings: dict[str, str] | None = None, **gpu: Any) -> Any:
    device = DeviceRecord(type="cuda", name="T4", settings=GpuSettings(**gpu))
    environments = [make_environment(r, device=device, settings=settings or {}) for r in range(2)]
    return run_environment(steady_run(make_trial("ddp", 2), 0.1, environments=environments))


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"settings": {"NCCL_ALGO": "Tree"}}, {}, ("NCCL_ALGO: Tree against not set",)),
        ({"settings": {"NCCL_DEBUG": "INFO", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}}, {}, ()),
        ({"settings": {"FI_PROVIDER": "efa"}}, {}, ("FI_PROVIDER: efa against not set",)),
        ({"settings": {"UCX_TLS": "rc"}}, {"settings": {"UCX_TLS": "tcp"}}, ("UCX_TLS: rc against tcp",)),
        ({"settings": {"OFI_NCCL_PROTOCOL": "RDMA"}}, {}, ("OFI_NCCL_PROTOCOL: RDMA against not set",)),
        ({"settings": {"SHARP_COLL_ENABLE_SAT": "1"}}, {}, ("SHARP_COLL_ENABLE_SAT: 1 against not set",)),
        ({"settings": {"HSA_ENABLE_SDMA": "0"}}, {}, ("HSA_ENABLE_SDMA: 0 against not set",)),
        ({"settings": {"LD_LIBRARY_PATH": "/opt/efa"}}, {}, ("LD_LIBRARY_PATH: /opt/efa against not set",)),
        ({"settings": {"FI_LOG_LEVEL": "info", "UCX_LOG_LEVEL": "info", "OMP_PROC_BIND": "true"}}, {}, ()),
        ({"power_limit_watts": 350.0}, {"power_limit_watts": 400.0}, ("power limit in W: 350 against 400",)),
        ({"power_limit_watts": 350.0}, {}, ()),  # unknown on one side
        ({"ecc": True, "pcie_width": 16}, {"ecc": False, "pcie_width": 8},
         ("ECC: on against off", "PCIe lanes: 16 against 8")),
        ({"persistence": True}, {"persistence": False}, ()),
    ],
)  # fmt: skip
def test_runs_under_other_settings_are_not_combined(one: Any, other: Any, said: tuple[str, ...]) -> None:
    assert differences(of_settings(**one), of_settings(**other)) == said


def test_all_values_count_where_the_hosts_of_a_run_differ() -> None:
    """One host of the first run has the plug-in, none of the second one's."""
    device = DeviceRecord(type="cuda", name="T4")

    def of_hosts(*nets: str) -> RunEnvironment | None:
        environments = [
            make_environment(r, host=f"node{r}", device=device, settings={"NCCL_NET": net})
            for r, net in enumerate(nets)
        ]
        return run_environment(steady_run(make_trial("ddp", 2), 0.1, environments=environments))

    assert differences(of_hosts("efa", "socket"), of_hosts("socket", "socket")) == (
        "NCCL_NET: efa and socket against socket",
    )


def test_the_search_path_for_libraries_is_no_setting_of_gloo() -> None:
    settings = {"LD_LIBRARY_PATH": "/opt/x", "GLOO_SOCKET_IFNAME": "lo"}
    environments = [make_environment(r, settings=settings) for r in range(2)]
    found = run_environment(steady_run(make_trial("ddp", 2), 0.1, environments=environments))
    assert found is not None
    assert found.settings == (("GLOO_SOCKET_IFNAME", "lo"),)


def test_locked_clocks_are_seen_where_neither_heat_nor_power_hold_them() -> None:
    def at(*clocks: float | None) -> Any:
        """A run of which each rank's GPU ran at one of these in its first and in its second epoch."""
        run = steady_run(make_trial("ddp", 2), 0.1)
        lines = tuple(
            ResourcesLine(
                epoch=epoch, seconds=1.0, cpu_seconds=1.0, cpu_throttled_seconds=None, rss_bytes=1, peak_rss_bytes=1,
                gpu=gpu_samples(0.0).model_copy(update={"unheld_sm_clock_mhz": clock}),
            )
            for epoch, clock in enumerate(clocks)
        )  # fmt: skip
        return run_environment(
            run.model_copy(update={"ranks": tuple(r.model_copy(update={"resources": lines}) for r in run.ranks)})
        )

    said = ("SM clock where neither heat nor power held it back, in MHz: 1980 against 1410",)
    assert differences(at(None, 1980.0), at(1410.0, 1395.0)) == said
    assert differences(at(1980.0, 1500.0), at(1920.0)) == ()  # a warmer one
    assert (
        differences(at(1980.0), at(None))
        == differences(at(1980.0), run_environment(steady_run(make_trial(), 1.0)))
        == ()
    )


def test_network_adapters_must_agree_where_ranks_lie_on_several_hosts() -> None:
    def around(adapter: str | None, nodes: int) -> Any:
        told = None if adapter is None else (adapter,)
        ranks = [make_environment(rank, host=f"n{rank % nodes}", network_adapters=told) for rank in range(2)]
        return run_environment(steady_run(make_trial("ddp", 2), 0.1, environments=ranks))

    old, new = (f"MT4129, firmware {firmware}, 400 Gb/sec (4X NDR)" for firmware in ("28.39.1002", "28.43.2026"))
    assert differences(around(old, 2), around(new, 2)) == (f"network adapters: {old} against {new}",)
    assert differences(around(old, 1), around(new, 1)) == differences(around(old, 2), around(None, 2)) == ()


def test_a_governor_and_boost_must_agree_on_hosts_that_tell() -> None:
    def around(**told: Any) -> Any:
        return run_environment(steady_run(make_trial(), 0.1, environments=[make_environment(**told)]))

    quiet = around(cpu_governor="powersave", cpu_boost=True)
    assert differences(quiet, around(cpu_governor="performance", cpu_boost=False)) == (
        "CPU governor: powersave against performance", "CPU boost: on against off",
    )  # fmt: skip
    assert differences(quiet, around()) == ()


def with_use(**use: Any) -> Results:
    """Three repeats of two ranks, which used something of their machine in each epoch of 12.8 s."""
    results = three_repeats()
    fields: dict[str, Any] = {"cpu_throttled_seconds": None, "rss_bytes": 1, "peak_rss_bytes": 1} | use

    def with_lines(rank: RankRecord) -> RankRecord:
        lines = tuple(
            ResourcesLine(epoch=epoch, steps=steps_of_epoch(rank, epoch), seconds=10.0, cpu_seconds=9.0, **fields)
            for epoch in range(3)
        )
        return rank.model_copy(update={"resources": lines})

    runs = tuple(run.model_copy(update={"ranks": tuple(map(with_lines, run.ranks))}) for run in results.runs)
    return results.model_copy(update={"runs": runs})


def gpu_samples(share: float, *reasons: str) -> GpuSamples:
    unknown = dict.fromkeys(("utilisation", "sm_clock_mhz_median", "sm_clock_mhz_min"))
    unknown |= dict.fromkeys(("temperature_celsius_max", "power_watts_mean"))
    return GpuSamples(samples=12, throttle_reasons=reasons, throttled_share=share, **unknown)


def test_a_cpu_quota_that_holds_ranks_back_is_told_with_how_long() -> None:
    found = verdict(with_use(cpu_throttled_seconds=1.5), "throttled")
    assert found.message == "throttled: the CPU quota held back 1 trial (up to 7.7 % of their threads' time)"
    assert "larger quota" in found.advice
    assert len(found.about.trials) == 1


def test_gpus_that_slow_their_clocks_are_told_with_the_reason() -> None:
    found = verdict(with_use(gpu=gpu_samples(0.25, "HW thermal slowdown")), "throttled")
    assert found.message == (
        "throttled: GPUs slowed their clocks in 1 trial (HW thermal slowdown in 25 % of the samples)"
    )
    assert "cooling" in found.advice


@pytest.mark.parametrize(
    "use", [{"cpu_throttled_seconds": 0.05}, {"gpu": gpu_samples(0.005, "SW power cap")}, {"gpu": gpu_samples(0.0)}, {}]
)
def test_less_than_a_hundredth_of_the_time_is_no_throttling(use: dict[str, Any]) -> None:
    assert "throttled" not in kinds(with_use(**use))


def test_a_power_cap_is_a_note_with_limit_and_clock_and_no_throttling() -> None:
    capped = {"limits": ("power cap",), "limited_share": 0.9}
    clocks = {"sm_clock_mhz_median": 1400.0, "sm_clock_mhz_min": 1300.0}
    samples = gpu_samples(0.0).model_copy(update=clocks | capped)
    found = with_use(gpu=samples)
    said = verdict(found, "power-limit")
    assert (said.severity, said.message) == (
        "note", "GPUs ran at their power limit in 1 trial, median clock 1,400 to 1,400 MHz",
    )  # fmt: skip
    assert "throttled" not in kinds(found)


def test_heat_beside_a_power_cap_stays_a_warning() -> None:
    both = gpu_samples(0.25, "thermal (hardware)").model_copy(update={"limits": ("power cap",), "limited_share": 0.5})
    assert {"throttled", "power-limit"} <= set(kinds(with_use(gpu=both)))


def on_hosts(trial: Trial, nodes: int) -> Trial:
    size = trial.world.size
    return trial.model_copy(update={"world": World(nodes=nodes, ranks_per_node=size // nodes, threads_per_rank=1)})


def study_over_hosts(nodes: list[int]) -> Results:
    """1, 2 and 4 ranks on so many hosts each."""
    trials = [on_hosts(make_trial(gpus=gpus), count) for gpus, count in zip((1, 2, 4), nodes, strict=True)]
    runs = [steady_run(trial, seconds, repeat) for trial in trials for repeat, seconds in enumerate(THREE)]
    return make_results([(make_curve(trials), trials)], runs)


def test_a_curve_over_the_edge_of_a_host_is_told() -> None:
    found = verdict(study_over_hosts([1, 1, 2]), "across-hosts")
    assert "up to 2 ranks lie on one host, from 4 on they lie on several" in found.message
    assert found.severity == "note"


@pytest.mark.parametrize("nodes", [[1, 1, 1], [1, 2, 4]])
def test_a_curve_inside_a_host_or_with_one_rank_on_each_is_not(nodes: list[int]) -> None:
    assert "across-hosts" not in kinds(study_over_hosts(nodes))
