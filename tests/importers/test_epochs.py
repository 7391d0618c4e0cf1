"""A table of epochs becomes trials, curves and the times it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from importers.logs import epoch_rows, epoch_table, imported
from vitscale import store
from vitscale.errors import RequestError, StoreError
from vitscale.importers.contents import ImportOptions
from vitscale.importers.importing import import_logs


def test_an_epoch_is_the_slowest_rank_and_a_run_the_median_epoch(tmp_path: Path) -> None:
    rows = epoch_rows(2, [[100.0, 110.0], [130.0, 90.0], [120.0, 125.0]])
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    ((_, trial),) = found.trials.items()
    assert [epoch.elapsed_seconds for epoch in trial.epochs] == [110.0, 130.0, 125.0]
    assert trial.epoch_costs == [125.0]
    # 50,000 images on 2 x 64: 390 steps, and one of 80 images: 40 of each rank's 64.
    assert trial.step_seconds is not None
    assert trial.step_seconds.value == pytest.approx(125.0 / (390 + 40 / 64))
    assert trial.images_per_second is not None
    assert trial.images_per_second.value == pytest.approx(50_000 / 125.0)
    assert trial.run_figures[0].pace.source == "epochs"
    assert trial.epochs[1].train_loss == pytest.approx(1.0)
    assert trial.epochs[1].train_accuracy == pytest.approx(0.2)


def test_speedup_and_efficiency_follow(tmp_path: Path) -> None:
    rows = [*epoch_rows(1, [[400.0]] * 3), *epoch_rows(2, [[220.0, 210.0]] * 3), *epoch_rows(4, [[125.0] * 4] * 3)]
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    (curve,) = found.curves
    assert curve.mode == "strong-micro"
    efficiencies = [point.efficiency.value for point in curve.points if point.efficiency]
    assert efficiencies == pytest.approx([1.0, 400 / 220 / 2, 400 / 125 / 4])


def test_strong_and_weak_in_one_file(tmp_path: Path) -> None:
    rows = []
    for gpus in (1, 2, 4):
        rows += epoch_rows(gpus, [[100.0] * gpus], fraction=1.0)
        rows += epoch_rows(gpus, [[30.0] * gpus], fraction=round(0.1 * gpus, 1))
    rows += epoch_rows(3, [[40.0] * 3], fraction=0.5)
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    by_mode = [(curve.mode, [point.gpus for point in curve.points]) for curve in found.curves]
    assert by_mode == [("strong-micro", [1, 2, 4]), ("strong-micro", [3]), ("weak", [1, 2, 4])]
    assert found.curves[1].labels["data.fraction"] == 0.5


def test_names_say_what_differs_and_nothing_else(tmp_path: Path) -> None:
    rows = [
        *epoch_rows(1, [[100.0]], micro_batch=16),
        *epoch_rows(2, [[60.0, 60.0]], micro_batch=16),
        *epoch_rows(1, [[90.0]], cluster="south", layout="one-gpu-per-node", micro_batch=64),
        *epoch_rows(2, [[50.0, 50.0]], cluster="south", layout="one-gpu-per-node", micro_batch=64),
    ]
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    assert [curve.name for curve in found.curves] == [
        "north, one node, micro-batch 16",
        "south, one GPU per node, micro-batch 64",
    ]
    assert [trial.trial.world.nodes for trial in found.trials.values()] == [1, 1, 1, 2]


def test_a_single_series_has_a_name_too(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    path.write_text("gpus,micro_batch,epoch_seconds\n1,8,10\n2,8,6\n")
    found = imported(tmp_path, [path], "epochs", train_samples=1000)
    assert [curve.name for curve in found.curves] == ["micro-batch 8"]


def test_the_same_setting_on_another_cluster_is_another_trial(tmp_path: Path) -> None:
    rows = [*epoch_rows(1, [[100.0]], cluster="north"), *epoch_rows(1, [[80.0]], cluster="south", gpu="A100")]
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    assert len(found.trials) == 2
    assert {t.environment.devices for t in found.trials.values() if t.environment} == {("Tesla T4",), ("A100",)}


def test_one_cluster_with_two_types_of_gpu_is_two_curves(tmp_path: Path) -> None:
    rows = []
    for gpu, seconds in (("Tesla T4", 100.0), ("A100", 20.0)):
        rows += [*epoch_rows(1, [[seconds]], gpu=gpu), *epoch_rows(2, [[seconds / 2] * 2], gpu=gpu)]
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    assert [curve.name for curve in found.curves] == ["Tesla T4", "A100"]
    speedups = [curve.points[1].speedup.value for curve in found.curves if curve.points[1].speedup]
    assert speedups == pytest.approx([2.0, 2.0])


def test_runs_of_one_setting_are_repeats(tmp_path: Path) -> None:
    rows = [row for run, seconds in enumerate((100.0, 102.0, 98.0)) for row in epoch_rows(1, [[seconds]], run=run)]
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    ((_, trial),) = found.trials.items()
    assert sorted(trial.epoch_costs) == [98.0, 100.0, 102.0]


def test_without_a_column_of_runs_the_same_epoch_of_a_setting_again_is_of_another_run(tmp_path: Path) -> None:
    """As trackers write their runs: a name that says nothing here, and several at each GPU count."""
    path, more = tmp_path / "runs.csv", tmp_path / "more.csv"
    path.write_text(
        "Name,gpus,epoch,epoch_seconds\n"
        "sleepy-1,1,1,100\nsleepy-1,1,2,104\nmerry-2,1,1,100\nmerry-2,1,2,90\nmerry-2,1,2,90\nglad-3,2,1,55\n"
    )
    more.write_text("Name,gpus,epoch,epoch_seconds\nglad-3,2,2,57\nshy-4,2,1,60\nshy-4,2,2,62\n")
    found = imported(tmp_path, [path, more], "epochs")
    costs = {trial.trial.world.size: sorted(trial.epoch_costs) for trial in found.trials.values()}
    assert costs == {1: [95, 102], 2: [56, 61]}
    [told] = [problem for problem in found.problems if "duplicate" in problem]
    assert "line 6 (the same as the line before)" in told


@pytest.mark.parametrize(
    ("files", "costs"),
    [
        # Repeats in a file each, in whole seconds: an epoch that took as long in another run is no duplicate.
        ([[(1, 100), (2, 97), (3, 98)], [(1, 100), (2, 99), (3, 99)], [(1, 103), (2, 96), (3, 98)]], [98, 99, 98]),
        ([[(1, 100)], [(1, 100)]], [100, 100]),
        # A run that was resumed: what it did again contradicts what it had said.
        ([[(1, 10), (2, 20), (3, 30), (2, 21), (3, 31), (4, 40)]], [25]),
        # One that goes on in another file.
        ([[(1, 10), (2, 20)], [(3, 30)]], [20]),
    ],
)
def test_repeats_resumed_and_continued_runs_without_a_column_of_runs(
    tmp_path: Path, files: list[list[tuple[int, int]]], costs: list[float]
) -> None:
    paths = [tmp_path / f"{number}.csv" for number in range(len(files))]
    for path, rows in zip(paths, files, strict=True):
        path.write_text("gpus,epoch,epoch_seconds\n" + "".join(f"1,{epoch},{seconds}\n" for epoch, seconds in rows))
    ((_, trial),) = imported(tmp_path, paths, "epochs").trials.items()
    assert trial.epoch_costs == costs


def test_rows_of_hosts_are_no_runs(tmp_path: Path) -> None:
    path = tmp_path / "hosts.csv"
    path.write_text("gpus,hostname,epoch,epoch_seconds\n8,a,1,10\n8,b,1,10\n8,a,2,12\n8,b,2,12\n")
    ((_, trial),) = imported(tmp_path, [path], "epochs").trials.items()
    assert len(trial.run_figures) == 1


def test_an_epoch_that_a_rank_lacks_is_in_no_time_and_named(tmp_path: Path) -> None:
    rows = epoch_rows(2, [[100.0, 101.0], [90.0, 500.0], [102.0, 103.0]])
    lacking = [row for row in rows if ",2,1,500.0," not in row]
    assert len(lacking) == len(rows) - 1
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", lacking)], "epochs")
    ((_, trial),) = found.trials.items()
    assert [epoch.elapsed_seconds for epoch in trial.epochs] == [101.0, None, 103.0]
    assert trial.epoch_costs == [102.0]
    assert any("rank 1 of run 1 on 2 GPUs" in problem and "epoch 2" in problem for problem in found.problems)


def test_missing_epochs_and_missing_ranks_are_named(tmp_path: Path) -> None:
    rows = [row for row in epoch_rows(3, [[9.0, 9.5, 9.7]] * 4) if ",3,2,0," not in row and ",3,2,1," not in row]
    rows = [row for row in rows if ",3,2,2," not in row and row.split(",")[9] != "1"]
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    ((_, trial),) = found.trials.items()
    assert trial.epoch_costs == [9.7]
    assert any("epochs are missing" in problem and "(epoch 2)" in problem for problem in found.problems)
    assert any("ranks are missing" in problem and "(rank 1)" in problem for problem in found.problems)
    assert "some-ranks" in {verdict.kind for verdict in found.findings}


def test_broken_duplicate_and_cut_off_lines_are_counted_and_named(tmp_path: Path) -> None:
    rows = epoch_rows(1, [[100.0], [101.0], [102.0]])
    bad = [rows[0].replace("100.0", text) for text in ("nan", "inf", "-3", "0", "1e99", "soon", "")]
    path = epoch_table(
        tmp_path / "epochs.csv", [rows[0], *bad, rows[0], rows[1], rows[1].replace("101.0", "55"), rows[2]]
    )
    path.write_text(path.read_text() + "north,Tesla T4,single")
    found = imported(tmp_path, [path], "epochs")
    ((_, trial),) = found.trials.items()
    assert trial.epoch_costs == [101.0]
    told = " ".join(found.problems)
    assert "7 broken lines left out: line 3 ('nan' is no number)" in told
    assert "and 2 more" in told
    assert "1 duplicate line left out: line 10" in told
    assert "1 contradicting line left out: line 12" in told
    assert "1 cut-off line left out: line 14" in told


def test_a_last_line_without_a_break_counts_unless_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    path.write_text("gpus,micro_batch,epoch_seconds\n1,8,100.25\n2,8,60.25")
    assert len(imported(tmp_path, [path], "epochs").trials) == 2
    path.write_text("gpus,micro_batch,epoch_seconds\n1,8,100.25\n2,8,60")
    found = imported(tmp_path / "other", [path], "epochs")
    assert len(found.trials) == 1
    assert any("cut-off" in problem for problem in found.problems)


def test_counted_from_zero_or_from_one(tmp_path: Path) -> None:
    head = "gpus,micro_batch,epoch,epoch_seconds\n"
    for name, first in (("one", 1), ("zero", 0)):
        path = tmp_path / f"{name}.csv"
        path.write_text(head + "".join(f"1,8,{first + k},{10 + k}\n" for k in range(3)))
        found = imported(tmp_path / name, [path], "epochs")
        ((_, trial),) = found.trials.items()
        assert [epoch.epoch for epoch in trial.epochs] == [0, 1, 2]


def test_without_the_size_of_the_dataset_epochs_stand_and_steps_are_unknown(tmp_path: Path) -> None:
    rows = epoch_rows(1, [[100.0]], dataset="orchids")
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    ((_, trial),) = found.trials.items()
    assert trial.epoch_costs == [100.0]
    assert trial.step_seconds is None
    assert trial.images_per_second is None
    assert found.study.imported is not None
    assert any("--train-samples" in note for note in found.study.imported.notes)


def test_minutes_and_seconds_are_told_by_the_hours_of_their_column(tmp_path: Path) -> None:
    head = "gpus,epoch,epoch_seconds\n"
    (tmp_path / "a.csv").write_text(f"{head}8,1,1:02:10\n8,2,59:30\n")
    ((_, trial),) = imported(tmp_path, [tmp_path / "a.csv"], "epochs").trials.items()
    assert [epoch.elapsed_seconds for epoch in trial.epochs] == [3730, 3570]
    (tmp_path / "b.csv").write_text(f"{head}8,1,62:10\n8,2,59:30\n")
    with pytest.raises(StoreError, match=r"'62:10' is no number\), line 3 \(59:30 may be .* hours: write 0:59:30\)"):
        imported(tmp_path / "b", [tmp_path / "b.csv"], "epochs")


def test_a_column_is_not_both_taken_and_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("gpus,run,iteration,epoch_seconds\n8,1,100,200\n8,1,200,201\n")
    found = imported(tmp_path, [tmp_path / "a.csv"], "epochs")
    assert found.study.imported is not None
    assert [n for n in found.study.imported.notes if "iteration" in n] == [
        "columns that mean nothing here are ignored: iteration"
    ]


def test_layouts_that_tell_nothing_are_one_host_and_noted(tmp_path: Path) -> None:
    rows = epoch_rows(4, [[100.0] * 4], layout="scattered")
    found = imported(tmp_path, [epoch_table(tmp_path / "epochs.csv", rows)], "epochs")
    ((_, trial),) = found.trials.items()
    assert trial.trial.world.nodes == 1
    assert found.study.imported is not None
    assert any("scattered" in note for note in found.study.imported.notes)


def test_nothing_usable_is_refused_and_nothing_written(tmp_path: Path) -> None:
    path = epoch_table(tmp_path / "epochs.csv", ["a,b", "c"])
    with pytest.raises(StoreError, match="2 broken lines"):
        import_logs([path], "epochs", ImportOptions(), tmp_path / "results")
    assert [entry.name for entry in tmp_path.iterdir()] == ["epochs.csv"]


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    path.write_text("gpu,epoch_seconds\nT4,3\n")
    with pytest.raises(RequestError, match="lacks the column gpus"):
        import_logs([path], "epochs", ImportOptions(), tmp_path / "results")


def test_the_record_is_an_ordinary_one(tmp_path: Path) -> None:
    rows = epoch_rows(2, [[100.0, 110.0]] * 2)
    path = epoch_table(tmp_path / "epochs.csv", rows)
    import_logs([path], "epochs", ImportOptions(model="vit-b16"), tmp_path / "results")
    (run,) = store.load(tmp_path / "results").runs
    assert run.header.imported is not None
    assert [one.name for one in run.header.imported.files] == ["epochs.csv"]
    assert run.ranks[1].start is not None
    assert run.ranks[1].start.environment.device.name == "Tesla T4"
    assert run.ranks[0].model is not None
    assert run.ranks[0].model.parameters == 85_806_346
    assert str(tmp_path) not in "".join(p.read_text() for p in (tmp_path / "results").rglob("*.json"))


def test_epochs_in_hours_minutes_and_seconds(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    path.write_text("gpus,micro_batch,run,epoch_seconds\n8,64,1,0:10:00\n8,64,2,0:10:04\n")
    ((_, trial),) = imported(tmp_path, [path], "epochs", train_samples=50_000).trials.items()
    assert trial.epoch_costs == [600.0, 604.0]
