"""Another type of GPU: the roofline by hand, names as clouds give them, and programs that were timed on both types."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu_types import both_ways, left_out_holds

from evidence_factory import MEASURED, make_evidence, make_point
from vitscale.errors import RequestError
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.fitting import fit
from vitscale.prediction.gpu_types import TYPES, gpu_type, time_factors
from vitscale.prediction.predicting import Question, predict
from vitscale.prediction.results import Prediction

SHARED = Path(__file__).parents[3] / "shared"
TABLES = Path(os.environ.get("VITSCALE_PUBLISHED_TABLES") or SHARED / "external")
ZERO = np.zeros((1, 1))


def on(*devices: str) -> Evidence:
    points = [make_point(n, (0.2, 0.204), precision="fp32", devices=devices * n) for n in (1, 2, 4)]
    return make_evidence(points, MEASURED)


def asked(device: str, evidence: Evidence) -> Prediction:
    return predict(fit(evidence), Question((8,), 8, changes={"gpu": gpu_type(device)}))[0]


@pytest.mark.parametrize(
    ("old", "new", "precision", "times"),
    [
        # Ordinary cores want 80 operations a byte less than a T4 has room for (25): its arithmetic decides.
        ("T4", "RTX3070", "fp32", 8.1 / 20.3),
        # Tensor cores want 139 and 200: memory decides.
        ("V100", "A100", "fp16", 900 / 1555),
        # Of an L40S in fp32 106, of a T4 25: 1 / 8.1 TFLOP/s there, 1 / (80 x 864 GB/s) here.
        ("T4", "L40S", "fp32", 8.1e12 / (80 * 864e9)),
    ],
)
def test_the_longer_of_arithmetic_and_memory_decides(old: str, new: str, precision: str, times: float) -> None:
    there, back = (
        float(np.exp(time_factors(gpu_type(a), gpu_type(b), precision, (ZERO, ZERO)))[0, 0])  # type: ignore[arg-type]  # made of scalars
        for a, b in ((old, new), (new, old))
    )
    assert there == pytest.approx(times)
    assert there * back == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), ("A100-80GB", "A100-SXM4-80GB"), ("a100", "A100-SXM4-40GB"),
        ("RTX6000-Ada", "RTX 6000 Ada Generation"), ("h100 sxm", "H100 80GB HBM3"), ("Tesla T4", "Tesla T4"),
        ("NVIDIA V100-SXM2-16GB", "Tesla V100-SXM2-16GB"), ("rtx 3090", "GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 3070", "GeForce RTX 3070"),
    ],
)  # fmt: skip
def test_names_of_drivers_and_clouds(said: str, meant: str) -> None:
    assert gpu_type(said).name == meant


def test_every_type_has_a_rate() -> None:
    assert all(one.flops_per_second("fp32") > 1e12 for one in TYPES)


def test_an_unknown_gpu_is_one_message_with_the_nearest_names() -> None:
    with pytest.raises(RequestError, match=r"the GPU 'A100-SXM4-90GB' is unknown\. Valid: A100-SXM4-80GB, ") as told:
        gpu_type("A100-SXM4-90GB")
    assert len(str(told.value)) < 200


def test_a_prediction_on_another_gpu_is_prior_driven_and_has_its_memory() -> None:
    evidence = on("Tesla T4")
    (own,) = predict(fit(evidence), Question((8,), 8))
    other = asked("L4", evidence)

    assert (own.gpu, other.gpu, other.label) == (None, "L4", "prior-driven")
    assert other.memory_capacity_bytes == 24 * 10**9
    assert other.step_seconds.value == pytest.approx(own.step_seconds.value * 8.1 / 24, rel=0.15)
    wide, narrow = (one.step_seconds.ends[1] / one.step_seconds.ends[0] for one in (other, own))
    assert wide > 1.8
    assert wide > narrow
    assert any("L4 for Tesla T4" in one.part for one in other.assumptions)


def test_the_measured_type_itself_changes_nothing() -> None:
    evidence = on("Tesla T4")
    assert asked("T4", evidence) == predict(fit(evidence), Question((8,), 8))[0]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ((), "not recorded"),
        (("Tesla T4", "Tesla K80"), "unlike devices"),
        (("AMD EPYC",), "'AMD EPYC' is no GPU known here"),
    ],
)
def test_what_the_runs_were_on_must_be_known(devices: tuple[str, ...], said: str) -> None:
    points = [replace(make_point(2, (0.2, 0.204)), devices=devices)]
    with pytest.raises(RequestError, match=said):
        asked("L4", make_evidence(points, MEASURED))


def test_arithmetic_that_a_type_lacks_is_refused() -> None:
    points = [replace(make_point(2, 0.2, precision="bf16"), devices=("NVIDIA A100-SXM4-40GB",) * 2)]
    with pytest.raises(RequestError, match="V100-SXM2-16GB does not train in bf16"):
        asked("V100", make_evidence(points, MEASURED))


def first_tables(folder: Path) -> Path:
    """The tables of the first collection; docs/log.md says what the others showed."""
    index = json.loads((TABLES / "index.json").read_text(encoding="utf-8"))
    index["series"] = index["series"][:36]
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    for table in index["series"]:
        shutil.copy(TABLES / table["file"], folder)
    return folder


def test_programs_that_were_timed_on_two_types(tmp_path: Path) -> None:
    if not (TABLES / "index.json").is_file():
        pytest.skip(f"{TABLES} is not there")
    study = SHARED / "paper" / "epochs.csv"
    found = both_ways(first_tables(tmp_path), study if study.is_file() else None)

    assert len(found) >= 10
    assert {one.label for one in found} == {"prior-driven"}
    assert all(one.inside for one in found)
    assert statistics.median(abs(one.error) for one in found) < 0.15
    # Not quite of Inception-3, 23.6 % of 22.9 %: the better the two others, the less they allow the third.
    assert all(abs(error) < 1.05 * end for error, end in left_out_holds(found).values())
