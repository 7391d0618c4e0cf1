"""Reads a study file and checks it against what a study may say.

Values are put over those of the file from the site file, which says where and how a cluster wants things run, and from
the command line: options (--launcher) and KEY=VALUE words. So one study file runs everywhere.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from pydantic import ValidationError

from vitscale.base.files import has_long_keys, path_named_in, read_text
from vitscale.errors import RequestError, explain, nearest, shown, wrong_value
from vitscale.study.sections import SCHEDULERS_WITHOUT_HOSTFILE, SECTIONS, SWEEPABLE, FieldValues, Study, choices
from vitscale.trial.fields import sections_of
from vitscale.trial.hints import KeyMeaning, meant_key, meant_value
from vitscale.trial.trial import Mode

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_MOST_RUNS = 20_000
FEWEST_FOR_TARGET = 6
"""Fewest runs with which `measure.target_ci` can be reached; `vitscale.analysis.runs.repeats` says why."""
_STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class SweepPoint(NamedTuple):
    """One combination of the swept values."""

    labels: FieldValues
    """Swept fields with their values at this point."""
    study: Study
    """The study with these values."""
    set_fields: frozenset[str]
    """Dotted fields that the study or its sweep sets, so that no default counts."""


class StudyFile:
    """A study as it was read: its text, its raw values, and the validated study."""

    def __init__(self, path: Path, text: str, overlay: Overlay | None = None, overrides: Sequence[str] = ()) -> None:
        """Read and validate a study without the points of its sweep; arguments and errors are those of `checked`."""
        self.path = path
        self.text = text
        self.overrides = tuple(overrides)
        overlay = overlay or {}
        override_values = parse_overrides(overrides)
        with_overlay = _overlaid(_parsed_toml(path, text), overlay, "site file or command line")
        without_replaced_length = _without_other_length(with_overlay, override_values)
        self.raw = _overlaid(without_replaced_length, override_values, _COMMAND_LINE)
        # Who decides a field over the study file; "{key}" stands for the option of the field.
        self._decider_by_field = dict.fromkeys(_fields_of(overlay), "--{key} or the site file")
        self._decider_by_field |= dict.fromkeys(_fields_of(override_values), "the command line")
        self.study = _validated(path, self.raw, text)

    @classmethod
    def read(cls, path: Path, overlay: Overlay | None = None, overrides: Sequence[str] = ()) -> StudyFile:
        """Read and validate one study file, as `checked` does its text."""
        text = read_text(
            path,
            "study file",
            next_step='Give a TOML file with name = "...", [model], [data], [train] and [scaling]; '
            "see examples/quickstart.toml, or begin one with vitscale init",
        )
        return cls.checked(path, text, overlay, overrides)

    @classmethod
    def checked(cls, path: Path, text: str, overlay: Overlay | None = None, overrides: Sequence[str] = ()) -> StudyFile:
        """Return a study that is valid at every point of its sweep.

        Args:
            path: names it in messages; relative paths in it start in its folder.
            text: TOML.
            overlay: values of a site file and of the command line's options, put over its own values.
            overrides: KEY=VALUE words of the command line (`parse_overrides`), put over both.

        Raises:
            RequestError: with the file's name, the bad value, the valid ones and the next step.
        """
        try:
            file = cls(path, text, overlay, overrides)
            file._refuse_varying_decided_fields()
            file._check_every_point()
        except RecursionError:
            raise _nesting_error(path) from None
        return file

    def _check_every_point(self) -> None:
        """Validate the study at every point of its sweep.

        Raises:
            RequestError: as `points`.
        """
        for _point in self.points():
            pass  # `points` validates each point before it yields it

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The batch policies that the points of the sweep have, each once, in the study's order."""
        study_mode = self.study.scaling.mode
        modes = [study_mode]
        for choices_of_key in self._choices():
            is_mode_swept = any("scaling.mode" in choice for choice in choices_of_key)
            if is_mode_swept:
                # A table without a mode leaves the study's.
                modes = [choice.get("scaling.mode", study_mode) for choice in choices_of_key]
                break
        valid_modes = get_args(Mode)  # wrong ones are refused where the points are validated
        return tuple(dict.fromkeys(mode for mode in modes if mode in valid_modes))

    @property
    def launchers(self) -> tuple[str, ...]:
        """The launchers that its points name."""
        field = "launch.launcher"
        swept = [choice[field] for choice in self._all_choices() if field in choice]
        return tuple(dict.fromkeys(swept or [self.study.launch.launcher]))

    @property
    def swept_fields(self) -> frozenset[str]:
        """The dotted fields that the sweep varies, including those in its tables."""
        fields: set[str] = set()
        for choice in self._all_choices():
            fields.update(choice)
        return frozenset(fields)

    def points(self) -> Iterator[SweepPoint]:
        """Yield each point of the sweep; the study itself where nothing is swept.

        Raises:
            RequestError: the sweep, rank counts and repeats make more runs than a study may have, or a point is wrong.
        """
        choices_by_key = self._choices()
        self._check_repeats()
        self._check_run_count(points=math.prod(map(len, choices_by_key)))
        for combination in itertools.product(*choices_by_key):
            labels: FieldValues = {}
            for choice in combination:
                labels |= choice
            raw = self._raw_with(labels)
            # No line is named: a swept value stands on none, and all others have been validated.
            study_without_sweep = _validated(self.path, raw, location="in [sweep]")
            study = study_without_sweep.model_copy(update={"sweep": self.study.sweep})
            yield SweepPoint(labels, study, frozenset(_fields_of(raw)))

    def _raw_with(self, labels: FieldValues) -> dict[str, Any]:
        """Return the study's raw values by section and key, with those of one point of the sweep in their place.

        [sweep] is left out: it is validated already, and grows with the number of points.
        """
        raw = {section: copy.copy(values) for section, values in self.raw.items() if section != "sweep"}
        for field, value in labels.items():
            section, _, key = field.partition(".")
            raw.setdefault(section, {})[key] = value
        return raw

    def _check_run_count(self, points: int) -> None:
        """Refuse a sweep of so many points that they make more runs than a study may have."""
        measure = self.study.measure
        repeats = measure.repeats if measure.target_ci is None else measure.max_repeats
        runs = points * len(self.study.scaling.gpus) * repeats
        if runs > _MOST_RUNS:
            raise self._error(
                f"points of the sweep x rank counts x repeats make {runs:,} runs",
                valid=[f"at most {_MOST_RUNS:,}"],
                next_step="Split the study",
            )

    def _all_choices(self) -> Iterator[FieldValues]:
        """Yield the choices of all keys of [sweep], one after the other."""
        for choices_of_key in self._choices():
            yield from choices_of_key

    def _choices(self) -> list[list[FieldValues]]:
        """Return the choices of each key of [sweep], as `sections.choices` does, with the study's name in an error."""
        try:
            return choices(self.study.sweep)
        except RequestError as error:
            raise RequestError(f"{shown(str(self.path))}: {error}") from None

    def _refuse_varying_decided_fields(self) -> None:
        """Refuse a sweep over a field that the command line or the site file decides."""
        for field in sorted(self.swept_fields & self._decider_by_field.keys()):
            decider = self._decider_by_field[field].format(key=field.partition(".")[2])
            raise self._error(f"sweep.'{field}' varies what {decider} decides", next_step="Remove one of the two")
        if "train.epochs" in self.swept_fields and "measure.steps" in self._decider_by_field:
            what = "sweep.'train.epochs' varies a run's length, which measure.steps on the command line decides"
            raise self._error(what, next_step="Remove one of the two")

    def _check_repeats(self) -> None:
        """Refuse a `max_repeats` without `target_ci`, and one that is too small for the runs that `target_ci` adds."""
        measure = self.study.measure
        is_limit_set = "max_repeats" in self.raw.get("measure", {})
        limit = f"measure.max_repeats = {measure.max_repeats}"
        if not is_limit_set:
            limit += " (its default)"
        if measure.target_ci is None:
            if is_limit_set:
                raise self._error(
                    f"{limit} has no meaning without measure.target_ci",
                    next_step="Remove it, or say how closely epoch times are to be known: add target_ci = 0.02",
                )
            return
        if measure.max_repeats < FEWEST_FOR_TARGET:
            raise self._error(
                f"{limit} is too few for measure.target_ci = {measure.target_ci}: 3 runs or more say how many it "
                "takes, and 3 or more are made beyond these",
                valid=[f"at least {FEWEST_FOR_TARGET}"],
            )
        if measure.max_repeats < measure.repeats:
            raise self._error(
                f"{limit} is below measure.repeats = {measure.repeats}",
                next_step=f"Set max_repeats to more than {measure.repeats}, so that runs can be added",
            )

    def _error(self, what: str, *, valid: list[str] | None = None, next_step: str = "") -> RequestError:
        """Return an error that names the study file."""
        return RequestError(f"{shown(str(self.path))}: {what}", valid=valid or [], next_step=next_step)


_NUMBER_LIST_FIELDS = ("scaling.gpus", "train.rank_speeds", "model.depths")
"""Fields that take lists of numbers."""
_COMMAND_LINE = "command line"
_ON_COMMAND_LINE = "on the command line"
_MOST_MESSAGES_LISTED = 5
_LONGEST_ADVICE = 120
"""Characters of a next step beyond which it does not repeat the user's list."""


def _fields_of(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted fields of all sections but [sweep]."""
    for section, keys in sections.items():
        if section != "sweep" and isinstance(keys, Mapping):
            for key in keys:
                yield f"{section}.{key}"


class _Field(NamedTuple):
    """A field of a study."""

    section: str
    key: str


_EPOCHS_FIELD = _Field("train", "epochs")
_STEPS_FIELD = _Field("measure", "steps")


def _without_other_length(raw: dict[str, Any], override_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a study without its length in epochs where the command line gives one in steps, and the reverse.

    Args:
        raw: a study's values by section and key; not changed.
        override_values: those of the command line, which may set or sweep a length.
    """
    remaining = raw
    for length, other_length in ((_EPOCHS_FIELD, _STEPS_FIELD), (_STEPS_FIELD, _EPOCHS_FIELD)):
        is_set = length.key in override_values.get(length.section, {})
        is_swept = f"{length.section}.{length.key}" in override_values.get("sweep", {})
        is_other_set = other_length.key in override_values.get(other_length.section, {})
        keys = raw.get(other_length.section)
        if (is_set or is_swept) and not is_other_set and isinstance(keys, dict):
            other_keys = {key: value for key, value in keys.items() if key != other_length.key}
            remaining = remaining | {other_length.section: other_keys}
    return remaining


def _overlaid(raw: dict[str, Any], overlay: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Put values of an overlay over those of a study, key by key, and return the study.

    Args:
        raw: a study's values by section and key; changed.
        overlay: values by section and key, and the study's name.
        source: where they come from, for messages.

    Raises:
        RequestError: the overlay has unknown keys or wrong values.
    """
    for name, section in overlay.items():
        if not isinstance(section, Mapping):
            raw[name] = section
            continue
        if name in SECTIONS:  # [sweep] has rules of its own
            _check_by_itself(name, section, source)
        study_section = raw.get(name, {})
        if isinstance(study_section, dict):  # anything else is refused later
            raw[name] = study_section | dict(section)
    return raw


def _check_by_itself(name: str, section: Mapping[str, Any], source: str) -> None:
    """Validate a section of a site file or of the command line before it is put over that of the study.

    So its mistakes are reported with their source, and nobody looks for them in the study file. A missing key is no
    mistake, for the study file may have it.

    Args:
        name: name of the section.
        section: its values by key.
        source: where they come from, for messages.

    Raises:
        RequestError: the section has unknown keys or wrong values.
    """
    try:
        SECTIONS[name].model_validate(dict(section), strict=True)
    except ValidationError as error:
        problems = [problem for problem in error.errors(include_url=False) if problem["type"] != "missing"]
        for problem in problems:
            problem["loc"] = (name, *problem["loc"])
        if problems:
            location = _ON_COMMAND_LINE if source == _COMMAND_LINE else ""
            raise RequestError(f"{source}{_problem_messages(problems, location=location)}") from None


def _parsed_toml(path: Path, text: str) -> dict[str, Any]:
    """Return the values in a study's text. Args: path: names the study in messages.

    Raises:
        RequestError: the text is not TOML, or is nested too deeply.
    """
    if has_long_keys(text):
        raise _nesting_error(path)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # tomllib.TOMLDecodeError, or an int of more digits than Python reads
        raise RequestError(
            f"study file {shown(str(path))} is not TOML: {error}",
            next_step="Strings need quotes, lists brackets; see examples/quickstart.toml",
        ) from None


def _nesting_error(path: Path) -> RequestError:
    """Return the error for a study file with tables in tables beyond what Python can read."""
    return RequestError(
        f"study file {shown(str(path))} is nested too deeply",
        next_step="A study has sections with one key = value per line; see examples/quickstart.toml",
    )


def _validated(path: Path, raw: Mapping[str, Any], text: str = "", location: str = "") -> Study:
    """Return the study with these values by section and key.

    Args:
        path: names the study in messages.
        raw: the values.
        text: the file's text, in which a message names the line; empty: it names none.
        location: where the values stand ("in [sweep]") if not in their own sections.

    Raises:
        RequestError: a key is unknown or missing, or a value is wrong.
    """
    try:
        # Strict: "64" is no number, and 1 is not true.
        study = Study.model_validate(raw, strict=True)
    except ValidationError as error:
        messages = _problem_messages(error.errors(include_url=False), text, location=location)
        raise RequestError(f"{shown(str(path))}{messages}") from None
    if not _STUDY_NAME.fullmatch(study.name):
        raise RequestError(
            f"{shown(str(path))}: name is {shown(study.name)}",
            next_step="Use 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit",
        )
    return study


def _problem_messages(problems: Sequence[ErrorDetails], text: str = "", *, location: str = "") -> str:
    """Return what is wrong with a study, as the continuation of its file's name.

    Example: ", line 7: micro_batch is 0. ..." for one mistake; for several ":" and a line for each, at most five.

    Args:
        problems: as pydantic reports them, one or more.
        text: the file's text, in which the lines are looked up; empty: no line is named.
        location: where the values stand ("on the command line") if not in their own sections.
    """
    listed_sections: set[str] = set()
    causes = [problem for problem in problems if not _follows_from_wrong_items(problem, problems)]
    messages = []
    for details in causes[:_MOST_MESSAGES_LISTED]:
        message = _problem_message(_Problem(details, location), listed_sections)
        messages.append(_LocatedMessage(_line_of(text, details["loc"]), message))
    if len(messages) == 1:
        only = messages[0]
        return f", {only.line}: {only.message}" if only.line else f": {only.message}"
    listed = [f"{item.line}: {item.message}" if item.line else item.message for item in messages]
    if len(causes) > _MOST_MESSAGES_LISTED:
        listed.append(f"(and {len(causes) - _MOST_MESSAGES_LISTED} more)")
    return ":" + "".join(f"\n  {item}" for item in listed)


class _LocatedMessage(NamedTuple):
    """A message on one mistake, and where the mistake stands."""

    line: str
    """ "line 7"; empty where it is not known."""
    message: str


def _follows_from_wrong_items(problem: ErrorDetails, problems: Sequence[ErrorDetails]) -> bool:
    """Whether pydantic reports a list as too short only because it does not count the list's wrong items.

    It reports these items too, so that the problem of the list is no mistake of its own.
    """
    places_of_lists = [other["loc"][:-1] for other in problems]  # ("train", "x") for an item at ("train", "x", 2)
    return problem["type"] == "too_short" and problem["loc"] in places_of_lists


def _line_of(text: str, path: Sequence[int | str]) -> str:
    """Return "line 7": the line of a study's text on which a key stands, else the line of its section.

    Return an empty text where neither is found.

    Args:
        text: a study's text.
        path: section and key ("train", "micro_batch"), or a key outside all sections.
    """
    section = str(path[0])
    key = str(path[1]) if len(path) > 1 else ""
    current_section = ""  # until the first heading
    section_line = None
    for number, line in enumerate(text.splitlines(), start=1):
        heading = re.match(r"\s*\[+([^\[\]]+)\]", line)
        if heading is not None:
            current_section = heading[1].strip()
            if current_section == section and section_line is None:
                section_line = number
        is_line_of_key = False
        if current_section == section:
            is_line_of_key = _assigns(line, key)
        elif current_section == "":  # here "train.micro_batch = 8" or "train = {...}" may stand
            is_line_of_key = _assigns(line, section)
        if is_line_of_key:
            return f"line {number}"
    return "" if section_line is None else f"line {section_line}"


def _assigns(line: str, key: str) -> bool:
    """Whether a line of TOML gives a value to a key, or to one below it; False for an empty key."""
    return key != "" and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line) is not None


@dataclass(frozen=True)
class _Problem:
    """One thing that pydantic finds wrong in a study."""

    details: ErrorDetails
    location: str
    """Where the values stand ("on the command line"); empty: in their own sections of the study file."""

    @property
    def kind(self) -> str:
        """pydantic's name for it: "missing", "extra_forbidden", "list_type"."""
        return self.details["type"]

    @property
    def value(self) -> Any:
        """The wrong value."""
        return self.details["input"]

    @property
    def path(self) -> tuple[str, ...]:
        """("train", "micro_batch")"""
        return tuple(str(part) for part in self.details["loc"])

    @property
    def section(self) -> str:
        """ "train"; empty for what stands outside all sections."""
        return self.path[0] if len(self.path) > 1 else ""

    @property
    def table(self) -> str:
        """ "train"; "slurm.sizes" for a key of a table in a list of a section; empty outside all sections."""
        return ".".join(part for part in self.path[:-1] if not part.isdecimal())

    @property
    def key(self) -> str:
        """ "micro_batch" """
        return self.path[-1]

    @property
    def field(self) -> str:
        """ "train.micro_batch" """
        return f"{self.section}.{self.key}"


def _problem_message(problem: _Problem, listed_sections: set[str]) -> str:
    """Return what is wrong, and what to write instead.

    Args:
        problem: the problem.
        listed_sections: the sections whose valid keys an earlier message lists; this message's section is added.
    """
    if problem.kind == "extra_forbidden":
        return _unknown_key_message(problem, listed_sections)
    return wrong_value(problem.details, next_step=_advice_on_problem(problem))


def _unknown_key_message(problem: _Problem, listed_sections: set[str]) -> str:
    """Return a message on a key that its section does not have.

    The message says what to write where the key is another program's word for a field. Else it lists the section's
    keys, unless an earlier message does, and names the sections that have such a key.

    Args:
        problem: the problem.
        listed_sections: the sections whose valid keys an earlier message lists; this message's section is added.
    """
    key = problem.key
    section = problem.section
    meaning = meant_key(key)
    if meaning is not None:
        return _other_programs_key_message(problem, meaning)
    valid_keys = sorted(_keys_beside(problem))
    location = f"in [{problem.table}]" if section else "at the top level"
    what = f"unknown key {shown(key)} {location}"
    hint = nearest(key, valid_keys)
    sections_with_key = [f"[{name}]" for name, model in SECTIONS.items() if key in model.model_fields]
    next_step = f"It belongs in {' or '.join(sections_with_key)}" if sections_with_key else ""
    are_keys_listed = problem.table in listed_sections
    listed_sections.add(problem.table)
    return explain(f"{what}.{hint}" if hint else what, valid=[] if are_keys_listed else valid_keys, next_step=next_step)


def _keys_beside(problem: _Problem) -> Collection[str]:
    """Return the keys that may stand where a wrong key stands: in its section, or in a table of its section's list."""
    if not problem.section:
        return Study.model_fields
    section = SECTIONS[problem.section]
    tables = sections_of(section)
    is_in_table = len(problem.path) > 2 and problem.path[1] in tables
    return (tables[problem.path[1]] if is_in_table else section).model_fields


def _other_programs_key_message(problem: _Problem, meaning: KeyMeaning) -> str:
    """Return "unknown key 'lr' in [model]. Write learning_rate in [train]."."""
    right_section, _, right_key = meaning.field.partition(".")
    assignment = f"{right_key} = {meaning.example}" if meaning.example else right_key
    location = f"[{problem.section}]" if problem.section else "the study"
    unknown_key = f"unknown key {shown(problem.key)} in {location}"
    return f"{unknown_key}. Write {assignment} in [{right_section}]{meaning.remark}."


def _advice_on_problem(problem: _Problem) -> str:
    """Return what to write in place of a wrong or missing value."""
    if problem.kind == "missing":
        return _missing_key_advice(problem)
    if problem.kind in ("model_type", "dict_type"):
        return f"Write [{'.'.join(problem.path)}] on a line of its own, then one key = value per line"
    if problem.section == "sweep" and problem.kind == "list_type" and isinstance(problem.value, dict):
        return 'Write a field in quotes, as "train.engine" = ["ddp", "fsdp2"]'
    for next_step in (meant_value(problem.field, problem.value), _list_advice(problem), _sweep_advice(problem)):
        if next_step:
            return next_step
    if problem.location:
        return f"Correct it {problem.location}"
    return f"Correct it in [{problem.section}]" if problem.section else "Correct it at the top"


def _missing_key_advice(problem: _Problem) -> str:
    """Return "Add name = "..." in [model]", or the section where that is missing."""
    if problem.key == "name":
        addition = 'Add name = "..."'
    elif problem.section:
        addition = f"Add {problem.key} = ..."
    else:
        return f'Add [{problem.key}] with name = "..."'
    return f"{addition} in [{problem.section}]" if problem.section else addition


class _ListForm(NamedTuple):
    """What the items of a list look like."""

    item: str
    """A regular expression."""
    has_commas_between: bool = True
    """Whether a text with commas holds several items; otherwise a comma may belong to the text."""


_NUMBER_LIST_FORM = _ListForm("[1-9][0-9]*")
_WORD_LIST_FORM = _ListForm(r"[1-9][0-9]*|[A-Za-z][\w./:-]*")
_TEXT_LIST_FORM = _ListForm(r"[^\"'\\]+", has_commas_between=False)


def _list_advice(problem: _Problem) -> str:
    """Return how to write a list that was given as a text or a number: "Write gpus = [1, 2]" for gpus = "1, 2".

    Return an empty text where no list was expected, where the value cannot be meant as one, and where the list would
    be too long to repeat.
    """
    value = problem.value
    is_list_expected = problem.kind in ("list_type", "tuple_type")
    is_single_value = isinstance(value, str | int) and not isinstance(value, bool)
    if not (is_list_expected and is_single_value):
        return ""
    form = _list_form(problem)
    items = [item.strip() for item in str(value).split(",")] if form.has_commas_between else [str(value)]
    if not all(re.fullmatch(form.item, item) and item.isprintable() for item in items):
        return ""
    toml_items = ", ".join(_toml_item(item, form) for item in items)
    key = f'"{problem.key}"' if "." in problem.key else problem.key
    is_on_command_line = problem.location == _ON_COMMAND_LINE
    assignment = f"'{problem.field}=[{toml_items}]'" if is_on_command_line else f"{key} = [{toml_items}]"
    step = f"Write {assignment}"
    return step if len(step) < _LONGEST_ADVICE else ""


def _list_form(problem: _Problem) -> _ListForm:
    """Return what the items of the list look like that a field takes."""
    if problem.field in _NUMBER_LIST_FIELDS:
        return _NUMBER_LIST_FORM
    if problem.section == "sweep" or problem.field == "measure.meters":
        return _WORD_LIST_FORM
    return _TEXT_LIST_FORM


def _toml_item(item: str, form: _ListForm) -> str:
    """Return a number as it is, all else in quotes; in a list of texts a number is a text too."""
    is_number = form is not _TEXT_LIST_FORM and re.fullmatch(_NUMBER_LIST_FORM.item, item)
    return item if is_number else f'"{item}"'


def _sweep_advice(problem: _Problem) -> str:
    """Return how to vary a field that was given a list; empty where it was not, or cannot be varied."""
    has_items = isinstance(problem.value, list) and bool(problem.value)
    is_sweepable = problem.field in SWEEPABLE and problem.field != "data.columns"
    if not (has_items and is_sweepable):
        return ""
    if problem.location == "":
        return f'To vary it, write "{problem.field}" = [...] in [sweep]'
    if problem.location == _ON_COMMAND_LINE:
        return f"To vary it, write 'sweep.{problem.field}=[...]'"
    return ""


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE words of the command line into values by section and key, and the study's name.

    A key is dotted ("train.micro_batch", "sweep.train.engine"); a value is TOML's, and a bare word a string.

    Raises:
        RequestError: a word is none of these, or a key is unknown or given twice.
    """
    sections: dict[str, Any] = {}
    for word in words:
        override = _parse_override(word)
        keys = sections.setdefault(override.section, {}) if override.section else sections
        if override.key in keys:
            raise RequestError(f"{override.field} is given twice on the command line", next_step="Give it once")
        if override.section == "sweep" and not isinstance(override.value, list):
            raise RequestError(
                f"{override.field}={override.text} sweeps one value",
                next_step=f"""Give a list: '{override.field}=["a", "b"]'""",
            )
        keys[override.key] = override.value
    if "sweep" in sections:
        choices(sections["sweep"])
    return sections


class _Override(NamedTuple):
    """One KEY=VALUE word."""

    field: str
    """As it was written: "train.micro_batch"."""
    section: str
    """ "train"; empty for the study's name."""
    key: str
    text: str
    """The value as it was written."""
    value: Any


def _parse_override(word: str) -> _Override:
    """Take a KEY=VALUE word apart.

    Raises:
        RequestError: it is none, or no section has the key.
    """
    field, equals, text = word.partition("=")
    text = text.strip()
    section, _, key = field.strip().partition(".")
    if not (equals and section):
        raise RequestError(f"{shown(word)} is no KEY=VALUE", next_step="Write train.micro_batch=16")
    value = _override_value(text, field)
    if field == "name":
        return _Override(field, section="", key="name", text=text, value=value)
    if not key or section not in (*SECTIONS, "sweep"):
        raise _unknown_override(field, key or section)
    return _Override(field, section, key, text, value)


def likely_overrides(key: str) -> list[str]:
    """Return KEY=VALUE words that may be meant by a key without its section, or by another program's word for a key.

    Example: "bs" gives ["train.micro_batch=VALUE"].
    """
    meaning = meant_key(key)
    if meaning is not None:
        return [f"{meaning.field}={meaning.example or 'VALUE'}"]
    return [f"{name}.{key}=VALUE" for name, model in SECTIONS.items() if key in model.model_fields]


def _unknown_override(field: str, key: str) -> RequestError:
    """Return the error for a KEY=VALUE word whose key no study has.

    Args:
        field: the key as it was written: "train.micro_bacth".
        key: its last part: "micro_bacth".
    """
    sections = [*SECTIONS, "sweep"]
    if field in sections:
        return RequestError(f"{shown(field)} is a section, and no key", next_step=f"Write {field}.KEY=VALUE")
    what = f"unknown key {shown(field)} on the command line"
    likely = likely_overrides(key)
    if likely:
        return RequestError(what, next_step=f"Write {' or '.join(likely)}")
    hint = nearest(field.partition(".")[0], sections)
    return RequestError(what, valid=[f"{name}.KEY=VALUE" for name in sections], hint=hint)


_OPENING_CHARACTERS = "\"'[{"
"""Characters with which a TOML value begins that must be closed."""


def _override_value(text: str, field: str) -> Any:
    """Return the value of a KEY=VALUE word: a TOML value (8, true, [1, 2], "a"), or a text without quotes.

    Args:
        text: the part behind the equals sign.
        field: the part before it, for messages.

    Raises:
        RequestError: `text` is empty, or begins with a quote or a bracket and is no TOML value.
    """
    try:
        values = tomllib.loads(f"value = {text}") if not has_long_keys(text) else {}
    except (ValueError, RecursionError):
        values = {}
    is_opened = text != "" and text[0] in _OPENING_CHARACTERS
    is_one_value = values.keys() == {"value"}
    may_have_comment = "#" in text and not is_opened  # TOML would drop what follows "#" in a bare word
    if is_one_value and not may_have_comment:
        return values["value"]
    if text == "" or is_opened:
        raise RequestError(
            f"{field} is {shown(text)}, which is no TOML value",
            next_step=f"""Quote it for the shell: '{field}=["a", "b"]', or write a bare word or a number""",
        )
    return text


SITE_SECTIONS = ("launch", "slurm", "kubernetes", "node")
"""Sections that a site file may have; they are put over those of the study."""

Overlay = Mapping[str, Mapping[str, Any]]
"""Values by section and key that are put over those of a study file."""


def overlay(site: Path | None, *, launcher: str | None, scheduler: str | None, hostfile: Path | None) -> Overlay:
    """Merge the values of the site file and of the command line's options, to be put over a study.

    Where both give a value, that of the command line counts.

    Args:
        site: the site file; None without one.
        launcher: value of --launcher; None where it is not given.
        scheduler: value of --scheduler; None where it is not given.
        hostfile: value of --hostfile; None where it is not given.

    Raises:
        RequestError: the site file cannot be read, is not TOML, or has other sections or wrong values; or an option
            has a wrong value.
    """
    sections: dict[str, dict[str, Any]] = read_site(site) if site is not None else {}
    for name, section in sections.items():
        _check_by_itself(name, section, f"site file {shown(str(site))}")
    options: dict[str, Any] = {}
    if launcher is not None:
        options["launcher"] = launcher
    if scheduler is not None:
        options["scheduler"] = scheduler
    if hostfile is not None:
        options["hostfile"] = str(hostfile.absolute())
    elif scheduler in SCHEDULERS_WITHOUT_HOSTFILE:
        options["hostfile"] = None  # removes the study's or the site's hostfile, which has no meaning here
    if options:
        _check_by_itself("launch", options, _COMMAND_LINE)
        sections["launch"] = sections.get("launch", {}) | options
    return sections


def read_site(path: Path) -> dict[str, dict[str, Any]]:
    """Read a site file into values by section and key, which are validated with the study that they are put over.

    Raises:
        RequestError: as `overlay` says.
    """
    text = read_text(path, "site file", next_step="Give a TOML file with [launch], [slurm], [kubernetes] or [node]")
    try:
        if has_long_keys(text):
            raise ValueError("it is nested too deeply")
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"site file {shown(str(path))} is not TOML: {error}", next_step="Strings need quotes, lists brackets"
        ) from None
    for name, section in raw.items():
        if name not in SITE_SECTIONS or not isinstance(section, dict):
            kind = f"section {shown(name)}" if isinstance(section, dict) else f"key {shown(name)} outside a section"
            raise RequestError(
                f"site file {shown(str(path))} has a {kind}",
                valid=[f"[{section_name}]" for section_name in SITE_SECTIONS],
                next_step="What is to be studied belongs in the study file",
            )
    hostfile = raw.get("launch", {}).get("hostfile")
    if isinstance(hostfile, str):
        raw["launch"]["hostfile"] = str(path_named_in(path, hostfile).absolute())
    return raw
