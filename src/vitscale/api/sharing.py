"""export, send, watch: results as one file, results in a tracker, and a look at a study that runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from vitscale import store
from vitscale.api.arguments import StrPath, path_of
from vitscale.errors import RequestError, shown, unknown
from vitscale.present.document import Document, Paragraph
from vitscale.present.units import counted, size
from vitscale.present.unread import Unread
from vitscale.present.verb_result import VerbResult
from vitscale.runner.live import StudyView, study_view, view_document, view_fields
from vitscale.store import bundles


@dataclass(frozen=True, repr=False)
class ExportResult(VerbResult):
    """A bundle of a results folder, which every function takes in the folder's place."""

    bundle: Path
    """The file."""
    size_bytes: int
    sha256: str
    """Digest of the file, in hexadecimal."""
    study: str
    """Name of the study."""
    files: Mapping[str, str]
    """Each file in it -> its digest."""
    redacted: bool
    """Whether names of hosts and users, paths, addresses and values of variables were taken out."""
    missing: tuple[Unread, ...]
    """Finished runs that cannot be read; packs among them are not in it, and its manifest names them."""

    verb = "export"

    @property
    @override
    def unread(self) -> Sequence[Unread]:
        return self.missing

    @property
    @override
    def summary(self) -> str:
        return f"{self.bundle}, {counted(len(self.files), 'file')} of {self.study}, {size(self.size_bytes)}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return {
            "bundle": str(self.bundle),
            "bytes": self.size_bytes,
            "sha256": self.sha256,
            "study": self.study,
            "redacted": self.redacted,
            "files": dict(self.files),
        }

    @override
    def _answer_document(self) -> Document:
        files = counted(len(self.files), "file")
        description = f"{self.bundle}: {files} of {self.study}, {size(self.size_bytes)}, SHA-256 {self.sha256}"
        warning = "Its texts may still tell of you in words: look into it, then send it."
        return Document("", (Paragraph(description),), (warning,) if self.redacted else ())


def export(results: StrPath, output: StrPath = "bundle.tar.gz", *, redact: bool = False) -> ExportResult:
    """Exports a results folder as one checksummed file for a paper or an issue; every function reads it.

    Args:
        results: a results folder, or a bundle of it.
        output: the bundle; an older bundle there is replaced.
        redact: leave out names of hosts and users, paths, addresses and values of variables.

    Raises:
        RequestError: the output is no file, or a file that is no bundle.
        StoreError: the folder holds no results, or they cannot be read.

    Example:
        >>> exported = vitscale.export("results", "bundle.tar.gz")
        >>> vitscale.report(exported.bundle)
        <report: documented, 3 of 3 trials completed, 9 runs>
    """
    bundle = path_of(output)
    folder = path_of(results)
    _refuse_output(bundle)
    stored = store.load(folder)  # refuses what no verb could read again
    files = bundles.write_bundle(store.folder_of(folder), bundle, redact=redact, unread=stored.unread)
    with bundle.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ExportResult(bundle, bundle.stat().st_size, digest, stored.study.name, files, redact, stored.unread)


def _refuse_output(bundle: Path) -> None:
    """Refuse to write a bundle to what is no file, or over a file with other contents.

    Raises:
        RequestError: it is one of these.
    """
    if store.is_stream(bundle) or str(bundle) == "-":
        raise RequestError(f"{shown(str(bundle))} is no file", next_step="Name a file with -o, and send that")
    has_contents = bundle.exists() and bundle.stat().st_size > 0
    if has_contents and not bundles.is_bundle(bundle):
        next_step = "Name another file with -o; a bundle of before is replaced"
        raise RequestError(f"{shown(str(bundle))} is there already, and is no bundle", next_step=next_step)


@dataclass(frozen=True)
class SendResult:
    """Runs that a tracker has now."""

    sent: int
    """Runs that were sent."""
    present_before: int
    """Runs that were there already."""
    unread: tuple[Unread, ...]
    """Finished runs that were not sent, for they cannot be read."""


def send(results: StrPath, tracker: str, folder: StrPath = "runs") -> SendResult:
    """Sends every run to a tracker by its own client; a run that is there already is left as it is.

    Args:
        results: a results folder, or a bundle of it.
        tracker: tensorboard, mlflow or wandb.
        folder: where TensorBoard's files go; the others have places of their own.

    Raises:
        RequestError: the tracker is unknown, or its client is not installed or refuses.
        StoreError: the folder holds no results, or they cannot be read.
    """
    from vitscale import analysis
    from vitscale.pages import sinks

    if tracker not in sinks.SINKS:
        raise unknown("tracker", tracker, sinks.SINKS)
    analysed = analysis.analyse_folder(path_of(results))
    runs = sinks.send(tracker, analysed, path_of(folder))
    return SendResult(runs.sent, runs.present_before, analysed.unread)


@dataclass(frozen=True, repr=False)
class WatchResult(VerbResult):
    """A study that runs: what it does now, how fast, what remains and what came last."""

    view: StudyView
    """The state of the study, from its folder alone."""
    results: Path
    """The results folder."""

    verb = "watch"
    unread = None

    @property
    def is_done(self) -> bool:
        """Whether no run is left to do."""
        return self.view.driver == "none left to do"

    @property
    @override
    def summary(self) -> str:
        return f"{self.view.study}, {self.view.done} of {counted(self.view.runs, 'run')} done"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return view_fields(self.view)

    @override
    def _answer_document(self) -> Document:
        return view_document(self.view, self.results)


def watch(results: StrPath) -> WatchResult:
    """Looks once at a study that runs, from any machine that sees its folder; nothing is locked or written.

    Args:
        results: the results folder.

    Raises:
        StoreError: the folder holds no study, or cannot be read.

    Example:
        >>> vitscale.watch("results")
        <watch: documented, 9 of 9 runs done>
    """
    folder = path_of(results)
    return WatchResult(study_view(folder, time.time()), folder)
