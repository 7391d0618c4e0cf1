"""The changes, in words, where a study's trials differ from those of the results folder that it would resume.

A trial's identity covers all that affects its result, wherever that comes from: values of the study file, of the
command line and of a site file, the machine's cores, and the content of files that a study names (a script, a DeepSpeed
file, a model's configuration, its weights, a list of classes). Below, `stored` is the record in the folder, and
`planned` that of the study which is to run now.
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
from vitscale.study.file import parse_overrides
from vitscale.trial.trial import LOCATION_FIELDS, Trial, WindowSpec

_MOST_CHANGES_LISTED = 3
_LAUNCH_FIELDS = ("launcher", "threads_per_rank")
"""Fields of [launch] that are part of a trial."""
_RESTORE_FILE_CLAUSE = "put that file back as it was"


class Change(NamedTuple):
    """One difference between a planned study and the stored one."""

    field: str
    """The field of the study: "train.script"."""
    words: str
    """The change as a clause: "train.learning_rate was 0.0005 and is 0.001"."""
    restore: str = ""
    """A clause that advises which file to put back, so that the folder resumes; empty where no file was changed."""


def changes(stored: StudyRecord, planned: StudyRecord) -> list[Change]:
    """Return the changes by which the planned trials differ from the stored ones, one a field; empty for none.

    Changes of files and of the machine come first, then those of the study's text and of the command line.
    """
    text_changes = list(_text_changes(stored, planned))
    trial_changes = list(_trial_changes(stored, planned))
    overridden_fields = _overridden_fields(stored, planned)
    causes = [
        *_launch_changes(stored, planned, explained_fields={change.field for change in text_changes}),
        *_digest_changes(stored, planned),
        *_config_changes(stored, planned),
        *_class_changes(stored, planned),
        *text_changes,
        *(change for change in trial_changes if change.field in overridden_fields),
    ]
    # Without a cause in the studies, it may be a site file, or a file that an earlier version read in another way.
    change_by_field = {change.field: change for change in causes or trial_changes}
    return list(change_by_field.values())


def changes_in_brackets(causes: Iterable[Change]) -> str:
    """Return the changes in brackets, to end a sentence: " (train.learning_rate was 0.0005 and is 0.001)"; or ""."""
    words = [change.words for change in causes]
    return f" ({listed(words, most=_MOST_CHANGES_LISTED)})" if words else ""


def ways_to_continue(causes: Sequence[Change], stored: StudyRecord, planned: StudyRecord) -> list[str]:
    """Return the steps after which the folder resumes with its stored study, as clauses of an advice.

    Empty where none is known.
    """
    steps = list(dict.fromkeys(change.restore for change in causes if change.restore))
    if _may_be_by_override(causes, stored, planned):
        words = " ".join(stored.overrides) or "nothing"
        steps.append(f"go on as it was begun, with {words} on the command line")
    return steps


def _may_be_by_override(causes: Sequence[Change], stored: StudyRecord, planned: StudyRecord) -> bool:
    """Whether the command line changed one of the causes; also where it was changed and no cause is known."""
    if stored.overrides == planned.overrides:
        return False
    changed_fields = {change.field for change in causes}
    return not causes or bool(changed_fields & _overridden_fields(stored, planned))


def threads_of(study: StudyRecord | None) -> int | None:
    """Return the threads per rank of a study's trials; None where they differ.

    Trials that were imported do not count; without any other the answer is None too.
    """
    if study is None:
        return None
    threads = {trial.world.threads_per_rank for trial in study.trials.values() if trial.origin is None}
    return threads.pop() if len(threads) == 1 else None


class _Difference(NamedTuple):
    """A field whose values differ; a value is None on a side that does not have the field."""

    field: str
    before: Any
    """Its stored value."""
    after: Any
    """Its planned value."""

    def __str__(self) -> str:
        return f"{self.field} was {_shown_value(self.before)} and is {_shown_value(self.after)}"


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[_Difference]:
    """Return the fields whose values differ, or that only one side has."""
    fields = dict.fromkeys((*before, *after))
    differences = [_Difference(field, before.get(field), after.get(field)) for field in fields]
    return [difference for difference in differences if difference.before != difference.after]


def _shown_value(value: object) -> str:
    """Return a value as a message shows it; "not given" for None."""
    return "not given" if value is None else shown(value)


def _overridden_fields(stored: StudyRecord, planned: StudyRecord) -> set[str]:
    """Return the fields to which the two command lines give different values."""
    return {difference.field for difference in _differences(_overridden_values(stored), _overridden_values(planned))}


def _overridden_values(study: StudyRecord) -> dict[str, Any]:
    """Return the values that the command line puts over the study's, by field.

    Empty where the words of the command line cannot be read.
    """
    try:
        return dotted(parse_overrides(study.overrides))
    except RequestError:
        return {}


def _text_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Yield the values in the study file that have changed, where they are part of trials.

    A number of repeats, for example, is part of none.
    """
    try:
        before = dotted(tomllib.loads(stored.text))
        after = dotted(tomllib.loads(planned.text))
    except ValueError:
        return
    for difference in _differences(before, after):
        if _affects_trials(difference.field):
            yield Change(difference.field, str(difference))


def _affects_trials(field: str) -> bool:
    """Whether a field of a study file is part of its trials, or decides which trials there are."""
    section, _, key = field.partition(".")
    if section == "measure":
        return key in WindowSpec.model_fields
    if section == "launch":
        return key in _LAUNCH_FIELDS
    if section == "data":
        return key not in LOCATION_FIELDS
    return section not in ("slurm", "node")


def _launch_changes(stored: StudyRecord, planned: StudyRecord, *, explained_fields: set[str]) -> Iterator[Change]:
    """Yield the changes of launcher and threads, which follow from cores, hosts and options too.

    Args:
        stored: the study in the folder.
        planned: the study that is to run now.
        explained_fields: fields whose changes the study's text shows; they are left out.
    """
    if "launch.launcher" not in explained_fields:
        launchers = _launchers_in_words(stored)
        new_launchers = _launchers_in_words(planned)
        if launchers != new_launchers:
            yield Change("launch.launcher", f"launch.launcher was {launchers} and is {new_launchers}")
    if "launch.threads_per_rank" not in explained_fields:
        threads = threads_of(stored)
        new_threads = threads_of(planned)
        are_known = threads is not None and new_threads is not None
        if are_known and threads != new_threads:
            yield Change("launch.threads_per_rank", f"launch.threads_per_rank was {threads} and is {new_threads}")


def _launchers_in_words(study: StudyRecord) -> str:
    """Return "srun and torchrun"."""
    names = {trial.launcher for trial in study.trials.values()}
    return " and ".join(sorted(names))


class _DigestedFile(NamedTuple):
    """A file that a study names, and whose content a trial has a digest of."""

    digest_field: str
    """Field of the trial."""
    field: str
    """Field of the study that names the file."""
    content: str
    """The content, as the begin of a clause that goes on with `field`."""


_DIGESTED_FILES = (
    _DigestedFile("script_digest", "train.script", content="the content of"),
    _DigestedFile("model_digest", "model.hf", content="the config.json of"),
    _DigestedFile("weights_digest", "model.weights", content="the content of"),
)


def _digest_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Yield the files that have the same name in both studies, and another content."""
    for file in _DIGESTED_FILES:
        names = _file_names(stored, file.field)
        has_same_names = bool(names) and names == _file_names(planned, file.field)
        if has_same_names and _digests(stored, file) != _digests(planned, file):
            quoted_names = listed(shown(name) for name in names)
            words = f"{file.content} {file.field} {quoted_names} has changed"
            yield Change(file.field, words, f"put {listed(names)} back as it was")


def _digests(study: StudyRecord, file: _DigestedFile) -> set[str | None]:
    """Return the different digests of a file that a study's trials have."""
    return {getattr(trial, file.digest_field) for trial in study.trials.values()}


def _file_names(study: StudyRecord, field: str) -> list[str]:
    """Return the file names of the paths that a field ("train.script") has in a study's trials, sorted."""
    section, _, key = field.partition(".")
    values = {getattr(getattr(trial, section), key) for trial in study.trials.values()}
    return sorted(PurePath(value).name for value in values - {None})


def _config_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Yield the changed keys of the DeepSpeed file, as one change; of several files those of the first."""
    configs = _deepspeed_configs(stored)
    new_configs = _deepspeed_configs(planned)
    if configs and new_configs and configs != new_configs:
        keys = listed(_differences(configs[0], new_configs[0]), most=_MOST_CHANGES_LISTED)
        words = f"the content of train.deepspeed_config has changed: {keys}"
        yield Change("train.deepspeed_config", words, _RESTORE_FILE_CLAUSE)


def _deepspeed_configs(study: StudyRecord) -> list[dict[str, Any]]:
    """Return the different DeepSpeed files of a study, each as values by dotted key."""
    configs: list[dict[str, Any]] = []
    for trial in study.trials.values():
        if trial.train.deepspeed_config is not None:
            config = dotted(trial.train.deepspeed_config)
            if config not in configs:
                configs.append(config)
    return configs


def _class_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Yield a change of the names of classes, where trials list them because they stood in a file."""
    classes = {trial.data.classes for trial in stored.trials.values()}
    new_classes = {trial.data.classes for trial in planned.trials.values()}
    are_names = all(isinstance(names, tuple) for names in classes | new_classes)
    if are_names and classes != new_classes:
        yield Change("data.classes", "the names in the file of data.classes have changed", _RESTORE_FILE_CLAUSE)


def _trial_changes(stored: StudyRecord, planned: StudyRecord) -> Iterator[Change]:
    """Yield the fields whose values in all stored trials together differ from those in all planned ones."""
    before = [_identity_fields(trial) for trial in stored.trials.values()]
    after = [_identity_fields(trial) for trial in planned.trials.values()]
    fields: dict[str, None] = {}
    for trial in (*before, *after):
        fields |= dict.fromkeys(trial)
    for field in fields:
        values = _values_in_words(field, before)
        new_values = _values_in_words(field, after)
        if values != new_values:
            yield Change(field, f"{field} was {values} and is {new_values}")


def _identity_fields(trial: Trial) -> dict[str, Any]:
    """Return all values that a trial's identity covers, by field as a study names it: "measure.steps"."""
    content = trial.model_dump(mode="json")
    for field in LOCATION_FIELDS:
        del content["data"][field]
    window = content.pop("window")
    return dotted(content | {"measure": window})


def _values_in_words(field: str, trials: Iterable[Mapping[str, Any]]) -> str:
    """Return the different values of a field in these trials: "0.001 and 0.01"."""
    values = {_shown_value(trial.get(field)) for trial in trials}
    return " and ".join(sorted(values))
