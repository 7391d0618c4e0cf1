"""Other programs' words for keys and values of a study, and what is meant by them. The only table of them."""

from __future__ import annotations

import re

_KEYS = (
    ("lr base_lr blr", "train.learning_rate", "", ""),
    ("wd", "train.weight_decay", "", ""),
    (
        "batch_size bs batch per_device_train_batch_size train_micro_batch_size_per_gpu micro_batch_size",
        "train.micro_batch",
        "",
        ", of one rank; global_batch is that of all of them under strong-global",
    ),
    ("total_batch_size train_batch_size", "train.global_batch", "", ', under mode = "strong-global"'),
    (
        "accumulate accumulation accum accum_iter gradient_accumulation gradient_accumulation_steps "
        "accumulate_grad_batches",
        "train.grad_accum",
        "",
        "",
    ),
    ("num_epochs n_epochs max_epochs num_train_epochs", "train.epochs", "", ""),
    ("max_steps iterations iters num_steps", "measure.steps", "", ""),
    ("amp mixed_precision fp16 bf16 dtype use_amp", "train.precision", '"bf16"', ""),
    ("backend strategy parallel distributed", "train.engine", "", ""),
    ("opt", "train.optimizer", "", ""),
    ("zero stage", "train.zero_stage", "", ""),
    ("grad_clip clip_grad max_grad_norm gradient_clip_val clip", "train.gradient_clipping", "", ""),
    ("grad_checkpointing gradient_checkpointing checkpointing", "train.activation_checkpointing", "", ""),
    ("torch_compile torchcompile", "train.compile", "", ""),
    ("gpus world_size num_gpus ngpus devices nproc ranks", "scaling.gpus", "[1, 2, 4]", ""),
    ("nproc_per_node ranks_per_node tasks_per_node", "scaling.gpus_per_node", "", ""),
    ("img_size imgsz input_size resolution", "model.image_size", "", ""),
    ("arch architecture model_name", "model.name", "", ""),
    ("path data_path data_dir dir", "data.root", "", ""),
    ("num_workers", "data.workers", "", ""),
    ("dataset", "data.name", "", ""),
    ("runs trials repetitions", "measure.repeats", "", ""),
    ("warmup", "measure.warmup_steps", "", "; of the learning rate, learning_rate_warmup_steps in [train]"),
)
_BY_WORD = {word: row for row in _KEYS for word in row[0].split()}

_VALUES = {
    "model.name": (
        (
            r"(resnet|convnext|efficientnet|mobilenet|densenet|vgg|regnet).*",
            'vitscale has no {} of its own: write factory = "my_module:build", a function that makes it',
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


def meant_key(word: str) -> tuple[str, str, str] | None:
    """The dotted field that another program calls `word`, an example of its value, and a remark; None if unknown."""
    row = _BY_WORD.get(word.lower().replace("-", "_"))
    return row[1:] if row else None


def meant_value(field: str, value: object) -> str:
    """What to write for another program's value of a dotted field; empty where the value is unknown."""
    value = "true" if value is True else value
    if not isinstance(value, str) or len(value) > 100:
        return ""
    for pattern, advice in _VALUES.get(field, ()):
        if re.fullmatch(pattern, value, re.IGNORECASE):
            return advice.format(value)
    return ""
