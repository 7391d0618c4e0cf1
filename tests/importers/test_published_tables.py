"""Tables as people publish them: in READMEs, on pages and in papers, with counts in rows or columns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from importers.logs import imported
from vitscale.analysis import Analysis
from vitscale.errors import RequestError
from vitscale.importers.contents import Options
from vitscale.importers.headings import Count, speed_told
from vitscale.importers.importing import guess, import_logs

RATES = {1: 363.5, 8: 2860.0, 16: 5510.0}
"""The truth in each of the forms below, in images/s by GPU count."""


def document(folder: Path, text: str, name: str = "README.md") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def rates_of(found: Analysis) -> dict[str, dict[int, float]]:
    """Images/s by GPU count of each curve."""
    told: dict[str, dict[int, float]] = {}
    for curve in found.curves:
        for point in curve.points:
            rate = found.trials[point.trial_id].images_per_second
            assert rate is not None
            told.setdefault(curve.name, {})[point.gpus] = rate.value
    return told


def test_rows_that_hold_another_speed_are_named(tmp_path: Path) -> None:
    text = "Throughput (images/s)\n\n| Model | 1 GPU | 8 GPUs |\n|--|--|--|\n| ViT-B | 400 | 3,000 |\n"
    path = document(tmp_path, f"{text}| ViT-B, lr 1e-3 | 410 | 3,100 |\n| MFU | 0.4 | 0.38 |\n")
    found = imported(tmp_path, [path], "csv")
    assert rates_of(found) == {"ViT-B": {1: pytest.approx(400), 8: pytest.approx(3000)}}
    assert found.study.imported is not None
    named = "rows are left out that by their name hold another speed or none: 'ViT-B, lr 1e-3', 'MFU'"
    assert named in found.study.imported.notes


def test_a_heading_of_eval_is_no_rate_whatever_its_cells_say(tmp_path: Path) -> None:
    path = document(tmp_path, "| Setup | Inference throughput |\n|--|--|\n| 1 GPU | 4 img/s |\n| 8 GPUs | 30 img/s |\n")
    with pytest.raises(RequestError, match="has no column of times; it has 'Setup, Inference throughput'"):
        guess([path])


def test_columns_with_units_in_their_cells_are_series(tmp_path: Path) -> None:
    text = "| GPUs | FP32 | FP16 |\n|--|--|--|\n| 1 | 400 img/s | 900 img/s |\n| 8 | 3,100 img/s | 6,700 img/s |\n"
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    assert sorted(rates_of(found).values(), key=str) == [
        {1: pytest.approx(400), 8: pytest.approx(3100)},
        {1: pytest.approx(900), 8: pytest.approx(6700)},
    ]
    assert {trial.trial.train.precision for trial in found.trials.values()} == {"fp32", "fp16"}


@pytest.mark.parametrize("heading", ["Throughput/device", "Each GPU", "Per device"])
def test_a_heading_of_each_gpu_is_one_whatever_its_cells_say(tmp_path: Path, heading: str) -> None:
    text = f"| GPUs | {heading} |\n|--|--|\n| 1 | 100 img/s |\n| 8 | 88 img/s |\n"
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    assert list(rates_of(found).values()) == [pytest.approx({1: 100, 8: 704})]


@pytest.mark.parametrize(
    "head", ["Nodes | GPUs per node | images/s", "Nodes | Instance | images/s", "GPUs per node | Nodes | images/s"]
)
def test_gpus_of_a_node_in_cells_are_not_all(tmp_path: Path, head: str) -> None:
    order = "| {1} | {0} | {2} |\n" if head.startswith("GPUs") else "| {0} | {1} | {2} |\n"
    cells = [(1, "4 GPUs", 400), (1, "8 GPUs", 780), (2, "8 GPUs", 1500)]
    rows = "".join(order.format(*row) for row in cells)
    found = imported(tmp_path, [document(tmp_path, f"| {head} |\n|--|--|--|\n{rows}")], "csv")
    assert list(rates_of(found).values()) == [pytest.approx({4: 400, 8: 780, 16: 1500})]


@pytest.mark.parametrize("head", ["Model | Pretrained on | images/s", "Nodes | GPU | images/s"])
def test_counts_that_may_be_of_something_else_are_none(tmp_path: Path, head: str) -> None:
    path = document(tmp_path, f"| {head} |\n|--|--|--|\n| 1 | 8xV100 | 780 |\n| 2 | 4xV100 | 300 |\n")
    with pytest.raises(RequestError, match="has no column gpus, which counts them"):
        guess([path])


FORMS = {
    "counts and units in the cells": "| Setup | Throughput |\n|--|--|\n| 1 GPU | 363.5 img/s |\n"
    "| 8 GPUs | 2,860 img/s |\n| 16 GPUs (2 nodes) | 5,510 img/s |\n",
    "a column for each count": "## Throughput (images/sec)\n\n| Model | 1 GPU | 8 GPUs | 16 GPUs (2 nodes) |\n"
    "|---|---|---|---|\n| vit-b16 | 363.5 | 2,860 | **5,510** |\n",
    "counts of a GPU type": "Images/s of training:\n\n| 1x V100 | 8x V100 | 16x V100 |\n|--|--|--|\n"
    "| 363.5 | 2,860 | 5510 ± 12 |\n",
    "units in the headings": "| | 1 GPU (img/s) | 8 GPUs (img/s) | 16 GPUs (img/s) |\n|-|-|-|-|\n"
    "| ours | 363.5 | 2860 | 5510 |\n| theirs | - | OOM | n/a |\n",
    "a row of counts": "| GPUs | 1 | 8 | 16 |\n|---|---|---|---|\n| Images/sec | 363.5 | 2,860 | 5,510 |\n"
    "| Speedup | 1 | 7.87 | 15.2 |\n",
    "a row of counts under a caption": "Samples per second\n\n| # GPUs | 1 | 8 | 16 |\n|---|---|---|---|\n"
    "| DDP | 363.5 | 2,860 | 5,510 |\n| Scaling efficiency | 1 | 0.98 | 0.95 |\n",
    "CSV with a column for each count": "batch,1 GPU (images/s),8 GPUs (images/s),16 GPUs (images/s)\n"
    "large,363.5,2860,5510\n",
    "CSV with a row of counts": "gpus;1;8;16\nimages/s;363.5;2860;5510\n",
    "HTML": "<h2>Speed</h2>\n<table>\n<tr><th>GPUs</th><th>Images/sec</th></tr>\n<tr><td>1<td>363.5</td></tr>\n"
    "<tr><td>8</td><td><b>2,860</b></td></tr>\n<tr>\n<td>16</td>\n<td>5,510</td>\n</tr></table>\n",
    "HTML with two rows of names": "<table><caption>Training speed, images/s</caption><thead>"
    "<tr><th rowspan=2>Model</th><th colspan=3>GPUs</th></tr>\n<tr><th>1</th><th>8</th><th>16</th></tr></thead>"
    "<tr><td>vit-b16</td><td>363.5</td><td>2860</td><td>5510</td></tr></table>",
    "Markdown without outer bars": "Speed\n\nGPUs | Images/sec\n--- | ---:\n1 | 363.5\n8 | 2860\n16 | 5510\n\n"
    "and | so on\n",
    "marks in Markdown": "| &#35;GPUs | Images&nbsp;/&nbsp;sec<sup>1</sup> | note |\n|--|--|--|\n"
    "| 1 | 363.5 | a \\| b |\n| 8 | <b>2,860</b> |\\||\n| 16 | 5&nbsp;510<sup>1</sup> | <br> |\n",
    "marks in HTML": "<table><tr><th>GPUs<th>img/s<sup>1</sup><tr><td>1<td>363.5<tr><td>8<td>2&#8239;860<sup>2</sup>"
    "<tr><td>16<td>5'510</table>",
    "units in the cells": "| GPUs | Throughput (img/s) |\n|--|--|\n| 1 GPU | 363.5 img/s |\n| 8 (1 node) | 2.86k |\n"
    "| 16 GPUs (2 nodes) | ~5,510 img/s [1] |\n",
    "types in the cells": "gpus,images/s\n1xV100,363.5\n8xV100,2860*\n16 V100,5 510 (15.2x)\n",
    "steps in a second": "gpus,micro_batch,it/s\n1,100,3.635\n8,100,3.575\n16,100,3.44375\n",
    "a comment above": "# on our cluster, in May\n\ngpus,img/s\n1,363.5\n8,2860\n16,5510\n",
    "a spreadsheet's first line": "sep=;\ngpus;img/s\n1;363,5\n8;2860\n16;5510\n",
    "carriage returns": "gpus,img/s\r1,363.5\r8,2860\r16,5510\r",
    "a line break in a heading": 'gpus,"images/s\n(mean)",x\n1,363.5,a\n8,2860,b\n16,5510,c\n',
    "JSON": json.dumps([{"gpus": gpus, "images_per_second": rate, "by": None} for gpus, rate in RATES.items()]),
    "JSON, an object a line": "".join(
        json.dumps({"GPUs": gpus, "img/s": rate}) + "\n" for gpus, rate in RATES.items()
    ),
}  # fmt: skip


MERGED = {
    "Markdown": "| Model | GPUs | img/s |\n|---|---|---|\n| ViT-B | 1 | 400 |\n| | 2 | 780 |\n| ViT-L | 1 | 120 |\n"
    "| | 2 | 236 |\n",
    "CSV": "Backbone,GPUs,img/s\nViT-B,1,400\n,2,780\nViT-L,1,120\n,2,236\n",
    "HTML": "<table><tr><th>Model<th>GPUs<th>images/s<tr><td rowspan=2>ViT-B<td>1<td>400<tr><td>2<td>780"
    "<tr><td rowspan=2>ViT-L<td>1<td>120<tr><td>2<td>236</table>",
    "sections": "| GPUs | img/s |\n|---|---|\n| **ViT-B** | |\n| 1 | 400 |\n| 2 | 780 |\n| **ViT-L** | |\n| 1 | 120 |\n"
    "| 2 | 236 |\n",
    "sections across": "<table><tr><th>GPUs<th>images/s<tr><td colspan=2>ViT-B<tr><td>1<td>400<tr><td>2<td>780"
    "<tr><td colspan=2>ViT-L<tr><td>1<td>120<tr><td>2<td>236</table>",
    "sections over names": "Images/s\n\n| | 1 GPU | 2 GPUs |\n|--|--|--|\n| ViT-B | | |\n| DDP | 400 | 780 |\n"
    "| ViT-L | | |\n| DDP | 120 | 236 |\n",
}  # fmt: skip


@pytest.mark.parametrize("form", MERGED)
def test_a_name_of_several_rows_is_that_of_each(tmp_path: Path, form: str) -> None:
    found = imported(tmp_path, [document(tmp_path, MERGED[form])], "csv")
    assert rates_of(found) == {"ViT-B": pytest.approx({1: 400, 2: 780}), "ViT-L": pytest.approx({1: 120, 2: 236})}
    assert found.problems == ()
    assert found.study.imported is not None
    told = [note for note in found.study.imported.notes if "above them" in note or "below them" in note]
    assert len(told) == (form != "HTML")


def test_a_number_of_several_rows_is_that_of_each(tmp_path: Path) -> None:
    text = (
        "<table><tr><th>Micro batch<th>GPUs<th>images/s<tr><td rowspan=2>32<td>1<td>400"
        "<tr><td>2<td>780<tr><td>64<td>1<td>420</table>"
    )
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    sizes = [(t.trial.train.micro_batch, t.trial.world.size) for t in found.trials.values()]
    assert sorted(sizes) == [(32, 1), (32, 2), (64, 1)]


@pytest.mark.parametrize(
    "text",
    [
        "Images/s\n\n| | 1 GPU | 2 GPUs |\n|--|--|--|\n| ViT-B | 400 | 780 |\n| ViT-H | | |\n| ViT-L | 120 | 236 |\n",
        "model,gpus,img/s\nViT-B,1,400\nViT-B,2,780\nViT-L,1,120\nViT-L,2,236\n,4,99\n",
    ],
    ids=["a row without cells", "names in each row"],
)
def test_what_merely_lacks_something_is_not_filled(tmp_path: Path, text: str) -> None:
    rates = rates_of(imported(tmp_path, [document(tmp_path, text)], "csv"))
    assert rates["ViT-B"] == pytest.approx({1: 400, 2: 780})
    assert rates["ViT-L"] == pytest.approx({1: 120, 2: 236})


def test_rows_of_other_quantities_under_a_caption_of_speeds_are_none(tmp_path: Path) -> None:
    others = [
        "Batch size", "Batch size per GPU", "Power (W)", "Time to train (h)", "MFU", "vs. baseline", "Cost ($)",
        "GPU hours", "Peak memory", "Tokens/s", "Wait (s)", "Latency",
    ]  # fmt: skip
    rows = "".join(f"| {name} | 2 | 2 |\n" for name in others)
    for at, head in enumerate(("GPUs | 1 | 8", "| 1 GPU | 8 GPUs")):
        text = f"Training throughput (images/s)\n\n| {head} |\n|--|--|--|\n| Timesharing | 400 | 3000 |\n{rows}"
        found = imported(tmp_path / str(at), [document(tmp_path / str(at), text)], "csv")
        assert list(rates_of(found).values()) == [pytest.approx({1: 400, 8: 3000})]


def test_ranks_in_columns_are_no_counts(tmp_path: Path) -> None:
    text = "Step time (ms)\n\n| step | GPU 0 | GPU 1 | GPU 2 |\n|--|--|--|--|\n| 100 | 210 | 214 | 209 |\n"
    with pytest.raises(RequestError, match="tells its format"):
        guess([document(tmp_path, text)])


def test_sizes_in_brackets_and_captions_of_a_rate_and_more_leave_no_row_out(tmp_path: Path) -> None:
    """ "Swin (S)" is no time in seconds; what a caption says behind its unit takes that from no cell."""
    text = "Training throughput in images/s and scaling efficiency\n\n| model | 1 GPU | 8 GPUs |\n|--|--|--|\n"
    text += "| Swin (T) | 60 | 440 |\n| Swin (S) | 50 | 350 |\n| ViT (H) | 10 | 70 |\n"
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    assert sorted(rates_of(found).values(), key=str) == [
        {1: 10.0, 8: pytest.approx(70)}, {1: 50.0, 8: pytest.approx(350)}, {1: 60.0, 8: pytest.approx(440)},
    ]  # fmt: skip


def test_a_title_of_training_outweighs_a_sentence_on_inference(tmp_path: Path) -> None:
    text = "# Training throughput\n\nFor inference see below.\n\n"
    text += "| GPUs | Images/sec |\n|--|--|\n| 1 | 400 |\n| 8 | 3100 |\n"
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    assert list(rates_of(found).values()) == [{1: pytest.approx(400), 8: pytest.approx(3100)}]


TABLE = "| GPUs | Images/sec |\n|--|--|\n| 1 | {} |\n| 8 | {} |\n\n"


def test_a_caption_tells_what_is_no_training(tmp_path: Path) -> None:
    text = f"# Performance\n\nTraining:\n\n{TABLE.format(400, 3000)}Inference:\n\n{TABLE.format(1400, 11000)}"
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    assert list(rates_of(found).values()) == [pytest.approx({1: 400, 8: 3000})]
    assert found.study.imported is not None
    assert "left out: the table at line 12 is not of training: 'Inference:'" in found.study.imported.notes


def test_a_table_of_inference_alone_is_refused_and_one_of_a_papers_evaluation_told(tmp_path: Path) -> None:
    path = document(tmp_path, f"# Inference\n\n{TABLE.format(1400, 11000)}")
    with pytest.raises(RequestError, match=r"line 3 of 'README\.md' is not of training: 'Inference'"):
        guess([path])
    found = imported(tmp_path, [document(tmp_path, f"# Evaluation\n\n{TABLE.format(400, 3000)}")], "csv")
    assert found.study.imported is not None
    assert "the table under 'Evaluation' is taken for one of training" in found.study.imported.notes
    trained = document(tmp_path / "both", f"# Training and inference\n\n{TABLE.format(400, 3000)}")
    assert list(rates_of(imported(tmp_path / "both", [trained], "csv")).values()) == [pytest.approx({1: 400, 8: 3000})]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_tells_the_same(tmp_path: Path, form: str) -> None:
    path = document(tmp_path, FORMS[form])
    assert guess([path]) == "csv"
    found = imported(tmp_path, [path], "csv")
    (rates,) = rates_of(found).values()
    assert rates == pytest.approx(RATES)
    assert found.problems == ()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_what_spreadsheets_save_as_unicode_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "times.txt"
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    path.write_bytes(f"{mark}GPUs\timg/s\r\n1\t363,5\r\n8\t2860\r\n16\t5510\r\n".encode(encoding))
    assert guess([path]) == "csv"
    (rates,) = rates_of(imported(tmp_path, [path], "csv")).values()
    assert rates == pytest.approx(RATES)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("| GPUs | step time (s) |\n|--|--|\n| 1 | 210 GB |\n| 2 | 0.2 s |\n", "line 3 ('210 GB' is no number)"),
        ("| GPUs | img/s |\n|--|--|\n| 1 | 400 img/s/GPU |\n| 2 | 780 |\n", "line 3 ('400 img/s/GPU' is no number)"),
        ("| GPUs | img/s |\n|--|--|\n| 1 | 10<sup>3</sup> images |\n| 2 | 780 |\n", "line 3 ('10 [3] images' is no"),
        (
            "| GPUs | micro_batch | img/s |\n|--|--|--|\n| 1 | 4k | 400 |\n| 2 | 8 | 780 |\n",
            "line 3 ('4k' is no number)",
        ),
    ],
)
def test_a_cell_of_another_unit_than_its_columns_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    assert [trial.trial.world.size for trial in found.trials.values()] == [2]
    assert problem in " ".join(found.problems)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("GPUs,epoch time\n1,20m48s\n2,10m24s\n4,5m12s\n", (1248, 624, 312)),
        ("GPUs,Epoch time\n1,1h 20min\n2,41 min\n4,21 minutes 30 s\n", (4800, 2460, 1290)),
        ("GPUs,Epoch time\n1,0:20:48\n2,0:10:24\n4,0:05:12\n", (1248, 624, 312)),
        ("GPUs,Epoch time (s)\n1,20 min\n2,10.5 min\n4,324\n", (1200, 630, 324)),
        ("GPUs,Epoch time (min)\n1,1 h 20 min\n2,41\n4,0:21:30\n", (4800, 2460, 1290)),
        ("| GPUs | 1 | 2 | 4 |\n|--|--|--|--|\n| Epoch time | 20m48s | 10m24s | 312 sec |\n", (1248, 624, 312)),
    ],
)
def test_durations_tell_their_own_units(tmp_path: Path, text: str, seconds: tuple[float, ...]) -> None:
    found = imported(tmp_path, [document(tmp_path, text, "times.md" if "|" in text else "times.csv")], "csv")
    assert found.problems == ()
    assert [trial.epoch_seconds and trial.epoch_seconds.value for trial in found.trials.values()] == [*seconds]


def test_steps_in_several_units_are_of_one_column(tmp_path: Path) -> None:
    text = (
        "| GPUs | Step time | of it data |\n|--|--|--|\n| 1 | 120 ms | 3 ms |\n| 2 | 131ms | 4 |\n| 4 | 0.15 s | 5 |\n"
    )
    found = imported(tmp_path, [document(tmp_path, text)], "csv", micro_batch=64)
    steps = [trial.step_seconds and trial.step_seconds.value for trial in found.trials.values()]
    assert steps == pytest.approx([0.12, 0.131, 0.15])


@pytest.mark.parametrize(
    "text",
    [
        "GPUs,Throughput\n1,400img/s\n8,3.1k img/s\n",
        "| model | 1 GPU | 8 GPUs |\n|--|--|--|\n| vit-b16 | 400 img/s | 3.1K img/s |\n",
    ],
)
def test_rates_tell_their_own_unit(tmp_path: Path, text: str) -> None:
    found = imported(tmp_path, [document(tmp_path, text, "rates.md" if "|" in text else "rates.csv")], "csv")
    (rates,) = rates_of(found).values()
    assert rates == pytest.approx({1: 400, 8: 3100})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("| | 1 GPU | 8 GPUs |\n|--|--|--|\n| Step time (ms) | 201 | 215 |\n| Speedup | 1 | 7.5 |\n", (0.201, 0.215)),
        ("| Metric | 1 GPU | 8 GPUs |\n|--|--|--|\n| Step time | 201 ms | 0.215 s |\n", (0.201, 0.215)),
        ("GPUs,Batch time (ms)\n1,201\n8,215\n", (0.201, 0.215)),
        ("Num. GPUs,Mean step duration (s)\n1,0.201\n8,0.215\n", (0.201, 0.215)),
    ],
)
def test_rows_and_columns_named_by_a_time_of_steps(tmp_path: Path, text: str, seconds: tuple[float, ...]) -> None:
    path = document(tmp_path, text, "times.md" if "|" in text else "times.csv")
    found = imported(tmp_path, [path], "csv", micro_batch=64)
    steps = [trial.step_seconds and trial.step_seconds.value for trial in found.trials.values()]
    assert steps == pytest.approx(seconds)


def test_a_heading_of_hours_or_minutes_says_what_a_colon_parts(tmp_path: Path) -> None:
    for unit, cells, seconds in (("h", ("2:05", "0:20"), [7500, 1200]), ("min", ("20:50", "5:12"), [1250, 312])):
        text = f"GPUs,Time per epoch ({unit})\n1,{cells[0]}\n8,{cells[1]}\n"
        found = imported(tmp_path / unit, [document(tmp_path / unit, text, "times.csv")], "csv")
        assert [trial.epoch_seconds and trial.epoch_seconds.value for trial in found.trials.values()] == seconds


def test_a_second_table_in_a_csv_file_is_not_read_under_the_first_headings(tmp_path: Path) -> None:
    path = document(tmp_path, "gpus,images/s\n1,402\n8,3104\n\ngpus,step_ms\n1,159\n8,165\n", "times.csv")
    found = imported(tmp_path, [path], "csv")
    (rates,) = rates_of(found).values()
    assert rates == pytest.approx({1: 402, 8: 3104})
    assert "line 5 (another table begins" in " ".join(found.problems)


@pytest.mark.parametrize(
    ("heading", "batch"),
    [
        ("Accum", (64, 8)), ("Grad. accum.", (64, 8)), ("Effective BS", (8, 1)), ("BS/GPU", (8, 1)),
        ("Batch size per rank", (8, 1)),
    ],
)  # fmt: skip
def test_short_names_of_batches_are_understood(tmp_path: Path, heading: str, batch: tuple[int, int]) -> None:
    found = imported(tmp_path, [document(tmp_path, f"GPUs,micro_batch,{heading},img/s\n1,64,8,402\n", "times.csv")
                     if "ccum" in heading else
                     document(tmp_path, f"GPUs,{heading},img/s\n1,8,402\n", "times.csv")], "csv")  # fmt: skip
    (trial,) = found.trials.values()
    assert (trial.trial.train.micro_batch, trial.trial.train.grad_accum) == batch


@pytest.mark.parametrize("word", ["Predicted", "Simulated", "Normalized", "Relative", "Upper bound,"])
def test_forecasts_and_bounds_are_no_measurements(tmp_path: Path, word: str) -> None:
    path = document(tmp_path, f"| GPUs | {word} images/s |\n|--|--|\n| 1 | 402 |\n| 8 | 3104 |\n")
    with pytest.raises(RequestError):
        guess([path])


@pytest.mark.parametrize(
    ("heading", "cells", "nodes"),
    [
        ("GPUs", ("8 (1x8)", "16 (2x8)"), [1, 2]),
        ("GPUs", ("8 = 1 x 8", "16 = 2 x 8"), [1, 2]),
        ("GPUs", ("1x8", "2\u00d78"), [1, 2]),
        ("Hardware", ("8\u00d7A100", "16\u00d7A100"), [1, 1]),
        ("Devices", ("8 \u00d7 A100", "16 \u00d7 A100"), [1, 1]),
    ],
)
def test_gpus_laid_out_over_nodes(tmp_path: Path, heading: str, cells: tuple[str, str], nodes: list[int]) -> None:
    text = f"| {heading} | img/s |\n|--|--|\n| {cells[0]} | 3000 |\n| {cells[1]} | 5800 |\n"
    worlds = [trial.trial.world for trial in imported(tmp_path, [document(tmp_path, text)], "csv").trials.values()]
    assert [(world.size, world.nodes) for world in worlds] == [(8, nodes[0]), (16, nodes[1])]


@pytest.mark.parametrize("said", ["# Throughput per GPU", "Table 1: Per-GPU training throughput."])
def test_a_caption_tells_rates_of_each_gpu(tmp_path: Path, said: str) -> None:
    table = "\n\n| GPUs | Throughput (img/s) |\n|--|--|\n| 1 | 402 |\n| 8 | 388 |\n"
    (rates,) = rates_of(imported(tmp_path, [document(tmp_path, said + table)], "csv")).values()
    assert rates == pytest.approx({1: 402, 8: 8 * 388})
    several = said + "\n\n| GPUs | DDP (img/s) | FSDP (img/s) |\n|--|--|--|\n| 1 | 402 | 390 |\n| 8 | 388 | 370 |\n"
    curves = rates_of(imported(tmp_path / "two", [document(tmp_path / "two", several)], "csv")).values()
    assert sorted(rates[8] for rates in curves) == pytest.approx([8 * 370, 8 * 388])
    of_all = "# Throughput, batch size 64 per GPU" + table.replace("388", "3104")
    (rates,) = rates_of(imported(tmp_path / "all", [document(tmp_path / "all", of_all)], "csv")).values()
    assert rates == pytest.approx({1: 402, 8: 3104})


def test_rows_of_evaluation_are_left_out(tmp_path: Path) -> None:
    rows = "".join(
        f"| {gpus} | {phase} | {rate * gpus} |\n" for gpus in (1, 8) for phase, rate in (("train", 400), ("eval", 1400))
    )
    found = imported(tmp_path, [document(tmp_path, f"| GPUs | Phase | img/s |\n|--|--|--|\n{rows}")], "csv")
    (rates,) = rates_of(found).values()
    assert rates == pytest.approx({1: 400, 8: 3200})
    assert "(it is of eval)" in " ".join(found.problems)


def test_a_file_given_twice_is_no_repeat(tmp_path: Path) -> None:
    path = document(tmp_path, TABLE.format(400, 3000))
    with pytest.raises(RequestError, match=r"'README\.md' is given twice"):
        imported(tmp_path, [path, path], "csv")


@pytest.mark.parametrize("cells", [("5 GB", "4 GB"), ("5m12s", "about 3"), ("20:48", "10:24")])
def test_cells_that_may_be_no_durations_tell_nothing(tmp_path: Path, cells: tuple[str, str]) -> None:
    path = document(tmp_path, f"GPUs,epoch time\n1,{cells[0]}\n2,{cells[1]}\n", "times.csv")
    with pytest.raises(RequestError, match="only the unit of 'epoch time' is missing"):
        imported(tmp_path, [path], "csv")


def test_gpus_in_cells_tell_their_type_and_hosts(tmp_path: Path) -> None:
    path = document(tmp_path, "gpus,images/s\n8xA100-80GB,3000\n16 A100s (2 nodes),5800\n", "times.csv")
    trials = list(imported(tmp_path, [path], "csv").trials.values())
    assert [(trial.trial.world.size, trial.trial.world.nodes) for trial in trials] == [(8, 1), (16, 2)]
    assert [trial.environment and trial.environment.devices for trial in trials] == [("A100",), ("A100",)]


def test_loose_names_of_precisions_and_stages_are_understood(tmp_path: Path) -> None:
    """TF32 sends what fp32 does; what AMP is, fp16 or bf16, nobody says: both keep their rows apart."""
    rows = "".join(f"| {gpus} | {name} | ZeRO-2 | {gpus * rate} |\n" for name, rate in (("TF32", 400), ("AMP", 700),
                   ("bfloat16", 900)) for gpus in (1, 4))  # fmt: skip
    path = document(tmp_path, f"| GPUs | Precision | zero_stage | img/s |\n|--|--|--|--|\n{rows}")
    found = imported(tmp_path, [path], "csv")
    told = {trial.trial.train.precision for trial in found.trials.values()}
    assert told == {"fp32", "bf16"}
    assert {trial.trial.train.zero_stage for trial in found.trials.values()} == {2}
    assert [sorted(rates.values()) for rates in rates_of(found).values()] == [
        pytest.approx([rate, 4 * rate]) for rate in (400, 700, 900)
    ]


def test_the_precision_of_the_only_speed_is_told_by_its_heading(tmp_path: Path) -> None:
    path = document(tmp_path, "gpus,Images/sec (BF16)\n1,400\n2,780\n", "times.csv")
    found = imported(tmp_path, [path], "csv")
    assert {trial.trial.train.precision for trial in found.trials.values()} == {"bf16"}


def test_speeds_side_by_side_are_series(tmp_path: Path) -> None:
    text = (
        "| GPUs | Batch / GPU | Throughput - FP32 (img/s) | Throughput - mixed precision (img/s) | FP32 speedup |\n"
        "|--|--|--|--|--|\n| 1 | 96 | 363.5 | 1300 | 1.0 |\n| 8 | 96 | 2860 | N/A | 7.87 |\n"
        "| 16 | 96 | 5510 | 19900 | 15.2 |\n"
    )
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    rates = rates_of(found)
    assert {name.removeprefix("micro-batch 96, ") for name in rates} == {"FP32", "mixed precision"}
    assert sorted(rates.values(), key=len) == [
        pytest.approx({1: 1300, 16: 19900}), pytest.approx({1: 363.5, 8: 2860, 16: 5510}),
    ]  # fmt: skip
    trains = {trial.trial.train.micro_batch for trial in found.trials.values()}
    assert trains == {96}


def test_a_column_of_names_is_a_series_and_one_of_dates_is_not(tmp_path: Path) -> None:
    rows = "".join(f"{gpus},{name},{date},{gpus * rate}\n" for date, (name, rate, gpus) in enumerate(
        [("Method A", 100, 1), ("Method A", 90, 4), ("Method B", 80, 1), ("Method B", 75, 4)]
    ))  # fmt: skip
    path = document(tmp_path, "gpus,method,day,images_per_second\n" + rows.replace(",0,", ",May 0,"), "times.csv")
    found = imported(tmp_path, [path], "csv")
    assert rates_of(found) == {"Method A": {1: 100.0, 4: 360.0}, "Method B": {1: 80.0, 4: pytest.approx(300.0)}}
    again = "gpus,day,images_per_second\n1,Monday,100\n1,Tuesday,101\n4,Friday,360\n4,Sunday,361\n"
    (rates,) = rates_of(imported(tmp_path / "days", [document(tmp_path / "days", again, "times.csv")], "csv")).values()
    assert set(rates) == {1, 4}


def test_all_tables_of_training_are_taken_and_named_by_their_headings(tmp_path: Path) -> None:
    table = "| GPUs | Images/sec |\n|--|--|\n| 1 | {} |\n| 8 | {} |\n\n"
    text = (
        f"# Training on A100\n{table.format(400, 3100)}# Inference\n{table.format(1000, 8000)}"
        f"# Training on V100\n{table.format(200, 1500)}"
    )
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    assert rates_of(found) == {
        "Training on A100": pytest.approx({1: 400, 8: 3100}),
        "Training on V100": pytest.approx({1: 200, 8: 1500}),
    }


def test_tables_that_are_left_out_are_named(tmp_path: Path) -> None:
    text = (
        "| GPUs | Images/sec |\n|--|--|\n| 1 | 400 |\n\n| Model | 1 GPU | 8 GPUs |\n|--|--|--|\n| A | 1 | 8 |\n\n"
        "# Inference\n| GPUs | Images/sec |\n|--|--|\n| 1 | 4000 |\n"
    )
    found = imported(tmp_path, [document(tmp_path, text)], "csv")
    assert list(rates_of(found).values()) == [{1: 400.0}]
    assert found.study.imported is not None
    assert [note for note in found.study.imported.notes if note.startswith("left out")] == [
        "left out: the table at line 5 does not say what its cells are (--cells SPEED)",
        "left out: the table at line 10 is not of training: 'Inference'",
    ]


def test_cells_of_nobody_are_asked_about(tmp_path: Path) -> None:
    path = document(tmp_path, "| Model | 1 GPU | 8 GPUs |\n|--|--|--|\n| A | 0.5 | 0.6 |\n")
    with pytest.raises(RequestError, match=re.escape("--cells step_seconds")):
        guess([path])
    assert guess([path], "step_seconds") == "csv"
    found = imported(tmp_path, [path], "csv", cells="step_seconds", micro_batch=8)
    (curve,) = found.curves
    seconds = [found.trials[point.trial_id].step_seconds for point in curve.points]
    assert [each and each.value for each in seconds] == [0.5, 0.6]
    with pytest.raises(RequestError, match="step_seconds"):
        import_logs([path], "csv", Options(cells="seconds"), tmp_path / "wrong")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("16 GPUs (2 nodes)", (16, 2, "")),
        ("2 nodes (16 GPUs)", (16, 2, "")),
        ("8xV100", (8, None, "V100")),
        ("GPUs: 8", (8, None, "")),
        ("1x V100 32GB GPU", (1, None, "V100")),
        ("2x8 GPUs", (16, 2, "")),
        ("128 x 8 GPUs", (1024, 128, "")),
        ("2x8 A100", (16, 2, "A100")),
        ("2x8xV100 GPUs", (16, 2, "V100")),
        ("4 nodes x 8 GPUs", (32, 4, "")),
        ("2x8 GPUs (2 nodes)", (16, 2, "")),
        ("2x8 GPUs (4 nodes)", None),
        ("2x4x8 GPUs", None),
        ("8 GPUs (224x224)", None),
        ("8x80GB A100 GPUs", None),
        ("8 A100", (8, None, "A100")),
        ("64 H100s", (64, None, "H100")),
        ("8xA100-80GB", (8, None, "A100")),
        ("8xA100 (80GB)", (8, None, "A100")),
        ("8 models", None),
        ("8 GPU speedup", None),
        ("Batch 8 GPUs", None),
        ("0 GPUs", None),
        ("8", None),
    ],
)
def test_counts_in_headings(text: str, told: tuple[int, int | None, str] | None) -> None:
    count = Count.of(text)
    assert (count and (count.gpus, count.nodes, count.gpu)) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Throughput in images/s on V100", ("images_per_second", 1.0)),
        ("speed (images/s per GPU)", ("images_per_second_per_gpu", 1.0)),
        ("Step time in ms", ("step_seconds", 1e-3)),
        ("minutes per epoch", ("epoch_seconds", 60.0)),
        ("Inference images/s", None),
        ("images/s and step time (ms)", None),
        ("step time (ms) and step time (s)", None),
        ("Throughput", None),
    ],
)
def test_speeds_in_captions(text: str, told: tuple[str, float] | None) -> None:
    speed = speed_told([text])
    assert (speed and (speed.column, speed.factor)) == told
