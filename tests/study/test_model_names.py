"""What `model.name` means, where neither timm nor torchvision is installed; tests/vision has the rest."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hub_stand_in import hub_stand_in
from vitscale.errors import RequestError
from vitscale.study import model_names, user_model
from vitscale.trial.library_names import default_image_size, library_name
from vitscale.trial.model_spec import ModelSpec, resolve

HAS_LIBRARIES = importlib.util.find_spec("timm") is not None
TINY_VIT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def located(study: Path, name: str) -> ModelSpec:
    return user_model.with_located_files(study, ModelSpec(name=name))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "dinov2", **TINY_VIT}))
    return tmp_path / "study.toml"


def test_a_folder_and_a_hub_name_mean_what_they_mean_in_hf(study: Path) -> None:
    for name in ("tiny", "./tiny", str(study.parent / "tiny"), "facebook/dinov2-base"):
        assert located(study, name) == user_model.with_located_files(study, ModelSpec(hf=name))


@pytest.mark.parametrize("spelling", ["ViT-B/16", "vit_b16", "VIT-B16", "vitb16"])
def test_a_spelling_of_an_own_name_is_taken_and_noted(study: Path, spelling: str) -> None:
    model = located(study, spelling)
    assert model.name == "vit-b16"
    note = model_names.note(spelling, name=model.name, hf=model.hf)
    assert note == f'model.name = "{spelling}" is taken as "vit-b16"'
    assert model_names.note("vit-b16", name="vit-b16", hf=None) == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dinov2_vitb14", 'Write name = "facebook/dinov2-base" or "timm/vit_base_patch14_dinov2"'),
        ("dinov2_vits14_reg", 'Write name = "facebook/dinov2-with-registers-small"'),
        ("dinov3_vits16", 'Write name = "facebook/dinov3-vits16-pretrain-lvd1689m"'),
        ("vit-base-patch16-224", 'Write name = "google/vit-base-patch16-224"'),
        ("convnext-tiny-224", 'Write name = "facebook/convnext-tiny-224"'),
        ("https://huggingface.co/facebook/dinov2-base/tree/main", 'Write name = "facebook/dinov2-base"'),
        ("vit-b6", "Did you mean 'vit-b16'"),
        ("timm/../x", "is no name of timm's"),
        ("timm/", "is no name of timm's"),
        ("../..", "unknown model '../..'"),
        ("no\0name", "unknown model"),
        ("\x1b[31mred", r"unknown model '\\x1b"),
        ("", "unknown model ''"),
    ],
)
def test_other_names_lead_to_what_is_meant(study: Path, name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("..'", r"\.\.'")):
        located(study, name)


def test_a_name_of_a_megabyte_is_one_short_message_at_once(study: Path) -> None:
    for name in ("x" * 1_000_000, "timm/" + "x" * 1_000_000, "a/" * 500_000):
        began = time.monotonic()
        with pytest.raises(RequestError) as refused:
            located(study, name)
        assert len(str(refused.value)) < 800
        assert time.monotonic() - began < 2


@pytest.mark.skipif(HAS_LIBRARIES, reason="timm is installed")
def test_a_library_that_is_not_installed_is_said_with_its_extra(study: Path) -> None:
    for name, extra in (("timm/resnet50", "timm"), ("torchvision/resnet50", "torchvision")):
        with pytest.raises(
            RequestError, match=rf"needs {extra}, which is not installed. Run pip install .*\[{extra}\]"
        ):
            user_model.check(study, ModelSpec(name=name))
        with pytest.raises(RequestError, match="not installed"):
            located(study, name)
    with pytest.raises(RequestError, match='Write name = "timm/vit_base_patch16_224" or "vit-b16"'):
        located(study, "vit_base_patch16_224")
    with pytest.raises(RequestError, match='Write name = "torchvision/vit_b_16"'):
        located(study, "vit_b_16")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("timm/vit_base_patch16_384", 384),
        ("timm/vit_base_patch16_224", 224),
        ("timm/swinv2_base_window12to16_192to256", 256),
        ("timm/vit_base_patch14_dinov2", 224),
        ("timm/levit_384", 224),
        ("timm/regnety_320", 224),
        ("timm/mobilenetv3_large_100", 224),
        ("torchvision/vit_b_16", 224),
    ],
)
def test_the_image_size_is_the_number_at_a_timm_name_s_end(name: str, size: int) -> None:
    parsed = library_name(name)
    assert parsed is not None
    assert default_image_size(parsed) == size
    assert resolve(ModelSpec(name=name), 7).image_size == size
    assert resolve(ModelSpec(name=name, image_size=96), 7).image_size == 96


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"name": "timm/vit_base_patch16_224", "layers": 3},
            r"model\.layers = 3 cannot be set with model\.name = 'timm/",
        ),
        ({"name": "torchvision/vit_b_16", "image_size": 100}, "not divisible by 16.*Valid: 96, 112"),
        ({"name": "torchvision/maxvit_t", "image_size": 256}, "not divisible by 224.*Valid: 224, 448"),
        ({"name": "timm/resnet50", "task": "segmentation"}, "classifies images, and has no segmentation head"),
    ],
)
def test_what_a_library_s_model_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(ModelSpec.model_validate(fields), 7)


@pytest.mark.parametrize("kind", ["clip_vision_model", "siglip_vision_model", "dinov3_vit", "dinov2_with_registers"])
def test_types_without_a_head_are_taken_for_classification(study: Path, kind: str) -> None:
    config = study.parent / "tiny" / "config.json"
    config.write_text(json.dumps({"model_type": kind, **TINY_VIT}))
    assert user_model.check(study, ModelSpec(hf=str(config.parent)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bert", "transformers has no classification of images"),
        ("whisper", "transformers has no classification of images"),
        ("videomae", "which takes videos"),
        ("siglip2_vision_model", "which takes patches of images"),
    ],
)
def test_types_that_take_no_images_are_refused(study: Path, kind: str, message: str) -> None:
    config = study.parent / "tiny" / "config.json"
    config.write_text(json.dumps({"model_type": kind}))
    with pytest.raises(RequestError, match=message):
        user_model.check(study, ModelSpec(hf=str(config.parent)))


def test_backbones_are_taken_for_segmentation_and_others_are_not(study: Path) -> None:
    config = study.parent / "tiny" / "config.json"
    hf = str(config.parent)
    for kind in ("dinov2", "convnext", "swin", "dinov3_vit", "beit"):
        config.write_text(json.dumps({"model_type": kind}))
        assert user_model.check(study, ModelSpec(hf=hf, task="segmentation"))
    config.write_text(json.dumps({"model_type": "clip_vision_model"}))
    with pytest.raises(RequestError, match="transformers has no segmentation of images"):
        user_model.check(study, ModelSpec(hf=hf, task="segmentation"))


ON_THE_HUB = """
from pathlib import Path
from vitscale.models import build
from vitscale.study import user_model
from vitscale.trial.model_spec import ModelSpec, resolve
study = Path("study.toml").absolute()
model = user_model.with_located_files(study, ModelSpec(name="facebook/dinov2-tiny", image_size=32))
assert model.hf == "facebook/dinov2-tiny" and user_model.check(study, model)
print(type(build(resolve(model, 7))).__name__)
try:
    user_model.check(study, user_model.with_located_files(study, ModelSpec(name="facebook/dinov2-tyni")))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_name_of_the_hub_is_had_from_there(study: Path, tmp_path: Path) -> None:
    """From a local stand-in for it."""
    (tmp_path / "hub" / "facebook").mkdir(parents=True)
    (tmp_path / "tiny").rename(tmp_path / "hub" / "facebook" / "dinov2-tiny")
    with hub_stand_in(tmp_path / "hub", tmp_path / "cache") as hub:
        done = subprocess.run(
            [sys.executable, "-c", ON_THE_HUB],
            capture_output=True, text=True, cwd=tmp_path, env=os.environ | hub.environment, check=False, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    model, refusal = done.stdout.splitlines()
    assert model == "Dinov2ForImageClassification"
    assert refusal.startswith("RequestError model.hf 'facebook/dinov2-tyni' is no folder beside the study file")
    assert "GET facebook/dinov2-tiny config.json" in hub.requests
