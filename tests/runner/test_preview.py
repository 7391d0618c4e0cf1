from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from check_factory import checked, record, request
from results_factory import make_curve, make_results, make_trial, steady_run, write_results
from study_factory import EIGHT_CORES, write_study
from vitscale.errors import StoreError
from vitscale.prediction.memory.forecast import forecast_bytes, oom_chance
from vitscale.present.terminal import lines
from vitscale.present.units import UNKNOWN
from vitscale.runner import Plan, expectation, plan
from vitscale.runner.expectation import Expectations, expectations
from vitscale.runner.memory_fits import LargestBatches, MemoryFit, largest_images, memory_fits, unfit
from vitscale.runner.plan_estimate import PlanEstimate, buckets_note
from vitscale.runner.preview import _batch_in_words, plan_document, plan_fields
from vitscale.store.checks import HostAnswer, check_folder, write_check
from vitscale.store.records import MatmulLine
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import Trial

LIKE_THE_RESULTS: dict[str, dict[str, Any]] = {
    "model": {"name": "vit-ti16", "image_size": 32, "patch_size": 16},
    "data": {"name": "synthetic", "samples": 1024},
    "train": {"micro_batch": 8, "epochs": 10, "engine": "ddp", "precision": "fp32", "device": "cpu"},
    "launch": {"threads_per_rank": 1, "launcher": "torchrun"},
    "scaling": {"gpus": [1, 2, 4]},
    "measure": {"repeats": 2},
}
"""1,024 images in 128, 64 and 32 steps of an epoch, for ten epochs."""


@pytest.mark.parametrize(
    ("grad_accum", "shares", "shown"),
    [(1, None, "8"), (3, None, "8 x3"), (1, (10, 10, 4), "2 x 10 + 4"), (3, (10, 10, 4), "(2 x 10 + 4) x3")],
)
def test_the_batch_of_a_rank_or_of_each(grad_accum: int, shares: tuple[int, ...] | None, shown: str) -> None:
    assert _batch_in_words(make_trial("ddp", 3, grad_accum=grad_accum, micro_batches=shares).train) == shown


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A step of DDP takes 100 ms on 1 rank and 110 ms on 2, in three runs of each; 6 s of start-up."""
    trials = [_resolved(make_trial("ddp", gpus)) for gpus in (1, 2)]
    runs = [
        steady_run(trial, seconds * (1 + 0.001 * repeat), repeat)
        for trial, seconds in zip(trials, (0.1, 0.11), strict=True)
        for repeat in range(3)
    ]
    folder = tmp_path / "measured"
    write_results(make_results([(make_curve(trials), trials)], runs), folder)
    return folder


def _resolved(trial: Trial) -> Trial:
    return trial.model_copy(update={"model": resolve(trial.model, 10)})


def planned(tmp_path: Path, changes: Mapping[str, dict[str, Any]] | None = None) -> Plan:
    return plan(write_study(tmp_path, {**LIKE_THE_RESULTS, **(changes or {})}), EIGHT_CORES)


def printed(found: Plan, estimate: PlanEstimate, width: int = 120) -> str:
    return "\n".join(line.plain for line in lines(plan_document(found, estimate), width, verbose=True))


def test_commands_have_the_container_in_which_ranks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of jobs that are only submitted, whose hosts nobody knows yet."""
    monkeypatch.chdir(tmp_path)
    slurm = {
        "container": "vit.sif",
        "container_gpus": "amd",
        "container_mounts": ["/data:/data:ro"],
        "python": "python3",
    }
    cluster: dict[str, dict[str, Any]] = {
        "launch": {"scheduler": "slurm"},
        "slurm": slurm,
        "node": {"cores": 4, "gpus": 4},
        "scaling": {"gpus": [2]},
    }
    found = planned(tmp_path, cluster)
    (trial,) = plan_fields(found)["trials"]
    (command,) = trial["commands"]
    words = list(command)
    assert words[words.index("apptainer") :] == [
        *("apptainer", "exec", "--rocm", "--bind", "RESULTS:RESULTS", "--bind", f"{tmp_path}:{tmp_path}"),
        *("--bind", "/data:/data:ro", "--pwd", str(tmp_path), "vit.sif"),
        *("python3", "-P", "-m", "vitscale.worker", "RESULTS/runs/TRIAL"),
    ]
    assert " apptainer exec --rocm " in " ".join(line.plain for line in lines(plan_document(found), 1000, verbose=True))


def test_times_come_from_results_of_the_same_work(tmp_path: Path, results: Path) -> None:
    found = planned(tmp_path)
    expected = expectations(found, results)

    by_ranks = {trial.world.size: expected.by_trial[name] for name, trial in found.record.trials.items()}
    one, two, four = (by_ranks[ranks] for ranks in (1, 2, 4))
    assert one.seconds is not None
    assert two.seconds is not None
    assert four.seconds is not None
    # 10 epochs of 128 steps, and the start-up.
    assert one.seconds.value == pytest.approx(1280 * 0.1 + 6.0, rel=0.03)
    assert two.seconds.value == pytest.approx(640 * 0.11 + 6.0, rel=0.03)
    assert one.seconds.ends[0] < one.seconds.value < one.seconds.ends[1]
    # Measured for 3 epochs, planned for 10: another trial, whose steps were measured.
    assert {one.known_by, two.known_by} == {"measured"}
    assert four.known_by == "extrapolated"


def test_a_run_takes_what_measured_runs_took_beside_their_steps_too(tmp_path: Path) -> None:
    """They are 3 epochs of 128 steps of 0.1 s, each with 2 s of evaluation, 6 s until the first step is done, and 4 s
    of pauses and an end."""
    trial = _resolved(make_trial("ddp", 1))
    runs = [steady_run(trial, 0.1, repeat) for repeat in range(3)]
    whole = []
    for run in runs:
        [rank] = run.ranks
        epochs = tuple(line.model_copy(update={"evaluation_seconds": 2.0}) for line in rank.epochs)
        assert len(epochs) == 3
        outcome = run.outcome.model_copy(update={"wall_seconds": 6.0 + 383 * 0.1 + 3 * 2.0 + 4.0})
        whole.append(
            run.model_copy(update={"ranks": (rank.model_copy(update={"epochs": epochs}),), "outcome": outcome})
        )
    write_results(make_results([(make_curve([trial]), [trial])], whole), tmp_path / "measured")
    found = planned(tmp_path, {"scaling": {"gpus": [1]}})

    [one] = expectations(found, tmp_path / "measured").by_trial.values()

    assert one.seconds is not None
    assert one.seconds.value == pytest.approx(6.0 + 1279 * 0.1 + 10 * 2.0 + 4.0)  # 10 epochs of 128 steps


def test_start_up_that_was_not_measured_under_a_launcher_is_said_to_be_left_out(tmp_path: Path, results: Path) -> None:
    under_mpi = {"launch": {"threads_per_rank": 1, "launcher": "mpirun"}}
    for changes, said in (({}, False), (under_mpi, True)):
        found = planned(tmp_path, changes)
        expected = expectations(found, results)
        told = printed(found, PlanEstimate(expected=expected))
        assert ("not in it: start-up under mpirun, where none was measured" in told) is said
        one = next(expected.by_trial[name] for name, trial in found.record.trials.items() if trial.world.size == 1)
        assert one.seconds is not None
        assert one.seconds.value == pytest.approx(1280 * 0.1 + (0.0 if said else 6.0), rel=0.03)


def test_the_sum_is_of_all_runs_and_the_cost_of_all_ranks(tmp_path: Path, results: Path) -> None:
    found = planned(tmp_path)
    expected = expectations(found, results, 3.0)
    own = {trial.world.size: expected.by_trial[name].seconds for name, trial in found.record.trials.items()}

    whole = expected.total(found)

    assert whole is not None
    seconds, runs, hours = whole
    assert runs == 6
    known = {ranks: one.value for ranks, one in own.items() if one is not None}
    assert seconds.value == pytest.approx(2 * sum(known.values()))
    assert hours.value == pytest.approx(2 * sum(ranks * value for ranks, value in known.items()) / 3600)
    content = plan_fields(found, PlanEstimate(expected=expected))
    assert content["expected"]["cost"] == pytest.approx(3 * hours.value)
    [first, *_] = content["trials"]
    assert first["cost"] == pytest.approx(3 * first["gpu_hours"])
    assert first["gpu_hours"] == pytest.approx(first["gpus"] * first["expected_seconds"] / 3600)


def test_the_table_fits_80_columns_and_says_what_times_rest_on(tmp_path: Path, results: Path) -> None:
    found = planned(tmp_path)
    text = printed(found, PlanEstimate(memory_fits(found, 4 * 10**9), expectations(found, results, 3.0)), 80)

    assert "a rank has 3.73 GiB: all trials fit" in text
    assert "predicted from" in text
    assert "2 measured, 1 extrapolated" in text
    table = text[text.index("engine ") : text.index("  in all trials:")].splitlines()
    assert table[0].split()[-7:] == ["memory", "fits", "up", "to", "time", "GPU-h", "cost"]
    assert len(table) == 2 + 3
    assert max(map(len, table)) <= 80
    assert "fits " not in table[0].replace("fits up to", "")


def test_without_results_and_checks_times_are_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    found = planned(tmp_path)
    estimate = PlanEstimate(memory_fits(found), expectations(found, None))

    text = printed(found, estimate, 200)
    content = plan_fields(found, estimate)

    assert "expected time: unavailable: no results to predict from" in text
    assert "GPU-h" not in text.replace("GPU-hours", "")
    assert content["expected"] is None
    assert content["trials"][0]["expected_seconds"] is None
    assert "no results to predict from" in content["trials"][0]["expected_reason"]


def test_the_study_s_own_results_are_found_by_themselves(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(tmp_path)
    (tmp_path / "results").mkdir()
    results.rename(tmp_path / "results" / found.record.name)
    monkeypatch.chdir(tmp_path)

    assert expectations(found, None).origin == "predicted from results/example"


def test_results_of_other_work_say_nothing(tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    found = planned(tmp_path, {"model": {"name": "vit-s16", "image_size": 32, "patch_size": 16}})

    expected = expectations(found, results)

    assert {one.seconds for one in expected.by_trial.values()} == {None}
    assert all("no run of this model" in one.reason for one in expected.by_trial.values())


def test_a_folder_without_results_is_an_error_where_it_was_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        expectations(planned(tmp_path), tmp_path / "nothing")


def test_a_check_gives_the_order_of_magnitude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    store_check("fp32", "cpu", 1e9, day=14)
    found = planned(tmp_path)
    expected: Expectations = expectations(found, None)

    by_ranks = {trial.world.size: expected.by_trial[name].seconds for name, trial in found.record.trials.items()}
    one, two = by_ranks[1], by_ranks[2]
    assert one is not None
    assert two is not None
    # At the rate of matrix products, at a third and at a ninth of it; half as long on two ranks.
    assert one.value == pytest.approx(3 * one.ends[0])
    assert one.ends[1] == pytest.approx(9 * one.ends[0])
    assert one.value == pytest.approx(2 * two.value)
    text = printed(found, PlanEstimate(expected=expected), 200)
    how = "order of magnitude from FLOPs at a third of the matrix-multiply rate of vitscale check, 2023-11-14"
    assert f"{how}, start-up and transfers left out" in " ".join(text.split())
    assert (
        "start-up and transfers left out" in plan_fields(found, PlanEstimate(expected=expected))["expected"]["origin"]
    )
    assert "~" in text


def store_check(dtype: str, device: str, flops_per_second: float, *, day: int, asked: str = "") -> None:
    """Among the user's own, of this machine. `asked`: of a host that was asked for by this name."""
    seconds = 1_700_000_000.0 + 86_400 * (day - 14)
    line = MatmulLine(dtype=dtype, size=4096, flops_per_second=flops_per_second)
    whole = record(
        *(checked(rank, host="node1" if asked else socket.gethostname(), matmul=line) for rank in range(2)),
        id=f"202311{day}T221320-abcdef",
        started_unix_seconds=seconds,
        request=request(device=device, precision="bf16" if dtype == "bf16" else "fp32"),
        hosts=(HostAnswer(name=asked, address=None, seconds=0.1),) if asked else (),
    )
    write_check(check_folder(None), whole)


def test_a_check_tells_nothing_of_another_device_or_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest one is of a GPU in bf16: trials on the CPU take the one before, and bf16 there has none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    sweep = {"scaling": {"gpus": [1]}, "train": LIKE_THE_RESULTS["train"] | {"precision": None}}
    found = planned(tmp_path, sweep | {"sweep": {"train.precision": ["fp32", "bf16"]}})
    store_check("bf16", "cuda", 4e14, day=16)
    assert {own.seconds for own in expectations(found, None).by_trial.values()} == {None}

    store_check("fp32", "cpu", 1e9, day=15)
    store_check("fp32", "cpu", 1e12, day=14)
    expected = expectations(found, None)
    by_precision = {trial.train.precision: expected.by_trial[name] for name, trial in found.record.trials.items()}
    assert by_precision["bf16"].seconds is None
    assert by_precision["bf16"].reason.endswith(
        "no stored `vitscale check` of its hosts on its device and in its precision"
    )
    assert expected.origin.endswith("of vitscale check, 2023-11-15, start-up and transfers left out")
    at_a_gigaflop = by_precision["fp32"].seconds
    assert at_a_gigaflop is not None

    store_check("bf16", "cpu", 2e9, day=17)
    expected = expectations(found, None)
    by_precision = {trial.train.precision: expected.by_trial[name] for name, trial in found.record.trials.items()}
    assert by_precision["fp32"].seconds == at_a_gigaflop
    twice_as_fast = by_precision["bf16"].seconds
    assert twice_as_fast is not None
    assert twice_as_fast.value == pytest.approx(at_a_gigaflop.value / 2)
    assert "of vitscale check, 2023-11-15 and 2023-11-17, start-up" in expected.origin


def test_tf32_is_how_a_gpu_multiplies_fp32() -> None:
    line = MatmulLine(dtype="tf32", size=4096, flops_per_second=1e13)
    whole = record(checked(matmul=line), checked(1, matmul=None), request=request(device="cuda"))
    assert expectation._matmul_rates(whole, "cuda", "fp32") == [1e13]
    assert expectation._matmul_rates(whole, "cuda", "bf16") == expectation._matmul_rates(whole, "cpu", "fp32") == []


def test_a_check_over_a_hostfile_is_known_again_by_the_names_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks call themselves node1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    store_check("fp32", "cpu", 1e9, day=14, asked="192.0.2.1")
    known = []
    for name in ("192.0.2.1", "node1", "192.0.2.2"):
        (tmp_path / "hosts").write_text(f"{name} slots=1\n")
        found = planned(tmp_path, {"scaling": {"gpus": [1]}, "launch": {"hostfile": "hosts"}})
        known += [own.seconds is not None for own in expectations(found, None).by_trial.values()]
    assert known == [True, True, False]


def test_what_will_not_fit_is_marked_and_in_no_sum_when_skipped(tmp_path: Path, results: Path) -> None:
    found = planned(tmp_path, {"sweep": {"train.micro_batch": [8, 1024]}, "scaling": {"gpus": [1]}})
    forecasts = {name: fit.forecast_bytes or 0 for name, fit in memory_fits(found).items()}
    small, large = sorted(forecasts, key=lambda name: forecasts[name])
    # Beside tensors a rank on CPU takes half a GB in the middle (`prediction.memory.forecast`).
    fits = memory_fits(found, 500_000_000 + (forecasts[small] + forecasts[large]) // 2)
    expected = expectations(found, results)

    marked = PlanEstimate(fits, expected)
    skipping = PlanEstimate(fits, expected, frozenset(unfit(fits)))

    text = printed(found, marked)
    assert "1 of 2 trials will not fit (--skip-unfit leaves them out)" in text
    assert " no " in next(line for line in text.splitlines() if line.endswith(large))
    assert " yes " in next(line for line in text.splitlines() if line.endswith(small))
    whole, less = expected.total(found), expected.total(found, skipping.skipped)
    assert whole is not None
    assert less is not None
    own = expected.by_trial[large].seconds
    assert own is not None
    assert whole[0].value - less[0].value == pytest.approx(2 * own.value)
    assert "not in it: 2 runs that are skipped" in printed(found, skipping)
    content = {one["trial"]: one for one in plan_fields(found, marked)["trials"]}
    assert (content[large]["fits"], content[small]["fits"]) == (False, True)
    assert content[large]["oom_chance"] > 0.5


def test_the_largest_micro_batch_that_fits_is_where_memory_ends(tmp_path: Path) -> None:
    capacity_bytes = 4 * 10**9
    plan = planned(tmp_path)
    fits = memory_fits(plan, capacity_bytes)
    for trial_id, trial in plan.record.trials.items():
        largest = fits[trial_id].largest
        assert largest is not None
        assert largest.recomputed is not None
        for checkpointing, images in ((False, largest.kept), (True, largest.recomputed)):
            at_limit, beyond = (
                trial.model_copy(
                    update={
                        "train": trial.train.model_copy(
                            update={"micro_batch": count, "activation_checkpointing": checkpointing}
                        )
                    }
                )
                for count in (images, images + 1)
            )
            chances = oom_chance(
                np.array([forecast_bytes(at_limit), forecast_bytes(beyond)], dtype=float), capacity_bytes, "cpu"
            )
            assert chances[0] < 0.5 <= chances[1]


def test_a_cpu_with_memory_to_spare_is_not_asked_for_its_largest_batch(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert all(fit.largest is None for fit in memory_fits(plan).values())


def test_the_largest_image_is_not_told_of_a_model_whose_card_is_of_one_size() -> None:
    """Of another size nothing is known, which is not the same as that it fits."""
    small = make_trial(device="cuda", precision="bf16")
    trials = {}
    for size in (192, 256):
        model = resolve(ModelSpec(name="swinv2-t", image_size=size), 10)
        trials[str(size)] = small.model_copy(update={"model": model})
    fits = dict.fromkeys(trials, MemoryFit(10**10, 10**10, oom_chance=0.6))
    assert largest_images(trials, fits) == []


def test_a_batch_that_is_unknown_with_checkpointing_is_known_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a traced model that has no blocks to compute again."""
    plan = planned(tmp_path)

    def without_checkpointing(trial: Trial) -> int | None:
        return None if trial.train.activation_checkpointing else forecast_bytes(trial)

    expected = {name: fit.largest for name, fit in memory_fits(plan, 4 * 10**9).items()}
    monkeypatch.setattr("vitscale.runner.memory_fits.forecast_bytes", without_checkpointing)
    fits = memory_fits(plan, 4 * 10**9)
    for name, fit in fits.items():
        largest = expected[name]
        assert largest is not None
        assert fit.largest == LargestBatches(largest.kept, None)
        assert f"{largest.kept:,} ({UNKNOWN})" in printed(plan, PlanEstimate(fits))
    fields = plan_fields(plan, PlanEstimate(fits))["trials"][0]
    assert fields["largest_micro_batch_with_activation_checkpointing"] is None


def test_where_not_one_image_fits_the_largest_batch_is_none(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    fits = memory_fits(plan, 10**6)
    assert {fit.largest for fit in fits.values()} == {LargestBatches(0, 0)}
    assert "none (none)" in printed(plan, PlanEstimate(fits))


def test_on_cpu_only_this_machine_s_memory_is_known(tmp_path: Path) -> None:
    """[node] describes another machine, and does not say how much memory it has."""
    own = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    here = planned(tmp_path, {"scaling": {"gpus": [1]}})
    assert [fit.capacity_bytes for fit in memory_fits(here).values()] == [own]
    elsewhere = planned(tmp_path, {"scaling": {"gpus": [1]}, "node": {"cores": 64, "fast_bf16": False}})
    for given in (None, 10**15):
        (fit,) = memory_fits(elsewhere, given).values()
        assert (fit.capacity_bytes, fit.oom_chance) == ((None, None) if given is None else (given, 0.0))


@pytest.mark.parametrize(("memory_gb", "fits"), [(None, None), (2, False), (64, True)])
def test_what_is_offloaded_must_fit_into_the_host(tmp_path: Path, memory_gb: int | None, fits: bool | None) -> None:
    """Two ranks of a host offload 16 bytes of each of ViT-B/16's 86 million parameters: 1.4 GB, beside 1 GB of their
    own. A rank's GPU has 80 GB."""
    study: dict[str, dict[str, Any]] = {
        "model": {"name": "vit-b16", "image_size": 224, "patch_size": 16},
        "train": LIKE_THE_RESULTS["train"] | {"engine": "fsdp2", "device": "cuda", "offload": "parameters"},
        "scaling": {"gpus": [2]},
        "node": {"cores": 4, "gpus": 2, "memory_gb": memory_gb},
    }
    found = plan(write_study(tmp_path, {**LIKE_THE_RESULTS, **study}))
    memory = memory_fits(found, 80 * 10**9)
    (trial,) = plan_fields(found, PlanEstimate(memory))["trials"]
    assert trial["host_memory_bytes"] == pytest.approx(16 * trial["parameters"], rel=1e-6)
    assert trial["host_memory_capacity_bytes"] == (None if memory_gb is None else memory_gb * 10**9)
    assert (trial["oom_chance"], trial["fits"]) == (0.0, fits)
    text = " ".join(printed(found, PlanEstimate(memory)).split())
    if memory_gb is None:
        assert trial["host_oom_chance"] is None
        assert "whether the host's memory suffices for 1 of 1 trials: unavailable: they offload up to" in text
        assert "write memory_gb under [node]" in text
    elif fits:
        assert "a rank has 74.5 GiB, a host has 59.6 GiB for what its ranks offload: all trials fit" in text
    else:
        assert "1 of 1 trials will not fit (--skip-unfit leaves them out)" in text
        (reason,) = unfit(memory).values()
        assert reason.startswith("will not fit in the host's memory: forecast 1.4 GB that its 2 ranks offload")


def test_the_largest_image_that_fits_is_told_with_and_without_checkpointing(tmp_path: Path) -> None:
    """By trying: the size told fits, and one patch more does not."""

    def study(*sizes: int, checkpointing: bool = False) -> Plan:
        train = {"micro_batch": 64, "activation_checkpointing": checkpointing}
        changes = {"sweep": {"model.image_size": list(sizes)}, "scaling": {"gpus": [1]}}
        return planned(tmp_path, {**changes, "train": LIKE_THE_RESULTS["train"] | train})

    found = study(32, 256)
    estimate = PlanEstimate(memory_fits(found, 4 * 10**9))
    (told,) = plan_fields(found, estimate)["largest_image_sizes"]
    assert sorted(told["trials"]) == sorted(found.record.trials)
    kept, again = told["largest_image_size"], told["largest_image_size_with_activation_checkpointing"]
    assert kept < again
    for size, checkpointing in ((kept, False), (again, True)):
        tried = study(size, size + 16, checkpointing=checkpointing)
        fits = {
            tried.record.trials[trial_id].model.image_size: not fit.unfit
            for trial_id, fit in memory_fits(tried, 4 * 10**9).items()
        }
        assert fits == {size: True, size + 16: False}
    line = f"largest image_size that fits, ddp on 1 rank, micro-batch 64: {kept:,}; with activation checkpointing"
    assert f"{line} {again:,}" in printed(found, estimate, 200)


def test_the_largest_image_is_told_once_for_trials_that_take_the_same_memory(tmp_path: Path) -> None:
    """Two learning rates have one line, two micro-batches have two."""
    sweep = {"train.learning_rate": [0.1, 0.2], "train.micro_batch": [64, 32], "model.image_size": [32, 256]}
    found = planned(tmp_path, {"sweep": sweep, "scaling": {"gpus": [1]}})
    trials = found.record.trials
    estimate = PlanEstimate(memory_fits(found, 4 * 10**9))
    groups = plan_fields(found, estimate)["largest_image_sizes"]
    batches = [{trials[trial_id].train.micro_batch for trial_id in group["trials"]} for group in groups]
    assert batches == [{64}, {32}]
    assert [len(group["trials"]) for group in groups] == [4, 4]
    assert groups[0]["largest_image_size"] < groups[1]["largest_image_size"]
    assert printed(found, estimate, 200).count("largest image_size that fits") == 2


def test_a_study_of_one_size_that_fits_is_not_told_of_others(tmp_path: Path) -> None:
    found = planned(tmp_path)
    assert "largest image_size" not in printed(found, PlanEstimate(memory_fits(found, 4 * 10**9)))


def test_what_is_varied_of_images_and_activations_stands_in_columns(tmp_path: Path) -> None:
    sweep = {"model.image_size": [32, 64], "train.activation_checkpointing": [False, True]}
    text = printed(planned(tmp_path, {"sweep": sweep, "scaling": {"gpus": [1]}}), PlanEstimate(), 200)
    heading = next(line for line in text.splitlines() if line.startswith("engine "))
    assert heading.split()[:4] == ["engine", "image", "activations", "ranks"]
    kinds = [line.split("ddp", 1)[1].split("  ")[:6] for line in text.splitlines() if line.startswith("ddp ")]
    assert [[word.strip() for word in kind if word.strip()][:2] for kind in kinds] == [
        ["32", "kept"], ["32", "computed again"], ["64", "kept"], ["64", "computed again"],
    ]  # fmt: skip
    # 12 patches of 16 pixels more, each with a position of 192.
    told = next(line for line in text.splitlines() if line.startswith("- vit-ti16: "))
    counts = told.removeprefix("- vit-ti16: ").removesuffix(" parameters").split(" or ")
    few, many = (int(count.replace(",", "")) for count in counts)
    assert many - few == 12 * 192
    assert "image" not in printed(planned(tmp_path), PlanEstimate(), 200).split("Commands")[0]


def test_models_with_alike_counts_of_parameters_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "makers.py").write_text("def small(**_): ...\ndef large(**_): ...\n")
    factories = ["makers:small", "makers:large"]
    model = {"name": None, "factory": factories[0], "patch_size": None}
    unknown = planned(tmp_path, {"model": model, "sweep": {"model.factory": factories}})
    fits = memory_fits(unknown, 4 * 10**9)
    told = printed(unknown, PlanEstimate(fits), 200)
    assert "- makers:small, makers:large: number of parameters unavailable\n" in told
    assert "a rank has" not in told, "why it is unknown is said of each"


def test_automatic_steps_are_told_beside_five_epochs_a_point(tmp_path: Path) -> None:
    train = LIKE_THE_RESULTS["train"] | {"epochs": None}
    measure = {"steps": "auto", "warmup_steps": 5, "explain": False, "target_ci": 0.02, "max_gpu_hours": 3}
    found = planned(tmp_path, {"train": train, "measure": measure})
    # 25 steps of each run on 1, 2 and 4 ranks are 175 steps of a GPU; 5 epochs are 640, 2 x 320 and 4 x 160, so 1,920.
    assert (
        'steps = "auto": 6 to 10 runs a trial take 55 % to 91 % of the GPU time of 5 epochs each; start-up'
        in printed(found, PlanEstimate(), 200)
    )
    assert "within 2 % (measure.target_ci), within 3 GPU-hours (measure.max_gpu_hours)" in printed(
        found, PlanEstimate(), 200
    )
    short = planned(tmp_path, {"train": train, "measure": measure, "data": {"name": "synthetic", "samples": 64}})
    assert "of 5 epochs each: nothing is saved; start-up" in printed(short, PlanEstimate(), 200)
    assert "steps =" not in printed(planned(tmp_path), PlanEstimate(), 200)


def test_runs_side_by_side_are_told_and_how_many_are_alone(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("192.0.2.1\n192.0.2.2\n192.0.2.3\n")
    changes: dict[str, dict[str, Any]] = {"launch": {"hostfile": "hosts"}, "measure": {"parallel_runs": 3}}
    said = printed(planned(tmp_path, changes), PlanEstimate(), 200)
    assert "runs, up to 3 at a time (measure.parallel_runs), 2 of them alone" in said


def test_runs_of_trials_that_are_skipped_are_not_to_do(tmp_path: Path) -> None:
    found = planned(tmp_path)
    [first, *_] = found.record.trials
    for skipped, done, left in (((first,), (), 4), ((first,), ((first, 0),), 4), (tuple(found.record.trials), (), 0)):
        estimate = PlanEstimate(skipped=frozenset(skipped), done=frozenset(done))
        assert plan_fields(found, estimate)["runs_to_do"] == left
        assert f"3 trials, {left} of 6 runs to do" in printed(found, estimate, 200)


def test_swept_values_that_no_column_has_tell_rows_apart(tmp_path: Path) -> None:
    swept: dict[str, dict[str, Any]] = {
        "sweep": {"train.learning_rate": [0.1, 0.01], "data.workers": [0, 1]},
        "scaling": {"gpus": [1]},
    }
    text = printed(planned(tmp_path, swept), PlanEstimate(), 160)
    for rate in ("0.1", "0.01"):
        for workers in (0, 1):
            assert f"learning_rate {rate}, workers {workers}" in text
    assert "learning_rate" not in printed(planned(tmp_path), PlanEstimate(), 160)


@pytest.mark.parametrize(("stage", "told"), [(1, True), (3, False)])
def test_buckets_of_a_stage_that_gathers_in_none_are_said_to_have_no_effect(
    tmp_path: Path, stage: int, *, told: bool
) -> None:
    """A folder that was begun with them goes on, so they are no mistake."""
    zero = {"train": {"engine": "deepspeed", "zero_stage": stage, "gather_bucket_mib": 4}, "launch": {}}
    text = printed(planned(tmp_path, zero), PlanEstimate(), 200)
    assert ("train.gather_bucket_mib has no effect below zero_stage = 3" in text) == told


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        ({}, "at their default size: set train.bucket_mib"),
        ({"reduce_bucket_size": 300_000_000}, "in the DeepSpeed file"),
    ],
)
def test_buckets_that_the_file_sets_are_not_called_default(zero: dict[str, int], told: str) -> None:
    file = {"zero_optimization": zero}
    note = buckets_note({"a": _resolved(make_trial("deepspeed", 2, zero_stage=2, deepspeed_config=file))})
    assert note.endswith(told)
    assert buckets_note({"a": _resolved(make_trial("deepspeed", 2, zero_stage=2, bucket_mib=1))}) == ""


def test_the_largest_buckets_of_all_trials_are_told() -> None:
    """Trials that take the same memory stand for one another; no other does."""
    precisions = ("bf16-params", "fp32", "bf16-params")
    small, large, other_rate = (
        _resolved(make_trial("deepspeed", 2, zero_stage=2, precision=precision, learning_rate=0.1 + n))
        for n, precision in enumerate(precisions)
    )
    assert buckets_note({"a": small}) != buckets_note({"a": large})
    assert buckets_note({"a": small, "b": large, "c": other_rate}) == buckets_note({"a": large})
    assert buckets_note({"a": small, "c": other_rate}) == buckets_note({"a": small})
