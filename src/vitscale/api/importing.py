"""import_results: others' logs, tables and traces as results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from vitscale.api.arguments import StrPath, path_of, path_or_none
from vitscale.base import plugins
from vitscale.errors import RequestError, unknown
from vitscale.importers.contents import FORMATS, OF_LINKS, ImportOptions, LinkFormat, gpus_of
from vitscale.importers.importing import WrittenImport, guess, import_logs
from vitscale.pages.imported import import_document, import_fields
from vitscale.present import units
from vitscale.present.document import Bullets, Document
from vitscale.present.verb_result import VerbResult
from vitscale.store.checks import CheckRecord

if TYPE_CHECKING:
    from vitscale.prediction.network.links import Link

_GUESS_FORMAT = "auto"


@dataclass(frozen=True, repr=False)
class ImportResult(VerbResult):
    """An import whose results folder is written."""

    results: Path
    """The results folder, which every other function takes."""
    done: WrittenImport
    """The study, its runs, and whether the folder held this import already."""
    guessed_format: str
    """The format that the files were taken for; empty where it was named."""

    verb = "import"
    unread = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Lines and files that could not be used, and why."""
        imported = self.done.study.imported
        return imported.problems if imported is not None else ()

    @property
    @override
    def summary(self) -> str:
        runs = units.counted(len(self.done.runs), "run")
        series = units.counted(len(self.done.study.curves), "series", "series")
        return f"{self.done.study.name}, {runs} of {series}, in {self.results}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return import_fields(self.done, self.results)

    @override
    def _answer_document(self) -> Document:
        return import_document(self.done, self.results, self.guessed_format)


@dataclass(frozen=True, repr=False)
class LinkImportResult(VerbResult):
    """Others' measurements of the network as a check, which `predict` takes."""

    results: Path
    """The results folder."""
    record: CheckRecord
    """The check."""
    stored: Path
    """The file that the check is stored in."""
    problems: tuple[str, ...]
    """Lines and files that could not be used, and why."""

    verb = "import"
    unread = None

    @property
    def sentences(self) -> list[str]:
        """Each link with its bandwidth and latency, what could not be used, and the next step."""
        from vitscale.prediction.network.checked import network_of

        network = network_of(self.record)
        return [
            f"inside a host: {_link_words(network.inside)}",
            f"between hosts: {_link_words(network.across)}",
            *(f"problem: {problem}" for problem in self.problems),
            f"Written to {self.stored}; predict takes it: vitscale predict {self.results}",
        ]

    @property
    @override
    def summary(self) -> str:
        return f"links of {units.counted(self.record.request.world.size, 'rank')}, in {self.stored}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return {
            "results": str(self.results),
            "stored": str(self.stored),
            "problems": list(self.problems),
            "check": self.record.model_dump(mode="json"),
        }

    @override
    def _answer_document(self) -> Document:
        return Document("", (Bullets(tuple(self.sentences)),))


def _link_words(link: Link) -> str:
    """Return a link in words, with its bandwidth and latency where they were measured."""
    if link.source != "check":
        return link.described
    bandwidth = units.rate(link.bandwidth_bytes_per_second, "B/s")
    return f"{link.described}, {bandwidth}, {units.seconds(link.latency_seconds)} a hop"


def import_results(
    logs: StrPath | Sequence[StrPath],
    *,
    output: StrPath | None = None,
    log_format: str = _GUESS_FORMAT,
    name: str | None = None,
    model: str | None = None,
    parameters: str | None = None,
    image_size: int | None = None,
    engine: str | None = None,
    zero_stage: int | None = None,
    precision: str | None = None,
    micro_batch: int | None = None,
    train_samples: int | None = None,
    gpus: int | str | Sequence[int] | None = None,
    cells: str | None = None,
    as_repeats: bool = False,
) -> ImportResult | LinkImportResult:
    """Imports others' logs, tables or traces as results; importing them again changes nothing.

    What results need and the files leave open is an error that names the argument, with its choices.

    Args:
        logs: a file, or files of one format, which together are one study.
        output: the results folder; None: results/NAME, by `name` or the first file.
        log_format: epochs, deepspeed, trainer-state, train-log, csv, trace, nccl-tests, perftest; "auto": as they look.
        name: name of the study.
        model: a named model (vit-b16), or the folder of a Hugging Face model.
        parameters: the number of parameters of a model that has no name here, as text: "110M".
        image_size: pixels a side.
        engine: ddp, fsdp2, deepspeed, ...
        zero_stage: DeepSpeed's ZeRO stage, 0 to 3.
        precision: fp32, bf16, bf16-params or fp16.
        micro_batch: images per rank and micro-step.
        train_samples: training images of the whole dataset.
        gpus: ranks, where logs do not say; several numbers, or text such as "1,8": of each file in turn.
        cells: what cells hold, where a table does not say it: images_per_second, ...
        as_repeats: take files of one setting for repeats, however much they differ.

    Returns:
        The import; of nccl-tests and perftest a check of the network.

    Raises:
        RequestError: an argument is wrong, or the files lack what only their reader can tell.
        StoreError: a file cannot be read, nothing in it can be used, or the folder holds something else.

    Example:
        >>> imported = vitscale.import_results("table.csv", output="imported", engine="ddp", micro_batch=8)
        >>> imported
        <import: table, 4 runs of 1 series, in imported>
    """
    paths = [path_of(logs)] if isinstance(logs, str | Path) else [path_of(log) for log in logs]
    if not paths:
        raise RequestError("no log is given", next_step="Give one file or more")
    rank_counts = _rank_counts_of_files(gpus, len(paths))
    is_guessed = log_format == _GUESS_FORMAT
    file_format = guess(paths, cells, rank_counts) if is_guessed else log_format
    _refuse_unknown_format(file_format)
    results = path_or_none(output) or Path("results") / (name or paths[0].stem)
    link_format = _link_format(file_format)
    if link_format is not None:
        return _import_links(paths, link_format, results)
    options = ImportOptions(
        model=model,
        image_size=image_size,
        engine=engine,
        zero_stage=zero_stage,
        precision=precision,
        micro_batch=micro_batch,
        train_samples=train_samples,
        gpus=rank_counts[0] if len(rank_counts) == 1 else None,
        name=name,
        parameters=parameters,
        cells=cells,
        each_gpus=rank_counts if len(rank_counts) > 1 else None,
        as_repeats=as_repeats or None,
    )
    done = import_logs(paths, file_format, options, results)
    return ImportResult(results, done, guessed_format=file_format if is_guessed else "")


def _refuse_unknown_format(file_format: str) -> None:
    """Refuse a format that neither vitscale nor an installed package reads.

    Raises:
        RequestError: it is none of theirs.
    """
    is_own = file_format in (*FORMATS, *OF_LINKS)
    if not is_own and plugins.target("importer", file_format) is None:
        raise unknown("format", file_format, (_GUESS_FORMAT, *FORMATS, *OF_LINKS, *plugins.names("importer")))


def _link_format(file_format: str) -> LinkFormat | None:
    """Return a format of measurements of the network; None for all other formats."""
    for link_format in OF_LINKS:
        if link_format == file_format:
            return link_format
    return None


def _rank_counts_of_files(gpus: int | str | Sequence[int] | None, files: int) -> tuple[int, ...]:
    """Return one rank count for all files, or one for each in turn; empty where none is given."""
    if gpus is None:
        return ()
    if isinstance(gpus, str):
        return gpus_of(gpus, files)
    counts = [gpus] if isinstance(gpus, int) else gpus
    return gpus_of(",".join(map(str, counts)), files)


def _import_links(paths: Sequence[Path], log_format: LinkFormat, results: Path) -> LinkImportResult:
    from vitscale.preflight.imported import import_links

    record, stored, problems = import_links(paths, log_format, results)
    return LinkImportResult(results, record, stored, problems)
