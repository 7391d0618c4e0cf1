"""FLOPs of operations by hand, and of a ConvNeXt, which counters that are wrong for groups read 2.9 times too high."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from models.tracing.real_steps import VIT, configured, named
from vitscale.models.tracing import trace
from vitscale.models.tracing.recorder import Recorder, Recording
from vitscale.trial.model_card import TraceRequest


def recorded(module: nn.Module, *shape: int, needs_input_gradient: bool = True) -> Recording:
    """A forward and a backward of a module on meta."""
    images = torch.empty(*shape, device="meta", requires_grad=needs_input_gradient)
    recorder = Recorder(module, [images])
    with recorder:
        recorder.begin_part("all", block=0)
        output = module(images).sum()
        recorder.begin_backward()
        output.backward()
    return recorder.recording


def flops(recording: Recording, *, backward: bool) -> int:
    return sum(each.flops.flops for each in recording.operations if each.flops and each.is_backward == backward)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_a_convolution_multiplies_a_kernel_at_each_position(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    convolution = kind(8, 16, kernel_size=3, stride=2, padding=1, groups=groups, device="meta")
    recording = recorded(convolution, 5, 8, 12, 12)
    # 6 x 6 outputs of 16 x 8 / groups kernels; transposed, 12 x 12 inputs go to 3 x 3 x 16 / groups outputs each
    positions = 12 * 12 * 8 * 16 if transposed else 6 * 6 * 16 * 8
    forward = 2 * 5 * positions * 9 // groups
    assert flops(recording, backward=False) == forward
    assert flops(recording, backward=True) == 2 * forward  # one for the gradient of the input, one for the kernels'


def test_a_first_convolution_has_no_gradient_of_its_input() -> None:
    convolution = nn.Conv2d(3, 16, kernel_size=4, stride=4, device="meta")
    recording = recorded(convolution, 5, 3, 8, 8, needs_input_gradient=False)
    forward = 2 * 5 * 4 * 16 * 3 * 16
    assert flops(recording, backward=False) == flops(recording, backward=True) == forward


def test_a_linear_layer_is_a_product() -> None:
    recording = recorded(nn.Linear(6, 10, device="meta"), 5, 7, 6)
    assert flops(recording, backward=False) == 2 * 5 * 7 * 6 * 10
    assert flops(recording, backward=True) == 2 * 2 * 5 * 7 * 6 * 10


class Products(nn.Module):
    """Each other operation that multiplies matrices, once: 5 x [3, 4] x [4, 6]."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        columns = torch.empty(5, 4, 6, device="meta")
        added = torch.empty(5, 3, 6, device="meta")
        batched = torch.bmm(rows, columns).sum() + torch.baddbmm(added, rows, columns).sum()
        summed = torch.addbmm(added[0], rows, columns).sum()
        vector = torch.mv(rows[0], columns[0, :, 0]).sum() + torch.dot(rows[0, 0], columns[0, :, 0])
        return batched + summed + vector + torch.addmv(added[0, :, 0], rows[0], columns[0, :, 0]).sum()


def test_products_count_a_multiplication_and_an_addition_each() -> None:
    images = torch.empty(5, 3, 4, device="meta")
    recorder = Recorder(nn.Module(), [images])
    with recorder:
        recorder.begin_part("all", block=0)
        Products()(images)
    batched, matrix_vector, vectors = 2 * 5 * 3 * 4 * 6, 2 * 3 * 4, 2 * 4
    assert flops(recorder.recording, backward=False) == 3 * batched + 2 * matrix_vector + vectors


def test_what_fused_attention_computes_again_is_not_the_model_s_own_work() -> None:
    card = trace(TraceRequest(model=named(VIT), device="cuda", autocast_dtype="bf16"))
    assert card.backward_flops["attention"].of(8) == 2 * card.forward_flops["attention"].of(8)


def test_backward_of_a_convnext_is_two_forwards(tmp_path: Path) -> None:
    card = trace(TraceRequest(model=configured("convnext", tmp_path)))
    forward, backward = card.flops("forward").of(8), card.flops("backward").of(8)
    first = card.parts[0].forward_flops.of(8)  # whose input has no gradient
    assert backward == 2 * forward - first
