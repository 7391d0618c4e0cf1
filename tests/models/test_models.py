"""What `build` makes of every kind of spec, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vitscale.errors import RequestError
from vitscale.models import build, logits_of
from vitscale.trial.model_cost import parameters
from vitscale.trial.model_spec import ModelSpec, resolve

TINY_VIT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
TINY_CNN: dict[str, Any] = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}


def hf_spec(path: Path, model_type: str, **content: Any) -> ModelSpec:
    (path / "config.json").write_text(json.dumps({"model_type": model_type, **content}))
    return resolve(ModelSpec(hf=str(path), image_size=64), 7)


def tiny(**fields: Any) -> ModelSpec:
    shape = {"image_size": 32, "patch_size": 8, "hidden_size": 48, "layers": 2}
    return resolve(ModelSpec(name="vit-ti16", **(shape | fields)), 10)


# --- named ------------------------------------------------------------------------------------------------------------


def test_a_named_model_trains_and_the_seed_decides_its_weights() -> None:
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(build(tiny()))
    logits = logits_of(models[0](torch.randn(2, 3, 32, 32)))
    assert logits.shape == (2, 10)
    torch.autograd.backward(logits.sum())
    assert all(p.grad is not None and p.dtype == torch.float32 for p in models[0].parameters())
    first, again, other = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_named_model_has_fused_attention_and_no_dropout() -> None:
    model = build(tiny())
    assert model.training
    assert all(m.p == 0.0 for m in model.modules() if isinstance(m, nn.Dropout))
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(logits_of(model(images)), logits_of(model(images)))
    with torch.profiler.profile() as profile:
        model(images)
    assert "aten::scaled_dot_product_attention" in {event.key for event in profile.key_averages()}


def test_building_a_model_keeps_the_libraries_quiet(tmp_path: Path) -> None:
    hf_spec(tmp_path, "vit", **TINY_VIT)
    code = f"""
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.models import build
build(resolve(ModelSpec(hf={str(tmp_path)!r}), 10))
import logging, transformers
transformers.utils.logging.get_logger("transformers.modeling_utils").warning("weights are newly initialized")
logging.getLogger("huggingface_hub.utils._http").warning("retrying")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


# --- hf ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "content"),
    [
        ("vit", TINY_VIT),
        ("deit", TINY_VIT),
        ("dinov2", TINY_VIT),
        ("beit", TINY_VIT),
        ("swin", {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "patch_size": 4}),
        ("convnext", TINY_CNN),
        ("resnet", {**TINY_CNN, "embedding_size": 8}),
        ("siglip", {"vision_config": TINY_VIT}),
    ],
)
def test_any_image_classifier_of_a_folder_is_built(tmp_path: Path, model_type: str, content: dict[str, Any]) -> None:
    model = build(hf_spec(tmp_path, model_type, **content))
    logits = logits_of(model(torch.randn(2, 3, 64, 64)))
    assert logits.shape == (2, 7)
    torch.autograd.backward(logits.sum())
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert trained
    assert without == [], "DDP would wait for these"


@pytest.mark.parametrize("channels", [1, 12])
@pytest.mark.parametrize(
    ("model_type", "content"),
    [
        ("vit", TINY_VIT),
        ("dinov2", TINY_VIT | {"num_channels": 5}),  # the data's count, whatever the file says
        ("convnext", TINY_CNN),
        ("siglip", {"vision_config": TINY_VIT}),
    ],
)
def test_any_number_of_channels_is_built(
    tmp_path: Path, model_type: str, content: dict[str, Any], channels: int
) -> None:
    spec = hf_spec(tmp_path, model_type, **content).model_copy(update={"channels": channels})
    model = build(spec)
    assert logits_of(model(torch.randn(2, channels, 64, 64))).shape == (2, 7)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert parameters(spec) == (built if model_type == "vit" else None)


def test_an_architecture_of_three_channels_is_not_given_twelve(tmp_path: Path) -> None:
    spec = hf_spec(tmp_path, "bert")
    with pytest.raises(RequestError, match=r"data\.channels = 12, and model\.hf .* has no num_channels"):
        build(spec.model_copy(update={"channels": 12}))


def test_a_parameter_that_classification_does_not_use_is_frozen(tmp_path: Path) -> None:
    model = build(hf_spec(tmp_path, "dinov2", **TINY_VIT))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["dinov2.embeddings.mask_token"]
    assert not any(p.is_meta for p in model.parameters())


def test_the_configuration_decides_neither_dtype_nor_kernel(tmp_path: Path) -> None:
    wishes = {"dtype": "bfloat16", "attn_implementation": "kernels-community/flash-attn"}
    model = build(hf_spec(tmp_path, "vit", **TINY_VIT, **wishes))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert logits_of(model(torch.randn(1, 3, 64, 64))).shape == (1, 7)
    config: Any = model.config
    assert config._attn_implementation == "sdpa"


def test_code_beside_a_configuration_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForImageClassification": "evil.Model"}
    with pytest.raises(RequestError, match=r"cannot be loaded"):
        build(hf_spec(tmp_path, "their-own", auto_map=auto_map))
    build(hf_spec(tmp_path, "vit", **TINY_VIT, auto_map=auto_map))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("model_type", "content", "message"),
    [
        ("bert", {}, "describes no model that can be built.*BertConfig"),
        ("nonsense", {}, "cannot be loaded.*nonsense"),
        ("swin", {"depths": "deep"}, "cannot be loaded|no model that can be built"),
    ],
)
def test_what_is_no_image_classifier_is_refused(
    tmp_path: Path, model_type: str, content: dict[str, Any], message: str
) -> None:
    spec = hf_spec(tmp_path, model_type, **content)
    with pytest.raises(RequestError, match=message):
        build(spec)


def test_a_folder_that_changed_after_planning_is_refused(tmp_path: Path) -> None:
    spec = hf_spec(tmp_path, "vit", **TINY_VIT)
    hf_spec(tmp_path, "vit", **(TINY_VIT | {"num_hidden_layers": 2}))
    with pytest.raises(RequestError, match="differs from the planned model in layers"):
        build(spec)


def test_a_hub_name_that_cannot_be_reached_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = resolve(ModelSpec(hf="vitscale-tests/no-such-model"), 7)
    with pytest.raises(RequestError, match=r"'vitscale-tests/no-such-model' cannot be loaded: .+"):
        build(spec)


# --- factory ----------------------------------------------------------------------------------------------------------

FACTORIES = """
from torch import nn

def good(*, num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size ** 2, num_classes))

def anything(**keywords):
    return good(**keywords)

def no_model(num_classes, image_size):
    return [num_classes]

def other_arguments(classes):
    return nn.Identity()

def fails(num_classes, image_size):
    raise KeyError("deep inside")

value = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "vitscale_test_factories.py").write_text(FACTORIES)
    (tmp_path / "vitscale_test_broken.py").write_text("import no_such_module_anywhere")
    (tmp_path / "vitscale_test_syntax.py").write_text("def (")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("factories", "broken", "syntax"):
        monkeypatch.delitem(sys.modules, f"vitscale_test_{name}", raising=False)
    return "vitscale_test_factories"


@pytest.mark.parametrize("function", ["good", "anything"])
def test_a_factory_gets_classes_and_image_size(factories: str, function: str) -> None:
    model = build(resolve(ModelSpec(factory=f"{factories}:{function}", image_size=5), 4))
    assert logits_of(model(torch.zeros(2, 3, 5, 5))).shape == (2, 4)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("vitscale_test_factories:no_model", r"returned 'list'. Valid: a torch.nn.Module"),
        ("vitscale_test_factories:other_arguments", r"does not take the keyword arguments num_classes and image_size"),
        ("vitscale_test_factories:fails", r"raised KeyError: 'deep inside' \(.*vitscale_test_factories.py, line 17\)"),
        ("vitscale_test_factories:godo", r"no function of that name in the module. Valid: .*good"),
        ("vitscale_test_factories:value", r"no function of that name"),
        ("vitscale_test_absent:f", r"no module 'vitscale_test_absent'. Install it, or put its folder on PYTHONPATH"),
        ("vitscale_test_broken:f", r"no module 'no_such_module_anywhere'"),
        ("vitscale_test_syntax:f", r"raised SyntaxError"),
    ],
)
def test_a_factory_that_gives_no_model_is_refused(factories: str, factory: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(resolve(ModelSpec(factory=factory), 4))


# --- logits -----------------------------------------------------------------------------------------------------------


def test_logits_of_a_tensor_or_of_an_output_object() -> None:
    tensor = torch.zeros(1, 2)
    assert logits_of(tensor) is tensor
    assert logits_of(SimpleNamespace(logits=tensor)) is tensor
    with pytest.raises(TypeError, match=r"tuple: neither a tensor nor an object with \.logits"):
        logits_of((tensor,))
