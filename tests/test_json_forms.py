"""What each verb prints with --json: one envelope, and no field that docs/json.md does not name."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advice_factory import advised
from check_factory import checked, record, sweep
from driving import TINY_MODEL
from explanation.scripted_commands import scripted_ranks
from importers.logs import epoch_rows, epoch_table
from prediction_factory import resolved_study
from results_factory import write_results
from scripted_ranks import FAILS, Scripted
from study_factory import write_study
from vitscale import cli, lab, launchers
from vitscale.advice.printing import advice_fields
from vitscale.lab.laboratory import Laboratory
from vitscale.lab.processes import Process
from vitscale.lab.state import Holder, State
from vitscale.preflight.fit import fits
from vitscale.preflight.judging import check_fields, judged
from vitscale.preflight.training import training_fields, training_findings
from vitscale.preflight.training_proofs import Proof
from vitscale.present.data import VERSIONS, envelope
from vitscale.runner import plan

pytestmark = pytest.mark.computing

PAGE = (Path(__file__).parent.parent / "docs/json.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`([\w-]+)`", PAGE))
ENDS = ("_low", "_high", "_mean_low", "_mean_high")
THEIR_OWN = ("resolved", "labels", "check", "files", "dropped", "refused", "reasons", "pace_against_others", "versions",
             "each_limit_alone", "hostfiles", "unavailable")  # fmt: skip
"""Objects whose keys are a user's or data of another form, which the page names."""
OF_THE_REPORT = ("trials", "curves", "waterfalls", "comparisons")
"""Whose keys the contract has, in its own test."""

Call = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json") / "results"
    write_results(resolved_study({1: [0.1, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]}), folder)
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """What `vitscale ARGUMENTS --json` prints."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["vitscale", *map(str, arguments), "--json"])
        with contextlib.suppress(SystemExit):
            cli.main()
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    return run


def unnamed(value: Any, passed_over: tuple[str, ...], at: str = "") -> set[str]:
    """Keys at any depth that the page does not name."""
    if isinstance(value, list):
        return {key for item in value for key in unnamed(item, passed_over, at)}
    if not isinstance(value, dict) or at in passed_over:
        return set()
    found = set()
    for key, item in value.items():
        bare = next((key.removesuffix(end) for end in reversed(ENDS) if key.endswith(end)), key)
        if key not in WORDS and bare not in WORDS:
            found.add(key)
        found |= unnamed(item, passed_over, key)
    return found


def holds(told: dict[str, Any], verb: str) -> None:
    assert list(told)[:2] == ["vitscale", "version"]
    assert (told["vitscale"], told["version"]) == (verb, VERSIONS[verb])
    heading = "report, run and train" if verb in ("report", "run", "train") else verb
    assert f"## {heading} (version {VERSIONS[verb]})\n" in PAGE
    assert unnamed(told, (*THEIR_OWN, *(OF_THE_REPORT if verb in ("report", "run") else ()))) == set()


def test_of_results(call: Call, results: Path) -> None:
    predicted = call("predict", results, "--gpus", "8", "--epochs", "3")
    holds(predicted, "predict")
    advised_now = call("advise", results, "--deadline", "1h")
    holds(advised_now, "advise")
    reported = call("report", results)
    holds(reported, "report")
    counted = [predicted["predictions"][0], advised_now, *reported["trials"]]
    assert {(one["model"], one["parameters"], one["parameters_source"]) for one in counted} == {
        ("vit-ti16", 5_500_000, "measured")
    }
    holds(call("compare", results, results), "compare")
    holds(call("export", results), "export")
    holds(call("watch", results), "watch")
    holds(call("report", results, "--like", "paper"), "like")
    holds(call("report", results, "--like", "thesis"), "like")


def test_of_a_study(call: Call, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 0}, "micro_batch_per_gpu": 16}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "study.toml").write_text(
        f'name = "forms"\n{TINY_MODEL}\n[data]\nname = "digits"\n[train]\nengine = "deepspeed"\n'
        'deepspeed_config = "ds.json"\nmicro_batch = 8\nepochs = 1\ndevice = "cpu"\n[scaling]\ngpus = [1]\n'
    )
    told = call("plan", tmp_path / "study.toml")
    holds(told, "plan")
    assert told["findings"]
    told = call("lint", tmp_path / "ds.json")
    holds(told, "lint")
    assert told["findings"]


def test_of_a_study_that_ends_at_its_limit_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why it ended is in the JSON, and with what else became of the runs on standard error."""
    monkeypatch.setenv("VITSCALE_CACHE", str(tmp_path / "cache"))
    scripted = Scripted(tmp_path / "records", {})
    monkeypatch.setitem(launchers.LAUNCHERS, "scripted", scripted)
    changes: dict[str, dict[str, Any]] = {
        "train": {"epochs": 1, "precision": "fp32"},
        "scaling": {"gpus": [1]},
        "launch": {"launcher": "scripted"},
        "measure": {"repeats": 2, "warmup_steps": 0},
    }
    path = write_study(tmp_path, changes)
    (trial,) = plan(path).record.trials
    scripted.script = {trial: [1.0, FAILS]}

    def run(limit: str) -> tuple[dict[str, Any], str, object]:
        words = ["run", str(path), f"measure.max_gpu_hours={limit}", "-o", str(tmp_path / "results"), "--json"]
        monkeypatch.setattr(sys, "argv", ["vitscale", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        answer = capsys.readouterr()
        told: dict[str, Any] = json.loads(answer.out)
        holds(told, "run")
        return told, answer.err, ended.value.code

    told, said, code = run("1e-9")
    assert told["ended_early"].startswith("measure.max_gpu_hours = 1e-09: ")
    assert f"Ended early: {told['ended_early']}. Raise it, and the same command goes on" in said
    assert not code
    told, said, code = run("1")
    assert told["ended_early"] is None
    assert "1 of 2 runs did not complete." in said
    assert code == 1


def test_of_a_check_and_of_an_import(call: Call, tmp_path: Path) -> None:
    lines = sweep("across nodes", "all_reduce", 2, 5e-4, 25e6)
    ranks = [checked(0, collectives=lines), checked(1, collectives=lines, pace=31.0)]
    whole = record(*ranks, fits=fits(ranks))
    holds(json.loads(envelope("check", check_fields(whole, judged(whole), Path("stored.json")))), "check")
    proof = Proof("clocks", "ddp on 2 ranks", "fails", "9 % apart", 0.09, 0.05)
    trained = training_fields(Path("results"), [proof], ["megatron: not installed"], training_findings([proof]))
    holds(json.loads(envelope("check", trained | {"bundle": "bundle.tar.gz"})), "check")
    rows = [row for gpus in (1, 2) for row in epoch_rows(gpus, [[100.0 / gpus] * gpus] * 2)]
    holds(call("import", epoch_table(tmp_path / "epochs.csv", rows), "-o", tmp_path / "imported"), "import")


def test_of_labs(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """One as it was made, whose processes are gone."""
    gone = Process(pid=2**22 + 1, start_ticks=1)
    host = Holder(name="host0", outside=gone, first=gone)
    made = Laboratory(State(name="here", pid_namespace=None, slots=2, bandwidth_mbit=None, hosts=(host,)))
    monkeypatch.setattr(lab, "laboratories", lambda: ([made], []))
    told = call("lab", "status")
    holds(told, "lab")
    assert told["hostfiles"] == {"here": "/run/vitscale-lab-here/hostfile"}
    assert [(row["host"], row["slots"], row["bandwidth_mbit"], row["state"]) for row in told["hosts"]] == [
        ("host0", 2, None, "gone")
    ]


def test_of_an_explained_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["explain", "--json", "--steps", "5", "--seconds", "0.5", "--", *scripted_ranks(tmp_path, 2)]
    monkeypatch.setattr(sys, "argv", ["vitscale", *words])
    with contextlib.suppress(SystemExit):
        cli.main()
    told = json.loads(capsys.readouterr().out)
    holds(told, "explain")
    assert (told["command_end"], told["ranks_read"], told["timed_steps"] > 0) == ("agreed_step", 2, True)


def test_every_verb_has_a_form_on_the_page() -> None:
    headings = re.findall(r"^## (\w+)(?:, (\w+))?(?: and (\w+))? \(version (\d+)\)$", PAGE, flags=re.MULTILINE)
    assert {verb: int(version) for *verbs, version in headings for verb in verbs if verb} == VERSIONS


def test_of_an_answer_with_every_part() -> None:
    holds(json.loads(envelope("advise", advice_fields(advised(), "name = 1"))), "advise")
