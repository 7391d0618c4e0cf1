"""The only table of other programs' words for keys and values of a study, and what they mean: lr is learning_rate."""

from __future__ import annotations

import re
from typing import NamedTuple


class KeyMeaning(NamedTuple):
    """The field of a study that another program's word for a key means."""

    field: str
    """Dotted: "train.learning_rate"."""
    example: str = ""
    """A value of it as TOML; empty where the word does not suggest one."""
    remark: str = ""
    """Continues the sentence "Write micro_batch in [train]"."""


_MEANINGS_BY_WORDS: tuple[tuple[str, KeyMeaning], ...] = (
    ("lr base_lr blr", KeyMeaning("train.learning_rate")),
    ("wd", KeyMeaning("train.weight_decay")),
    (
        "batch_size bs batch per_device_train_batch_size train_micro_batch_size_per_gpu micro_batch_size",
        KeyMeaning(
            "train.micro_batch", remark=", of one rank; global_batch is that of all of them under strong-global"
        ),
    ),
    ("total_batch_size train_batch_size", KeyMeaning("train.global_batch", remark=', under mode = "strong-global"')),
    (
        "accumulate accumulation accum accum_iter gradient_accumulation gradient_accumulation_steps "
        "accumulate_grad_batches",
        KeyMeaning("train.grad_accum"),
    ),
    ("num_epochs n_epochs max_epochs num_train_epochs", KeyMeaning("train.epochs")),
    ("max_steps iterations iters num_steps", KeyMeaning("measure.steps")),
    ("amp mixed_precision fp16 bf16 dtype use_amp", KeyMeaning("train.precision", example='"bf16"')),
    ("backend strategy parallel distributed", KeyMeaning("train.engine")),
    ("opt", KeyMeaning("train.optimizer")),
    ("zero stage", KeyMeaning("train.zero_stage")),
    ("grad_clip clip_grad max_grad_norm gradient_clip_val clip", KeyMeaning("train.gradient_clipping")),
    ("grad_checkpointing gradient_checkpointing checkpointing", KeyMeaning("train.activation_checkpointing")),
    ("torch_compile torchcompile", KeyMeaning("train.compile")),
    ("gpus world_size num_gpus ngpus devices nproc ranks", KeyMeaning("scaling.gpus", example="[1, 2, 4]")),
    ("nproc_per_node ranks_per_node tasks_per_node", KeyMeaning("scaling.gpus_per_node")),
    ("img_size imgsz input_size resolution", KeyMeaning("model.image_size")),
    ("arch architecture model_name", KeyMeaning("model.name")),
    ("path data_path data_dir dir", KeyMeaning("data.root")),
    ("num_workers", KeyMeaning("data.workers")),
    ("dataset", KeyMeaning("data.name")),
    ("runs trials repetitions", KeyMeaning("measure.repeats")),
    (
        "warmup",
        KeyMeaning("measure.warmup_steps", remark="; of the learning rate, learning_rate_warmup_steps in [train]"),
    ),
)
_MEANING_BY_WORD = {word: meaning for words, meaning in _MEANINGS_BY_WORDS for word in words.split()}

_ADVICE_BY_FIELD: dict[str, tuple[tuple[str, str], ...]] = {
    "model.name": (
        (
            r"(resnet|convnext|efficientnet|mobilenet|densenet|vgg|regnet).*",
            'Write name = "timm/{0}" or "torchvision/{0}" if one of them has it, or factory = "my_module:build"',
        ),
        (r"dino.*|clip.*|beit.*|mae.*", 'Write hf = "..." for a configuration of the hub'),
    ),
    "data.name": (
        (
            r"imagenet.*|in-?1k|in-?22k|ilsvrc.*|tiny.?imagenet.*",
            'Write name = "folder" with root = the folder that holds train/ and val/',
        ),
        (r"image.?folder", 'Write name = "folder"'),
        (r"fake.*|random|dummy", 'Write name = "synthetic"'),
        (r"web.?dataset|wds|tar", 'Write name = "shards"'),
        (r".*mnist", 'Write name = "digits", which is small too, or hf = "{}"'),
        (r"cifar", 'Write name = "cifar10" or "cifar100"'),
        (r".+/.+", 'Write hf = "{}" in place of name'),
    ),
    "train.engine": (
        (r"fsdp1?", 'Write engine = "fsdp2"'),
        (r"zero-?([0-3])", 'Write engine = "deepspeed" with zero_stage'),
        (r"dp|data.?parallel|distributed.*|torch|nccl|gloo", 'Write engine = "ddp"'),
        (r"horovod|colossal.*", "vitscale has no {}; docs/extending.md says how to add an engine"),
        (r"trainer|lightning|pytorch|composer", 'Write [train] script = "train.py" for a loop of your own'),
    ),
    "train.precision": (
        (r"amp|mixed|bf16-mixed|bfloat16|float16-mixed", 'Write precision = "bf16", which is autocast'),
        (r"16|float16|half|fp16-mixed|16-mixed", 'Write precision = "fp16"'),
        (r"32|float32|full|tf32|32-true", 'Write precision = "fp32"'),
        (r"bf16-true|bf16-pure", 'Write precision = "bf16-params"'),
    ),
    "train.device": ((r"gpu|nvidia|cuda:\d+", 'Write device = "cuda"'),),
    "train.optimizer": ((r"adam|fused_?adam|adamw_.*", 'Write optimizer = "adamw"'),),
    "train.offload": (
        (
            r"cpu|nvme|host|true",
            'Write offload = "optimizer" (its states lie on the host) or "parameters" (weights too)',
        ),
    ),
    "slurm.container_runtime": (
        (r"enroot", 'Write container_runtime = "pyxis", by which srun starts Enroot'),
        (r"docker", 'Write container_runtime = "podman", which takes the same images'),
    ),
    "slurm.container_gpus": (
        (r"nv|cuda", 'Write container_gpus = "nvidia"'),
        (r"rocm|hip", 'Write container_gpus = "amd"'),
    ),
    "slurm.time": ((r".*", 'Write minutes ("90") or [days-]hours:minutes:seconds ("1:30:00")'),),
    "scaling.mode": (
        (r"strong", 'Write mode = "strong-micro" (each rank keeps its batch) or "strong-global" (all share one)'),
    ),
    "launch.launcher": (
        (r"in.?process", 'Write launcher = "local"'),
        (r"mpi|openmpi|mpiexec|orterun", 'Write launcher = "mpirun"'),
        (r"slurm", 'Write launcher = "srun", or scheduler = "slurm"'),
        (r"accelerate|python|torch\.distributed.*", 'Write launcher = "torchrun"'),
    ),
}
"""Dotted field -> (pattern of another program's value, what to write instead, with {} for that value)."""


def meant_key(word: str) -> KeyMeaning | None:
    """Return the field of a study that another program calls `word`; None where the word is unknown.

    Capitals and hyphens do not matter: "Batch-Size" is train.micro_batch.
    """
    return _MEANING_BY_WORD.get(word.lower().replace("-", "_"))


_LONGEST_WORD = 100
"""Characters of a value beyond which it is nobody's word."""


def meant_value(field: str, value: object) -> str:
    """Return what to write for another program's value of a dotted field; empty where the value is unknown.

    Example: "cuda:0" for "train.device" gives 'Write device = "cuda"'.
    """
    word = "true" if value is True else value
    if not isinstance(word, str) or len(word) > _LONGEST_WORD:
        return ""
    for pattern, advice in _ADVICE_BY_FIELD.get(field, ()):
        if re.fullmatch(pattern, word, re.IGNORECASE):
            return advice.format(word)
    return ""
