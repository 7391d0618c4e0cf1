"""Classifiers of timm and torchvision; run by the Python of .venv-vision (make_vision_environment.py)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("timm", reason="timm is not installed: .venv-vision/bin/python -m pytest tests/vision runs this")
pytest.importorskip("torchvision", reason="torchvision is not installed")

import timm
import torchvision
from safetensors.torch import save_file
from timm.layers import BatchNormAct2d

from hub_stand_in import hub_stand_in
from vitscale.errors import RequestError
from vitscale.models import build, libraries
from vitscale.models.batch_norm import over_real_images
from vitscale.study import library_models, model_names, user_model
from vitscale.trial.model_spec import ModelSpec, resolve


def spec_of(name: str, channels: int = 3, **fields: Any) -> ModelSpec:
    return resolve(ModelSpec(name=name, **fields), 7, channels)


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_lists_read_from_source_are_the_libraries_own() -> None:
    assert library_models.models_of("timm") == set(timm.list_models())
    assert library_models.models_of("torchvision") == set(torchvision.models.list_models(module=torchvision.models))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("timm/vit_base_patch16_224", "timm/vit_base_patch16_224"),
        ("timm/vit_base_patch16_224.augreg_in1k", "timm/vit_base_patch16_224"),
        ("hf-hub:timm/resnet18.a1_in1k", "timm/resnet18"),
        ("torchvision/vit_b_16", "torchvision/vit_b_16"),
        ("vit_base_patch16_224", "timm/vit_base_patch16_224"),
        ("vit_b_16", "torchvision/vit_b_16"),
        ("ViT-B/16", "vit-b16"),
    ],
)
def test_a_name_that_means_one_model_is_taken(tmp_path: Path, written: str, meant: str) -> None:
    model = user_model.with_located_files(tmp_path / "study.toml", ModelSpec(name=written))
    assert model.name == meant
    assert bool(model_names.note(written, name=model.name, hf=model.hf)) == (written != meant)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("resnet50", 'Write name = "timm/resnet50" or "torchvision/resnet50"'),
        ("timm/vit_base_patch16_22", "Valid: timm/vit_base_patch16_224,"),
        ("timm/resnet18.a1_in2k", "knows no weights 'a1_in2k' of timm/resnet18. Valid: timm/resnet18.a1_in1k"),
        ("torchvision/vit_b_1", "Valid: torchvision/vit_b_16"),
        ("torchvision/maskrcnn_resnet50_fpn", "has no model 'maskrcnn_resnet50_fpn'"),
    ],
)
def test_other_names_are_refused_with_the_likeliest(tmp_path: Path, written: str, message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        user_model.with_located_files(tmp_path / "study.toml", ModelSpec(name=written))


def test_a_folder_of_the_same_name_is_asked_about(tmp_path: Path) -> None:
    folder = tmp_path / "timm" / "resnet18"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"can mean the configuration in .*/timm/resnet18 and timm/resnet18"):
        user_model.with_located_files(tmp_path / "study.toml", ModelSpec(name="timm/resnet18"))


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "image_size", "channels"),
    [
        ("timm/test_vit", 64, 3),
        ("timm/test_vit", 64, 4),
        ("timm/test_efficientnet", 64, 1),
        ("timm/test_convnext", 64, 3),
        ("timm/test_resnet", 64, 3),
        ("timm/deit_tiny_distilled_patch16_224", 64, 3),
        ("timm/levit_128s", 224, 3),
        ("torchvision/mobilenet_v3_small", 64, 4),
        ("torchvision/squeezenet1_1", 64, 1),
        ("torchvision/googlenet", 64, 3),
        ("torchvision/shufflenet_v2_x0_5", 64, 3),
    ],
)
def test_it_trains_with_norms_over_the_images_that_count(name: str, image_size: int, channels: int) -> None:
    model = build(spec_of(name, channels, image_size=image_size))
    over_real_images(model, synchronised=False)
    logits = model(torch.randn(2, channels, image_size, image_size))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == [], "DDP would wait"


def test_a_norm_with_an_activation_computes_the_same() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(BatchNormAct2d(4, act_layer=torch.nn.SiLU))
    ours = copy.deepcopy(theirs)
    over_real_images(ours, synchronised=False)
    over_real_images(ours, synchronised=True)  # an engine may ask again
    images = torch.randn(6, 4, 5, 5)
    torch.testing.assert_close(ours(images), theirs(images))
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "image_size", "message"),
    [
        ("torchvision/alexnet", 32, "does not take images of 32 x 32 pixels.*Output size is too small"),
        ("timm/no_such_model", 32, "cannot be built.*Unknown model"),
    ],
)
def test_what_cannot_be_built_is_one_message(name: str, image_size: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(spec_of(name, image_size=image_size))


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "swin_t", "convnext_tiny", "googlenet", "mobilenet_v3_small"])
def test_parameters_are_those_that_torchvision_publishes(name: str) -> None:
    (weights, *_) = torchvision.models.get_model_weights(name)
    spec = resolve(ModelSpec(name=f"torchvision/{name}"), 1000)
    with torch.device("meta"):
        model = libraries.builder("torchvision")(spec, name)
    assert sum(parameter.numel() for parameter in model.parameters()) == weights.meta["num_params"]


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "channels"),
    [("timm/test_vit", (64, 96), 3), ("timm/test_efficientnet", (64, 64), 1), ("torchvision/vit_b_32", (64, 96), 3)],
)
def test_weights_of_a_file_are_fitted(tmp_path: Path, name: str, sizes: tuple[int, int], channels: int) -> None:
    """To images of another size and other channels; the head of other classes stays random."""
    pretrained = build(spec_of(name, image_size=sizes[0]))
    with torch.no_grad():
        for parameter in pretrained.parameters():
            parameter.fill_(0.25)
    save_file(pretrained.state_dict(), tmp_path / "weights.safetensors")
    model = ModelSpec(name=name, image_size=sizes[1], weights="weights.safetensors")
    located = user_model.with_located_files(tmp_path / "study.toml", model)
    assert user_model.weights_digest(located) is not None
    built = build(resolve(located, 9, channels))
    random = {n for n, p in built.named_parameters() if (p < 0.2).any()}  # torchvision's heads begin at 0
    heads = {n for n in random if n.startswith(("head", "classifier", "heads"))}
    assert random == heads
    assert heads


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_file(build(spec_of("timm/test_vit", image_size=64)).state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(RequestError, match="are of another model than timm/test_resnet: there is no conv1"):
        build(spec_of("timm/test_resnet", image_size=64, weights=str(tmp_path / "weights.safetensors")))


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("timm/test_vit", "model.pth", "is no safetensors file"),
        ("torchvision/resnet18", "timm/resnet18.a1_in1k", "is no safetensors file or folder beside the study file"),
        ("vit-b16", "alone.safetensors", "these weights need their config.json"),
        ("timm/test_vit", "short.safetensors", "short.safetensors is cut off"),
    ],
)
def test_weights_in_another_form_are_refused_by_plan(tmp_path: Path, name: str, weights: str, message: str) -> None:
    torch.save({}, tmp_path / "model.pth")
    save_file({"a": torch.ones(3)}, tmp_path / "alone.safetensors")
    (tmp_path / "short.safetensors").write_bytes((tmp_path / "alone.safetensors").read_bytes()[:-1])
    located = user_model.with_located_files(tmp_path / "study.toml", ModelSpec(name=name, weights=weights))
    with pytest.raises(RequestError, match=message):
        user_model.weights_digest(located)


def test_weights_of_timm_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a local stand-in for it, and only model.safetensors."""
    pretrained = build(spec_of("timm/test_vit", image_size=64))
    folder = tmp_path / "hub" / "timm" / "test_vit.r160_in1k"
    folder.mkdir(parents=True)
    save_file(pretrained.state_dict(), folder / "model.safetensors")
    with hub_stand_in(tmp_path / "hub", tmp_path / "cache") as hub:
        address = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.cache))
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address)
        model = build(spec_of("timm/test_vit", image_size=64, weights="timm/test_vit.r160_in1k"))
    torch.testing.assert_close(model.state_dict()["pos_embed"], pretrained.state_dict()["pos_embed"])
    assert {request for request in hub.requests if "timm/" in request} == {
        f"{method} timm/test_vit.r160_in1k model.safetensors" for method in ("HEAD", "GET")
    }
