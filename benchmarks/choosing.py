"""Settings of the priors chosen by all sources but one, and tried on that one."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from paired import OURS, Array, Point, errors, mean_of_units, same_intervals

from vitscale.errors import RequestError, shown, unknown
from vitscale.prediction import parameters
from vitscale.prediction.parameters import Prior

Setting = Mapping[str, Any]
"""Prior -> {"mean": ..., "spread": ...} or one of them; "module.CONSTANT" of vitscale.prediction -> number."""
BY = ("score", "error")
_CONSTANT = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)\.(_?[A-Z][A-Z_]*)")


def settings_of(path: Path) -> list[Setting]:
    """The settings of a file, after the one that changes nothing.

    Raises:
        RequestError: it is no JSON list of tables.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"--choose {shown(str(path))} cannot be used: {error}") from None
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise RequestError(
            f"--choose {shown(str(path))} is no list", next_step='Write [{"growth": {"spread": 1.5}}, ...]'
        )
    return [{}, *(one for one in content if one)]


@contextmanager
def replaced(setting: Setting) -> Iterator[None]:
    """Predictions within are made with the setting.

    Raises:
        RequestError: it names no prior or constant, or holds no numbers.
    """
    priors: dict[str, Prior] = {}
    with ExitStack() as stack:
        for name, value in setting.items():
            if constant := _CONSTANT.fullmatch(name):
                stack.enter_context(patch.object(*_constant(constant, name, value)))
            elif name not in parameters.PRIORS:
                raise unknown("prior", name, parameters.PRIORS, 'Or name a constant: "fitting.JOB_TO_JOB"')
            elif not isinstance(value, dict) or not all(_is_number(one) for one in value.values()):
                raise RequestError(f"{name} is {shown(value)}", valid=['{"mean": number, "spread": number}'])
            elif wrong := set(value) - {one.name for one in fields(Prior)}:
                raise unknown("figure of a prior", min(wrong), [one.name for one in fields(Prior)])
            else:
                priors[name] = replace(parameters.PRIORS[name], **value)
        stack.enter_context(patch.dict(parameters.PRIORS, priors))
        yield


def _constant(match: re.Match[str], name: str, value: object) -> tuple[Any, str, object]:
    try:
        module = importlib.import_module(f"vitscale.prediction.{match[1]}")
        now = getattr(module, match[2])
    except (ImportError, AttributeError):
        raise RequestError(f"vitscale.prediction has no constant {name}") from None
    if not (_is_number(value) and _is_number(now)):
        raise RequestError(f"{name} is {shown(value)}, and was {shown(now)}", valid=["a number for a number"])
    return module, match[2], value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def choose(by_setting: Sequence[Sequence[Point]], by: str) -> tuple[list[Point], dict[str, int]]:
    """Each source's points under the setting that the other sources choose; and which one that is, by source.

    Args:
        by_setting: the same points under each setting; of equally good ones the first is chosen.
        by: what a setting is judged by, a mean over units: "score" (interval scores of logarithms) or "error".

    Raises:
        RequestError: there is one source alone.
    """
    names = np.array([point.source for point in by_setting[0]])
    sources = list(dict.fromkeys(names))
    if len(sources) < 2:
        raise RequestError("--choose leaves a source out", next_step="Give a folder of two sources or more")
    figures = [_figure(points, by) for points in by_setting]
    chosen: dict[str, int] = {}
    for source in sources:
        others = names != source
        kept = [point for point, taken in zip(by_setting[0], others, strict=True) if taken]
        chosen[source] = int(np.argmin([mean_of_units(figure[others], kept).mean() for figure in figures]))
    return [by_setting[chosen[point.source]][n] for n, point in enumerate(by_setting[0])], chosen


def _figure(points: Sequence[Point], by: str) -> Array:
    return same_intervals(points, OURS).scores if by == "score" else np.abs(errors(points, OURS))
