"""A configuration as rules see it: values by dotted key, where absence, "auto" and a wrong type are three things.

And what it is judged for: the model, the GPUs, and the release of DeepSpeed, with what that does with each key (from a
generated table).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from vitscale.base.distribution import versions_of
from vitscale.deepspeed_lint.advice import FileFinding, Remedy, options_of
from vitscale.deepspeed_lint.behaviours import Behaviour, Version
from vitscale.engines.deepspeed.config import as_flag, as_number
from vitscale.errors import RequestError, shown
from vitscale.present.document import About, Severity
from vitscale.present.units import counted
from vitscale.trial import model_cost, model_spec
from vitscale.trial.model_spec import NAMED_MODELS, ModelSpec

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:[.+-][\w.+-]*)?")


@cache
def _table() -> dict[str, Any]:
    """Return the table that `tools/make_deepspeed_keys.py` makes from DeepSpeed's source archives.

    Its entries:
        releases: versions, oldest first.
        keys: dotted key -> fact on the key ("int gt=0", "refused") -> spans of releases in which it holds
            ("0.9.5..0.12.6, 0.13.0..", where the last one has no end).
        defaults: dotted key -> default -> spans.
        optimizers, schedulers: name -> fact -> spans.
    """
    text = resources.files("vitscale.deepspeed_lint").joinpath("deepspeed_keys.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def known_releases() -> tuple[str, ...]:
    """Return the releases that the table holds, oldest first."""
    return tuple(_table()["releases"])


def installed_version() -> str | None:
    """Return DeepSpeed's installed version, found without importing it; None where it is not installed."""
    return versions_of(["deepspeed"])["deepspeed"]


class Release:
    """One release of DeepSpeed; for a version that the table lacks, the nearest release."""

    def __init__(self, version: str | None) -> None:
        """Take a version such as "0.16.9"; None takes the newest release of the table.

        Raises:
            RequestError: it is no version.
        """
        releases = known_releases()
        self.target_version = releases[-1] if version is None else version
        """The version that a file is judged for; it need not be in the table."""
        number = _version_number(self.target_version)
        if number is None:
            raise RequestError(f"{shown(self.target_version)} is no version of DeepSpeed", valid=releases)
        self.number = number
        self.version = _nearest_release(number)
        """The release of the table whose keys are taken."""
        self.exact = self.version == self.target_version
        self._index = releases.index(self.version)
        """Position of `version` among the table's releases, oldest first."""
        self._fact_by_key: dict[str, str] = {}
        for key, history in _table()["keys"].items():
            fact = self._current(history)
            if fact:
                self._fact_by_key[key] = fact

    def does(self, behaviour: Behaviour) -> bool:
        """Whether `target_version` behaves so."""
        return behaviour.holds_in(self.number)

    def fact(self, key: str) -> str | None:
        """Return what the release does with a dotted key, in a word; None where it does not know the key.

        On a single key it is "value" (read as it is), a type that pydantic demands ("bool", "int gt=0 or null",
        "one of 0, 1, 2, 3"), "deprecated: NEW_NAME" or "refused". On a part, an object of keys, it is "read" (the
        release ignores keys in it that it does not know), "strict" (it refuses them) or "open" (it takes any). The
        table's maker writes them, `tools/deepspeed_reads.py`.
        """
        return self._fact_by_key.get(key)

    def children(self, part: str) -> list[str]:
        """Return the names of the known keys that lie directly in a part; part "" is the whole configuration."""
        names = []
        for key in self._fact_by_key:
            parent, _, name = key.rpartition(".")
            if parent == part:
                names.append(name)
        return names

    def keys_ending_in(self, name: str) -> list[str]:
        """Return all known dotted keys that end in `name`."""
        return [key for key in self._fact_by_key if key.rpartition(".")[2] == name]

    def read_in(self, key: str) -> str | None:
        """Return the releases that read a key, in words ("from 0.9.5 to 0.19.2"); None where none in the table does."""
        history = _table()["keys"].get(key)
        if history is None:
            return None
        return _spans_in_words(spans for fact, spans in history.items() if fact != "refused")

    def default(self, key: str) -> float | None:
        """Return the release's default for a key whose default has changed; None for other keys."""
        value = self._current(_table()["defaults"].get(key, {}))
        return None if value is None else float(value)

    def releases_with_fact(self, part: str, name: str, fact: str) -> str:
        """Return the releases in which the table has a fact, in words: "since 0.19.3".

        Args:
            part: entry of the table: "defaults".
            name: what the fact is about: "gradient_clipping".
            fact: the fact, one that the table has: "1.0".
        """
        return _spans_in_words([_table()[part][name][fact]])

    def names(self, part: str) -> list[str]:
        """Return the "optimizers" or "schedulers" that the release knows."""
        return [name for name, history in _table()[part].items() if self._current(history)]

    def releases_naming(self, part: str, name: str) -> str | None:
        """Return the releases that know this optimizer or scheduler, in words; None where none does."""
        history = _table()[part].get(name)
        return None if history is None else _spans_in_words(history.values())

    def _current(self, history: Mapping[str, str]) -> str | None:
        """Return the fact that holds in this release; None where none does.

        Args:
            history: fact -> spans of releases in which it holds.
        """
        for fact, spans in history.items():
            if self._is_within(spans):
                return fact
        return None

    def _is_within(self, spans: str) -> bool:
        """Whether this release lies in one of several spans: "0.9.5..0.12.6, 0.13.0..", the last without an end."""
        releases = known_releases()
        for span in spans.split(", "):
            first, _, last = span.partition("..")
            first_index = releases.index(first)
            last_index = releases.index(last) if last else len(releases) - 1
            if first_index <= self._index <= last_index:
                return True
        return False


def _spans_in_words(spans: Iterable[str]) -> str:
    """Return spans such as "0.9.5..0.19.6" and "0.19.8.." in words: "from 0.9.5 to 0.19.6 and since 0.19.8"."""
    clauses = []
    for span in ", ".join(spans).split(", "):
        first, _, last = span.partition("..")
        if not last:
            clauses.append(f"since {first}")
        elif first == last:
            clauses.append(f"in {first}")
        else:
            clauses.append(f"from {first} to {last}")
    return " and ".join(clauses)


def _version_number(version: str) -> Version | None:
    """Return (0, 16, 9) for "0.16.9" or "0.16.9+cu12"; None for what is no version."""
    match = _VERSION.fullmatch(version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _nearest_release(number: Version) -> str:
    """Return the release of the table that is nearest to a version.

    That is the nearest patch of the same minor version; without one the newest earlier release; without one the oldest.

    Args:
        number: the version, such as (0, 16, 9).
    """
    release_by_number: dict[Version, str] = {}
    for release in known_releases():
        release_number = _version_number(release)
        if release_number is not None:
            release_by_number[release_number] = release
    _, _, patch = number
    same_minor = [other for other in release_by_number if other[:2] == number[:2]]
    if same_minor:
        nearest = min(same_minor, key=lambda other: abs(other[2] - patch))
        return release_by_number[nearest]
    earlier = [other for other in release_by_number if other < number]
    if earlier:
        return release_by_number[max(earlier)]
    oldest = next(iter(release_by_number))
    return release_by_number[oldest]


_IMAGENET_CLASSES = 1000


@dataclass(frozen=True)
class LintTarget:
    """What a configuration is judged for. Rules that need a value that is None here say nothing."""

    model: str | None = None
    """The model's name, for messages."""
    parameters: int | None = None
    """The model's number of parameters."""
    gpus: int | None = None
    """Ranks in all."""
    deepspeed: str | None = None
    """The version of DeepSpeed to judge for; None: the newest that the table knows."""
    installed: bool = True
    """Whether that version is installed here, or was asked for."""
    stage: int | None = None
    """The ZeRO stage, where a study sets it and the file's does not count."""
    precision: str | None = None
    """The precision in the words of `ConfigurationView.precision`, where a study sets it."""
    settled: frozenset[str] = frozenset()
    """Dotted keys that a study writes itself, so that the file need not have them."""
    in_a_study: bool = False
    """Whether vitscale itself hands the file to DeepSpeed, without those keys that are "auto"."""

    def described(self) -> str:
        """Return what the file was judged for: "DeepSpeed 0.19.8; vit-b16 with 86,567,656 parameters; 8 GPUs"."""
        release = Release(self.deepspeed)
        version = (
            release.version if release.exact else f"{shown(release.target_version)} by the keys of {release.version}"
        )
        model = "no --model or --parameters"
        if self.parameters is not None:
            model = f"{self.parameters:,} parameters"
        if self.model is not None:
            model = f"{self.model} with {model}"
        gpus = "no --gpus" if self.gpus is None else counted(self.gpus, "GPU")
        return f"DeepSpeed {version}; {model}; {gpus}"


def lint_target(model: str | None, parameters: str | None, gpus: int | None, deepspeed: str | None) -> LintTarget:
    """Return what the command line says that a file is judged for, with the installed version filled in.

    Args:
        model: a named model (with the 1,000 classes of ImageNet-1k), or the folder of a Hugging Face model.
        parameters: the number of parameters of any other model, such as "304M".
        gpus: ranks in all.
        deepspeed: a version; None takes the installed one.

    Raises:
        RequestError: the model is unknown, or its size is; or both a model and a number of parameters are given.
    """
    if model is not None and parameters is not None:
        raise RequestError("both --model and --parameters are given", valid=["one of the two"])
    version = installed_version() if deepspeed is None else deepspeed
    parameter_count = None
    if model is not None:
        parameter_count = _parameters(model)
    elif parameters is not None:
        parameter_count = model_cost.counted(parameters)
    return LintTarget(
        model=model,
        parameters=parameter_count,
        gpus=gpus,
        deepspeed=version,
        installed=version is not None,
    )


def _parameters(model: str) -> int:
    """Return the number of parameters of a named model, or of one in a folder.

    Raises:
        RequestError: there is no such model, or its size is not known.
    """
    spec = ModelSpec(**model_spec.fields_named(model))
    classes = _IMAGENET_CLASSES if model in NAMED_MODELS else 1
    count = model_cost.parameters(model_spec.resolve(spec, classes))
    if count is None:
        raise RequestError(
            f"the size of {shown(model)} cannot be known without building it",
            valid=["a plain ViT or DeiT", *NAMED_MODELS],
            next_step="Say --parameters 110M instead; without a size the rules that need one say nothing",
        )
    return count


_ABSENT = object()
_LARGEST_NUMBER = 1e30
"""Beyond every real value; what is larger no longer divides as a float."""


TYPE_BY_NAME = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Names that DeepSpeed has for types of floating-point numbers (`DtypeEnum` in deepspeed/runtime/config.py)."""


def finding(
    rule: str, severity: Severity, key: str, message: str, fix: str | Remedy | Sequence[Remedy], source: str
) -> FileFinding:
    """Make one finding of a rule.

    Args:
        rule: the rule's name, such as "unknown-key".
        severity: "error" where DeepSpeed refuses the file, or does not do what the file says.
        key: the dotted key in the file; empty where the finding concerns the whole file.
        message: what the file has and what DeepSpeed does with it.
        fix: what to do; several pieces of advice stand in the order in which they are tried.
        source: where to look this up: a file of a release of DeepSpeed, its documentation, a paper.
    """
    options = options_of(fix)
    about = About(key=key, source=source)
    return FileFinding(rule, severity, message, options[0].text, about, options, options[0].changes)


@dataclass(frozen=True)
class ConfigurationView:
    """A configuration, and what it is judged for.

    Keys are dotted: "zero_optimization.stage". A value that is "auto" or has a wrong type is None in every answer but
    that of `value`: "auto" is left to the Hugging Face integration, and wrong types have a rule of their own.
    """

    config: dict[str, Any]
    target: LintTarget
    release: Release

    def value(self, key: str) -> Any:
        """Return the value at a dotted key as it is; None where the key is absent, and where it is null.

        `has` distinguishes the two.
        """
        value = self._value_or_absent(key)
        return None if value is _ABSENT else value

    def has(self, key: str) -> bool:
        """Whether the key is there, even if it is "auto"."""
        return self._value_or_absent(key) is not _ABSENT

    def leaves_open(self, key: str) -> bool:
        """Whether the file leaves a key open: the key, or a part around it, is "auto" or is written by a study."""
        names = key.split(".")
        for depth in range(1, len(names) + 1):
            key_or_part = ".".join(names[:depth])  # of "a.b.c" first "a", then "a.b", then "a.b.c"
            if key_or_part in self.target.settled or self._value_or_absent(key_or_part) == "auto":
                return True
        return False

    def flag(self, key: str, default: bool = False) -> bool | None:
        """Return the value of a switch; `default` where it is absent, None where the value is neither on nor off.

        A text such as "true" counts only where a pydantic model of DeepSpeed's converts it.
        """
        value = self._value_or_absent(key)
        if value is _ABSENT:
            return default
        converts_text = (self.release.fact(key) or "").startswith("bool")
        return as_flag(value) if converts_text or isinstance(value, int) else None

    def is_on(self, key: str) -> bool:
        """Whether a switch is there and on."""
        return self.flag(key) is True

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a number's value; `default` where it is absent, None where the value is no number."""
        value = self._value_or_absent(key)
        if value is _ABSENT:
            return default
        kind = (self.release.fact(key) or "").partition(" ")[0]
        if kind in ("int", "float"):
            value = as_number(value, kind)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        return value if abs(value) < _LARGEST_NUMBER else None

    def text(self, key: str) -> str | None:
        """Return a string's value; None for "auto" and where it is absent."""
        value = self._value_or_absent(key)
        return value if isinstance(value, str) and value != "auto" else None

    def part(self, key: str) -> dict[str, Any]:
        """Return the object at a dotted key; empty where there is none."""
        value = self._value_or_absent(key)
        return value if isinstance(value, dict) else {}

    def zero_key(self, *names: str) -> str:
        """Return the dotted key of `zero_optimization` that the file has among these names; that of the first if none.

        Example: "zero_optimization.max_reuse_distance", where a key has a second name with "stage3_".
        """
        for name in names:
            if self.has(f"zero_optimization.{name}"):
                return f"zero_optimization.{name}"
        return f"zero_optimization.{names[0]}"

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; 0 where none is asked for, None where it is open."""
        if self.target.stage is not None:
            return self.target.stage
        if isinstance(self._value_or_absent("zero_optimization"), bool):
            return int(self.is_on("zero_optimization"))  # the old form: true was stage 1
        if self.leaves_open("zero_optimization.stage"):
            return None
        value = self._value_or_absent("zero_optimization.stage")
        if value is _ABSENT:
            return 0
        stage_by_value = {"0": 0, "1": 1, "2": 2, "3": 3, 0: 0, 1: 1, 2: 2, 3: 3}
        return stage_by_value.get(value) if not isinstance(value, (dict, list)) else None

    @property
    def bf16_part(self) -> str:
        """Name of the part that sets bf16: DeepSpeed looks at the old one, "bfloat16", only where "bf16" is absent."""
        return "bfloat16" if self.has("bfloat16") and not self.has("bf16") else "bf16"

    @property
    def has_autocast(self) -> bool:
        """Whether the release reads `torch_autocast`; others ignore it."""
        return self.release.fact("torch_autocast") is not None

    @property
    def accumulation_type(self) -> str | None:
        """The type in which gradients are accumulated, where the file names a known one: "fp32", "bf16" or "fp16"."""
        return TYPE_BY_NAME.get(self.text("data_types.grad_accum_dtype") or "")

    @property
    def precision(self) -> str | None:
        """The precision: "fp32", "bf16", "fp16" or "autocast"; None where it is open."""
        if self.target.precision is not None:
            return self.target.precision
        precision_by_part = {self.bf16_part: "bf16", "fp16": "fp16"}
        if self.has_autocast:
            precision_by_part["torch_autocast"] = "autocast"
        for part, precision in precision_by_part.items():
            if self.is_on(f"{part}.enabled"):
                return precision
        has_open_switch = any(self.leaves_open(f"{part}.enabled") for part in precision_by_part)
        return None if has_open_switch else "fp32"

    def source(self, file: str) -> str:
        """Return a file of the release of DeepSpeed judged for, in words."""
        return f"DeepSpeed {self.release.version}, deepspeed/{file}"

    def _value_or_absent(self, key: str) -> Any:
        """Return the value at a dotted key; `_ABSENT` where there is none."""
        value: Any = self.config
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                return _ABSENT
            value = value[name]
        return value


class KeyInFile(NamedTuple):
    """A key that a configuration has."""

    dotted: str
    """ "zero_optimization.stage" """
    name: str
    """Its last part; a name in a file may have dots itself."""
    part: str
    """The dotted key of the object that it lies in; empty for the whole."""
    value: Any


def keys_in(view: ConfigurationView) -> Iterator[KeyInFile]:
    """Yield all keys of a configuration; those inside a part only where the release reads its keys one by one."""
    yield from _keys_in_part(view, view.config, part="")


def _keys_in_part(view: ConfigurationView, values: Mapping[str, Any], part: str) -> Iterator[KeyInFile]:
    """Yield the keys of a part and of the parts in it; `values` are its keys, and `part` is its own dotted key."""
    for name, value in values.items():
        key = f"{part}.{name}" if part else name
        yield KeyInFile(key, name, part, value)
        if isinstance(value, dict) and view.release.fact(key) in ("read", "strict"):
            yield from _keys_in_part(view, value, key)
