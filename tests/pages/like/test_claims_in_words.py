"""What is said of the two claims."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from like_paper_factory import beyond_one_host, paper_curve, paper_study, whole_study
from vitscale.analysis import Analysis, analyse
from vitscale.analysis.claims import hosts_test
from vitscale.pages import like
from vitscale.pages.like.accuracy_claim import accuracy_tests
from vitscale.pages.like.hosts import host_pairs, hosts_sentence
from vitscale.pages.like.series import all_series
from vitscale.published import ClusterLayout, published
from vitscale.store.results import Imported, Results, Run


def findings(analysis: Analysis) -> list[str]:
    return like.findings(like.study_named("paper"), like.MeasuredData.of(analysis))


CELLS = {1: [0.8], 4: [0.8], 8: [0.8]}


def with_accuracy(results: Results, final: dict[int, list[float]], repeats_of_a_seed: int = 1) -> Results:
    """`results` with the held-out accuracy of every epoch of each run, by GPU count and repeat."""

    def changed(run: Run) -> Run:
        accuracy = final[run.header.trial.world.size][run.header.repeat]
        ranks = tuple(
            rank.model_copy(
                update={"epochs": tuple(e.model_copy(update={"held_out_accuracy": accuracy}) for e in rank.epochs)}
            )
            for rank in run.ranks
        )
        header = run.header.model_copy(update={"seed": run.header.repeat // repeats_of_a_seed})
        return run.model_copy(update={"ranks": ranks, "header": header})

    return results.model_copy(update={"runs": tuple(map(changed, results.runs))})


def test_single_runs_tell_no_direction() -> None:
    study = with_accuracy(paper_study(paper_curve(CELLS)), {1: [0.6], 4: [0.58], 8: [0.3]})
    overall, line = findings(analyse(study))
    assert overall.startswith(
        "Accuracy in 2 comparisons with fewer GPUs after equal images: lower in 0, higher in 0, no difference shown in "
        "0, too few seeds to tell in 2 (of which 1 differ by more than counting errors explain)"
    )
    assert overall.endswith("takes runs of 3 seeds or more on each side.")
    assert "against 1 GPU (global batch 16) after 3,072 images each" in line
    # 205 images held out: 1.96 x sqrt(0.6 x 0.4 / 205 + 0.58 x 0.42 / 205) = 9.5 points.
    assert "-2.0 points at 4 GPUs (global batch 64), no more than counting errors explain (+/- 9.5)" in line
    assert "-30.0 points at 8 GPUs (global batch 128), more than counting errors explain" in line
    assert "how far another would move it is not known" in line


def test_repeated_runs_have_an_interval() -> None:
    cells = {1: [0.8] * 3, 4: [0.8] * 3, 8: [0.8] * 3}
    accuracies = {1: [0.6, 0.61, 0.59], 4: [0.6, 0.61, 0.62], 8: [0.5, 0.51, 0.49]}
    overall, line = findings(analyse(with_accuracy(paper_study(paper_curve(cells)), accuracies)))
    # Both sides have a standard deviation of 1 point: 2.776 x sqrt(2 / 3) = 2.3 points with 4 degrees of freedom.
    assert "+1.0 points at 4 GPUs (global batch 64; 95 % interval -1.3 to +3.3), no difference shown" in line
    assert "one of 3.3 points cannot be excluded" in line
    assert "-10.0 points at 8 GPUs (global batch 128; 95 % interval -12.3 to -7.7), lower" in line
    assert overall.endswith("equal accuracy is not what these runs show.")


def test_repeats_of_one_seed_are_one_observation_and_tell_no_direction() -> None:
    """They learn the same, so that their interval would be without width: 103 and 101 of 205 images against 102."""
    cells = {1: [0.8] * 3, 4: [0.8] * 3, 8: [0.8] * 3}
    accuracies = {1: [102 / 205] * 3, 4: [103 / 205] * 3, 8: [101 / 205] * 3}
    analysis = analyse(with_accuracy(paper_study(paper_curve(cells)), accuracies, repeats_of_a_seed=3))
    for test in accuracy_tests(all_series(analysis))[0]:
        assert (test.result.seeds, test.result.p, test.result.difference.low) == ((1, 1), None, None)
        # 1.96 x sqrt(2 x 0.5 x 0.5 / 205): of 205 images, not of three times as many.
        assert test.result.counting_error == pytest.approx(0.0968, abs=1e-4)
    overall, line = findings(analysis)
    assert "lower in 0, higher in 0, no difference shown in 0, too few seeds to tell in 2;" in overall
    assert (
        "+0.5 points at 4 GPUs (global batch 64), no more than counting errors explain (+/- 9.7); too few seeds" in line
    )


def test_each_seed_counts_by_the_mean_of_its_runs() -> None:
    """Seeds of 0.6, 0.61 and 0.59 against 0.7, 0.71 and 0.69: 2.776 x sqrt(2 / 3) = 2.27 points with 4 degrees."""
    cells = {1: [0.8] * 6, 8: [0.8] * 6}
    accuracies = {1: [0.59, 0.61, 0.6, 0.62, 0.58, 0.6], 8: [0.7, 0.7, 0.71, 0.71, 0.69, 0.69]}
    study = with_accuracy(paper_study(paper_curve(cells)), accuracies, repeats_of_a_seed=2)
    (test,) = accuracy_tests(all_series(analyse(study)))[0]
    assert test.result.seeds == (3, 3)
    assert (*test.samples.reference, *test.samples.other) == pytest.approx((0.6, 0.61, 0.59, 0.7, 0.71, 0.69))
    assert (test.result.difference.value, *test.result.difference.ends) == pytest.approx(
        (0.1, 0.0773, 0.1227), abs=1e-4
    )


def test_a_curve_that_goes_on_over_several_hosts_is_counted_once() -> None:
    """4 GPUs against 1 are in its series in one host and in that over several; so is 4 x 16 = 1 x 64."""
    cells = {1: [0.8] * 3, 4: [0.8] * 3, 8: [0.8] * 3}
    accuracies = {1: [0.6, 0.61, 0.59], 4: [0.5, 0.51, 0.49], 8: [0.4, 0.41, 0.39]}
    curves = [beyond_one_host(paper_curve(cells, micro_batch=batch), 4) for batch in (16, 64)]
    analysis = analyse(with_accuracy(paper_study(*curves), accuracies))
    fewest, equal = accuracy_tests(all_series(analysis))
    assert [(test.name, test.base_gpus, test.gpus) for test in fewest] == [
        ("micro-batch 16, one host", 1, 4),
        ("micro-batch 16, several hosts", 1, 8),
        ("micro-batch 64, one host", 1, 4),
        ("micro-batch 64, several hosts", 1, 8),
    ]
    assert [(test.base_gpus, test.gpus) for test in equal] == [(1, 4)]
    overall, *lines = findings(analysis)
    assert overall.startswith("Accuracy in 4 comparisons with fewer GPUs after equal images: lower in 4, higher in 0")
    assert "(after Holm's correction for 5 pairs)" in overall
    assert len(lines) == 5


def test_imported_runs_do_not_tell_their_seeds_and_each_counts() -> None:
    cells = {1: [0.8] * 3, 8: [0.8] * 3}
    study = with_accuracy(paper_study(paper_curve(cells)), {1: [0.6, 0.61, 0.59], 8: [0.5, 0.51, 0.49]})
    runs = []
    for run in study.runs:
        imported = Imported(log_format="csv", files=(), ranks=tuple(range(len(run.ranks))))
        header = run.header.model_copy(update={"seed": None, "imported": imported})
        runs.append(run.model_copy(update={"header": header}))
    (test,) = accuracy_tests(all_series(analyse(study.model_copy(update={"runs": tuple(runs)}))))[0]
    assert (test.result.seeds, test.result.verdict) == ((3, 3), "lower")


def test_lower_is_said_after_correction_for_all_accuracies() -> None:
    """2.4 points, of a standard error of 0.816 with 4 degrees of freedom: t = 2.94, p = 0.042; twice that for two."""
    base, lower = [0.6, 0.61, 0.59], [0.576, 0.586, 0.566]
    alone = with_accuracy(paper_study(paper_curve({1: [0.8] * 3, 8: [0.8] * 3})), {1: base, 8: lower})
    assert "95 % interval -4.7 to -0.1), lower" in findings(analyse(alone))[1]
    among = with_accuracy(
        paper_study(paper_curve({1: [0.8] * 3, 4: [0.8] * 3, 8: [0.8] * 3})), {1: base, 4: lower, 8: lower}
    )
    overall, line = findings(analyse(among))
    assert "lower in 0, higher in 0, no difference shown in 2 (after Holm's correction for 2 pairs)" in overall
    assert line.count("no difference shown among all comparisons (p = 0.085 for all)") == 2
    for test in accuracy_tests(all_series(analyse(among)))[0]:
        assert (test.result.p, test.result.p_adjusted) == pytest.approx((0.0424, 0.0848), abs=2e-4)


def test_counts_other_than_4_and_8_are_held_against_the_smallest() -> None:
    study = with_accuracy(paper_study(paper_curve({2: [0.8], 3: [0.8], 6: [0.8]})), {2: [0.5], 3: [0.5], 6: [0.5]})
    tests = accuracy_tests(all_series(analyse(study)))[0]
    assert [(test.base_gpus, test.gpus) for test in tests] == [(2, 6)]


def test_gpus_are_told_from_the_global_batch_where_micro_batches_differ() -> None:
    study = paper_study(
        paper_curve({1: [0.8], 2: [0.8], 4: [0.8]}, micro_batch=16),
        paper_curve({1: [0.8], 2: [0.8], 4: [0.8]}, micro_batch=64),
    )
    changed = with_accuracy(study, {1: [0.5], 2: [0.55], 4: [0.6]})
    tests = accuracy_tests(all_series(analyse(changed)))[1]
    # 16 x 4 = 64 x 1; no other global batch is reached twice.
    assert [(test.gpus, test.base_gpus, test.batches) for test in tests] == [(4, 1, (64, 64))]
    assert tests[0].result.difference.value == pytest.approx(0.1)
    assert "CIFAR-10, one global batch of 64: +10.0 points at 4 GPUs" in findings(analyse(changed))[-1]


def test_weak_scaling_is_in_neither_claim() -> None:
    study = paper_study(paper_curve(CELLS, mode="weak"), paper_curve(CELLS, mode="weak", spread=True))
    found = all_series(analyse(study))
    assert (accuracy_tests(found), host_pairs(found)) == (([], []), [])
    assert findings(analyse(study)) == []


def test_hosts_of_unlike_devices_are_not_paired() -> None:
    study = paper_study(
        paper_curve({2: [0.8], 4: [0.8]}),
        paper_curve({2: [0.8], 4: [0.8]}, spread=True, devices=("Other GPU",)),
    )
    assert host_pairs(all_series(analyse(study))) == []


def test_hosts_of_unlike_workloads_are_not_paired() -> None:
    study = paper_study(
        paper_curve({2: [0.8], 4: [0.8]}, dataset="cifar10"),
        paper_curve({2: [0.8], 4: [0.8]}, dataset="cifar100", spread=True),
    )
    assert host_pairs(all_series(analyse(study))) == []


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.001, 0.999, 1.0], "no difference shown, and one beyond 5 % is excluded (p = below 0.001)"),
        ([0.9, 1.1, 1.0], "no difference shown, which is not that there is none: a difference of 27.9 %"),
        ([1.2, 1.21, 1.19], "there is a difference; one beyond 5 % is not excluded"),
        ([1.02, 1.021, 1.019], "there is a difference, and it is within 5 %"),
        (
            [1.0, 1.02],
            "(2 GPU counts; 95 % interval -10.9 % to +14.5 %; from count to count it scatters by 1.4 %): too few",
        ),
        ([1.1], "+10.0 % against one host (1 GPU count, one run on a side): too few to tell"),
    ],
)
def test_hosts_in_words(ratios: list[float], said: str) -> None:
    one = {gpus: [10.0] for gpus in range(2, 2 + len(ratios))}
    test = hosts_test(one, {gpus: [10.0 * ratio] for gpus, ratio in zip(one, ratios, strict=True)})
    assert test is not None
    assert said in hosts_sentence(test)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (1.01, "there is a difference, and it is within 5 %."),
        (0.99, "there is a difference, and it is within 5 %."),
        (1.049, "there is a difference; one beyond 5 % is not excluded."),
        (1.10, "there is a difference; one beyond 5 % is not excluded."),
        (1.001, "no difference shown, which is not that there is none: a difference of 0.3 % cannot be excluded."),
    ],
)
def test_one_count_in_words(ratio: float, said: str) -> None:
    """A spread of 0.1 % on both sides: 2.776 x sqrt(2 / 3) = 2.27 times as much either way, so 1.049 may be 1.051."""
    test = hosts_test({2: [10.0, 10.01, 9.99]}, {2: [10.0 * ratio, 10.01 * ratio, 9.99 * ratio]})
    assert test is not None
    assert hosts_sentence(test).endswith(said)


def test_one_run_against_three_has_no_interval() -> None:
    test = hosts_test({2: [10.0, 10.01, 9.99]}, {2: [11.25]})
    assert test is not None
    assert "+12.5 % against one host (1 GPU count, one run on a side): too few to tell" in hosts_sentence(test)


def test_the_whole_study_pairs_its_one_workload() -> None:
    (pair,) = host_pairs(all_series(analyse(whole_study())))
    assert (pair.name, [one.gpus for one in pair.test.counts]) == ("CIFAR-100, micro-batch 64", [2, 4, 8])


def test_the_published_claim_on_published_facts() -> None:
    """No difference shown, less than 5 %; what is said in the docs."""

    def times(layout: ClusterLayout) -> dict[int, list[float]]:
        facts = published().of(dataset="cifar100", micro_batch=64, layout=layout)
        return {fact.gpus: [fact.epoch_seconds] for fact in facts}

    test = hosts_test(times("single-node"), times("one-gpu-per-node"))
    assert test is not None
    assert (test.verdict, len(test.counts)) == ("equivalent", 7)
    assert "+0.3 % against one host (7 GPU counts; 95 % interval -2.3 % to +2.9 %" in hosts_sentence(test)
    docs = Path(__file__).parents[3] / "docs" / "like-paper.md"
    assert "-2.3 % to +2.9 %" in docs.read_text(encoding="utf-8")


def test_the_published_raw_data_from_import_to_findings(tmp_path: Path) -> None:
    repository = Path(__file__).parents[3]
    folder = Path(os.environ.get("VITSCALE_PAPER_DATA", repository.parent / "shared" / "paper"))
    if not (folder / "epochs.csv").is_file():
        pytest.skip(f"no epochs.csv in {folder}: set VITSCALE_PAPER_DATA to the folder of the published raw data")
    from typer.testing import CliRunner

    from vitscale.cli import app

    results = tmp_path / "results"
    assert CliRunner().invoke(app, ["import", str(folder / "epochs.csv"), "-o", str(results)]).exit_code == 0
    answer = CliRunner().invoke(app, ["report", "--like", "paper", "--json", str(results)])
    assert answer.exit_code == 0
    import json

    content = json.loads(answer.stdout)
    missing = {one["number"] for one in content["figures"] if not one["drawn"]}
    assert missing == {6, 7, 17}
    (hosts,) = content["claims"]["hosts"]
    assert hosts["verdict"] == "equivalent"
    by_cell = {(one["workload"], one["gpus"]): one["difference"] for one in content["claims"]["accuracy"]}
    assert by_cell["CIFAR-10, micro-batch 64, vector, one host", 8] == pytest.approx(0.5140 - 0.5847)
