"""Counts by arithmetic against real models, and what `resolve` fills and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitscale.errors import RequestError
from vitscale.models import build, logits_of
from vitscale.prediction.memory.activations import activations
from vitscale.prediction.memory.in_parts import pieces
from vitscale.trial import model_cost
from vitscale.trial.model_spec import NAMED_MODELS, ModelSpec, resolve
from vitscale.trial.trial import TrainSpec

VITS = [name for name in NAMED_MODELS if name.startswith("vit")]
SWINS = [name for name in NAMED_MODELS if name.startswith("swin")]


def on_meta(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        return build(spec)


def counted_parameters(spec: ModelSpec) -> int:
    return sum(p.numel() for p in on_meta(spec).parameters())


def counted_flops(spec: ModelSpec) -> int:
    model = on_meta(spec)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # refuses to learn from one image
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, spec.channels, spec.image_size, spec.image_size, device="meta"))
    return int(counter.get_total_flops())


def test_vit_b16_is_the_published_model() -> None:
    spec = resolve(ModelSpec(name="vit-b16"), 1000)
    assert model_cost.parameters(spec) == 86_567_656


def test_swin_v2_is_the_published_model() -> None:
    """Liu et al. (2022) round them to 28, 50, 88 and 197 million parameters with 1,000 classes."""
    counts = [model_cost.parameters(resolve(ModelSpec(name=name, image_size=256), 1000)) for name in SWINS]
    assert [round((count or 0) / 1e6, 1) for count in counts] == [28.3, 49.7, 87.9, 196.7]


@settings(max_examples=12, deadline=None)
@given(
    image_size=st.integers(16, 70),
    patch=st.integers(1, 4),
    depths=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    heads=st.integers(1, 3),
    head_size=st.integers(1, 6),
    window=st.integers(1, 9),
    classes=st.integers(2, 12),
    channels=st.integers(1, 9),
)
def test_any_swin_is_counted_exactly(
    image_size: int, patch: int, depths: list[int], heads: int, head_size: int, window: int, classes: int, channels: int
) -> None:
    """Sizes that neither patches nor windows nor stages divide too: the library pads them."""
    asked = ModelSpec(
        name="swinv2-t", image_size=image_size, patch_size=patch, hidden_size=heads * head_size, heads=heads,
        depths=tuple(depths), window_size=window,
    )  # fmt: skip
    spec = resolve(asked, classes, channels)
    assert model_cost.parameters(spec) == counted_parameters(spec)
    assert model_cost.forward_flops(spec) == counted_flops(spec)


@pytest.mark.parametrize("name", NAMED_MODELS)
@pytest.mark.parametrize(("image_size", "classes"), [(224, 1000), (112, 10)])
def test_named_models_are_counted_exactly(name: str, image_size: int, classes: int) -> None:
    spec = resolve(ModelSpec(name=name, image_size=image_size), classes)
    assert model_cost.parameters(spec) == counted_parameters(spec)
    flops = counted_flops(spec)
    assert model_cost.forward_flops(spec) == flops
    assert model_cost.training_flops(spec) == 3 * flops


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(VITS),
    patch=st.integers(1, 9),
    side=st.integers(1, 5),
    heads=st.integers(1, 4),
    head_size=st.integers(1, 8),
    layers=st.integers(1, 3),
    mlp=st.none() | st.integers(1, 40),
    classes=st.integers(2, 12),
    channels=st.integers(1, 9),
)
def test_any_override_is_counted_exactly(
    name: str, patch: int, side: int, heads: int, head_size: int, layers: int, mlp: int | None, classes: int,
    channels: int,
) -> None:  # fmt: skip
    asked = ModelSpec(
        name=name, image_size=patch * side, patch_size=patch, hidden_size=heads * head_size, layers=layers,
        heads=heads, mlp_size=mlp,
    )  # fmt: skip
    spec = resolve(asked, classes, channels)
    assert model_cost.parameters(spec) == counted_parameters(spec)
    assert model_cost.forward_flops(spec) == counted_flops(spec)


@pytest.mark.parametrize("name", VITS)
def test_shapes_are_those_of_the_model_in_its_order(name: str) -> None:
    spec = resolve(ModelSpec(name=name, image_size=112, layers=3, mlp_size=100), 10, 12)
    shapes = model_cost.parameter_shapes(spec)
    assert shapes is not None
    assert [block.repeats for block in shapes.blocks] == [1, 3, 1]
    assert shapes.tensors() == [tuple(parameter.shape) for parameter in on_meta(spec).parameters()]


def test_channels_are_those_of_the_data() -> None:
    """200 channels of patches of 16 x 16 to 768: 197 x 256 x 768 weights more than for 3."""
    spec = resolve(ModelSpec(name="vit-b16"), 1000, 200)
    assert spec.channels == 200
    assert model_cost.parameters(spec) == 86_567_656 + 197 * 256 * 768
    assert resolve(spec, 1000) == spec
    with pytest.raises(RequestError, match=r"model\.channels = 4, and the images have 12.*Remove it"):
        resolve(ModelSpec(name="vit-b16", channels=4), 1000, 12)


def test_flops_by_hand() -> None:
    spec = resolve(
        ModelSpec(name="vit-ti16", image_size=4, patch_size=2, hidden_size=6, heads=2, layers=1, mlp_size=5), 3
    )
    # 4 patches of 12 values to 6; 5 tokens: q, k, v and output 4*36, scores and values 2*5*6, MLP 2*6*5; head 6*3
    assert model_cost.forward_flops(spec) == 2 * (4 * 12 * 6 + 5 * (144 + 60 + 60) + 18)


# --- activation bytes -------------------------------------------------------------------------------------------------


def kept_by_blocks(spec: ModelSpec, images: int, precision: str) -> int:
    """Bytes that a ViT's blocks keep for backward, as memory is forecast."""
    vit = model_cost.vit_shape(spec)
    assert vit is not None
    train = TrainSpec.model_validate({"engine": "none", "micro_batch": images, "precision": precision, "device": "cpu"})
    return vit.layers * activations(spec, train, vit).kept_of_block


@pytest.mark.parametrize(("precision", "coefficient"), [("fp32", 64), ("bf16", 36), ("bf16-params", 32), ("fp16", 36)])
def test_activation_bytes_by_hand(precision: str, coefficient: int) -> None:
    spec = resolve(ModelSpec(name="vit-b16"), 1000)
    statistics = 2 * 2 * (2 if precision == "bf16-params" else 4) + 12 * 4  # of two norms, and of each head's softmax
    assert kept_by_blocks(spec, 8, precision) == (coefficient * 768 + statistics) * 197 * 8 * 12


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
@pytest.mark.parametrize("mlp_size", [128, 48])
@pytest.mark.parametrize("ours", [True, False], ids=["named", "transformers"])
def test_activation_bytes_are_what_autograd_saves(precision: str, mlp_size: int, ours: bool, tmp_path: Path) -> None:
    def spec(layers: int) -> ModelSpec:
        if ours:
            asked = ModelSpec(
                name="vit-ti16", image_size=32, patch_size=8, hidden_size=32, heads=2, layers=layers, mlp_size=mlp_size
            )
            return resolve(asked, 10)
        config = {
            "model_type": "vit", "image_size": 32, "patch_size": 8, "hidden_size": 32, "num_attention_heads": 2,
            "num_hidden_layers": layers, "intermediate_size": mlp_size, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }  # fmt: skip
        folder = tmp_path / str(layers)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return resolve(ModelSpec(hf=str(folder)), 10)

    # The difference between 3 and 2 blocks and between 3 and 2 images leaves one block's bytes of one image.
    saved = {(layers, b): saved_bytes(spec(layers), b, precision) for layers in (2, 3) for b in (2, 3)}
    one_block = saved[3, 3] - saved[2, 3] - saved[3, 2] + saved[2, 2]
    assert kept_by_blocks(spec(1), 1, precision) == one_block


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
@pytest.mark.parametrize(("image_size", "window"), [(32, 4), (28, 3)])
def test_activation_bytes_of_swin_are_what_autograd_saves(precision: str, image_size: int, window: int) -> None:
    """Of one image more: what all images share drops out."""

    def spec(depths: tuple[int, ...]) -> ModelSpec:
        asked = ModelSpec(
            name="swinv2-t", image_size=image_size, patch_size=2, hidden_size=12, heads=3, depths=depths,
            window_size=window,
        )  # fmt: skip
        return resolve(asked, 10)

    def of_an_image(depths: tuple[int, ...]) -> int:
        return saved_bytes(spec(depths), 3, precision) - saved_bytes(spec(depths), 2, precision)

    def counted(depths: tuple[int, ...], images: int) -> int:
        train = TrainSpec.model_validate(
            {"engine": "none", "micro_batch": images, "precision": precision, "device": "cpu"}
        )
        return sum(part.kept for part in pieces(spec(depths), train).parts)

    for depths in ((2, 3), (1, 1)):
        image, logits = image_size**2 * 3 * (4 if precision == "fp32" else 2), 2 * 10 * 4  # the loss keeps these
        assert counted(depths, 3) - counted(depths, 2) - logits == of_an_image(depths) - image


def saved_bytes(spec: ModelSpec, images: int, precision: str) -> int:
    """Bytes of distinct memory that autograd keeps in a forward pass, the weights themselves left out."""
    dtype = torch.bfloat16 if precision == "bf16-params" else torch.float32
    model = build(spec).to(dtype)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[torch.Tensor] = []  # holding them keeps an address from being used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    batch = torch.zeros(images, 3, spec.image_size, spec.image_size, dtype=dtype)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        logits_of(model(batch))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in storages.items() if address not in weights)


# --- resolve ----------------------------------------------------------------------------------------------------------


def test_resolve_fills_every_field_of_a_named_model() -> None:
    assert resolve(ModelSpec(name="vit-h14"), 100) == ModelSpec(
        name="vit-h14", image_size=224, patch_size=14, num_classes=100, hidden_size=1280, layers=32, heads=16,
        mlp_size=5120,
    )  # fmt: skip


def test_resolve_fills_every_field_of_a_named_swin() -> None:
    assert resolve(ModelSpec(name="swinv2-b", image_size=256), 100) == ModelSpec(
        name="swinv2-b", image_size=256, patch_size=4, num_classes=100, hidden_size=128, heads=4, depths=(2, 2, 18, 2),
        window_size=8,
    )  # fmt: skip


def test_the_mlp_follows_an_overridden_hidden_size() -> None:
    assert resolve(ModelSpec(name="vit-b16", hidden_size=96), 10).mlp_size == 384
    assert resolve(ModelSpec(name="vit-b16", hidden_size=96, mlp_size=100), 10).mlp_size == 100


def test_resolving_twice_changes_nothing_and_more_classes_may_be_asked_for() -> None:
    once = resolve(ModelSpec(name="vit-s16", num_classes=1000), 10)
    assert once.num_classes == 1000
    assert resolve(once, 10) == once


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, r"exactly one of name, hf and factory; it has none of them"),
        ({"name": "vit-b16", "factory": "a:b"}, r"it has name and factory"),
        ({"name": "vit-b61"}, r"unknown model 'vit-b61'.*Did you mean 'vit-b16'"),
        ({"name": "x" * 200_000}, r"200,000 characters"),
        ({"name": "vit-b16", "image_size": 225}, r"225 is not divisible by patch_size = 16. Valid: 224, 240"),
        ({"name": "vit-b16", "image_size": 8}, r"8 is not divisible by patch_size = 16. Valid: 16\."),
        ({"name": "vit-b16", "image_size": 8191}, r"Valid: 8176, 8192"),
        (
            {"name": "vit-b16", "hidden_size": 100},
            r"hidden_size = 100 is not divisible by heads = 12. Valid: 4, 5, 10, 20",
        ),
        ({"name": "vit-b16", "num_classes": 9}, r"num_classes = 9 is fewer than the dataset's 10"),
        ({"factory": "module.function"}, r"'module.function' is not of the form 'module:function'"),
        ({"factory": "a:b()"}, r"'a:b\(\)' is not of the form"),
        ({"factory": "a..b:c"}, r"is not of the form"),
        ({"factory": "os;x:c"}, r"is not of the form"),
        ({"factory": "a:b\n"}, r"is not of the form"),
        ({"factory": "a" * 200_000 + ":b"}, r"200,002 characters"),
        ({"factory": "a:b", "layers": 3}, r"model.layers = 3 cannot be set with model.factory"),
        ({"name": "swinv2-t", "layers": 3}, r"model.layers = 3 has no meaning for swinv2-t. Valid: .*depths"),
        ({"name": "vit-b16", "window_size": 8}, r"model.window_size = 8 has no meaning for vit-b16"),
        ({"name": "swinv2-t", "image_size": 31}, r"31 leaves nothing of an image for the last of 4 stages. Valid: 32"),
        ({"name": "swinv2-t", "hidden_size": 100}, r"hidden_size = 100 is not divisible by heads = 3"),
    ],
)
def test_what_cannot_be_built_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        resolve(ModelSpec.model_validate(asked), 10)
    assert len(str(caught.value)) < 600


def test_a_factory_is_not_counted() -> None:
    spec = resolve(ModelSpec(factory="my_models.vit:build", image_size=30), 10)
    assert (spec.num_classes, spec.image_size, spec.patch_size) == (10, 30, None)
    assert model_cost.parameters(spec) is None
    assert model_cost.parameter_shapes(spec) is None
    assert model_cost.forward_flops(spec) is None
    assert model_cost.training_flops(spec) is None
    assert model_cost.vit_shape(spec) is None


def test_counting_an_unresolved_spec_is_a_bug() -> None:
    with pytest.raises(ValueError, match="resolve"):
        model_cost.parameters(ModelSpec(name="vit-b16"))


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, vitscale.trial.model_spec; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vit_base_patch16_224", 'name = "vit-b16",'),
        ("vit_b_16", 'name = "vit-b16",'),
        ("ViT-B/16", 'name = "vit-b16",'),
        ("ViT-L16", 'name = "vit-l16",'),
        ("vit-b32", 'name = "vit-b16" with patch_size = 32,'),
        ("google/vit-large-patch16-224", 'name = "vit-l16",'),
        ("deit_tiny_patch16_224", 'name = "vit-ti16",'),
        ("vit_large_patch14_224", 'name = "vit-l16" with patch_size = 14,'),
        ("vit_huge_patch14_224", 'name = "vit-h14",'),
    ],
)
def test_names_of_other_libraries_lead_to_ours(name: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"Write {meant}"):
        resolve(ModelSpec(name=name), 10)
