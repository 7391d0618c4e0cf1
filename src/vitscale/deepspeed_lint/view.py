"""A configuration as rules see it: values by dotted key, with "auto" and wrong types told apart from absence.

And what it is judged for: the model, the GPUs, and the release of DeepSpeed, with what that does with each key (from a
generated table).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from vitscale.base.distribution import versions_of
from vitscale.deepspeed_lint.advice import Advice, FileFinding, options_of
from vitscale.deepspeed_lint.behaviours import Behaviour
from vitscale.engines.deepspeed.config import as_flag, as_number
from vitscale.errors import RequestError, shown
from vitscale.present.document import About, Severity
from vitscale.trial import model_cost, model_spec
from vitscale.trial.model_spec import NAMED_MODELS, ModelSpec

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:[.+-][\w.+-]*)?")


@cache
def _table() -> dict[str, Any]:
    """The table that `tools/make_deepspeed_keys.py` makes from DeepSpeed's source archives."""
    text = resources.files("vitscale.deepspeed_lint").joinpath("deepspeed_keys.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def known_releases() -> tuple[str, ...]:
    """The releases that the table holds, oldest first."""
    return tuple(_table()["releases"])


def installed_version() -> str | None:
    """DeepSpeed's installed version, found without importing it; None where it is not installed."""
    return versions_of(["deepspeed"])["deepspeed"]


class Release:
    """One release of DeepSpeed; for a version that the table lacks, the nearest release."""

    def __init__(self, wanted: str | None) -> None:
        """`wanted`: a version such as "0.16.9"; None takes the newest release of the table.

        Raises:
            RequestError: it is no version.
        """
        known = known_releases()
        self.wanted = known[-1] if wanted is None else wanted
        number = _numbers(self.wanted)
        if number is None:
            raise RequestError(f"{shown(self.wanted)} is no version of DeepSpeed", valid=known)
        self.number = number
        self.version = _nearest(number)
        self.exact = self.version == self.wanted
        self._place = known.index(self.version)
        self._facts = {key: fact for key, history in _table()["keys"].items() if (fact := self._now(history))}

    def does(self, behaviour: Behaviour) -> bool:
        """Whether the version that was asked for behaves so; it need not be in the table of keys."""
        return behaviour.holds_in(self.number)

    def fact(self, key: str) -> str | None:
        """What the release does with a dotted key; None where it does not know the key.

        The words are explained in the table's maker, `tools/deepspeed_reads.py`.
        """
        return self._facts.get(key)

    def children(self, part: str) -> list[str]:
        """Names of the known keys inside a part ("" for the whole)."""
        split = (key.rpartition(".") for key in self._facts)
        return [name for parent, _, name in split if parent == part]

    def places(self, name: str) -> list[str]:
        """All known dotted keys that end in `name`."""
        return [key for key in self._facts if key.rpartition(".")[2] == name]

    def read_in(self, key: str) -> str | None:
        """The releases that read the key, in words ("from 0.9.5 to 0.19.2"); None where none in the table does."""
        history = _table()["keys"].get(key)
        return None if history is None else _said(span for fact, span in history.items() if fact != "refused")

    def default(self, key: str) -> float | None:
        """The release's default for a key whose default has changed; None for other keys."""
        value = self._now(_table()["defaults"].get(key, {}))
        return None if value is None else float(value)

    def since(self, part: str, name: str, fact: str) -> str:
        """The releases in which `fact` holds, in words."""
        return _said([_table()[part][name][fact]])

    def names(self, part: str) -> list[str]:
        """The "optimizers" or "schedulers" that the release knows."""
        return [name for name, history in _table()[part].items() if self._now(history)]

    def once_named(self, part: str, name: str) -> str | None:
        """The releases that know this optimizer or scheduler, in words; None where none does."""
        history = _table()[part].get(name)
        return None if history is None else _said(history.values())

    def _now(self, history: Mapping[str, str]) -> str | None:
        return next((fact for fact, spans in history.items() if self._within(spans)), None)

    def _within(self, spans: str) -> bool:
        known = known_releases()
        for span in spans.split(", "):
            first, _, last = span.partition("..")
            if known.index(first) <= self._place <= (known.index(last) if last else len(known) - 1):
                return True
        return False


def _said(spans: Any) -> str:
    """Spans of releases in words: "from 0.9.5 to 0.19.6", "since 0.19.3"."""
    said = []
    for span in ", ".join(spans).split(", "):
        first, _, last = span.partition("..")
        if not last:
            said.append(f"since {first}")
        else:
            said.append(f"in {first}" if first == last else f"from {first} to {last}")
    return " and ".join(said)


def _numbers(version: str) -> tuple[int, int, int] | None:
    match = _VERSION.fullmatch(version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _nearest(number: tuple[int, int, int]) -> str:
    """The release of the same minor version with the nearest patch, else the newest earlier one, else the oldest."""
    known = {_numbers(version): version for version in known_releases()}
    same = [held for held in known if held is not None and held[:2] == number[:2]]
    if same:
        return known[min(same, key=lambda held: abs(held[2] - number[2]))]
    return known[max((held for held in known if held is not None and held < number), default=next(iter(known)))]


_IMAGENET_CLASSES = 1000


@dataclass(frozen=True)
class Setting:
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
    """The precision in `View.precision`'s words, where a study sets it."""
    settled: frozenset[str] = frozenset()
    """Dotted keys that a study writes itself, so that the file need not have them."""
    in_a_study: bool = False
    """Whether vitscale itself hands the file to DeepSpeed, without those keys that are "auto"."""

    def described(self) -> str:
        """What the file was judged for, in a few words."""
        release = Release(self.deepspeed)
        judged = release.version if release.exact else f"{shown(release.wanted)} by the keys of {release.version}"
        model = "no --model or --parameters"
        if self.parameters is not None:
            model = f"{self.parameters:,} parameters"
        if self.model is not None:
            model = f"{self.model} with {model}"
        gpus = "no --gpus" if self.gpus is None else "1 GPU" if self.gpus == 1 else f"{self.gpus:,} GPUs"
        return f"DeepSpeed {judged}; {model}; {gpus}"


def setting_of(model: str | None, parameters: str | None, gpus: int | None, deepspeed: str | None) -> Setting:
    """The setting from the command line, checked, with the installed version filled in.

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
    count = None
    if model is not None:
        count = _parameters(model)
    elif parameters is not None:
        count = model_cost.counted(parameters)
    return Setting(
        model=model,
        parameters=count,
        gpus=gpus,
        deepspeed=version,
        installed=version is not None,
    )


def _parameters(model: str) -> int:
    spec = ModelSpec(**model_spec.fields_named(model))
    count = model_cost.parameters(model_spec.resolve(spec, _IMAGENET_CLASSES if model in NAMED_MODELS else 1))
    if count is None:
        raise RequestError(
            f"the size of {shown(model)} cannot be known without building it",
            valid=["a plain ViT or DeiT", *NAMED_MODELS],
            next_step="Say --parameters 110M instead; without a size the rules that need one say nothing",
        )
    return count


_ABSENT = object()
_LARGEST = 1e30  # beyond every real value; what is larger no longer divides as a float


DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
}
"""Names that DeepSpeed has for types of floating-point numbers (`DtypeEnum` in deepspeed/runtime/config.py)."""


def finding(
    rule: str, severity: Severity, key: str, message: str, fix: str | Advice | Sequence[Advice], source: str
) -> FileFinding:
    """One finding of a rule.

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
class View:
    """A configuration, and what it is judged for.

    A value that is "auto" or has a wrong type is None in every answer: "auto" is left to the Hugging Face integration,
    and wrong types have a rule of their own.
    """

    config: dict[str, Any]
    setting: Setting
    release: Release

    def value(self, key: str) -> Any:
        """Any value at a dotted key; None where the key is absent (`has` tells that from null)."""
        value = self._at(key)
        return None if value is _ABSENT else value

    def has(self, key: str) -> bool:
        """Whether the key is there, even if it is "auto"."""
        return self._at(key) is not _ABSENT

    def open(self, key: str) -> bool:
        """Whether the key, or a part that it belongs to, is "auto" or is written by the study."""
        names = key.split(".")
        above = [".".join(names[: count + 1]) for count in range(len(names))]
        return any(name in self.setting.settled or self._at(name) == "auto" for name in above)

    def flag(self, key: str, default: bool = False) -> bool | None:
        """A switch's value; `default` where it is absent. Where no model converts it, only 0 and 1 stand for one."""
        value = self._at(key)
        if value is _ABSENT:
            return default
        converts = (self.release.fact(key) or "").startswith("bool")
        return as_flag(value) if converts or isinstance(value, int) else None

    def on(self, key: str) -> bool:
        """Whether a switch is there and on."""
        return self.flag(key) is True

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number's value; `default` where it is absent."""
        value = self._at(key)
        if value is _ABSENT:
            return default
        kind = (self.release.fact(key) or "").partition(" ")[0]
        if kind in ("int", "float"):
            value = as_number(value, kind)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        return value if abs(value) < _LARGEST else None

    def text(self, key: str) -> str | None:
        """A string's value; None for "auto" and where it is absent."""
        value = self._at(key)
        return value if isinstance(value, str) and value != "auto" else None

    def part(self, key: str) -> dict[str, Any]:
        """An object; empty where there is none."""
        value = self._at(key)
        return value if isinstance(value, dict) else {}

    def zero(self, *names: str) -> str:
        """The dotted key of `zero_optimization` that the file has among these `names`; the first name's if none."""
        written = (f"zero_optimization.{name}" for name in names if self.has(f"zero_optimization.{name}"))
        return next(written, f"zero_optimization.{names[0]}")

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; 0 where none is asked for, None where it is open."""
        if self.setting.stage is not None:
            return self.setting.stage
        if isinstance(self._at("zero_optimization"), bool):
            return int(self.on("zero_optimization"))  # the old form: true was stage 1
        if self.open("zero_optimization.stage"):
            return None
        stage = self._at("zero_optimization.stage")
        stages = {_ABSENT: 0, "0": 0, "1": 1, "2": 2, "3": 3, 0: 0, 1: 1, 2: 2, 3: 3}
        return stages.get(stage) if not isinstance(stage, (dict, list)) else None

    @property
    def bf16(self) -> str:
        """The part that sets bf16: DeepSpeed looks at the old name, `bfloat16`, only where `bf16` is absent."""
        return "bfloat16" if self.has("bfloat16") and not self.has("bf16") else "bf16"

    @property
    def has_autocast(self) -> bool:
        """Whether the release reads `torch_autocast`; others ignore it."""
        return self.release.fact("torch_autocast") is not None

    @property
    def accumulates(self) -> str | None:
        """The type in which gradients are accumulated, where the file names a known one: "fp32", "bf16" or "fp16"."""
        return DTYPES.get(self.text("data_types.grad_accum_dtype") or "")

    @property
    def precision(self) -> str | None:
        """The precision: "fp32", "bf16", "fp16" or "autocast"; None where it is open."""
        if self.setting.precision is not None:
            return self.setting.precision
        parts = {self.bf16: "bf16", "fp16": "fp16"}
        if self.has_autocast:
            parts["torch_autocast"] = "autocast"
        for part, name in parts.items():
            if self.on(f"{part}.enabled"):
                return name
        open_parts = [part for part in parts if self.open(f"{part}.enabled")]
        return None if open_parts else "fp32"

    def source(self, file: str) -> str:
        """A file of the release of DeepSpeed judged for, in words."""
        return f"DeepSpeed {self.release.version}, deepspeed/{file}"

    def _at(self, key: str) -> Any:
        value: Any = self.config
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                return _ABSENT
            value = value[name]
        return value


def keys_of(view: View, part: dict[str, Any], above: str = "") -> Iterator[tuple[str, str, str, Any]]:
    """(dotted key, name, part, value) of all keys, inside parts only where the release reads their keys one by one."""
    for name, value in part.items():
        key = f"{above}.{name}" if above else name
        yield key, name, above, value
        if isinstance(value, dict) and view.release.fact(key) in ("read", "strict"):
            yield from keys_of(view, value, key)
