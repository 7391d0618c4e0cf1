"""How it was measured: the paragraph and the checklist say what the records do, and name what these lack."""

from __future__ import annotations

import math
import random
from pathlib import Path

from importers.logs import imported
from prediction_factory import resolved_study
from results_factory import make_curve, make_environment, make_results, make_trial, steady_run
from vitscale.analysis import Analysis, analyse
from vitscale.pages.document import report_document
from vitscale.pages.methods import MethodRule, checklist, paragraph
from vitscale.present.document import Section, Table
from vitscale.store.records import DeviceRecord, GpuSamples, GpuSettings, ResourcesLine
from vitscale.store.results import Run
from vitscale.trial.trial import Trial


def rules(analysis: Analysis) -> dict[int, MethodRule]:
    return {rule.number: rule for rule in checklist(analysis)}


def test_of_three_runs_on_two_rank_counts() -> None:
    analysis = analyse(resolved_study({1: [0.1, 0.1, 0.1], 2: [0.06, 0.06, 0.06]}))
    told = rules(analysis)
    assert list(told) == list(range(1, 13))
    # 1,024 images in batches of 8: 128 steps of 0.1 s.
    assert told[1].evidence == "ddp (strong-micro): 1 rank, 12.8 s an epoch."
    assert (told[1].kept, told[1].missing) == ("in part", 'the run without a distributed wrapper (engine = "none")')
    assert (told[2].kept, told[2].evidence) == ("yes", "2 of 2 trials measured.")
    assert told[4].evidence == "1 speedup, each a ratio of mean times; none is averaged."
    assert (told[5].kept, told[5].missing) == ("yes", "")
    assert told[5].evidence.startswith("3 runs of a trial; its 95 % interval (Student's t")
    assert told[6].missing == "a test of that: at most 3 runs of a trial, and a test takes 8 to find anything"
    assert told[7].kept == "does not apply"
    # 3 epochs of 128 and of 64 steps, less 3 of warm-up.
    assert "381" in told[10].evidence
    assert "189 to 381 timed steps a run" in told[10].evidence
    assert told[9].evidence.startswith("Varied: train.engine = ddp; ranks = 1 and 2. 1 environment")
    assert told[9].missing == "the revision of the code (git) of 2 trials"
    said = paragraph(analysis)
    assert said.startswith(
        "vit-ti16 on synthetic (32 pixels a side) in fp32: ddp; 1 and 2 ranks on 1 host; devices: Example"
    )
    assert "Runs of a trial: 3." in said
    assert "torch 2.13.0" in said


def test_what_is_missing_is_named() -> None:
    one, two = make_trial("ddp", 2), make_trial("ddp", 4)
    bare = make_environment(versions={}, git_revision="abc")
    runs = [steady_run(one, 0.1, environments=[bare] * 2), steady_run(one, 0.1, 1, environments=[bare] * 2)]
    analysis = analyse(make_results([(make_curve([one, two]), [one, two])], runs))
    told = rules(analysis)
    assert (told[2].kept, told[2].missing) == ("in part", "1 trial not run yet")
    assert told[2].evidence == "1 of 2 trials measured, 1 not run yet."
    assert told[1].missing == 'a base case on one rank and the run without a distributed wrapper (engine = "none")'
    assert (told[5].kept, told[5].missing) == ("in part", "a third run of 1 trial (measure.repeats)")
    assert (told[9].kept, told[9].missing) == ("in part", "library versions of 1 trial")
    assert told[11].missing == "the matrix-multiply rate, measured after training"
    assert "Software: not recorded" in paragraph(analysis)


def on_gpus(trial: Trial, repeat: int, clock: float, watts: float) -> Run:
    """A run on GPUs under this power limit that reached this clock."""
    device = DeviceRecord(type="cuda", name="A100", driver="550", settings=GpuSettings(power_limit_watts=watts))
    run = steady_run(trial, 0.1, repeat, environments=[make_environment(device=device)])
    samples = GpuSamples(
        samples=10, utilisation=0.9, sm_clock_mhz_median=clock, sm_clock_mhz_min=clock, unheld_sm_clock_mhz=clock,
        temperature_celsius_max=60, power_watts_mean=300, throttle_reasons=(), throttled_share=0.0,
    )  # fmt: skip
    line = ResourcesLine(
        epoch=0, seconds=12.0, cpu_seconds=1.0, cpu_throttled_seconds=None, rss_bytes=1, peak_rss_bytes=1, gpu=samples
    )
    return run.model_copy(update={"ranks": (run.ranks[0].model_copy(update={"resources": (line,)}),)})


def test_environments_are_told_apart_by_what_their_tables_show() -> None:
    """Two trials under 400 W at 1,410 and 1,395 MHz are on one environment, that under 300 W on another."""
    trials = [make_trial("ddp", micro_batch=batch, device="cuda") for batch in (8, 16, 32)]
    around = zip(trials, (1410.0, 1395.0, 1380.0), (400.0, 400.0, 300.0), strict=True)
    runs = [on_gpus(trial, repeat, clock, watts) for trial, clock, watts in around for repeat in range(3)]
    curves = [(make_curve([trial], train__micro_batch=trial.train.micro_batch), [trial]) for trial in trials]
    analysis = analyse(make_results(curves, runs))
    assert (
        "2 environments, in full under Environment; the study file is part of the report."
        in rules(analysis)[9].evidence
    )
    (section,) = [
        block
        for block in report_document(analysis).blocks
        if isinstance(block, Section) and block.title == "Environment"
    ]
    tables = [block for block in section.blocks if isinstance(block, Table)]
    assert [table.columns[1].name for table in tables] == ["2 trials", "1 trial"]
    limits = [{name.text: value.text for name, value in table.groups[0].rows}["power limit in W"] for table in tables]
    assert limits == ["400", "300"]


def test_what_a_log_does_not_tell_is_no_statement(tmp_path: Path) -> None:
    """A table of epochs' seconds tells no image size, no precision and no step; one of images/s no data."""
    table = tmp_path / "epochs.csv"
    table.write_text("gpus,epoch,epoch_seconds,micro_batch,dataset\n1,1,10.0,16,cifar10\n1,2,10.1,16,cifar10\n")
    said = paragraph(imported(tmp_path, [table], "epochs"))
    assert said.startswith("a model that is not named on cifar10 in fp32: ")
    assert "; 1 rank on 1 host; " in said
    assert "the precision is not told (--precision): fp32 is assumed. Runs of a trial: 1. No step was timed, " in said
    speeds = tmp_path / "speeds.csv"
    speeds.write_text("gpus,images_per_second,micro_batch\n1,100,16\n2,195,16\n")
    said = paragraph(imported(tmp_path / "of", [speeds], "csv"))
    assert said.startswith("a model that is not named on images that are not named in fp32: ")
    assert " Runs tell images/s alone. A run counts as one observation, by its rate; " in said
    told = rules(imported(tmp_path / "rules", [speeds], "csv"))
    assert "micro-batch 16 (strong-micro): 1 rank, 100 images/s" in told[1].evidence
    assert "timed steps" not in told[10].evidence


def test_one_run_has_no_interval() -> None:
    analysis = analyse(resolved_study({1: [0.1]}))
    told = rules(analysis)
    assert (told[5].kept, told[5].missing) == ("no", "an interval of 1 trial run once (measure.repeats)")
    assert told[3].kept == "yes"
    assert (told[1].kept, told[4].kept) == ("does not apply", "does not apply")
    assert "no interval, for no trial was repeated" in paragraph(analysis)


def test_runs_enough_for_it_are_tested_for_their_distribution() -> None:
    source = random.Random(5)
    normal = [0.1 * math.exp(0.02 * source.gauss(0, 1)) for _ in range(12)]
    told = rules(analyse(resolved_study({1: normal})))[6]
    assert told.kept == "yes"
    assert told.evidence.startswith("Shapiro and Wilk's test on logarithms of 1 trial: least p = 0.")
    told = rules(analyse(resolved_study({1: [0.1, 0.1001] * 5 + [0.1, 0.3]})))[6]
    assert told.kept == "no"
    assert told.missing.startswith("an interval that does not take runs to be normal")


def test_engines_that_are_compared() -> None:
    trials = [make_trial(engine, 1) for engine in ("ddp", "fsdp2")]
    runs = [steady_run(trial, seconds, n) for trial in trials for n, seconds in enumerate([0.1, 0.101, 0.102])]
    analysis = analyse(make_results([(make_curve([trial]), [trial]) for trial in trials], runs))
    told = rules(analysis)
    assert told[7].kept == "yes"
    assert told[7].evidence.startswith("1 pair by the ratio of mean times and its 95 % interval.")


def test_nothing_completed() -> None:
    trial = make_trial()
    analysis = analyse(make_results([(make_curve([trial]), [trial])], []))
    assert {rule.kept for rule in checklist(analysis)} == {"no"}
    assert paragraph(analysis).startswith("No run of ")


def test_it_is_the_last_part_of_the_report_and_folded() -> None:
    section = report_document(analyse(resolved_study({1: [0.1, 0.1]}))).blocks[-1]
    assert isinstance(section, Section)
    assert (section.title, section.folded) == ("How it was measured", True)
