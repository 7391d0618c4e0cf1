"""A plain table of measured times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from importers.logs import imported
from report_forms import terminal
from vitscale.analysis import Analysis
from vitscale.errors import RequestError, StoreError
from vitscale.importers.contents import BrokenLines, ImportOptions
from vitscale.importers.headings import OWN, SPEEDS, Heading, speed_told
from vitscale.importers.importing import guess, import_logs
from vitscale.importers.plain_csv import read
from vitscale.importers.tables import headers, rows
from vitscale.pages.contract import trial_rows
from vitscale.pages.document import report_document
from vitscale.prediction.evidence import evidence_of
from vitscale.present.markdown import to_markdown
from vitscale.trial.model_cost import counted, parameters


def table(folder: Path, text: str) -> Path:
    path = folder / "times.csv"
    path.write_text(text)
    return path


def test_steps_become_epochs_where_the_dataset_is_known(tmp_path: Path) -> None:
    path = table(tmp_path, "gpus,step_seconds,micro_batch\n1,0.20,8\n2,0.25,8\n4,0.25,8\n")
    found = imported(tmp_path, [path], "csv", train_samples=3200)
    (curve,) = found.curves
    assert [point.efficiency.value for point in curve.points if point.efficiency] == pytest.approx([1.0, 0.8, 0.8])


def test_rates_and_epochs(tmp_path: Path) -> None:
    path = table(tmp_path, "gpus,images_per_second,epoch_seconds,micro_batch,series\n4,160,,8,rates\n4,,99,8,epochs\n")
    found = imported(tmp_path, [path], "csv", train_samples=3200)
    by_name = {curve.name: found.trials[curve.points[0].trial_id] for curve in found.curves}
    rates, epochs = by_name["rates"], by_name["epochs"]
    assert rates.step_seconds is not None
    assert rates.step_seconds.value == pytest.approx(32 / 160)
    assert rates.images_per_second is not None
    assert rates.images_per_second.value == pytest.approx(160)
    assert epochs.epoch_costs == [99.0]
    assert epochs.step_seconds is not None
    assert epochs.step_seconds.value == pytest.approx(99 / 100)
    assert "some-ranks" not in {verdict.kind for verdict in found.findings}


def test_rows_of_one_run_are_its_steps_and_others_are_repeats(tmp_path: Path) -> None:
    rows = "".join(f"2,8,{run},{seconds}\n" for run in ("a", "b", "c") for seconds in (0.1, 0.2, 0.4))
    found = imported(tmp_path, [table(tmp_path, "gpus,micro_batch,run,step_seconds\n" + rows)], "csv")
    ((_, trial),) = found.trials.items()
    assert [run.step_seconds for run in trial.run_figures] == pytest.approx([0.7 / 3] * 3)


def test_engines_and_hosts(tmp_path: Path) -> None:
    head = "gpus,nodes,micro_batch,engine,zero_stage,precision,step_seconds\n"
    text = f"{head}4,2,8,deepspeed,3,bf16,0.2\n4,2,8,ddp,,bf16,0.3\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    worlds = {(t.trial.train.engine, t.trial.train.zero_stage, t.trial.world.nodes) for t in found.trials.values()}
    assert worlds == {("deepspeed", 3, 2), ("ddp", 0, 2)}
    assert {t.trial.train.precision for t in found.trials.values()} == {"bf16"}
    assert sorted(curve.name.split(",")[0] for curve in found.curves) == ["ddp", "deepspeed ZeRO-3"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("0,8,1", "'0' is no whole number from 1"),
        ("2.5,8,1", "'2.5' is no whole number"),
        ("2,8,nan", "'nan' is no number"),
        ("2,8,-1", "'-1' is no time"),
        ("2,8,1e-300", "'1e-300' is no time"),
        ("100001,8,1", "'100001' is no whole number from 1 to 100,000"),
        ("2,8,", "none of step_seconds"),
        ("2,8", "2 cells where the header has 3"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, row: str, why: str) -> None:
    found = imported(tmp_path, [table(tmp_path, f"gpus,micro_batch,step_seconds\n{row}\n2,8,0.5\n")], "csv")
    assert len(found.trials) == 1
    assert any(why in problem and "line 2" in problem for problem in found.problems)


def test_no_column_of_times(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no column of times"):
        import_logs([table(tmp_path, "gpus,seconds\n1,2\n")], "csv", ImportOptions(), tmp_path / "results")


def curves_of_rates(found: Analysis) -> dict[str, dict[int, list[float]]]:
    """Images/s of each run by GPU count of each curve."""
    told: dict[str, dict[int, list[float]]] = {}
    for curve in found.curves:
        for point in curve.points:
            runs = found.trials[point.trial_id].run_figures
            rates = [round(run.images_per_second, 3) for run in runs if run.images_per_second]
            told.setdefault(curve.name, {})[point.gpus] = rates
    return told


UNLIKE = {
    "names that stand once": ("Backbone", "ViT-B ViT-L ViT-H", [(1, 400), (1, 120), (8, 300)]),
    "some at one count": ("Method", "DDP FSDP DDP ZeRO", [(8, 3000), (8, 2700), (16, 5800), (16, 5100)]),
    "no heading": ("", "ViT-B ViT-L ViT-B ViT-L", [(1, 400), (1, 120), (8, 3000), (8, 930)]),
    "numbers of a setting": ("resolution", "224 384 224", [(1, 400), (1, 120), (2, 780)]),
    "batches": ("Batch size", "32 64 32 64", [(1, 300), (1, 360), (4, 1000), (4, 1300)]),
    "numbers under any heading": ("Experts", "8 64 8 64", [(1, 400), (1, 230), (8, 3000), (8, 1700)]),
    "switches": ("channels last", "yes no yes no", [(1, 400), (1, 230), (8, 3000), (8, 1700)]),
    "ZeRO stages": ("zero stage", "1 3 1 3", [(8, 2900), (8, 2400), (16, 5600), (16, 4300)]),
}
"""Name of a column, its cells, (GPUs, images/s) of each row."""


@pytest.mark.parametrize("unlike", UNLIKE)
def test_rows_of_unlike_settings_are_no_repeats(tmp_path: Path, unlike: str) -> None:
    heading, cells, rates = UNLIKE[unlike]
    rows = [f"{cell},{gpus},{rate}" for cell, (gpus, rate) in zip(cells.split(), rates, strict=True)]
    found = imported(tmp_path, [table(tmp_path, "\n".join([f"{heading},gpus,images/s", *rows, ""]))], "csv")
    truth: dict[str, dict[int, list[float]]] = {}
    named = {"Backbone": "", "Method": "", "": "", "zero stage": "ZeRO-"}.get(heading, f"{heading} ")
    for cell, (gpus, rate) in zip(cells.split(), rates, strict=True):
        truth.setdefault(f"{named}{cell}", {})[gpus] = [float(rate)]
    assert curves_of_rates(found) == truth
    assert any("a batch is each GPU's" in note for note in notes_of(found)) is (heading == "Batch size")


@pytest.mark.parametrize(
    ("heading", "cells", "asked"),
    [
        ("peak memory (GB)", ("30", "31", "30", "31"), False),
        ("loss", ("2.1", "2.2", "2.1", "2.0"), False),
        ("MFU", ("0.4", "0.5", "0.4", "0.5"), False),
        ("time to accuracy (h)", ("4", "5", "4", "5"), False),
        ("seed", ("1", "2", "1", "2"), False),
        ("job_id", ("a", "b", "a", "b"), False),
        ("when", ("noon", "night", "noon", "night"), False),
        ("", ("0", "1", "2", "3"), False),
        ("begun", ("2024-01-01", "2024-01-02", "2024-01-01", "2024-01-02"), True),
        ("label", ("run 1", "run 2", "run 1", "run 2"), True),
        ("k", ("1", "2", "1", "2"), True),
        ("fan speed", ("71", "72", "71", "75"), True),
        ("note", ("cold", "warm", "after lunch", ""), True),
    ],
)
def test_repeats_that_differ_in_what_came_out_stay_repeats(
    tmp_path: Path, heading: str, cells: tuple[str, ...], asked: bool
) -> None:
    """A column that may tell settings apart is asked about."""
    rates = [(1, 100.0), (1, 101.0), (4, 360.0), (4, 361.0)]
    rows = [f"{gpus},{cell},{rate}" for cell, (gpus, rate) in zip(cells, rates, strict=True)]
    found = imported(tmp_path, [table(tmp_path, "\n".join([f"gpus,{heading},images/s", *rows, ""]))], "csv")
    assert list(curves_of_rates(found).values()) == [{1: [100.0, 101.0], 4: [360.0, 361.0]}]
    notes = [note for note in notes_of(found) if note.startswith("rows of one setting that differ in")]
    assert [f"differ in {heading} are" in note for note in notes] == [True] * asked


def test_of_a_table_too_long_to_look_at_whole_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitscale.importers.grids._MOST_LINES", 3)
    contents = read([table(tmp_path, "gpus,resolution,images/s\n1,224,400\n1,384,120\n1,224,401\n")], ImportOptions())
    assert len(contents.runs) == 3
    assert any("rows of one setting that differ in resolution" in note for note in contents.notes)


@pytest.mark.parametrize("heading", ["step", "iteration", "iter", "global_step", "Global Step", "epoch", "epoch,iter"])
def test_steps_of_a_log_are_one_run(tmp_path: Path, heading: str) -> None:
    """Two slow steps at the start of 20 are its warm-up, and no runs; the same step again is of another run."""
    numbers = [f"{step // 5},{step % 5}" if "," in heading else f"{step}" for step in range(20)]
    slow = [3.0, 3.0, *[0.2] * 18]
    rows = [f"{gpus},{n},{slow[at]}" for gpus in (1, 2) for _ in range(gpus) for at, n in enumerate(numbers)]
    rows[-2:] = [f"{row}0" for row in rows[-2:]]
    found = imported(tmp_path, [table(tmp_path, "\n".join([f"gpus,{heading},step_time_s", *rows, ""]))], "csv")
    runs = {trial.trial.world.size: [run.step_seconds for run in trial.run_figures] for trial in found.trials.values()}
    assert runs == {1: [pytest.approx(0.2)], 2: [pytest.approx(0.2)] * 2}


def test_steps_of_an_epoch_stand_beside_those_of_the_run(tmp_path: Path) -> None:
    text = "gpus,iter,global_step,step_time_s\n1,0,0,0.2\n1,1,1,0.2\n1,0,2,0.2\n1,1,3,0.2\n"
    (run,) = read([table(tmp_path, text)], ImportOptions()).runs
    assert len(run.ranks[0].steps) == 4


@pytest.mark.parametrize(
    ("headings", "taken"),
    [
        ("epoch_time_avg,epoch_time_min,epoch_time_max", None),
        ("step_time_mean,step_time_min,step_time_max", None),
        ("epoch_time_avg_s,epoch_time_min_s,epoch_time_max_s", (1, 1.0)),
        ("epoch time (min),epoch time std,epoch time max", (1, 60.0)),
        ("epoch_time_min,loss,accuracy", (1, 60.0)),
        ("step time max (ms),step time mean (ms),step time min (ms)", (2, 1e-3)),
    ],
)
def test_the_least_is_no_minutes(tmp_path: Path, headings: str, taken: tuple[int, float] | None) -> None:
    """Beside a mean or a maximum "min" is the minimum; of the three the mean is taken, if its unit is told."""
    head, *_ = headers(table(tmp_path, f"gpus,{headings}\n1,2,3,4\n"))
    speeds = [(at, own.factor) for at, own in enumerate(head.headings) if own.column in SPEEDS]
    assert speeds == ([taken] if taken else [])


OTHERS = {
    "semicolons": "num_gpus;nodes;images/sec;batch size per GPU\n1;1;363.5;64\n16;2;5510;64\n",
    "tabs": "GPUs\t# of nodes\tThroughput (img/s)\tBatch/GPU\n1\t1\t363.5\t64\n16\t2\t5,510\t64\n",
    "quotes": 'World size,Nodes,Samples per second,micro_batch\n1,1,363.5,64\n16,2,"5,510",64\n',
    "of each GPU": "gpus,hosts,img/s/GPU,micro batch\n1,1,363.5,64\n16,2,344.375,64\n",
    "milliseconds": "Number of GPUs,nodes,step time (ms),global batch size\n1,1,176.0660247592847,64\n"
    "16,2,185.84392014519056,1024\n",
    "Markdown": "# Results\n\n| Model | Accuracy |\n|---|---|\n| A | 0.8 |\n\nAnd the speed:\n\n"
    "| GPUs | Nodes | **Images/sec** | Local batch size | Speedup |\n|:--|--:|---|---|---|\n"
    "| 1 | 1 | 363.5 | 64 | 1.0 |\n| 16 | 2 | **5,510** | 64 | 15.2 |\n\n| GPUs | Speed |\n|--|--|\n| 4 | 100 |\n",
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_others_forms_and_names_of_columns_say_the_same(tmp_path: Path, form: str) -> None:
    path = table(tmp_path, OTHERS[form])
    assert guess([path]) == "csv"
    found = imported(tmp_path, [path], "csv")
    (curve,) = found.curves
    rates = {point.gpus: found.trials[point.trial_id].images_per_second for point in curve.points}
    assert {gpus: rate and rate.value for gpus, rate in rates.items()} == pytest.approx({1: 363.5, 16: 5510.0})
    assert [found.trials[point.trial_id].trial.train.micro_batch for point in curve.points] == [64, 64]
    assert [found.trials[point.trial_id].trial.world.nodes for point in curve.points] == [1, 2]
    (taken,) = [note for note in notes_of(found) if note.startswith("columns are taken by what they say: ")]
    assert " as " in taken


@pytest.mark.parametrize(
    "heading",
    [
        "Throughput",
        "tokens/s",
        "std (img/s)",
        "Inference images/s",
        "min step time (s)",
        "epoch time",
        "time (s)",
        "steps",
    ],
)
def test_what_may_mean_something_else_is_taken_for_nothing(tmp_path: Path, heading: str) -> None:
    path = table(tmp_path, f"gpus,{heading}\n1,2\n")
    assert heading.lower() in headers(path)[0].columns
    with pytest.raises(RequestError, match="no column of times"):
        import_logs([path], "csv", ImportOptions(), tmp_path / "results")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "GPU,images/s\n1,100\n",
            "has no column gpus, which counts them (or --gpus); it has 'GPU, images/s'. Valid: gpus, ",
        ),
        (
            "Speed:\n| # GPUs | Throughput |\n|---|---|\n| 1 | 3 |\n",
            "has no column of times; it has '# GPUs, Throughput'; only the unit of 'Throughput' is missing",
        ),
        (
            "gpus,epoch_time,step\n1,2,3\n",
            "it has 'gpus, epoch_time, step'; only the unit of 'epoch_time' is missing, as in 'epoch_time (s)'. Valid",
        ),
        ("GPUs | img/s\n1 | 400\n", "tells its format: a table with bars and no rule"),
        ("GPUs   img/s\n1      400\n", "tells its format: spaces stand between its columns"),
        ("g\0p\0u\0s\0,\0s\0\n", "tells its format: it is no UTF-8"),
        ("Dear all,\n", "tells its format: it begins with 'Dear all,'. Valid"),
        ("", "tells its format: it is empty. Valid"),
    ],
)
def test_what_a_table_lacks_is_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        guess([table(tmp_path, text)])


def test_names_of_columns_without_rows_are_no_table(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="can be used as csv: no row stands below the names of the columns"):
        import_logs([table(tmp_path, "gpus,img/s\n")], "csv", ImportOptions(), tmp_path / "results")


def test_a_layout_that_tells_no_hosts_is_named(tmp_path: Path) -> None:
    contents = read([table(tmp_path, "gpus,layout,images_per_second\n16,3x8,5800\n")], ImportOptions())
    assert "layout '3x8' does not tell how many hosts: one is assumed (a column nodes would tell)" in contents.notes


def test_units_of_time(tmp_path: Path) -> None:
    for heading, factor in (
        ("min/epoch", 60.0),
        ("Epoch time (h)", 3600.0),
        ("s/it", 1.0),
        ("iter ms", 1e-3),
        ("hrs/epoch", 3600.0),
        ("secs/epoch", 1.0),
        ("sec/batch", 1.0),
        ("epoch time (mins)", 60.0),
    ):
        head, *_ = headers(table(tmp_path, f"gpus,{heading}\n"))
        assert [own.factor for own in head.headings] == [1.0, factor], heading


def test_a_comma_that_may_be_a_decimal_one_is_no_number(tmp_path: Path) -> None:
    found = imported(tmp_path, [table(tmp_path, "gpus;step_seconds\n1;0.5\n2;1,250\n")], "csv")
    assert len(found.trials) == 1
    assert any(
        "line 3 ('1,250' is no number: write it without the comma, or with a point" in problem
        for problem in found.problems
    )


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("gpus\tstep time (s)\n1\t0,945\n2\t1,250\n", ["0.945", "1.250"]),
        ("| gpus | step time (s) |\n|--|--|\n| 1 | 0,945 ± 0,003 |\n| 2 | 12,5 |\n", ["0.945", "12.5"]),
        ('gpus,step time (s)\n1,"0,945"\n2,"1,250"\n', ["0.945", "1.250"]),
        ("gpus;step time (s)\n1;0,945\n2;1,250\n", ["0.945", "1.250"]),
        ("gpus;step time (s)\n1;66,25\n2;35,10\n4;9,800\n", ["66.25", "35.10", "9.800"]),
        ('gpus,step time (s)\n1,"12,85"\n2,"6,50"\n4,"3,400"\n', ["12.85", "6.50", "3.400"]),
        ("gpus\timages/s\n1\t1.400,5\n2\t2.780\n", ["1400.5", "2780"]),
        ("gpus\timages/s\n1\t985.5\n2\t1,930\n", ["985.5", "1930"]),
        ("gpus\timages/s\n1\t985\n2\t1,930\n", ["985", "1930"]),
        ("gpus\tmin/epoch\tspeedup\n1\t12,500\t1,0\n2\t6,450\t1,9\n", ["12500", "6450"]),
        ("gpus\tstep time (s)\timages/s\n1\t0,945\t1,400\n2\t0,972\t2,780\n", ["1.400", "2.780"]),
        ("gpus\tstep time (s)\timages/s\n1\t0.945\t1,400\n2\t0.972\t2,780\n", ["1400", "2780"]),
    ],
)
def test_what_a_comma_is_follows_from_all_numbers_of_a_column(tmp_path: Path, text: str, numbers: list[str]) -> None:
    """A number that begins with 0, or has not three digits behind its comma, has a decimal one; and so have others."""
    path = table(tmp_path, text)
    (head,) = headers(path)
    column = head.columns[-1] if head.columns[-1] in SPEEDS else "epoch_seconds"
    factor = next(own.factor for own in head.headings if own.column == column)
    read_as = [float(row[column]) / factor for row in rows(path, head, ("gpus",), BrokenLines("a"))]
    assert read_as == pytest.approx([float(number) for number in numbers])


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (("0,945", "0,972"), "commas in 'step time (s)' are decimal ones: 0,945 is 0.945"),
        (("2,855", "998"), "commas in 'step time (s)' may be decimal ones: 2,855 is taken for 2855"),
        (("1,234,567", "2,855"), ""),
        (("75,00", "9,800"), "commas in 'step time (s)' may be decimal ones: 9,800 is taken for 9800"),
        (("75,00", "9,50"), "commas in 'step time (s)' are decimal ones: 75,00 is 75.00"),
        (("400", "3,000"), ""),
    ],
)
def test_what_a_comma_was_taken_for_is_told(tmp_path: Path, cells: tuple[str, str], said: str) -> None:
    contents = read([table(tmp_path, f"gpus\tstep time (s)\n1\t{cells[0]}\n2\t{cells[1]}\n")], ImportOptions())
    assert [note for note in contents.notes if note.startswith("commas")] == ([said] if said else [])


def test_a_slip_makes_no_decimals_of_its_column(tmp_path: Path) -> None:
    contents = read([table(tmp_path, "gpus\timg/s\n1\t75,00\n8\t9,800\n16\t18,200\n")], ImportOptions())
    assert [8 / run.ranks[0].steps[0].seconds for run in contents.runs[:1]] == pytest.approx([9800])
    assert [run.setting.gpus for run in contents.runs] == [8, 16]
    assert "line 2 ('75,00' is no number" in " ".join(contents.problems)


def test_times_with_decimal_commas_may_stand_beside_hours_and_minutes(tmp_path: Path) -> None:
    text = "gpus;epoch_seconds\n1;1:02:03\n2;1930,5\n4;17:05\n"
    contents = read([table(tmp_path, text)], ImportOptions())
    assert [run.ranks[0].epochs[0].seconds for run in contents.runs] == [3723, 1930.5, 1025]
    assert contents.problems == ()


@pytest.mark.parametrize(("other", "cells"), [("torch", ("2.1", "2.2")), ("lr", ("0.01", "0.01"))])
def test_points_of_versions_and_of_what_never_differs_say_nothing_of_commas(
    tmp_path: Path, other: str, cells: tuple[str, str]
) -> None:
    path = table(tmp_path, f"gpus\timg/s\t{other}\n8\t2,855\t{cells[0]}\n16\t5,511\t{cells[1]}\n")
    said = "commas in 'img/s' may be decimal ones: 2,855 is taken for 2855"
    assert [note for note in read([path], ImportOptions()).notes if "comma" in note] == [said]


def test_in_plain_english_nothing_is_said_of_commas(tmp_path: Path) -> None:
    path = table(tmp_path, "gpus\timg/s\tspeedup\n8\t2,855\t7.9x\n16\t5,511\t15.2x\n")
    assert not [note for note in read([path], ImportOptions()).notes if "comma" in note]


def test_a_point_beside_decimal_commas_that_may_stand_between_thousands_is_refused(tmp_path: Path) -> None:
    contents = read([table(tmp_path, "gpus\tstep time (s)\n1\t0,945\n2\t1.002\n")], ImportOptions())
    assert [run.setting.gpus for run in contents.runs] == [1]
    assert "line 3 (beside decimal commas 1.002 may be 1002)" in " ".join(contents.problems)


def test_two_columns_that_say_the_same_are_taken_where_they_agree(tmp_path: Path) -> None:
    """wandb's table has the configuration's num_gpus beside the summary's world_size."""
    found = imported(tmp_path, [table(tmp_path, "num_gpus,world_size,img/s\n1,1,100\n2,2,180\n4,8,300\n")], "csv")
    assert {row["gpus"]: row["images_per_second"] for row in trial_rows(found)} == {1: 100, 2: 180}
    assert "line 4 (gpus is 4 in 'num_gpus' and 8 in 'world_size': leave out the wrong column)" in found.problems[0]
    with pytest.raises(RequestError, match=r"twice. Leave one of them out"):
        import_logs([table(tmp_path, "gpus,model,model,img/s\n1,a,b,3\n")], "csv", ImportOptions(), tmp_path / "twice")


@pytest.mark.parametrize(
    ("speeds", "told"),
    [
        (("160", "312", "1.164"), [160, 312, 1164]),  # as a spreadsheet in German or Spanish writes them
        (("160", "312,5", "1.164"), [160, 312.5]),
        (("160.5", "312", "1.164"), [160.5, 312, 1.164]),
        (("1.160", "2.312", "4.164"), []),
    ],
)
def test_points_between_thousands(tmp_path: Path, speeds: tuple[str, ...], told: list[float]) -> None:
    text = "GPUs;Images/s\n" + "".join(f"{1 << n};{speed}\n" for n, speed in enumerate(speeds))
    if not told:
        with pytest.raises(StoreError, match=r"line 2 \(1.160 may be 1160: write that, or 1.1600\)"):
            import_logs([table(tmp_path, text)], "csv", ImportOptions(), tmp_path / "results")
        return
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    assert [row["images_per_second"] for row in trial_rows(found)] == pytest.approx(told)
    if told[-1] == 1164:
        assert "points in 'Images/s' stand between thousands: 1.164 is 1164" in notes_of(found)


def test_seconds_and_losses_with_three_decimals_stay(tmp_path: Path) -> None:
    """Between semicolons, with no other number of the table to tell what a point is."""
    text = "gpus;step_seconds;loss\n1;1.164;2.345\n2;1.203;2.346\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    assert [row["step_seconds"] for row in trial_rows(found)] == [1.164, 1.203]
    text = "gpus;images_per_second;loss\n1;150;2.345\n2;290;2.346\n"
    found = imported(tmp_path / "rates", [table(tmp_path, text)], "csv")
    assert [row["images_per_second"] for row in trial_rows(found)] == pytest.approx([150, 290])


def test_narrow_blanks_stand_between_thousands(tmp_path: Path) -> None:
    found = imported(tmp_path, [table(tmp_path, "GPUs;Images/s\n1;440,5\n8;1\u202f163,64\n16;2\u00a0301,5\n")], "csv")
    assert [row["images_per_second"] for row in trial_rows(found)] == pytest.approx([440.5, 1163.64, 2301.5])


def test_rates_of_each_gpu_under_another_name_are_told_by_their_epochs(tmp_path: Path) -> None:
    """50,000 images at 160 a second are 312.5 s; on 8 GPUs each at 145.45 a second 42.97 s."""
    text = "gpus,micro_batch,epoch_time_s,images_per_sec\n1,64,312.50,160.00\n8,64,42.97,145.45\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv", train_samples=50_000)
    assert [row["epoch_seconds"] for row in trial_rows(found)] == [312.5, 42.97]
    assert trial_rows(found)[1]["speedup"] == pytest.approx(312.5 / 42.97)
    [told] = [note for note in notes_of(found) if "contradict" in note]
    assert "in 1 row (on 8 GPUs 145.45/s x 42.97 s are 6,250 images, and an epoch has 50,000)" in told
    assert told.endswith("it is each GPU's, it seems: name its column images_per_second_per_gpu")
    slip = "gpus,images_per_second,epoch_seconds\n1,400,125\n2,780,64\n4,1500,33\n8,2900,3\n"  # 3 for 17
    one = imported(tmp_path / "slip", [table(tmp_path, slip)], "csv", train_samples=50_000)
    assert [row["images_per_second"] for row in trial_rows(one)][:3] == pytest.approx([400, 780, 1500])
    assert "in 1 row (on 8 GPUs 2900/s x 3 s are 8,700 images" in "".join(notes_of(one))
    right = imported(tmp_path / "all", [table(tmp_path, text.replace("145.45", "1163.6"))], "csv", train_samples=50_000)
    assert not [note for note in notes_of(right) if "contradict" in note]
    assert trial_rows(right)[1]["images_per_second"] == pytest.approx(1163.6)


def test_runs_that_did_not_finish_and_rows_of_means_are_no_runs(tmp_path: Path) -> None:
    states = "Name,State,gpus,epoch_time_s\n" + "".join(
        f"run-{n},{state},{gpus},{seconds}\n"
        for n, (state, gpus, seconds) in enumerate([
            ("finished", 1, 312), ("crashed", 1, 12), ("finished", 8, 43), ("running", 8, 3), ("failed", 8, 2)
        ])
    )  # fmt: skip
    found = imported(tmp_path, [table(tmp_path, states)], "csv")
    assert [row["epoch_seconds"] for row in trial_rows(found)] == [312, 43]
    assert found.problems == (
        "times.csv: 3 unfinished lines left out: line 3 (its run is crashed), line 5 (its run is running), "
        "line 6 (its run is failed)",
    )
    data = "gpus,state,images_per_second\n1,synthetic,900\n1,real,600\n8,synthetic,7000\n8,real,4100\n"
    found = imported(tmp_path / "data", [table(tmp_path, data)], "csv")
    assert sorted(curve.name for curve in found.curves) == ["real", "synthetic"]
    named = "run,gpus,step_seconds\nbase,1,0.4\nmax,1,0.5\nmin,1,0.3\nbase,2,0.4\nmax,2,0.5\nmin,2,0.3\n"
    found = imported(tmp_path / "named", [table(tmp_path, named)], "csv")
    assert [len(trial.run_figures) for trial in found.trials.values()] == [3, 3]
    of_nodes = "run,nodes,gpus_per_node,step_seconds\nbase,1,8,0.4\nmax,1,8,0.5\n"
    found = imported(tmp_path / "nodes", [table(tmp_path, of_nodes)], "csv")
    assert [len(trial.run_figures) for trial in found.trials.values()] == [2]
    means = "gpus,run,epoch_time_s\n1,1,310\n1,2,314\n1,mean,312\n8,1,43\n8,Mean,43\n"
    found = imported(tmp_path / "means", [table(tmp_path, means)], "csv")
    assert [row["epoch_seconds"] for row in trial_rows(found)] == [pytest.approx((310 * 314) ** 0.5), 43]
    assert [len(trial.run_figures) for trial in found.trials.values()] == [2, 1]
    alone = imported(tmp_path / "alone", [table(tmp_path, "gpus,run,epoch_time_s\n1,mean,310\n8,mean,43\n")], "csv")
    assert [row["epoch_seconds"] for row in trial_rows(alone)] == [310, 43]


@pytest.mark.parametrize(
    ("heading", "speed"),
    [
        ("throughput/device/samples_per_sec", "images_per_second_per_gpu"),
        ("throughput/samples_per_sec", "images_per_second"),
        ("train|device/samples_per_sec", "images_per_second_per_gpu"),
        ("train|global/samples_per_sec", "images_per_second"),
        ("metrics.images_per_sec", "images_per_second"),
        ("per-replica images/s", "images_per_second_per_gpu"),
        ("Throughput after warmup (images/s)", "images_per_second"),
        ("Throughput with data loading (images/s)", "images_per_second"),
        ("GPU throughput (images/s/gpu)", "images_per_second_per_gpu"),
        ("local images/s/gpu", "images_per_second_per_gpu"),
        ("gpu_images_per_sec", None),  # each one's, or that of all
        ("local_images_per_sec", None),
        ("node_images_per_sec", None),
        ("dataloader_images_per_sec", None),
        ("Data loading img/s", None),
        ("warmup images/s", None),
        ("params.num_gpus", "gpus"),
        ("accumulate_grad_batches", "grad_accum"),
        ("accum_iter", "grad_accum"),
        ("effective_batch_size", "global_batch"),
        ("global_train_batch_size", "global_batch"),
    ],
)
def test_what_trackers_and_trainers_call_their_columns(heading: str, speed: str | None) -> None:
    assert Heading.of(heading).column == (heading.lower() if speed is None else speed)


def test_accumulation_by_lightnings_name_and_precisions_by_its_and_composers(tmp_path: Path) -> None:
    """A step of 4 micro-steps of 64 images in 1.6 s is 160 images a second."""
    text = "num_gpus,micro_batch,accumulate_grad_batches,step_time_ms,precision\n"
    names = {
        "bf16-mixed": "bf16",
        "16-mixed": "fp16",
        "32-true": "fp32",
        "bf16-true": "bf16-params",
        "amp_bf16": "bf16",
    }
    rows_told = "".join(f"{1 << n},64,4,1600.0,{name}\n" for n, name in enumerate(names))
    found = imported(tmp_path, [table(tmp_path, text + rows_told)], "csv")
    trials = sorted(found.trials.values(), key=lambda trial: trial.trial.world.size)
    assert [trial.trial.train.precision for trial in trials] == list(names.values())
    assert [trial.trial.train.grad_accum for trial in trials] == [4] * 5
    assert trials[0].images_per_second is not None
    assert trials[0].images_per_second.value == pytest.approx(160)


def test_a_title_above_the_names_and_epochs_told_once_in_many_steps(tmp_path: Path) -> None:
    titled = table(tmp_path, "ViT scaling on A100,,\n,,\nGPUs,Batch size per GPU,Images/s\n1,64,160\n8,64,1164\n")
    assert guess([titled]) == "csv"
    found = imported(tmp_path, [titled], "csv")
    assert [row["images_per_second"] for row in trial_rows(found)] == [160, 1164]
    history = "_step,gpus,micro_batch,step_time_ms,epoch,epoch_time_s\n"
    history += "".join(f"{n},1,8,400.0,,\n" for n in range(4)) + "4,1,8,,1,2.1\n"
    assert guess([table(tmp_path, history)]) == "csv"
    assert guess([table(tmp_path, "gpus,step_time_ms,epoch,epoch_time_s\n1,400,1,2.1\n1,401,2,2.2\n")]) == "epochs"


@pytest.mark.parametrize("column", ["batch_size", "train_batch_size"])
def test_a_batch_of_nobody_is_asked_about(tmp_path: Path, column: str) -> None:
    found = imported(tmp_path, [table(tmp_path, f"gpus,images_per_second,{column}\n1,100,64\n")], "csv")
    assert "a batch is each GPU's or that of all: name its column micro_batch or global_batch" in notes_of(found)


def notes_of(found: Analysis) -> tuple[str, ...]:
    assert found.study.imported is not None
    return found.study.imported.notes


def test_without_a_micro_batch_a_rate_stands_and_a_step_is_of_an_image(tmp_path: Path) -> None:
    found = imported(tmp_path, [table(tmp_path, "gpus,images_per_second\n1,100\n2,180\n")], "csv")
    rates = [trial.images_per_second.value for trial in found.trials.values() if trial.images_per_second]
    assert rates == pytest.approx([100.0, 180.0])
    timed = imported(tmp_path / "steps", [table(tmp_path, "gpus,step_seconds\n1,0.5\n")], "csv", train_samples=100)
    ((_, trial),) = timed.trials.items()
    assert trial.step_seconds is not None
    assert trial.images_per_second is None
    assert trial.epoch_seconds is None


RATES_ALONE = "GPUs,images/s\n1,400\n8,3000\n16,5800\n32,11000\n"


def test_rates_alone_tell_the_speedup_and_no_step(tmp_path: Path) -> None:
    found = imported(tmp_path, [table(tmp_path, RATES_ALONE)], "csv")
    told = {row["gpus"]: [row[key] for key in ("speedup", "efficiency", "step_seconds")] for row in trial_rows(found)}
    assert told == {
        gpus: [pytest.approx(rate / 400), pytest.approx(rate / 400 / gpus), None]
        for gpus, rate in ((1, 400), (8, 3000), (16, 5800), (32, 11000))
    }
    assert [run["step_seconds"] for row in trial_rows(found) for run in row["runs"]] == [None] * 4
    assert not {"baseline-missing"} & {finding.kind for finding in found.findings}
    assert not any("speedup" in note or "images/s, and all" in note for note in notes_of(found))
    first, second, *rest = terminal(found)
    assert (first + second).startswith("- Fastest (1 run): unknown engine, 32 ranks, micro-batch not told:")
    assert second.strip() == "11,000 images/s. Too few to say who is ahead."
    assert any(line.split()[-5:-1] == ["1", "11,000", "27.50", "0.86"] for line in rest)


def test_rates_alone_tell_the_epoch_of_a_known_dataset(tmp_path: Path) -> None:
    """1,281,167 images at 11,000 a second, whatever the batch."""
    found = imported(tmp_path, [table(tmp_path, RATES_ALONE)], "csv", train_samples=1_281_167)
    epochs = {row["gpus"]: (row["epoch_seconds"], row["speedup"], row["step_seconds"]) for row in trial_rows(found)}
    assert epochs[32] == (pytest.approx(1_281_167 / 11_000), pytest.approx(27.5), None)


def test_epochs_beside_rates_are_the_epochs(tmp_path: Path) -> None:
    text = "gpus,images_per_second,epoch_seconds\n1,400,3203\n8,3000,430\n"
    rows_of = trial_rows(imported(tmp_path, [table(tmp_path, text)], "csv"))
    assert [(row["epoch_seconds"], row["speedup"]) for row in rows_of] == [(3203, 1), (430, pytest.approx(3203 / 430))]


def test_steps_of_a_known_batch_tell_the_speedup_without_the_dataset(tmp_path: Path) -> None:
    text = "gpus,step_seconds,micro_batch\n1,0.20,8\n4,0.25,8\n"
    assert [row["speedup"] for row in trial_rows(imported(tmp_path, [table(tmp_path, text)], "csv"))] == [
        1.0,
        pytest.approx(4 * 0.20 / 0.25),
    ]


def test_a_rate_is_not_compared_with_an_epoch(tmp_path: Path) -> None:
    text = "gpus,images_per_second,epoch_seconds\n1,400,\n8,,430\n16,5800,\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    assert {row["gpus"]: row["speedup"] for row in trial_rows(found)} == {1: 1, 8: None, 16: pytest.approx(14.5)}
    assert list(found.curves[0].unlike.values()) == [
        "8 ranks: one tells the time of an epoch, the other images/s alone"
    ]


def test_a_time_whose_rate_is_of_its_micro_batch_is_a_micro_steps(tmp_path: Path) -> None:
    """64 images on 1 GPU at 400 a second take 0.16 s; a step of 4 such micro-steps takes 0.64 s."""
    text = "gpus,micro_batch,grad_accum,step_seconds,images_per_second\n1,64,4,0.16,400\n8,64,4,0.17,3011\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    told = [(row["step_seconds"], row["images_per_second"]) for row in trial_rows(found)]
    assert told == [pytest.approx((0.64, 400), rel=1e-3), pytest.approx((0.68, 3011), rel=1e-3)]
    assert any("one micro-step" in note for note in notes_of(found))


@pytest.mark.parametrize(
    "rows_told",
    [
        "1,32,4,1.0,128\n4,32,4,1.05,121.9\n8,32,4,1.1,116.4\n",  # rates of each GPU, of which that on 4 fits
        "4,32,4,1.05,121.9\n",
        "4,32,4,1.05,121.9\n8,32,2,1,512\n",  # a whole second may be half a one or one and a half
    ],
)
def test_micro_steps_are_those_of_all_rows_or_none(tmp_path: Path, rows_told: str) -> None:
    text = f"gpus,micro_batch,grad_accum,step_seconds,images_per_second\n{rows_told}"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    told = [row["step_seconds"] for row in trial_rows(found)]
    assert told == [float(line.split(",")[3]) for line in rows_told.split()]
    assert not [note for note in notes_of(found) if "micro-step" in note]
    (said,) = [note for note in notes_of(found) if "contradict" in note]
    assert "121.9/s x 1.05 s are 32 images a GPU, and the batch is 128): images/s is ignored" in said


def test_epochs_of_a_tracker_are_those_of_one_run(tmp_path: Path) -> None:
    rows_told = "".join(
        f"{gpus},{epoch},{seconds + epoch}\n" for gpus, seconds in ((1, 99), (4, 29)) for epoch in (1, 2, 3)
    )
    path = table(tmp_path, f"gpus,train/epoch,train/epoch_time (s)\n{rows_told}")
    assert guess([path]) == "epochs"
    found = imported(tmp_path, [path], "epochs")
    assert [[len(run.epochs) for run in trial.run_figures] for trial in found.trials.values()] == [[3], [3]]
    assert {row["gpus"]: row["epoch_seconds"] for row in trial_rows(found)} == {1: 101, 4: 31}
    both = table(tmp_path, "gpus,epoch,train/epoch,epoch_seconds\n1,1,1,100\n")
    assert headers(both)[0].columns == ("gpus", "epoch", "", "epoch_seconds")


def test_names_as_trackers_export_them(tmp_path: Path) -> None:
    text = '"Name","num_gpus","train/images_per_sec","eval/images_per_sec"\n"a","1","400","9"\n"b","8","3000","9"\n'
    assert curves_of_rates(imported(tmp_path, [table(tmp_path, text)], "csv")) == {
        "unknown engine": {1: [400.0], 8: [3000.0]}
    }


def test_steps_and_epochs_told_beside_one_another_are_not_shared_out(tmp_path: Path) -> None:
    text = "gpus,micro_batch,step_seconds,epoch_seconds\n1,8,0.2,100\n2,8,0.2,51\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    assert [(row["step_seconds"], row["epoch_seconds"]) for row in trial_rows(found)] == [
        (pytest.approx(0.2), 100),
        (pytest.approx(0.2), 51),
    ]
    assert "steps-from-epochs" not in {finding.kind for finding in found.findings}


def test_rates_that_differ_from_run_to_run_are_said_to_be_rates(tmp_path: Path) -> None:
    text = "gpus,images_per_second\n1,400\n1,500\n1,300\n"
    (unstable,) = [f for f in imported(tmp_path, [table(tmp_path, text)], "csv").findings if f.kind == "unstable"]
    assert "the images/s of 1 trial differ from run to run" in unstable.message


def test_a_table_copied_from_a_page_is_told_what_it_lacks(tmp_path: Path) -> None:
    path = table(tmp_path, "Table 3: Training on V100.\nGPUs images/s speedup\n1 363 1.0\n8 2860 7.9\n")
    with pytest.raises(RequestError, match="spaces stand between its columns"):
        guess([path])


def test_names_of_mixed_precision_are_one_series(tmp_path: Path) -> None:
    text = "gpus,precision,images_per_second\n1,Mixed,400\n8,mixed,3000\n16,AMP,5800\n1,tf32,200\n8,TF32,1500\n"
    assert curves_of_rates(imported(tmp_path, [table(tmp_path, text)], "csv")) == {
        "AMP": {1: [400.0], 8: [3000.0], 16: [5800.0]},
        "TF32": {1: [200.0], 8: [1500.0]},
    }


def test_a_batch_that_grows_with_the_gpus_is_that_of_all(tmp_path: Path) -> None:
    text = "gpus,Batch size,images_per_second\n1,64,400\n1,128,420\n2,128,780\n2,256,820\n4,256,1500\n4,512,1600\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    assert curves_of_rates(found) == {
        "micro-batch 64": {1: [400.0], 2: [780.0], 4: [1500.0]},
        "micro-batch 128": {1: [420.0], 2: [820.0], 4: [1600.0]},
    }
    assert "'Batch size' grows as the GPUs do: it is taken for the batch of all" in notes_of(found)


@pytest.mark.parametrize(
    ("text", "micro_batch"),
    [
        ("gpus,Batch size,images_per_second\n2,1,400\n4,2,780\n8,4,1500\n", None),
        ("gpus,Batch size,grad_accum,images_per_second\n2,12,4,400\n4,24,4,780\n8,48,4,1500\n", None),
        ("gpus,Batch size,images_per_second\n2,128,400\n4,256,780\n8,512,1500\n", 128),
    ],
)
def test_a_batch_that_cannot_be_that_of_all_or_is_told_otherwise_is_none(
    tmp_path: Path, text: str, micro_batch: int | None
) -> None:
    found = imported(tmp_path, [table(tmp_path, text)], "csv", micro_batch=micro_batch)
    assert [(row["gpus"], row["images_per_second"]) for row in trial_rows(found)] == [
        (2, pytest.approx(400)),
        (4, pytest.approx(780)),
        (8, pytest.approx(1500)),
    ]
    assert {trial.trial.train.micro_batch for trial in found.trials.values() if trial.batch_known} <= {micro_batch}
    assert "a batch is each GPU's or that of all: name its column micro_batch or global_batch" in notes_of(found)


def test_a_curve_goes_on_across_hosts_where_each_full_one_takes_as_many(tmp_path: Path) -> None:
    rows = "8,1,.63,64\n12,2,.66,64\n16,2,.68,64\n32,4,.70,64\n"
    found = imported(tmp_path, [table(tmp_path, "gpus,nodes,step_seconds,micro_batch\n" + rows)], "csv")
    (curve,) = found.curves
    assert [point.gpus for point in curve.points] == [8, 12, 16, 32]
    assert (curve.mode, curve.name) == ("strong-micro", "micro-batch 64")
    text = "gpus,layout,step_seconds,micro_batch\n8,1 node,.63,64\n16,2 nodes,.68,64\n"
    (curve,) = imported(tmp_path / "told", [table(tmp_path, text)], "csv").curves
    assert [point.gpus for point in curve.points] == [8, 16]


def test_ranks_on_one_host_and_on_a_host_each_stay_two_curves_and_share_the_rank_that_is_both(tmp_path: Path) -> None:
    rows = "1,1,.5,8\n2,1,.5,8\n4,1,.5,8\n2,2,.6,8\n4,4,.7,8\n"
    found = imported(tmp_path, [table(tmp_path, "gpus,nodes,step_seconds,micro_batch\n" + rows)], "csv")
    hosts = [[(p.gpus, found.trials[p.trial_id].trial.world.nodes) for p in curve.points] for curve in found.curves]
    assert sorted(hosts) == [[(1, 1), (2, 1), (4, 1)], [(1, 1), (2, 2), (4, 4)]]


def test_a_layout_that_tells_full_hosts_leaves_the_rest_to_the_last(tmp_path: Path) -> None:
    text = "gpus,layout,step_seconds,micro_batch\n4,8-gpus-per-node,1,8\n11,8-gpus-per-node,1,8\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    worlds = [found.trials[point.trial_id].trial.world for point in found.curves[0].points]
    assert [(one.size, one.nodes, one.ranks_per_node) for one in worlds] == [(4, 1, 4), (11, 2, 8)]


def test_a_batch_that_is_shared_out_is_one_curve_of_a_fixed_global_batch(tmp_path: Path) -> None:
    rows = "8,1,8.0,4,128\n16,2,4.1,4,64\n32,4,2.1,4,32\n64,8,1.1,2,32\n"
    text = "gpus,nodes,step_seconds,micro_batch,grad_accum\n" + rows
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    (curve,) = found.curves
    assert (curve.mode, curve.name) == ("strong-global", "global batch 4096")
    assert [point.gpus for point in curve.points] == [8, 16, 32, 64]


@pytest.mark.parametrize(
    ("columns", "cells", "batches"),
    [
        ("global_batch", ("4096", "4096"), [(512, 1), (256, 1)]),
        ("global_batch,micro_batch", ("4096,32", "4096,32"), [(32, 16), (32, 8)]),
        ("global_batch,grad_accum", ("4096,4", "4096,2"), [(128, 4), (128, 2)]),
        ("global_batch,micro_batch,grad_accum", ("4096,128,4", "4096,128,2"), [(128, 4), (128, 2)]),
    ],
)
def test_a_global_batch_tells_what_of_a_gpus_is_not_told(
    tmp_path: Path, columns: str, cells: tuple[str, str], batches: list[tuple[int, int]]
) -> None:
    text = f"gpus,step_seconds,{columns}\n8,2.0,{cells[0]}\n16,1.1,{cells[1]}\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    (curve,) = found.curves
    assert curve.mode == "strong-global"
    trains = [found.trials[point.trial_id].trial.train for point in curve.points]
    assert [(train.micro_batch, train.grad_accum) for train in trains] == batches


@pytest.mark.parametrize("cells", ["100,,", "4096,24,", "4096,32,8", "16,32,"])
def test_a_global_batch_that_does_not_share_out_is_told_with_its_row(tmp_path: Path, cells: str) -> None:
    text = f"gpus,step_seconds,global_batch,micro_batch,grad_accum\n8,2.0,4096,,\n8,2.0,{cells}\n"
    done = import_logs([table(tmp_path, text)], "csv", ImportOptions(), tmp_path / "results")
    assert done.study.imported is not None
    (problem,) = done.study.imported.problems
    assert f"line 3 (global_batch {cells.split(',')[0]} does not share out over 8 GPUs" in problem


def test_batches_that_were_each_measured_on_several_counts_make_no_global_one(tmp_path: Path) -> None:
    rows = "".join(f"{gpus},{1 + batch / 100},{batch}\n" for gpus in (1, 2) for batch in (32, 64))
    found = imported(tmp_path, [table(tmp_path, "gpus,step_seconds,micro_batch\n" + rows)], "csv")
    assert [(curve.mode, len(curve.points)) for curve in found.curves] == [("strong-micro", 2)] * 2


@pytest.mark.parametrize(
    ("last", "batch", "asked"),
    [("0.125", "64", "(64 on 1, 16 on 4)"), ("0.2", "", "which is not told"), ("0.4", "64", ""), ("0.7", "64", "")],
)
def test_steps_that_fall_with_the_ranks_are_questioned(tmp_path: Path, last: str, batch: str, asked: str) -> None:
    text = f"gpus,step_seconds,micro_batch\n1,0.5,{batch}\n4,{last},{batch}\n"
    done = import_logs([table(tmp_path, text)], "csv", ImportOptions(), tmp_path / "results")
    assert done.study.imported is not None
    questions = [note for note in done.study.imported.notes if "steps fall as 1/N" in note]
    assert [asked in note for note in questions] == ([True] if asked else [])


def test_models_without_a_name_here_are_told_apart_and_sized(tmp_path: Path) -> None:
    head = "gpus,step_seconds,micro_batch,engine,model,parameters\n"
    rows = "1,1,8,DDP,ResNet-50,25.6M\n2,1,8,DDP,ResNet-50,25.6M\n1,2,8,horovod,vit-b16,\n2,2,8,horovod,vit-b16,\n"
    found = imported(tmp_path, [table(tmp_path, head + rows)], "csv")
    by_name = {curve.name: found.trials[curve.points[0].trial_id].trial for curve in found.curves}
    resnet, vit = by_name["ddp, ResNet-50"], by_name["horovod, vit-b16"]
    assert (resnet.train.engine, resnet.model.unknown, parameters(resnet.model)) == ("ddp", True, 25_600_000)
    assert (vit.model.name, parameters(vit.model)) == ("vit-b16", 86_567_656)


@pytest.mark.parametrize(
    ("text", "count"),
    [("110M", 110_000_000), ("1.3B", 1_300_000_000), ("25557032", 25_557_032), ("86,567,656", 86_567_656)],
)
def test_parameters_as_people_write_them(text: str, count: int) -> None:
    assert counted(text) == count


@pytest.mark.parametrize("text", ["", "M", "-1M", "0", "1e9", "nan", "9" * 40, "110 Mio", "10000T"])
def test_parameters_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match="is no number of parameters"):
        counted(text)


def test_parameters_are_for_a_model_without_a_name_here(tmp_path: Path) -> None:
    path = table(tmp_path, "gpus,step_seconds\n1,1\n")
    with pytest.raises(RequestError, match="vit-b16 has 86,567,656"):
        import_logs([path], "csv", ImportOptions(model="vit-b16", parameters="86M"), tmp_path / "results")
    done = import_logs([path], "csv", ImportOptions(parameters="86M"), tmp_path / "results")
    assert [trial.model.parameter_count for trial in done.study.trials.values()] == [86_000_000]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpus,step_seconds,micro_batch\n16,0.2,8\n", True),
        ("gpus,step_seconds,micro_batch,nodes\n16,0.2,8,2\n", False),
        ("gpus,step_seconds,micro_batch\n1,0.2,8\n", False),
    ],
)
def test_on_how_many_hosts_it_ran_is_assumed_and_told(tmp_path: Path, text: str, told: bool) -> None:
    notes = read([table(tmp_path, text)], ImportOptions()).notes
    assert ("on how many hosts the GPUs were is not told (a column nodes): one is assumed" in notes) is told


@pytest.mark.parametrize(
    ("columns", "cells", "layout"),
    [
        ("nodes,gpus_per_node", "3,8", (24, 3)),
        ("# Nodes,GPUs/node", "2,4", (8, 2)),
        ("GPUs,GPUs per node", "12,8", (12, 2)),
        ("gpus,nodes,gpus_per_node", "12,2,8", (12, 2)),
        ("gpus,nodes,gpus_per_node", "12,3,8", (12, 3)),
        ("gpus,nodes,gpus_per_node", "8,2,4 (A100)", (8, 2)),
        ("gpus,layout,gpus_per_node", "4,one-gpu-per-node,4", (4, 4)),
        ("nodes,gpus_per_node", "2,8 GPUs", (16, 2)),
        ("Nodes,Node type", "2,8xV100", (16, 2)),
        ("nodes,gpus_per_node", "2,2x4 GPUs", (16, 2)),
        ("nodes,gpus_per_node", "3,", None),
        ("nodes,gpus_per_node", ",8", None),
        ("nodes,gpus_per_node", "2,10000000", None),
    ],
)
def test_gpus_of_a_node_and_nodes_tell_the_gpus(
    tmp_path: Path, columns: str, cells: str, layout: tuple[int, int] | None
) -> None:
    contents = read([table(tmp_path, f"{columns},step_seconds,micro_batch\n{cells},0.5,32\n")], ImportOptions())
    assert [(run.setting.gpus, run.setting.nodes) for run in contents.runs] == ([layout] if layout else [])
    assert bool(contents.problems) is (layout is None)
    assert not [note for note in contents.notes if "hosts" in note]


@pytest.mark.parametrize(("column", "cells", "runs"), [("", ["", "", ""], 1), (",run", [",a", ",b", ",c"], 3)])
def test_the_same_row_again_is_no_repeat(tmp_path: Path, column: str, cells: list[str], runs: int) -> None:
    """Unless a column says that it is another run."""
    rows = "".join(f"1,160,64{cell}\n" for cell in cells)
    found = read([table(tmp_path, f"gpus,images_per_second,micro_batch{column}\n{rows}")], ImportOptions())
    assert len(found.runs) == runs
    assert ("2 duplicate" in " ".join(found.problems)) is (runs == 1)


@pytest.mark.parametrize(("text", "seconds"), [("0:52:05", 3125.0), ("1:00:00.5", 3600.5), ("52:05", None)])
def test_hours_minutes_and_seconds(tmp_path: Path, text: str, seconds: float | None) -> None:
    """With one colon nobody knows whether minutes or hours come first."""
    rows = f"gpus,epoch_seconds,micro_batch\n2,{text},8\n1,5000,8\n"
    found = imported(tmp_path, [table(tmp_path, rows)], "csv", train_samples=3200)
    costs = {trial.trial.world.size: trial.epoch_costs for trial in found.trials.values()}
    assert costs == ({1: [5000.0]} | ({2: [seconds]} if seconds else {}))


@pytest.mark.parametrize("heading", ["Epoch time (h:mm:ss)", "epoch time [hh:mm:ss]"])
def test_a_heading_tells_hours_minutes_and_seconds(heading: str) -> None:
    assert Heading.of(heading) == Heading(heading, "epoch_seconds", 1.0)


def test_a_report_on_a_table_claims_nothing_that_it_lacks(tmp_path: Path) -> None:
    """No study file to save, no intervals from one run of each."""
    rows = "gpus,images_per_second,micro_batch\n1,160,64\n2,301,64\n4,585,64\n"
    found = imported(tmp_path, [table(tmp_path, rows)], "csv", train_samples=50_000)
    text = to_markdown(report_document(found))
    assert "Import the same files, with what was told of them" in text
    assert "Save this as" not in text
    assert "the study file is part of the report" not in text
    assert "1 run of a trial" in text
    assert "1 curve, 0 with intervals" in text


@pytest.mark.parametrize(
    ("heading", "column"),
    [
        ("Throughput per GPU (images/s)", "images_per_second_per_gpu"),
        ("per-GPU images/sec", "images_per_second_per_gpu"),
        ("Average throughput per device (img/sec)", "images_per_second_per_gpu"),
        ("single-gpu images/s", "images_per_second_per_gpu"),
        ("samples/s per rank", "images_per_second_per_gpu"),
        ("Per-worker throughput (samples/s)", "images_per_second_per_gpu"),
        ("per process img/s", "images_per_second_per_gpu"),
        ("throughput per node (img/s)", "images_per_second_per_node"),
        ("Per-host throughput (images/s)", "images_per_second_per_node"),
        ("samples/s/node", "images_per_second_per_node"),
        ("Throughput, 8 GPUs per node (img/s)", "images_per_second"),
        ("Throughput (images/s)", "images_per_second"),
        ("examples/sec", "images_per_second"),
        ("Throughput/device (img/s)", "images_per_second_per_gpu"),
        ("Speed / card (images/s)", "images_per_second_per_gpu"),
        ("speed/worker (img/s)", "images_per_second_per_gpu"),
        ("perf/rank samples/s", "images_per_second_per_gpu"),
        ("train/device_images_per_sec", "images_per_second_per_gpu"),
        ("Throughput/node (images/s)", "images_per_second_per_node"),
        ("throughput/samples_per_sec", "images_per_second"),
        ("train/local images/s", ""),
        ("Each GPU (img/s)", "images_per_second_per_gpu"),
        ("Throughput, each (img/s)", "images_per_second_per_gpu"),
        ("Each node (img/s)", "images_per_second_per_node"),
        ("Each run (img/s)", ""),
        ("Samples/s (global)", "images_per_second"),
        ("samples/s (per GPU)", "images_per_second_per_gpu"),
        ("Images/sec (BF16)", "images_per_second"),
        ("images/s (std)", ""),
        ("k examples/s", ""),
        ("64 per GPU, images/s", ""),
        ("throughput, 8 processes per GPU (images/s)", ""),
        ("k images/s", ""),
        ("Throughput, 1000 images/s", ""),
        ("Throughput x1000 images/s", ""),
        ("Throughput, thousands of images/s", ""),
        ("ResNet-50 images/s", "images_per_second"),
        ("Throughput (k images/s)", ""),
        ("ideal images/s", ""),
        ("linear scaling (images/s)", ""),
        ("Speedup vs 1 GPU (images/s)", ""),
    ],
)
def test_whose_rate_a_heading_tells(heading: str, column: str) -> None:
    """Of one GPU or of all, of a measurement or of an ideal; empty: none that is understood."""
    own = Heading.of(heading).column
    assert own == column or (not column and own not in SPEEDS)


@pytest.mark.parametrize(
    ("caption", "column"),
    [
        ("Per-GPU throughput (images/s)", "images_per_second_per_gpu"),
        ("Images/s at batch 64 per GPU", "images_per_second"),
        ("Batch 64 per GPU, in images/s", None),
        ("ViT-B/16, 64 per GPU, images/s", None),
        ("4 workers per GPU, images/s", None),
        ("We reach 5,800 images/s. Peak memory in GB:", None),
        ("We reach 5,800 images/s with ours:", None),
        ("Speedup over 1 GPU (baseline 400 images/s)", None),
        ("Scaling efficiency; throughput in images/s was measured on A100", None),
        ("Top-1 accuracy after training at 3,000 images/s", None),
        ("Throughput in thousand images/s", None),
        ("Throughput (x1000 images/s)", None),
        ("Epoch time (s): min, mean", "epoch_seconds"),
        ("Epoch time min/mean", None),
        ("ResNet-50, images/s", "images_per_second"),
        ("Throughput per node (images/s)", None),
        ("images/s per node", None),
        ("images/s on 8 GPUs per node", "images_per_second"),
    ],
)
def test_whose_rate_a_caption_tells(caption: str, column: str | None) -> None:
    told = speed_told([caption])
    assert (told.column if told else None) == column


def test_rates_of_each_gpu_are_those_of_all_in_the_report(tmp_path: Path) -> None:
    """400 images/s alone and 360 each of 16: 14.4 times as fast, and no 0.9 times."""
    rows = "gpus,Throughput per GPU (images/s),micro_batch\n1,400,64\n16,360,64\n"
    found = imported(tmp_path, [table(tmp_path, rows)], "csv", train_samples=50_000)
    (curve,) = found.curves
    assert [point.speedup.value for point in curve.points if point.speedup] == pytest.approx([1.0, 14.4])


@pytest.mark.parametrize(
    ("columns", "cells", "rates"),
    [
        ("nodes", ["1", "2", "4"], [3000, 5800, 11200]),
        ("GPUs per node", ["8", "8", "8"], [3000, 5800, 11200]),
        ("layout", ["1 node", "2 nodes", "4 nodes"], [3000, 5800, 11200]),
        ("cluster", ["a", "a", "a"], []),
    ],
)
def test_rates_of_a_node_are_those_of_all_nodes_where_these_are_told(
    tmp_path: Path, columns: str, cells: list[str], rates: list[float]
) -> None:
    told = zip((8, 16, 32), (3000, 2900, 2800), cells, strict=True)
    text = "".join(f"{gpus},{rate},{cell}\n" for gpus, rate, cell in told)
    path = table(tmp_path, f"gpus,throughput per node (img/s),{columns}\n{text}")
    if not rates:
        assert "on how many nodes it ran is not told" in " ".join(read([path], ImportOptions()).problems)
        return
    found = imported(tmp_path, [path], "csv")
    told_rates = [trial.images_per_second.value for trial in found.trials.values() if trial.images_per_second]
    assert told_rates == pytest.approx(rates)


@pytest.mark.parametrize(
    ("rows_told", "batches", "steps", "rates"),
    [
        # 64 a GPU; 256 of all; and batches that agree in neither: the rate stands and the batch stays unknown.
        ([(1, 0.160, 400), (2, 0.164, 780), (4, 0.170, 1505)], [64, 64, 64], [0.160, 0.164, 0.170], [400, 780, 1506]),
        ([(1, 0.640, 400), (2, 0.328, 780), (4, 0.170, 1505)], [256, 128, 64], [0.64, 0.328, 0.17], [400, 780, 1506]),
        ([(1, 1.3, 400), (2, 1.3, 780)], [None, None], [1.3, 1.3], [400, 780]),
    ],
)
def test_a_rate_beside_a_step_time_tells_the_batch(
    tmp_path: Path,
    rows_told: list[tuple[int, float, float]],
    batches: list[int | None],
    steps: list[float],
    rates: list[float],
) -> None:
    text = "".join(f"{gpus},{1000 * seconds:g},{rate}\n" for gpus, seconds, rate in rows_told)
    found = imported(tmp_path, [table(tmp_path, f"gpus,step_time_ms,images_per_second\n{text}")], "csv")
    trials = list(found.trials.values())
    assert [trial.trial.train.micro_batch if trial.batch_known else None for trial in trials] == batches
    assert [trial.step_seconds.value for trial in trials if trial.step_seconds] == pytest.approx(steps)
    told = [trial.images_per_second.value for trial in trials if trial.images_per_second]
    assert told == pytest.approx(rates, rel=2e-3)
    assert any("follows from images/s x step time" in note for note in notes_of(found)) is (None not in batches)


@pytest.mark.parametrize(("rate", "contradicts"), [(400, False), (395, False), (3200, True)])
def test_a_rate_that_contradicts_the_step_time_and_the_batch_is_named(
    tmp_path: Path, rate: int, contradicts: bool
) -> None:
    text = f"gpus,micro_batch,step_time_ms,images_per_second\n1,64,160,{rate}\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    ((_, trial),) = found.trials.items()
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(400)
    said = "in 1 row (line 2: 3200/s x 0.16 s are 512 images a GPU, and the batch is 64): images/s is ignored"
    assert [note for note in notes_of(found) if "contradict" in note] == (
        [f"images/s and step time contradict each other {said}"] if contradicts else []
    )


@pytest.mark.parametrize(
    ("heading", "column"),
    [
        ("gradient_accumulation_steps", "grad_accum"),
        ("grad accum", "grad_accum"),
        ("Gradient accumulation", "grad_accum"),
        ("per_device_train_batch_size", "micro_batch"),
        ("train_micro_batch_size_per_gpu", "micro_batch"),
        ("mbs", "micro_batch"),
        ("GBS", "global_batch"),
        ("train_batch_size", ""),
        ("bs", ""),
    ],
)
def test_names_of_batches(heading: str, column: str) -> None:
    """DeepSpeed calls the batch of all GPUs `train_batch_size`, and Hugging Face that of each: nobody knows."""
    own = Heading.of(heading).column
    assert own == column or (not column and own not in OWN)


def test_accumulation_by_its_usual_name_counts(tmp_path: Path) -> None:
    text = "gpus,micro_batch,gradient_accumulation_steps,step_time_s\n1,32,8,1\n2,32,4,0.52\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv")
    assert [trial.trial.global_batch for trial in found.trials.values()] == [256, 256]
    rates = [trial.images_per_second.value for trial in found.trials.values() if trial.images_per_second]
    assert rates == pytest.approx([256, 256 / 0.52])


@pytest.mark.parametrize("column", ["images_per_second", "step_seconds", "epoch_seconds"])
@pytest.mark.parametrize("batch", [None, 1, 64])
def test_a_batch_that_nobody_told_is_told_as_unknown(tmp_path: Path, column: str, batch: int | None) -> None:
    """Whatever the table holds; a batch of 1 that somebody told is one."""
    found = imported(tmp_path, [table(tmp_path, f"gpus,{column}\n1,400\n2,790\n")], "csv", micro_batch=batch)
    rows_of = trial_rows(found)
    assert [(row["micro_batch"], row["global_batch"]) for row in rows_of] == [
        (batch, batch and batch * gpus) for gpus in (1, 2)
    ]
    if column == "images_per_second":
        assert [row["images_per_second"] for row in rows_of] == pytest.approx([400, 790])


def test_types_of_gpus_that_each_ran_on_several_counts_are_curves_of_their_own(tmp_path: Path) -> None:
    rows_of = "A100,1,400\nA100,4,1560\nV100,8,1500\nV100,16,2900\n"
    found = imported(tmp_path, [table(tmp_path, f"gpu,gpus,images_per_second\n{rows_of}")], "csv")
    assert {curve.name: [point.gpus for point in curve.points] for curve in found.curves} == {
        "A100": [1, 4], "V100": [8, 16],
    }  # fmt: skip
    fewer = table(tmp_path, f"gpu,gpus,images_per_second\n{rows_of[:-13]}")
    few = imported(tmp_path / "few", [fewer], "csv")
    assert [[point.gpus for point in curve.points] for curve in few.curves] == [[1, 4, 8]]


@pytest.mark.parametrize(("steps", "unstable"), [((0.1, 0.2, 0.4), True), ((0.199, 0.2, 0.201), False)])
def test_runs_whose_steps_differ_are_unstable_though_no_epoch_is_told(
    tmp_path: Path, steps: tuple[float, ...], unstable: bool
) -> None:
    text = "".join(f"8,{run},{seconds}\n" for run, seconds in enumerate(steps))
    found = imported(tmp_path, [table(tmp_path, f"gpus,run,step_seconds\n{text}")], "csv")
    told = [finding.message for finding in found.findings if finding.kind == "unstable"]
    assert len(told) == unstable
    assert all("the step times of 1 trial differ from run to run by more than 5 % (standard" in said for said in told)


def test_without_the_steps_of_an_epoch_what_gives_them_is_asked_for(tmp_path: Path) -> None:
    text = "gpus,epoch time (min)\n8,60\n16,31\n"
    found = imported(tmp_path, [table(tmp_path, text)], "csv", micro_batch=64)
    refusal = evidence_of(tmp_path, found).refusal("to predict from")
    assert "tell how long epochs took and not how many steps these had" in str(refusal)
    assert "both --train-samples and --micro-batch" in str(refusal)
    both = imported(tmp_path / "both", [table(tmp_path, text)], "csv", micro_batch=64, train_samples=1_281_167)
    assert len(evidence_of(tmp_path, both).series) == 1


def test_a_rate_without_a_batch_is_predicted_as_a_rate(tmp_path: Path) -> None:
    """The batch is unknown to the forecast, and images/s is not."""
    path = table(tmp_path, "gpus,images_per_second\n8,3000\n16,5800\n")
    (series,) = evidence_of(tmp_path, imported(tmp_path, [path], "csv")).series
    assert [(point.batch_known, point.rate_known) for point in series.points] == [(False, True)] * 2
    timed = imported(tmp_path / "steps", [table(tmp_path, "gpus,step_seconds\n8,0.5\n")], "csv")
    ((point,),) = (series.points for series in evidence_of(tmp_path, timed).series)
    assert (point.batch_known, point.rate_known) == (False, False)


def test_what_a_caption_says_is_quoted_whole() -> None:
    assert speed_told(["Step time (ms) by GPU"]) == Heading("step time (ms)", "step_seconds", 1e-3)


@pytest.mark.parametrize(
    ("heading", "of_rows", "curves"),
    [
        ("batch size", ("64", "128", "256", "1024"), 1),  # grows with the GPUs; the last row is a second run on 4
        ("config", ("ddp-1", "ddp-2", "ddp-4", "ddp-4b"), 1),
        ("steps", ("100", "100", "100", "200"), 1),
        ("backbone", ("ViT-B", "ViT-B", "ViT-B", "ViT-L"), 2),
    ],
)
def test_what_grows_with_the_gpus_or_names_each_row_tells_no_curves_apart(
    tmp_path: Path, heading: str, of_rows: tuple[str, ...], curves: int
) -> None:
    measured = zip((1, 2, 4, 4), of_rows, (100, 200, 400, 390), strict=True)
    text = f"gpus,{heading},img/s\n" + "".join(f"{gpus},{cell},{rate}\n" for gpus, cell, rate in measured)
    contents = read([table(tmp_path, text)], ImportOptions())
    assert len({run.setting.series for run in contents.runs}) == curves
    assert any("taken for its repeats" in note for note in contents.notes) == (heading in ("batch size", "config"))


def test_a_heading_s_last_word_says_what_it_is(tmp_path: Path) -> None:
    """ "Node type" and "scaling" tell how it ran; "job" does not, nor what a run took."""
    for heading, curves in (("node type", 2), ("scaling", 2), ("job", 1), ("loss", 1)):
        rows = "".join(
            f"{gpus},{cell},{gpus * rate}\n" for gpus in (1, 2, 4) for cell, rate in (("a", 100), ("b", 300))
        )
        contents = read([table(tmp_path, f"gpus,{heading},img/s\n{rows}")], ImportOptions())
        assert len({run.setting.series for run in contents.runs}) == curves, heading


def test_steps_a_second_beside_the_seconds_of_a_step_are_no_second_curve(tmp_path: Path) -> None:
    contents = read([table(tmp_path, "gpus,Iterations/s,Step time (s)\n1,2.0,0.5\n2,1.9,0.526\n")], ImportOptions())
    assert [(run.setting.gpus, run.setting.series) for run in contents.runs] == [(1, None), (2, None)]


def test_a_row_that_lacks_its_figures_is_no_name_of_those_below(tmp_path: Path) -> None:
    contents = read([table(tmp_path, "gpus,img/s,loss\n1,100,2.1\nOOM at 2 GPUs,,\n4,380,2.2\n")], ImportOptions())
    assert [(run.setting.gpus, run.setting.series) for run in contents.runs] == [(1, None), (4, None)]
    assert len(contents.problems) == 1
