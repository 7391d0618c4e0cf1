"""Models of segmentation: what is built, counted and trained, auxiliary heads included."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.test_models import hf_spec
from trial.test_model_spec import counted_flops, counted_parameters, saved_bytes
from vitscale.errors import RequestError
from vitscale.models import build, logits_of, refuse_other_sizes
from vitscale.models.named import AuxiliaryLogits
from vitscale.prediction.memory.in_parts import pieces
from vitscale.trial import model_cost
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import Precision, TrainSpec

SWIN = ModelSpec(
    task="segmentation", name="swinv2-t", image_size=64, hidden_size=16, heads=2, depths=(1, 1, 1, 1), window_size=4,
    decoder_size=24,
)  # fmt: skip
VIT = ModelSpec(
    task="segmentation", name="vit-ti16", image_size=64, patch_size=16, layers=1, hidden_size=32, heads=2,
    decoder_size=24,
)  # fmt: skip
SMALL_BACKBONE = {
    "model_type": "swinv2", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
TINY_BEIT = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 64,
    "patch_size": 16, "out_indices": [0, 1, 2, 3], "semantic_loss_ignore_index": 255, "auxiliary_channels": 16,
}  # fmt: skip


def without(spec: ModelSpec) -> ModelSpec:
    return spec.model_copy(update={"auxiliary_weight": 0.0})


@pytest.mark.parametrize("channels", [3, 12])
@pytest.mark.parametrize("spec", [SWIN, VIT, without(SWIN), without(VIT), SWIN.model_copy(update={"image_size": 70})])
def test_named_models_are_counted_exactly(spec: ModelSpec, channels: int) -> None:
    spec = resolve(spec, 7, channels)
    assert model_cost.parameters(spec) == counted_parameters(spec)
    assert model_cost.forward_flops(spec) == counted_flops(spec)


@pytest.mark.parametrize("base", [SWIN, VIT, without(VIT), SWIN.model_copy(update={"depths": (1, 1, 1)})])
def test_the_channels_of_every_batch_norm_are_known(base: ModelSpec) -> None:
    spec = resolve(base, 7)
    built = [module.num_features for module in build(spec).modules() if isinstance(module, nn.BatchNorm2d)]
    assert sorted(model_cost.batch_norms(spec) or ()) == sorted(built)


@pytest.mark.parametrize(("name", "size"), [("swinv2-t", 512), ("swinv2-b", 640), ("vit-b16", 512)])
def test_models_of_full_size_are_counted_exactly(name: str, size: int) -> None:
    spec = resolve(ModelSpec(task="segmentation", name=name, image_size=size), 150)
    assert (spec.decoder_size, spec.auxiliary_weight) == (512, 0.4)
    assert model_cost.parameters(spec) == counted_parameters(spec)
    assert model_cost.forward_flops(spec) == counted_flops(spec)


@pytest.mark.parametrize(("precision", "pixel_bytes"), [("fp32", 4), ("bf16", 2), ("bf16-params", 2)])
@pytest.mark.parametrize(
    "base", [SWIN, VIT, without(SWIN), without(VIT)], ids=["swin", "vit", "swin without", "vit without"]
)
def test_what_is_forecast_to_be_kept_is_what_autograd_saves(
    base: ModelSpec, precision: Precision, pixel_bytes: int
) -> None:
    """Of one image more. Under autocast maps are cast for each convolution that takes them, and what pooling takes
    stays in fp32."""
    spec = resolve(base, 7)

    def forecast(images: int) -> int:
        train = TrainSpec(engine="none", micro_batch=images, precision=precision, device="cpu", batch_norm="local")
        return sum(part.kept for part in pieces(spec, train).parts[:-1])  # but the loss

    saved = saved_bytes(spec, 3, precision) - saved_bytes(spec, 2, precision)
    assert forecast(3) - forecast(2) + pixel_bytes * 3 * 64 * 64 == saved


@pytest.mark.parametrize("auxiliary", [True, False])
@pytest.mark.parametrize("base", [SWIN, VIT], ids=["swin", "vit"])
def test_every_parameter_gets_a_gradient(base: ModelSpec, auxiliary: bool) -> None:
    """From the logits and those of the auxiliary head together; from the logits alone some get none."""
    model = build(resolve(base if auxiliary else without(base), 7))
    left_out = unreached(model)
    if auxiliary:
        assert left_out
        assert all(name.startswith("auxiliary_head") for name in left_out)
    second = AuxiliaryLogits(model, None)
    assert unreached(model, second) == []
    assert second.take() is None


def unreached(model: nn.Module, auxiliary: AuxiliaryLogits | None = None) -> list[str]:
    model.zero_grad()
    logits = logits_of(model(torch.randn(2, 3, 64, 64)))
    assert logits.shape[:2] == (2, 7)
    loss = logits.square().mean()
    if auxiliary is not None and (second := auxiliary.take()) is not None:
        assert second.shape[:2] == (2, 7)
        loss = loss + 0.4 * second.square().mean()
    torch.autograd.backward(loss)
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def test_evaluation_keeps_no_auxiliary_logits() -> None:
    model = build(resolve(SWIN, 7)).eval()
    auxiliary = AuxiliaryLogits(model, 0.4)
    with torch.no_grad():
        model(torch.randn(1, 3, 64, 64))
    assert auxiliary.take() is None


@pytest.mark.parametrize(
    ("model_type", "content"),
    [
        ("upernet", {"backbone_config": SMALL_BACKBONE, "hidden_size": 16, "auxiliary_channels": 8}),
        ("beit", TINY_BEIT),
        ("segformer", {"hidden_sizes": [8, 8, 8, 8], "depths": [1] * 4, "decoder_hidden_size": 16}),
    ],
)
def test_any_configuration_of_segmentation_is_built(tmp_path: Path, model_type: str, content: dict[str, Any]) -> None:
    hf_spec(tmp_path, model_type, **content)
    asked = ModelSpec(task="segmentation", hf=str(tmp_path), image_size=64)
    model = build(resolve(asked, 7))
    assert unreached(model, AuxiliaryLogits(model, None)) == []
    of_five_channels = build(resolve(asked, 7, 5))
    assert logits_of(of_five_channels(torch.randn(2, 5, 64, 64))).shape[:2] == (2, 7)
    if model_type != "segformer":
        assert AuxiliaryLogits(model, None).weight == 0.4
        assert AuxiliaryLogits(model, 0.3).weight == 0.3
        assert not any("auxiliary_head" in name for name, _ in build(resolve(without(asked), 7)).named_parameters())


TINY_DPT = {
    "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 64,
    "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "content", "squares_alone"), [("beit", TINY_BEIT, False), ("dpt", TINY_DPT, True)]
)
def test_a_model_of_squares_is_refused_where_whole_pictures_are_evaluated(
    tmp_path: Path, model_type: str, content: dict[str, Any], squares_alone: bool
) -> None:
    """As the library itself would, an epoch later."""
    hf_spec(tmp_path, model_type, **content)
    spec = resolve(ModelSpec(task="segmentation", hf=str(tmp_path), image_size=64), 7)
    model = build(spec)
    picture = torch.randn(1, 3, 64, 85)
    if not squares_alone:
        refuse_other_sizes(model, spec)
        assert model.training
        model.eval()(picture)
        return
    with pytest.raises(
        RequestError, match=r'does not take pictures of 64 x 85 pixels.*Set data.evaluation = "sliding"'
    ):
        refuse_other_sizes(model, spec)
    with pytest.raises(RuntimeError):
        model.eval()(picture)


def test_a_model_that_reads_values_is_not_refused() -> None:
    """What runs without values alone cannot tell."""

    class Reading(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input if input.sum().item() > 0 else -input)

    spec = ModelSpec(task="segmentation", factory="own:build", image_size=64, num_classes=7)
    refuse_other_sizes(Reading(3, 7, 1), spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "classification"}, "decoder_size = 24 is of a named model of segmentation alone"),
        ({"task": "classification", "decoder_size": None, "auxiliary_weight": 0.1}, "auxiliary_weight = 0.1 is of"),
        ({"depths": (1, 1)}, r"depths = \[1, 1\] makes 2 feature maps, too few for UperNet. Valid: 3 stages or more"),
    ],
)
def test_what_cannot_be_built_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(SWIN.model_copy(update=change), 7)


def test_a_vit_of_one_patch_has_no_pyramid() -> None:
    with pytest.raises(RequestError, match=r"image_size = 16 is one patch.*Valid: 32 or more"):
        resolve(VIT.model_copy(update={"image_size": 16}), 7)


def test_a_plain_vit_of_the_hub_is_refused_with_what_to_do(tmp_path: Path) -> None:
    hf_spec(tmp_path, "vit", hidden_size=32, num_attention_heads=2, image_size=64)
    with pytest.raises(RequestError, match=r"is a plain ViT.*Name a vit-\* model"):
        resolve(ModelSpec(task="segmentation", hf=str(tmp_path), image_size=64), 7)


FACTORY = """
from torch import nn

class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, num_classes, 1)
        self.auxiliary_head = nn.Conv2d(4, num_classes, 1)

    def forward(self, images):
        hidden = self.body(images)
        self.auxiliary_head(hidden)
        return self.head(hidden)

def build(num_classes, image_size):
    return Model(num_classes)
"""


@pytest.mark.parametrize(("weight", "used"), [(None, True), (0.2, True), (0.0, False)])
def test_a_factorys_auxiliary_head_is_trained_or_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: float | None, used: bool
) -> None:
    (tmp_path / "vitscale_test_segmenter.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vitscale_test_segmenter", raising=False)
    spec = ModelSpec(
        task="segmentation", factory="vitscale_test_segmenter:build", image_size=64, auxiliary_weight=weight
    )
    model = build(resolve(spec, 7))
    auxiliary = AuxiliaryLogits(model, weight)
    assert unreached(model, auxiliary) == []
    assert sum(p.requires_grad for p in model.parameters()) == (6 if used else 4)
    assert model_cost.parameters(resolve(spec, 7)) is None
