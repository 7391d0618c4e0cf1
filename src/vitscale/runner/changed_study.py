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
_LAUNCH_FIELDS = ("launcher", "threads_per_rank")
"""Fields of [launch] that are part of a trial."""
_PUT_BACK = "put that file back as it was"


class Change(NamedTuple):
    """One thing in which a study differs from the one that a folder was begun with."""

    field: str
    """The field of the study: "train.script"."""
    words: str
    """What was changed: "train.learning_rate was 0.0005 and is 0.001"."""
    restore: str = ""
    """How to go on as it was begun, where a file has to be put back; empty: that follows from the words."""


def changes(stored: StudyRecord, planned: StudyRecord) -> list[Change]:
    """What makes the trials of a planned study others than the stored ones, likely causes first; empty: unknown."""
    in_text = list(_text_changes(stored, planned))
    in_trials = list(_trial_changes(stored, planned))
    overridden_fields = _overridden_fields(stored, planned)
    causes = [
        *_launch_changes(stored, planned, without={change.field for change in in_text}),
        *_digest_changes(stored, planned),
        *_config_changes(stored, planned),
        *_class_changes(stored, planned),
        *in_text,
        *(change for change in in_trials if change.field in overridden_fields),
    ]
    # What the studies do not say may come from a site file, or from a file that an earlier version read otherwise.
    by_field = {change.field: change for change in causes or in_trials}
    return list(by_field.values())


def in_brackets(causes: Iterable[Change]) -> str:
    """The changes behind a statement: " (train.learning_rate was 0.0005 and is 0.001)"; empty where there are none."""
    words = [change.words for change in causes]
    return f" ({listed(words, most=_MOST_NAMED)})" if words else ""


def how_to_go_on(causes: Sequence[Change], stored: StudyRecord, planned: StudyRecord) -> list[str]:
    """Steps after which a folder goes on as it was begun, as far as they are known: clauses for an advice."""
    steps = list(dict.fromkeys(change.restore for change in causes if change.restore))
    is_by_override = not _overridden_fields(stored, planned).isdisjoint(change.field for change in causes)
    if stored.overrides != planned.overrides and (is_by_override or not causes):
        words = " ".join(stored.overrides) or "nothing"
        steps.append(f"go on as it was begun, with {words} on the command line")
    return steps


def threads_of(study: StudyRecord | None) -> int | None:
    """The threads of each rank of a study; None where it has none, or more than one number."""
    if study is None:
        return None
    threads = {trial.world.threads_per_rank for trial in study.trials.values() if trial.origin is None}
    return threads.pop() if len(threads) == 1 else None


class _Difference(NamedTuple):
    """A field that has another value, or a value on one side only (else None)."""

    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.field} was {_value(self.before)} and is {_value(self.after)}"


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[_Difference]:
    fields = dict.fromkeys((*before, *after))
    return [
        _Difference(field, before.get(field), after.get(field))
        for field in fields
        if before.get(field) != after.get(field)
    ]


def _value(value: object) -> str:
    return "not given" if value is None else shown(value)


def _overridden_fields(stored: StudyRecord, planned: StudyRecord) -> set[str]:
    """Fields to which the two command lines give other values."""
    return {difference.field for difference in _differences(_overrides(stored), _overrides(planned))}


def _overrides(study: StudyRecord) -> dict[str, Any]:
    """The values that the command line puts over a study, by field; empty where its words are none."""
    try:
        return dotted(overridden(study.overrides))
    except RequestError:
        return {}


def _text_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Values of the study file that decide on trials: a number of repeats, say, makes no others of them."""
    try:
        before = dotted(tomllib.loads(stored.text))
        after = dotted(tomllib.loads(planned.text))
    except ValueError:
        return
    for difference in _differences(before, after):
        if _is_of_a_trial(difference.field):
            yield Change(difference.field, str(difference))


def _is_of_a_trial(field: str) -> bool:
    """Whether a field of a study file is part of its trials, or decides which there are."""
    section, _, key = field.partition(".")
    if section == "measure":
        return key in WindowSpec.model_fields
    if section == "launch":
        return key in _LAUNCH_FIELDS
    if section == "data":
        return key not in HOW_FOUND
    return section not in ("slurm", "node")


def _launch_changes(stored: StudyRecord, planned: StudyRecord, *, without: set[str]) -> Iterator[Change]:
    """Launcher and threads, which no line of the study may show: they follow from cores, hosts and options."""
    launchers = _launchers(stored)
    new_launchers = _launchers(planned)
    if "launch.launcher" not in without and launchers != new_launchers:
        yield Change("launch.launcher", f"launch.launcher was {launchers} and is {new_launchers}")
    threads = threads_of(stored)
    new_threads = threads_of(planned)
    is_known = threads is not None and new_threads is not None
    if "launch.threads_per_rank" not in without and is_known and threads != new_threads:
        yield Change("launch.threads_per_rank", f"launch.threads_per_rank was {threads} and is {new_threads}")


def _launchers(study: StudyRecord) -> str:
    names = {trial.launcher for trial in study.trials.values()}
    return " and ".join(sorted(names))


class _Content(NamedTuple):
    """A digest of a trial, and the file that it is of."""

    digest: str
    """Field of the trial."""
    field: str
    """Field of the study that names the file."""
    words: str
    """What of the file it is of."""


_CONTENTS = (
    _Content("script_digest", "train.script", "the content of"),
    _Content("model_digest", "model.hf", "the config.json of"),
    _Content("weights_digest", "model.weights", "the content of"),
)


def _digest_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Files that both studies name alike, and that hold something else."""
    for content in _CONTENTS:
        names = _names(stored, content.field)
        digests = {getattr(trial, content.digest) for trial in stored.trials.values()}
        new_digests = {getattr(trial, content.digest) for trial in planned.trials.values()}
        if names and names == _names(planned, content.field) and digests != new_digests:
            quoted = listed(shown(name) for name in names)
            words = f"{content.words} {content.field} {quoted} has changed"
            yield Change(content.field, words, f"put {listed(names)} back as it was")


def _names(study: StudyRecord, field: str) -> list[str]:
    """The last parts of the paths, or the names, that a field has in a study's trials."""
    section, _, key = field.partition(".")
    values = {getattr(getattr(trial, section), key) for trial in study.trials.values()}
    return sorted(PurePath(value).name for value in values - {None})


def _config_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Keys of a DeepSpeed file that were changed."""
    configs = _configs(stored)
    new_configs = _configs(planned)
    if configs and new_configs and configs != new_configs:
        keys = listed(_differences(configs[0], new_configs[0]), most=_MOST_NAMED)
        words = f"the content of train.deepspeed_config has changed: {keys}"
        yield Change("train.deepspeed_config", words, _PUT_BACK)


def _configs(study: StudyRecord) -> list[dict[str, Any]]:
    """The different DeepSpeed files of a study, each by dotted key."""
    configs: list[dict[str, Any]] = []
    for trial in study.trials.values():
        if trial.train.deepspeed_config is not None:
            config = dotted(trial.train.deepspeed_config)
            if config not in configs:
                configs.append(config)
    return configs


def _class_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Names of classes, which trials have from a file."""
    classes = {trial.data.classes for trial in stored.trials.values()}
    new_classes = {trial.data.classes for trial in planned.trials.values()}
    are_names = all(isinstance(names, tuple) for names in classes | new_classes)
    if are_names and classes != new_classes:
        yield Change("data.classes", "the names in the file of data.classes have changed", _PUT_BACK)


def _trial_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Fields with other values in the trials of one record than in those of the other."""
    before = [_fields(trial) for trial in stored.trials.values()]
    after = [_fields(trial) for trial in planned.trials.values()]
    fields: dict[str, None] = {}
    for trial in (*before, *after):
        fields |= dict.fromkeys(trial)
    for field in fields:
        values = _values(field, before)
        new_values = _values(field, after)
        if values != new_values:
            yield Change(field, f"{field} was {values} and is {new_values}")


def _fields(trial: Trial) -> dict[str, Any]:
    """All that a trial's identity is of, by the names that a study gives it."""
    content = trial.model_dump(mode="json")
    for field in HOW_FOUND:
        del content["data"][field]
    window = content.pop("window")
    return dotted(content | {"measure": window})


def _values(field: str, trials: Iterable[Mapping[str, Any]]) -> str:
    values = {_value(trial.get(field)) for trial in trials}
    return " and ".join(sorted(values))
