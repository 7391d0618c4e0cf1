from __future__ import annotations

import dataclasses
import functools
import html.parser
import re
from pathlib import Path
from typing import Any

import pytest

from browser import drawn
from explained_factory import NO_ENERGY, batch_study
from results_factory import (
    explained_run,
    failed_run,
    make_curve,
    make_environment,
    make_results,
    make_trial,
    one_curve,
    rich_study,
)
from vitscale.analysis import analyse
from vitscale.present.document import Finding, Severity
from vitscale.report import write_html
from vitscale.report.charts import figures
from vitscale.report.page import to_html
from vitscale.store.records import Device, EnergyReading, ResourcesLine
from vitscale.store.results import Results, Run

MARKER = "vitscaleattack"
HOSTILE = (
    f"</script></style></pre></title><script>document.title='{MARKER}'</script>"
    f"<img src=x onerror=\"document.title='{MARKER}'\"> <!-- ]]> '\"`&amp; {{{{7*7}}}} \u2028 ☃ \U0001f9ea</textarea>"
)


class Elements(html.parser.HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self._raw = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        if not self._raw:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(results: Results, folder: Path) -> str:
    write_html(analyse(results), folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


@functools.cache
def rich_page() -> str:
    """It is drawn once and only read."""
    return to_html(analyse(rich_study()))


@functools.cache
def hostile_page() -> str:
    return to_html(analyse(hostile_study()))


def hostile_lines(run: Run) -> Run:
    """`run` with hostile text in all that its ranks say of explained steps and of what they used."""
    energy = EnergyReading(joules=None, source=None, reason=HOSTILE, devices=(HOSTILE,))
    (rank,) = run.ranks
    used = ResourcesLine(
        epoch=0, seconds=1.0, cpu_seconds=0.5, cpu_throttled_seconds=None, rss_bytes=1, peak_rss_bytes=2**30,
        gpu_reason=HOSTILE, energy=energy,
    )  # fmt: skip
    explained = tuple(
        line.model_copy(
            update={
                "unknown": {"h2d": HOSTILE, "wait": HOSTILE, HOSTILE: HOSTILE},
                "collectives": tuple((HOSTILE, HOSTILE, start, end) for _, _, start, end in line.collectives),
            }
        )
        for line in rank.explained
    )
    return run.model_copy(update={"ranks": (rank.model_copy(update={"explained": explained, "resources": (used,)}),)})


def hostile_study() -> Results:
    """Hostile text wherever a user or a record could have put it."""
    trial = make_trial("ddp", 1, model="vit-ti16")
    trial = trial.model_copy(update={"model": trial.model.model_copy(update={"name": None, "hf": HOSTILE})})
    failing = trial.model_copy(
        update={"launcher": HOSTILE, "world": trial.world.model_copy(update={"ranks_per_node": 2})}
    )
    environment = make_environment(
        host=HOSTILE,
        device=Device(type="cpu", name=HOSTILE),
        versions={HOSTILE: HOSTILE},
        settings={"NCCL_" + HOSTILE: HOSTILE},
        git_revision=HOSTILE,
    )
    parts = [{"forward": 0.03, "backward": 0.05, "wire": 0.02}]
    runs = [explained_run(trial, parts, repeat=repeat, environments=[environment]) for repeat in range(2)]
    runs = [hostile_lines(run) for run in runs]
    runs.append(failed_run(failing, "failed", HOSTILE, HOSTILE))
    curve = make_curve([trial, failing]).model_copy(update={"labels": {"model.hf": HOSTILE, HOSTILE: HOSTILE}})
    return make_results([(curve, [trial, failing])], runs, name=HOSTILE, text=HOSTILE, problems=[HOSTILE])


def test_the_page_holds_findings_verdicts_failures_environment_and_the_study() -> None:
    text = Elements(rich_page()).text
    for expected in (
        "20 of 23 trials completed, 2 did not complete, 1 not run yet",
        "8 ranks are 7.01x as fast as 1 (efficiency 0.88; 95 % interval",
        "Set repeats = 3 or more under [measure]",
        "the baseline is 1 rank, 12.8 s an epoch",
        "rank 0 ran out of memory: 11.2 GiB asked for, 3.1 GiB free",
        'File "worker.py", line 88, in main',
        "Example CPU",
        "torch 2.13.0",
        '"train.engine" = ["ddp", "deepspeed", "none"]',
    ):
        assert expected in text


def test_every_chart_has_a_place_with_words_for_those_who_cannot_see_it() -> None:
    tags = Elements(rich_page()).tags
    places = {attrs["data-chart"]: attrs for _, attrs in tags if "data-chart" in attrs}
    assert set(places) == {figure.name for figure in figures(analyse(rich_study()))}
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in places.values())


def test_whether_to_trust_it_comes_before_the_findings() -> None:
    text = Elements(rich_page()).text
    assert text.index("Can this be trusted?") < text.index("Findings") < text.index("Strong scaling, micro-batch")


def verdicts(*levels: Severity) -> tuple[Finding, ...]:
    return tuple(Finding("kind", level, f"message {place}", f"advice {place}") for place, level in enumerate(levels))


@pytest.mark.parametrize(("notes", "folded"), [(3, False), (4, True)])
def test_warnings_are_open_and_more_than_three_notes_are_folded(notes: int, folded: bool) -> None:
    warning: Severity = "warning"
    note: Severity = "note"
    levels = [warning] * 5 + [note] * notes
    analysis = dataclasses.replace(analyse(one_curve({1: [0.1]})), findings=verdicts(*levels))
    section = to_html(analysis).partition('id="trust"')[2].partition("</section>")[0]
    hidden = "".join(re.findall(r"<details.*?</details>", section, re.DOTALL))
    assert not [place for place in range(5) if f"message {place}." in hidden]
    assert all((f"message {5 + place}." in hidden) is folded for place in range(notes))
    assert section.count("message ") == 5 + notes
    assert (f"{notes} notes" in section) is folded


def test_a_page_without_verdicts_has_no_section_for_them() -> None:
    analysis = dataclasses.replace(analyse(one_curve({1: [0.1]})), findings=())
    assert "Can this be trusted?" not in to_html(analysis)


def test_the_sections_that_explain_have_an_anchor_and_a_link(tmp_path: Path) -> None:
    text = page_of(batch_study([16], [1, 2]), tmp_path)
    elements = Elements(text)
    ids = {attrs["id"] for _, attrs in elements.tags if "id" in attrs}
    links = {attrs["href"] for tag, attrs in elements.tags if tag == "a"}
    for name in ("where-the-time-goes", "resources", "accuracy", "start-up"):
        assert name in ids
        assert f"#{name}" in links
    for expected in (
        "Explaining slowed its steps by 5 %",
        "rank 1 in 100 % of steps, 22 % slower",
        f"Energy per image: unavailable in 2 of 2 trials: {NO_ENERGY}.",
        "Unknown in 2 of 2 trials: launch gaps: a host launches no kernels.",
    ):
        assert expected in elements.text


def test_charts_stand_in_their_sections(tmp_path: Path) -> None:
    text = page_of(batch_study([16], [1, 2]), tmp_path)
    where = {
        name: re.findall(
            r'data-chart="([^"]*)"', text.partition(f'<section id="{name}">')[2].partition("</section>")[0]
        )
        for name in ("strong-micro", "where-the-time-goes", "resources", "accuracy", "start-up")
    }
    assert where["where-the-time-goes"] == [
        "strong-micro-breakdown", "strong-micro-breakdown-share", "strong-micro-waterfall", "timeline-1",
    ]  # fmt: skip
    assert where["resources"] == ["utilisation", "memory"]
    assert where["accuracy"] == ["strong-micro-accuracy-by-batch", "strong-micro-accuracy-by-ranks"]
    assert where["start-up"] == ["start-up"]
    assert "strong-micro-epoch-seconds" in where["strong-micro"]
    assert sum(map(len, where.values())) == len(figures(analyse(batch_study([16], [1, 2]))))


def test_a_study_without_explained_steps_says_so() -> None:
    assert "No step was explained, so its parts are unknown." in Elements(rich_page()).text


def references(text: str) -> list[str]:
    """What a browser would load: attributes that name a resource, and url() or @import in styles."""
    found = []
    for _tag, attrs in Elements(text).tags:
        found += [str(attrs[key]) for key in ("src", "href", "srcset", "data", "action", "poster") if key in attrs]
    for style in re.findall(r"<style>(.*?)</style>", text, re.DOTALL):
        found += re.findall(r"url\([^)]*\)|@import[^;]*", style)
    return found


def test_nothing_is_loaded_from_anywhere() -> None:
    text = rich_page()
    assert references(text)
    assert all(reference.startswith("#") for reference in references(text))
    policy = next(attrs for _, attrs in Elements(text).tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'; script-src 'sha256-")


def test_text_of_users_stays_text() -> None:
    text = hostile_page()
    elements = Elements(text)
    assert [tag for tag, _ in elements.tags].count("script") == 3  # the data, the library, ours
    assert "img" not in [tag for tag, _ in elements.tags]
    assert not [key for _, attrs in elements.tags for key in attrs if key.startswith("on")]
    assert text.count("</title>") == text.count("</style>") == 1
    assert elements.text.count(f"document.title='{MARKER}'") >= 16
    for said in (
        "Energy per image: unavailable",
        "GPU figures: unavailable",
        "Unknown in 1 of 1 trials: copy to device",
    ):
        assert said in elements.text
    assert "{{7*7}}" in elements.text


def test_a_study_without_runs_says_that_there_is_nothing_to_draw(tmp_path: Path) -> None:
    trial = make_trial()
    text = page_of(make_results([(make_curve([trial]), [trial])], []), tmp_path)
    assert "No chart: no trial of this section has completed" in text
    assert "nothing can be said about scaling" in text
    assert len(text) < 50_000  # without charts there is no library in it either


def test_the_same_records_give_the_same_page(tmp_path: Path) -> None:
    assert page_of(rich_study(), tmp_path) == rich_page()


def chart_places(tree: str) -> dict[str, str]:
    """Chart name to what the browser has put into its place."""
    parts = re.split(r'data-chart="([^"]*)"', tree)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def drawn_marks(tree: str) -> dict[str, int]:
    """Chart name to the number of points and bars really drawn."""
    return {
        name: len(re.findall(r'aria-roledescription="(?:point|bar)"', place))
        for name, place in chart_places(tree).items()
    }


def test_chromium_draws_every_chart_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(rich_page(), encoding="utf-8")
    tree = drawn(tmp_path / "report.html")
    marks: dict[str, Any] = drawn_marks(tree)
    assert len(marks) == 24
    assert all("<svg" in place.partition("<details")[0] for place in chart_places(tree).values())
    assert marks["strong-micro-speedup"] == 8  # 4 of ddp, 3 of deepspeed (one OOM), 1 plain
    assert marks["weak-epoch-seconds"] == 7
    assert marks["start-up"] == 20 * 6
    assert not [
        name for name, place in chart_places(tree).items() if "could not be drawn" in place.partition("<details")[0]
    ]


def test_chromium_draws_every_bar_and_every_lane_of_an_explained_study(tmp_path: Path) -> None:
    results = batch_study([16, 32, 64], [1, 2])
    page_of(results, tmp_path)
    tree = drawn(tmp_path / "report.html")
    marks = drawn_marks(tree)
    # data wait, forward, backward, optimizer, other on one rank; wait and wire too on two.
    assert marks["strong-micro-breakdown"] == marks["strong-micro-breakdown-share"] == 3 * (5 + 7)
    # Three steps; rank 0 has 7 parts, rank 1 waits for nobody. The third timeline is folded, and drawn all the same.
    assert [marks[f"timeline-{place}"] for place in (1, 2, 3)] == [3 * (7 + 6)] * 3
    # The trials; their ranks are small circles.
    assert marks["memory"] == 3 * 2
    assert not [
        name for name, place in chart_places(tree).items() if "could not be drawn" in place.partition("<details")[0]
    ]


def test_chromium_runs_nothing_that_a_user_wrote(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(hostile_page(), encoding="utf-8")
    tree = drawn(tmp_path / "report.html")
    title = re.search(r"<title>(.*?)</title>", tree, re.DOTALL)
    assert title is not None
    assert title[1] != MARKER
    assert title[1].startswith("&lt;/script&gt;")
    assert "<img" not in re.sub(r"<script.*?</script>", "", tree, flags=re.DOTALL)
    marks = drawn_marks(tree)
    assert marks["strong-micro-epoch-seconds"] == 1
    # forward, backward, communication that cannot be told apart
    assert marks["strong-micro-breakdown"] == 3
    assert marks["timeline-1"] == 3 * 3
