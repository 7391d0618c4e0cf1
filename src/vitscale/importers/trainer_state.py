"""Reads Hugging Face's trainer_state.json: one run, with one time for the whole training."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitscale.errors import RequestError, StoreError, shown
from vitscale.importers import contents
from vitscale.importers.contents import ImportOptions, LogContents, LogRank, LogRun, TrialSetting
from vitscale.importers.records import an_epoch, epoch_line, step_line, train_samples
from vitscale.store.records import EpochLine

_LARGEST_BYTES = 256 << 20
_MOST_EPOCHS = 10_000
_NEAR = 0.05
_EVALUATION = re.compile(r"eval_(?:\w+_)?runtime")


def read(paths: Sequence[Path], options: ImportOptions) -> LogContents:
    """One run per file, on as many ranks as --gpus says.

    Raises:
        RequestError: --gpus is missing.
        StoreError: a file cannot be read, or no training has ended in any.
    """
    if options.gpus is None and options.each_gpus is None:
        what = "a trainer_state.json does not tell the GPUs"
        raise RequestError(what, next_step=f"Give them: {contents.how_to_tell(paths)}")
    runs: list[LogRun] = []
    problems: list[str] = []
    notes: dict[str, None] = {}
    for number, path in enumerate(paths):
        own = options.of_file(number)
        try:
            run, said = _run(path, _state(path), own.gpus or 1, own)
        except (ValueError, ArithmeticError) as error:
            problems.append(f"{path.name}: {error}")
            continue
        runs.append(run)
        notes |= dict.fromkeys(said)
    accums = sorted({run.setting.grad_accum for run in runs})
    if options.gpus is not None and len(accums) > 1:
        told = f"with --gpus {options.gpus} the files accumulate {' or '.join(map(str, accums))} micro-steps"
        notes[f"{told}: if their GPUs differ instead, say {contents.EACH_GPUS}"] = None
    return LogContents(tuple(runs), tuple(notes), tuple(problems))


def _state(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise StoreError(f"{shown(path.name)} is larger than {_LARGEST_BYTES >> 20} MiB")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise contents.cannot_read(path, error) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, UnicodeError):
            raise ValueError("it is no UTF-8") from None
        if "null byte" in str(error):
            raise contents.cannot_read(path, error) from None
        raise ValueError(f"it is no JSON, or cut off ({str(error)[:100]})") from None
    if not isinstance(content, dict) or not isinstance(content.get("log_history"), list):
        raise ValueError("it has no log_history")
    return content


def _run(path: Path, state: Mapping[str, Any], gpus: int, options: ImportOptions) -> tuple[LogRun, list[str]]:
    """One file's run, and notes on it. Raises ValueError where the file tells no time."""
    history = [entry for entry in state["log_history"] if isinstance(entry, dict)]
    timed = [entry for entry in history if _positive(entry.get("train_runtime"))]
    # With `include_num_input_tokens_seen` every entry has the time so far.
    ended = [entry for entry in timed if "train_loss" in entry or "total_flos" in entry] or timed[-1:]
    if not ended:
        raise ValueError("no training has ended in it: no entry has train_runtime")
    end = ended[-1]
    steps = _count(end.get("step")) or _count(state.get("global_step"))
    if steps is None:
        raise ValueError("it does not tell its steps")
    # `train_runtime` is of the last call of `train`; an evaluation after it, and all of an earlier call, are not in it.
    call_before = ended[-2] if len(ended) > 1 else {}
    runtime = _positive(end.get("train_runtime")) or 0.0
    own, by_rates = _own_steps(end, steps, call_before)
    within: list[dict[str, Any]] = []
    for entry in history:
        if entry is end:
            break
        if entry is call_before:
            within.clear()
        elif _evaluation_seconds(entry):
            within.append(entry)
    if by_rates:  # another process took the steps before
        within = [entry for entry in within if (_number(entry.get("step")) or steps) > steps - own]
    evaluating = sum(_evaluation_seconds(entry) for entry in within if not _at_its_end(entry, call_before))
    seconds = runtime - evaluating
    if not 0 < seconds <= contents.LONGEST_SECONDS:
        raise ValueError(f"train_runtime {runtime:g} s less evaluation of {evaluating:g} s is no time")
    notes = [f"{path.name}: one time for the whole run, with its first steps: every epoch is shown as the mean one"]
    if evaluating:
        notes.append(f"{path.name}: {evaluating:.0f} s of evaluation are taken out of its {runtime:.0f} s")
    if own < steps:
        notes.append(f"{path.name}: a training was continued: {own:,} of its {steps:,} steps are in that time")
    setting = _setting(path, state, end, steps, gpus, options, notes, own / steps if by_rates else 1.0)
    all_epochs = _positive(end.get("epoch")) or _positive(state.get("epoch")) or 0.0
    epochs = all_epochs * own / steps
    whole = min(_MOST_EPOCHS, math.floor(epochs + 0.01))
    images = (setting.micro_batch or 0) * setting.grad_accum
    rank = LogRank(
        0,
        epochs=tuple(_epochs(history, round(all_epochs) - whole, whole, seconds / epochs, setting, options))
        if whole
        else (),
        steps=() if whole and train_samples(setting, options) else (step_line(0, seconds / own, images),),
    )
    return LogRun(setting, path.name, (contents.identified(path),), (rank,), of_the_run=True), notes


def _at_its_end(entry: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Whether an entry is of the very step or epoch with which a call of `train` ended."""
    places = ((_number(entry.get(key)), _number(call.get(key))) for key in ("step", "epoch"))
    return any(own is not None and own == end for own, end in places)


def _own_steps(end: Mapping[str, Any], steps: int, earlier: Mapping[str, Any]) -> tuple[int, bool]:
    """(Steps of the last call of `train`, whether its rates are of these alone).

    Transformers 5 writes rates of this call's steps (`speed_metrics` in trainer.py), older releases of all steps; then
    only an earlier call in the same file tells that these are too many.
    """
    pace, runtime = _positive(end.get("train_steps_per_second")), _positive(end.get("train_runtime"))
    told = round(pace * runtime) if pace and runtime else steps
    if 0 < told < (1 - _NEAR) * steps:
        return told, True
    done = _count(earlier.get("step"))
    return (steps - done if done is not None and done < steps else steps), False


def _setting(
    path: Path,
    state: Mapping[str, Any],
    end: Mapping[str, Any],
    steps: int,
    gpus: int,
    options: ImportOptions,
    notes: list[str],
    share: float,
) -> TrialSetting:
    """Works out batch and dataset from the rates, of this share of all steps: images/s over steps/s is the global
    batch."""
    rate, pace = _positive(end.get("train_samples_per_second")), _positive(end.get("train_steps_per_second"))
    runtime = _positive(end.get("train_runtime")) or 0.0
    planned = _positive(state.get("num_train_epochs"))
    samples = None
    if rate and planned and _count(state.get("max_steps")) == steps:
        # Transformers' speed_metrics: images of all epochs / train_runtime, with three decimals.
        samples = round(rate * runtime / (planned * share))
        notes.append(
            f"{path.name}: about {samples:,} training images, from its images/s (--train-samples says it exactly)"
        )
    micro_batch = options.micro_batch or _count(state.get("train_batch_size"))
    of_all = rate / pace if rate and pace else None
    accum = 1
    if micro_batch is not None and of_all is not None:
        times = of_all / (gpus * micro_batch)
        near = max(1, round(times))
        if abs(times / near - 1) <= _NEAR:
            accum = near
        else:
            notes.append(
                f"{path.name}: {of_all:.3g} images a step are not {gpus} GPUs x {micro_batch}, whatever the "
                f"accumulation: is --gpus right? For several files: {contents.EACH_GPUS}"
            )
    elif micro_batch is None and of_all is not None and round(of_all / gpus) >= 1:
        micro_batch = round(of_all / gpus)
        notes.append(f"{path.name}: {micro_batch} images per GPU and step, from its rates, without accumulation")
    if options.micro_batch is None and micro_batch is not None and micro_batch > 1_000_000:
        raise ValueError(f"train_batch_size {micro_batch} is no batch of a GPU")
    return TrialSetting(
        gpus=gpus, micro_batch=micro_batch, grad_accum=min(accum, 1_000_000), train_samples=samples or None
    )


def _epochs(
    history: Sequence[Mapping[str, Any]],
    first: int,
    whole: int,
    seconds: float,
    setting: TrialSetting,
    options: ImportOptions,
) -> Iterable[EpochLine]:
    """`whole` epochs, of which the training had done `first` before."""
    sizes = an_epoch(setting, options)
    for number in range(whole):
        end = first + number + 1
        own = [entry for entry in history if (at := _positive(entry.get("epoch"))) and end - 1 < at <= end + 1e-9]
        accuracy = _share(_last(own, "eval_accuracy"))
        held_out = {"held_out_loss": _last(own, "eval_loss"), "held_out_accuracy": accuracy}
        yield epoch_line(number, seconds, sizes, train_loss=_last(own, "loss"), **held_out)


def _last(entries: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((value for entry in reversed(entries) if (value := _number(entry.get(key))) is not None), None)


def _share(value: float | None) -> float | None:
    return value if value is not None and 0 <= value <= 1 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _evaluation_seconds(entry: Mapping[str, Any]) -> float:
    """Seconds of evaluation that an entry tells; of several sets, each has an entry and a name of its own."""
    return sum(_positive(value) or 0.0 for key, value in entry.items() if _EVALUATION.fullmatch(key))


def _positive(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and 0 < number <= contents.LONGEST_SECONDS else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 10**9 else None
