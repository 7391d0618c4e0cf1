"""Pretrained weights come over by their names, whatever head stands on them; nothing else is read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from models.test_segmentation import SWIN, VIT, without
from vitscale import user_model
from vitscale.errors import RequestError
from vitscale.model_spec import ModelSpec, resolve
from vitscale.models import build
from vitscale.models.swin import configuration


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def swin(tmp_path: Path, **changes: Any) -> str:
    """A classifier of 9 classes with the body of `SWIN`."""
    spec = resolve(SWIN.model_copy(update=changes), 9)
    return saved(transformers.Swinv2ForImageClassification(configuration(spec, num_labels=9)), tmp_path / "swin")


def alike(model: nn.Module, source: str, kind: Any, ours: str, theirs: str) -> bool:
    own, other = model.state_dict(), kind.from_pretrained(source).state_dict()
    body = {name.removeprefix(ours): tensor for name, tensor in own.items() if name.startswith(ours)}
    assert len(body) > 20
    return all(torch.equal(tensor, other[theirs + name]) for name, tensor in body.items())


def test_a_classifiers_body_becomes_that_of_a_segmenter(tmp_path: Path) -> None:
    source = swin(tmp_path)
    torch.manual_seed(1)
    random = build(resolve(SWIN, 7))
    torch.manual_seed(1)
    model = build(resolve(SWIN.model_copy(update={"weights": source}), 7))
    assert alike(model, source, transformers.Swinv2ForImageClassification, "backbone.", "swinv2.")
    head = "decode_head.classifier.weight"
    assert torch.equal(model.state_dict()[head], random.state_dict()[head])


def test_the_same_model_comes_back_whole_but_for_a_head_of_other_classes(tmp_path: Path) -> None:
    trained = build(resolve(SWIN, 7))
    source = saved(trained, tmp_path / "upernet")
    again = build(resolve(SWIN.model_copy(update={"weights": source}), 7))
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in again.state_dict().items())
    other = build(resolve(SWIN.model_copy(update={"weights": source}), 5)).state_dict()
    unlike = [name for name, tensor in trained.state_dict().items() if other[name].shape != tensor.shape]
    assert {name.rpartition(".")[0] for name in unlike} == {"decode_head.classifier", "auxiliary_head.classifier"}


def test_a_vit_takes_positions_of_other_sizes(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        image_size=32, patch_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128
    )
    source = saved(transformers.ViTForImageClassification(config), tmp_path / "vit")
    same = VIT.model_copy(update={"weights": source, "image_size": 32})
    model = build(resolve(same, 7))
    assert alike(model, source, transformers.ViTForImageClassification, "vit.", "vit.")
    larger = build(resolve(same.model_copy(update={"image_size": 64}), 7)).state_dict()
    name = "vit.embeddings.position_embeddings"
    positions, before = larger[name], model.state_dict()[name]
    assert positions.shape == (1, 17, 32)
    assert torch.equal(positions[:, 0], before[:, 0])
    # Bicubic weights add up to one: what all positions share stays.
    torch.testing.assert_close(positions[:, 1:].mean(), before[:, 1:].mean(), rtol=0.2, atol=5e-3)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    source = swin(tmp_path, hidden_size=32)
    with pytest.raises(RequestError, match=r"are of another model: .* is \[.*\] there and \[.*\] here"):
        build(resolve(SWIN.model_copy(update={"weights": source}), 7))
    with pytest.raises(RequestError, match=r"are of another model: vit.embeddings"):
        build(resolve(VIT.model_copy(update={"weights": source}), 7))


def test_what_may_run_code_is_not_read(tmp_path: Path) -> None:
    """A pickle where safetensors should be, by the plan and by the rank alike."""
    source = Path(swin(tmp_path))
    spec = resolve(without(SWIN).model_copy(update={"weights": str(source)}), 7)
    assert len(user_model.weights_digest(spec) or "") == 64
    torch.save({}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"has no file \*.safetensors"):
        user_model.weights_digest(spec)
    with pytest.raises(RequestError, match=r"cannot be loaded"):
        build(spec)


def test_weights_are_known_by_their_content_and_not_by_their_place(tmp_path: Path) -> None:
    source = Path(swin(tmp_path))
    copy = tmp_path / "elsewhere"
    shutil.copytree(source, copy)
    first, second = (
        user_model.weights_digest(ModelSpec(name="swinv2-t", weights=str(path))) for path in (source, copy)
    )
    assert first == second is not None
    (copy / "config.json").write_text("{}")
    assert user_model.weights_digest(ModelSpec(name="swinv2-t", weights=str(copy))) != first
