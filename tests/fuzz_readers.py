"""What reads what others wrote, and a sound file for each: what `fuzzing.py` makes its inputs from."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from check_factory import checked, record, sweep
from image_files import encoded, photograph, write_tar
from importers.logs import deepspeed_log, epoch_rows, epoch_table, steady
from importers.test_links import PERFTEST, header, perftest_json, table
from importers.test_train_logs import megatron, mmengine, swin, timm
from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import analysis, sources, store
from vitscale.deepspeed_lint import LintTarget, lint_file
from vitscale.engines.deepspeed import config as deepspeed_config
from vitscale.errors import StoreError
from vitscale.importers.contents import ImportOptions, LinkFormat
from vitscale.importers.importing import import_logs
from vitscale.machine.hosts import read_hostfile
from vitscale.prediction.instances import read_instances
from vitscale.preflight.imported import import_links
from vitscale.processes import launch_file
from vitscale.profiles.step_trace import RankStep, step_trace
from vitscale.profiles.trace_file import read_trace
from vitscale.runner import evidence
from vitscale.runner.batch_file import read_job
from vitscale.sources.arrays import ArrayShape, acquisition_of, decode_array, images_in, verify_array
from vitscale.sources.download import read_members
from vitscale.sources.pictures import decode_labels, decode_square, verify_picture
from vitscale.sources.restricted_pickle import read_pickle
from vitscale.store.bundles import unpacked, write_bundle
from vitscale.store.checks import read_check, write_check
from vitscale.store.packs import pack_runs, read_outcomes, read_pack
from vitscale.store.records import ExplainedLine
from vitscale.study.file import StudyFile, read_site
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import DataSpec

Read = Callable[[Path], object]


def _of_results(place: str) -> Read:
    """Reads a results folder in which one file is the input."""

    def read(path: Path) -> object:
        folder = path.parent / "results"
        shutil.copytree(_results(), folder)
        run = sorted((folder / "runs").iterdir())[0]
        shutil.copyfile(path, run / place if place != "study.json" else folder / place)
        return analysis.analyse(store.load(folder))

    return read


def _imported(log_format: str, name: str = "input") -> Read:
    def read(path: Path) -> object:
        path = path.rename(path.with_name(name))
        return import_logs([path], log_format, ImportOptions(gpus=2, micro_batch=8), path.parent / "results")

    return read


def _trace(path: Path) -> object:
    path = path.rename(path.with_suffix(".json"))
    return read_trace(path)


@cache
def _results() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="vitscale-fuzz-seed-")) / "results"
    write_results(resolved_study({1: [0.1], 2: [0.1]}), folder)
    return folder


def _file(name: str) -> bytes:
    run = sorted((_results() / "runs").iterdir())[0]
    content = (run / name if name != "study.json" else _results() / name).read_bytes()
    return b"".join(content.splitlines(keepends=True)[:40]) if name.endswith(".jsonl") else content


def _made(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seed"
        write(path)
        return path.read_bytes()


def _check() -> bytes:
    lines = sweep("across nodes", "all_reduce", 2, 5e-4, 25e6)
    with tempfile.TemporaryDirectory() as folder:
        return write_check(Path(folder), record(checked(0, collectives=lines))).read_bytes()


def _tar() -> bytes:
    """A bundle before it is compressed: a changed byte of the compressed one is found by its own check."""
    return gzip.decompress(_made(lambda path: write_bundle(_results(), path, redact=False)))


def _bundle(path: Path) -> object:
    path.write_bytes(gzip.compress(path.read_bytes(), 1))
    return unpacked(path)


def _events() -> bytes:
    spans = [
        {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 1,
            "tid": 1,
            "ts": 10.0 * n,
            "dur": 9.0,
            "args": {"Sequence number": n},
        }
        for n, (cat, name) in enumerate(
            [
                ("user_annotation", "ProfilerStep#1"),
                ("cpu_op", "aten::mm"),
                ("kernel", "ncclDevKernel_AllReduce_Sum_f32"),
            ]
        )
    ]
    about = {"rank": 0, "world_size": 2, "backend": "nccl"}
    return json.dumps({"schemaVersion": 1, "distributedInfo": about, "traceEvents": spans}).encode()


_STUDY = b"""name = "x"
[model]
name = "vit-ti16"
image_size = 32
patch_size = 16
[data]
name = "digits"
[train]
micro_batch = 8
epochs = 1
[scaling]
gpus = [1, 2]
[sweep]
"train.engine" = ["ddp", "fsdp2"]
[measure]
repeats = 3
"""
_STATE = json.dumps(
    {"log_history": [{"loss": 2.0, "step": n, "epoch": n / 4} for n in range(8)] + [{"train_runtime": 9.0, "step": 8}]}
).encode()


def _links(log_format: LinkFormat) -> Read:
    return lambda path: import_links([path], log_format, path.parent / "results")


# --- images, arrays, archives ----------------------------------------------------------------------------------------

_SIDE = 8


def _picture(kind: str) -> tuple[Callable[[], bytes], Read]:
    def read(path: Path) -> object:
        path = path.rename(path.with_suffix(f".{kind.lower()}"))
        verify_picture(str(path))
        decode_square(path.read_bytes(), _SIDE, 3, path.name)
        return decode_square(str(path), _SIDE, 1)

    return (lambda: encoded(photograph(20, 16), kind)), read


_ARRAYS = (".npy", ".npz", *((".tiff", ".h5") if find_spec("tifffile") and find_spec("h5py") else ()))


def _array(suffix: str) -> tuple[Callable[[], bytes], Read]:
    def write(path: Path) -> None:
        image = np.arange(2 * 9 * 9, dtype=np.uint16).reshape(2, 9, 9)
        match suffix:
            case ".npy":
                with path.open("wb") as file:
                    np.save(file, image)
            case ".npz":
                with path.open("wb") as file:
                    np.savez_compressed(file, image=image)
            case ".tiff":
                import_module("tifffile").imwrite(path, image, compression="zlib", photometric="minisblack")
            case _:
                with import_module("h5py").File(path, "w") as file:
                    file.create_dataset(
                        "reconstruction_rss", data=image[:, None].astype(np.float32), compression="gzip"
                    )
                    file.attrs["acquisition"] = "AXT2"

    def read(path: Path) -> object:
        path = path.rename(path.with_suffix(suffix))
        shape = ArrayShape(_SIDE, 1 if suffix == ".h5" else 2, "float32")
        if suffix == ".h5":
            acquisition_of(str(path))
        for part in range(min(3, images_in(str(path), path.name))):
            verify_array(str(path), shape, path.name)
            decode_array(path.read_bytes(), shape, part, path.name)
        return None

    return (lambda: _made(write)), read


def _shard(path: Path) -> object:
    folder = path.parent / "data" / "shards"
    folder.mkdir(parents=True)
    path.rename(folder / "train-0000.tar")
    spec = DataSpec(name="shards", root=str(folder), source_size=_SIDE, held_out=0.5)
    sources.check(spec)
    return sources.load(spec, path.parent / "cache")


def _shard_seed() -> bytes:
    members: dict[str, bytes] = {}
    for number in range(4):
        members |= {f"{number}.png": encoded(photograph(12, 12, number)), f"{number}.cls": b"%d" % (number % 2)}
    return _made(lambda path: write_tar(path, members))


def _archive(path: Path) -> object:
    path.write_bytes(gzip.compress(path.read_bytes(), 1))
    return read_members(path, {"cifar/a", "cifar/b"}, 1 << 20)


# --- what vitscale keeps for itself ----------------------------------------------------------------------------------


def _pack_seed() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "results"
        shutil.copytree(_results(), folder)
        runs = {run.header.folder: run for run in store.load(folder).runs}
        return pack_runs(folder, runs).read_bytes()


def _pack(path: Path) -> object:
    """Under the name that its content has: another would be refused for that alone."""
    content = path.read_bytes()
    path = path.rename(path.parent / f"000001-{hashlib.blake2b(content, digest_size=8).hexdigest()}.parquet")
    outcomes = read_outcomes(path)
    return outcomes, read_pack(path)


def _checkpoint_seed(name: str) -> bytes:
    import torch

    from vitscale.engines.shared.checkpoint import Description, write_description, write_tensors

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        if path.suffix == ".json":
            about = {
                "format": 1,
                "step": 3,
                "optimizer": "adamw",
                "optimizer_steps": 3,
                "states": [],
                "loss_scale": None,
            }
            write_description(Path(folder), Description.model_validate(about))
        else:
            write_tensors(path, {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)})
        return path.read_bytes()


def _checkpoint(name: str) -> Read:
    def read(path: Path) -> object:
        from vitscale.engines.shared.checkpoint import TensorFile, read_description

        path = path.rename(path.with_name(name))
        if path.suffix == ".json":
            return read_description(path.parent)
        file = TensorFile(path.parent, path.stem, {"weight": (2, 3), "bias": (2,)}, fp32=True)
        return [tensor.sum() for _, tensor in file.tensors(lambda: None)]

    return read


_JOB = "vitscale-1x2-0123abcd"


def _job_seed() -> bytes:
    task = {"trial_id": "0" * 12, "repeat": 0, "attempt": 0}
    about = {
        "name": _JOB,
        "array": False,
        "tasks": [task],
        "study_folder": "/x",
        "launch": {},
        "slurm": {},
        "measure": {},
    }
    return json.dumps(about).encode()


def _job(path: Path) -> object:
    (path.parent / "jobs").mkdir()
    path.rename(path.parent / "jobs" / f"{_JOB}.json")
    return read_job(path.parent, _JOB)


def _launch_seed() -> bytes:
    about = launch_file.LaunchFile(token="0" * 32, commands=(("a", "b"),), driver_pid=1, host_id="h", started_ns=1)
    return about.model_dump_json(indent=1).encode()


def _launch(path: Path) -> object:
    path.rename(path.with_name(launch_file.NAME))
    try:
        return launch_file.read(path.parent)
    except ValueError as error:  # as it says
        raise StoreError(str(error)) from None


# --- what users hand in ----------------------------------------------------------------------------------------------


def _launcher_log(path: Path) -> object:
    return evidence.read_reports(path.read_bytes().decode(errors="replace"))


def _deepspeed_file(path: Path) -> object:
    deepspeed_config.read(path)
    return lint_file(path, LintTarget(parameters=86_567_656, gpus=8))


_DEEPSPEED = json.dumps(
    {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.999]}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
    },
    indent=1,
).encode()


def _hf_config(path: Path) -> object:
    (path.parent / "hf").mkdir()
    path.rename(path.parent / "hf" / "config.json")
    return resolve(ModelSpec(hf=str(path.parent / "hf")), 10)


_HF = json.dumps(
    {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
     "image_size": 32, "patch_size": 8, "num_channels": 3, "qkv_bias": True}
).encode()  # fmt: skip
_LAUNCHERS = b"""  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
rank 1 exited with 3
ssh: connect to host node1 port 22: No route to host
slurmstepd: error: Detected 1 oom-kill event(s) in StepId=4711.0
srun: error: node1: task 1: Killed
"""


def _step_trace() -> bytes:
    line = ExplainedLine(
        step=6,
        block=0,
        device="cuda",
        seconds=0.1,
        phases=(("forward", 0.0, 0.04), ("backward", 0.04, 0.09)),
        idle=((0.09, 0.1),),
        collectives=(("nccl-0", "all_reduce", 0.05, 0.1),),
    )
    about = {
        "gpus": 1,
        "nodes": 1,
        "micro_batch": 8,
        "grad_accum": 1,
        "steps_known": True,
        "device_names": {"0": "A100"},
    }
    return step_trace(about, [[RankStep(0, line, {"forward": [(0.0, 0.04)]}, 0.0)]])


READERS: dict[str, tuple[Callable[[], bytes], Read]] = {
    "study": (lambda: _STUDY, lambda path: StudyFile.read(path)),
    "site": (lambda: b"[launch]\nlauncher = 'mpirun'\n[slurm]\npartition = 'gpu'\n", read_site),
    "hostfile": (lambda: b"# hosts\nnode0 slots=4\nnode1 slots=4\n10.0.0.1 slots=2\n", read_hostfile),
    "study.json": (lambda: _file("study.json"), _of_results("study.json")),
    "trial.json": (lambda: _file("trial.json"), _of_results("trial.json")),
    "outcome.json": (lambda: _file("outcome.json"), _of_results("outcome.json")),
    "rank lines": (lambda: _file("rank-0.jsonl"), _of_results("rank-0.jsonl")),
    "check": (_check, read_check),
    "bundle": (_tar, _bundle),
    "epochs": (
        lambda: _made(lambda path: epoch_table(path, epoch_rows(2, [[100.0, 110.0], [120.0, 90.0]]))),
        _imported("epochs"),
    ),
    "deepspeed": (
        lambda: _made(lambda path: deepspeed_log(path, [*steady(0, 8), *steady(1, 8)])),
        _imported("deepspeed"),
    ),
    "table": (
        lambda: (
            b"# A\n\n| # GPUs | Images/sec | step time (ms) |\n|--:|---|---|\n| 1 | 363 | 176 |\n| 8 | **2,855** | 9 |"
        ),
        _imported("csv"),
    ),
    "csv": (lambda: b"gpus,step_seconds,micro_batch\n1,0.1,8\n2,0.11,8\n", _imported("csv")),
    "train-log": (
        lambda: "\n".join([*timm(), *mmengine(), *swin(), *megatron()]).encode(),
        _imported("train-log"),
    ),
    "trainer-state": (lambda: _STATE, _imported("trainer-state")),
    "trace": (_events, _trace),
    "prices": (lambda: b"instance,gpu,count,price\nbig,A100-80GB,8,32.8\nsmall,T4,4,3.9\n", read_instances),
    "pickle": (
        lambda: pickle.dumps({b"data": [1, 2, 3], b"labels": [0, 1], b"filenames": ["a", "b"]}, protocol=2),
        lambda path: read_pickle(path.read_bytes(), path.name),
    ),
    "nccl-tests": (
        lambda: (
            "# Collective test starting: all_reduce_perf\n" + header(2, 2) + table("all_reduce", 4, 3e-5, 2e10)
        ).encode(),
        _links("nccl-tests"),
    ),
    "perftest": (lambda: PERFTEST.format(unit="Gb/sec", rate=97.6, both="").encode(), _links("perftest")),
    "perftest JSON": (lambda: perftest_json().encode(), _links("perftest")),
    "DeepSpeed file": (lambda: _DEEPSPEED, _deepspeed_file),
    "HF config": (lambda: _HF, _hf_config),
    "launcher log": (
        lambda: _LAUNCHERS,
        lambda path: evidence.read_reports(path.read_bytes().decode(errors="replace")),
    ),
    **{kind: _picture(kind) for kind in ("JPEG", "PNG", "TIFF", "WEBP", "GIF", "BMP", "PPM")},
    "labels": (lambda: encoded(photograph(20, 16).convert("L")), lambda path: decode_labels(str(path))),
    **{suffix.strip("."): _array(suffix) for suffix in _ARRAYS},
    "shard": (_shard_seed, _shard),
    "archive": (lambda: _made(lambda path: write_tar(path, {"cifar/a": b"1" * 600, "cifar/b": b"2"})), _archive),
    "pack": (_pack_seed, _pack),
    **{
        f"checkpoint {name}": (partial(_checkpoint_seed, name), _checkpoint(name))
        for name in ("checkpoint.json", "weights.safetensors")
    },
    "job": (_job_seed, _job),
    "launch.json": (_launch_seed, _launch),
    "step trace": (_step_trace, _imported("trace", "exported.json")),
}
"""Name to a sound file, and what reads one."""
