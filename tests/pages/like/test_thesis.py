"""`--like thesis`: doublings with known gains, tables, what is unavailable, hostile names, the page in a browser."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from browser import drawn
from explained_factory import batch_study
from like_paper_factory import beyond_one_host, paper_curve, paper_study
from results_factory import write_results
from vitscale.analysis import analyse
from vitscale.cli import app
from vitscale.errors import RequestError
from vitscale.pages import like
from vitscale.pages.like.doublings import doublings, transfer_of
from vitscale.pages.like.outputs import draw_one
from vitscale.prediction.network.links import Link, Network
from vitscale.store.records import CheckpointLine, Collective, TrafficLine
from vitscale.store.results import Results, Run
from vitscale.trial.trial import World

THESIS = like.study_named("thesis")
MARKER = "vitscaleattack"
HOSTILE = f"</script><script>document.title='{MARKER}'</script><img src=x onerror=\"document.title='{MARKER}'\">"


def of(results: Results, network: Network | None = None) -> like.MeasuredData:
    return like.MeasuredData.of(analyse(results), network)


def gains(study: Results, network: Network | None = None) -> dict[int, dict[str, Any]]:
    """By the larger GPU count, as JSON has them."""
    (claim,) = THESIS.claims
    return {one["gpus"]: dict(one) for one in claim.test(of(study, network)).entries["doublings"]}


def study(steps: dict[int, float], runs: int = 3, **fields: Any) -> Results:
    """ADE20K at 8 images a GPU: seconds of a step, and of repeats 1 % above and below."""
    cells = {gpus: [seconds * (1 + 0.01 * (repeat - 1)) for repeat in range(runs)] for gpus, seconds in steps.items()}
    return paper_study(paper_curve(cells, dataset="ade20k", micro_batch=8, **fields))


def sending(results: Results, elements: int) -> Results:
    """Every rank all-reduces so many fp32 numbers in a step."""

    def line(ranks: int) -> TrafficLine:
        one = Collective(communicator="0", ranks=ranks, operation="all_reduce", dtype="float32",
                         input_elements=elements, output_elements=elements)  # fmt: skip
        return TrafficLine(step=1, backend="gloo", collectives=(one,))

    runs = [
        run.model_copy(
            update={"ranks": tuple(r.model_copy(update={"traffic": (line(len(run.ranks)),)}) for r in run.ranks)}
        )
        for run in results.runs
    ]
    return results.model_copy(update={"runs": tuple(runs)})


def network(bytes_per_second: float, source: Any = "check") -> Network:
    link = Link(bytes_per_second, 0.0, 0.1, 0.1, source, "check of two ranks")
    return Network(link, link)


# --- the claim -------------------------------------------------------------------------------------------------------


def test_known_gains_confirm_refute_and_compare_with_what_was_published() -> None:
    """Steps of 1, 1.5, 3 and 3 s: a doubling gains 2 / 1.5, nothing, and 2."""
    found = gains(study({1: 1.0, 2: 1.5, 4: 3.0, 8: 3.0}))
    assert {gpus: one["gain"] for gpus, one in found.items()} == pytest.approx({2: 2 / 1.5, 4: 1.0, 8: 2.0})
    assert {gpus: one["hardly_shortens"] for gpus, one in found.items()} == {
        2: "refuted", 4: "confirmed", 8: "refuted",
    }  # fmt: skip
    assert {gpus: one["published_gain"] for gpus, one in found.items()} == {2: 1.26, 4: 1.019, 8: 1.029}
    overall, first, *_ = like.findings(THESIS, of(study({1: 1.0, 2: 1.5, 4: 3.0, 8: 3.0})))
    assert overall.endswith("confirmed in 1, refuted in 1, not decided in 0.")
    assert "ADE20K, micro-batch 8, 1 to 2 GPUs: an epoch is 1.33 (95 % interval 1.3 to 1.36) times as fast" in first
    assert "in 25.0 % less time (a doubling shortens training; published: 1.26 on average over all platforms)" in first


@pytest.mark.parametrize("runs", [1, 2])
def test_too_few_runs_decide_nothing(runs: int) -> None:
    found = gains(study({1: 1.0, 2: 1.5, 4: 3.0}, runs))
    assert {one["hardly_shortens"] for one in found.values()} == {"not decided"}
    overall, *told = like.findings(THESIS, of(study({1: 1.0, 2: 1.5, 4: 3.0}, runs)))
    assert "confirmed in 0, refuted in 0, not decided in 1" in overall
    assert all("(not decided: too few runs; published:" in sentence for sentence in told)


def test_what_transfers_would_leave_by_hand() -> None:
    """10 M numbers of 4 bytes between two ranks: a ring sends 2 x 1/2 x 40 MB, which at 400 MB/s takes 0.1 s."""
    slow = gains(sending(study({1: 1.0, 2: 1.5}), 10_000_000), network(400e6))[2]
    assert (slow["sent_bytes"], slow["transfer_seconds"]) == pytest.approx((40e6, 0.1))
    # 1.1 s instead of 1.5: 2 / 1.1 would be left, and 1.33 is measured.
    assert slow["left_by_transfers"] == pytest.approx(2 / 1.1, rel=1e-4)
    assert slow["transfers"] == "do not explain it"
    enough = gains(sending(study({1: 1.0, 2: 1.05}), 10_000_000), network(400e6))[2]
    assert enough["transfers"] == "are enough"
    close = gains(sending(study({1: 1.0, 2: 1.1}), 10_000_000), network(400e6))[2]
    assert close["transfers"] == "not decided"


def test_on_four_ranks_a_ring_sends_more_and_in_eight_hosts_the_link_across_counts() -> None:
    results = sending(study({4: 1.0}), 10_000_000)
    trial = next(iter(analyse(results).trials.values()))
    found = transfer_of(trial, network(400e6))
    assert found is not None
    assert (found.sent_bytes, found.seconds) == pytest.approx((60e6, 0.15))
    spread = next(iter(analyse(sending(study({4: 1.0}, spread=True), 10_000_000)).trials.values()))
    inside, across = network(400e6).inside, network(100e6).inside
    slower = transfer_of(spread, Network(inside, across))
    assert slower is not None
    assert slower.seconds == pytest.approx(0.6)
    # Ranks of two hosts with two each cross both: no bound where one of them is assumed.
    hosts = World(nodes=2, ranks_per_node=2, threads_per_rank=1)
    both = dataclasses.replace(trial, trial=trial.trial.model_copy(update={"world": hosts}))
    assert transfer_of(both, Network(network(1.0, "assumed").inside, across)) is None
    crossing = transfer_of(both, Network(inside, across))
    assert crossing is not None
    assert crossing.seconds == pytest.approx(0.6)
    assert (crossing.calls, crossing.basis) == (1, "at 0.1 GB/s and 0 s a hop, check of two ranks")


@pytest.mark.parametrize("link", [None, network(400e6, "assumed")], ids=["none", "assumed"])
def test_an_assumed_network_proves_nothing(link: Network | None) -> None:
    found = gains(sending(study({1: 1.0, 2: 1.5}), 10_000_000), link)[2]
    assert (found["transfers"], found["transfer_seconds"], found["left_by_transfers"]) == (None, None, None)
    assert "what transfers would leave is unknown" in found["text"]


def test_allocations_that_differ_are_the_observations_of_steps_as_of_epochs() -> None:
    """Three allocations 3 % apart, with three runs each that hardly differ: nine runs would leave no doubt.

    Steps of 0.97, 1 and 1.03 s and a transfer of 6 MB at 75 MB/s = 0.08 s, against 1.13 times those steps: 1.13 / 1.08,
    2.776 x sqrt((0.03^2 + (0.03 / 1.08)^2) / 3) = 6.55 % either way.
    """
    factors = [of_all * (1 + 0.002 * run) for of_all in (0.97, 1.0, 1.03) for run in (-1, 0, 1)]
    curve, trials, runs = paper_curve({2: factors, 4: [1.13 * own for own in factors]}, dataset="ade20k", micro_batch=8)

    def allocated(run: Run) -> Run:
        ranks = []
        for rank in run.ranks:
            assert rank.start is not None
            environment = rank.start.environment.model_copy(update={"allocation": f"slurm {run.header.repeat // 3}"})
            ranks.append(rank.model_copy(update={"start": rank.start.model_copy(update={"environment": environment})}))
        return run.model_copy(update={"ranks": tuple(ranks)})

    material = of(sending(paper_study((curve, trials, [*map(allocated, runs)])), 1_000_000), network(75e6))
    (doubling,) = doublings(material.series, material.network)
    assert doubling.test.beyond is not None
    assert doubling.test.beyond.ends == pytest.approx((1.13 / 1.08 / 1.0677, 1.13 / 1.08 * 1.0677), rel=1e-3)
    assert doubling.test.transfers == "not decided"


def test_a_curve_that_goes_on_over_several_hosts_is_told_once() -> None:
    cells = {1: [1.0, 1.01, 0.99], 2: [1.0, 1.01, 0.99], 4: [2.0, 2.02, 1.98], 8: [2.0, 2.02, 1.98]}
    material = of(paper_study(beyond_one_host(paper_curve(cells, dataset="ade20k", micro_batch=8), 4)))
    assert [len(series.members) for series in material.series] == [3, 4]
    told = [(doubling.name, doubling.gpus) for doubling in doublings(material.series, None)]
    assert told == [("one host", 1), ("one host", 2), ("several hosts", 4)]
    overall, *_ = like.findings(THESIS, material)
    assert "confirmed in 1, refuted in 1, not decided in 0" in overall
    for table in THESIS.tables(material):
        (group,) = table.groups
        assert (group.label, [str(row[0]) for row in group.rows]) == ("ADE20K, micro-batch 8", ["1", "2", "4", "8"])


def test_counts_that_are_no_doubling_test_nothing() -> None:
    assert gains(study({1: 1.0, 3: 1.5})) == {}
    assert like.findings(THESIS, of(study({1: 1.0, 3: 1.5}))) == []


def test_unlike_gpus_are_no_doubling_and_are_told_apart_by_name() -> None:
    assert gains(study({1: 1.0, 2: 1.0}, devices=("A100", "V100"))) == {}
    two = paper_study(
        paper_curve({1: [1.0], 2: [1.0]}, dataset="ade20k", micro_batch=8, devices=("A100",)),
        paper_curve({1: [2.0], 2: [2.0]}, dataset="ade20k", micro_batch=8, devices=("V100",), model="vit-s16"),
    )
    (claim,) = THESIS.claims
    names = {one["workload"] for one in claim.test(of(two)).entries["doublings"]}
    assert {name.rpartition(", ")[2] for name in names} == {"A100", "V100"}


# --- figures and tables ----------------------------------------------------------------------------------------------


def rich() -> Results:
    """Explained, with evaluations, decoding and a checkpoint."""
    found = batch_study([8], [1, 2], repeats=3)
    spent = {"evaluation_seconds": 1.0, "loader_reading_seconds": 1.0, "loader_decoding_seconds": 3.0}
    saved = CheckpointLine(save_seconds=0.5, load_seconds=0.5, bytes=1000)
    runs = [
        run.model_copy(
            update={
                "ranks": tuple(
                    rank.model_copy(
                        update={
                            "epochs": tuple(line.model_copy(update=spent) for line in rank.epochs),
                            "checkpoint": saved,
                        }
                    )
                    for rank in run.ranks
                )
            }
        )
        for run in found.runs
    ]
    return found.model_copy(update={"runs": tuple(runs)})


@functools.cache
def content() -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (path,) = like.write(THESIS, of(rich()), Path(folder), ["json"], Path(folder))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def test_every_quantity_of_the_thesis_is_drawn() -> None:
    assert {one["title"]: one["drawn"] for one in content()["figures"]} == {
        "Training time and speedup": True,
        "Parallel efficiency": True,
        "What a doubling gains": True,
        "Utilisation": True,
        "Where a whole run loses its time": True,
    }
    assert content()["source"].startswith("Evaluation of Scalability for Distributed Data-Parallel Training of Swin")


def test_a_point_tells_its_runs_and_a_single_bound_has_a_length() -> None:
    material = of(sending(study({1: 1.0, 2: 1.5}), 10_000_000), network(400e6))
    (figure,) = [one for one in THESIS.figures if one.quantity == "doublings"]
    spec = json.dumps(draw_one(THESIS, figure, material).figure.views[0].titled)
    assert '"runs": 3' in spec
    assert spec.count('"series": "0 transfers"') == 2


def test_a_whole_run_is_told_by_part() -> None:
    training, parts = content()["tables"]
    for name in ("start-up", "loading", "decoding", "forward", "backward", "waiting for ranks", "transfer",
                 "evaluation", "checkpoint"):  # fmt: skip
        assert name in parts["columns"]
    assert "copy to device" not in parts["columns"]
    by_part = dict(zip(parts["columns"], parts["rows"][1]["cells"], strict=True))
    # 64 steps of 2 ms of data wait in each of 3 epochs, a quarter of it reading; an evaluation after each.
    assert (by_part["loading"], by_part["decoding"], by_part["evaluation"]) == ("96.0 ms", "288 ms", "3.00 s")
    assert [row["cells"][0] for row in training["rows"]] == ["1", "2"]


def test_gpu_utilisation_that_nobody_measured_is_unavailable_and_never_0() -> None:
    training, _ = content()["tables"]
    column = training["columns"].index("GPU utilisation")
    assert {row["cells"][column] for row in training["rows"]} == {"unavailable"}
    assert "GPU utilisation is unavailable: the trial ran on CPU." in training["notes"]
    (figure,) = [one for one in content()["figures"] if one["title"] == "Utilisation"]
    assert figure["text"][0].startswith("ddp; 1; 80 %"), "of the CPU alone"


def test_a_part_that_is_unknown_is_told_with_its_reason() -> None:
    material = of(batch_study([8], [1, 2]))
    _, parts = THESIS.tables(material)
    assert [column.name for column in parts.columns] == ["GPUs", "whole run"]
    assert parts.notes[0] == "Parts of a run are unavailable: how long an evaluation takes is unknown."


def test_results_without_runs_have_no_table_and_every_figure_says_so(tmp_path: Path) -> None:
    empty = rich().model_copy(update={"runs": ()})
    (path,) = like.write(THESIS, of(empty), tmp_path, ["html"], tmp_path)
    text = path.read_text(encoding="utf-8")
    assert "0 of 5 figures drawn; 5 say what data they lack" in text
    assert text.count("Not tested:") == 1
    assert "<h2>Tables</h2>" not in text


def test_chromium_draws_the_page_and_runs_nothing_of_a_user(tmp_path: Path) -> None:
    results = rich()
    curves = tuple(c.model_copy(update={"labels": {**c.labels, "cluster": HOSTILE}}) for c in results.study.curves)
    named = results.study.model_copy(update={"name": HOSTILE, "curves": curves})
    (path,) = like.write(THESIS, of(results.model_copy(update={"study": named})), tmp_path, ["html"], tmp_path)
    tree = drawn(path)
    assert tree.count("<svg") >= 5
    assert "could not be drawn:" not in re.sub(r"<script.*?</script>", "", tree, flags=re.DOTALL)
    title = re.search(r"<title>(.*?)</title>", tree, re.DOTALL)
    assert title is not None
    assert title[1].startswith("&lt;/script&gt;")
    assert "<img" not in re.sub(r"<script.*?</script>", "", tree, flags=re.DOTALL)


# --- the verb --------------------------------------------------------------------------------------------------------


def test_the_verb_and_a_study_that_is_none(tmp_path: Path) -> None:
    write_results(study({1: 1.0, 2: 1.5, 4: 3.0}), tmp_path / "results")
    answer = CliRunner().invoke(app, ["report", "--like", "thesis", str(tmp_path / "results")])
    assert answer.exit_code == 0, answer.output
    assert CliRunner().invoke(app, ["report", "--like-paper", str(tmp_path / "results")]).exit_code == 0
    assert (tmp_path / "results" / "like-paper" / "like-paper.html").is_file()
    assert "hardly shorten training" in answer.stdout
    assert (tmp_path / "results" / "like-thesis" / "like-thesis.html").is_file()
    refused = CliRunner().invoke(app, ["report", "--like", "thesys", str(tmp_path / "results")])
    assert isinstance(refused.exception, RequestError)
    assert "thesis" in str(refused.exception)
