"""Megatron-Core's data parallelism, with gradients in flat buffers and optimizer states sharded by its own optimizer.

And its tensor parallelism: linear layers of which each rank has a part. A layer "cut by columns" has a part of the
outputs on each rank, one "cut by rows" a part of the inputs.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import parallel as tp
from typing_extensions import override

from vitscale.engines.base import Engine, weight_dtype, with_options
from vitscale.engines.dtypes import communicated_bytes
from vitscale.engines.shared.splits import exchange_norms, tensor_plan_of
from vitscale.engines.shared.swin_split import SCALE, Heads, keep_heads
from vitscale.engines.shared.whole_tensors import WholeTensors
from vitscale.trial.trial import TrainSpec, Trial

_MIB = 2**20


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

        train = trial.train
        self.train_spec = train
        self.device = device
        _initialise_groups(trial.parallel.tensor)
        self.input_dtype = weight_dtype(train)
        model = model.to(device, self.input_dtype)
        if trial.parallel.tensor > 1:
            exchange_norms(model, replicas=parallel_state.get_data_parallel_group(), sequence=None)
            _cut_layers(model, tensor_plan_of(model, trial))
        model = with_options(model, train)
        self.wrapped = DistributedDataParallel(_placeholder_configuration(), _wrapper_options(train), model)
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
        """Import Megatron-Core."""
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


def _initialise_groups(tensor_ranks: int) -> None:
    """Make Megatron-Core's process groups, in place of those for another number of tensor ranks."""
    from megatron.core import parallel_state

    is_initialised = parallel_state.is_initialized()
    if is_initialised and parallel_state.get_tensor_model_parallel_world_size() != tensor_ranks:
        parallel_state.destroy_model_parallel()
    if not parallel_state.is_initialized():
        # Tensor ranks are neighbours, as in `RankLayout`.
        parallel_state.initialize_model_parallel(
            tensor_ranks,
            # It has a limit of its own for collectives, in whole minutes; here it is that of all groups.
            distributed_timeout_minutes=math.ceil(distributed_c10d.default_pg_timeout.total_seconds() / 60),
            create_gloo_process_groups=False,
        )


def _cut_layers(model: nn.Module, plan: Mapping[str, tp.ParallelStyle]) -> None:
    """Replace layers of a whole model by Megatron-Core's own, which have this tensor rank's part of them.

    See Shoeybi et al., arXiv 1909.08053, section 3.

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
    styles = _styles_by_name(modules, plan)
    styles.pop("classifier", None)
    cut_by_columns = {name for name, style in styles.items() if isinstance(style, tp.ColwiseParallel)}
    column_layers_in = Counter(name.rpartition(".")[0] for name in cut_by_columns)
    """Name of a module -> number of layers in it that are cut by columns; several of them read the module's one input:
    the attention of a block has three, of queries, keys and values."""

    def add_up_gradients(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pass a module's input on; in backward the ranks' gradients of it are added up."""
        return tensor_parallel.copy_to_tensor_model_parallel_region(inputs[0], group=group), *inputs[1:]

    for name, style in styles.items():
        module = modules[name]
        parent, _, child = name.rpartition(".")
        if isinstance(style, Heads):
            _cut_heads(module, group.size())
        has_shared_input = column_layers_in[name] > 1
        if has_shared_input:
            module.register_forward_pre_hook(add_up_gradients)
        if not isinstance(module, nn.Linear):
            continue
        if name in cut_by_columns:
            part = _cut_by_columns(module, shares_input=column_layers_in[parent] > 1)
        else:
            part = _cut_by_rows(module)
        setattr(modules[parent], child, part)


def _styles_by_name(
    modules: Mapping[str, nn.Module], plan: Mapping[str, tp.ParallelStyle]
) -> dict[str, tp.ParallelStyle]:
    """Return the style of each module that the plan cuts, by the module's name.

    The plan has patterns of names, such as "vit.layers.*.mlp".
    """
    styles: dict[str, tp.ParallelStyle] = {}
    for pattern, style in plan.items():
        styles |= dict.fromkeys(fnmatch.filter(modules, pattern), style)
    return styles


def _cut_heads(attention: nn.Module, ranks: int) -> None:
    """Give an attention of Swin V2 this rank's part of its heads, and of the scale of each head's logits."""
    keep_heads(attention, ranks)
    scales_of_all_heads = attention.get_parameter(SCALE).data
    own_scales = nn.Parameter(_tensor_rank_part(scales_of_all_heads, dimension=0).clone())
    _mark_as_part(own_scales, dimension=0)
    attention.register_parameter(SCALE, own_scales)


def _cut_by_columns(full_layer: nn.Linear, *, shares_input: bool) -> nn.Module:
    """Return a layer of Megatron-Core's that computes this tensor rank's part of a layer's outputs.

    Args:
        full_layer: the layer, alike on all ranks.
        shares_input: whether it has its input in common with other layers; then the gradient of the input is exchanged
            elsewhere, once for all of them.
    """
    from megatron.core import tensor_parallel

    layer: nn.Module = tensor_parallel.ColumnParallelLinear(
        full_layer.in_features, full_layer.out_features, disable_grad_reduce=shares_input, **_layer_options(full_layer)
    )
    layer.register_forward_pre_hook(_with_at_most_three_dimensions)
    _copy_part(full_layer, layer, dimension=0)
    if full_layer.bias is not None:
        layer.get_parameter("bias").data.copy_(_tensor_rank_part(full_layer.bias.data, dimension=0))
    layer.register_forward_hook(_output_without_bias)
    return layer


def _cut_by_rows(full_layer: nn.Linear) -> nn.Module:
    """Return a layer of Megatron-Core's that takes this tensor rank's part of a layer's inputs.

    The ranks' outputs are summed up, and then the bias is added, which each rank has whole.
    """
    from megatron.core import tensor_parallel

    layer: nn.Module = tensor_parallel.RowParallelLinear(
        full_layer.in_features,
        full_layer.out_features,
        input_is_parallel=True,
        skip_bias_add=False,
        **_layer_options(full_layer),
    )
    _copy_part(full_layer, layer, dimension=1)
    if full_layer.bias is not None:
        layer.get_parameter("bias").data.copy_(full_layer.bias.data)
    layer.register_forward_hook(_output_without_bias)
    return layer


def _layer_options(full_layer: nn.Linear) -> dict[str, Any]:
    """Return the arguments that both kinds of Megatron-Core's parallel layers take."""
    from megatron.core import ModelParallelConfig, parallel_state

    return {
        "config": ModelParallelConfig(
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            params_dtype=full_layer.weight.dtype,
            perform_initialization=False,
        ),
        "init_method": nn.init.zeros_,  # not called
        "bias": full_layer.bias is not None,
    }


def _copy_part(full_layer: nn.Linear, layer: nn.Module, *, dimension: int) -> None:
    """Copy this rank's part of a layer's weight, cut along a dimension, into its own layer."""
    weight = layer.get_parameter("weight")
    weight.data.copy_(_tensor_rank_part(full_layer.weight.data, dimension=dimension))
    _mark_as_part(weight, dimension=dimension)


def _mark_as_part(parameter: nn.Parameter, *, dimension: int) -> None:
    """Mark a parameter of which tensor ranks have parts, for Megatron-Core.

    Layers that draw their weights set this then. Without it the norm would be without the other ranks' parts.
    """
    from megatron.core import tensor_parallel

    tensor_parallel.set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dimension, stride=1)


def _with_at_most_three_dimensions(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Flatten an input of four dimensions to [rows, inputs], as Megatron-Core's layers take three at most.

    In Swin V2 that is the input of the layer of position biases, [1, distances, distances, 512].
    """
    tensor = inputs[0]
    return (tensor.flatten(0, -2),) if tensor.dim() > 3 else inputs


def _output_without_bias(_: nn.Module, __: object, output: tuple[Tensor, Tensor | None]) -> Tensor:
    """Return a layer's output alone, of the pair of it and a bias for others to add, which it has added itself."""
    return output[0]


def _tensor_rank_part(full_tensor: Tensor, *, dimension: int) -> Tensor:
    """Return this tensor rank's part of a whole tensor that is cut along a dimension, as a view."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    part: Tensor = full_tensor.chunk(group.size(), dimension)[group.rank()]
    return part


class MegatronTensors(WholeTensors):
    """The tensors of Megatron-Core's distributed optimizer.

    A tensor rank has a part of a parameter, or all of it. Of that part each data-parallel rank updates a run: elements
    in a row of the flattened part, or none.
    """

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        """`optimizer`: a `DistributedOptimizer` around Adam."""
        super().__init__(module, optimizer.optimizer, "adamw")
        parameters = chain(*optimizer.model_fp32_groups, *optimizer.model_float16_groups)
        runs = chain(*optimizer.shard_fp32_groups, *optimizer.shard_fp32_from_float16_groups)
        self._runs: dict[nn.Parameter, Tensor] = dict(zip(parameters, runs, strict=True))
        """The run of each parameter of which this rank updates one."""
        self._spans: dict[nn.Parameter, slice] = {}
        """Where the run lies in this rank's flattened part of the parameter."""
        for parameter in self._runs:
            span = optimizer._get_model_param_range_map(parameter)["param"]
            self._spans[parameter] = slice(span.start, span.end)

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        from megatron.core import parallel_state

        parameter = self.parameters[name]
        sizes = list(parameter.shape)
        dimension = _cut_dimension(parameter)
        if dimension is not None:
            sizes[dimension] *= parallel_state.get_tensor_model_parallel_world_size()
        return tuple(sizes)

    @override
    def weight(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        return self.gathered(name, self._runs.get(parameter)) if parameter.requires_grad else parameter.detach()

    @override
    def set_weight(self, name: str, full_tensor: Tensor) -> None:
        parameter = self.parameters[name]
        part = self._part_of(name, full_tensor)
        parameter.detach().copy_(part)
        run = self.own_run(name, part)
        if run is not None:
            self._runs[parameter].detach().copy_(run)

    @override
    def has_state(self, name: str, key: str) -> bool:
        """Return whether there are states of any parameter: all are updated together, and a rank holds some of them."""
        return all(self.optimizer.state.get(run, {}).get(key) is not None for run in self._runs.values())

    @override
    def state(self, name: str, key: str) -> Tensor:
        run = self._runs.get(self.parameters[name])
        return self.gathered(name, None if run is None else self.optimizer.state[run][key])

    @override
    def set_state(self, name: str, key: str, full_tensor: Tensor) -> None:
        run = self.own_run(name, self._part_of(name, full_tensor))
        if run is not None:
            self.optimizer.state[self._runs[self.parameters[name]]][key].copy_(run)

    @override
    def make_states(self, names: Iterable[str], keys: Iterable[str], steps: int) -> None:
        self._make_states_of(self._runs.values() if list(names) else [], keys, steps)
        if not isinstance(self.optimizer, torch.optim.AdamW):
            for group in self.optimizer.param_groups:
                group["step"] = steps

    @override
    def steps(self) -> int:
        """Return the updates that the optimizer counts.

        torch's counts them by parameter, that of Apex or Transformer Engine by group.
        """
        steps_of_groups = [int(group["step"]) for group in self.optimizer.param_groups if "step" in group]
        return max(steps_of_groups) if steps_of_groups else super().steps()

    def gathered(self, name: str, run: Tensor | None) -> Tensor:
        """Return a whole weight or state of a parameter, in fp32, on all ranks.

        Each element is on one rank, or alike on the tensor ranks of one data-parallel rank, of which the first counts;
        all are added up.

        Args:
            name: the parameter.
            run: the elements that this rank updates; None where it updates none of the parameter.
        """
        from megatron.core import parallel_state

        parameter = self.parameters[name]
        full_tensor = torch.zeros(self.shape(name), device=parameter.device)
        is_cut = _cut_dimension(parameter) is not None
        counts_here = is_cut or parallel_state.get_tensor_model_parallel_rank() == 0
        if run is not None and counts_here:
            part = torch.zeros(parameter.shape, device=parameter.device)
            part.view(-1)[self._spans[parameter]] = run.detach().float()
            self._part_of(name, full_tensor).copy_(part)
        dist.all_reduce(full_tensor)
        return full_tensor

    def own_run(self, name: str, part: Tensor) -> Tensor | None:
        """Return the elements that this rank updates, out of its part of a parameter; None where it updates none."""
        span = self._spans.get(self.parameters[name])
        return None if span is None else part.reshape(-1)[span]

    def _part_of(self, name: str, full_tensor: Tensor) -> Tensor:
        """Return this tensor rank's part of a whole parameter, or of a state of its shape, as a view."""
        dimension = _cut_dimension(self.parameters[name])
        return full_tensor if dimension is None else _tensor_rank_part(full_tensor, dimension=dimension)


def _cut_dimension(parameter: Any) -> int | None:
    """Return the dimension along which tensor ranks have parts of a parameter; None: each has all of it."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _placeholder_configuration() -> Any:
    """Return the configuration that the wrapper asks for; of a model that is not Megatron's it reads no shape."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)


def _wrapper_options(train: TrainSpec) -> Any:
    """Return Megatron-Core's defaults, except for its distributed optimizer and for what the study sets."""
    from megatron.core.distributed import DistributedDataParallelConfig

    bucket_elements = None if train.bucket_mib is None else train.bucket_mib * _MIB // communicated_bytes(train)
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=bool(train.overlap_comm),
        grad_reduce_in_fp32=communicated_bytes(train) == 4,
        bucket_size=bucket_elements,
    )


def _optimizer_options(trial: Trial) -> Any:
    """Return the settings of Megatron-Core's distributed optimizer, as the study has them."""
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
