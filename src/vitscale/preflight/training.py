"""`check --training`: a tiny run of each engine on the devices that are there, and what these runs prove."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vitscale import analysis, runner
from vitscale.base.distribution import versions_of
from vitscale.engines import ENGINES, of_engine
from vitscale.errors import RequestError
from vitscale.preflight.running import check_target
from vitscale.preflight.training_proofs import Proof, failures, proofs
from vitscale.preflight.verdict import error
from vitscale.present import document as doc
from vitscale.present.data import finding_fields
from vitscale.present.units import UNKNOWN, counted
from vitscale.runner import Plan
from vitscale.study.file import Overlay
from vitscale.study.resolve import device_of
from vitscale.trial.trial import Device

_ENGINES: tuple[dict[str, Any], ...] = tuple(
    sorted(
        ({"engine": name, **fields} for name, facts in ENGINES.items() for fields in facts.checked),
        key=lambda fields: any(key.startswith("parallel.") for key in fields),
    )
)
"""Fields of [train], and of [parallel] by dotted names. Those with two ranks per model need an even number of ranks."""
_ALONE = next(name for name, facts in ENGINES.items() if facts.alone)
"""The engine with whose losses all are compared."""
_MOST_RANKS = 64
_MEANING = f"In brackets: how far apart. {UNKNOWN}: cannot be told here (--verbose says why)."
_IMAGES = 8
"""Images per rank and step."""
_STEPS, _EPOCHS = 40, 4
_STUDY = """# A tiny run of each engine, made by vitscale check --training.
name = "training-check"
[model]
name = "vit-ti16"
image_size = 40             # 26 tokens, which two ranks share evenly
patch_size = 8
layers = 2
hidden_size = 96
heads = 4
mlp_size = 384
[data]
name = "synthetic"
samples = {samples}
source_size = 40
classes = 10
[train]
precision = "fp32"
micro_batch = {global_batch}
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
_ADVICE = {
    "run": "See its log in the results folder; mend that first",
    "placement": "Set launch.threads_per_rank, or ask the batch system for a GPU and cores of its own for each rank",
    "losses": "Trust no figure of this engine here: it computes something else",
    "traffic": "Trust no transfer volume or prediction of this engine here: its version sends something else",
    "launches": "Detach other profilers (nsys, DCGM) and let users read the GPU's counters; trust no breakdown before",
    "clocks": "See what else uses these devices and check again; if it stays, trust no time of a step here",
    "profiling": "See what else uses these devices and check again; if it stays, set measure.explain = false",
}


def check_training(
    overlay: Overlay, ranks_per_node: int | None, results: Path | None, console: Console
) -> tuple[Path, tuple[Proof, ...], tuple[str, ...]]:
    """Runs a tiny trial of each engine exactly as `vitscale run` would, and says what the runs prove.

    Args:
        overlay: values from a site file and the command line.
        ranks_per_node: None: the hostfile's slots, else the number of GPUs; without either one, or two on a lone host.
        results: the folder for the runs; None: results/training-check-TIME.
        console: for progress.

    Returns:
        The results folder, the proofs, and which engines were left out and why.

    Raises:
        RequestError: the ranks cannot be started.
        StoreError: the folder cannot be used.
    """
    hosts = check_target(None, overlay)
    machine = hosts.scheduler.machine()
    device = device_of(hosts.study, machine)
    usual = hosts.scheduler.slots() or (len(machine.gpus) if device == "cuda" else 1 if hosts.nodes > 1 else 2)
    size = (usual if ranks_per_node is None else ranks_per_node) * hosts.nodes
    if not 1 <= size <= _MOST_RANKS:
        raise RequestError(
            f"{size} ranks are asked for", valid=[f"1 to {_MOST_RANKS}"], next_step="Say --ranks-per-node"
        )
    results = results or Path("results") / f"training-check-{time.strftime('%Y%m%dT%H%M%S')}"
    missing = {_name(fields): why for fields in _ENGINES if (why := _unavailable(fields, device, size))}
    fields = [{"engine": _ALONE}, *(fields for fields in _ENGINES if _name(fields) not in missing)]
    text = _STUDY.format(
        samples=_IMAGES * size * _STEPS,
        global_batch=_IMAGES * size,
        epochs=_EPOCHS,
        gpus=sorted({1, size}),
        engines="\n".join(
            "  { " + ", ".join(f'"{k}" = {json.dumps(v)}' for k, v in each.items()) + " }," for each in fields
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training-check.toml"
        path.write_text(text, encoding="utf-8")
        plan = _of_full_size(runner.plan(path, overlay=overlay, results=results), size)
        runner.run(plan, results, runner.Options(), console)
    analysed = analysis.analyse_folder(results)
    proved = tuple(proof for result in analysed.trials.values() for proof in proofs(result))
    return results, proved, tuple(f"{name}: {why}" for name, why in missing.items())


def _name(fields: dict[str, Any]) -> str:
    return " ".join(
        f"{key.partition('.')[2]} {value}".strip() if "." in key else str(value) for key, value in fields.items()
    )


def _unavailable(fields: dict[str, Any], device: Device, ranks: int) -> str | None:
    if ranks % 2 and any(key.startswith("parallel.") for key in fields):
        return f"two ranks share a model, and {counted(ranks, 'rank')} are checked"
    facts = of_engine(fields["engine"])
    for package, version in versions_of(facts.packages).items():
        if version is None:
            return f"{package} is not installed"
    return facts.unavailable(device)


def _of_full_size(plan: Plan, size: int) -> Plan:
    """The plan with one trial per engine on all ranks, and the plain one on one rank as reference for the losses."""
    kept = {
        identity: trial
        for identity, trial in plan.record.trials.items()
        if trial.world.size == (1 if of_engine(trial.train.engine).alone else size)
    }
    curves = []
    for curve in plan.record.curves:
        if points := tuple(point for point in curve.points if point.trial_id in kept):
            curves.append(curve.model_copy(update={"points": points}))
    fingerprints = {identity: plan.record.dataset_fingerprints[identity] for identity in kept}
    record = plan.record.model_copy(
        update={"trials": kept, "curves": tuple(curves), "dataset_fingerprints": fingerprints}
    )
    return replace(
        plan,
        context=replace(plan.context, record=record),
        expansion=replace(plan.expansion, trials=kept, curves=tuple(curves)),
        tasks=tuple(task for task in plan.tasks if task.trial_id in kept),
    )


def training_findings(proofs: Iterable[Proof]) -> tuple[doc.Finding, ...]:
    """Findings for the claims that fail."""
    return tuple(
        error(f"{proof.subject}-unproved", f"{proof.engine}: {proof.message}", _ADVICE[proof.subject])
        for proof in failures(proofs)
    )


def training_fields(
    results: Path, proofs: Sequence[Proof], missing: Sequence[str], findings: Sequence[doc.Finding]
) -> dict[str, Any]:
    """Proofs, engines left out and findings as JSON fields."""
    return {
        "training": {"results": str(results), "proofs": list(map(asdict, proofs)), "left_out": list(missing)},
        "verdicts": [finding_fields(finding) for finding in findings],
    }


def training_document(
    results: Path, bundle: Path, proofs: Sequence[Proof], missing: Sequence[str], findings: Sequence[doc.Finding]
) -> doc.Document:
    """A document with the claims that fail, then a table with a row for each engine and a column for each claim."""
    failed, held = len(failures(proofs)), sum(proof.status == "holds" for proof in proofs)
    untold = len(proofs) - failed - held
    heading = (
        f"{counted(held, 'claim')} hold, {failed} {'fails' if failed == 1 else 'fail'}, {untold} cannot be told here"
    )
    subjects = [subject for subject in _ADVICE if any(proof.subject == subject for proof in proofs)]
    columns = (doc.Column("engine", words=True), *map(doc.Column, subjects))
    engines = dict.fromkeys(proof.engine for proof in proofs)
    known: dict[tuple[str, str], Proof] = {(proof.engine, proof.subject): proof for proof in proofs}
    rows = [(doc.Cell(name), *(_cell(known.get((name, subject))) for subject in subjects)) for name in engines]
    table = doc.Table(columns, (doc.Group("", tuple(rows)),), (_MEANING,))
    details = tuple(f"{proof.engine}: {proof.subject} {proof.status}: {proof.message}" for proof in proofs)
    blocks: list[doc.Block] = [doc.Paragraph(heading, "strong"), *findings, table]
    blocks += [doc.Bullets(tuple(f"left out: {why}" for why in missing))] if missing else []
    blocks.append(doc.Section("What was found", (doc.Bullets(details),), folded=True))
    return doc.Document(
        "", tuple(blocks), (f"Runs: vitscale report {results}", f"To send, without names and paths: {bundle}")
    )


def _cell(proof: Proof | None) -> doc.Cell:
    if proof is None:
        return doc.Cell(UNKNOWN)
    words = {"holds": "yes", "fails": "NO", "untold": UNKNOWN}
    measured = proof.subject in ("losses", "clocks", "profiling") and proof.figure is not None
    return doc.Cell(words[proof.status], f"{proof.figure:.1g}" if measured else "")
