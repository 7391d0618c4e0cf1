"""check --training: each claim is proved by what real ranks recorded, and falls when that is spoilt."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from results_factory import failed_run, make_environment
from vitscale import analysis, store
from vitscale.cli import app
from vitscale.errors import RequestError
from vitscale.prediction.step.messages import messages
from vitscale.preflight import training
from vitscale.preflight.training_proofs import Proof, _checked_name, proofs
from vitscale.profiles.timeline import LOST_KERNELS, NO_KERNELS, NO_LAUNCH, NO_NCCL
from vitscale.runner import Plan
from vitscale.store import bundles
from vitscale.store.records import DeviceRecord, RankRecord, StepLine
from vitscale.store.results import Results, Run
from vitscale.trial.trial import Trial

Spoil = Callable[[RankRecord], RankRecord]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Proof, ...], tuple[str, ...]]:
    """Of the plain engine and of DDP on two CPU ranks."""
    folder = tmp_path_factory.mktemp("training-check")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_CHECKED_ENGINES", ({"engine": "ddp"}, {"engine": "megatron"}))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.chdir(folder)
        console = Console(file=io.StringIO())
        return training.check_training({}, 2, folder / "results", console)


def claims(found: tuple[Proof, ...], engine: str) -> dict[str, Proof]:
    return {proof.subject: proof for proof in found if proof.engine.startswith(engine)}


@pytest.mark.ranks
def test_two_real_ranks_prove_what_a_cpu_can(checked: tuple[Path, tuple[Proof, ...], tuple[str, ...]]) -> None:
    """Times are not judged here: other work shares these cores."""
    results, found, missing = checked
    ddp, plain = claims(found, "ddp"), claims(found, "plain")
    assert len(found) == 12
    assert [ddp[claim].status for claim in ("placement", "losses", "traffic")] == ["holds"] * 3
    assert ddp["traffic"].figure == 0
    assert 0 < (ddp["losses"].figure or 0) <= (ddp["losses"].limit or 0) == 1e-5
    assert (ddp["launches"].status, ddp["launches"].message) == ("untold", "a host launches nothing")
    assert ddp["clocks"].figure is not None
    assert (plain["traffic"].status, plain["losses"].status) == ("untold", "holds")
    assert len(missing) == 1
    assert missing[0].startswith("megatron: ")
    loaded = store.load(results)
    assert {(run.header.trial.train.engine, run.header.trial.world.size) for run in loaded.runs} == {
        ("none", 1),
        ("ddp", 2),
    }


@pytest.mark.parametrize(("ranks", "splits"), [(2, 5), (3, 0)])
def test_splits_over_two_ranks_are_checked_where_ranks_are_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, splits: int
) -> None:
    """What would be trained: each engine once, each split of a model once, on all ranks, as the plain one."""
    planned = list[Trial]()

    def stop(plan: Plan, *_: object) -> None:
        planned.extend(trial for trial in plan.record.trials.values() if trial.parallel.ranks_per_model > 1)
        assert {trial.global_batch for trial in plan.record.trials.values()} == {8 * ranks}
        raise RequestError("planned")

    monkeypatch.setattr("vitscale.runner.run", stop)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    overlay = {"launch": {"oversubscribe": True}}
    with pytest.raises(RequestError, match="planned"):
        training.check_training(overlay, ranks, tmp_path / "results", Console(file=io.StringIO()))
    assert len(planned) == splits
    assert {trial.world.size for trial in planned} <= {ranks}
    if splits:
        axes = {
            axis
            for trial in planned
            for axis in ("tensor", "sequence", "pipeline")
            if getattr(trial.parallel, axis) > 1
        }
        assert axes == {"tensor", "sequence", "pipeline"}


@pytest.mark.parametrize(("ranks", "is_trained"), [(1, False), (2, True), (3, False), (4, True)])
def test_second_shards_are_checked_where_ranks_make_whole_pairs(ranks: int, is_trained: bool) -> None:
    selection = training._selected_engines("cpu", ranks)
    assert any(fields.get("hpz") == 2 for fields in selection.engines) is is_trained
    reasons = [reason for reason in selection.missing if "hpz 2" in reason]
    assert len(reasons) == (not is_trained)
    for reason in reasons:
        assert "2 ranks share a second shard of the weights, and" in reason


def test_second_shards_have_a_row_of_their_own_and_two_micro_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights stay from forward to backward, so that with one micro-step nothing is gathered from second shards."""
    planned = dict[str, Trial]()

    def stop(plan: Plan, *_: object) -> None:
        planned.update({_checked_name(trial): trial for trial in plan.record.trials.values()})
        raise RequestError("planned")

    monkeypatch.setattr("vitscale.runner.run", stop)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RequestError, match="planned"):
        training.check_training(
            {"launch": {"oversubscribe": True}}, 4, tmp_path / "results", Console(file=io.StringIO())
        )
    with_second_shards = planned["deepspeed ZeRO-3, hpZ 2"]
    assert (with_second_shards.train.hpz, with_second_shards.train.grad_accum) == (2, 2)
    assert (planned["deepspeed ZeRO-3"].train.hpz, planned["deepspeed ZeRO-3"].train.grad_accum) == (1, 1)
    in_pairs = [message for message in messages(with_second_shards) or () if message.group == "second shard"]
    assert sum(message.times(grad_accum=2) for message in in_pairs) > 0


def of_ddp(checked: tuple[Path, Any, Any], spoil: Spoil, device: str = "cpu") -> dict[str, Proof]:
    """The claims of DDP, its ranks' records spoilt."""
    loaded = store.load(checked[0])
    runs = []
    for run in loaded.runs:
        if run.header.trial.train.engine == "ddp":
            run = run.model_copy(update={"ranks": tuple(map(spoil, run.ranks))})
        runs.append(on(run, device) if device == "cuda" else run)
    results = loaded.model_copy(update={"runs": tuple(runs)})
    return claims(tuple(p for r in analysed(results).trials.values() for p in proofs(r)), "ddp")


def analysed(results: Results) -> analysis.Analysis:
    return analysis.analyse(results)


def on(run: Run, device: str) -> Run:
    train = run.header.trial.train.model_copy(update={"device": device})
    trial = run.header.trial.model_copy(update={"train": train})
    return run.model_copy(update={"header": run.header.model_copy(update={"trial": trial})})


def steps(rank: RankRecord, change: Callable[[StepLine], dict[str, Any]]) -> RankRecord:
    return rank.model_copy(update={"steps": tuple(line.model_copy(update=change(line)) for line in rank.steps)})


@pytest.mark.ranks
def test_a_loss_that_is_another_fails(checked: tuple[Path, Any, Any]) -> None:
    found = of_ddp(checked, lambda rank: steps(rank, lambda line: {"loss": (line.loss or 0) * 1.001}))["losses"]
    assert found.status == "fails"
    assert found.figure == pytest.approx(1e-3, rel=0.01)
    assert "apart from plain" in found.message


@pytest.mark.ranks
def test_a_collective_that_is_too_large_fails(checked: tuple[Path, Any, Any]) -> None:
    def spoil(rank: RankRecord) -> RankRecord:
        lines = []
        for line in rank.traffic:
            first, *others = line.collectives or ()
            lines.append(line.model_copy(update={"collectives": (first.model_copy(
                update={"input_elements": first.input_elements + 100, "output_elements": first.output_elements + 100}
            ), *others)}))  # fmt: skip
        return rank.model_copy(update={"traffic": tuple(lines)})

    found = of_ddp(checked, spoil)["traffic"]
    assert (found.status, found.figure, found.limit) == ("fails", 400, 64)
    assert "by arithmetic" in found.message


@pytest.mark.ranks
@pytest.mark.parametrize("text", [NO_KERNELS, LOST_KERNELS, NO_LAUNCH, NO_NCCL])
def test_a_launch_that_was_lost_fails(checked: tuple[Path, Any, Any], text: str) -> None:
    """On a GPU: a CPU's records stand in for one's, for what is judged is what the profiler's reader has said."""
    why = text.format(lost=3, of=1234, share=0.24)

    def spoil(rank: RankRecord) -> RankRecord:
        first, *others = rank.explained
        broken = first.model_copy(update={"unknown": first.unknown | {"launch_gaps": why}})
        return rank.model_copy(update={"explained": (broken, *others)}) if rank.rank == 1 else rank

    lines = sum(len(rank.explained) for run in store.load(checked[0]).runs for rank in run.ranks if len(run.ranks) == 2)
    found = of_ddp(checked, spoil, "cuda")["launches"]
    assert found.status == "fails"
    assert found.figure == pytest.approx(1 / lines)
    assert why in found.message
    assert of_ddp(checked, lambda rank: rank, "cuda")["launches"].status == "holds"


def with_times(rank: RankRecord, later: float = 1.0, epoch: float = 1.0, profiled: float = 1.0) -> RankRecord:
    """Every step takes 100 ms, and those after the profiler first ran so many times as long."""
    first = min(line.step for line in rank.steps if line.window == "explained")
    own = steps(rank, lambda line: {"seconds": 0.1 * (later if line.step > first else 1.0)})
    sums: dict[int, float] = {}
    for line in own.steps:
        sums[line.epoch] = sums.get(line.epoch, 0.0) + line.seconds
    epochs = tuple(line.model_copy(update={"seconds": sums[line.epoch] * epoch}) for line in rank.epochs)
    seconds = {line.step: line.seconds for line in own.steps}
    explained = tuple(line.model_copy(update={"seconds": seconds[line.step] * profiled}) for line in rank.explained)
    return own.model_copy(update={"epochs": epochs, "explained": explained})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("spoilt", "claim", "status", "figure"),
    [
        ({}, "clocks", "holds", 0.0),
        ({"epoch": 1.2}, "clocks", "fails", (0.2 * 4.0 - 0.02) / (1.2 * 4.0)),
        ({"profiled": 1.1}, "clocks", "fails", 0.1),
        ({}, "profiling", "holds", 0.0),
        ({"later": 1.2}, "profiling", "fails", 0.2),
        ({"later": 0.9}, "profiling", "holds", -0.1),
    ],
)
def test_clocks_apart_and_slowed_steps_fail(
    checked: tuple[Path, Any, Any], spoilt: dict[str, float], claim: str, status: str, figure: float
) -> None:
    found = of_ddp(checked, lambda rank: with_times(rank, **spoilt))[claim]
    assert found.status == status
    assert found.figure == pytest.approx(figure, abs=1e-9)


@pytest.mark.ranks
def test_steps_that_vary_by_themselves_tell_nothing_of_the_profiler(checked: tuple[Path, Any, Any]) -> None:
    found = of_ddp(checked, lambda rank: steps(rank, lambda line: {"seconds": 0.1 + 0.05 * (line.step % 2)}))[
        "profiling"
    ]
    assert (found.status, found.figure) == ("untold", None)
    assert "vary by" in found.message


@pytest.mark.ranks
def test_a_timed_step_after_the_profiler_fails_on_a_gpu(checked: tuple[Path, Any, Any]) -> None:
    assert of_ddp(checked, lambda rank: rank, "cuda")["profiling"].status == "fails"

    def before_alone(rank: RankRecord) -> RankRecord:
        first = min(line.step for line in rank.steps if line.window == "explained")
        return steps(rank, lambda line: {"window": "attached" if line.step > first else line.window})

    assert of_ddp(checked, before_alone, "cuda")["profiling"].status == "holds"


def gpu(rank: int, **changes: Any) -> DeviceRecord:
    fields: dict[str, Any] = {"type": "cuda", "name": "NVIDIA H100", "uuid": f"GPU-{rank}", "numa_node": 0}
    return DeviceRecord(**fields | changes)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"device": gpu(0)}, "ranks 0 and 1 share a GPU"),
        ({"cores_allowed": (0, 1)}, "ranks 0 and 1 share 1 core"),
        ({"threads": 7}, "rank 1 computes with 7 threads, not with 1"),
        ({"device": DeviceRecord(type="cpu", name="EPYC")}, "rank 1 computes on cpu, not on cuda"),
        ({"device": gpu(1, numa_node=3)}, "rank 1 has cores of memory node 0, and its GPU is at memory node 3"),
        ({"device": gpu(0), "host": "node2", "cores_allowed": (0,)}, ""),
        ({}, ""),
    ],
)
def test_a_rank_that_is_not_where_it_was_meant_fails(
    checked: tuple[Path, Any, Any], second: dict[str, Any], said: str
) -> None:
    def spoil(rank: RankRecord) -> RankRecord:
        assert rank.start is not None
        fields: dict[str, Any] = {"device": gpu(rank.rank), "numa_nodes": (0,)}
        environment = make_environment(rank.rank, **(fields | (second if rank.rank == 1 else {})))
        return rank.model_copy(update={"start": rank.start.model_copy(update={"environment": environment})})

    found = of_ddp(checked, spoil, "cuda")["placement"]
    assert (found.status, found.message if said else "") == ("fails" if said else "holds", said)


@pytest.mark.ranks
def test_a_run_that_failed_is_told_and_advised_on(checked: tuple[Path, Any, Any]) -> None:
    loaded = store.load(checked[0])
    runs = [
        failed_run(run.header.trial, "oom", "rank 1 ran out of memory") if len(run.ranks) == 2 else run
        for run in loaded.runs
    ]
    found = tuple(
        p for r in analysed(loaded.model_copy(update={"runs": tuple(runs)})).trials.values() for p in proofs(r)
    )
    (finding,) = (own for own in training.training_findings(found) if own.message.startswith("ddp"))
    assert (finding.kind, finding.severity) == ("run-unproved", "error")
    assert finding.message == "ddp: oom: rank 1 ran out of memory"


@pytest.mark.ranks
def test_the_bundle_has_all_but_names(checked: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    results, found, missing = checked
    monkeypatch.setattr("getpass.getuser", lambda: "ada.lovelace")
    host = next(r.start.environment.host for run in store.load(results).runs for r in run.ranks if r.start)
    findings = training.training_findings(found)
    fields = training.training_fields(results, found, missing, findings)
    path = results / "bundle.tar.gz"
    note = f"by ada.lovelace on {host}.example.org, {results}"
    bundles.write_bundle(results, path, redact=True, answer=fields | {"note": note})
    with tarfile.open(path) as archive:
        texts = {
            member.name: (archive.extractfile(member) or io.BytesIO()).read().decode()
            for member in archive
            if member.isfile()
        }
    assert not any("launch.json" in name for name in texts)
    assert sum(name.endswith(".jsonl") for name in texts) == 3
    for name, text in texts.items():
        assert host not in text, name
        assert str(results) not in text
        assert "ada.lovelace" not in text
    answer = json.loads(texts["vitscale-bundle/answer.json"])
    assert len(answer["training"]["proofs"]) == len(found)
    lines = next(text.splitlines() for name, text in texts.items() if name.endswith("rank-0.jsonl"))
    line = next(told for told in map(json.loads, lines) if told["kind"] == "start")
    assert line["environment"]["host"] == "host-0"
    assert line["environment"]["versions"]["torch"]


def test_more_ranks_than_a_check_trains_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"1000 ranks are asked for\. Valid: 1 to 64\."):
        training.check_training({}, 1000, tmp_path / "results", Console(file=io.StringIO()))


@pytest.mark.ranks
def test_the_command_says_what_holds_and_exits_by_it(
    checked: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, found, missing = checked
    held = tuple(proof for proof in found if proof.status != "fails")
    monkeypatch.setattr(training, "check_training", lambda *_: (results, held, missing))
    answer = CliRunner().invoke(app, ["check", "--training"])
    assert answer.exit_code == 0
    said = " ".join(answer.stdout.split())
    assert f"{sum(proof.status == 'holds' for proof in held)} claims hold, 0 fail" in said
    assert f"ddp yes yes ({claims(found, 'ddp')['losses'].figure:.1g}) yes" in said
    assert "bundle.tar.gz" in said
    spoilt = (*held, Proof("traffic", "ddp", "fails", "all_reduce 1 B (by arithmetic 2 B)", 1.0, 0.0))
    monkeypatch.setattr(training, "check_training", lambda *_: (results, spoilt, missing))
    answer = CliRunner().invoke(app, ["check", "--training", "--json"])
    assert answer.exit_code == 1
    told = json.loads(answer.stdout)
    assert [verdict["kind"] for verdict in told["verdicts"]] == ["traffic-unproved"]
    assert told["training"]["proofs"][-1]["figure"] == 1.0


@pytest.mark.nightly
@pytest.mark.ranks
def test_real_ranks_that_share_a_core_end_it_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spoilt here: two ranks are let share the one core that there is, and the records show it."""
    monkeypatch.setattr(training, "_CHECKED_ENGINES", ({"engine": "ddp"},))
    monkeypatch.setattr(training, "_EPOCHS", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "site.toml").write_text("[launch]\noversubscribe = true\n")
    arguments = ["check", "--training", "--ranks-per-node", "2", "--site", str(tmp_path / "site.toml"), "--json"]
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        answer = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "results")])
    finally:
        os.sched_setaffinity(0, allowed)
    assert answer.exit_code == 1
    told = json.loads(answer.stdout)
    placed = {proof["engine"]: proof for proof in told["training"]["proofs"] if proof["subject"] == "placement"}
    assert placed["ddp"]["message"] == "ranks 0 and 1 share 1 core"
    assert "placement-unproved" in {verdict["kind"] for verdict in told["verdicts"]}
    assert (tmp_path / "results" / "bundle.tar.gz").is_file()


def test_a_study_beside_it_is_refused(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["check", str(tmp_path / "study.toml"), "--training"])
    assert "brings runs of its own" in str(answer.exception)
