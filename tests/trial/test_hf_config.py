"""Shapes from config.json files, good and hostile; the counts against what transformers builds from the same file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitscale.errors import RequestError
from vitscale.models import build
from vitscale.trial import model_cost
from vitscale.trial.model_spec import ModelSpec, hf_shape, read_config, resolve

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def folder(path: Path, content: dict[str, Any] | str | bytes) -> str:
    text = json.dumps(content) if isinstance(content, dict) else content
    (path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "vit", **SMALL},
        {"model_type": "vit", **SMALL, "qkv_bias": False, "image_size": [32, 32], "patch_size": [8, 8]},
        {"model_type": "deit", **SMALL, "architectures": ["DeiTForImageClassificationWithTeacher"]},
        {"model_type": "vit", "num_hidden_layers": 1},
    ],
)
@pytest.mark.parametrize("image_size", [None, 64])
def test_vit_and_deit_are_counted_exactly(tmp_path: Path, content: dict[str, Any], image_size: int | None) -> None:
    asked = {"hf": folder(tmp_path, content)} | ({} if image_size is None else {"image_size": image_size})
    spec = resolve(ModelSpec.model_validate(asked), 7)
    with torch.device("meta"):
        model = build(spec)
    assert model_cost.parameters(spec) == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, spec.image_size, spec.image_size, device="meta"))
    assert model_cost.forward_flops(spec) == counter.get_total_flops()
    assert model_cost.vit_shape(spec) is not None


def test_the_folder_gives_the_image_size_unless_asked_otherwise(tmp_path: Path) -> None:
    hf = folder(tmp_path, {"model_type": "vit", **SMALL})
    assert resolve(ModelSpec(hf=hf), 7) == ModelSpec(
        hf=hf, image_size=32, patch_size=8, num_classes=7, hidden_size=32, layers=2, heads=2, mlp_size=48
    )
    assert resolve(ModelSpec(hf=hf, image_size=224), 7).image_size == 224
    own_words = {"layers": 9, "heads": "two", "mlp_size": 1}  # of a [model], and none of the file's
    assert hf_shape(folder(tmp_path, {"model_type": "vit", **own_words, **SMALL})) == hf_shape(
        folder(tmp_path, {"model_type": "vit", **SMALL})
    )
    assert resolve(resolve(ModelSpec(hf=hf), 7), 7) == resolve(ModelSpec(hf=hf), 7)


def test_another_shape_than_the_folders_is_refused(tmp_path: Path) -> None:
    hf = folder(tmp_path, {"model_type": "vit", **SMALL})
    with pytest.raises(RequestError, match=r"layers = 3 cannot be set with model.hf, which says 2"):
        resolve(ModelSpec(hf=hf, layers=3), 7)
    with pytest.raises(RequestError, match=r"30 is not divisible by patch_size = 8. Valid: 24, 32"):
        resolve(ModelSpec(hf=hf, image_size=30), 7)


@pytest.mark.parametrize(
    "content", [{"model_type": "swin"}, {}, {"model_type": ["vit"]}, {"model_type": "vit", "head_dim": 9}]
)
def test_what_is_not_counted_is_unavailable(tmp_path: Path, content: dict[str, Any]) -> None:
    spec = resolve(ModelSpec(hf=folder(tmp_path, content)), 7)
    assert (spec.num_classes, spec.hidden_size) == (7, None)
    assert model_cost.parameters(spec) is None
    assert model_cost.forward_flops(spec) is None


@pytest.mark.parametrize("hf", ["facebook/dinov2-base", "resnet-50"])
def test_a_hub_name_is_left_to_the_hub(hf: str) -> None:
    assert model_cost.parameters(resolve(ModelSpec(hf=hf), 7)) is None


@pytest.mark.parametrize(
    "hf",
    ["./no/such/folder", "/no/such", "a/b/c", "../up", "", "a\0b", "~nobody-of-that-name/x", "x" * 200_000, "a b", "ü"],
)
def test_neither_folder_nor_hub_name_is_refused(hf: str) -> None:
    with pytest.raises(RequestError, match=r"model\.hf") as caught:
        resolve(ModelSpec(hf=hf), 7)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        "[1, 2]",
        '{"model_type": "vit"',
        "[" * 100_000,
        '{"a": ' + "9" * 10_000 + "}",
        '{"model_type": "vit"}' + " " * (1 << 20),
    ],
    ids=["empty", "binary", "list", "truncated", "nested", "huge-number", "too-long"],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(RequestError, match=r"config\.json|cannot be read"):
        resolve(ModelSpec(hf=folder(tmp_path, content)), 7)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "32"), ("hidden_size", 0), ("num_hidden_layers", 10**9), ("num_attention_heads", True),
     ("intermediate_size", 0), ("image_size", [32, 64]), ("patch_size", True), ("qkv_bias", 1)],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(RequestError, match=key):
        resolve(ModelSpec(hf=folder(tmp_path, {"model_type": "vit", **SMALL, key: value})), 7)


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no file config\.json"):
        read_config(str(tmp_path))
    os.mkfifo(tmp_path / "config.json")  # reading a pipe would wait for ever
    with pytest.raises(RequestError, match=r"has no file config\.json"):
        read_config(str(tmp_path))
