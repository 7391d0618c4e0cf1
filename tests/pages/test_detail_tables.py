"""The tables beside the scaling ones: figures by hand, a dash and a reason for what is unknown."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from explained_factory import NO_ENERGY, NO_GPU, batch_study, run_of
from results_factory import explained_run, make_curve, make_results, make_trial, one_curve
from vitscale.analysis import Analysis, analyse
from vitscale.pages.detail_tables import accuracy_table, four_figures, parts_table, resource_table
from vitscale.present.document import Table
from vitscale.present.estimate import Estimate
from vitscale.store.records import COMMUNICATION, CheckpointLine
from vitscale.trial.parallel import ParallelSpec

DASH = "\N{EN DASH}"


def lines(table: Table | None) -> list[dict[str, str]]:
    """Each line as heading to text."""
    assert table is not None
    return [
        dict(zip((column.name for column in table.columns), (cell.text for cell in line), strict=True))
        for group in table.groups
        for line in group.rows
    ]


def explained() -> Analysis:
    return analyse(batch_study([16], [1, 2]))


def test_the_four_figures_stand_together_with_the_cost_of_explaining_and_the_straggler() -> None:
    """Two ranks: explained steps of 77 ms, light ones 5 % faster: 32 images in 73.3 ms are 218 a second and rank."""
    table = four_figures(explained())
    one, two = lines(table)
    assert list(one) == [
        "ranks", "batch", "images/s/rank", "MFU", "of the measured matmul rate", "exposed communication",
        "explaining cost", "waited for",
    ]  # fmt: skip
    assert (two["ranks"], two["batch"]) == ("2", "32 = 2 x 16")
    assert two["images/s/rank"] == "218"
    # 22 of 77 ms: 12 of waiting, 10 of transfer.
    assert two["exposed communication"] == "28.6 %"
    assert one["exposed communication"] == "0.0 %"
    assert one["explaining cost"] == two["explaining cost"] == "+5.0 %"
    # Rank 1 computes 67 ms where rank 0 computes 55.
    assert two["waited for"] == "rank 1 in 100 % of steps, 22 % slower"
    assert one["waited for"] == DASH


def test_a_bubble_stands_beside_that_of_equal_stages() -> None:
    """20 of 80 ms, where two stages and four micro-batches leave one of five."""
    trial = make_trial(gpus=2, grad_accum=4).model_copy(update={"parallel": ParallelSpec(pipeline=2)})
    parts = {"forward": 0.02, "backward": 0.04, "bubble": 0.02, "told_apart": False}
    results = make_results([(make_curve([trial]), [trial])], [explained_run(trial, [parts] * 2)])
    table = parts_table(analyse(results))
    (line,) = lines(table)
    assert line["pipeline bubble"] == "20.0"
    assert table is not None
    assert "the pipeline bubble is 25 % of the step; of equal stages and free transfer, 20 %." in " ".join(
        map(str, table.notes)
    )
    assert "pipeline bubble" not in lines(parts_table(explained()))[0]


def test_an_mfu_without_a_known_peak_is_a_dash_and_says_why() -> None:
    table = four_figures(explained())
    assert [line["MFU"] for line in lines(table)] == [DASH, DASH]
    assert table is not None
    used = next(iter(explained().trials.values())).resources
    assert used is not None
    assert used.mfu_reason
    assert f"MFU: unavailable in 2 of 2 trials: {used.mfu_reason}." in table.notes


def test_none_of_the_four_is_left_out_where_nothing_was_explained() -> None:
    table = four_figures(analyse(one_curve({1: [0.1], 2: [0.1]})))
    assert [line["exposed communication"] for line in lines(table)] == [DASH, DASH]
    assert "waited for" not in lines(table)[0]
    assert table is not None
    assert "Exposed communication: unavailable in 2 of 2 trials: no step was explained." in table.notes
    assert "Share of the measured matmul rate: unavailable in 2 of 2 trials: the rate was not measured." in table.notes


def test_a_known_mfu_names_its_peak() -> None:
    analysis = explained()
    trials = {
        name: dataclasses.replace(
            trial,
            resources=dataclasses.replace(
                trial.resources, mfu=Estimate(0.314, 0.301, 0.327), mfu_reason="", peak_name="H100 SXM, 989 TFLOP/s"
            ),
        )
        for name, trial in analysis.trials.items()
        if trial.resources
    }
    table = four_figures(dataclasses.replace(analysis, trials=trials))
    assert [line["MFU"] for line in lines(table)] == ["31.4 %", "31.4 %"]
    assert table is not None
    assert table.notes[0] == "MFU is against H100 SXM, 989 TFLOP/s."


def test_parts_are_in_milliseconds_and_unknown_ones_have_no_column() -> None:
    table = parts_table(explained())
    one, two = lines(table)
    assert list(two.items())[2:] == [
        ("whole step", "77.0"), ("data wait", "2.00"), ("forward", "16.0"), ("backward", "32.0"),
        ("exposed wait", "12.0"), ("exposed wire", "10.0"), ("optimizer", "4.00"), ("other", "1.00"),
    ]  # fmt: skip
    assert (one["exposed wait"], one["exposed wire"]) == ("0", "0")
    assert table is not None
    assert table.notes == (
        "Unknown in 2 of 2 trials: copy to device: the device is the host.",
        "Unknown in 2 of 2 trials: launch gaps: a host launches no kernels.",
    )


def test_what_is_not_in_the_parts_is_told() -> None:
    """Steps with lost events, a repeat of which a rank explained nothing, a rank of which a script left no trace."""
    trial, script = make_trial("ddp", 2, micro_batch=16), make_trial("script", 3, script="train.py", micro_batch=16)
    run, again = run_of(trial), run_of(trial, repeat=1)
    lost = run.ranks[0].explained[0]
    lost = lost.model_copy(update={"unknown": {**lost.unknown, COMMUNICATION: "", "wait": "9 kernels were lost"}})
    first = run.ranks[0].model_copy(update={"explained": (lost, *run.ranks[0].explained[1:])})
    run = run.model_copy(update={"ranks": (first, run.ranks[1])})
    torn = again.model_copy(update={"ranks": (again.ranks[0], again.ranks[1].model_copy(update={"explained": ()}))})
    traced = run_of(script)
    bare = [rank.model_copy(update={"steps": (), "explained": rank.explained[:1]}) for rank in traced.ranks]
    bare[1] = bare[1].model_copy(update={"explained": ()})
    traced = traced.model_copy(update={"ranks": tuple(bare)})
    curves = [(make_curve([each]), [each]) for each in (trial, script)]
    table = parts_table(analyse(make_results(curves, [run, torn, traced], repeats=2)))
    assert table is not None
    ours, scripts = (note.partition(": not in the parts: ")[2] for note in table.notes if "not in the parts" in note)
    assert ours == (
        "1 of 8 explained steps (9 kernels were lost); repeat 2 (no step of which all of these ranks tell the parts)."
    )
    assert scripts == "rank 1 (no explained step in one repeat or more)."


def test_what_synchronised_norms_exchange_has_a_column_where_there_is_any() -> None:
    trial = make_trial("ddp", 2, batch_norm="synchronised")
    each = {"forward": 0.03, "backward": 0.05, "norm": 0.004, "wire": 0.002}
    results = make_results([(make_curve([trial]), [trial])], [explained_run(trial, [each, each])])
    (line,) = lines(parts_table(analyse(results)))
    assert (line["synchronised norm"], line["exposed wire"]) == ("4.00", "2.00")


def test_a_part_known_of_some_trials_is_a_dash_of_the_others() -> None:
    told, untold = make_trial("ddp", 2, micro_batch=16), make_trial("deepspeed", 2, micro_batch=16)
    results = make_results(
        [(make_curve([trial]), [trial]) for trial in (told, untold)],
        [run_of(told), run_of(untold, told_apart=False)],
    )
    first, second = lines(parts_table(analyse(results)))
    name = "exposed communication"
    assert (first["exposed wait"], first["exposed wire"], first[name]) == ("12.0", "10.0", DASH)
    assert (second["exposed wait"], second["exposed wire"]) == (DASH, DASH)
    assert second[name] != DASH


def test_resources_say_why_energy_and_gpus_are_missing() -> None:
    table = resource_table(explained())
    _, two = lines(table)
    assert (two["CPU utilisation"], two["resident"]) == ("75 %", "2 GiB")
    assert not [name for name in two if "GPU" in name or "energy" in name]
    assert table is not None
    assert table.notes == (
        f"Energy per image: unavailable in 2 of 2 trials: {NO_ENERGY}.",
        f"GPU figures: unavailable in 2 of 2 trials: {NO_GPU}.",
    )


def test_the_utilisation_of_gpus_that_wait_is_said_to_hold_the_waiting() -> None:
    """Rank 0 waits for rank 1 in a kernel of NCCL, for which NVML reports a busy GPU."""
    table = resource_table(analyse(batch_study([16], [1, 2], device="cuda")))
    assert table is not None
    (note,) = [note for note in table.notes if "waiting" in note]
    assert note == (
        "GPU utilisation counts waiting as work: a GPU runs a kernel of NCCL while it waits for another rank, as in "
        "ddp on 2 ranks (for rank 1)."
    )
    on_hosts = resource_table(explained())
    assert on_hosts is not None
    assert not [note for note in on_hosts.notes if "waiting" in note]


def test_clocks_temperature_and_throttling_stand_where_they_were_read() -> None:
    table = resource_table(analyse(batch_study([16], [1, 2], device="cuda")))
    _, two = lines(table)
    expected = {
        "GPU allocated": "2 GiB", "GPU reserved": "4 GiB", "whole GPU": "10 GiB", "GPU utilisation": "85 %",
        "SM clock (MHz)": "1,700", "lowest": "1,400", "hottest (\N{DEGREE SIGN}C)": "70", "power per GPU (W)": "400",
        "throttled": "20.0 %", "because of": "SW power cap", "energy per image (J)": "0.500",
    }  # fmt: skip
    assert {name: two[name] for name in expected} == expected
    assert table is not None
    assert table.notes[0] == "Energy was read by NVML."


def test_accuracy_beside_the_noise_scale_and_why_it_is_unknown() -> None:
    analysis = explained()
    table = accuracy_table(analysis, analysis.curves)
    one, two = lines(table)
    assert (one["epochs"], one["held-out accuracy"]) == ("3", "65.0%")
    assert (one["noise scale (images)"], two["noise scale (images)"]) == (DASH, "100")
    assert "reached by" not in one
    assert table is not None
    assert table.title == "Accuracy (strong-micro)"
    assert table.notes == (
        "Between epochs accuracy is taken as linear; before the first and after the last it is unknown.",
        "Noise scale: unavailable in 1 of 2 trials: one rank and one micro-step: no gradient of fewer images than the "
        "step has.",
    )


def test_equal_images_have_a_column_only_where_trials_were_trained_on_unlike_many() -> None:
    alike = explained()
    assert "after 3,072 images" not in lines(accuracy_table(alike, alike.curves))[0]
    unlike = analyse(batch_study([16, 64], [1, 2]))  # 3 and 4 epochs of 1,024 images
    assert lines(accuracy_table(unlike, unlike.curves))[3]["after 3,072 images"] == "65.0%"


def test_a_trial_on_two_curves_is_one_line_and_modes_are_named() -> None:
    trial, other = make_trial("ddp", 1, micro_batch=16), make_trial("ddp", 2, micro_batch=16)
    curves = [(make_curve([trial, other], "strong-micro"), [trial, other]), (make_curve([trial], "weak"), [trial])]
    table = parts_table(analyse(make_results(curves, [run_of(trial), run_of(other)])))
    assert table is not None
    assert [(group.label, len(group.rows)) for group in table.groups] == [("ddp (strong-micro)", 2)]


def test_a_long_table_is_folded_but_the_four_figures_are_not() -> None:
    analysis = analyse(batch_study([4, 8, 16], [1, 2, 3, 4, 5, 6], epochs=3))
    parts, four = parts_table(analysis), four_figures(analysis)
    assert parts is not None
    assert four is not None
    assert (parts.folded, four.folded) == (True, False)
    short = parts_table(explained())
    assert short is not None
    assert not short.folded


@pytest.mark.parametrize("table", [four_figures, parts_table, resource_table])
def test_a_study_without_runs_has_no_table(table: object) -> None:
    trial = make_trial()
    assert callable(table)
    assert table(analyse(make_results([(make_curve([trial]), [trial])], []))) is None


def test_a_checkpoint_stands_beside_what_else_was_used() -> None:
    results = batch_study([16], [2])
    (run,) = results.runs
    line = CheckpointLine(save_seconds=1.25, load_seconds=0.5, bytes=3_000_000)
    ranks = tuple(rank.model_copy(update={"checkpoint": line}) for rank in run.ranks)
    saved = results.model_copy(update={"runs": (run.model_copy(update={"ranks": ranks}),)})
    (row,) = lines(resource_table(analyse(saved)))
    assert (row["checkpoint saved (s)"], row["restored (s)"], row["its files"]) == ("1.25", "0.500", "2.86 MiB")
    (row,) = lines(resource_table(analyse(results)))
    assert "checkpoint saved (s)" not in row


def test_cores_and_memory_nodes_of_each_rank_are_told() -> None:
    analysis = explained()
    trial_id, trial = next((key, one) for key, one in analysis.trials.items() if one.trial.world.size == 2)
    assert trial.resources is not None
    first, second = trial.resources.by_rank
    placed = (
        replace(first, cores=(0, 1, 2, 3, 8), numa_nodes=(0,)),
        replace(second, cores=(4, 5, 6, 7), numa_nodes=(0, 1)),
    )
    trials = {**analysis.trials, trial_id: replace(trial, resources=replace(trial.resources, by_rank=placed))}
    _, two = lines(resource_table(replace(analysis, trials=trials)))
    assert (two["cores by rank"], two["NUMA nodes"]) == ("0-3,8 | 4-7", "0 | 0-1")
