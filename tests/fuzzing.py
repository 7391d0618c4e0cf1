"""Every reader of what others wrote, on inputs that nobody meant: `python tests/fuzzing.py --inputs 100000`.

An input is a sound file with some of its bytes changed, cut, doubled or replaced by what readers stumble over. It
is made of the reader's name and its number alone: what fails is made again by `--reader NAME --from NUMBER --inputs
1`, and a run that was cut goes on with `--from`. A reader may answer, or raise the program's own error; anything
else, an answer that takes longer than `_HANG_SECONDS`, or memory beyond `_MOST_BYTES` is a fault. Inputs that once
were faults are kept in `fuzz_cases/`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType

from check_factory import checked, record, sweep
from importers.logs import deepspeed_log, epoch_rows, epoch_table, steady
from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import analysis, store
from vitscale.errors import VitscaleError
from vitscale.importers.contents import Options
from vitscale.importers.importing import import_logs
from vitscale.machine.hosts import read_hostfile
from vitscale.prediction.instances import read_instances
from vitscale.profiles.trace_file import read_trace
from vitscale.sources.restricted_pickle import read_pickle
from vitscale.store.bundles import unpacked, write_bundle
from vitscale.store.checks import read_check, write_check
from vitscale.study.file import StudyFile, read_site

CASES = Path(__file__).parent / "fuzz_cases"
_HANG_SECONDS = 30
_MOST_BYTES = 6 << 30
STUMBLES = (
    b"NaN", b"Infinity", b"-1", b"1e400", b"9" * 400, b"0x10", b"null", b"true", b"{}", b"[]", b'""', b"[" * 3000,
    b"{" * 3000, b'{"a":' * 2000, b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b",,,,", b'"', b"\\u0000",
    b"\\ud800", b"../../x", b"/etc/passwd", b"%s%n", b"<script>", b"$(touch x)", b"\x1b[2J", b"\xe2\x80\xae", b"-0",
    b"1_000", b"'" * 3,
)  # fmt: skip
"""What readers stumble over."""
Read = Callable[[Path], object]


def mutated(seed: bytes, source: random.Random) -> bytes:
    """A sound file with one to eight things done to it."""
    content = bytearray(seed)
    for _ in range(source.choice((1, 1, 2, 3, 8))):
        at = source.randrange(len(content) + 1)
        end = min(len(content), at + source.choice((1, 2, 8, 64, 1024)))
        match source.randrange(7):
            case 0:
                content[at:end] = source.choice(STUMBLES)
            case 1:
                content[at:at] = source.choice(STUMBLES)
            case 2:
                del content[at:end]
            case 3:
                content[at:at] = content[at:end] * source.choice((1, 2, 20))
            case 4:
                del content[at:]
            case 5 if content:
                content[at % len(content)] ^= 1 << source.randrange(8)
            case _:
                other = source.randrange(len(content) + 1)
                content[at:end] = content[other : other + end - at]
    return bytes(content)


def _of_results(place: str) -> Read:
    """Reads a results folder in which one file is the input."""

    def read(path: Path) -> object:
        folder = path.parent / "results"
        shutil.copytree(_results(), folder)
        run = sorted((folder / "runs").iterdir())[0]
        shutil.copyfile(path, run / place if place != "study.json" else folder / place)
        return analysis.analyse(store.load(folder))

    return read


def _imported(log_format: str) -> Read:
    def read(path: Path) -> object:
        return import_logs([path], log_format, Options(gpus=2, micro_batch=8), path.parent / "results")

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
    "csv": (lambda: b"gpus,step_seconds,micro_batch\n1,0.1,8\n2,0.11,8\n", _imported("csv")),
    "trainer-state": (lambda: _STATE, _imported("trainer-state")),
    "trace": (_events, _trace),
    "prices": (lambda: b"instance,gpu,count,price\nbig,A100-80GB,8,32.8\nsmall,T4,4,3.9\n", read_instances),
    "pickle": (
        lambda: pickle.dumps({b"data": [1, 2, 3], b"labels": [0, 1], b"filenames": ["a", "b"]}, protocol=2),
        lambda path: read_pickle(path.read_bytes(), path.name),
    ),
}
"""Name to a sound file, and what reads one."""


def case(reader: str, number: int) -> bytes:
    """The input of a number: the same everywhere."""
    seed = _seed(reader)
    return mutated(seed, random.Random(f"{reader} {number}"))


@cache
def _seed(reader: str) -> bytes:
    return READERS[reader][0]()


def fault(reader: str, content: bytes) -> BaseException | None:
    """What a reader does with an input that it must not."""
    with tempfile.TemporaryDirectory(prefix="vitscale-fuzz-") as folder:
        path = Path(folder) / "input"
        path.write_bytes(content)
        signal.alarm(_HANG_SECONDS)
        try:
            READERS[reader][1](path)
        except VitscaleError:
            return None
        except Exception as error:
            return error
        finally:
            signal.alarm(0)
    return None


def _hung(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"no answer for {_HANG_SECONDS} s")


def main(arguments: list[str] | None = None) -> int:
    """Tries the inputs; 1 where one was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1000, help="of each reader")
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first")
    parser.add_argument("--reader", choices=READERS, action="append", help="these alone")
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGALRM, _hung)
    if arguments is None:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    faults = 0
    for reader in asked.reader or READERS:
        began = time.monotonic()
        for number in range(asked.first, asked.first + asked.inputs):
            error = fault(reader, content := case(reader, number))
            if error is not None:
                faults += 1
                print(f"{reader} {number}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                if arguments is None:
                    (CASES / f"{reader.replace(' ', '-')}-{number}").write_bytes(content)
        seconds = time.monotonic() - began
        print(f"{reader}: {asked.inputs:,} inputs in {seconds:.0f} s", flush=True)
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
