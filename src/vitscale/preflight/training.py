"""`check --training`: a tiny run of each engine on the devices that are there, and the proofs that these runs give."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vitscale import analysis, runner
from vitscale.base.distribution import versions_of
from vitscale.engines import ENGINES, of_engine, wrapper_facts
from vitscale.errors import RequestError
from vitscale.machine.hardware import Machine
from vitscale.preflight.running import CheckTarget, check_target
from vitscale.preflight.training_proofs import Proof, failures, proofs
from vitscale.preflight.verdict import error
from vitscale.present import document as doc
from vitscale.present.data import finding_fields
from vitscale.present.units import UNKNOWN, counted
from vitscale.runner import Plan
from vitscale.study.file import Overlay
from vitscale.study.resolve import device_of
from vitscale.trial.trial import DeviceName, TrainSpec

EngineFields = dict[str, Any]
"""Fields of [train], and of [parallel] by dotted names, that choose an engine and its options."""


def _needs_even_ranks(fields: EngineFields) -> bool:
    """Whether two ranks share a model, or there are two replicas, so that an even number of ranks is needed."""
    return any(key.startswith("parallel.") for key in fields)


def _checked_engines() -> Iterator[EngineFields]:
    """Yield every engine with each set of options with which it is to be checked."""
    for name, facts in ENGINES.items():
        for fields in facts.checked:
            yield {"engine": name, **fields}


_CHECKED_ENGINES: tuple[EngineFields, ...] = tuple(sorted(_checked_engines(), key=_needs_even_ranks))
"""What is run beside the reference; those that need an even number of ranks come last."""
_REFERENCE_ENGINE = next(name for name, facts in ENGINES.items() if facts.alone)
"""The engine with whose losses all are compared."""
_MOST_CHECKED_RANKS = 64
_TABLE_NOTE = f"In brackets: how far apart. {UNKNOWN}: cannot be told here (--verbose says why)."
_IMAGES_PER_RANK = 8
"""Images per rank and step."""
_STEPS_PER_EPOCH = 40
"""Steps of an epoch."""
_EPOCHS = 4
_STUDY_TEMPLATE = """# A tiny run of each engine, made by vitscale check --training.
name = "training-check"
[model]
name = "vit-ti16"
image_size = 40             # 26 tokens, which two ranks share evenly
patch_size = 8
layers = 2
hidden_size = 96
heads = 4
mlp_size = 1152             # matrices of more than 1e5 weights, which ZeRO-3 gathers anew: smaller ones it keeps
[data]
name = "synthetic"
samples = {samples}
source_size = 40
classes = 10
[train]
precision = "fp32"
micro_batch = {global_batch}
global_batch = {global_batch}  # also of what does not train on one rank
epochs = {epochs}
learning_rate = 0.0005
[scaling]
mode = "strong-global"
gpus = {gpus}
[sweep]
train = [
{engines}
]
[measure]
repeats = 1
warmup_steps = 16
evaluate = false
"""
_ADVICE_BY_SUBJECT = {
    "run": "See its log in the results folder; mend that first",
    "placement": "Set launch.threads_per_rank, or ask the batch system for a GPU and cores of its own for each rank",
    "losses": "Trust no figure of this engine here: it computes something else",
    "traffic": "Trust no transfer volume or prediction of this engine here: its version sends something else",
    "launches": "Detach other profilers (nsys, DCGM) and let users read the GPU's counters; trust no breakdown before",
    "clocks": "See what else uses these devices and check again; if it stays, trust no time of a step here",
    "profiling": "See what else uses these devices and check again; if it stays, set measure.explain = false",
}


class TrainingCheck(NamedTuple):
    """The runs of a check, and what they prove."""

    results: Path
    """Folder of the runs."""
    proofs: tuple[Proof, ...]
    missing: tuple[str, ...]
    """Engines that were left out, each with its reason: "megatron: megatron-core is not installed"."""


def check_training(
    overlay: Overlay, ranks_per_node: int | None, results: Path | None, console: Console
) -> TrainingCheck:
    """Run a tiny trial of each engine exactly as `vitscale run` would, and return what the runs prove.

    Args:
        overlay: values from a site file and the command line.
        ranks_per_node: None: the hostfile's slots, else the number of GPUs; without either one, or two on a lone host.
        results: the folder for the runs; None: results/training-check-TIME.
        console: for progress.

    Raises:
        RequestError: the ranks cannot be started.
        StoreError: the folder cannot be used.
    """
    target = check_target(None, overlay)
    machine = target.scheduler.machine()
    device = device_of(target.study, machine)
    if ranks_per_node is None:
        ranks_per_node = _usual_ranks_per_node(target, machine, device)
    ranks = ranks_per_node * target.nodes
    if not 1 <= ranks <= _MOST_CHECKED_RANKS:
        raise RequestError(
            f"{ranks} ranks are asked for", valid=[f"1 to {_MOST_CHECKED_RANKS}"], next_step="Say --ranks-per-node"
        )
    results = results or Path("results") / f"training-check-{time.strftime('%Y%m%dT%H%M%S')}"
    selection = _selected_engines(device, ranks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training-check.toml"
        path.write_text(_study_text(selection.engines, ranks), encoding="utf-8")
        plan = _with_needed_trials(runner.plan(path, overlay=overlay, results=results), ranks)
        runner.run(plan, results, runner.RunOptions(), console)
    proved: list[Proof] = []
    for result in analysis.analyse_folder(results).trials.values():
        proved += proofs(result)
    return TrainingCheck(results, tuple(proved), selection.missing)


class _EngineSelection(NamedTuple):
    """The engines that can be checked here, and those that cannot."""

    engines: tuple[EngineFields, ...]
    """The reference comes first."""
    missing: tuple[str, ...]
    """Engines that were left out, each with its reason."""


def _selected_engines(device: DeviceName, ranks: int) -> _EngineSelection:
    """Choose the engines that can be checked on this many ranks."""
    engines: list[EngineFields] = [{"engine": _REFERENCE_ENGINE}]
    missing = []
    for fields in _CHECKED_ENGINES:
        reason = _why_unavailable(fields, device, ranks)
        if reason:
            missing.append(f"{_engine_title(fields)}: {reason}")
        else:
            engines.append(fields)
    return _EngineSelection(tuple(engines), tuple(missing))


def _usual_ranks_per_node(target: CheckTarget, machine: Machine, device: DeviceName) -> int:
    """Return the hostfile's slots, else the number of GPUs; on CPUs one rank per host, or two on a single host."""
    slots = target.scheduler.slots()
    if slots:
        return slots
    if device == "cuda":
        return len(machine.gpus)
    return 1 if target.nodes > 1 else 2


def _study_text(engines: Iterable[EngineFields], ranks: int) -> str:
    """Return the study as TOML, with one line of [sweep] for each engine, on one rank and on all."""
    engine_lines = []
    for fields in engines:
        pairs = [f'"{key}" = {json.dumps(value)}' for key, value in fields.items()]
        engine_lines.append(f"  {{ {', '.join(pairs)} }},")
    return _STUDY_TEMPLATE.format(
        samples=_IMAGES_PER_RANK * ranks * _STEPS_PER_EPOCH,
        global_batch=_IMAGES_PER_RANK * ranks,
        epochs=_EPOCHS,
        gpus=sorted({1, ranks}),
        engines="\n".join(engine_lines),
    )


def _engine_title(fields: EngineFields) -> str:
    """Return the values, with their names unless they name the engine: "deepspeed 3 hpz 2", "megatron tensor 2".

    The latter is of {"engine": "megatron", "parallel.tensor": 2}.
    """
    facts = of_engine(fields["engine"])
    naming_fields = {"engine", facts.stands_for, *facts.name_options}
    words = []
    for key, value in fields.items():
        name = key.removeprefix("parallel.")
        words.append(str(value) if key in naming_fields else f"{name} {value}")
    return " ".join(words)


def _train_of(fields: EngineFields, device: DeviceName) -> TrainSpec:
    """Return a [train] with an engine and its options; those of [parallel] are left out."""
    values: dict[str, Any] = {"precision": "fp32", "device": device, "micro_batch": _IMAGES_PER_RANK}
    values |= {key: value for key, value in fields.items() if not key.startswith("parallel.")}
    return TrainSpec.model_validate(values)


def _why_ranks_do_not_fit(fields: EngineFields, device: DeviceName, ranks: int) -> str | None:
    """Return why an engine cannot be checked on so many ranks; None where it can."""
    checked_ranks = f"{counted(ranks, 'rank')} are checked"
    if ranks % 2 and _needs_even_ranks(fields):
        obstacle = "two replicas are of as many ranks" if "parallel.replicate" in fields else "two ranks share a model"
        return f"{obstacle}, and {checked_ranks}"
    train = _train_of(fields, device)
    second_shard_ranks = wrapper_facts(train).second_shard_ranks(train)
    if ranks % second_shard_ranks:
        return f"{second_shard_ranks} ranks share a second shard of the weights, and {checked_ranks}"
    return None


def _why_unavailable(fields: EngineFields, device: DeviceName, ranks: int) -> str | None:
    """Return why an engine cannot be checked here; None where it can."""
    obstacle = _why_ranks_do_not_fit(fields, device, ranks)
    if obstacle:
        return obstacle
    facts = of_engine(fields["engine"])
    for package, version in versions_of(facts.packages).items():
        if version is None:
            return f"{package} is not installed"
    return facts.unavailable(device)


def _with_needed_trials(plan: Plan, ranks: int) -> Plan:
    """Return the plan with one trial per engine.

    Each engine trains on all ranks, except the reference, with whose losses all are compared: it trains on one rank.
    """
    trials = {}
    for trial_id, trial in plan.record.trials.items():
        needed_ranks = 1 if of_engine(trial.train.engine).alone else ranks
        if trial.world.size == needed_ranks:
            trials[trial_id] = trial
    curves = []
    for curve in plan.record.curves:
        points = tuple(point for point in curve.points if point.trial_id in trials)
        if points:
            curves.append(curve.model_copy(update={"points": points}))
    fingerprints = {trial_id: plan.record.dataset_fingerprints[trial_id] for trial_id in trials}
    record = plan.record.model_copy(
        update={"trials": trials, "curves": tuple(curves), "dataset_fingerprints": fingerprints}
    )
    return replace(
        plan,
        context=replace(plan.context, record=record),
        expansion=replace(plan.expansion, trials=trials, curves=tuple(curves)),
        tasks=tuple(task for task in plan.tasks if task.trial_id in trials),
    )


def training_findings(proofs: Iterable[Proof]) -> tuple[doc.Finding, ...]:
    """Return findings for the claims that fail."""
    return tuple(
        error(
            kind=f"{proof.subject}-unproved",
            message=f"{proof.engine}: {proof.message}",
            advice=_ADVICE_BY_SUBJECT[proof.subject],
        )
        for proof in failures(proofs)
    )


def training_fields(
    results: Path, proofs: Sequence[Proof], missing: Sequence[str], findings: Sequence[doc.Finding]
) -> dict[str, Any]:
    """Return proofs, engines left out and findings as JSON fields."""
    return {
        "training": {"results": str(results), "proofs": list(map(asdict, proofs)), "left_out": list(missing)},
        "verdicts": [finding_fields(finding) for finding in findings],
    }


def training_document(
    results: Path, bundle: Path, proofs: Sequence[Proof], missing: Sequence[str], findings: Sequence[doc.Finding]
) -> doc.Document:
    """Return the answer of `check --training`.

    It has the number of claims that hold, a finding for each claim that fails, and a table with a row for each engine
    and a column for each kind of claim. Every claim in words is in a folded section.

    Args:
        results: folder of the runs.
        bundle: file with the runs, without names and paths.
        proofs: all claims.
        missing: engines that were left out, each with its reason: "megatron: megatron-core is not installed".
        findings: those of `training_findings`.
    """
    blocks: list[doc.Block] = [doc.Paragraph(_counts_of_proofs(proofs), "strong")]
    blocks += findings
    blocks.append(_proof_table(proofs))
    if missing:
        blocks.append(doc.Bullets(tuple(f"left out: {engine_and_reason}" for engine_and_reason in missing)))
    details = tuple(f"{proof.engine}: {proof.subject} {proof.status}: {proof.message}" for proof in proofs)
    blocks.append(doc.Section("What was found", (doc.Bullets(details),), folded=True))
    last_lines = (f"Runs: vitscale report {results}", f"To send, without names and paths: {bundle}")
    return doc.Document("", tuple(blocks), last_lines)


def _counts_of_proofs(proofs: Sequence[Proof]) -> str:
    """Return "10 claims hold, 1 fails, 3 cannot be told here"."""
    counts = Counter(proof.status for proof in proofs)
    fail = "fails" if counts["fails"] == 1 else "fail"
    return f"{counted(counts['holds'], 'claim')} hold, {counts['fails']} {fail}, {counts['untold']} cannot be told here"


class _Claim(NamedTuple):
    engine: str
    subject: str


def _proof_table(proofs: Sequence[Proof]) -> doc.Table:
    """Return a table with a row for each engine, and a column for each kind of claim that was made of any engine."""
    proof_by_claim = {_Claim(proof.engine, proof.subject): proof for proof in proofs}
    engines = dict.fromkeys(proof.engine for proof in proofs)
    proved_subjects = {proof.subject for proof in proofs}
    subjects = [subject for subject in _ADVICE_BY_SUBJECT if subject in proved_subjects]
    rows = []
    for engine in engines:
        cells = [_proof_cell(proof_by_claim.get(_Claim(engine, subject))) for subject in subjects]
        rows.append((doc.Cell(engine), *cells))
    columns = (doc.Column("engine", words=True), *map(doc.Column, subjects))
    return doc.Table(columns, (doc.RowGroup("", tuple(rows)),), (_TABLE_NOTE,))


def _proof_cell(proof: Proof | None) -> doc.Cell:
    """Return "yes", "NO" or a dash, in some columns with the measured difference in brackets."""
    if proof is None:
        return doc.Cell(UNKNOWN)
    words = {"holds": "yes", "fails": "NO", "untold": UNKNOWN}
    is_measured = proof.subject in ("losses", "clocks", "profiling") and proof.figure is not None
    return doc.Cell(words[proof.status], f"{proof.figure:.1g}" if is_measured else "")
