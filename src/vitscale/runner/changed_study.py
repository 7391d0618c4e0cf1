"""Why a study's trials are others than those of the folder that it is to go on in: what was changed, in words.

A trial's identity is over all that affects its result, wherever that stands: values of the study file, of the command
line and of a site file, the machine's cores, and the content of files that a study names (a script, a DeepSpeed file, a
model's configuration, its weights, a list of classes).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from vitscale.errors import RequestError, shown
from vitscale.present.data import dotted
from vitscale.present.units import listed
from vitscale.store.results import StudyRecord
from vitscale.study.file import overridden
from vitscale.trial.trial import HOW_FOUND, Trial, WindowSpec

_MOST_NAMED = 3
_OF_LAUNCH = ("launcher", "threads_per_rank")
_CONTENTS = {
    "script_digest": ("train.script", "the content of {}"),
    "model_digest": ("model.hf", "the config.json of {}"),
    "weights_digest": ("model.weights", "the weights of {}"),
}
"""Digest of a trial -> the field that names the file, and words for what is in it."""


class Change(NamedTuple):
    """One thing in which a study differs from the one that a folder was begun with."""

    field: str
    """The field of the study: "train.script"."""
    words: str
    """What was changed: "train.learning_rate was 0.0005 and is 0.001"."""
    restore: str = ""
    """How to go on as it was begun, where a file has to be put back; empty: that follows from the words."""


def changes(before: StudyRecord, now: StudyRecord) -> list[Change]:
    """What makes the trials of `now` others than those of `before`, the likeliest cause first; empty: nobody knows."""
    in_trials = list(_of_trials(before, now))
    in_text = list(_of_text(before, now))
    overridden_fields = _overridden_fields(before, now)
    causes = [
        *_of_launch(before, now, {change.field for change in in_text}),
        *_of_files(before, now),
        *in_text,
        *(change for change in in_trials if change.field in overridden_fields),
    ]
    # What the studies do not say may come from a site file, or from a file that an earlier version read otherwise.
    return list({change.field: change for change in causes or in_trials}.values())


def in_brackets(causes: Iterable[Change]) -> str:
    """The changes behind a statement: " (train.learning_rate was 0.0005 and is 0.001)"; empty where there are none."""
    words = [change.words for change in causes]
    return f" ({listed(words, most=_MOST_NAMED)})" if words else ""


def how_to_go_on(causes: Sequence[Change], before: StudyRecord, now: StudyRecord) -> list[str]:
    """Steps after which a folder goes on as it was begun, as far as they are known: clauses for an advice."""
    steps = list(dict.fromkeys(change.restore for change in causes if change.restore))
    is_by_override = not _overridden_fields(before, now).isdisjoint(change.field for change in causes)
    if before.overrides != now.overrides and (is_by_override or not causes):
        words = " ".join(before.overrides) or "nothing"
        steps.append(f"go on as it was begun, with {words} on the command line")
    return steps


def _unlike(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(Field, value before, value now) of each field with another value, or with one on one side only."""
    for field in {**before, **now}:
        if before.get(field) != now.get(field):
            yield field, before.get(field), now.get(field)


def _value(value: object) -> str:
    return "not given" if value is None else shown(value)


def _changed(field: str, before: object, now: object) -> Change:
    return Change(field, f"{field} was {_value(before)} and is {_value(now)}")


def _overridden_fields(before: StudyRecord, now: StudyRecord) -> set[str]:
    """Fields to which the two command lines give other values."""
    return {field for field, _, _ in _unlike(_overrides(before), _overrides(now))}


def _overrides(study: StudyRecord) -> dict[str, Any]:
    """The values that the command line puts over a study, by field; empty where its words are none."""
    try:
        return dotted(overridden(study.overrides))
    except RequestError:
        return {}


def _of_text(before: StudyRecord, now: StudyRecord) -> Iterator[Change]:
    """Values of the study file that decide on trials: a number of repeats, say, makes no others of them."""
    try:
        texts = [dotted(tomllib.loads(study.text)) for study in (before, now)]
    except ValueError:
        return
    for field, value, new_value in _unlike(*texts):
        section, _, key = field.partition(".")
        if section == "measure" and key not in WindowSpec.model_fields:
            continue
        if section in ("slurm", "node") or (section == "launch" and key not in _OF_LAUNCH):
            continue
        if section != "data" or key not in HOW_FOUND:
            yield _changed(field, value, new_value)


def _of_launch(before: StudyRecord, now: StudyRecord, in_text: set[str]) -> Iterator[Change]:
    """Launcher and threads where no line of the study shows them: they follow from cores, hosts and options."""
    launchers = [{trial.launcher for trial in study.trials.values()} for study in (before, now)]
    if "launch.launcher" not in in_text and launchers[0] != launchers[1]:
        words = [" and ".join(sorted(names)) for names in launchers]
        yield Change("launch.launcher", f"launch.launcher was {words[0]} and is {words[1]}")
    threads = [threads_of(study) for study in (before, now)]
    if "launch.threads_per_rank" not in in_text and None not in threads and threads[0] != threads[1]:
        yield Change("launch.threads_per_rank", f"launch.threads_per_rank was {threads[0]} and is {threads[1]}")


def threads_of(study: StudyRecord | None) -> int | None:
    """The threads of each rank of a study; None where it has none, or more than one number."""
    if study is None:
        return None
    threads = {trial.world.threads_per_rank for trial in study.trials.values() if trial.origin is None}
    return threads.pop() if len(threads) == 1 else None


def _of_files(before: StudyRecord, now: StudyRecord) -> Iterator[Change]:
    """Files that both studies name alike, and that hold something else."""
    for digest, (field, words) in _CONTENTS.items():
        names = [_names(study, field) for study in (before, now)]
        digests = [{getattr(trial, digest) for trial in study.trials.values()} for study in (before, now)]
        if names[0] and names[0] == names[1] and digests[0] != digests[1]:
            file = f"{field} {listed(shown(name) for name in sorted(names[0]))}"
            yield Change(field, f"{words.format(file)} has changed", f"put {listed(sorted(names[0]))} back as it was")
    configs = [_configs(study) for study in (before, now)]
    if configs[0] and configs[1] and configs[0] != configs[1]:
        keys = [
            f"{key} was {_value(value)} and is {_value(new_value)}"
            for key, value, new_value in _unlike(configs[0][0], configs[1][0])
        ]
        words = f"the content of train.deepspeed_config has changed: {listed(keys, most=_MOST_NAMED)}"
        yield Change("train.deepspeed_config", words, "put that file back as it was")
    classes = [{trial.data.classes for trial in study.trials.values()} for study in (before, now)]
    if classes[0] != classes[1] and all(isinstance(names, tuple) for names in classes[0] | classes[1]):
        words = "the names in the file of data.classes have changed"
        yield Change("data.classes", words, "put that file back as it was")


def _names(study: StudyRecord, field: str) -> set[str]:
    """The last parts of the paths, or the names, that a field has in a study's trials."""
    section, _, key = field.partition(".")
    values = (getattr(getattr(trial, section), key) for trial in study.trials.values())
    return {PurePath(value).name for value in values if value is not None}


def _configs(study: StudyRecord) -> list[dict[str, Any]]:
    """The different DeepSpeed files of a study, each by dotted key."""
    configs = (trial.train.deepspeed_config for trial in study.trials.values())
    unlike: list[dict[str, Any]] = []
    for config in configs:
        if config is not None and (flat := dotted(config)) not in unlike:
            unlike.append(flat)
    return unlike


def _of_trials(before: StudyRecord, now: StudyRecord) -> Iterator[Change]:
    """Fields with other values in the trials of one record than in those of the other."""
    earlier, later = ([_fields(trial) for trial in study.trials.values()] for study in (before, now))
    for field in dict.fromkeys(field for trial in (*earlier, *later) for field in trial):
        values, new_values = _values_of(field, earlier), _values_of(field, later)
        if values != new_values:
            yield Change(field, f"{field} was {' and '.join(values)} and is {' and '.join(new_values)}")


def _values_of(field: str, trials: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({_value(trial.get(field)) for trial in trials})


def _fields(trial: Trial) -> dict[str, Any]:
    """All that a trial's identity is of, by the names that a study gives it."""
    content = trial.model_dump(mode="json")
    for field in HOW_FOUND:
        del content["data"][field]
    of_window = content.pop("window")
    return dotted(content | {"measure": of_window})
