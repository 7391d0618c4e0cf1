"""An option that changes nothing is said beside the answer: tried with each option of `predict` and `advise`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import cli
from vitscale.api.questions import AdviseQuestion, PredictQuestion
from vitscale.cli.predicting import advise, predict
from vitscale.prediction.remarks import OptionWithoutEffect, Remarks, change_nothing, options_without_effect
from vitscale.present.document import Bullets

Call = Callable[..., dict[str, Any] | None]
ASKED = {
    "predict": ("--gpus", "8,16", "--nodes-of", "4"),
    "advise": ("--gpus", "2,8", "--images", "1024", "--epochs", "3"),
}
CHOOSE_WHAT_IS_SHOWN = {
    "predict": {"results", "--gpus", "--series", "--verbose", "--json"},
    "advise": {
        "results", "--gpus", "--max-gpus", "--series", "--verbose", "--json", "--chart", "--output", "--format",
        "--deadline", "--budget", "--min-efficiency", "--price", "--devices", "--epochs",
    },
}  # fmt: skip
"""Options that are not to change a figure: of `advise` the limits, which are judged beside each answer, and what is in
each cost or time."""
VALUES = {
    "--nodes-of": ("4", "8"), "--network": ("10GbE",), "--model": ("vit-b16",), "--image-size": ("32", "64"),
    "--parameters": ("86M",), "--engine": ("ddp", "fsdp2"), "--zero-stage": ("2",), "--precision": ("fp32", "bf16"),
    "--micro-batch": ("8", "16"), "--grad-accum": ("1", "2"), "--device": ("H100",), "--price": ("2",),
    "--gpu-memory": ("80GB",), "--epochs": ("3",), "--images": ("1024", "4096"), "--any-batch": ((),),
    "--large-batch": ((),), "--split": ((),), "--checkpoint-seconds": ("10",), "--node-mtbf": ("100",),
}  # fmt: skip
REPEATED = (
    "engine", "zero_stage", "precision", "micro_batch", "grad_accum", "global_batch", "image_size", "gpu", "study",
    "memory_capacity_bytes", "effective_draws", "looked_at", "dropped", "refused", "price_per_gpu_hour", "reasons",
    "unstable_runs", "taken_as_measured", "without_effect", "prediction_scores",
)  # fmt: skip
"""Fields that repeat the question, or are words."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Results of our own, and an imported table that tells neither engine nor model."""
    base = tmp_path_factory.mktemp("options")
    write_results(resolved_study({1: [0.1, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]}), base / "own")
    (base / "table.csv").write_text("gpus,images_per_second,micro_batch\n1,400,8\n2,780,8\n4,1500,8\n8,2800,8\n")
    sys.argv = ["vitscale", "import", str(base / "table.csv"), "-o", str(base / "table")]
    with pytest.raises(SystemExit):
        cli.main()
    return {"own": base / "own", "table": base / "table"}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """What `vitscale ARGUMENTS --json` prints; None where it is refused."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def run(*arguments: str) -> dict[str, Any] | None:
        monkeypatch.setattr(sys, "argv", ["vitscale", *arguments, "--json"])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out = capsys.readouterr().out
        return None if code == 2 else json.loads(out)

    return run


def figures(value: Any) -> Any:
    """All figures to six digits; of assumptions which there are. Options inside an answer of advice are answers."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [figures(item) for item in value]
    if isinstance(value, dict):
        return {name: figures(item) for name, item in value.items() if name not in ("taken", "measurement")}
    return value


def compared(verb: str, answer: dict[str, Any]) -> Any:
    if verb == "advise":
        return figures({name: item for name, item in answer.items() if name not in (*REPEATED, "limits")})
    of_finish = [
        [one.get(name) for name in ("finish_seconds", "finish_seconds_low", "finish_seconds_high", "finish_cost")]
        for one in answer["predictions"]
        if one.get("finish_seconds") is not None
    ]
    of_finishing = ("finish", "epochs", "work_", "checkpoint_")
    told = [
        {name: item for name, item in one.items() if name not in REPEATED and not name.startswith(of_finishing)}
        for one in answer["predictions"]
    ]
    return figures([told, of_finish])


@pytest.mark.parametrize("folder", ["own", "table"])
@pytest.mark.parametrize(("verb", "option"), [
    (verb, option) for verb, asking in (("predict", PredictQuestion), ("advise", AdviseQuestion))
    for option in asking.OPTIONS if option in VALUES
])  # fmt: skip
def test_an_option_is_said_to_change_nothing_exactly_where_all_figures_are_the_same_without_it(
    verb: str, option: str, folder: str, folders: dict[str, Path], call: Call
) -> None:
    asked = list(ASKED[verb])
    if option in asked:  # it is tried by itself
        del asked[asked.index(option) : asked.index(option) + 2]
    if option in ("--checkpoint-seconds", "--node-mtbf") and verb == "predict":
        asked += ["--epochs", "3"]
    without = call(verb, str(folders[folder]), *asked)
    for value in VALUES[option]:
        arguments = [option, *([value] if value else [])]
        answer = call(verb, str(folders[folder]), *asked, *arguments)
        if answer is None:
            continue  # refused in one message
        said = any(sentence.startswith(f"{option} ") for sentence in answer["without_effect"])
        same = without is not None and compared(verb, answer) == compared(verb, without)
        assert said == same, (arguments, answer["without_effect"])


def test_every_option_is_tried_or_chooses_what_is_shown() -> None:
    for verb, command, asking in (("predict", predict, PredictQuestion), ("advise", advise, AdviseQuestion)):
        app = typer.Typer()
        app.command()(command)
        options = {parameter.opts[-1] for parameter in typer.main.get_command(app).params} - {"--help"}
        options -= {"--install-completion", "--show-completion"}
        assert options == CHOOSE_WHAT_IS_SHOWN[verb] | {*asking.OPTIONS}
        assert {*asking.OPTIONS} - {*VALUES} <= {"--check"}


def test_a_network_says_why_it_changes_nothing_on_the_terminal_too(
    folders: dict[str, Path], call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = call("predict", str(folders["table"]), "--gpus", "16", "--nodes-of", "4", "--network", "100GbE")
    assert answer is not None
    expected = (
        "--network 100GbE changes nothing: what is sent is unknown (to tell it: say --engine ddp and --parameters "
        "110M, or --model)."
    )
    assert answer["without_effect"] == [expected]
    arguments = ["--gpus", "16", "--nodes-of", "4", "--network", "100GbE"]
    monkeypatch.setattr(sys, "argv", ["vitscale", "predict", str(folders["table"]), *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert expected in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def rates(call: Call, tmp_path: Path) -> Path:
    """A table of images/s alone."""
    table = tmp_path / "rates.csv"
    table.write_text("gpus,images_per_second\n1,400\n2,780\n4,1500\n8,2800\n")
    assert call("import", str(table), "-o", str(tmp_path / "rates")) is not None
    return table


TWO_HOSTS = ("--gpus", "16", "--nodes-of", "8", "--network", "100GbE")


@pytest.mark.parametrize(
    "named",
    ["", "--engine ddp", "--parameters 110M", "--model vit-b16", "--engine ddp --parameters 110M"],
)
def test_the_first_advice_on_what_is_sent_names_all_that_is_missing(
    named: str, rates: Path, call: Call, tmp_path: Path
) -> None:
    """It is followed by the letter, with 32 for the batch that the reader knows; every option then counts."""
    before = call("predict", str(tmp_path / "rates"), *TWO_HOSTS, *named.split())
    assert before is not None
    (said,) = (one for one in before["without_effect"] if one.startswith("--network"))
    importing = re.search(r"`vitscale (import FILE --micro-batch N)`", said)
    assert importing is not None, said
    arguments = importing[1].replace("FILE", str(rates)).replace("N", "32").split()
    assert call(*arguments, "-o", str(tmp_path / "again")) is not None
    further = re.findall(r"--(?:engine|parameters) \w+", said[importing.end() :])
    options = " ".join([named, *further]).split()
    after = call("predict", str(tmp_path / "again"), *TWO_HOSTS, *options)
    assert after is not None
    assert after["without_effect"] == []
    network_left_out = call("predict", str(tmp_path / "again"), *TWO_HOSTS[:4], *options)
    assert network_left_out is not None
    assert compared("predict", after) != compared("predict", network_left_out)


@pytest.mark.parametrize(
    ("options", "link"), [((), "a link that is not known"), (("--network", "100GbE"), "100GbE")], ids=["none", "100GbE"]
)
def test_what_a_named_engine_and_model_brought_in_is_said(
    options: tuple[str, ...], link: str, call: Call, tmp_path: Path
) -> None:
    table = tmp_path / "batch.csv"
    table.write_text("gpus,images_per_second,micro_batch\n1,400,32\n2,780,32\n4,1500,32\n8,2800,32\n")
    assert call("import", str(table), "-o", str(tmp_path / "batch")) is not None
    asked = ("--gpus", "16", "--nodes-of", "8", "--engine", "ddp", "--parameters", "110M", *options)
    answer = call("predict", str(tmp_path / "batch"), *asked)
    assert answer is not None
    assert "does not tell: ddp, 110,000,000 parameters." in answer["taken_as_measured"]
    brought_in = f"In each step, ddp sends what 110,000,000 parameters need, over {link}."
    assert answer["taken_as_measured"].endswith(brought_in)


def test_advise_says_what_named_parameters_brought_in_as_predict_does(call: Call, tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    table.write_text("engine,gpus,step_seconds,micro_batch\nddp,1,0.1,8\nddp,2,0.12,8\nddp,4,0.13,8\nddp,8,0.14,8\n")
    assert call("import", str(table), "-o", str(tmp_path / "steps")) is not None
    asked = (str(tmp_path / "steps"), "--nodes-of", "4", "--network", "100GbE", "--parameters", "110M")
    predicted = call("predict", *asked, "--gpus", "16")
    advice = call("advise", *asked, "--gpus", "16", "--epochs", "3", "--images", "50000")
    assert predicted is not None
    assert advice is not None
    assert advice["answers"][0]["gpus"] == 16
    brought_in = "In each step, ddp sends what 110,000,000 parameters need, over 100GbE."
    assert predicted["taken_as_measured"].endswith(brought_in)
    assert advice["taken_as_measured"].endswith(brought_in)


def test_on_the_terminal_an_option_without_effect_has_its_reason_and_one_that_is_taken_is_named(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["advise", str(folders["table"]), "--epochs", "3", "--images", "50000", "--nodes-of", "4"]
    asked += ["--checkpoint-seconds", "10"]  # else the parameters say how long a checkpoint takes
    monkeypatch.setattr(sys, "argv", ["vitscale", *asked, "--network", "100GbE", "--parameters", "110M"])
    with pytest.raises(SystemExit):
        cli.main()
    text = " ".join(capsys.readouterr().out.split())
    assert "- --network 100GbE changes nothing: what is sent is unknown (to tell it: " in text
    assert "Taken for what was measured, which the import does not tell: 110,000,000 parameters" in text
    assert text.count("what is sent is unknown") == 1


def test_a_named_model_of_an_unknown_engine_says_what_it_changes(rates: Path, call: Call, tmp_path: Path) -> None:
    without = call("predict", str(tmp_path / rates.stem), *TWO_HOSTS[:4])
    answer = call("predict", str(tmp_path / rates.stem), *TWO_HOSTS[:4], "--model", "vit-b16")
    assert answer is not None
    assert without is not None
    assert compared("predict", answer) != compared("predict", without)
    assert "does not tell: vit-b16." in answer["taken_as_measured"]
    assert "stays unknown; that the model is known changes" in answer["taken_as_measured"]


def test_an_option_taken_for_what_was_measured_is_said_once(rates: Path, call: Call, tmp_path: Path) -> None:
    answer = call("predict", str(tmp_path / rates.stem), *TWO_HOSTS[:4], "--precision", "bf16")
    assert answer is not None
    assert answer["taken_as_measured"] is None
    assert answer["without_effect"] == [
        "--precision bf16 changes nothing: bf16 is taken for what was measured, which the import does not tell, so "
        "nothing is converted. To ask for another one, import again and say what was measured."
    ]


def test_the_heading_names_the_engine_that_an_option_named(
    rates: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = call("predict", str(tmp_path / rates.stem), *TWO_HOSTS[:4], "--engine", "ddp")
    assert answer is not None
    monkeypatch.setattr(
        sys, "argv", ["vitscale", "predict", str(tmp_path / rates.stem), *TWO_HOSTS[:4], "--engine", "ddp"]
    )
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr().out
    assert "ddp, strong-micro" in shown.splitlines()
    assert "- ddp: predicting 8 ranks" in shown
    assert "unknown engine" not in shown


@pytest.mark.parametrize("folder", ["own", "table"])
def test_a_network_between_no_hosts_says_what_puts_answers_on_several(
    folder: str, folders: dict[str, Path], call: Call
) -> None:
    asked = ("predict", str(folders[folder]), "--gpus", "1,2,4", "--network", "25GbE")
    answer = call(*asked)
    assert answer is not None
    assert answer["without_effect"] == [
        "--network 25GbE changes nothing: no answer lies on several hosts (add --nodes-of 2)."
    ]
    cured = call(*asked, "--nodes-of", "2")
    assert cured is not None
    assert not any("no answer lies" in sentence for sentence in cured["without_effect"])
    assert max(prediction["nodes"] for prediction in cured["predictions"]) == 2


def test_only_given_options_are_left_out_one_by_one() -> None:
    asked: list[dict[str, Any]] = []

    def figures_of(options: Any) -> object:
        asked.append(dict(options))
        return options["--a"]

    assert options_without_effect({"--a": 1, "--b": 2, "--c": None, "--d": False}, figures_of) == ("--b",)
    assert len(asked) == 3
    assert options_without_effect({"--a": None}, figures_of) == ()
    assert len(asked) == 3, "nothing is worked out where no option is given"


def test_a_number_is_told_as_it_was_written() -> None:
    price = OptionWithoutEffect("--price", 3.0, "no epochs")
    split = OptionWithoutEffect("--split", value=True)
    assert change_nothing([price]) == "--price 3 changes nothing: no epochs."
    assert change_nothing([split]) == "--split changes nothing: the answer without it is the same."


def test_a_reason_of_several_options_is_said_once_for_all_of_them() -> None:
    unknown = "what is sent is unknown"
    options = (
        OptionWithoutEffect("--network", "100GbE", unknown),
        OptionWithoutEffect("--price", 3.0, "no epochs"),
        OptionWithoutEffect("--parameters", "110M", unknown),
        OptionWithoutEffect("--engine", "ddp", unknown),
        OptionWithoutEffect("--any-batch", value=True),
        OptionWithoutEffect("--split", value=True),
    )
    remarks = Remarks(without_effect=options)
    (bullets,) = remarks.blocks
    assert isinstance(bullets, Bullets)
    assert bullets.items == (
        "--network 100GbE, --parameters 110M and --engine ddp change nothing: what is sent is unknown.",
        "--price 3 changes nothing: no epochs.",
        "--any-batch and --split change nothing: the answer without any one of them is the same.",
    )
    by_option = remarks.fields["without_effect"]
    assert [sentence.split()[0] for sentence in by_option] == [idle.option for idle in options]
    assert by_option[2] == "--parameters 110M changes nothing: what is sent is unknown."
