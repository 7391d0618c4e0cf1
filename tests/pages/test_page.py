"""The page: five answers on the first screen, controls that do what they say, nothing that a user wrote acts."""

from __future__ import annotations

import functools
import html.parser
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser import Page, shared_page
from explained_factory import NO_ENERGY, batch_study
from like_paper_factory import whole_study
from report_forms import page
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
from vitscale.pages.document import charts
from vitscale.present import drawing
from vitscale.present.document import About, Cell, Column, Document, Finding, RowGroup, Table
from vitscale.present.html import to_html
from vitscale.store.records import DeviceRecord, EnergyReading, ResourcesLine
from vitscale.store.results import Results, Run

MARKER = "vitscaleattack"
HOSTILE = (
    f"</script></style></pre></title><script>document.title='{MARKER}'</script>"
    f"<img src=x onerror=\"document.title='{MARKER}'\"> <!-- ]]> '\"`&amp; {{{{7*7}}}} \u2028 ☃ \U0001f9ea</textarea>"
)
QUESTIONS = ("How does it scale?", "What would I choose?", "Why not better?", "What next?", "Can I trust it?")


class Elements(html.parser.HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
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


@functools.cache
def rich_page() -> str:
    """It is drawn once and only read."""
    return page(analyse(rich_study()))


@functools.cache
def sweep_page() -> str:
    """Micro-batches 16 and 64 of two engines on 1 and 2 ranks, every step taken apart."""
    return page(analyse(batch_study([16, 64], [1, 2], engines=["ddp", "deepspeed"])))


def failing_study() -> Results:
    """Of each trial of the rich study the first run has failed."""
    results = rich_study()
    failed = {"kind": "failed", "reason": "rank 0 raised RuntimeError: " + "device-side assert triggered; " * 9}
    runs = tuple(
        run if run.header.repeat else run.model_copy(update={"outcome": run.outcome.model_copy(update=failed)})
        for run in results.runs
    )
    return results.model_copy(update={"runs": runs})


@functools.cache
def file_of(name: str) -> Path:
    """One of the pages as a file."""
    made: dict[str, Callable[[], str]] = {
        "rich": rich_page, "sweep": sweep_page, "hostile": hostile_page,
        "imported": lambda: page(analyse(whole_study())),
        "many": lambda: page(analyse(batch_study([16, 32, 64, 128], [1, 2], engines=["ddp", "deepspeed"]))),
        "two runs": lambda: page(analyse(one_curve({1: [0.1, 0.11], 2: [0.06, 0.066]}))),
        "failing": lambda: page(analyse(failing_study())),
    }  # fmt: skip
    text = made[name]()
    path = Path(tempfile.mkdtemp()) / f"{name}.html"
    path.write_text(text, encoding="utf-8")
    return path


def plain_spaces(text: str) -> str:
    """Without the spaces that keep a number and its unit on a line."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


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


@functools.cache
def hostile_page() -> str:
    """Hostile text wherever a user or a record could have put it."""
    trial = make_trial("ddp", 1, model="vit-ti16")
    trial = trial.model_copy(update={"model": trial.model.model_copy(update={"name": None, "hf": HOSTILE})})
    failing = trial.model_copy(
        update={"launcher": HOSTILE, "world": trial.world.model_copy(update={"ranks_per_node": 2})}
    )
    environment = make_environment(
        host=HOSTILE,
        device=DeviceRecord(type="cpu", name=HOSTILE),
        versions={HOSTILE: HOSTILE},
        settings={"NCCL_" + HOSTILE: HOSTILE},
        git_revision=HOSTILE,
    )
    parts = [{"forward": 0.03, "backward": 0.05, "wire": 0.02}]
    runs = [explained_run(trial, parts, repeat=repeat, environments=[environment]) for repeat in range(2)]
    runs = [hostile_lines(run) for run in runs]
    runs.append(failed_run(failing, "failed", HOSTILE, HOSTILE))
    curve = make_curve([trial, failing]).model_copy(update={"labels": {"model.hf": HOSTILE, HOSTILE: HOSTILE}})
    results: Results = make_results([(curve, [trial, failing])], runs, name=HOSTILE, text=HOSTILE, problems=[HOSTILE])
    return page(analyse(results))


# --- the text --------------------------------------------------------------------------------------------------------


def test_the_answers_stand_first_and_in_order_and_the_rest_is_folded() -> None:
    text = rich_page()
    places = [text.index(f"<h2>{question}</h2>") for question in QUESTIONS]
    assert places == sorted(places)
    assert places[-1] < text.index('<details class="section" id="every-configuration">')
    folded = re.findall(r'<details class="section" id="([\w-]+)"><summary><h2>', text)
    assert folded == [
        "every-configuration", "where-the-time-goes", "engine-against-engine", "accuracy", "resources",
        "every-run", "environment",
        "reproduce", "how-it-was-measured",
    ]  # fmt: skip
    links = {attrs["href"] for tag, attrs in Elements(text).tags if tag == "a"}
    assert links == {f"#{name}" for name in folded}


def test_the_page_holds_answers_findings_failures_environment_and_the_study() -> None:
    text = Elements(rich_page()).text
    for expected in (
        "8 ranks are 7.01x as fast as 1 (95 % interval",
        "Set repeats = 3 or more under [measure]",
        "Fastest measured: ddp, 8 ranks",
        "rank 0 ran out of memory: 11.2 GiB asked for, 3.1 GiB free",
        'File "worker.py", line 88, in main',
        "/log.txt",
        "Example CPU",
        "torch 2.13.0",
        '"train.engine" = ["ddp", "deepspeed", "none"]',
    ):
        assert expected in text, expected


def test_of_many_series_five_have_a_sentence_best_first_with_intervals() -> None:
    section = rich_page().partition('id="how-does-it-scale"')[2].partition("</ul>")[0]
    items = [plain_spaces(item) for item in re.findall(r"<li>(.*?)</li>", section)]
    assert len(items) == 6
    assert items[-1] == "+1 more, in Every configuration"
    efficiencies = [float(found[1]) for item in items if (found := re.search(r"efficiency ([\d.]+)", item))]
    sure = [item for item in items if "95 % interval" in item]
    assert efficiencies[: len(sure)] == sorted(efficiencies[: len(sure)], reverse=True)


def test_of_two_runs_no_order_is_claimed() -> None:
    text = Elements(page(analyse(one_curve({1: [0.1, 0.1], 2: [0.0625, 0.0625]})))).text
    assert "Fastest measured, 2 runs: ddp, 2 ranks, micro-batch 8: 4.00 s an epoch. Too few to say" in text
    assert "ddp: 3.20x on 2 ranks against 1 (efficiency 1.60; 2 runs)." in text
    assert "as fast as" not in text.partition("Every configuration")[0]


def test_of_one_trial_nobody_is_ahead_and_nothing_is_said_about_scaling() -> None:
    text = Elements(page(analyse(one_curve({2: [0.1]})))).text.partition("What would I choose?")[0]
    assert "Fastest measured, 1 run: ddp, 2 ranks, micro-batch 8: 6.40 s an epoch. No curve has two" in text


def test_an_id_of_a_trial_stands_only_where_a_file_is_meant() -> None:
    text = re.sub(r"<script.*?</script>|<details>.*?</details>|<figure.*?</figure>", "", rich_page(), flags=re.DOTALL)
    text = re.sub(r'<div class="finding.*?</div>', "", text, flags=re.DOTALL)
    for trial_id in analyse(rich_study()).trials:
        for found in re.finditer(trial_id, text):
            assert text[found.start() - 5 : found.start()] == "runs/"


def test_a_number_stays_with_its_unit_in_a_table_and_many_clauses_are_lines() -> None:
    words = Table((Column("which goes into", words=True),), (RowGroup("", ((Cell("3 % launch gaps"),),)),))
    finding = Finding("imported", "note", "imported; <b>one</b>; two ms; three; 4 ms", "", About())
    text = to_html(Document("traces", (words, finding)))
    assert '<td class="words">3\N{NO-BREAK SPACE}% launch gaps</td>' in text
    assert "imported<br>&lt;b&gt;one&lt;/b&gt;.<br>two ms.<br>three.<br>4\N{NO-BREAK SPACE}ms." in text


def test_every_chart_has_a_picture_a_summary_and_a_table() -> None:
    text = sweep_page()
    figures = charts(analyse(batch_study([16, 64], [1, 2], engines=["ddp", "deepspeed"])))
    parts = dict(re.findall(r'<figure id="figure-([\w-]+)"(.*?)</figure>', text, re.DOTALL))
    assert set(parts) == set(figures)
    for name, part in parts.items():
        assert 'role="img" aria-label="' in part, name
        assert "<svg" in part
        assert '<p class="summary">' in part
        assert part.count("<tr>") == 1 + len(figures[name].views[0].rows)


def test_the_sections_that_explain_say_why_something_is_unknown() -> None:
    text = Elements(page(analyse(batch_study([16], [1, 2])))).text
    for expected in (
        "Explaining slowed its steps by 5 %",
        "rank 1 in 100 % of steps, 22 % slower",
        f"Energy per image: unavailable in 2 of 2 trials: {NO_ENERGY}.",
        "Unknown in 2 of 2 trials: launch gaps: a host launches no kernels.",
    ):
        assert expected in text
    assert "No step was explained, so its parts are unknown." in Elements(rich_page()).text


def test_a_page_has_at_most_a_megabyte_and_a_bit() -> None:
    assert len(rich_page().encode()) < 1_200_000
    assert len(sweep_page().encode()) < 1_200_000


def test_nothing_is_loaded_from_anywhere() -> None:
    text = rich_page()
    found = []
    for _tag, attrs in Elements(text).tags:
        found += [str(attrs[key]) for key in ("src", "href", "srcset", "data", "action", "poster") if key in attrs]
    assert found
    assert all(reference.startswith("#") for reference in found)
    styles = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert not re.findall(r"url\([^)]*\)|@import[^;]*", styles)
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
    assert "{{7*7}}" in elements.text


def test_a_study_without_runs_says_so_and_has_no_script() -> None:
    trial = make_trial()
    text = page(analyse(make_results([(make_curve([trial]), [trial])], [])))
    assert "nothing can be said about scaling" in text
    assert "no trial has completed" in text
    assert "script-src 'none'" in text
    assert len(text) < 30_000


def test_a_page_without_findings_says_that_there_is_none() -> None:
    analysis = analyse(one_curve({1: [0.1] * 3}))
    vars(analysis)["findings"] = ()
    assert '<p class="">No warning.</p>' in page(analysis)


def test_the_same_records_give_the_same_page() -> None:
    assert page(analyse(rich_study())) == rich_page()


def test_the_library_is_bundled_once_and_a_broken_copy_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda *_args, **_options: "made")
    first = drawing.library()
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda *_args, **_options: "again")
    assert drawing.library() == first
    (kept,) = (tmp_path / "vitscale").iterdir()
    kept.write_bytes(first[:-4])
    assert drawing.library() != first


# --- in a browser ----------------------------------------------------------------------------------------------------


def shown(name: str, fragment: str = "", **how: Any) -> Page:
    return shared_page().open(file_of(name), fragment, **how)


def text_of(found: Page, figure: str, part: str) -> str:
    return str(found.ask(f"document.querySelector('[data-figure=\"{figure}\"] {part}').textContent"))


def points(found: Page, figure: str) -> int:
    """Marks of all kinds that a figure draws."""
    marks = 'g[aria-roledescription="symbol mark container"] path, g.mark-symbol path'
    return int(found.ask(f"document.querySelectorAll('[data-figure=\"{figure}\"] :is({marks})').length"))


def clean(found: Page) -> None:
    assert found.logged == []
    assert found.requested == []


@pytest.mark.parametrize("name", ["rich", "sweep", "imported", "many", "two runs", "failing"])
def test_the_answers_are_on_the_first_screen_and_the_rest_is_short(name: str) -> None:
    found = shown(name)
    for question in QUESTIONS:
        head = f"[...document.querySelectorAll('h2')].find((one) => one.textContent === {question!r})"
        assert found.ask(f"{head}.getBoundingClientRect().bottom") <= 800, question
    bottom = "document.querySelector('[data-figure=\"scaling\"] .picture').getBoundingClientRect().bottom"
    assert found.ask(bottom) <= 800
    assert found.ask("document.documentElement.scrollHeight") <= 3000
    assert found.ask("document.documentElement.scrollWidth") <= 1280
    clean(found)


def test_a_measure_is_chosen_by_its_button_and_stands_in_the_address() -> None:
    found = shown("sweep")
    assert text_of(found, "scaling", "figcaption h4") == "Speedup, strong-micro"
    found.click('[data-control="scaling-measure-throughput"]')
    assert text_of(found, "scaling", "figcaption h4") == "Images/s, strong-micro"
    assert found.ask("location.hash") == "#scaling.measure=throughput"
    assert text_of(found, "scaling", ".rows th:nth-child(3)") == "images/s"
    pressed = "document.querySelector('[data-control=\"scaling-measure-throughput\"]').getAttribute('aria-pressed')"
    assert found.ask(pressed) == "true"
    assert found.ask("document.activeElement.dataset.control ?? ''") in ("", "scaling-measure-throughput")
    found.click('[data-control="scaling-measure-speedup"]')
    assert found.ask("location.hash") == ""
    clean(found)


def test_an_axis_is_chosen_and_a_view_can_be_sent() -> None:
    fragment = "#scaling.measure=throughput&scaling.along=train.micro_batch-2"
    found = shown("sweep", fragment)
    assert text_of(found, "scaling", "figcaption h4") == "Images/s, strong-micro, by micro-batch, 2 ranks"
    assert found.ask("document.querySelectorAll('[data-figure=\"scaling\"] .rows tbody tr').length") == 4
    clean(found)


def test_a_curve_is_switched_off_and_on() -> None:
    found = shown("sweep")
    rows = "document.querySelectorAll('[data-figure=\"scaling\"] .rows tbody tr').length"
    before = found.ask(rows)
    found.click('[data-control="scaling-curve-0"]')
    assert found.ask(rows) == before - 2
    assert found.ask("location.hash").startswith("#scaling.off=")
    found.click('[data-control="scaling-curve-0"]')
    assert found.ask(rows) == before
    found = shown("sweep", "#scaling.off=0.1")
    assert found.ask(rows) == before - 4
    clean(found)


def test_a_fragment_that_is_none_of_ours_changes_nothing() -> None:
    hostile = "#scaling.measure=%3Cimg%20src%3Dx%3E&scaling.off=9999.-1.x&nothing.is=here&__proto__.x=1"
    found = shown("sweep", hostile)
    assert text_of(found, "scaling", "figcaption h4") == "Speedup, strong-micro"
    assert found.ask("document.querySelectorAll('[data-figure=\"scaling\"] input:not(:checked)').length") == 0
    clean(found)


def test_every_control_of_every_figure_shows_what_it_says() -> None:
    found = shown("sweep")
    found.ask("document.querySelectorAll('details.section').forEach((one) => { one.open = true; })")
    found.settle()
    tried = found.ask(
        """(async () => {
          const wrong = [];
          const wait = () => new Promise((done) => setTimeout(done, 60));
          for (const name of [...document.querySelectorAll("[data-figure]")].map((one) => one.dataset.figure)) {
            const place = document.querySelector(`[data-figure="${name}"]`);
            const keys = [...place.querySelectorAll("button")].map((one) => one.dataset.control);
            for (const key of keys) {
              const button = place.querySelector(`[data-control="${key}"]`);
              if (!button) continue;
              button.click();
              await wait();
              const now = place.querySelector(`[data-control="${key}"]`);
              if (now?.getAttribute("aria-pressed") !== "true") wrong.push(`${key} is not pressed`);
              if (!place.querySelector(".picture svg")) wrong.push(`${key} draws nothing`);
            }
            for (const list of place.querySelectorAll("select")) {
              for (const value of [...list.options].map((one) => one.value)) {
                const now = place.querySelector(`#${CSS.escape(list.id)}`);
                now.value = value;
                now.dispatchEvent(new Event("change"));
                await wait();
                if (place.querySelector(`#${CSS.escape(list.id)}`).value !== value) wrong.push(`${list.id} ${value}`);
              }
            }
          }
          return wrong;
        })()"""
    )
    assert tried == []
    assert "could not be drawn" not in found.ask("document.querySelector('main').textContent")
    clean(found)


def test_the_keyboard_reaches_every_control_and_keeps_its_place() -> None:
    found = shown("sweep")
    found.ask("document.querySelector('[data-control=\"scaling-measure-efficiency\"]').focus()")
    for kind in ("keyDown", "keyUp"):
        found.send("Input.dispatchKeyEvent", type=kind, key=" ", code="Space", windowsVirtualKeyCode=32, text=" ")
    found.settle()
    assert text_of(found, "scaling", "figcaption h4") == "Efficiency, strong-micro"
    assert found.ask("document.activeElement.dataset.control") == "scaling-measure-efficiency"
    clean(found)


def test_a_link_opens_what_is_folded() -> None:
    found = shown("sweep")
    found.click('a[href="#where-the-time-goes"]')
    assert found.ask("document.getElementById('where-the-time-goes').open") is True
    assert found.ask("document.querySelector('[data-figure=\"breakdown\"] svg').clientWidth") > 300
    clean(found)


@pytest.mark.parametrize("name", ["rich", "sweep", "hostile"])
def test_a_phone_has_no_sideways_scrolling_and_legible_charts(name: str) -> None:
    found = shown(name, width=390, height=800)
    found.ask("document.querySelectorAll('details.section').forEach((one) => { one.open = true; })")
    found.settle()
    assert found.ask("document.documentElement.scrollWidth") <= 390
    smallest = found.ask(
        "Math.min(...[...document.querySelectorAll('.picture svg')].map((one) => "
        "one.getBoundingClientRect().width / one.viewBox.baseVal.width))"
    )
    assert smallest > 0.9, "drawn for the room there is, not made smaller"
    clean(found)


def test_in_the_dark_the_charts_are_dark_and_on_paper_light() -> None:
    found = shown("sweep", dark=True)
    colour = "getComputedStyle(document.querySelector('[data-figure=\"scaling\"] svg text')).fill"
    dark = found.ask(colour)
    assert shown("sweep").ask(colour) != dark
    clean(found)


def test_printed_it_takes_few_pages_and_no_column_is_cut() -> None:
    found = shown("rich")
    assert len(re.findall(rb"/Type\s*/Page[^s]", found.pdf())) <= 6
    found.send("Emulation.setEmulatedMedia", media="print")
    found.send("Emulation.setDeviceMetricsOverride", width=710, height=1000, deviceScaleFactor=1, mobile=False)
    found.ask("document.querySelectorAll('main > details.section').forEach((one) => { one.open = true; })")
    found.settle()
    wider = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert found.ask(wider) == 0


@pytest.mark.parametrize("name", ["rich", "sweep"])
def test_on_paper_no_figure_of_a_table_is_broken_and_warnings_are_told(name: str) -> None:
    found = shown(name)
    found.ask("dispatchEvent(new Event('beforeprint'))")
    assert found.ask("document.querySelector('#can-i-trust-it details.section').open") is True
    found.send("Emulation.setEmulatedMedia", media="print")
    found.send("Emulation.setDeviceMetricsOverride", width=710, height=1000, deviceScaleFactor=1, mobile=False)
    found.ask("document.querySelectorAll('main > details.section').forEach((one) => { one.open = true; })")
    found.settle()
    lines = (
        "(cell) => { const range = document.createRange(); range.selectNodeContents(cell.firstChild ?? cell); "
        "return new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size; }"
    )
    cells = "[...document.querySelectorAll('td:not(.words)')].filter((one) => one.checkVisibility())"
    assert found.ask(f"{cells}.length") > 50
    assert found.ask(f"{cells}.filter((one) => ({lines})(one) > 1).map((one) => one.textContent)") == []
    found.ask("dispatchEvent(new Event('afterprint'))")
    assert found.ask("document.querySelector('#can-i-trust-it details.section').open") is False


def test_nothing_runs_that_a_user_wrote() -> None:
    found = shown("hostile")
    found.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    found.settle()
    assert found.ask("document.title").startswith("</script>")
    assert found.ask("document.querySelectorAll('img').length") == 0
    clean(found)
