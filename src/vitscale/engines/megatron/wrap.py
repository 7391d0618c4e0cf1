"""Megatron-Core's data parallelism, with gradients in flat buffers and optimizer states sharded by its own optimizer.

And its tensor parallelism: linear layers of which each rank has a part.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import parallel as tp
from typing_extensions import override

from vitscale.engines.base import Engine, weight_dtype, with_options
from vitscale.engines.dtypes import communicated_bytes
from vitscale.engines.shared.splits import exchange_norms, tensor_plan_of
from vitscale.engines.shared.swin_split import SCALE, Heads, keep_heads
from vitscale.engines.shared.whole_tensors import WholeTensors
from vitscale.trial.trial import TrainSpec, Trial


class MegatronEngine(Engine):
    """Megatron-Core's `DistributedDataParallel` with its distributed optimizer.

    Gradients are reduce-scattered once per optimizer step, and the updated weights all-gathered. Its `bf16-params`
    keeps fp32 master weights in the sharded optimizer, as DeepSpeed's does. Megatron-Core allocates its buffers on the
    current CUDA device, so this engine needs one.
    """

    def __init__(self, model: nn.Module, trial: Trial, device: torch.device) -> None:
        """The wrap order of Megatron-Core.

        1. its process groups: its layers, wrapper and optimizer ask for them;
        2. to the device and the weights' dtype: the wrapper moves weights and gradients into flat buffers of it;
        3. matrices over the ranks that share a model: parameters that are cut are replaced;
        4. checkpointing and compiling, block by block: the wrapper's hooks hang on the parameters, outside both;
        5. the wrapper, and only then the optimizer: it shards the wrapper's buffers.
        """
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.optimizer import get_megatron_optimizer

        self.train_spec = train = trial.train
        self.device = device
        ranks = trial.parallel.tensor
        if parallel_state.is_initialized() and parallel_state.get_tensor_model_parallel_world_size() != ranks:
            parallel_state.destroy_model_parallel()
        if not parallel_state.is_initialized():
            # Tensor ranks are neighbours, as in `RankLayout`.
            parallel_state.initialize_model_parallel(ranks, create_gloo_process_groups=False)
        self.input_dtype = weight_dtype(train)
        model = model.to(device, self.input_dtype)
        if ranks > 1:
            exchange_norms(model, parallel_state.get_data_parallel_group(), None)
            _cut(model, tensor_plan_of(model, trial))
        model = with_options(model, train)
        self.wrapped = DistributedDataParallel(_transformer(), _wrapper_options(train), model)
        self.optimizer = get_megatron_optimizer(
            _optimizer_options(trial), [self.wrapped], use_gloo_process_groups=False
        )
        for group in self.optimizer.param_groups:
            # In Megatron-Core it is the scheduler that spares biases and norms the weight decay.
            group["weight_decay"] = train.weight_decay * group.get("wd_mult", 1.0)
        self.gradient_dtype = str(self.wrapped.buffers[0].grad_dtype).removeprefix("torch.")
        self.wrapped.zero_grad_buffer()

    @staticmethod
    def preload(train: TrainSpec) -> None:
        """Imports Megatron-Core."""
        del train
        import megatron.core.distributed
        import megatron.core.optimizer  # noqa: F401 - their seconds count as imports

    @override
    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.wrapped.no_sync()

    @override
    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        if last:
            self.wrapped.finish_grad_sync()  # waits for what overlaps, or sends all at once

    @override
    def step(self) -> None:
        self.optimizer.step()  # clips, updates this rank's shard, gathers the weights
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    @override
    def whole_tensors(self) -> MegatronTensors:
        return MegatronTensors(self.module, self.optimizer.chained_optimizers[0])


def _cut(model: nn.Module, plan: Mapping[str, tp.ParallelStyle]) -> None:
    """Gives each tensor rank its part of a whole model, in Megatron-Core's own layers (arXiv 1909.08053, section 3).

    Blocks are cut where DTensor cuts them. A classifier of images stays whole: Megatron-Core cuts into equal parts
    alone, which the classes seldom are. Before queries, keys and values one function adds up the gradients of all
    three, which are then exchanged once. A layer that has its input for itself does so itself, beside the gradient of
    its weights.

    Args:
        model: the model, alike on all ranks; layers are replaced in place.
        plan: how DTensor cuts it.
    """
    from megatron.core import parallel_state, tensor_parallel

    group = parallel_state.get_tensor_model_parallel_group()
    modules = dict(model.named_modules())
    styles = {name: style for pattern, style in plan.items() for name in fnmatch.filter(modules, pattern)}
    styles.pop("classifier", None)
    by_columns = {name for name, style in styles.items() if isinstance(style, tp.ColwiseParallel)}
    read_by = Counter(name.rpartition(".")[0] for name in by_columns)

    def share_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tensor_parallel.copy_to_tensor_model_parallel_region(inputs[0], group=group), *inputs[1:]

    for name, style in styles.items():
        whole, (parent, _, child) = modules[name], name.rpartition(".")
        if isinstance(style, Heads):
            keep_heads(whole, group.size())
            scale = nn.Parameter(_part(whole.get_parameter(SCALE).data, 0).clone())
            tensor_parallel.set_tensor_model_parallel_attributes(scale, True, 0, 1)
            whole.register_parameter(SCALE, scale)
        if read_by[name] > 1:
            whole.register_forward_pre_hook(share_input)
        if isinstance(whole, nn.Linear):
            setattr(modules[parent], child, _part_of_layer(whole, name in by_columns, read_by[parent] > 1))


def _part_of_layer(whole: nn.Linear, by_columns: bool, shares_input: bool) -> nn.Module:
    """This tensor rank's part of a layer, cut by outputs (columns) or by inputs.

    Args:
        whole: the layer.
        by_columns: whether it is cut by its outputs.
        shares_input: of such a layer: whether the gradient of its input is exchanged elsewhere.
    """
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel

    ranks, dtype = parallel_state.get_tensor_model_parallel_world_size(), whole.weight.dtype
    options: dict[str, Any] = {
        "config": ModelParallelConfig(
            tensor_model_parallel_size=ranks, params_dtype=dtype, perform_initialization=False
        ),
        "init_method": nn.init.zeros_,  # not called
        "bias": whole.bias is not None,
    }
    sizes, dimension = (whole.in_features, whole.out_features), 0 if by_columns else 1
    if by_columns:
        layer = tensor_parallel.ColumnParallelLinear(*sizes, disable_grad_reduce=shares_input, **options)
        layer.register_forward_pre_hook(_in_rows)
    else:
        layer = tensor_parallel.RowParallelLinear(*sizes, input_is_parallel=True, skip_bias_add=False, **options)
    layer.weight.data.copy_(_part(whole.weight.data, dimension))
    # Layers that draw their weights set this then. Without it the norm would be without the other ranks' parts.
    tensor_parallel.set_tensor_model_parallel_attributes(layer.weight, True, dimension, 1)
    if whole.bias is not None:
        layer.bias.data.copy_(_part(whole.bias.data, 0) if by_columns else whole.bias.data)
    layer.register_forward_hook(_without_bias)
    part: nn.Module = layer
    return part


def _in_rows(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """The input of a layer that takes three dimensions at most: Swin's table of positions has four."""
    return (inputs[0].flatten(0, -2),) if inputs[0].dim() > 3 else inputs


def _without_bias(_: nn.Module, __: object, output: tuple[Tensor, Tensor | None]) -> Tensor:
    """The output of a layer that gives a bias beside it, for others to add; it has added it."""
    return output[0]


def _part(whole: Tensor, dimension: int) -> Tensor:
    """This tensor rank's part of a whole tensor, a view."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    part: Tensor = whole.chunk(group.size(), dimension)[group.rank()]
    return part


class MegatronTensors(WholeTensors):
    """What Megatron-Core's distributed optimizer updates: of a rank's part of each weight, a run of elements."""

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        """`optimizer`: a `DistributedOptimizer` around Adam."""
        super().__init__(module, optimizer.optimizer, "adamw")
        groups = zip(
            (*optimizer.model_fp32_groups, *optimizer.model_float16_groups),
            (*optimizer.shard_fp32_groups, *optimizer.shard_fp32_from_float16_groups),
            strict=True,
        )
        self._runs: dict[nn.Parameter, Tensor] = {
            parameter: run for held, runs in groups for parameter, run in zip(held, runs, strict=True)
        }
        self._spans = {
            parameter: slice(span.start, span.end)
            for parameter in self._runs
            for span in [optimizer._get_model_param_range_map(parameter)["param"]]
        }

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        from megatron.core import parallel_state

        parameter: Any = self.parameters[name]
        sizes = list(parameter.shape)
        if (dimension := _dimension(parameter)) is not None:
            sizes[dimension] *= parallel_state.get_tensor_model_parallel_world_size()
        return tuple(sizes)

    @override
    def weight(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        return self.gathered(name, self._runs.get(parameter)) if parameter.requires_grad else parameter.detach()

    @override
    def set_weight(self, name: str, whole: Tensor) -> None:
        parameter = self.parameters[name]
        own = self._own(name, whole)
        parameter.detach().copy_(own)
        if (run := self.own_run(name, own)) is not None:
            self._runs[parameter].detach().copy_(run)

    @override
    def has_state(self, name: str, key: str) -> bool:
        """Whether there is a state of any parameter: all are updated together, and a rank holds states of some."""
        return all(self.optimizer.state.get(run, {}).get(key) is not None for run in self._runs.values())

    @override
    def state(self, name: str, key: str) -> Tensor:
        run = self._runs.get(self.parameters[name])
        return self.gathered(name, None if run is None else self.optimizer.state[run][key])

    @override
    def set_state(self, name: str, key: str, whole: Tensor) -> None:
        if (run := self.own_run(name, self._own(name, whole))) is not None:
            self.optimizer.state[self._runs[self.parameters[name]]][key].copy_(run)

    @override
    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        self._make(self._runs.values() if list(names) else [], keys, steps)
        if not isinstance(self.optimizer, torch.optim.AdamW):
            for group in self.optimizer.param_groups:
                group["step"] = steps

    @override
    def steps(self) -> int:
        """Updates that the optimizer counts: torch's by parameter, that of Apex or Transformer Engine by group."""
        of_groups = [int(group["step"]) for group in self.optimizer.param_groups if "step" in group]
        return max(of_groups) if of_groups else super().steps()

    def gathered(self, name: str, run: Tensor | None) -> Tensor:
        """The whole of something of a parameter's shape, in fp32, of which this rank has a run of elements, or none.

        Each element is on one rank, or alike on the tensor ranks of one data-parallel rank; all are added up.
        """
        from megatron.core import parallel_state

        parameter = self.parameters[name]
        whole = torch.zeros(self.shape(name), device=parameter.device)
        if run is not None and (
            _dimension(parameter) is not None or not parallel_state.get_tensor_model_parallel_rank()
        ):
            own = torch.zeros(parameter.shape, device=parameter.device)
            own.view(-1)[self._spans[parameter]] = run.detach().float()
            self._own(name, whole).copy_(own)
        dist.all_reduce(whole)
        return whole

    def own_run(self, name: str, own: Tensor) -> Tensor | None:
        """The elements that this rank updates of something of the shape of its part; None where it updates none."""
        span = self._spans.get(self.parameters[name])
        return None if span is None else own.reshape(-1)[span]

    def _own(self, name: str, whole: Tensor) -> Tensor:
        """A view of what this rank has of a whole tensor."""
        dimension = _dimension(self.parameters[name])
        return whole if dimension is None else _part(whole, dimension)


def _dimension(parameter: Any) -> int | None:
    """The dimension along which tensor ranks have parts of a parameter; None: each has all of it."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _transformer() -> Any:
    """The configuration that the wrapper asks for; if a model is not Megatron's, it reads only switches, no shape."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)


def _wrapper_options(train: TrainSpec) -> Any:
    """Megatron-Core's defaults, except for its distributed optimizer and for what the study sets."""
    from megatron.core.distributed import DistributedDataParallelConfig

    elements = None if train.bucket_mib is None else train.bucket_mib * 2**20 // communicated_bytes(train)
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=bool(train.overlap_comm),
        grad_reduce_in_fp32=communicated_bytes(train) == 4,
        bucket_size=elements,
    )


def _optimizer_options(trial: Trial) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    train = trial.train
    return OptimizerConfig(
        optimizer="sgd" if train.optimizer == "sgd" else "adam",
        lr=trial.peak_learning_rate,
        weight_decay=train.weight_decay,
        sgd_momentum=train.momentum,
        clip_grad=train.gradient_clipping,
        bf16=train.precision == "bf16-params",
        params_dtype=weight_dtype(train),
        use_distributed_optimizer=True,
    )
