"""Files with two meanings are refused: both are said, and what is written for each is then read as it was meant."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitscale.cli import app
from vitscale.errors import RequestError
from vitscale.importers.contents import ImportOptions
from vitscale.importers.headings import HeadingCount
from vitscale.importers.importing import guess, import_logs
from vitscale.store import load


def table(folder: Path, *rows: str) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join((*rows, "")))
    return path


def refusal(path: Path, *more: Path, **options: object) -> str:
    """The message with which files are refused; nothing is written."""
    given = ImportOptions(**options)  # type: ignore[arg-type]
    results = path.parent / "refused"
    with pytest.raises(RequestError) as caught:
        import_logs([path, *more], guess([path, *more], given.cells), given, results)
    assert caught.value.exit_code == 2
    assert not results.exists()
    return str(caught.value)


def worlds(path: Path, **options: object) -> list[tuple[int, int]]:
    """(GPUs, nodes) of each run of a table."""
    results = path.parent / "results"
    import_logs([path], "csv", ImportOptions(**options), results)  # type: ignore[arg-type]
    return sorted((run.header.trial.world.size, run.header.trial.world.nodes) for run in load(results).runs)


def rates(path: Path, **options: object) -> list[float]:
    """Images/s of all GPUs of each run of a table, by GPUs."""
    results = path.parent / "results"
    import_logs([path], "csv", ImportOptions(**options), results)  # type: ignore[arg-type]
    runs = sorted(load(results).runs, key=lambda run: run.header.trial.world.size)
    steps = [(run.header.trial.world.size, run.ranks[0].steps[0]) for run in runs]
    return [gpus * step.images / step.seconds for gpus, step in steps]


# --- letters after a count -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["2node4gpus", "2nodes4gpus", "2host4gpu", "2n4gpus", "2Machines4 GPUs", "2node4"])
def test_a_count_of_nodes_joined_to_gpus_is_no_gpu_type(tmp_path: Path, cell: str) -> None:
    names = "setup" if "gpu" in cell.lower() else "gpus"
    said = refusal(table(tmp_path, f"{names},samples/s", "8 GPUs,30.1", f"{cell},22.6"))
    assert f"'{cell}' of 'table.csv' does not say how many GPUs there were" in said
    assert "2 nodes with 4 GPUs each (columns nodes and gpus_per_node: 2 and 4)" in said
    assert "4 GPUs in all on 2 nodes (columns gpus and nodes: 4 and 2)" in said
    assert "2 GPUs of a type" in said


def test_what_it_says_to_write_is_read_so(tmp_path: Path) -> None:
    assert worlds(table(tmp_path, "nodes,gpus_per_node,samples/s", "2,4,22.6")) == [(8, 2)]
    (tmp_path / "second").mkdir()
    assert worlds(table(tmp_path / "second", "gpus,nodes,samples/s", "4,2,22.6")) == [(4, 2)]
    (tmp_path / "third").mkdir()
    assert worlds(table(tmp_path / "third", "gpus,gpu,samples/s", "2,NODE4,22.6")) == [(2, 1)]


def test_letters_that_name_neither_a_host_nor_a_gpu_are_asked_about(tmp_path: Path) -> None:
    said = refusal(table(tmp_path, "setup,samples/s", "1abc4gpus,5.7", "2abc4gpus,9.9"))
    assert "1 GPU of a type ABC4 (columns gpus and gpu: 1 and ABC4); or 4 GPUs (a column gpus: 4)" in said


def test_a_column_for_each_such_count_is_asked_about(tmp_path: Path) -> None:
    said = refusal(table(tmp_path, "what,2node4gpus,4node4gpus", "images/s,100,180"), cells="images_per_second")
    assert "2 nodes with 4 GPUs each" in said


@pytest.mark.parametrize(
    "cell",
    ["8A100 GPUs", "8xA100", "8 V100 GPUs", "8T4gpus", "8RTX3090 gpus", "8gb200 gpus", "8mi300x GPUs", "8xFOO9 gpus",
     "8gpus", "2x4 GPUs", "8 GPUs (2 nodes)", "8 (2 nodes)", "8 L40S GPUs", "8H100s", "8 ranks", "8"],
)  # fmt: skip
def test_names_of_gpus_and_plain_counts_stay_plain(tmp_path: Path, cell: str) -> None:
    path = table(tmp_path, "gpus,samples/s", f"{cell},22.6")
    assert [gpus for gpus, _ in worlds(path)] == [8]
    assert HeadingCount.readings(cell) == ()


# --- rates that fall -------------------------------------------------------------------------------------------------

FALLING = ("# of gpus,img/sec", "1,200", "2,190", "4,160", "8,20")


def test_rates_that_fall_as_gpus_grow_are_asked_about(tmp_path: Path) -> None:
    said = refusal(table(tmp_path, *FALLING))
    assert "'img/sec' of 'table.csv' falls as GPUs grow (200 on 1, 20 on 8)" in said
    assert "each GPU's (then 8 GPUs make 160 together), or that of all (then each of 8 makes 2.5)" in said
    assert "--cells images_per_second_per_gpu" in said
    assert "--cells images_per_second if" in said


@pytest.mark.parametrize(
    ("cells", "of_all"),
    [("images_per_second_per_gpu", [200, 380, 640, 160]), ("images_per_second", [200, 190, 160, 20])],
)
def test_the_option_says_whose_rates_they_are(tmp_path: Path, cells: str, of_all: list[float]) -> None:
    assert rates(table(tmp_path, *FALLING), cells=cells) == pytest.approx(of_all)


@pytest.mark.parametrize(
    "rows",
    [
        ("gpus,images_per_second", "1,200", "8,20"),  # this program's name for those of all
        ("gpus,total img/s", "1,200", "8,20"),
        ("gpus,img/s (global)", "1,200", "8,20"),
        ("gpus,img/s", "1,200", "8,201"),
        ("gpus,img/s", "8,200", "8,20"),
        ("gpus,img/s", "1,200", "4,600", "8,150"),  # it grew as GPUs did, and then fell
        ("gpus,img/s,step time (s)", "1,200,0.32", "8,20,25.6"),  # a batch of 64 in all, whose step takes longer
        ("gpus,series,img/s", "1,ddp,200", "8,ddp,1500", "1,slow,200", "8,slow,150"),
    ],
)
def test_rates_that_are_plain_are_read_as_before(tmp_path: Path, rows: tuple[str, ...]) -> None:
    assert worlds(table(tmp_path, *rows))


def test_a_table_in_a_document_is_asked_about_too(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text("| GPUs | images/s |\n| --- | --- |\n| 1 | 200 |\n| 8 | 180 |\n")
    assert "falls as GPUs grow (200 on 1, 180 on 8)" in refusal(path)
    assert rates(path, cells="images_per_second_per_gpu") == pytest.approx([200, 1440])


# --- files that are no repeats ---------------------------------------------------------------------------------------


def mmcv_log(folder: Path, name: str, *seconds: float) -> Path:
    path = folder / name
    line = (
        "2023-05-18 12:{:02}:41,836 - mmpose - INFO - Epoch [1][{}/586]\tlr: 2.361e-06, eta: 19:48:10, time: {:.3f}, "
        "data_time: 0.034, memory: 10886, loss: 4.9561\n"
    )
    path.write_text("".join(line.format(at, 100 * at, each) for at, each in enumerate(seconds, 1)))
    return path


def test_two_logs_that_differ_by_more_than_their_spread_are_not_taken_for_repeats(tmp_path: Path) -> None:
    old, new = mmcv_log(tmp_path, "old.log", 0.58, 0.544, 0.546), mmcv_log(tmp_path, "new.log", 1.67, 1.61, 1.6)
    said = refusal(old, new, gpus=8)
    assert "'old.log' and 'new.log' would be repeats of one trial" in said
    assert "differ by more than their own spread (half of the times are 0.544 to 0.546 s, and 1.6 to 1.61 s)" in said
    assert "import each into a folder of its own with -o" in said
    assert "add --as-repeats" in said


def test_each_by_itself_and_all_as_repeats_are_imported(tmp_path: Path) -> None:
    old, new = mmcv_log(tmp_path, "old.log", 0.58, 0.544, 0.546), mmcv_log(tmp_path, "new.log", 1.67, 1.61, 1.6)

    def error(*words: str) -> BaseException | None:
        return CliRunner().invoke(app, ["import", *words, "--gpus", "8"]).exception

    assert isinstance(error(str(old), str(new), "-o", str(tmp_path / "both")), RequestError)
    assert error(str(old), str(new), "-o", str(tmp_path / "both"), "--as-repeats") is None
    assert len({run.header.repeat for run in load(tmp_path / "both").runs}) == 2
    assert error(str(old), "-o", str(tmp_path / "old")) is None
    assert error(str(new), "-o", str(tmp_path / "new")) is None


@pytest.mark.parametrize(
    "second",
    [
        (0.58, 0.60, 0.61),  # a tenth slower: as other nodes and days are
        (0.9, 0.3, 0.95, 0.4),  # its own steps differ as much
        (1.6,),  # one time has no spread
    ],
)
def test_repeats_that_may_be_some_are_taken_together(tmp_path: Path, second: tuple[float, ...]) -> None:
    logs = [mmcv_log(tmp_path, "a.log", 0.55, 0.544, 0.546), mmcv_log(tmp_path, "b.log", *second)]
    done = import_logs(logs, "train-log", ImportOptions(gpus=8), tmp_path / "results")
    assert len(done.runs) == 2
    assert len(done.study.trials) == 1


def test_logs_of_unlike_counts_are_no_repeats_and_may_differ(tmp_path: Path) -> None:
    logs = [mmcv_log(tmp_path, "one.log", 0.5, 0.51, 0.5), mmcv_log(tmp_path, "eight.log", 1.6, 1.61, 1.6)]
    done = import_logs(logs, "train-log", ImportOptions(each_gpus=(1, 8)), tmp_path / "results")
    assert len(done.study.trials) == 2
    assert all(math.isfinite(run.run.ranks[0].steps[0].seconds) for run in done.runs)
