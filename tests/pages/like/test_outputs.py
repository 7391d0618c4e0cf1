"""The page, the pictures, the JSON; hostile text; a browser."""

from __future__ import annotations

import functools
import html.parser
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from browser import drawn, shared_page
from like_paper_factory import paper_curve, paper_study, whole_study
from results_factory import write_results
from vitscale.analysis import Analysis, analyse
from vitscale.cli import app
from vitscale.errors import RequestError
from vitscale.pages import like
from vitscale.pages.like.paper import FIGURES
from vitscale.store.results import Results

MARKER = "vitscaleattack"
HOSTILE = (
    f"</script></style><script>document.title='{MARKER}'</script><img src=x onerror=\"document.title='{MARKER}'\">"
)


def write(analysis: Analysis, results: Path, formats: list[str], output: Path | None) -> list[Path]:
    return like.write(like.study_named("paper"), like.MeasuredData.of(analysis), results, formats, output)


class Elements(html.parser.HTMLParser):
    """Tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def small() -> Results:
    """One workload in one host and over several."""
    workload: dict[str, Any] = {"dataset": "cifar100", "micro_batch": 64}
    return paper_study(paper_curve({1: [0.8], 2: [0.8]}, **workload), paper_curve({2: [0.88]}, spread=True, **workload))


def page_of(results: Results) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (path,) = write(analyse(results), Path(folder), ["html"], None)
        assert path == Path(folder) / "like-paper" / "like-paper.html"
        return path.read_text(encoding="utf-8")


@functools.cache
def hostile_page() -> str:
    return page_of(hostile())


def hostile() -> Results:
    curve, trials, runs = paper_curve({1: [0.8], 2: [0.8]})
    curve = curve.model_copy(update={"labels": {**curve.labels, "cluster": HOSTILE}})
    twin, more, others = paper_curve({1: [0.9], 2: [0.9]}, micro_batch=64, devices=(HOSTILE, "Example GPU"))
    twin = twin.model_copy(update={"labels": {**twin.labels, "cluster": HOSTILE + "2"}})
    study = paper_study((curve, trials, runs), (twin, more, others))
    return study.model_copy(update={"study": study.study.model_copy(update={"name": HOSTILE}), "problems": (HOSTILE,)})


def test_the_page_has_every_figure_and_both_claims() -> None:
    text = page_of(whole_study())
    places = [attrs["data-figure"] for _, attrs in Elements(text).tags if "data-figure" in attrs]
    assert len(places) == len(set(places)) == 11
    assert "11 of 14 figures drawn; 3 say what data they lack" in text
    headings = re.findall(r"<h2[^>]*>(Figure \d+)\.", text)
    assert headings == [f"Figure {figure.number}" for figure in FIGURES], "those without data stand in their places"
    assert "These results hold no weak scaling over several hosts" in text
    assert text.count("[scaling]\nmode = &#34;weak&#34;") == 2
    assert "CIFAR-100, micro-batch 64: over several hosts an epoch takes +1.1 % against one host" in text
    assert "arXiv 2602.21081" in text


def test_untested_claims_are_said_to_be_untested() -> None:
    text = page_of(whole_study().model_copy(update={"runs": ()}))
    assert text.count("Not tested:") == 2


def test_nothing_is_loaded_and_text_of_users_stays_text() -> None:
    tags = Elements(hostile_page()).tags
    assert [tag for tag, _ in tags].count("script") == 3
    assert "img" not in [tag for tag, _ in tags]
    assert not [key for _, attrs in tags for key in attrs if key.startswith("on")]
    assert all(str(attrs[key]).startswith("#") for _, attrs in tags for key in ("src", "href") if key in attrs)
    policy = next(attrs for _, attrs in tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'; script-src 'sha256-")


def test_chromium_draws_every_figure_and_runs_nothing_of_a_user(tmp_path: Path) -> None:
    page = tmp_path / "like-paper.html"
    page.write_text(hostile_page(), encoding="utf-8")
    tree = drawn(page)
    assert tree.count("<svg") >= 5
    assert "could not be drawn:" not in re.sub(r"<script.*?</script>", "", tree, flags=re.DOTALL)
    title = re.search(r"<title>(.*?)</title>", tree, re.DOTALL)
    assert title is not None
    assert title[1] != MARKER
    assert title[1].startswith("&lt;/script&gt;")


def test_a_phone_has_no_sideways_scrolling_and_legible_charts(tmp_path: Path) -> None:
    page = tmp_path / "like-paper.html"
    page.write_text(page_of(whole_study()), encoding="utf-8")
    found = shared_page().open(page, width=390, height=800)
    assert found.ask("document.documentElement.scrollWidth") <= 390
    smallest = found.ask(
        "Math.min(...[...document.querySelectorAll('.picture svg')].map((svg) => "
        "svg.getBoundingClientRect().width / svg.viewBox.baseVal.width))"
    )
    assert smallest > 0.9, "drawn for the room there is, not made smaller"
    # A control switches a figure to what else it shows.
    figure = 'document.querySelector("[data-figure=figure-08-cifar-10-strong-scaling]")'
    assert found.ask(f"{figure}.querySelector('figcaption').innerText").startswith("Epoch time")
    found.ask(f"[...{figure}.querySelectorAll('.controls button')].find((b) => b.innerText === 'speedup').click()")
    found.settle()
    assert found.ask(f"{figure}.querySelector('figcaption').innerText").startswith("Speedup")
    assert (found.logged, found.requested) == ([], [])


def test_pictures_and_json(tmp_path: Path) -> None:
    written = write(analyse(small()), tmp_path, ["svg", "json"], tmp_path / "out")
    assert {path.suffix for path in written} == {".svg", ".json"}
    # Each figure under its own name, and what else it shows (speedup beside epoch time) under a longer one.
    own = {figure.name for figure in FIGURES}
    stems = {path.stem for path in written if path.suffix == ".svg"}
    assert own <= stems
    assert all(any(stem.startswith(name) for name in own) for stem in stems)
    assert "figure-16-cifar-100-strong-scaling-speedup" in stems
    assert "Figure 17. CIFAR-100 weak scaling (batch size 64)" in (
        tmp_path / "out" / "figure-17-cifar-100-weak-scaling.svg"
    ).read_text(encoding="utf-8")
    content = json.loads((tmp_path / "out" / "like-paper.json").read_text(encoding="utf-8"))
    assert (content["vitscale"], content["version"]) == ("like", 3)
    assert [one["number"] for one in content["figures"]] == [*range(4, 18)]
    assert [one["ratio"] for one in content["claims"]["hosts"]] == pytest.approx([1.1])


def test_one_form_of_text_goes_to_the_file_that_is_named(tmp_path: Path) -> None:
    analysis = analyse(paper_study(paper_curve({1: [0.8], 2: [0.8]})))
    assert write(analysis, tmp_path, ["json"], tmp_path / "a" / "own.json") == [tmp_path / "a" / "own.json"]


def test_an_unknown_format_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    analysis = analyse(paper_study(paper_curve({1: [0.8], 2: [0.8]})))
    with pytest.raises(RequestError, match="unknown format of --like 'csv'"):
        write(analysis, tmp_path, ["csv"], None)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="Name another folder with -o"):
        write(analysis, tmp_path, ["html"], tmp_path / "file" / "below")


def test_the_verb(tmp_path: Path) -> None:
    write_results(small(), tmp_path / "results")
    answer = CliRunner().invoke(app, ["report", "--like", "paper", str(tmp_path / "results")])
    assert answer.exit_code == 0
    assert "over several hosts an epoch takes" in answer.stdout
    assert answer.stdout.strip().endswith("like-paper.html")
    printed = CliRunner().invoke(app, ["report", "--like", "paper", "--json", str(tmp_path / "results")])
    assert json.loads(printed.stdout)["vitscale"] == "like"
    refused = CliRunner().invoke(app, ["report", "--like", "paper", "--format", "md", str(tmp_path / "results")])
    assert isinstance(refused.exception, RequestError)
