"""Emulated autocast: torch's lists are whole, and on the CPU's list it does what the CPU's own autocast does."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers.utils.generic
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from models.tracing.real_steps import SWIN, UPERNET, VIT, Watch, card_of, configured, named, real_step
from vitscale.models.named import Attention
from vitscale.models.tracing import TraceError
from vitscale.models.tracing.attention import attention_of
from vitscale.models.tracing.autocast import EmulatedAutocast, meta_stands_for
from vitscale.models.tracing.autocast_lists import CAST_CLASSES
from vitscale.models.tracing.building import meta_model
from vitscale.trial.model_card import TraceRequest
from vitscale.trial.model_spec import ModelSpec

META = torch.device("meta")


@pytest.mark.parametrize(("device", "key"), [("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")])
def test_the_lists_have_every_operation_that_torch_casts(device: str, key: str) -> None:
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    names = {name.removeprefix("aten::") for name in kernels if name.startswith("aten::")}
    assert names == CAST_CLASSES[device].keys()


@pytest.mark.parametrize(
    ("macro", "cast_class"),
    [
        ("LOWER_PRECISION_FP", "lower"),
        ("FP32", "fp32"),
        ("FP32_SET_OPT_DTYPE", "fp32_dtype"),
        ("PROMOTE", "promote"),
    ],
)
def test_a_gpu_s_classes_are_those_of_torch_s_header(macro: str, cast_class: str) -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    definition = header.partition(f"#define AT_FORALL_{macro}(_)")[2].partition("\n\n")[0]
    in_header = {".".join(entry.split(", ")) for entry in re.findall(r"_\(([\w, ]+)\)", definition)}
    only_of_cuda = {"cudnn_convolution", "cudnn_convolution_transpose"}  # in autocast_mode.cpp
    assert {name for name, kind in CAST_CLASSES["cuda"].items() if kind == cast_class} - only_of_cuda == in_header


def autocast(device: Literal["cpu", "cuda"] = "cuda", copies: list[Tensor] | None = None) -> EmulatedAutocast:
    made = [] if copies is None else copies
    return EmulatedAutocast(device, torch.bfloat16, lambda weight, copy: made.append(copy))


def test_each_class_of_operation_has_its_dtype() -> None:
    emulated = autocast()
    wide, narrow = (torch.empty(4, 4, device=META, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    with emulated.installed(), emulated.active():
        dtypes = {
            "lower": (wide @ wide).dtype,
            "fp32": narrow.exp().dtype,
            "fp32_dtype": narrow.softmax(-1).dtype,
            "fp32_dtype, set": narrow.softmax(-1, dtype=torch.float64).dtype,
            "fp32_norm": narrow.norm(2).dtype,
            "promote": torch.addcmul(narrow, narrow, wide).dtype,
            "promote, alike": torch.addcmul(narrow, narrow, narrow).dtype,
            "none": (narrow + narrow).dtype,
            "double": (wide.double() @ wide.double()).dtype,
        }
        with pytest.raises(TraceError, match="binary_cross_entropy is unsafe to autocast"):
            nn.functional.binary_cross_entropy(wide, wide)
    assert (wide @ wide).dtype == torch.float32  # outside it does nothing
    single, half = torch.float32, torch.bfloat16
    assert [*dtypes.values()] == [half, single, single, torch.float64, single, single, half, half, torch.float64]


def test_a_weight_is_cast_once_in_a_forward() -> None:
    copies: list[Tensor] = []
    emulated = autocast(copies=copies)
    layer = nn.Linear(4, 4, device=META)
    with emulated.installed():
        with emulated.active():
            with emulated.active():
                layer(layer(torch.empty(2, 4, device=META)))
            layer(torch.empty(2, 4, device=META))
            assert len(copies) == 2
        with emulated.active():
            layer(torch.empty(2, 4, device=META))
    assert len(copies) == 4


def test_a_frozen_weight_is_cast_at_each_use() -> None:
    """torch's cache holds casts of what gets a gradient alone."""
    copies: list[Tensor] = []
    emulated = autocast(copies=copies)
    layer = nn.Linear(4, 4, device=META).requires_grad_(False)
    with emulated.installed(), emulated.active():
        assert layer(torch.empty(2, 4, device=META)).dtype == torch.bfloat16
    assert copies == []


def test_our_own_attention_casts_what_three_matrices_read_once() -> None:
    attention = Attention(8, heads=2).to(META)
    emulated = autocast()
    seen: list[torch.dtype] = []
    attention.q_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with emulated.installed(), emulated.active():
        attention(torch.empty(2, 3, 8, device=META))
    attention(torch.empty(2, 3, 8, device=META))
    assert seen == [torch.bfloat16, torch.float32]


class InFp32(nn.Module):
    """A layer that switches autocast off, by its tensors' device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, device=META)
        self.answers: list[object] = []

    def forward(self, inputs: Tensor) -> Tensor:
        device = inputs.device.type
        self.answers.append((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
        with torch.autocast(device, enabled=False):
            self.answers.append(torch.is_autocast_enabled(device))
            outputs: Tensor = self.layer(inputs)
        return outputs


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_model_that_switches_autocast_off_computes_in_fp32(device: Literal["cuda", "cpu"]) -> None:
    emulated = autocast(device)
    layer = InFp32()
    with emulated.installed(), meta_stands_for(device), emulated.active():
        assert layer(torch.empty(2, 4, device=META)).dtype == torch.float32
        assert layer.layer(torch.empty(2, 4, device=META)).dtype == torch.bfloat16
    assert layer.answers == [(True, torch.bfloat16), False]
    assert not torch.is_autocast_enabled(device)
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.autocast("meta")


class Regions(nn.Module):
    """A layer in regions of autocast that transformers' function begins; notes the dtypes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, device=META)
        self.dtypes: list[torch.dtype] = []

    def forward(self, inputs: Tensor) -> Tensor:
        device = inputs.device.type
        with maybe_autocast(device, enabled=False):
            self.dtypes.append(self.layer(inputs).dtype)
            with maybe_autocast(device, dtype=torch.bfloat16):
                self.dtypes.append(self.layer(inputs).dtype)
            self.dtypes.append(self.layer(inputs).dtype)
        outputs: Tensor = self.layer(inputs)
        self.dtypes.append(outputs.dtype)
        return outputs


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_region_that_transformers_switches_off_is_off_and_one_inside_is_on(device: Literal["cuda", "cpu"]) -> None:
    """Whether or not this machine has the device."""
    emulated = autocast(device)
    model = Regions()
    with emulated.installed(), meta_stands_for(device), emulated.active():
        model(torch.empty(2, 4, device=META))
    single, half = torch.float32, torch.bfloat16
    assert model.dtypes == [single, half, single, half]
    assert maybe_autocast is transformers.utils.generic.maybe_autocast  # as it was before


def test_our_own_attention_casts_nothing_where_autocast_is_switched_off() -> None:
    attention = Attention(8, heads=2).to(META)
    emulated = autocast()
    seen: list[torch.dtype] = []
    attention.q_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with emulated.installed(), meta_stands_for("cuda"), emulated.active(), torch.autocast("meta", enabled=False):
        attention(torch.empty(2, 3, 8, device=META))
    assert seen == [torch.float32]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["all", "checkpointing"])
def test_blocks_in_a_region_that_is_switched_off_multiply_in_fp32_in_the_repetition_too(checkpointing: bool) -> None:
    spec = ModelSpec(factory="models.tracing.factories:blocks_in_fp32", image_size=8, num_classes=7)
    card = card_of(spec, device="cuda", autocast_dtype="bf16", checkpointing=checkpointing)
    copies = {module.name: module.cast_elements for module in card.modules()}
    assert copies == {"first": 8 * 3 + 8, "blocks.0": 0, "blocks.1": 0, "head": 7 * 8 + 7}


def test_weights_that_are_cast_are_on_the_card() -> None:
    card = card_of(named(VIT), device="cuda", autocast_dtype="bf16")
    for module in card.modules():
        elements = sum(torch.Size(shape).numel() for shape in module.shapes)
        assert module.cast_elements == (elements if module.is_cast else 0)
    plain = card_of(named(VIT), device="cuda", weight_dtype="fp32")
    assert {module.cast_elements for module in plain.modules()} == {0}


def dtypes_on_meta(spec: ModelSpec) -> Counter[str]:
    """How often each operation of a forward on meta gave each dtype, under the CPU's autocast."""
    model = meta_model(TraceRequest(model=spec))
    emulated = autocast("cpu")
    watch = Watch(model)
    images = torch.empty(2, spec.channels, spec.image_size, spec.image_size, device=META)
    with attention_of("cpu"), emulated.installed(), watch, emulated.active():
        model(images)
    return Counter(watch.dtypes)


@pytest.mark.parametrize("shape", [VIT, SWIN, UPERNET], ids=["vit", "swin", "upernet"])
def test_the_cpu_s_autocast_gives_the_same_dtypes(shape: dict[str, Any]) -> None:
    spec = named(shape)
    assert dtypes_on_meta(spec) == Counter(real_step(spec, 2, autocast=torch.bfloat16).dtypes)


@pytest.mark.parametrize("name", ["convnext", "beit", "siglip"])
def test_configurations_have_the_same_dtypes_under_the_cpu_s_autocast(name: str, tmp_path: Path) -> None:
    spec = configured(name, tmp_path)
    assert dtypes_on_meta(spec) == Counter(real_step(spec, 2, autocast=torch.bfloat16).dtypes)
