from __future__ import annotations

import pytest

from prediction_factory import estimate, make_forecast, make_prediction, make_score, study
from report_forms import markdown
from vitscale.pages.predicted import predict_document
from vitscale.pages.prediction_table import prediction_tables
from vitscale.prediction.results import Forecast
from vitscale.present.document import Cell, Table
from vitscale.present.terminal import lines


def printed(forecast: Forecast, width: int = 80) -> str:
    return "\n".join(line.plain for line in lines(predict_document(forecast), width, verbose=True))


def tables(forecast: Forecast) -> tuple[Table, ...]:
    return prediction_tables(forecast)[0]


def column(table: Table, name: str) -> tuple[str, list[Cell]]:
    """(unit, cells) of a column."""
    at = [column.name for column in table.columns].index(name)
    return table.columns[at].unit, [row[at] for _, row in table.rows]


def texts(table: Table, name: str) -> list[str]:
    return [cell.text for cell in column(table, name)[1]]


def test_a_table_has_a_line_per_rank_count_with_both_intervals() -> None:
    (table,) = tables(make_forecast(study()))
    assert table.title == "ddp, strong-micro: measured on 1, 2 and 4 ranks, 1 host"
    assert texts(table, "label") == ["interpolated", "interpolated", "interpolated", "extrapolated", "prior-driven"]
    (step_unit, steps), (epoch_unit, epochs) = column(table, "step"), column(table, "epoch")
    # On 8 ranks a step takes 100 + 2 x 8 + 20 ms, and 16 of them an epoch.
    assert (step_unit, steps[3]) == ("ms", Cell("136", "131\u2013141", run="122\u2013150"))
    assert (epoch_unit, epochs[3]) == ("s", Cell("2.18", "2.09\u20132.26", run="1.96\u20132.39"))
    assert texts(table, "speedup")[3] == "6.00"
    assert table.columns[0].name == "ranks"
    assert texts(table, "ranks") == ["1", "2", "4", "8 = 2 x 4", "16 = 4 x 4"]


def test_columns_of_which_nothing_is_known_are_left_out_and_told() -> None:
    (table,) = tables(make_forecast(study()))
    assert not {"energy/epoch", "cost/epoch", "chance of OOM"} & {column.name for column in table.columns}
    assert "Energy: unavailable: no run recorded it." in table.notes
    known = make_prediction(8, joules_per_epoch=estimate(4200), cost_per_epoch=estimate(1.5), oom_chance=0.2)
    (full,) = tables(make_forecast(study(), [known]))
    ((_, row),) = full.rows
    assert [cell.text for cell in row[-4:-1]] == ["20 %", "4.20", "1.50"]


def test_what_is_known_of_some_rank_counts_is_a_dash_at_others() -> None:
    rows = [make_prediction(4), make_prediction(8, wait_seconds=None)]
    (table,) = tables(make_forecast(study(), rows))
    assert texts(table, "exposed wait") == ["4.00", "\u2013"]


def test_synchronised_norms_have_a_column_where_they_take_time() -> None:
    (without,) = tables(make_forecast(study()))
    assert "synchronised norm" not in [column.name for column in without.columns]
    forecast = make_forecast(study(), [make_prediction(8, norm_seconds=estimate(0.007))])
    unit, (cell,) = column(tables(forecast)[0], "synchronised norm")
    assert (unit, cell.text) == ("ms", "7.00")
    assert "sync." in printed(forecast)


def test_each_series_has_its_own_table_and_what_holds_of_all_is_told_once() -> None:
    rows = [make_prediction(8), make_prediction(8, series="fsdp2"), make_prediction(16, series="fsdp2")]
    laid, alike = prediction_tables(make_forecast(study(), rows))
    assert [(table.title.partition(":")[0], texts(table, "ranks")) for table in laid] == [
        ("ddp, strong-micro", ["8 = 2 x 4"]),
        ("fsdp2, strong-micro", ["8 = 2 x 4", "16 = 4 x 4"]),
    ]
    assert "Energy: unavailable: no run recorded it." in alike
    assert not any(note in alike for table in laid for note in table.notes)


def test_the_terminal_shows_it_in_80_columns_with_nothing_cut() -> None:
    rows = [
        make_prediction(
            gpus,
            "prior-driven",
            ranks_per_node=8,
            joules_per_epoch=estimate(4.2e9),
            cost_per_epoch=estimate(123_456),
            oom_chance=0.999,
            memory_bytes=80 * 2**30,
        )
        for gpus in (16, 4096, 100_000)
    ]
    said = printed(make_forecast(study(), rows, [make_score()]))
    assert max(map(len, said.splitlines())) <= 80
    assert "\u2026" not in said
    for part in (
        "100,000", "12,500", "prior-driven", "80 GiB", ">99 %", "4.20 GJ", "123,456",
        "Assumed: network between hosts", "What would narrow it most: vitscale check",
        "predicting 8 ranks from 1, 2 and 4", "Two intervals of 90 %", "Network: inside a host",
    ):  # fmt: skip
        assert part in said, part


def test_without_images_the_intervals_are_of_the_step() -> None:
    rows = [
        make_prediction(gpus, epoch_seconds=None, images=None, steps_per_epoch=None, reasons={}) for gpus in (8, 16)
    ]
    said = printed(make_forecast(study(), rows))
    assert "step, one" in said
    assert "epoch" not in said.partition("Two intervals")[0]
    assert "122\u2013150" in said


def test_names_cannot_draw_on_the_terminal() -> None:
    rows = [make_prediction(8, series="\x1b[31mred[bold]", reasons={"speedup": "\x1b[2J"})]
    said = printed(make_forecast(study(), rows))
    assert "\x1b" not in said
    assert "red[bold]" in said


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "a | b", "`code` *b*"])
def test_markdown_takes_names_literally(hostile: str) -> None:
    analysis = study()
    rows = [make_prediction(8, series=hostile, reasons={"speedup": hostile})]
    text = markdown(analysis, make_forecast(analysis, rows))
    section = text.partition("## Prediction and advice")[2]
    assert section
    assert hostile not in section


def test_markdown_has_the_section_with_scores_and_intervals() -> None:
    analysis = study()
    assert "Prediction and advice" not in markdown(analysis)
    text = markdown(analysis, make_forecast(analysis, scores=[make_score()]))
    assert "- ddp: predicting 8 ranks from 1, 2 and 4 was off by 2.1 %" in text
    line = next(line for line in text.splitlines() if line.startswith("| 8 = 2 x 4 |"))
    assert "2.18 (2.09\u20132.26; 1.96\u20132.39)" in line
    assert line.endswith("| extrapolated |")
