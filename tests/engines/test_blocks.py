from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitscale import engines
from vitscale.engines.base import weight_dtype, with_options
from vitscale.engines.building import build as build_engine
from vitscale.engines.facts import EngineFacts
from vitscale.engines.shared.stages import Stage, StagePlan, _repeated, stage_plan
from vitscale.errors import RequestError
from vitscale.models import build
from vitscale.models.batch_norm import over_real_images
from vitscale.models.blocks import blocks_of
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.parallel import ParallelSpec
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World


def train(**changes: Any) -> TrainSpec:
    usual: dict[str, Any] = {"engine": "none", "precision": "fp32", "device": "cpu", "micro_batch": 2}
    return TrainSpec(**usual | changes)


class Staged(nn.Module):
    """Stages of blocks, as a Swin transformer has them, beside a larger list of unlike modules."""

    def __init__(self) -> None:
        super().__init__()
        stages = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
        self.stages = nn.ModuleList(stages)
        self.head = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 4))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.head(x)
        return out


def test_the_blocks_of_a_vision_transformer_are_its_layers() -> None:
    model = build(resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=5), 10))
    blocks = blocks_of(model)
    assert [type(block).__name__ for block in blocks] == ["_Block"] * 5
    inside = sum(p.numel() for block in blocks for p in block.parameters())
    assert inside > 0.9 * sum(p.numel() for p in model.parameters())


def test_the_outermost_list_of_like_modules_holds_the_blocks() -> None:
    model = Staged()
    assert list(blocks_of(model)) == list(model.stages)


def test_blocks_lie_in_several_lists_where_modules_of_other_classes_are_between_them() -> None:
    """As in MobileViT and in ResNets of torchvision; the last stage alone would leave most activations kept."""
    block = nn.TransformerEncoderLayer
    stages = [nn.Sequential(*(block(4, 1, 8) for _ in range(count))) for count in (2, 4, 3)]
    model = nn.Sequential(stages[0], nn.Linear(4, 4), stages[1], nn.Linear(4, 4), stages[2])
    assert list(blocks_of(model)) == [layer for stage in stages for layer in stage]
    nested = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    assert list(blocks_of(nn.Sequential(nested, nn.ReLU()))) == list(nested)
    deep = nn.ModuleList(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(4, 4))) for _ in range(2))
    assert list(blocks_of(deep)) == list(deep)  # and not what lies in them


class Pairs(nn.Module):
    """Layers as vit-pytorch keeps them: a list of lists, of which forward calls the modules alone."""

    def __init__(self, *pair: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(kind(4, 4) for kind in pair) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.layers:
            for module in pair.children():
                x = module(x)
        return x


def test_lists_that_nothing_calls_are_no_blocks() -> None:
    alike, unlike = Pairs(nn.Linear, nn.Linear), Pairs(nn.Linear, nn.Identity)
    assert list(blocks_of(alike)) == [module for pair in alike.layers for module in pair.children()]
    assert list(blocks_of(unlike)) == []
    for option in ("activation_checkpointing", "compile"):
        with pytest.raises(RequestError, match=rf"train.{option} works block by block, and 'Pairs' has no list"):
            with_options(unlike, train(**{option: True}))


class Called(nn.ModuleList):
    """A list with a forward of its own is a block as any other."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


def test_a_list_with_a_forward_is_a_block() -> None:
    blocks = [Called([nn.Linear(4, 4), nn.ReLU()]) for _ in range(3)]
    assert list(blocks_of(nn.Sequential(*blocks))) == blocks


@pytest.mark.parametrize("head", ["decode_head", "auxiliary_head", "neck", "head", "segmentation_head"])
def test_what_follows_a_transformer_s_layers_has_no_blocks(head: str) -> None:
    model = nn.Module()
    model.encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.add_module(head, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    assert list(blocks_of(model)) == list(model.encoder.children())


def test_a_model_without_blocks_is_left_as_it_is_or_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert list(blocks_of(model)) == []
    assert with_options(model, train()) is model
    for option in ("activation_checkpointing", "compile"):
        with pytest.raises(RequestError, match=rf"train.{option} works block by block, and 'Sequential' has no list"):
            with_options(model, train(**{option: True}))


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """What autograd keeps for backward, in bytes."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(x)
    return kept


def test_checkpointing_keeps_less_and_changes_no_gradient_and_no_name() -> None:
    torch.manual_seed(0)
    plain = Staged()
    checkpointed = Staged()
    checkpointed.load_state_dict(plain.state_dict())
    assert with_options(checkpointed, train(activation_checkpointing=True)) is checkpointed
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    x = torch.randn(64, 4)
    # Three stages of two layers: their inputs alone are half of what they keep.
    assert saved_bytes(checkpointed, x) < saved_bytes(plain, x)
    for model in (plain, checkpointed):
        model(x).square().sum().backward()
    for ours, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


class Normed(nn.Module):
    """Two convolutions with batch norms, torch's own or those over real images."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


@pytest.mark.parametrize("replaced", [False, True])
def test_a_norm_whose_block_is_computed_again_counts_its_images_once(replaced: bool) -> None:
    models = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Normed()
        if replaced:
            over_real_images(model, synchronised=False)
        with_options(model, train(activation_checkpointing=again))
        for _ in range(2):
            model(torch.randn(4, 3, 5, 5)).square().sum().backward()
        models.append(model)
    plain, checkpointed = (model.state_dict() for model in models)
    assert plain["stages.0.1.num_batches_tracked"] == 2
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)
    gradients = [[parameter.grad for parameter in model.parameters()] for model in models]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_norms_in_blocks_that_are_compiled_and_computed_again_are_refused() -> None:
    with pytest.raises(RequestError, match="twice in the running statistics of the batch norms in 'Sequential'"):
        with_options(Normed(), train(compile=True, activation_checkpointing=True))


def test_compiling_is_asked_of_each_block_after_its_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code itself takes a minute to make on CPU; what is held here is who is compiled, and when."""
    seen: list[str] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, dynamic: seen.append(type(self.forward).__name__))
    with_options(Staged(), train(compile=True, activation_checkpointing=True))
    assert seen == ["partial"] * 3  # `forward` was replaced before
    seen.clear()
    with_options(Staged(), train(compile=True))
    assert seen == ["method"] * 3


def test_cuda_graphs_are_begun_anew_with_each_forward_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation each block would else begin anew by itself, and write over its own input."""
    modes: list[str] = []
    begun: list[bool] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, dynamic, mode="default": modes.append(mode))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(torch.is_grad_enabled()))
    model = with_options(Staged(), train(compile=True, compile_mode="reduce-overhead"))
    model(torch.ones(2, 4))
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert modes == ["reduce-overhead"] * 3
    assert begun == [True, False]
    with_options(Staged(), train(compile=True))(torch.ones(2, 4))
    assert len(begun) == 2


class Scaled(nn.Module):
    """Blocks that differ in a number of Python's, as a rate of drop path does from layer to layer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale
        return out


def test_each_of_many_unlike_blocks_is_compiled_for_both_sizes_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over graphs that nothing is made of; by default torch runs the blocks behind the eighth without any."""
    ran: list[torch.fx.GraphModule] = []

    def as_it_is(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            ran.append(graph)
            return graph.forward(*given)

        return run

    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: original(self, backend=as_it_is, **options))
    torch._dynamo.reset()
    blocks = 12
    with torch._dynamo.config.patch(recompile_limit=8):
        model = with_options(nn.Sequential(*(Scaled(1.0 + block) for block in range(blocks))), train(compile=True))
        assert torch._dynamo.config.recompile_limit == blocks * (4 + 1)
        for images in (2, 3, 3):
            ran.clear()
            model(torch.ones(images, 4))
            assert len(set(ran)) == len(ran) == blocks
        with torch.no_grad():  # evaluation, in its own two sizes
            for images in (5, 6):
                ran.clear()
                model(torch.ones(images, 4))
                assert len(set(ran)) == len(ran) == blocks
    torch._dynamo.reset()


def test_blocks_that_are_alike_keep_torch_s_limit_of_graphs() -> None:
    """They share theirs; with more, evaluation of many sizes would compile for each."""
    with torch._dynamo.config.patch(recompile_limit=8):
        with_options(nn.Sequential(*(Scaled(1.0) for _ in range(12))), train(compile=True))
        assert torch._dynamo.config.recompile_limit == 8


class Ordered(nn.Module):
    """A stem whose first parameter is frozen, norms of two classes, each inside a module of one class, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.Flatten())
        self.stem.get_parameter("0.weight").requires_grad_(False)
        self.levels = nn.ModuleList([nn.ModuleDict({"norm": norm(128)}) for norm in (nn.LayerNorm, nn.RMSNorm)])
        self.head = nn.Linear(128, 10)
        self.in_order = ["stem", "levels.0.norm", "levels.1.norm", "head"]


def in_two_stages(spec: ModelSpec, engine: str = "ddp", **changes: Any) -> Trial:
    return Trial(
        model=spec, data=DataSpec(name="synthetic", samples=8),
        train=train(grad_accum=2, **changes).model_copy(update={"engine": engine}),
        parallel=ParallelSpec(pipeline=2), world=World(ranks_per_node=2, threads_per_rank=1),
        window=WindowSpec(steps=1, warmup_steps=0, evaluate=False), launcher="torchrun",
    )  # fmt: skip


OWN = ModelSpec(factory="own:build", image_size=32, num_classes=10)


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """This process is rank 0; torch's fake backend stands for the other rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_stages_that_leave_out_a_parameter_are_refused_by_its_name() -> None:
    model = Ordered()
    assert stage_plan(model, in_two_stages(OWN)) is not None
    model.positions = nn.Parameter(torch.zeros(128))
    with pytest.raises(RequestError, match="in_order of 'own:build' leaves out the parameter 'positions'"):
        stage_plan(model, in_two_stages(OWN))


def of_four_layers() -> Any:
    """A model whose last three layers are in the second of two stages."""
    model = Ordered()
    model.levels = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
    model.in_order = ["stem", *(f"levels.{number}" for number in range(4)), "head"]
    return model


def test_stages_that_share_a_parameter_are_refused_by_its_name() -> None:
    """A bias of two layers, or a layer that is run twice; in one stage both are as good as any."""
    for other, name in ((3, None), (0, "levels.0.bias")):
        model = of_four_layers()
        model.levels[other].bias = model.levels[2].bias
        is_refused_for(model, name)
    for other, name in ((3, None), (0, "levels.2.weight")):
        model = of_four_layers()
        model.levels[other] = nn.Identity()
        model.in_order[1 + other] = "levels.2"
        is_refused_for(model, name)


def is_refused_for(model: nn.Module, name: str | None) -> None:
    if name is None:
        assert stage_plan(model, in_two_stages(OWN)) is not None
        return
    with pytest.raises(RequestError, match=f"stages 1 and 2 of 'own:build' share the parameter '{name}'"):
        stage_plan(model, in_two_stages(OWN))


def test_a_stage_that_trains_nothing_is_refused_by_its_number() -> None:
    """As where all but the head is frozen; the second stage, of which the head trains, is as good as any."""
    model = of_four_layers()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    with pytest.raises(RequestError, match=r"stage 1 of 'own:build' \(stem, levels.0\) trains no parameter"):
        stage_plan(model, in_two_stages(OWN))
    model.levels[0].requires_grad_(True)
    assert stage_plan(model, in_two_stages(OWN)) is not None
    model.levels[0].requires_grad_(False)
    model.levels[1].requires_grad_(True)  # of the third of four stages, which is on the first's rank
    interleaved = {"parallel": ParallelSpec(pipeline=2, schedule="interleaved")}
    assert stage_plan(model, in_two_stages(OWN, "fsdp2").model_copy(update=interleaved)) is not None
    with pytest.raises(RequestError, match="stage 1 of 'own:build'"):
        stage_plan(model, in_two_stages(OWN).model_copy(update=interleaved))


@pytest.mark.parametrize("every_stage_must_train", [False, True])
def test_an_engine_of_a_package_says_whether_every_stage_must_train(
    monkeypatch: pytest.MonkeyPatch, every_stage_must_train: bool
) -> None:
    facts = EngineFacts(engine="own:Staged", every_stage_must_train=every_stage_must_train)
    monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, f"staged-{every_stage_must_train}": facts})
    model = of_four_layers()
    model.requires_grad_(False)
    model.levels[1].requires_grad_(True)  # of the third of four stages, which is on the first's rank
    model.head.requires_grad_(True)
    interleaved = {"parallel": ParallelSpec(pipeline=2, schedule="interleaved")}
    trial = in_two_stages(OWN, f"staged-{every_stage_must_train}").model_copy(update=interleaved)
    if every_stage_must_train:
        with pytest.raises(RequestError, match="stage 1 of 'own:build'"):
            stage_plan(model, trial)
    else:
        assert stage_plan(model, trial) is not None


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize(("engine", "master"), [("ddp", False), ("fsdp2", False), ("fsdp2", True)])
def test_stages_take_weights_in_16_bits(engine: str, master: bool) -> None:
    """Shapes are told by modules in the dtype that their weights have."""
    trial = in_two_stages(OWN, engine, precision="bf16-params", master_weights=master)
    built = build_engine(Ordered(), trial, torch.device("cpu"))
    assert {parameter.dtype for parameter in built.module.parameters()} == {torch.float32 if master else torch.bfloat16}


class Turned(nn.Module):
    """Makes tokens of a map, without moving an element."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_stages_hand_on_is_as_the_next_one_s_buffers(precision: str) -> None:
    """Tokens that are a view, whatever autocast makes of them, and a map whose channels lie last: gloo sends neither as
    they lie."""
    model = nn.Module()
    for name, module in (("stem", nn.Conv2d(3, 16, 8, stride=8)), ("tokens", Turned()), ("head", nn.Linear(16, 10))):
        model.add_module(name, module)
    images, trial = torch.randn(2, 3, 32, 32), in_two_stages(OWN, precision=precision)
    for last_channels, parts in ((False, (("stem", "tokens"), ("head",))), (True, (("stem",), ("tokens", "head")))):
        given = images.contiguous(memory_format=torch.channels_last) if last_channels else images
        plan = StagePlan(parts, lambda *_: (), weight_dtype(trial.train))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            made = Stage(model, plan, 0)(given)
        assert isinstance(made, Tensor)
        assert (made.dtype, made.is_contiguous()) == (torch.float32, True)


def test_stages_may_name_parameters_otherwise_than_the_model_does_first() -> None:
    model = Ordered()
    model.path = nn.Sequential(*map(model.get_submodule, model.in_order))
    model.in_order = [f"path.{part}" for part in range(4)]
    plan = stage_plan(model, in_two_stages(OWN))
    assert plan is not None
    assert [name for stage in plan.parts for name in stage] == model.in_order


@pytest.mark.usefixtures("first_of_two")
def test_blocks_of_stages_are_whole_parts_and_not_what_an_mlp_consists_of() -> None:
    """Attention (here a projection) and MLP of each layer are parts of their own; the MLPs have most parameters."""
    model = Ordered()
    attention = [nn.Linear(128, 128) for _ in range(2)]
    mlps = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2)]
    model.layers = nn.ModuleList(part for layer in zip(attention, mlps, strict=True) for part in layer)
    model.levels = nn.ModuleList()
    model.in_order = ["stem", *(f"layers.{part}" for part in range(4)), "head"]
    trial = in_two_stages(OWN, activation_checkpointing=True)
    plan = stage_plan(model, trial)
    assert plan is not None
    assert plan.blocks_of(model, trial) == [
        mlp for mlp in mlps if any(mlp is model.get_submodule(name) for name in plan.parts[0])
    ]
    assert _repeated([nn.Sequential(*attention), nn.ReLU()]) == attention


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("option", ["activation_checkpointing", "compile"])
def test_an_option_of_blocks_is_refused_where_stages_have_none(option: str) -> None:
    """`tests/test_examples.py` has blocks that stages run apart from the list they are in."""
    options: dict[str, Any] = {option: True}
    model, trial = Ordered(), in_two_stages(OWN, **options)
    plan = stage_plan(model, trial)
    assert plan is not None
    with pytest.raises(RequestError, match=f"train.{option} works block by block, and in_order of 'own:build' takes"):
        plan.blocks_of(model, trial)
    assert plan.blocks_of(model, in_two_stages(OWN)) == []


@pytest.mark.usefixtures("first_of_two")
def test_a_stage_whose_first_parameter_is_frozen_tells_of_the_states_of_all() -> None:
    engine = build_engine(Ordered(), in_two_stages(OWN), torch.device("cpu"))
    assert next(engine.module.parameters()).requires_grad is False
    whole = engine.whole_tensors()
    for states in (False, True):
        assert {whole.has_state(name, "exp_avg") for name in whole.trained} == {states}
        for parameter in engine.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        engine.optimizer.step()


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_of_other_ranks_stages_nothing_stays_until_python_looks_for_garbage(engine: str) -> None:
    """Blocks whose activations are computed again refer to themselves. A first model brings in what is imported on the
    way."""
    spec = resolve(ModelSpec(name="vit-ti16", image_size=32, patch_size=8, layers=4), 10)
    trial = in_two_stages(spec, engine, activation_checkpointing=True)
    try:
        build_engine(build(spec), trial, torch.device("cpu"))
        gc.collect()
        gc.disable()
        model: Any = build(spec)
        blocks = [weakref.ref(block) for block in model.vit.layers]
        built = build_engine(model, trial, torch.device("cpu"))
        del model
        assert [block() is not None for block in blocks] == [True, True, False, False]
        assert sum(p.numel() for p in built.module.parameters()) > 0
    finally:
        gc.enable()
