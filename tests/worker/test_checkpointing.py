"""A checkpoint measured after training: on real ranks, and on engines that do not restore what they saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typing_extensions import override

from lab.ranks import make_trial, run_ranks
from vitscale.engines.plain.wrap import PlainEngine
from vitscale.engines.shared import checkpoint
from vitscale.trial.model_spec import ModelSpec
from vitscale.worker.session import measured_checkpoint

CPU = torch.device("cpu")
TINY = ModelSpec(name="vit-ti16", image_size=16, patch_size=8, layers=2, hidden_size=32, heads=2, mlp_size=64)


@pytest.mark.ranks
def test_a_run_records_what_its_checkpoint_took(tmp_path: Path) -> None:
    window = {"checkpoint": True, "explain": False}
    trial = make_trial("deepspeed", 2, steps=3, micro_batch=4, model=TINY, window=window, zero_stage=3)
    run = run_ranks(trial, tmp_path)
    lines = [rank.checkpoint for rank in run.ranks]
    assert all(rank.ended for rank in run.ranks)
    for rank, line in zip(run.ranks, lines, strict=True):
        assert line is not None
        assert line.save_seconds > 0
        assert line.load_seconds > 0
        assert rank.model is not None
        assert rank.model.parameters is not None
        # Three numbers of 4 bytes for each parameter, and at most 200 bytes for each tensor's name and place.
        assert 12 * rank.model.parameters < line.bytes < 12 * rank.model.parameters + 3 * 50 * 200 + 1000
    assert not list(tmp_path.rglob("*.safetensors"))


class DoesNothing(PlainEngine):
    @override
    def load_checkpoint(self, folder: Path, alive: checkpoint.Alive = lambda: None) -> int:
        return 0


class ForgetsSteps(PlainEngine):
    @override
    def load_checkpoint(self, folder: Path, alive: checkpoint.Alive = lambda: None) -> int:
        step = super().load_checkpoint(folder, alive)
        for state in self.optimizer.state.values():
            state["step"] -= 1
        return step


@pytest.mark.parametrize("kind", [DoesNothing, ForgetsSteps])
def test_a_checkpoint_that_does_not_restore_everything_is_an_error(tmp_path: Path, kind: type[PlainEngine]) -> None:
    engine = kind(torch.nn.Linear(3, 2), make_trial("none", 1), CPU)
    engine.micro_step(torch.ones(2, 3), lambda logits: logits.sum(), last=True)
    engine.step()
    with pytest.raises(RuntimeError, match="does not restore what was saved"):
        measured_checkpoint(engine, CPU, tmp_path, 1, lambda: None)


def test_everything_is_as_it_was_afterwards(tmp_path: Path) -> None:
    engine = PlainEngine(torch.nn.Linear(3, 2), make_trial("none", 1), CPU)
    engine.micro_step(torch.ones(2, 3), lambda logits: logits.sum(), last=True)
    engine.step()
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    line = measured_checkpoint(engine, CPU, tmp_path, 1, lambda: None)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.module.state_dict().items())
    assert line.bytes > 3 * 8 * 4
    assert list(tmp_path.iterdir()) == []


class ToldRank0s(PlainEngine):
    """A rank whose batch norm has other statistics than rank 0's, which are what is saved."""

    @override
    def save_checkpoint(self, folder: Path, step: int, alive: checkpoint.Alive = lambda: None) -> None:
        mean = self.module.get_buffer("1.running_mean")
        own = mean.clone()
        with pytest.MonkeyPatch.context() as as_rank_0:
            as_rank_0.setattr(checkpoint, "_rank", lambda: 0)
            mean.fill_(7.0)
            super().save_checkpoint(folder, step, alive)
        mean.copy_(own)


class ForgetsBuffers(PlainEngine):
    @override
    def load_checkpoint(self, folder: Path, alive: checkpoint.Alive = lambda: None) -> int:
        step = super().load_checkpoint(folder, alive)
        self.module.get_buffer("1.running_mean").zero_()
        return step


@pytest.mark.parametrize(("kind", "rank"), [(ToldRank0s, 1), (ForgetsBuffers, 0)])
def test_statistics_of_local_norms_are_compared_on_the_rank_that_saves_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[PlainEngine], rank: int
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    engine = kind(model, make_trial("none", 1), CPU)
    engine.micro_step(torch.randn(4, 3), lambda logits: logits.square().sum(), last=True)
    engine.step()
    monkeypatch.setattr(checkpoint, "_rank", lambda: rank)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"1 of 16 tensors differ, the first is buffers/1\.running_mean"):
            measured_checkpoint(engine, CPU, tmp_path, 1, lambda: None)
    else:
        measured_checkpoint(engine, CPU, tmp_path, 1, lambda: None)
        assert engine.module.get_buffer("1.running_mean").tolist() == [7.0, 7.0]
