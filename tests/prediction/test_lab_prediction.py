"""One host's runs and a check of the link foretell two hosts: the truth is the kernel's shaper and its scheduler.

benchmarks/lab_prediction.py holds all engines against 3 and 4 hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import needs
from lab.hosts import vitscale_on
from vitscale import analysis, store
from vitscale.lab import Laboratory, laboratory
from vitscale.prediction.evidence import Evidence, evidence_of
from vitscale.prediction.fitting import fit
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import Prediction

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

MEGABITS = 200.0
GRADIENT_BYTES = 4 * 2_712_010
STUDY = """\
name = "lab"
[model]
name = "vit-ti16"
image_size = 32
patch_size = 8
layers = 6
[data]
name = "synthetic"
[train]
engine = "ddp"
precision = "fp32"
micro_batch = 16
[scaling]
gpus = [{gpus}]
gpus_per_node = 1
[launch]
threads_per_rank = 1
[measure]
steps = 10
warmup_steps = 2
repeats = 1
evaluate = false
"""


@dataclass(frozen=True)
class Measured:
    evidence: Evidence
    """One host's runs, and a check of two."""
    one: float
    two: float
    """Seconds of a step on so many hosts."""

    def predicted(self, evidence: Evidence) -> Prediction:
        (found,) = predict(fit(evidence), Question((2,), nodes_of=1))
        return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    needs.root_and("ip", "tc", "ssh", "sshd", "mpirun")
    folder = tmp_path_factory.mktemp("lab")
    with laboratory(hosts=2, bandwidth_mbit=MEGABITS) as lab:
        on_host_0(lab, folder, ["check", "--quick", "-o", "one"])
        for name, gpus in (("one", 1), ("two", 2)):
            (folder / f"{name}.toml").write_text(STUDY.format(gpus=gpus))
            on_host_0(lab, folder, ["run", f"{name}.toml", "-o", name])
    results = store.load(folder / "one")
    known = analysis.analyse(results)
    return Measured(evidence_of(folder / "one", known), step(folder / "one"), step(folder / "two"))


def on_host_0(lab: Laboratory, folder: Path, arguments: Sequence[str]) -> None:
    done = vitscale_on(lab, *arguments, "--hostfile", str(lab.hostfile), "--launcher", "mpirun", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def step(folder: Path) -> float:
    (trial,) = analysis.analyse(store.load(folder)).trials.values()
    seconds = trial.median_of(lambda run: run.step_seconds)
    assert seconds is not None
    return seconds


def test_two_hosts_are_foretold_from_one_and_a_check(measured: Measured) -> None:
    found = measured.predicted(measured.evidence)
    assert (found.label, found.nodes) == ("extrapolated", 2)
    assert found.step_seconds.value == pytest.approx(measured.two, rel=0.25)


def test_the_transfer_decides_here(measured: Measured) -> None:
    """Two hosts take longer by at least half of the transfer: who left it out would be far off."""
    transfer = GRADIENT_BYTES / (MEGABITS * 1e6 / 8)
    assert measured.two > measured.one + transfer / 2
    found = measured.predicted(measured.evidence)
    assert found.wire_seconds is not None
    assert transfer / 3 < found.wire_seconds.value < 1.25 * transfer
