"""A model's counts in words and as fields of JSON, the same for every verb: "86,567,656 parameters (traced)"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vitscale.trial.model_cost import CountSource, ParameterCount

UNNAMED_MODEL = "unknown model"
"""The name of a model that nobody names, such as that of an imported log."""
_MOST_NUMBERS_NAMED = 3
"""Different numbers of parameters of one model (at several sizes) beyond which only their range is named."""


class CountedModel(NamedTuple):
    """A model's name, and its number of parameters; None where that is unavailable."""

    name: str
    parameters: ParameterCount | None


def parameter_lines(models: Iterable[CountedModel]) -> list[str]:
    """Return lines with the models' numbers of parameters; models with the same number share a line.

    Example: ["vit-b16: 85,806,346 parameters", "timm/resnet18: 11,181,642 parameters (traced)"].
    """
    counts_by_name: dict[str, dict[ParameterCount | None, None]] = {}
    for model in models:
        counts_by_name.setdefault(model.name, {})[model.parameters] = None
    names_by_words: dict[str, list[str]] = {}
    for name, counts in counts_by_name.items():
        names_by_words.setdefault(parameters_in_words(list(counts)), []).append(name)
    return [f"{', '.join(names)}: {words}" for words, names in names_by_words.items()]


def parameters_in_words(counts: Sequence[ParameterCount | None]) -> str:
    """Return "5,717,416 parameters", "87,000,000 parameters (traced)", or "1,000 parameters, unavailable for some".

    A count by formula has no source in words: everybody can check it. Of an unknown source the words say why.
    """
    known_counts = [count for count in counts if count is not None]
    if not known_counts:
        return "number of parameters unavailable"
    words = f"{_numbers_in_words({count.parameters for count in known_counts})} parameters"
    sources = dict.fromkeys(source_in_words(count.source) for count in known_counts if count.source != "by formula")
    if sources:
        words += f" ({', '.join(sources)})"
    if None in counts:
        words += ", unavailable for some"
    return words


def source_in_words(source: CountSource) -> str:
    """Return how a count is known, to stand behind it: "traced"; of an unknown source, why it is unknown."""
    if source == "unknown":
        return "unknown source: an older record does not say it"
    return source


def _numbers_in_words(numbers: set[int]) -> str:
    """Return "1,000", "1,000 or 2,000"; of many numbers "1,000 to 9,000". `numbers` has at least one."""
    if len(numbers) > _MOST_NUMBERS_NAMED:
        return f"{min(numbers):,} to {max(numbers):,}"
    return " or ".join(f"{number:,}" for number in sorted(numbers))


def parameter_fields(count: ParameterCount | None) -> dict[str, Any]:
    """Return a number of parameters and how it is known, for the JSON; null where it is unavailable."""
    return {
        "parameters": None if count is None else count.parameters,
        "parameters_source": None if count is None else count.source,
    }
