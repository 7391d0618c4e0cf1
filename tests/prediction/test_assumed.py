"""What an import assumed is no measurement: an option that names it says what was measured, and nothing is converted
from it. What the import recorded is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prediction_factory import asked_questions, resolved_study, stated_facts
from vitscale import cli
from vitscale.analysis import analyse, analyse_folder
from vitscale.errors import RequestError
from vitscale.pages import prediction_words
from vitscale.prediction.answering import Changes, answer, facts_taken, taken_as_measured
from vitscale.prediction.evidence import HOSTS, IMAGE_SIZE, MICRO_BATCH, PRECISION, Evidence, evidence_of
from vitscale.prediction.fitting import fit
from vitscale.prediction.gpu_types import gpu_type
from vitscale.prediction.labels import WHAT_IS_SENT
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import MEMORY, Prediction

Import = Callable[..., Evidence]
TABLE = "gpus,images_per_second,gpu\n1,400,Tesla T4\n2,780,Tesla T4\n4,1500,Tesla T4\n8,2800,Tesla T4\n"


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Import:
    """The evidence of a table of rates that tells neither precision nor batch nor image size, by further options."""

    def run(*options: str, table: str = TABLE) -> Evidence:
        file, folder = tmp_path / "table.csv", tmp_path / f"results{len(options)}"
        file.write_text(table)
        monkeypatch.setattr(sys, "argv", ["vitscale", "import", str(file), "-o", str(folder), *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return evidence_of(folder, analyse_folder(folder))

    return run


TOLD = ("--model", "vit-b16", "--engine", "ddp", "--micro-batch", "32")


def predicted(evidence: Evidence, changes: Changes) -> Prediction:
    known, rest = stated_facts(evidence, changes)
    (answered,) = answer(fit(known), asked_questions(known, (8,), rest, nodes_of=8)).predictions
    return answered


def rate(answered: Prediction) -> float:
    assert answered.images_per_second is not None
    return answered.images_per_second.value


def test_an_import_records_what_it_assumed(imported: Import) -> None:
    assumed = [
        imported(*options).series[0].points[-1].assumed for options in ((), TOLD, (*TOLD, "--precision", "fp32"))
    ]
    assert assumed == [{PRECISION, MICRO_BATCH, HOSTS}, {PRECISION, IMAGE_SIZE, HOSTS}, {IMAGE_SIZE, HOSTS}]


def test_no_run_of_our_own_assumes_anything(tmp_path: Path) -> None:
    evidence = evidence_of(tmp_path, analyse(resolved_study({1: [0.1], 2: [0.1]})))
    assert [point.assumed for point in evidence.series[0].points] == [frozenset(), frozenset()]


def test_an_assumed_precision_is_told_and_a_recorded_one_is_converted_from(imported: Import) -> None:
    """It was 2.5 times the measured rate."""
    assumed, recorded = imported(*TOLD), imported(*TOLD, "--precision", "fp32")
    assert rate(predicted(assumed, Changes(precision="bf16"))) == pytest.approx(2800, rel=0.05)
    assert predicted(assumed, Changes(precision="bf16")).label == "interpolated"
    converted = predicted(recorded, Changes(precision="bf16"))
    assert rate(converted) > 1.5 * 2800
    assert converted.label == "prior-driven"


def test_an_assumed_image_size_is_told_and_a_recorded_one_is_converted_from(imported: Import) -> None:
    assumed, recorded = imported(*TOLD), imported(*TOLD, "--image-size", "224")
    assert rate(predicted(assumed, Changes(image_size=384))) == pytest.approx(2800, rel=0.05)
    assert rate(predicted(recorded, Changes(image_size=384))) < 0.5 * 2800


def test_hosts_that_a_table_does_not_count_are_those_of_nodes_of(imported: Import) -> None:
    """Eight ranks with four to a host were on two hosts: what lies between hosts was measured then."""
    evidence = imported(*TOLD)
    known, _ = stated_facts(evidence, Changes(), nodes_of=4)
    assert [point.nodes for point in known.series[0].points] == [1, 1, 1, 2]
    assert known.series[0].points[-1].trial.world.ranks_per_node == 4
    assert taken_as_measured(evidence, known).startswith(
        "Taken for what was measured, which the import does not tell: 4 ranks on a full host."
    )
    (one_host,), (two_hosts,) = (predict(fit(own), Question((16,), nodes_of=4)) for own in (evidence, known))
    assert (one_host.label, two_hosts.label) == ("prior-driven", "extrapolated")
    fits, _ = stated_facts(evidence, Changes(), nodes_of=8)
    assert taken_as_measured(evidence, fits) == "", "one host it was, as was assumed"


def test_hosts_that_a_table_counts_are_as_it_says(imported: Import) -> None:
    counted = "gpus,images_per_second,nodes\n4,1500,1\n8,2800,1\n"
    evidence = imported(*TOLD, table=counted)
    assert not any(HOSTS in point.assumed for point in evidence.series[0].points)
    known, _ = stated_facts(evidence, Changes(), nodes_of=4)
    assert [point.nodes for point in known.series[0].points] == [1, 1]


def test_what_was_told_is_said_and_how_to_ask_for_another(imported: Import) -> None:
    before = imported(*TOLD)
    after, _ = stated_facts(before, Changes(precision="bf16", image_size=384))
    said = taken_as_measured(before, after)
    assert said.startswith("Taken for what was measured, which the import does not tell: bf16, 384 pixels.")
    assert taken_as_measured(before, stated_facts(before, Changes())[0]) == ""
    recorded = imported(*TOLD, "--precision", "fp32")
    assert taken_as_measured(recorded, stated_facts(recorded, Changes(precision="bf16"))[0]) == ""


def test_another_micro_batch_than_an_untold_one_is_refused(imported: Import) -> None:
    evidence = imported("--model", "vit-b16", "--engine", "ddp")
    with pytest.raises(RequestError, match=r"--micro-batch 32: the measured one of .* is not told.* Import the files"):
        asked_questions(evidence, (8,), Changes(micro_batch=32))


def test_an_image_size_of_an_unknown_model_is_refused_in_words(imported: Import) -> None:
    evidence = imported()
    with pytest.raises(RequestError, match=r"--image-size 384: the measured model is not known. .* --model"):
        asked_questions(evidence, (8,), Changes(image_size=384))


def test_memory_and_another_gpu_name_the_precision_that_they_take_for_granted(imported: Import) -> None:
    evidence = imported(*TOLD)
    (answered,) = predict(fit(evidence), Question((8,)))
    (memory,) = (assumed for assumed in answered.assumptions if assumed.part == MEMORY)
    assert (memory.taken, memory.measurement) == (
        "that of fp32 and 224 pixels, which the import does not tell",
        "say --precision and --image-size",
    )
    assert "--image-size" not in prediction_words.next_measurement([answered]), "that narrows no time"
    (other,) = predict(fit(evidence), Question((8,), changes={"gpu": gpu_type("A100-SXM4-80GB")}))
    assert any(assumed.part == "precision of the measured runs" for assumed in other.assumptions)


def test_without_a_batch_there_is_no_memory_of_one_image(imported: Import) -> None:
    (answered,) = predict(fit(imported("--model", "vit-b16", "--engine", "ddp")), Question((8,)))
    assert (answered.memory_bytes, answered.oom_chance) == (None, None)
    assert "micro-batch" in answered.reasons["memory_bytes"]


@pytest.mark.parametrize(
    ("column", "options", "first"),
    [
        ("images_per_second", (), "`vitscale import FILE --micro-batch N`"),
        ("images_per_second", ("--micro-batch", "32"), "say --engine ddp"),
        ("step_seconds", (), "say --engine ddp"),
    ],
)
def test_a_batch_is_asked_for_only_where_steps_come_of_a_rate_without_one(
    column: str, options: tuple[str, ...], first: str, imported: Import
) -> None:
    measured = {"images_per_second": (400, 780, 1500), "step_seconds": (0.08, 0.082, 0.085)}[column]
    rows = "".join(f"{gpus},{value}\n" for gpus, value in zip((1, 2, 4), measured, strict=True))
    answered = predicted(imported(*options, table=f"gpus,{column}\n{rows}"), Changes())
    (sent,) = (assumed for assumed in answered.assumptions if assumed.part == WHAT_IS_SENT)
    assert sent.measurement.startswith(first)
    assert sent.measurement.endswith("say --engine ddp and --parameters 110M, or --model")


def test_facts_are_taken_by_option_and_those_said_elsewhere_are_left_out(imported: Import) -> None:
    before = imported("--micro-batch", "32")
    after, _ = stated_facts(before, Changes(engine="ddp", model="vit-b16", precision="bf16"))
    assert facts_taken(before, after) == {"--engine": "ddp", "--model": "vit-b16", "--precision": "bf16"}
    assert "does not tell: ddp, vit-b16. To" in taken_as_measured(before, after, besides=("--precision",))
    assert taken_as_measured(before, after, besides=("--precision", "--engine", "--model")) == ""
    sized, _ = stated_facts(before, Changes(parameters="110M"))
    assert facts_taken(before, sized) == {"--parameters": "110,000,000 parameters"}
