"""What a rank records of where it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from results_factory import make_trial
from vitscale import engines
from vitscale.worker.surroundings import allocation, tf32_allowed


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"SLURM_JOB_ID": "4711", "SLURM_ARRAY_JOB_ID": "4700"}, "slurm 4711"),
        ({"PBS_JOBID": "99.head"}, "pbs 99.head"),
        ({"LSB_JOBID": "12"}, "lsf 12"),
        ({"SLURM_JOB_ID": ""}, None),
        ({}, None),
    ],
)
def test_the_job_that_holds_the_hosts(variables: dict[str, str], named: str | None) -> None:
    assert allocation(variables) == named


def test_fp32_is_multiplied_in_fp32_whatever_a_container_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own default would let cuDNN take TF32 for the convolution that cuts an image into patches."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("high")
    assert tf32_allowed(None)
    trial = make_trial("none", 1)
    engines.build(nn.Linear(2, 2), trial, torch.device("cpu"))
    assert not tf32_allowed(None)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("override", "allowed"), [("0", False), ("1", True), ("", False), (None, False)])
def test_nvidias_libraries_obey_the_environment_first(override: str | None, allowed: bool) -> None:
    trial = make_trial("none", 1)
    engines.build(nn.Linear(2, 2), trial, torch.device("cpu"))
    assert tf32_allowed(override) is allowed
