"""compare, compare_studies: results side by side, and studies that are run in turn to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from typing_extensions import override

from vitscale import analysis
from vitscale.analysis.counterparts import side_by_side
from vitscale.api.arguments import StrPath, path_of, path_or_none, positive, progress_console
from vitscale.errors import RequestError, shown
from vitscale.pages.side_by_side import Compared, compared_document, compared_fields
from vitscale.present.document import Document
from vitscale.present.units import counted
from vitscale.present.unread import Unread
from vitscale.present.verb_result import VerbResult

_PAGE_SUFFIXES = (".html", ".md")
_LARGEST_LIMIT = 10.0
"""Largest share by which a trial may be allowed to be slower."""
DEFAULT_FOLDER = Path("results") / "compared"
"""The folder for the results of studies that are run in turn."""


@dataclass(frozen=True, repr=False)
class CompareResult(VerbResult):
    """Each trial's time against that of the first results."""

    compared: Compared
    """The pairs of trials, each with its verdict, and what has no counterpart."""
    written: Path | None = None
    """The page that was written."""
    failed_runs: int = 0
    """Runs that did not complete, where studies were run in turn."""
    strict: bool = False
    """Whether what is undecided fails too."""

    verb = "compare"

    @property
    def is_slower(self) -> bool:
        """Whether a trial is slower than the limit for certain."""
        return self.compared.is_failed

    @property
    def is_undecided(self) -> bool:
        """Whether the answer is open for some trial.

        It is where the trial is neither slower than the limit for certain nor within it, has no counterpart, or has
        runs that cannot be read and could change the answer.
        """
        return self.compared.is_undecided

    @property
    def fails(self) -> bool:
        """Whether a gate fails: a trial is slower, a run did not complete, or with `strict` something is undecided."""
        is_undecided = self.strict and self.is_undecided
        return self.is_slower or is_undecided or self.failed_runs > 0

    @property
    @override
    def unread(self) -> Sequence[Unread]:
        return self.compared.unread

    @property
    @override
    def summary(self) -> str:
        trials = counted(len(self.compared.pairs), "trial")
        other_results = len({pair.results for pair in self.compared.pairs})
        return f"{trials} of {counted(other_results, 'other')} with {self.compared.first_name}"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return compared_fields(self.compared)

    @override
    def _answer_document(self) -> Document:
        return compared_document(self.compared)

    def write(self, page: StrPath) -> CompareResult:
        """Write an HTML or a Markdown page, and return the result that names it.

        Raises:
            RequestError: the name ends otherwise, or the file cannot be written.
        """
        from vitscale import store

        file = path_of(page)
        check_page(file)
        try:
            store.write_whole(file, self._page_text(file.suffix), make_folder=True)
        except OSError as error:
            raise RequestError(f"{shown(str(file))} cannot be written: {error.strerror or error}") from None
        return replace(self, written=file)

    def _page_text(self, suffix: str) -> str:
        """Return the page as Markdown or HTML. `suffix`: ".md" or ".html"."""
        if suffix == ".md":
            return self.to_markdown()
        from vitscale.present.html import to_html

        return to_html(self.document())


def compare(
    *results: StrPath,
    fail_if_slower: float | None = None,
    strict: bool = False,
    combine_unlike: bool = False,
    output: StrPath | None = None,
) -> CompareResult:
    """Compares results: what differs, and which trials got slower or faster for certain.

    Args:
        results: two results folders or more; the others are compared with the first.
        fail_if_slower: share by which a trial may be slower, 0.05 for 5 %; None: no limit.
        strict: fail also where that is undecided, or a trial has no counterpart.
        combine_unlike: combine runs although they ran on unlike hardware or under other library versions.
        output: a page to write, named .html or .md.

    Returns:
        The verdicts; `fails` is the gate's answer.

    Raises:
        RequestError: fewer than two are given, a study file is among them, no trial has a counterpart, or the page
            cannot be written.
        StoreError: a folder holds no results, or they cannot be read.

    Example:
        >>> compared = vitscale.compare("results", "slower", fail_if_slower=0.05)
        >>> compared
        <compare: 3 trials of 1 other with results>
        >>> compared.fails
        True
    """
    folders = [path_of(path) for path in results]
    _refuse_fewer_than_two(folders, noun="folder")
    limit = _checked_limit(fail_if_slower, strict=strict)
    _refuse_studies(folders)
    page = path_or_none(output)
    if page is not None:
        check_page(page)
    compared = _read_and_compare(folders, limit, combine_unlike=combine_unlike)
    result = CompareResult(compared, strict=strict)
    return result if page is None else result.write(page)


def compare_studies(
    *studies: StrPath,
    repeats: int | None = None,
    fail_if_slower: float | None = None,
    strict: bool = False,
    combine_unlike: bool = False,
    output: StrPath | None = None,
    console: Console | None = None,
) -> CompareResult:
    """Runs studies in turn, round by round, and compares their results; the same call again resumes.

    Args:
        studies: two study files or more; the others are compared with the first.
        repeats: rounds; None: `measure.repeats` of the first study.
        fail_if_slower: share by which a trial may be slower, 0.05 for 5 %; None: no limit.
        strict: fail also where that is undecided, or a trial has no counterpart.
        combine_unlike: combine runs although they ran on unlike hardware or under other library versions.
        output: the folder for their results; None: results/compared.
        console: where notes and progress go; None: standard error.

    Returns:
        The verdicts, and how many runs did not complete.

    Raises:
        RequestError: a study cannot be run, or not round by round; nothing was started.
        VitscaleError: as `run` does.
    """
    files = [path_of(path) for path in studies]
    _refuse_fewer_than_two(files, noun="study")
    limit = _checked_limit(fail_if_slower, strict=strict)
    in_turn = run_in_turn(files, repeats, path_or_none(output) or DEFAULT_FOLDER, progress_console(console))
    compared = _read_and_compare(in_turn.folders, limit, combine_unlike=combine_unlike)
    return CompareResult(compared, failed_runs=in_turn.failures, strict=strict)


@dataclass(frozen=True)
class RunsInTurn:
    """The results of studies that were run in turn."""

    folders: tuple[Path, ...]
    """The results folder of each study."""
    failures: int
    """Runs that did not complete."""


def run_in_turn(studies: Sequence[Path], repeats: int | None, folder: Path, console: Console) -> RunsInTurn:
    """Run studies in turn, each into a folder of its own in `folder`; notes and progress go to the console.

    Raises:
        VitscaleError: as `compare_studies` does.
    """
    from vitscale.api.planning import plan_findings
    from vitscale.preflight import pace_warnings
    from vitscale.runner import alternating
    from vitscale.runner.preview import finding_lines

    sides = alternating.sides_of(studies, folder, repeats)
    for side in sides:  # the results of one study, with the plan to fill them
        notes = [*side.plan.expansion.notes, *pace_warnings(side.plan, side.results)]
        note_lines = [f"note: {side.name}: {note}" for note in notes]
        for line in (*note_lines, *finding_lines(side.plan, plan_findings(side.plan))):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    reports = alternating.run_in_turn(sides, console)
    failures = sum(len(report.failures) for report in reports)
    if failures:
        console.print(_sentence_on_failures(failures), markup=False)
    return RunsInTurn(tuple(side.results for side in sides), failures)


def _sentence_on_failures(failures: int) -> str:
    verb = "is" if failures == 1 else "are"
    return f"{counted(failures, 'run')} did not complete, and {verb} not compared: vitscale report says why"


def check_page(page: Path) -> None:
    """Refuse a page whose name ends in no form of a page.

    Raises:
        RequestError: it ends in neither .html nor .md.
    """
    if page.suffix not in _PAGE_SUFFIXES:
        raise RequestError(f"-o names {shown(page.name)}", valid=["FILE.html", "FILE.md"])


def _refuse_fewer_than_two(paths: Sequence[Path], noun: str) -> None:
    if not paths:
        raise RequestError("compare needs two or more, and none is given", next_step="Give two")
    if len(paths) == 1:
        raise RequestError(f"compare needs two or more, and one {noun} is given", next_step="Give two")


def _checked_limit(fail_if_slower: float | None, *, strict: bool) -> float | None:
    """Return the share by which a trial may be slower; None: no limit.

    Raises:
        RequestError: the share is out of range, or `strict` is given without one.
    """
    if strict and fail_if_slower is None:
        raise RequestError("--strict is of --fail-if-slower, which is not given", next_step="Add --fail-if-slower 5%")
    return positive(fail_if_slower, "--fail-if-slower", most=_LARGEST_LIMIT)


def _refuse_studies(paths: Sequence[Path]) -> None:
    """Refuse study files, which are meant for --run.

    Raises:
        RequestError: a path is one.
    """
    for path in paths:
        is_study = path.suffix == ".toml" and path.is_file()
        if is_study:
            raise RequestError(
                f"{shown(str(path))} is a study file, and compare reads results",
                next_step="Add --run to run the studies in turn; or give results folders",
            )


def _read_and_compare(folders: Sequence[Path], limit: float | None, *, combine_unlike: bool) -> Compared:
    """Read results, and compare all others with the first.

    Args:
        folders: the results folders.
        limit: share by which a trial may be slower; None: no limit.
        combine_unlike: whether to combine runs of unlike hardware or library versions.

    Raises:
        RequestError: no trial has a counterpart.
        StoreError: a folder holds no results, or they cannot be read.
    """
    result_names = _short_names(folders)
    analysed = [analysis.analyse_folder(path, combine_unlike=combine_unlike) for path in folders]
    named_results = list(zip(result_names, analysed, strict=True))
    pairs = side_by_side(named_results)
    if not pairs:
        raise RequestError(
            f"no trial of {shown(result_names[0])} has a counterpart in the others",
            next_step="Compare results of one study, or of studies that sweep the same fields on as many ranks",
        )
    return Compared.of(named_results, pairs, limit)


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Return the name of each folder; its path where another folder has that name."""
    names = [path.name for path in paths]
    return [path.name if names.count(path.name) == 1 else str(path) for path in paths]
