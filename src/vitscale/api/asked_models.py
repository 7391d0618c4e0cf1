"""Finds the models that options ask for in place of the measured one, as `plan` finds a study's, and counts them.

This asks the hub and the tracer, before anything is predicted: predictions get models that are found. A model without a
formula is traced by a process of its own. Where that is not possible, the user is asked for its number of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vitscale.engines.trace_requests import needs_card, trace_request
from vitscale.errors import RequestError, shown
from vitscale.prediction.model_requests import ModelRequest
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


class ModelFinder:
    """Finds models, each once: a question is answered again without each of its options.

    Example:
        >>> finder = ModelFinder()
        >>> finder.find(request) is finder.find(request)
        True
    """

    def __init__(self) -> None:
        self._found: list[_FoundModel] = []
        self._hub_digests: dict[ModelSpec, str | None] = {}
        """Model on the hub -> the digest of its configuration there."""

    def find_all(self, requests: Mapping[str, ModelRequest]) -> dict[str, ModelSpec]:
        """Return the model of each request, under the request's key; see `find`."""
        return {key: self.find(request) for key, request in requests.items()}

    def find(self, request: ModelRequest) -> ModelSpec:
        """Return the model that a request names, resolved; or the measured one at the requested image size.

        It has as many classes as the measured one. Its name is one here, of timm or torchvision, or of the hub; or that
        of a folder, relative to the working directory.

        Raises:
            RequestError: there is no such model, or it does not take such images; nothing counts its parameters and the
                user states none; the user states some although they are known; or another size of a model is asked for
                that nobody names.
        """
        for found in self._found:
            if found.request == request:
                return found.model
        if request.name is None:
            model = _resized_model(request.image_size, request.measured)
        else:
            model = self._named_model(request.name, request)
        self._found.append(_FoundModel(request, model))
        return model

    def _named_model(self, name: str, request: ModelRequest) -> ModelSpec:
        """Return the model of this name; with the parameters that the user states, where nothing counts them."""
        measured = request.measured
        classes = measured.model.num_classes or _IMAGENET_CLASSES
        unnamed = ModelSpec(task=measured.model.task, image_size=request.image_size, num_classes=classes)
        field = "hf" if _is_folder_without_configuration(name) else "name"
        named = unnamed.model_copy(update={field: name})
        located = user_model.with_located_files(_study_path(), named, BY_OPTION)
        spec = resolve(located, classes, measured.model.channels)
        stated_parameters = request.stated_parameters
        if has_formula(spec):
            return _with_parameters(name, spec, stated_parameters, reason="")
        digests = self._digests_if_needed(located, is_count_stated=stated_parameters is not None)
        reason = digests.reason
        if not reason:
            trial = measured.model_copy(update={"model": spec, "model_digest": digests.config})
            reason = _trace(trial, digests)
        return _with_parameters(name, spec, stated_parameters, reason)

    def _digests_if_needed(self, model: ModelSpec, *, is_count_stated: bool) -> _Digests:
        """Return the digests of a located model's files, which are checked; or why there are none, with a stated count.

        Raises:
            RequestError: the files are not there, and nobody says how large the model is.
        """
        try:
            return _Digests(self._config_digest(model), user_model.factory_digest(_study_path(), model))
        except RequestError as error:
            if is_count_stated and model.hf is not None:
                return _Digests(reason=str(error))
            if model.hf is None:
                raise
            raise RequestError(str(error), next_step="Or say its size: --parameters 110M") from None

    def _config_digest(self, model: ModelSpec) -> str | None:
        """Return the digest of a located model's configuration, after the checks of `user_model.check`.

        The hub is asked once for each: trials that differ in precision, say, have the same.
        """
        is_on_hub = model.hf is not None and not Path(model.hf).is_absolute()
        if not is_on_hub:
            return user_model.check(_study_path(), model, BY_OPTION.field)
        if model not in self._hub_digests:
            self._hub_digests[model] = user_model.check(_study_path(), model, BY_OPTION.field)
        return self._hub_digests[model]


class _FoundModel(NamedTuple):
    """A request, and the model that was found for it."""

    request: ModelRequest
    model: ModelSpec


class _Digests(NamedTuple):
    """Digests of what a model is built from; None where it is built from nothing of the kind."""

    config: str | None = None
    factory: str | None = None
    reason: str = ""
    """Why they cannot be had; empty where they can."""


def _resized_model(image_size: int, measured: Trial) -> ModelSpec:
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


def _trace(trial: Trial, digests: _Digests) -> str:
    """Have the trial's model counted, unless that is known or known to fail; return why it is not, "" where it is."""
    if not needs_card(trial):
        return ""
    request = trace_request(trial, model_digest=digests.factory)
    if KNOWN_MODELS.card(request) is None and not KNOWN_MODELS.reason(request):
        factory_digests = {} if digests.factory is None else {"asked": digests.factory}
        find_cards({"asked": trial}, factory_digests, user_model.user_folders(_study_path()))
    return "" if KNOWN_MODELS.card(request) is not None else KNOWN_MODELS.reason(request)


def _with_parameters(name: str, spec: ModelSpec, stated_parameters: int | None, reason: str) -> ModelSpec:
    """Return the model, with the number of parameters that the user states where nothing counts them.

    Args:
        name: the model, as the user names it.
        spec: the model, resolved.
        stated_parameters: what the user states; None: nothing.
        reason: why nothing counts them.

    Raises:
        RequestError: they are counted and stated, or neither.
    """
    count = counted_parameters(spec)
    if count is not None and stated_parameters is not None:
        raise RequestError(
            f"--parameters {stated_parameters:,}: {shown(name)} is known, {parameters_in_words([count])}",
            next_step="Leave it out",
        )
    if count is None and stated_parameters is None:
        why = f": {reason}" if reason else ""
        raise RequestError(
            f"the parameters of --model {shown(name)} cannot be counted here{why}",
            next_step="Say them: --parameters 110M. Or predict on the machine that trains",
        )
    return spec if count is not None else spec.model_copy(update={"parameter_count": stated_parameters})
