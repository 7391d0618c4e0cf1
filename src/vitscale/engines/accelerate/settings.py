"""Fields of a study that mean the same as the settings of an Accelerate file, and the settings that have none."""

from __future__ import annotations

from typing import Any, NamedTuple

from vitscale.engines.accelerate.config import flag, fsdp_version, section, sharding_strategy, whole_number, word
from vitscale.errors import shown

_NEEDLESS = frozenset(
    {
        "compute_environment", "debug", "distributed_type", "downcast_bf16", "enable_cpu_affinity",
        "fsdp_config.fsdp_version", "machine_rank", "main_process_port", "main_training_function", "num_processes",
        "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo",
        "fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_sync_module_states",
        "deepspeed_config.zero3_init_flag", "deepspeed_config.zero3_save_16bit_model",
    }
)  # fmt: skip
"""Keys that say how processes find each other, or how weights are loaded and saved: a study's driver does that."""
_REASONS = {
    "main_process_ip": "hosts are named in a hostfile: add --hostfile FILE",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES where vitscale is started",
    "fp8_config": "there is no FP8 here",
    "parallelism_config": "write its sizes in [parallel]",
    "megatron_lm_config": 'write the sizes of its splits in [parallel], and engine = "megatron"',
    "mpirun_config": 'write launcher = "mpirun" and a hostfile in [launch]',
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "each block of the model is a unit by itself",
    "fsdp_config.fsdp_min_num_params": "each block of the model is a unit, whatever its size",
    "fsdp_config.fsdp_state_dict_type": "checkpoints are those of measure.checkpoint",
    "fsdp_config.fsdp_use_orig_params": "FSDP2 always keeps the model's own parameters",
    "deepspeed_config.deepspeed_multinode_launcher": 'write launcher = "deepspeed" in [launch] for pdsh',
    "deepspeed_config.deepspeed_moe_layer_cls_names": "no model here has experts",
}
"""Key -> why no field of a study has its meaning, and what to write instead."""
_NO_FIELD = "no field of a study has its meaning"
_TYPES_OF_GPUS = ("MULTI_GPU", "MULTI_CPU")


class UncarriedKey(NamedTuple):
    """A setting that a study does not take over as it stands."""

    key: str
    """Dotted, as in the file."""
    value: object
    reason: str

    @property
    def text(self) -> str:
        """The key with its value and the reason, on one line."""
        return f"{self.key} = {shown(self.value)}: {self.reason}"


class CarriedSettings(NamedTuple):
    """An Accelerate file as a study."""

    fields: dict[str, Any]
    """Dotted field of a study -> its value."""
    uncarried: tuple[UncarriedKey, ...]
    processes: int | None
    """Ranks in all; None where the file leaves them to the command line."""
    deepspeed_file: str | None
    """Path of the DeepSpeed file that it names, as it stands there."""


def carried_settings(values: dict[str, Any]) -> CarriedSettings:
    """Return what of an Accelerate file's values a study takes over.

    FSDP1's settings become FSDP2's where both do the same (torch's own notes on moving from one to the other).
    """
    carrying = _Carrying(values)
    carrying.take_ranks()
    carrying.take_precision()
    carrying.take_compilation()
    carrying.take_distributed_type()
    carrying.name_the_rest()
    deepspeed_file = section(values, "deepspeed_config").get("deepspeed_config_file")
    return CarriedSettings(
        carrying.fields,
        tuple(carrying.uncarried),
        whole_number(values.get("num_processes")),
        None if deepspeed_file is None else str(deepspeed_file),
    )


class _Carrying:
    """A file that is being taken over, key by key."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.fields: dict[str, Any] = {}
        self.uncarried: list[UncarriedKey] = []
        self._values = values
        self._seen: set[str] = set()

    def _take(self, key: str) -> object:
        """Return a value, and note that its key needs no more words. Args: key: dotted; None: not in the file."""
        self._seen.add(key)
        table, _, name = key.rpartition(".")
        return section(self._values, table).get(name) if table else self._values.get(name)

    def _leave(self, key: str, value: object, reason: str) -> None:
        """Note that a key is not taken over."""
        self._seen.add(key)
        self.uncarried.append(UncarriedKey(key, value, reason))

    def take_ranks(self) -> None:
        """Take how many ranks share a host, and the device."""
        machines = whole_number(self._take("num_machines"))
        processes = whole_number(self._take("num_processes"))
        if machines is not None and processes is not None and machines > 1:
            if processes % machines == 0:
                self.fields["scaling.gpus_per_node"] = processes // machines
            else:
                self._leave("num_machines", machines, f"{processes} processes are no equal shares of {machines} hosts")
        on_processors = flag(self._take("use_cpu")) is True or word(self._values.get("distributed_type")) == "MULTI_CPU"
        if on_processors:
            self.fields["train.device"] = "cpu"
        if str(self._values.get("gpu_ids", "all")) == "all":
            self._seen.add("gpu_ids")

    def take_precision(self) -> None:
        """Take mixed_precision. A DeepSpeed file says its own."""
        value = self._take("mixed_precision")
        if value is None:
            return
        precision = {"NO": "fp32", "BF16": "bf16", "FP16": "fp16"}.get(word(value))
        if precision is None:
            self._leave("mixed_precision", value, "there is no such precision here; the study's is auto")
        else:
            self.fields["train.precision"] = precision

    def take_compilation(self) -> None:
        """Take torch.compile's settings."""
        backend = self._take("dynamo_config.dynamo_backend")
        mode = self._take("dynamo_config.dynamo_mode")
        if backend is None or word(backend) == "NO":
            self._seen |= {f"dynamo_config.{name}" for name in section(self._values, "dynamo_config")}
            return
        if word(backend) != "INDUCTOR":
            self._leave("dynamo_config.dynamo_backend", backend, "blocks are compiled by inductor alone")
            return
        self.fields["train.compile"] = True
        if mode in ("default", "reduce-overhead"):
            self.fields["train.compile_mode"] = mode
        elif mode is not None:
            self._leave("dynamo_config.dynamo_mode", mode, "modes here are default and reduce-overhead")

    def take_distributed_type(self) -> None:
        """Take the engine, and its own section."""
        kind = word(self._values.get("distributed_type"))
        if kind == "NO":
            self.fields["train.engine"] = "none"
        elif kind in _TYPES_OF_GPUS:
            self.fields |= {"train.engine": "accelerate", "train.accelerate_backend": "ddp"}
        elif kind == "FSDP":
            self._take_fsdp()
        elif kind == "DEEPSPEED":
            self._take_deepspeed()
        else:
            value = self._values.get("distributed_type")
            self._leave("distributed_type", value, "no engine here stands for it; the study's is the usual one")

    def _take_fsdp(self) -> None:
        """Take FSDP's section, of version 1 or 2."""
        # The engine itself: on CPU Accelerate drops its FSDP plugin without a word and trains with DDP.
        self.fields["train.engine"] = "fsdp2"
        if fsdp_version(self._values) == 1:
            self._leave("fsdp_config.fsdp_version", 1, "it is trained by FSDP2, of equal results; FSDP1 is not here")
            self._take_strategy()
        else:
            self._seen |= {"fsdp_config.fsdp_sharding_strategy"}
            reshards = flag(self._take("fsdp_config.fsdp_reshard_after_forward"))
            if reshards is not None:
                self.fields["train.reshard_after_forward"] = reshards
        if flag(self._take("fsdp_config.fsdp_offload_params")):
            self.fields["train.offload"] = "parameters"
        if flag(self._take("fsdp_config.fsdp_activation_checkpointing")):
            self.fields["train.activation_checkpointing"] = True
        policy = self._take("fsdp_config.fsdp_auto_wrap_policy")
        if policy is not None and word(policy) != "TRANSFORMER_BASED_WRAP":
            self._leave("fsdp_config.fsdp_auto_wrap_policy", policy, "each block of the model is a unit here")
        self._take_prefetching()

    def _take_strategy(self) -> None:
        """Take FSDP1's sharding strategy: what `accelerate launch` passes on, not what stands elsewhere."""
        self._take("fsdp_config.fsdp_sharding_strategy")
        elsewhere = self._take("fsdp_config.fsdp_reshard_after_forward")
        strategy = sharding_strategy(self._values)
        if elsewhere is not None and word(elsewhere) != strategy:
            reason = (
                f"FSDP1 does not read it there, and shards by {strategy}; write fsdp_sharding_strategy if it is meant"
            )
            self._leave("fsdp_config.fsdp_reshard_after_forward", elsewhere, reason)
        if strategy == "NO_SHARD":
            # Every rank keeps all, and gradients are all-reduced.
            self.fields |= {"train.engine": "accelerate", "train.accelerate_backend": "ddp"}
        elif strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
            self.fields["train.reshard_after_forward"] = strategy == "FULL_SHARD"
        elif strategy is not None:
            self._take_hybrid(strategy)
        else:
            value = self._take("fsdp_config.fsdp_sharding_strategy")
            self._leave("fsdp_config.fsdp_sharding_strategy", value, "FSDP1 has no such strategy")

    def _take_hybrid(self, strategy: str) -> None:
        """Take shards inside each host that are replicated across hosts."""
        machines = whole_number(self._values.get("num_machines")) or 1
        self.fields["train.reshard_after_forward"] = strategy == "HYBRID_SHARD"
        if machines == 1:
            return  # all ranks are on one host, whose shards have no other replica
        self.fields["parallel.replicate"] = machines

    def _take_prefetching(self) -> None:
        """Take the order in which weights are gathered ahead, which is fixed in FSDP2."""
        backward = self._take("fsdp_config.fsdp_backward_prefetch")
        if backward is not None and word(backward) != "BACKWARD_PRE":
            reason = "FSDP2 always gathers the next block's weights while one computes (BACKWARD_PRE)"
            self._leave("fsdp_config.fsdp_backward_prefetch", backward, reason)
        forward = self._take("fsdp_config.fsdp_forward_prefetch")
        if flag(forward):
            self._leave("fsdp_config.fsdp_forward_prefetch", forward, "FSDP2 gathers ahead in forward by itself")

    def _take_deepspeed(self) -> None:
        """Take DeepSpeed's section: a file of its own, or the few settings that Accelerate has for it."""
        file = self._take("deepspeed_config.deepspeed_config_file")
        if file is not None:
            self.fields["train.engine"] = "deepspeed"
            reason = "it is read by the engine deepspeed itself: Accelerate's takes no file here"
            self._leave("deepspeed_config.deepspeed_config_file", file, reason)
            self.fields.pop("train.precision", None)
            for name in ("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping"):
                value = self._take(f"deepspeed_config.{name}")
                if value is not None:
                    self._leave(f"deepspeed_config.{name}", value, "the DeepSpeed file's value is taken")
        else:
            self.fields |= {"train.engine": "accelerate", "train.accelerate_backend": "deepspeed"}
            self._take_zero()
        hostfile = self._take("deepspeed_config.deepspeed_hostfile")
        if hostfile is not None:
            self._leave("deepspeed_config.deepspeed_hostfile", hostfile, "name it by --hostfile")

    def _take_zero(self) -> None:
        """Take ZeRO's stage, what is offloaded, clipping and accumulation."""
        stage = self._take("deepspeed_config.zero_stage")
        # Accelerate's default is stage 2 (`DeepSpeedPlugin.__post_init__`).
        self.fields["train.zero_stage"] = int(str(stage)) if str(stage) in ("0", "1", "2", "3") else 2
        optimizer_device = self._take("deepspeed_config.offload_optimizer_device")
        weights_device = self._take("deepspeed_config.offload_param_device")
        for key, device in (("offload_optimizer_device", optimizer_device), ("offload_param_device", weights_device)):
            if word(device) == "NVME":
                self._leave(f"deepspeed_config.{key}", device, "nothing is offloaded to NVMe here")
        if word(weights_device) == "CPU":
            self.fields["train.offload"] = "parameters"
        elif word(optimizer_device) == "CPU":
            self.fields["train.offload"] = "optimizer"
        clipping = self._take("deepspeed_config.gradient_clipping")
        if isinstance(clipping, int | float) and not isinstance(clipping, bool) and clipping >= 0:
            self.fields["train.gradient_clipping"] = float(clipping)
        steps = whole_number(self._take("deepspeed_config.gradient_accumulation_steps"))
        if steps is not None:
            self.fields["train.grad_accum"] = steps

    def name_the_rest(self) -> None:
        """Note all other keys of the file."""
        for key, value in self._values.items():
            if isinstance(value, dict) and _is_section(str(key)):
                for name, inner in value.items():
                    self._name(f"{key}.{name}", inner)
            else:
                self._name(str(key), value)

    def _name(self, key: str, value: object) -> None:
        """Note a key unless it was taken, is needless or is empty."""
        if key in self._seen or key in _NEEDLESS or value is None or value == {}:
            return
        self._leave(key, value, _REASONS.get(key, _NO_FIELD))


def _is_section(key: str) -> bool:
    """Whether a key's values are named one by one."""
    return key in ("fsdp_config", "deepspeed_config", "dynamo_config")
