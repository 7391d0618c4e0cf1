"""Another model than the measured one, as `--model` names it: found as `plan` finds it, and counted.

A model without a formula is traced by a process of its own. Where that is not possible, the user is asked for its
number of parameters.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from vitscale.engines.trace_requests import needs_card, trace_request
from vitscale.errors import RequestError, shown
from vitscale.study import user_model
from vitscale.study.cards import find_cards
from vitscale.study.model_names import BY_OPTION
from vitscale.trial.known_models import KNOWN_MODELS
from vitscale.trial.model_cost import counted_parameters, has_formula
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.model_words import parameters_in_words
from vitscale.trial.trial import Trial

_IMAGENET_CLASSES = 1000
"""Classes of a model whose own number is not recorded."""


def asked_model(name: str, image_size: int, measured: Trial, told_parameters: int | None = None) -> ModelSpec:
    """Return the model of this name with as many classes as the measured one, resolved.

    Args:
        name: a name here, of timm or torchvision, or of the hub; or a folder, relative to the working directory.
        image_size: pixels a side.
        measured: a measured trial, whose device and precision the model is traced for.
        told_parameters: the number of parameters that the user states (`--parameters`); None: none.

    Raises:
        RequestError: there is no such model; nothing counts its parameters and the user states none; or the user states
            some although they are known.
    """
    classes = measured.model.num_classes or _IMAGENET_CLASSES
    unnamed = ModelSpec(task=measured.model.task, image_size=image_size, num_classes=classes)
    field = "hf" if _is_folder_without_configuration(name) else "name"
    wanted = unnamed.model_copy(update={field: name})
    located = user_model.with_located_files(_study_path(), wanted, BY_OPTION)
    spec = resolve(located, classes, measured.model.channels)
    if has_formula(spec):
        return _with_parameters(name, spec, told_parameters, reason="")
    digests = _digests_if_needed(located, is_count_told=told_parameters is not None)
    reason = digests.reason
    if not reason:
        trial = measured.model_copy(update={"model": spec, "model_digest": digests.config})
        reason = _trace(trial, digests)
    return _with_parameters(name, spec, told_parameters, reason)


def resized_model(image_size: int, measured: Trial) -> ModelSpec:
    """Return the measured model at another image size, resolved; one that no formula counts is traced at it.

    Raises:
        RequestError: nobody says which model was measured, or it does not take such images.
    """
    model = measured.model
    if model.unknown:
        what = f"--image-size {image_size}: the measured model is not known"
        raise RequestError(what, next_step="Say which it was with --model")
    resized = model.model_copy(update={"image_size": image_size, "parameter_count": None})
    spec = resolve(resized, model.num_classes or _IMAGENET_CLASSES)
    if spec.factory is None and not has_formula(spec):
        _trace(measured.model_copy(update={"model": spec}), _Digests(config=measured.model_digest))
    return spec


def _is_folder_without_configuration(name: str) -> bool:
    """Whether a name is that of a folder, and can mean no model: the message is then on what the folder lacks."""
    try:
        return Path(name).is_dir() and not (Path(name) / "config.json").is_file()
    except (OSError, ValueError):  # a NUL in it, or a name too long
        return False


def _study_path() -> Path:
    """Return the path of a study in the working directory, beside which folders are searched; it need not be there."""
    return Path.cwd() / "study.toml"


class _Digests(NamedTuple):
    """Digests of what a model is built from; None where it is built from nothing of the kind."""

    config: str | None = None
    factory: str | None = None
    reason: str = ""
    """Why they cannot be had; empty where they can."""


def _digests_if_needed(model: ModelSpec, *, is_count_told: bool) -> _Digests:
    """Return the digests of a located model's files, which are checked; or why there are none, if its count is told.

    Raises:
        RequestError: the files are not there, and nobody says how large the model is.
    """
    try:
        return _Digests(_config_digest(model), user_model.factory_digest(_study_path(), model))
    except RequestError as error:
        if is_count_told and model.hf is not None:
            return _Digests(reason=str(error))
        if model.hf is None:
            raise
        raise RequestError(str(error), next_step="Or say its size: --parameters 110M") from None


def _config_digest(model: ModelSpec) -> str | None:
    """Return the digest of a located model's configuration, after the checks of `user_model.check`."""
    is_on_hub = model.hf is not None and not Path(model.hf).is_absolute()
    return _config_digest_on_hub(model) if is_on_hub else user_model.check(_study_path(), model, BY_OPTION.field)


@lru_cache(maxsize=64)
def _config_digest_on_hub(model: ModelSpec) -> str | None:
    """Return the digest of a configuration on the hub, which is asked only once: an answer is computed many times."""
    return user_model.check(_study_path(), model, BY_OPTION.field)


def _trace(trial: Trial, digests: _Digests) -> str:
    """Have the trial's model counted, unless that is known or known to fail; return why it is not, "" where it is."""
    if not needs_card(trial):
        return ""
    request = trace_request(trial, model_digest=digests.factory)
    if KNOWN_MODELS.card(request) is None and not KNOWN_MODELS.reason(request):
        factory_digests = {} if digests.factory is None else {"asked": digests.factory}
        find_cards({"asked": trial}, factory_digests, user_model.user_folders(_study_path()))
    return "" if KNOWN_MODELS.card(request) is not None else KNOWN_MODELS.reason(request)


def _with_parameters(name: str, spec: ModelSpec, told_parameters: int | None, reason: str) -> ModelSpec:
    """Return the model, with the number of parameters that the user states where nothing counts them.

    Args:
        name: the model, as the user names it.
        spec: the model, resolved.
        told_parameters: what the user states, if anything.
        reason: why nothing counts them.

    Raises:
        RequestError: they are counted and stated, or neither.
    """
    count = counted_parameters(spec)
    if count is not None and told_parameters is not None:
        raise RequestError(
            f"--parameters {told_parameters:,}: {shown(name)} is known, {parameters_in_words([count])}",
            next_step="Leave it out",
        )
    if count is None and told_parameters is None:
        why = f": {reason}" if reason else ""
        raise RequestError(
            f"the parameters of --model {shown(name)} cannot be counted here{why}",
            next_step="Say them: --parameters 110M. Or predict on the machine that trains",
        )
    return spec if count is not None else spec.model_copy(update={"parameter_count": told_parameters})
