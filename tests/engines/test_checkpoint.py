"""One process: what a checkpoint holds, what is refused and how, and that a failed one leaves nothing."""

from __future__ import annotations

import errno
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.curves import MODEL
from results_factory import make_trial
from vitscale import models
from vitscale.engines.base import Engine
from vitscale.engines.deepspeed.wrap import quiet_import
from vitscale.engines.plain.wrap import PlainEngine
from vitscale.engines.shared import checkpoint
from vitscale.engines.shared.whole_tensors import TorchTensors, _DeepSpeedLossScale
from vitscale.errors import RequestError
from vitscale.trial.trial import TrainSpec

CPU = torch.device("cpu")


class Small(nn.Module):
    """A frozen layer, a trained one, and a buffer that training changes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, width).requires_grad_(False)
        self.trained = nn.Linear(width, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += len(values)
        logits: Tensor = self.trained(self.frozen(values))
        return logits


def engine_of(model: nn.Module | None = None, **train: Any) -> PlainEngine:
    fields = {"engine": "none", "precision": "fp32", "device": "cpu", "micro_batch": 2}
    trial = make_trial("none", 1)
    trial = trial.model_copy(update={"train": TrainSpec.model_validate(fields | train)})
    torch.manual_seed(0)
    engine = PlainEngine(model or Small(), trial, CPU)
    if engine.scaler.is_enabled():
        # torch begins at 65,536, at which these gradients overflow.
        engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": 1024.0})
    return engine


def trained(engine: PlainEngine, steps: int, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        values = torch.randn(2, 3, generator=generator)
        losses.append(float(engine.micro_step(values, lambda logits: (logits**2).sum(), last=True)))
        engine.step()
    return losses


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    engine = engine_of()
    trained(engine, 3)
    engine.save_checkpoint(tmp_path / "saved", 3)
    return tmp_path / "saved"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-params"])
def test_another_engine_goes_on_to_the_bit(tmp_path: Path, optimizer: str, precision: str) -> None:
    """fp16 with its loss scale; nothing of the second engine's own past is left."""
    first = engine_of(optimizer=optimizer, precision=precision)
    trained(first, 3)
    first.save_checkpoint(tmp_path / "saved", 3)
    second = engine_of(optimizer=optimizer, precision=precision)
    trained(second, 5, seed=9)
    assert second.load_checkpoint(tmp_path / "saved") == 3
    assert trained(second, 4, seed=2) == trained(first, 4, seed=2)
    for ours, theirs in zip(first.module.state_dict().items(), second.module.state_dict().items(), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1]), ours[0]
    assert first.scaler.state_dict() == second.scaler.state_dict()
    assert first.whole_tensors().steps() == second.whole_tensors().steps() == (0 if optimizer == "sgd" else 7)


def test_the_files_hold_whole_tensors_under_the_models_own_names(saved: Path) -> None:
    engine = engine_of()
    trained(engine, 3)
    weights = load_file(saved / "weights.safetensors")
    assert set(weights) == {"frozen.weight", "frozen.bias", "trained.weight", "trained.bias"}
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(weights[name], parameter)
    for key in ("exp_avg", "exp_avg_sq"):
        states = load_file(saved / f"{key}.safetensors")
        assert set(states) == {"trained.weight", "trained.bias"}
        for name, parameter in engine.module.named_parameters():
            if name in states:
                assert torch.equal(states[name], engine.optimizer.state[parameter][key])
    assert {name: tensor.item() for name, tensor in load_file(saved / "buffers.safetensors").items()} == {"seen": 6}


def test_before_the_first_update_there_are_no_states(tmp_path: Path) -> None:
    first, second = engine_of(), engine_of()
    trained(second, 2, seed=5)
    first.save_checkpoint(tmp_path / "saved", 0)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {
        "checkpoint.json", "weights.safetensors", "buffers.safetensors",
    }  # fmt: skip
    assert second.load_checkpoint(tmp_path / "saved") == 0
    assert trained(second, 3) == trained(first, 3)


def test_the_loss_scale_of_fp16_is_saved_with_the_steps_since_it_changed(tmp_path: Path) -> None:
    engine = engine_of(precision="fp16")
    trained(engine, 3)
    engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": 512.0, "_growth_tracker": 7})
    engine.save_checkpoint(tmp_path / "saved", 3)
    described = json.loads((tmp_path / "saved" / "checkpoint.json").read_text())
    assert described["loss_scale"] == {"factor": 512.0, "steps": 7}
    other = engine_of(precision="fp16")
    other.load_checkpoint(tmp_path / "saved")
    assert other.scaler.get_scale() == 512.0
    assert other.scaler.state_dict()["_growth_tracker"] == 7
    # fp32 has no use for it.
    engine_of().load_checkpoint(tmp_path / "saved")


def test_deepspeeds_loss_scale_doubles_in_the_step_in_which_it_would_have() -> None:
    quiet_import("cpu")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def scaler() -> Any:
        return DynamicLossScaler(256.0, scale_window=4, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)

    def scales(one: Any) -> list[float]:
        found = []
        for _ in range(6):
            one.update_scale(overflow=False)
            found.append(one.cur_scale)
        return found

    first, second = scaler(), scaler()
    # Of four steps the second overflowed.
    first.cur_scale, first.cur_iter, first.last_overflow_iter = 128.0, 4, 1
    factor, steps = _DeepSpeedLossScale(first).get()
    assert (factor, steps) == (128.0, 2)
    _DeepSpeedLossScale(second).set(factor, steps)
    assert scales(first) == scales(second) == [128.0, 128.0, 256.0, 256.0, 256.0, 256.0]


def spoil(folder: Path, how: str) -> None:
    weights = folder / "weights.safetensors"
    description = json.loads((folder / "checkpoint.json").read_text())
    tensors = load_file(weights)
    if how == "missing file":
        weights.unlink()
    elif how == "cut off":
        weights.write_bytes(weights.read_bytes()[:-5])
    elif how == "a pickle":
        torch.save({"trained.weight": torch.zeros(1)}, weights)
    elif how == "huge header":
        weights.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    elif how == "missing weight":
        del tensors["trained.bias"]
        save_file(tensors, weights)
    elif how == "foreign weight":
        save_file(tensors | {"more": torch.zeros(1)}, weights)
    elif how == "other shape":
        save_file(tensors | {"trained.bias": torch.zeros(3)}, weights)
    elif how == "other dtype":
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, weights)
    elif how == "no description":
        (folder / "checkpoint.json").unlink()
    else:
        changed = {
            "newer": {"format": 2},
            "not finite": {"loss_scale": {"factor": float("inf"), "steps": 1}},
            "more keys": {"more": 1},
            "unknown states": {"states": ["exp_avg", "../../secret"]},
            "other optimizer": {"optimizer": "sgd", "states": ["momentum_buffer"]},
        }[how]
        (folder / "checkpoint.json").write_text(json.dumps(description | changed))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing file", "weights.safetensors: No such file"),
        ("cut off", "weights.safetensors: "),
        ("a pickle", "weights.safetensors: "),
        ("huge header", "weights.safetensors: "),
        ("missing weight", "is of another model: weights.safetensors lacks 'trained.bias'"),
        ("foreign weight", "is of another model: weights.safetensors has 'more', which the model has not"),
        ("other shape", "is of another model: 'trained.bias' is [3], here [2]"),
        ("other dtype", "'frozen.weight' in weights.safetensors is BF16"),
        ("no description", "cannot be read: No such file"),
        ("newer", "has format 2; this program reads 1"),
        ("not finite", "checkpoint.json is not what this program writes"),
        ("more keys", "checkpoint.json is not what this program writes"),
        ("unknown states", "has the states ['exp_avg', '../../secret'], and adamw keeps others"),
        ("other optimizer", "is of the optimizer 'sgd', not of 'adamw'"),
    ],
)
def test_what_is_not_whole_or_not_this_models_is_one_message_and_changes_nothing(
    saved: Path, how: str, message: str
) -> None:
    spoil(saved, how)
    engine = engine_of()
    trained(engine, 1)
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    with pytest.raises(RequestError) as raised:
        engine.load_checkpoint(saved)
    assert message in str(raised.value)
    assert "Name the folder of a checkpoint" in str(raised.value) or how == "no description"
    assert "\n" not in str(raised.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.module.state_dict().items())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["checkpoint.json", "weights.safetensors"]),
    content=st.binary(max_size=200) | st.text().map(str.encode),
)
def test_any_bytes_are_refused_in_one_message(saved: Path, name: str, content: bytes) -> None:
    whole = (saved / name).read_bytes()
    (saved / name).write_bytes(content)
    with pytest.raises(RequestError):
        engine_of().load_checkpoint(saved)
    (saved / name).write_bytes(whole)


def test_a_folder_that_exists_is_not_overwritten(saved: Path) -> None:
    with pytest.raises(RequestError, match="exists already"):
        engine_of().save_checkpoint(saved, 4)
    assert json.loads((saved / "checkpoint.json").read_text())["step"] == 3


def test_a_full_disk_is_told_as_such_and_leaves_nothing(small_disk: Path) -> None:
    engine = engine_of(nn.Sequential(nn.Linear(3, 300_000), nn.Linear(300_000, 2)))
    with pytest.raises(OSError, match="No space left") as raised:
        engine.save_checkpoint(small_disk / "saved", 0)
    assert raised.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []


def test_a_crash_while_saving_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a killed process left is in nobody's way."""

    def interrupted(folder: Path, description: checkpoint.Description) -> None:
        raise KeyboardInterrupt

    engine = engine_of()
    (tmp_path / ".saved.draft").mkdir()
    (tmp_path / ".saved.draft" / "weights.safetensors").write_text("half")
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_description", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint(tmp_path / "saved", 0)
    assert list(tmp_path.iterdir()) == []
    engine.save_checkpoint(tmp_path / "saved", 0)
    assert engine.load_checkpoint(tmp_path / "saved") == 0


def test_an_optimizer_with_states_of_its_own_kind_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(RequestError, match="'lion' cannot be saved") as raised:
        TorchTensors(engine.module, engine.optimizer, "lion")
    assert "train.optimizer = 'adamw'" in str(raised.value)


def test_parameters_that_no_update_has_reached_are_refused_by_name(tmp_path: Path) -> None:
    model = Small()
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    engine = engine_of(model)
    trained(engine, 2)
    with pytest.raises(RequestError, match="no update has reached the parameter 'unused' yet"):
        engine.save_checkpoint(tmp_path / "saved", 2)
    model.get_parameter("unused").grad = torch.ones(2)
    trained(engine, 1)
    with pytest.raises(RequestError, match=r"some parameters got fewer updates than others \(1 against 3\)"):
        engine.save_checkpoint(tmp_path / "saved", 3)


def test_a_vision_transformer_as_it_is_built(tmp_path: Path) -> None:
    engine = engine_of(models.build(MODEL))
    ticks: list[None] = []
    engine.save_checkpoint(tmp_path / "saved", 0, lambda: ticks.append(None))
    parameters = dict(engine.module.named_parameters())
    assert len(ticks) == len(parameters)
    assert set(load_file(tmp_path / "saved" / "weights.safetensors")) == set(parameters)


def test_an_engine_with_buffers_of_its_own_layout_says_so(tmp_path: Path) -> None:
    class Other(PlainEngine):
        whole_tensors = Engine.whole_tensors

    engine = Other(Small(), make_trial("none", 1), CPU)
    with pytest.raises(RequestError, match="Other saves no checkpoint: its states are in buffers of its own layout"):
        engine.save_checkpoint(tmp_path / "saved", 0)
    assert list(tmp_path.iterdir()) == []
