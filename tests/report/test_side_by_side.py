"""Two results of known times side by side: the ratio put in comes out, and a gate opens and closes as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import cli
from vitscale.analysis.counterparts import _short
from vitscale.errors import RequestError

SPREAD = (1.0, 1.004, 0.996, 1.002)


def results(folder: Path, name: str, factor: float = 1.0, runs: int = 4, ranks: tuple[int, ...] = (1, 2)) -> Path:
    """A study whose steps take `factor` times 0.1 s, with a spread of half a percent."""
    times = {n: [factor * 0.1 * spread for spread in SPREAD[:runs]] for n in ranks}
    write_results(resolved_study(times), folder / name)
    return folder / name


def compared(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and data."""
    answer = CliRunner().invoke(cli.app, ["compare", *map(str, arguments), "--json"])
    return answer.exit_code, json.loads(answer.stdout) if answer.stdout else {}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results(tmp_path_factory.mktemp("base"), "base")


@pytest.mark.parametrize(
    ("factor", "gate", "code", "strict"),
    [(1.0, "within", 0, 0), (0.8, "within", 0, 0), (1.2, "slower", 1, 1), (1.05, "undecided", 0, 1)],
)
def test_only_what_is_slower_for_certain_fails(
    base: Path, tmp_path: Path, factor: float, gate: str, code: int, strict: int
) -> None:
    """1.05 times as long is neither below nor beyond 5 % for certain."""
    other = results(tmp_path, "other", factor)
    exit_code, told = compared(base, other, "--fail-if-slower", "5%")
    assert [pair["gate"] for pair in told["pairs"]] == [gate, gate]
    assert [pair["time_ratio"] for pair in told["pairs"]] == pytest.approx([factor, factor])
    assert exit_code == code
    assert compared(base, other, "--fail-if-slower", "0.05", "--strict")[0] == strict


def test_without_a_limit_nothing_fails(base: Path, tmp_path: Path) -> None:
    code, told = compared(base, results(tmp_path, "other", 1.5))
    assert code == 0
    assert {pair["verdict"] for pair in told["pairs"]} == {"slower"}
    assert {pair["gate"] for pair in told["pairs"]} == {None}


def test_one_run_decides_nothing(base: Path, tmp_path: Path) -> None:
    code, told = compared(base, results(tmp_path, "other", 2.0, runs=1), "--fail-if-slower", "5%")
    assert code == 0
    assert {pair["verdict"] for pair in told["pairs"]} == {"too few repeats to tell"}
    assert {pair["gate"] for pair in told["pairs"]} == {"undecided"}


def test_all_comparisons_are_corrected_together(base: Path, tmp_path: Path) -> None:
    """Holm over 2 trials x 2 results: the smallest of four p-values counts four times."""
    others = [results(tmp_path, name, factor) for name, factor in (("b", 1.004), ("c", 1.2))]
    _, told = compared(base, *others)
    p = sorted(pair["p"] for pair in told["pairs"])
    smallest = min(told["pairs"], key=lambda pair: pair["p"])
    assert smallest["p_adjusted"] == pytest.approx(4 * p[0])
    assert len(told["pairs"]) == 4


def test_of_digests_and_revisions_the_first_digits_are_told() -> None:
    assert _short("24e6f5a0f5c4" + "0" * 52) == "24e6f5a0f5c4"
    assert _short("de4a5cb40c3a" + "0" * 28 + ", changed") == "de4a5cb40c3a, changed"
    assert [_short(value) for value in (1234567890123, None, "abcdef" * 5)] == ["1234567890123", "None", "abcdef" * 5]


def test_what_has_no_counterpart_is_named_and_strict(base: Path, tmp_path: Path) -> None:
    other = results(tmp_path, "other", ranks=(1,))
    code, told = compared(base, other, "--fail-if-slower", "5%")
    assert code == 0
    assert told["unmatched"] == ["other has nothing like ddp (strong-micro) on 2 ranks"]
    assert compared(base, other, "--fail-if-slower", "5%", "--strict")[0] == 1


def test_it_writes_a_page_and_markdown(base: Path, tmp_path: Path) -> None:
    other = results(tmp_path, "other", 1.2)
    for name in ("c.md", "c.html"):
        answer = CliRunner().invoke(cli.app, ["compare", str(base), str(other), "-o", str(tmp_path / name)])
        assert (answer.exit_code, answer.stdout, answer.stderr) == (0, f"{tmp_path / name}\n", "")
        text = (tmp_path / name).read_text().replace("\N{NO-BREAK SPACE}", " ")
        assert "2 trials compared with base: 2 slower" in text
        assert "1.20" in text
    page = tmp_path / "again.html"
    answer = CliRunner().invoke(cli.app, ["compare", str(base), str(other), "-o", str(page), "--json"])
    assert (json.loads(answer.stdout)["vitscale"], answer.stderr) == ("compare", f"{page}\n")
    assert page.is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one folder is given"),
        (["--strict"], "one folder is given"),
        (["OTHER", "--strict"], "--strict is of --fail-if-slower"),
        (["OTHER", "--fail-if-slower", "much"], "--fail-if-slower is 'much'. Valid: 5%, 0.05."),
        (["OTHER", "-o", "x.pdf"], "Valid: FILE.html, FILE.md."),
    ],
)
def test_a_wrong_request_is_one_message(base: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    other = str(results(tmp_path, "other"))
    answer = CliRunner().invoke(cli.app, ["compare", str(base), *(other if a == "OTHER" else a for a in arguments)])
    assert says in str(answer.exception)


def test_a_limit_without_its_sign_is_refused(base: Path) -> None:
    """5 may be meant as 5 %: as five times the time the gate would always be open."""
    answer = CliRunner().invoke(cli.app, ["compare", str(base), str(base), "--fail-if-slower", "5"])
    assert isinstance(answer.exception, RequestError)
    assert str(answer.exception).startswith("--fail-if-slower is '5'. Valid: 5%, 0.05")
    assert compared(base, base, "--fail-if-slower", "500%")[0] == 0
