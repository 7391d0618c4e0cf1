"""check, check_training: looks at the machines that training would use, and proves what is measured on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from typing_extensions import override

from vitscale import preflight
from vitscale.api.arguments import LaunchOptions, StrPath, overlay_of, path_or_none, progress_console
from vitscale.api.new_files import refuse_unwritable, write_new
from vitscale.preflight.delivery import HeldPromise, delivery_blocks, delivery_fields, held, measured_promises
from vitscale.preflight.fit import LARGE_MESSAGE_BYTES
from vitscale.preflight.judging import check_document, check_fields
from vitscale.preflight.promises import promises_text, read_promises
from vitscale.preflight.training_proofs import Proof
from vitscale.present.document import Document, Finding, counts_of
from vitscale.present.units import counted
from vitscale.present.verb_result import VerbResult
from vitscale.store.checks import CheckRecord


@dataclass(frozen=True, repr=False)
class CheckResult(VerbResult):
    """The measurements of a check, and findings on them."""

    record: CheckRecord
    """Measurements of every rank: facts, collectives, computing, loader, disk."""
    findings: tuple[Finding, ...]
    """Findings, the most severe first."""
    stored: Path
    """The file that the check is stored in; `predict` and `run` take it."""
    promises: tuple[HeldPromise, ...] = ()
    """What was promised of the machine (`expect`), and what was measured of it; empty where nothing was."""
    expected_by: Path | None = None
    """The file of the promises; None where none was given."""

    verb = "check"
    unread = None

    @property
    def has_errors(self) -> bool:
        """Whether training would not start, or a promise is broken."""
        has_broken_promise = any(promise.is_broken for promise in self.promises)
        return has_broken_promise or any(finding.severity == "error" for finding in self.findings)

    @property
    @override
    def summary(self) -> str:
        return f"{counted(self.record.request.world.size, 'rank')}, {counts_of(self.findings)}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        expected = delivery_fields(self.promises) if self.expected_by is not None else None
        return {**check_fields(self.record, self.findings, self.stored), "expected": expected}

    @override
    def _answer_document(self) -> Document:
        document = check_document(self.record, self.findings, self.stored)
        if self.expected_by is None:
            return document
        largest_message_bytes = max(self.record.request.sweep.sizes_bytes, default=0)
        is_quick = largest_message_bytes < LARGE_MESSAGE_BYTES
        delivery = delivery_blocks(self.promises, self.expected_by, quick=is_quick)
        stops_training = any(finding.severity == "error" for finding in self.findings)
        blocks = (*document.blocks, *delivery) if stops_training else (*delivery, *document.blocks)
        return replace(document, blocks=blocks)


@dataclass(frozen=True, repr=False)
class TrainingCheckResult(VerbResult):
    """Claims about how each engine measures, each tested by tiny runs of it."""

    results: Path
    """The results folder of these runs."""
    bundle: Path
    """The same as a bundle, without names of hosts and users."""
    proofs: tuple[Proof, ...]
    """A claim on each engine, and whether it holds."""
    missing: tuple[str, ...]
    """Engines that were left out, and why."""
    findings: tuple[Finding, ...]
    """The claims that fail."""

    verb = "check"
    unread = None

    @property
    def has_errors(self) -> bool:
        """Whether a claim fails."""
        return bool(self.findings)

    @property
    @override
    def summary(self) -> str:
        return f"{counted(len(self.proofs), 'claim')}, {len(self.findings)} of them failed"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        from vitscale.preflight.training import training_fields

        return training_fields(self.results, self.proofs, self.missing, self.findings) | {"bundle": str(self.bundle)}

    @override
    def _answer_document(self) -> Document:
        from vitscale.preflight.training import training_document

        return training_document(self.results, self.bundle, self.proofs, self.missing, self.findings)


def check(
    study: StrPath | None = None,
    overrides: Sequence[str] = (),
    *,
    output: StrPath | None = None,
    ranks_per_node: int | None = None,
    quick: bool = False,
    expect: StrPath | None = None,
    save_expect: StrPath | None = None,
    launch: LaunchOptions | None = None,
    console: Console | None = None,
) -> CheckResult:
    """Checks this machine, a hostfile's hosts or an allocation before a study: starts ranks that measure them.

    Args:
        study: a study file, for its ranks, data and model; None: the machines alone.
        overrides: values put over the study, as `train.micro_batch=16`.
        output: the results folder that the check is stored in; None: the user's own folder of checks.
        ranks_per_node: ranks on each host; None: the study's, else one a GPU.
        quick: small messages and short measurements.
        expect: a TOML file of what was promised of the machine, which the check is held against.
        save_expect: a new file for what is measured, in that form; its folder has to be there.
        launch: how ranks are started and where; None: as the study says.
        console: where a line for the one who waits goes; None: standard error.

    Returns:
        What was measured (seconds, bytes, FLOP/s, images/s), and findings with what to do about them.

    Raises:
        RequestError: the study, the hosts, the data or the file of promises cannot be used; or `save_expect` is there
            already, or cannot be written. All of this is seen before anything is measured.
        StoreError: the folder cannot be written.
        VitscaleError: interrupted; nothing is stored.

    Example:
        >>> checked = vitscale.check(ranks_per_node=1, quick=True, output="results")
        >>> checked.record.request.world.size
        1
    """
    expected_by = path_or_none(expect)
    promises = read_promises(expected_by) if expected_by is not None else None
    new_file = path_or_none(save_expect)
    if new_file is not None:
        refuse_unwritable(new_file, "--save-expect")
    target = preflight.check_target(path_or_none(study), overlay_of(launch), overrides)
    request = preflight.request(target, ranks_per_node=ranks_per_node, quick=quick)
    progress = progress_console(console)

    def say(line: str) -> None:
        progress.print(line, highlight=False)

    record, stored = preflight.run_check(target, request, path_or_none(output), say)
    if new_file is not None:
        write_new(new_file, promises_text(measured_promises(record, new_file)), "--save-expect")
    held_promises = held(record, promises) if promises is not None else ()
    return CheckResult(record, preflight.judged(record), stored, held_promises, expected_by)


def check_training(
    *,
    output: StrPath | None = None,
    ranks_per_node: int | None = None,
    launch: LaunchOptions | None = None,
    console: Console | None = None,
) -> TrainingCheckResult:
    """Checks each engine by a tiny run on the devices that are there, and proves what is measured.

    Args:
        output: the results folder for the runs, to which a bundle is added; None: results/training-check-TIME.
        ranks_per_node: ranks on each host; None: the hostfile's slots, else one a GPU.
        launch: how ranks are started and where; None: as the study says.
        console: where progress goes; None: standard error.

    Returns:
        The proofs; `has_errors` says whether one fails.

    Raises:
        RequestError: the ranks cannot be started.
        StoreError: the folder cannot be used.
    """
    from vitscale.preflight import training
    from vitscale.store.bundles import write_bundle

    results, proofs, missing = training.check_training(
        overlay_of(launch), ranks_per_node, path_or_none(output), progress_console(console)
    )
    findings = training.training_findings(proofs)
    bundle = results / "bundle.tar.gz"
    write_bundle(results, bundle, redact=True, answer=training.training_fields(results, proofs, missing, findings))
    return TrainingCheckResult(results, bundle, proofs, missing, findings)
