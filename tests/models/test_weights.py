"""Pretrained weights come over by their names, whatever head stands on them; nothing else is read."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from models.test_segmentation import SWIN, VIT, without
from vitscale.errors import RequestError
from vitscale.models import build
from vitscale.models.hub import inflated, interpolated
from vitscale.models.named import swin_configuration
from vitscale.study import user_model
from vitscale.trial.model_spec import ModelSpec, resolve


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def swin(tmp_path: Path, **changes: Any) -> str:
    """A classifier of 9 classes with the body of `SWIN`."""
    spec = resolve(SWIN.model_copy(update=changes), 9)
    return saved(transformers.Swinv2ForImageClassification(swin_configuration(spec, num_labels=9)), tmp_path / "swin")


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
    assert torch.equal(positions, interpolated(before, 17))


def test_positions_are_interpolated_bicubically_by_hand() -> None:
    """From 2 x 2 to 4 x 4: at -1/4, 1/4, 3/4 and 5/4 of a cubic with a = -3/4 (Keys, 1981), ends repeated.

    Its weights a quarter beside a point are -27/256, 225/256, 67/256 and -9/256, so that of 0 and 1 there become
    -27/256, (67 - 9)/256, and from the other end the same taken from 1.
    """
    along = torch.tensor([-27, 58, 198, 283]) / 256
    special = torch.tensor([[9.0, 8.0]])
    rows, columns = torch.meshgrid(torch.arange(2.0), torch.arange(2.0), indexing="ij")
    grid = torch.stack([rows.flatten(), columns.flatten()], dim=1)
    found = interpolated(torch.cat([special, grid])[None], 17)[0]
    assert torch.equal(found[:1], special)
    torch.testing.assert_close(found[1:, 0].view(4, 4), along[:, None].expand(4, 4))
    torch.testing.assert_close(found[1:, 1].view(4, 4), along[None].expand(4, 4))
    two = torch.cat([special, special, grid])[None]
    assert interpolated(two, 18).shape == (1, 18, 2)
    assert torch.equal(interpolated(two, 18)[0, :2], two[0, :2])
    assert interpolated(two, 12) is two, "no grid behind two tokens: refused by its shape"


def test_a_convolution_is_inflated_by_hand() -> None:
    """Kernels 1, 2 and 4 for 5 channels: in turn, times 3/5; for two times 3/2; for one their sum."""
    kernels = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)
    for channels, expected in (
        (5, [0.6, 1.2, 2.4, 0.6, 1.2]), (3, [1.0, 2.0, 4.0]), (2, [1.5, 3.0]), (1, [7.0]),
    ):  # fmt: skip
        found = inflated(kernels, channels)
        assert found.shape == (1, channels, 1, 1)
        torch.testing.assert_close(found.flatten(), torch.tensor(expected))
    torch.testing.assert_close(inflated(kernels[:, :1], 4).flatten(), torch.full((4,), 0.25))


def body(model: Any) -> Any:
    return model.backbone


@pytest.mark.parametrize("channels", [1, 6])
def test_grey_images_give_what_they_gave_in_colour(tmp_path: Path, channels: int) -> None:
    """Where all channels are alike, for every multiple of 3 and for one: a body and its biases stay as they are."""
    source = swin(tmp_path)
    spec = resolve(SWIN.model_copy(update={"weights": source}), 7, channels)
    torch.manual_seed(0)
    model, colour = build(spec), build(resolve(SWIN.model_copy(update={"weights": source}), 7))
    grey = torch.randn(2, 1, 64, 64)
    maps, expected = (
        body(of)(grey.expand(2, count, 64, 64)).feature_maps for of, count in ((model, channels), (colour, 3))
    )
    for found, wanted in zip(maps, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_swin_measures_distances_in_the_windows_it_was_trained_with(tmp_path: Path) -> None:
    """Windows of 8 where weights were learnt in those of 4: a neighbour keeps its bias, those beyond come on top.

    By hand: a distance of 1 is log2(8/3 + 1) / 3 in units of 4 - 1 tokens; in those of 8 - 1 it would be 0.367.
    """
    source = swin(tmp_path)
    larger = SWIN.model_copy(update={"weights": source, "window_size": 8})
    model, same = (build(resolve(spec, 7)) for spec in (larger, larger.model_copy(update={"window_size": 4})))
    tables, learnt = (
        [buffer for name, buffer in of.named_buffers() if name.endswith("relative_coords_table")]
        for of in (model, same)
    )
    assert [table.shape[1] for table in tables] == [15, 15, 7, 3]  # the last two stages have no more tokens
    assert torch.equal(tables[0][:, 4:11, 4:11], learnt[0])
    assert tables[0][0, 7, 8].tolist() == pytest.approx([0.0, math.log2(8 / 3 + 1) / 3])
    assert torch.equal(tables[3], learnt[3])


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    source = swin(tmp_path, hidden_size=32)
    with pytest.raises(RequestError, match=r"are of another model: .* is \[.*\] there and \[.*\] here"):
        build(resolve(SWIN.model_copy(update={"weights": source}), 7))
    with pytest.raises(RequestError, match=r"are of another model: vit.embeddings"):
        build(resolve(VIT.model_copy(update={"weights": source}), 7))


TINY: dict[str, Any] = {
    "image_size": 64, "patch_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "lacking"),
    [
        ("ViT", {"num_hidden_layers": 1}, "no vit.layers.1.attention.q_proj.weight there"),
        ("ViT", {"num_hidden_layers": 3}, "no vit.layers.2.attention.q_proj.weight here"),
        ("Dinov2", {"mlp_ratio": 4}, "no vit.layers.0.attention.q_proj.weight there"),
        ("Beit", {}, "no vit.embeddings.position_embeddings there"),
    ],
)
def test_weights_of_another_depth_or_architecture_are_refused(
    tmp_path: Path, kind: str, config: dict[str, Any], lacking: str
) -> None:
    """All that they have in common is of the same shape."""
    own = getattr(transformers, f"{kind}Config")(**TINY | config)
    source = saved(getattr(transformers, f"{kind}ForImageClassification")(own), tmp_path / "other")
    with pytest.raises(RequestError, match=f"are of another model: there is {lacking}"):
        build(resolve(VIT.model_copy(update={"weights": source, "layers": 2}), 7))


@pytest.mark.parametrize(("ours", "theirs"), [((1, 1, 2, 1), (1, 1, 1, 1)), ((1, 1, 1, 1), (1, 1, 2, 1))])
def test_weights_of_a_swin_of_other_depths_are_refused(
    tmp_path: Path, ours: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    source = swin(tmp_path, depths=theirs)
    where = "there" if sum(ours) > sum(theirs) else "here"
    with pytest.raises(RequestError, match=rf"there is no \w+.encoder.layers.2.blocks.1.* {where}"):
        build(resolve(SWIN.model_copy(update={"weights": source, "depths": ours}), 7))


def test_files_that_lack_a_tensor_of_their_own_model_are_refused(tmp_path: Path) -> None:
    """The library would fill it at random and go on."""
    source = swin(tmp_path)
    path = Path(source) / "model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if name.endswith("blocks.0.attention.self.query.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, path, {"format": "pt"})
    with pytest.raises(RequestError, match=rf"there is no \w+\.{re.escape(lost.partition('.')[2])} there"):
        build(resolve(SWIN.model_copy(update={"weights": source}), 7))


def test_what_else_a_pretrained_model_has_does_not_matter(tmp_path: Path) -> None:
    """A decoder of blocks; another tower of them; no norm behind the blocks, where ours has one."""
    small = {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}
    masked = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**TINY, **small, decoder_num_hidden_layers=1))
    source = saved(masked, tmp_path / "mae")
    model = build(resolve(VIT.model_copy(update={"weights": source, "layers": 2}), 7))
    assert alike(model, source, transformers.ViTMAEForPreTraining, "vit.", "vit.")
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for kind, config, body in (
        ("CLIPModel", transformers.CLIPConfig(text_config=text | {"vocab_size": 99}, vision_config=TINY), "vision_"),
        ("BeitForMaskedImageModeling", transformers.BeitConfig(**TINY), "beit.layers."),
    ):
        source = saved(getattr(transformers, kind)(config), tmp_path / kind)
        spec = resolve(ModelSpec(hf=source, weights=source, image_size=64), 7)
        assert alike(build(spec), source, getattr(transformers, kind), body, body)


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


def test_lost_and_cut_files_are_refused_before_ranks_start(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**TINY)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path, max_shard_size="40KB")
    spec = ModelSpec(hf=str(tmp_path), weights=str(tmp_path), image_size=64)
    assert len(user_model.weights_digest(spec) or "") == 64
    second = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = second.read_bytes()
    for content in (whole[:-1], whole[:100], b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"):
        second.write_bytes(content)
        with pytest.raises(RequestError, match=rf"{second.name} is cut off, or no such file .* Get it again"):
            user_model.weights_digest(spec)
    second.unlink()
    with pytest.raises(RequestError, match=f"{second.name} is not there"):
        user_model.weights_digest(spec)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(RequestError, match=r"model\.safetensors is not there"):
        user_model.weights_digest(spec)


@pytest.mark.parametrize("kind", ["DPT", "MobileViT"])
def test_heads_of_other_names_start_anew_for_other_classes_too(tmp_path: Path, kind: str) -> None:
    small = {"backbone_out_indices": [0, 1, 1, 1], "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
    mobile = {"image_size": 64, "hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8] * 7, "aspp_out_channels": 8}
    config = getattr(transformers, f"{kind}Config")(**TINY | small if kind == "DPT" else mobile, num_labels=7)
    source = saved(getattr(transformers, f"{kind}ForSemanticSegmentation")(config), tmp_path / kind)
    spec = ModelSpec(task="segmentation", hf=source, weights=source, image_size=64)
    theirs, own = load_file(Path(source) / "model.safetensors"), build(resolve(spec, 5)).state_dict()
    unlike = {name for name, tensor in own.items() if name in theirs and not torch.equal(tensor, theirs[name])}
    assert unlike == {name for name in own if name in theirs and own[name].shape != theirs[name].shape}
    assert {len(own[name]) for name in unlike} == {5}


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
