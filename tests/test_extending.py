"""What docs/extending.md promises: a package from outside brings one thing of every kind, installed as any other."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forks import Prepared
from vitscale import store
from vitscale.launchers import Launcher
from vitscale.probes import EpochMeter
from vitscale.sources import Source

PACKAGE = Path(__file__).parent / "example_package"
STUDY = """
name = "brought"
[model]
name = "flat"
image_size = 8
[data]
name = "stripes"
[train]
micro_batch = 8
epochs = 1
precision = "fp32"
device = "cpu"
[scaling]
gpus = [2]
[launch]
launcher = "niced"
scheduler = "noted"
threads_per_rank = 1
oversubscribe = true
[measure]
repeats = 1
warmup_steps = 1
explain = false
meters = ["switches"]
[sweep]
"train.engine" = ["ddp", "summed", "averaged"]
"""


def test_what_the_page_imports_is_there(tmp_path: Path) -> None:
    """Its signatures too are Python, of these names."""
    page = (Path(__file__).parent.parent / "docs/extending.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"Path": Path, "Mapping": Mapping, "Sequence": Sequence, "torch": torch}
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    names = runpy.run_path(str(tmp_path / "page.py"), names)
    for kind, methods in ((Launcher, "launch unavailable unfit"), (Source, "check load"), (EpochMeter, "begin end")):
        for method in methods.split():
            real = inspect.signature(getattr(kind, method), eval_str=True)
            assert inspect.signature(names[method]) == real, method


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of processes that have the package."""
    folder = tmp_path_factory.mktemp("extending")
    shutil.copytree(PACKAGE, folder / "source")  # building leaves files in it
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", folder / "site", folder / "source"], check=True, capture_output=True)
    return os.environ | {"PYTHONPATH": str(folder / "site")}


def vitscale(environment: dict[str, str], *arguments: object, status: int = 0) -> str:
    """Both outputs, in one."""
    command = [*map(str, arguments)]
    request = {"kind": "command", "argv": command, "environment": environment}
    done = Prepared.of_all("commands").run(request, 300)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def results(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("brought")
    (folder / "study.toml").write_text(STUDY)
    vitscale(environment, "run", folder / "study.toml", "-o", folder / "results")
    return folder / "results"


@pytest.mark.ranks
def test_a_study_trains_with_what_another_package_brings(environment: dict[str, str], results: Path) -> None:
    loaded = store.load(results)
    trials = {trial.train.engine: (identity, trial) for identity, trial in loaded.study.trials.items()}
    assert set(trials) == {"ddp", "summed", "averaged"}
    assert {trial.model.factory for _, trial in trials.values()} == {"vitscale_example.model:flat"}
    assert loaded.study.versions["vitscale-example"] == "1.0"
    runs = {run.header.trial_id: run for run in loaded.runs}
    losses = {}
    for engine, (identity, _) in trials.items():
        run = runs[identity]
        assert run.outcome.kind == "completed"
        assert len(run.ranks) == 2
        losses[engine] = [step.loss for step in run.ranks[0].steps]
        for rank in run.ranks:
            (line,) = rank.meters
            assert (line.meter, line.epoch) == ("switches", 0)
            assert (line.values["niceness"] or 0) >= 1, "its launcher started it"
            assert line.values["noted"] == 1, "its scheduler adapted what is started"
    assert losses["summed"] == pytest.approx(losses["ddp"], rel=1e-5), "the engine computes what DDP does"


@pytest.mark.ranks
def test_an_engine_that_trains_otherwise_is_not_called_wrong(environment: dict[str, str], results: Path) -> None:
    """It says so itself; and where its package is not, nobody knows."""
    here, elsewhere = (
        {trial["engine"]: trial for trial in json.loads(vitscale(shell, "report", results, "--json"))["trials"]}
        for shell in (environment, dict(os.environ))
    )
    assert {engine: trial["drift"] for engine, trial in here.items()} == {
        "ddp": "reference", "summed": "agrees", "averaged": "unknown",
    }  # fmt: skip
    assert here["averaged"]["drift_reason"] == "no other trial of the study computes the same"
    assert elsewhere["averaged"]["drift_reason"] == "whom averaged trains alike with is not known"
    assert elsewhere["summed"]["drift"] == "unknown"


@pytest.mark.ranks
def test_results_are_read_where_the_package_is_not(results: Path) -> None:
    said = json.loads(vitscale(dict(os.environ), "report", results, "--json"))
    assert {trial["engine"] for trial in said["trials"]} == {"ddp", "summed", "averaged"}


@pytest.mark.ranks
def test_a_chart_shows_what_its_meter_recorded(environment: dict[str, str], results: Path, tmp_path: Path) -> None:
    vitscale(environment, "report", results, "--chart", "switches", "--format", "md,svg", "-o", tmp_path)
    assert "## From other packages" in (tmp_path / "report.md").read_text()
    assert "context switches an epoch" in (tmp_path / "switches.svg").read_text()
    said = vitscale(environment, "report", results, "--chart", "broken", status=2)
    assert "chart 'broken' of vitscale-example" in " ".join(said.split())


def test_a_log_is_imported(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "times.txt").write_text("1 8.0\n2 4.5\n")
    arguments = [
        "import",
        tmp_path / "times.txt",
        "--format",
        "minutes",
        "--micro-batch",
        "8",
        "--train-samples",
        "800",
    ]
    vitscale(environment, *arguments, "-o", tmp_path / "results")
    study = store.load(tmp_path / "results").study
    assert study.imported is not None
    assert (study.imported.log_format, study.imported.notes[0]) == ("minutes", "minutes are told to one decimal")
    runs = {run.header.trial.world.size: run for run in store.load(tmp_path / "results").runs}
    assert [runs[ranks].ranks[0].epochs[0].seconds for ranks in (1, 2)] == [480.0, 270.0]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (('["ddp", "summed", "averaged"]', '["ddp", "broken"]'), "engine"),
        (('name = "stripes"', 'name = "broken"'), "dataset"),
        (('"niced"', '"broken"'), "launcher"),
        (('"noted"', '"broken"'), "scheduler"),
    ],
)
def test_a_broken_one_is_named_where_it_is_asked_for(
    environment: dict[str, str], tmp_path: Path, change: tuple[str, str], kind: str
) -> None:
    """It stands beside the others in every study above, and fails none of them."""
    (tmp_path / "study.toml").write_text(STUDY.replace(*change))
    said = " ".join(vitscale(environment, "plan", tmp_path / "study.toml", status=2).split())
    assert f"{kind} 'broken' of vitscale-example (vitscale_example.broken:" in said
    assert "the licence server does not answer" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('["ddp", "summed", "averaged"]', '["ddp", "sumed"]'), "summed"),
        (('name = "flat"', 'name = "flatt"'), "flat"),
        (('name = "stripes"', 'name = "stripe"'), "stripes"),
        (('"niced"', '"nice"'), "niced"),
        (('["switches"]', '["switch"]'), "switches"),
    ],
)
def test_a_wrong_name_is_answered_with_theirs_too(
    environment: dict[str, str], tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    (tmp_path / "study.toml").write_text(STUDY.replace(*change))
    answer = " ".join(vitscale(environment, "plan", tmp_path / "study.toml", status=2).split())
    assert f"Did you mean '{said}'?" in answer


def test_a_wrong_scheduler_is_answered_with_theirs_too(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY.replace('"noted"', '"note"'))
    answer = " ".join(vitscale(environment, "plan", tmp_path / "study.toml", status=2).split())
    assert (
        "should be 'auto', 'local', 'hostfile', 'slurm', 'pbs', 'lsf', 'flux', 'kubernetes', 'broken' or 'noted'"
        in answer
    )
