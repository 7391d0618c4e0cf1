"""Heads on models of transformers that have none for the task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vitscale.errors import RequestError
from vitscale.models import build, logits_of
from vitscale.models.backbones import PooledClassifier
from vitscale.models.named import quiet_transformers
from vitscale.trial.model_spec import ModelSpec, resolve

TINY_VIT = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 64,
    "patch_size": 16,
}  # fmt: skip


def spec_of(folder: Path, model_type: str, content: dict[str, Any], **fields: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **content}))
    return resolve(ModelSpec(hf=str(folder), image_size=64, **fields), 7)


@pytest.mark.parametrize(
    ("model_type", "content"),
    [
        ("clip_vision_model", TINY_VIT),
        ("siglip_vision_model", TINY_VIT),
        ("dinov3_vit", TINY_VIT),
        ("dinov3_convnext", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
        ("vit_mae", TINY_VIT),
        ("vitdet", TINY_VIT),  # gives maps [b, h, height, width]
        ("chinese_clip", {"vision_config": TINY_VIT}),  # the text tower is not built
        ("altclip", {"vision_config": TINY_VIT}),  # whose vision tower transformers' own table leaves out
        ("groupvit", {"vision_config": TINY_VIT}),  # reads values, so that it cannot run on meta tensors
    ],
)
def test_a_backbone_without_a_head_gets_a_linear_one(tmp_path: Path, model_type: str, content: dict[str, Any]) -> None:
    model = build(spec_of(tmp_path, model_type, content))
    assert isinstance(model, PooledClassifier)
    assert not any("text" in name for name, _ in model.named_parameters())
    logits = logits_of(model(torch.randn(2, 3, 64, 64)))
    assert logits.shape == (2, 7)
    torch.autograd.backward(logits.sum())
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == [], "DDP would wait for these"


def test_a_masked_autoencoder_sees_all_patches(tmp_path: Path) -> None:
    model = build(spec_of(tmp_path, "vit_mae", TINY_VIT))
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(images), model(images))


@pytest.mark.parametrize(
    ("model_type", "content", "maps"),
    [
        ("dinov2", TINY_VIT, ["stage1", "stage2", "stage3", "stage4"]),
        ("dinov2", TINY_VIT | {"num_hidden_layers": 8}, ["stage2", "stage4", "stage6", "stage8"]),
        ("dinov3_vit", TINY_VIT, ["stage1", "stage2", "stage3", "stage4"]),
        ("convnext", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, [f"stage{n}" for n in range(1, 5)]),
        ("swin", {"embed_dim": 16, "depths": [1, 1, 1], "num_heads": [1, 2, 4], "window_size": 2}, None),
    ],
)
def test_a_backbone_labels_pixels_below_upernet(
    tmp_path: Path, model_type: str, content: dict[str, Any], maps: list[str] | None
) -> None:
    model: Any = build(spec_of(tmp_path, model_type, content, task="segmentation", auxiliary_weight=0.0))
    assert type(model).__name__ == "UperNetForSemanticSegmentation"
    if maps is not None:
        assert list(model.config.backbone_config.out_features) == maps
    logits = logits_of(model(torch.randn(2, 3, 64, 64)))
    assert logits.shape == (2, 7, 64, 64)
    torch.autograd.backward(logits.sum())
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_beit_s_own_upernet_gets_four_blocks(tmp_path: Path) -> None:
    model: Any = build(spec_of(tmp_path, "beit", TINY_VIT, task="segmentation"))
    assert list(model.config.out_indices) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("model_type", "content", "message"),
    [
        ("timesformer", TINY_VIT, "describes no model that can be built"),
        ("siglip2", {"vision_config": TINY_VIT}, "does not take images of 64 x 64 pixels"),
    ],
)
def test_a_model_that_takes_no_images_is_refused_before_it_trains(
    tmp_path: Path, model_type: str, content: dict[str, Any], message: str
) -> None:
    spec = spec_of(tmp_path, model_type, content)
    with pytest.raises(RequestError, match=message):
        build(spec)


@pytest.mark.parametrize(
    ("model_type", "whole", "content"),
    [
        ("clip_vision_model", "CLIPVisionModel", TINY_VIT),
        ("clip_vision_model", "CLIPModel", TINY_VIT),
        ("siglip_vision_model", "SiglipVisionModel", TINY_VIT | {"image_size": 96}),  # its positions are resized
        ("dinov3_vit", "DINOv3ViTModel", TINY_VIT),
    ],
)
def test_a_backbone_takes_pretrained_weights(
    tmp_path: Path, model_type: str, whole: str, content: dict[str, Any]
) -> None:
    transformers = quiet_transformers()
    kind = getattr(transformers, whole)
    is_composite = whole == "CLIPModel"
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    fields: dict[str, Any] = {"vision_config": content, "text_config": text} if is_composite else content
    pretrained = kind(kind.config_class(**fields))
    pretrained.save_pretrained(tmp_path / "pretrained")
    model = build(spec_of(tmp_path, model_type, content, weights=str(tmp_path / "pretrained")))
    saved = load_file(tmp_path / "pretrained" / "model.safetensors")
    own = model.state_dict()
    name = next(name for name in own if name.endswith(("norm1.weight", "q_proj.weight")))
    core = name.removeprefix("backbone.").removeprefix("model.")
    same = [tensor for saved_name, tensor in saved.items() if saved_name.endswith(core) and "text" not in saved_name]
    assert any(torch.equal(own[name], tensor) for tensor in same), (name, list(saved)[:5])


def test_upernet_takes_a_pretrained_backbone(tmp_path: Path) -> None:
    transformers = quiet_transformers()
    transformers.Dinov2Model(transformers.Dinov2Config(**TINY_VIT)).save_pretrained(tmp_path / "pretrained")
    spec = spec_of(tmp_path, "dinov2", TINY_VIT, task="segmentation", weights=str(tmp_path / "pretrained"))
    model = build(spec)
    saved = load_file(tmp_path / "pretrained" / "model.safetensors")
    torch.testing.assert_close(model.state_dict()["backbone.layernorm.weight"], saved["layernorm.weight"])
    torch.testing.assert_close(
        model.state_dict()["backbone.embeddings.position_embeddings"], saved["embeddings.position_embeddings"]
    )
