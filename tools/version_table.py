"""Runs the tests of engines and worker against other releases of torch, DeepSpeed and Accelerate, and tabulates them.

    .venv/bin/python tools/version_table.py torch==2.8.0 torch==2.10.0 accelerate==1.10.0
    .venv/bin/python tools/version_table.py torch==2.10.0 --groups engines,split

By hand or at night, never in CI: a CUDA build of torch downloads some 3 GB and takes 5 GB of disk. One release at a
time is installed into an environment of its own, which is deleted afterwards. All other packages come from the
environment that runs this program, so that a row differs from it in one release alone. Rows are replaced in the table
of docs/versions.md; those of other releases stay.

Exit code 0 where all releases could be tried, whatever their tests say; 1 where one could not be installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
BEGIN = "<!-- written by tools/version_table.py: begin -->"
END = "<!-- written by tools/version_table.py: end -->"
NOT_RUN = "not run"
NEEDED_BYTES = 12 << 30
"""Free disk that one CUDA build of torch needs while pip unpacks it."""
INSTALL_SECONDS = 3600
TEST_SECONDS = 3600
_MOST_NAMES = 3
"""Tests that are named where several fail with one error."""
_REQUIREMENT = re.compile(r"(torch|deepspeed|accelerate)==(\d+(?:\.\d+)*)(\+\w+)?")


class Group(NamedTuple):
    """Tests that make one column of the table."""

    title: str
    paths: tuple[str, ...]
    """Arguments of pytest."""
    shown_from_torch: tuple[int, int] = (0, 0)
    """First torch whose ranks on CPU can run them at all: those of FSDP2 need 2.7 (pytorch issue 145935)."""


GROUPS = {
    "one": Group(
        "one rank",
        tuple(f"tests/engines/test_{name}.py" for name in ("blocks", "options", "gradients", "optimizers")),
    ),
    "engines": Group("every engine, on 1 to 3 ranks", ("tests/engines/test_equality.py",), (2, 7)),
    "split": Group("ranks that share a model", ("tests/engines/test_parallel.py",), (2, 7)),
    "deepspeed": Group("DeepSpeed", ("tests/engines/test_deepspeed.py", "tests/engines/test_deepspeed_file.py")),
    "accelerate": Group("Accelerate", ("tests/engines/test_accelerate.py",)),
    "worker": Group("worker", ("tests/worker",)),
}
"""Name on the command line -> column, in the table's order."""


class Release(NamedTuple):
    """A release of one package."""

    package: str
    version: str

    @property
    def requirement(self) -> str:
        """The release as pip has it."""
        return f"{self.package}=={self.version}"

    @property
    def torch_version(self) -> tuple[int, int] | None:
        """Major and minor number of torch; None for another package."""
        if self.package != "torch":
            return None
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)


@dataclass(frozen=True)
class GroupResult:
    """What pytest said of one group."""

    passed: int
    failures: tuple[str, ...]
    """One line a kind of failure: the tests and the first line of their error."""
    failed: int = 0

    @property
    def cell(self) -> str:
        """The result as it stands in the table."""
        if not self.failures:
            return f"{self.passed} pass"
        return f"**{self.failed} of {self.passed + self.failed} fail**"


def parse_release(text: str) -> Release:
    """Parse "torch==2.8.0".

    Raises:
        argparse.ArgumentTypeError: it is no release of a package that this program varies.
    """
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no torch==X.Y.Z, deepspeed==X.Y.Z or accelerate==X.Y.Z")
    package, version, build = match.groups()
    if package == "torch" and "." not in version:
        raise argparse.ArgumentTypeError(f"{text!r}: write a minor number too, such as torch==2.8.0")
    return Release(package, version + (build or ""))


def make_environment(folder: Path, release: Release) -> str:
    """Make an environment with the release, beside which all packages of this one are found.

    Returns:
        Why the release could not be installed; empty where it could.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-cache-dir"]
    # Of torch all that its build needs (CUDA's libraries); of the others nothing, for pip would bring a torch along.
    dependencies = [] if release.package == "torch" else ["--no-deps"]
    try:
        installed = subprocess.run(
            [*pip, *dependencies, release.requirement],
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"installing it takes longer than {INSTALL_SECONDS} seconds"
    if installed.returncode != 0:
        lines = installed.stderr.strip().splitlines() or ["pip failed"]
        return lines[-1]
    (own_packages,) = folder.glob("lib/python*/site-packages")
    # What a .pth file adds comes after the environment's own packages.
    shared = [path for path in sys.path if path.endswith("site-packages")]
    lines = [str(ROOT / "src"), *(f"import site; site.addsitedir({path!r})" for path in shared)]
    (own_packages / "shared_packages.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    question = f"import importlib.metadata, {release.package}; print(importlib.metadata.version({release.package!r}))"
    imported = subprocess.run(
        [folder / "bin" / "python", "-c", question], capture_output=True, text=True, timeout=TEST_SECONDS, check=False
    )
    answer_lines = (imported.stdout + imported.stderr).strip().splitlines() or ["it cannot be imported"]
    if imported.returncode != 0 or release.version not in imported.stdout:
        return f"it is installed and not what is imported: {answer_lines[-1]}"
    return ""


def run_group(python: Path, group: Group) -> GroupResult:
    """Run the tests of a group under an interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-n0", "--tb=short", f"--junitxml={report}"]
        try:
            done = subprocess.run(
                [python, "-m", "pytest", *options, *group.paths],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=TEST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return GroupResult(0, (f"{' '.join(group.paths)}: not done after {TEST_SECONDS} seconds",), failed=1)
        if not report.exists():
            lines = (done.stdout + done.stderr).strip().splitlines() or ["pytest said nothing"]
            return GroupResult(0, (f"{' '.join(group.paths)}: {lines[-1]}",), failed=1)
        return read_report(report)


def read_report(report: Path) -> GroupResult:
    """Read pytest's own report of a group."""
    passed = 0
    names_by_error: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314 - written by our own pytest
        problem = case.find("failure")
        if problem is None:
            problem = case.find("error")
        if problem is not None:
            first_line = (problem.get("message") or "").strip().partition("\n")[0]
            names_by_error.setdefault(first_line[:200], []).append(f"`{case.get('name')}`")
        elif case.find("skipped") is None:
            passed += 1
    failures = tuple(_failure_line(names, error) for error, names in names_by_error.items())
    return GroupResult(passed, failures, failed=sum(map(len, names_by_error.values())))


def _failure_line(names: Sequence[str], error: str) -> str:
    """Return one line on the tests that failed with one error."""
    if len(names) <= _MOST_NAMES:
        return f"{', '.join(names)}: {error}"
    return f"{len(names)} tests ({names[0]}, ...): {error}"


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    release: str
    cells: dict[str, str]
    """Column's title -> cell."""
    failures: tuple[str, ...] = ()


def try_release(release: Release, groups: Sequence[Group]) -> Row | None:
    """Install a release, run the groups against it, and delete it; None where it cannot be installed."""
    folder = Path(tempfile.mkdtemp(prefix="vitscale-versions-"))
    try:
        reason = make_environment(folder / "environment", release)
        if reason:
            print(f"{release.requirement} is left out: {reason}")
            return None
        cells = {}
        failures: list[str] = []
        for group in groups:
            torch_version = release.torch_version
            if torch_version is not None and torch_version < group.shown_from_torch:
                cells[group.title] = "not shown"
                continue
            result = run_group(folder / "environment" / "bin" / "python", group)
            print(f"{release.requirement}, {group.title}: {result.cell}", flush=True)
            cells[group.title] = result.cell
            failures += result.failures
        return Row(release.requirement, cells, tuple(failures))
    finally:
        shutil.rmtree(folder)


def table_text(rows: Iterable[Row]) -> str:
    """Return the table with the failures below it."""
    titles = [group.title for group in GROUPS.values()]
    lines = [f"| release | {' | '.join(titles)} |", f"| --- |{' --- |' * len(titles)}"]
    sorted_rows = sorted(rows, key=_row_order)
    for row in sorted_rows:
        cells = " | ".join(row.cells.get(title, NOT_RUN) for title in titles)
        lines.append(f"| `{row.release}` | {cells} |")
    for row in sorted_rows:
        lines += ["", f"Failing with `{row.release}`:", ""] if row.failures else []
        lines += [f"- {failure}" for failure in row.failures]
    return "\n".join(lines)


def _row_order(row: Row) -> tuple[str, list[int]]:
    """Key by which rows are sorted: the package, then the release as numbers."""
    package, _, version = row.release.partition("==")
    return package, [int(number) for number in re.findall(r"\d+", version)]


def rows_in(page: str) -> Iterator[Row]:
    """Yield the rows that the page has."""
    table = _between_marks(page)
    titles: list[str] = []
    for line in table.splitlines():
        if not line.startswith("|") or line.startswith("| ---"):
            continue
        first, *others = [cell.strip() for cell in line.strip("|").split(" | ")]
        if first == "release":
            titles = others
            continue
        release = first.strip("`")
        failures = re.findall(rf"Failing with `{re.escape(release)}`:\n\n((?:- .*\n?)+)", table)
        failed = [text.removeprefix("- ") for block in failures for text in block.splitlines()]
        yield Row(release, dict(zip(titles, others, strict=True)), tuple(failed))


def _between_marks(page: str) -> str:
    """Return what stands between the marks."""
    return page.partition(BEGIN)[2].partition(END)[0]


def with_rows(page: str, new_rows: Iterable[Row]) -> str:
    """Return the page with these rows, each in place of an earlier one of its release.

    Cells of groups that were not run this time keep what they were.
    """
    rows = {row.release: row for row in rows_in(page)}
    for row in new_rows:
        earlier = rows.get(row.release)
        cells = row.cells if earlier is None else {**earlier.cells, **row.cells}
        rows[row.release] = Row(row.release, cells, row.failures)
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table_text(rows.values())}\n{END}{after}"


def main() -> int:
    """Try each release that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", type=parse_release, metavar="PACKAGE==VERSION")
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"columns to run: {','.join(GROUPS)}")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.groups.split(",") if name not in GROUPS]
    if unknown:
        parser.error(f"--groups: {unknown[0]!r} is none of {', '.join(GROUPS)}")
    if find_spec("torchvision") is not None:
        parser.error("this environment has torchvision, which works with its own torch alone: run in one without it")
    groups = [GROUPS[name] for name in arguments.groups.split(",")]
    all_tried = True
    for release in arguments.releases:
        free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
        if release.package == "torch" and free_bytes < NEEDED_BYTES:
            parser.error(f"{free_bytes >> 30} GiB are free in {tempfile.gettempdir()}, and torch needs 12")
        row = try_release(release, groups)
        if row is None:
            all_tried = False
            continue
        # Read anew each time: another release may have been tried meanwhile.
        PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8"), [row]), encoding="utf-8")
    return 0 if all_tried else 1


if __name__ == "__main__":
    sys.exit(main())
