from __future__ import annotations

from contextlib import suppress
from typing import Any

import pynvml
import pytest
import torch

from results_factory import make_trial
from vitscale.engines.base import known_gpu
from vitscale.engines.deepspeed.wrap import configuration, quiet_import


def test_the_configuration_says_what_deepspeed_would_choose_otherwise() -> None:
    trial = make_trial("deepspeed", 2, precision="fp32", micro_batch=8, grad_accum=3)
    assert configuration(trial) == {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "timers": {"throughput": {"enabled": False}},
        "steps_per_print": 2**31 - 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def test_deepspeed_is_told_the_mean_of_unequal_shares_so_that_its_batch_sizes_close() -> None:
    config = configuration(make_trial("deepspeed", 2, micro_batch=8, grad_accum=3, micro_batches=(13, 3)))
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (48, 8)


@pytest.mark.parametrize(
    ("train", "zero"),
    [
        ({"zero_stage": 2, "overlap_comm": True}, {"overlap_comm": True}),
        ({"zero_stage": 2, "overlap_comm": False}, {"overlap_comm": False}),
        # DeepSpeed counts elements: 4 MiB hold 2^20 of fp32 and 2^21 of bf16.
        ({"zero_stage": 1, "bucket_mib": 4}, {"reduce_bucket_size": 2**20}),
        ({"zero_stage": 1, "bucket_mib": 4, "gradient_dtype": "bf16"}, {"reduce_bucket_size": 2**21}),
        ({"zero_stage": 1, "bucket_mib": 4, "precision": "bf16-params"}, {"reduce_bucket_size": 2**21}),
        (
            {"zero_stage": 1, "bucket_mib": 4, "precision": "bf16-params", "gradient_dtype": "fp32"},
            {"reduce_bucket_size": 2**20},
        ),
        ({"zero_stage": 3, "gather_bucket_mib": 4}, {"stage3_prefetch_bucket_size": 2**20}),
        ({"zero_stage": 3, "hpz": 2}, {"zero_hpz_partition_size": 2}),
        ({"zero_stage": 2, "offload": "optimizer"}, {"offload_optimizer": {"device": "cpu"}}),
        (
            {"zero_stage": 3, "offload": "parameters"},
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        ),
    ],
)
def test_what_the_study_sets_of_zero(train: dict[str, Any], zero: dict[str, Any]) -> None:
    found = configuration(make_trial("deepspeed", 2, **({"precision": "fp32"} | train)))
    assert found["zero_optimization"] == {"stage": train["zero_stage"]} | zero
    assert found.get("communication_data_type") == train.get("gradient_dtype")


@pytest.mark.parametrize(
    ("precision", "section", "content"),
    [
        ("bf16", "torch_autocast", {"dtype": "bfloat16", "enabled": True}),
        ("bf16-params", "bf16", {"enabled": True}),
        ("fp16", "fp16", {"enabled": True, "loss_scale": 128}),
    ],
)
def test_a_precision_switches_its_section_on_and_keeps_the_users_settings(
    precision: str, section: str, content: dict[str, Any]
) -> None:
    file = {"fp16": {"loss_scale": 128}, "zero_optimization": {"reduce_bucket_size": 7}}
    found = configuration(make_trial("deepspeed", 2, precision=precision, deepspeed_config=file))
    assert found[section] == content
    assert found["zero_optimization"] == {"stage": 0, "reduce_bucket_size": 7}


@pytest.mark.parametrize(
    ("bf16", "handed_over"),
    [({}, {"check_grad_overflow": False, "enabled": True}), ({"bf16": {"enabled": True}}, {"enabled": True})],
)
def test_the_old_name_of_bf16_is_handed_over_under_the_new_one_alone(
    bf16: dict[str, Any], handed_over: dict[str, Any]
) -> None:
    file = bf16 | {"bfloat16": {"enabled": True, "check_grad_overflow": False}}
    found = configuration(make_trial("deepspeed", 2, precision="bf16-params", deepspeed_config=file))
    assert "bfloat16" not in found
    assert found["bf16"] == handed_over


def test_importing_deepspeed_tries_no_kernel() -> None:
    """Trying all would run compilers, and on a GPU open the device, so that no rank could be a fork."""
    assert vars(quiet_import("cpu").ops)["__compatible_ops__"] == {"deepspeed_shm_comm": False}


def test_what_asks_for_a_gpu_while_it_is_imported_is_told_so_and_opens_none() -> None:
    asked, initialise = torch.cuda.is_available, pynvml.nvmlInit
    with suppress(ZeroDivisionError), known_gpu("cuda"):
        assert torch.cuda.is_available()
        with pytest.raises(pynvml.NVMLError):
            pynvml.nvmlInit()
        _ = 1 / 0  # an import that fails
    with known_gpu("cpu"):
        assert (torch.cuda.is_available, pynvml.nvmlInit) == (asked, initialise)
    assert (torch.cuda.is_available, pynvml.nvmlInit) == (asked, initialise)


def test_what_deepspeed_asks_of_nvml_can_be_made_up_for_in_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its accelerator initialises NVML when it is made, which an import must not; a rank does it later."""
    from deepspeed.accelerator import cuda_accelerator

    monkeypatch.setattr(cuda_accelerator, "pynvml", None)
    with known_gpu("cuda"):
        accelerator = cuda_accelerator.CUDA_Accelerator()
    assert cuda_accelerator.pynvml is None
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    accelerator._init_pynvml()
    assert cuda_accelerator.pynvml is pynvml
