"""What `model.name` of a study means: a model of vitscale, of timm or torchvision, of the hub, or a folder's.

Beside the names themselves it takes spellings that people use. Where such a spelling can mean one model only, that one
is taken and a note says so; else the message names what can be meant, the likeliest first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitscale.base.files import path_named_in
from vitscale.base.plugins import names
from vitscale.errors import RequestError, shown, unknown
from vitscale.study import library_models
from vitscale.trial.hints import meant_value
from vitscale.trial.library_names import LIBRARIES, library_name
from vitscale.trial.model_spec import NAMED_MODELS

_LONGEST_NAME = 200
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_HUB_PREFIX = re.compile(r"hf[-_]hub:", re.IGNORECASE)
"""How timm itself marks names of the hub."""
_HUB_ADDRESS = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", re.ASCII)


class Meaning(NamedTuple):
    """What a name stands for: one of two fields of `ModelSpec`."""

    name: str | None = None
    hf: str | None = None
    """A folder's absolute path, or a name on the hub."""


def meaning(study_path: Path, name: str) -> Meaning:
    """Return what the name of a model means that is neither vitscale's own nor an installed package's.

    Args:
        study_path: the study file; a folder is searched beside it.
        name: the name as the study has it.

    Raises:
        RequestError: nothing is known by this name, or it can mean several models.
    """
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise unknown("model", name, _own_names(), next_step="Name a model of at most 200 printable characters")
    address = _HUB_ADDRESS.match(name)
    if address is not None:
        raise RequestError(f"model.name {shown(name)} is an address", next_step=f'Write name = "{address[1]}"')
    plain_name = _HUB_PREFIX.sub("", name)
    folder = _configuration_folder(study_path, plain_name)
    library_model = library_name(plain_name)
    if folder is not None:
        _check_alone(plain_name, folder)
        return Meaning(hf=str(folder))
    if library_model is not None:
        library_models.check_installed(library_model)
        return Meaning(name=library_model.without_tag)
    if plain_name.startswith(tuple(f"{library}/" for library in LIBRARIES)):
        library = plain_name.partition("/")[0]
        raise RequestError(
            f"model.name {shown(name)} is no name of {library}'s, which have letters, digits and _",
            next_step=f'Write name = "{library}/..." with a name as {library} lists it',
        )
    own_name = _own_spelling(plain_name)
    is_name_of_library = _TORCHVISION_STYLE.fullmatch(plain_name) or library_models.libraries_with(plain_name)
    if own_name is not None and not is_name_of_library:
        return Meaning(name=own_name)
    if _HUB_ID.fullmatch(plain_name):
        return Meaning(hf=plain_name)
    return _meaning_of_word(plain_name)


def _own_names() -> set[str]:
    return {*NAMED_MODELS, *names("model")}


def _configuration_folder(study_path: Path, name: str) -> Path | None:
    """Return the folder beside the study file that holds a model's configuration; None where there is none."""
    folder = path_named_in(study_path, name)
    try:
        return folder if (folder / "config.json").is_file() else None
    except (OSError, ValueError):  # a name too long for a file
        return None


def _check_alone(name: str, folder: Path) -> None:
    """Refuse a name that is both that of a folder and of a model of timm or torchvision."""
    in_library = library_name(name) is not None
    libraries = library_models.libraries_with(name)
    if not in_library and not libraries:
        return
    library_choice = name if in_library else f"{libraries[0]}/{name}"
    raise RequestError(
        f"model.name {shown(name)} can mean the configuration in {folder} and {library_choice}",
        valid=[f'hf = "{name}" for the folder', f'name = "{library_choice}" once the folder has another name'],
    )


def _own_spelling(name: str) -> str | None:
    """Return vitscale's own model that a spelling means: "vit-b16" for "ViT-B/16" and "vit_b16"; None for others."""
    letters = _letters_and_digits(name)
    for own_name in NAMED_MODELS:
        if _letters_and_digits(own_name) == letters:
            return own_name
    return None


def _letters_and_digits(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _meaning_of_word(word: str) -> Meaning:
    """Return what a name without a library or an organisation in front means.

    A name that exactly one library has is taken at once, but only where both are installed: which of them has it would
    otherwise depend on the machine.

    Raises:
        RequestError: no model is known by this name, or several are.
    """
    libraries = library_models.libraries_with(word)
    choices = [f"{library}/{word}" for library in libraries]
    missing = [library for library in LIBRARIES if not library_models.is_installed(library)]
    if len(choices) == 1 and not missing:
        return Meaning(name=choices[0])
    if choices:
        listed = " or ".join(f'"{choice}"' for choice in choices)
        unread = f", and {missing[0]}, which is not installed, may have it too" if missing else ""
        raise RequestError(
            f"model.name {shown(word)} is a model of {' and of '.join(libraries)}{unread}",
            valid=choices,
            next_step=f"Write name = {listed}",
        )
    elsewhere = _names_elsewhere(word)
    if elsewhere:
        listed = " or ".join(f'"{choice}"' for choice in elsewhere)
        raise RequestError(f"unknown model {shown(word)}", valid=elsewhere, next_step=f"Write name = {listed}")
    raise unknown("model", word, _own_names(), next_step=meant_value("model.name", word) or _libraries_step(missing))


def _libraries_step(missing: Sequence[str]) -> str:
    """Return what else a name may be."""
    step = 'Or write "timm/...", "torchvision/...", a name of the hub with its organisation, or a folder'
    if missing:
        step += f"; not installed here: {' and '.join(missing)}"
    return step


_TIMM_SIZES = {"s": "small", "b": "base", "l": "large", "g": "giant", "h": "huge", "ti": "tiny", "t": "tiny"}
_DINOV2 = re.compile(r"dinov2_vit([sblg])14(_reg)?(?:_lc)?")
_DINOV3 = re.compile(r"dinov3_(vits16|vits16plus|vitb16|vitl16|vith16plus|vit7b16)")
_PAPERS_VIT = re.compile(r"(?:vit|deit)[-_]?(tiny|small|base|large|huge)[-_]patch(\d+)[-_](\d+)(?:\W.*|_.*)?")
_HUB_ORGANISATIONS: dict[str, str] = {
    r"vit-(base|large|huge)-patch\d+-\d+.*": "google",
    r"siglip2?-.*": "google",
    r"clip-vit-.*": "openai",
    r"(dinov2|dinov3|convnext|convnextv2|deit|hiera|regnet|vit-mae|vit-msn|levit)-.*": "facebook",
    r"(swin|swinv2|beit|resnet|cvt|focalnet)-.*": "microsoft",
    r"(segformer)-.*": "nvidia",
}
"""Names of the hub, as patterns -> the organisation that they lack."""


def _names_elsewhere(word: str) -> list[str]:
    """Return the names here of a model that its authors or another library call `word`, the likeliest first."""
    dinov2 = _DINOV2.fullmatch(word)
    if dinov2 is not None:
        size = _TIMM_SIZES[dinov2[1]]
        registers = "-with-registers" if dinov2[2] else ""
        reg4 = "_reg4" if dinov2[2] else ""
        return [f"facebook/dinov2{registers}-{size}", f"timm/vit_{size}_patch14{reg4}_dinov2"]
    dinov3 = _DINOV3.fullmatch(word)
    if dinov3 is not None:
        return [f"facebook/dinov3-{dinov3[1]}-pretrain-lvd1689m"]
    for pattern, organisation in _HUB_ORGANISATIONS.items():
        if re.fullmatch(pattern, word):
            return [f"{organisation}/{word}"]
    if library_models.is_installed("timm") and library_models.is_installed("torchvision"):
        return []
    return _likely_library_names(word)


_TORCHVISION_STYLE = re.compile(r"vit_[blh]_\d+|swin_(v2_)?[tsb]|maxvit_t|efficientnet_v2_[sml]|convnext_(tiny|small)")
_TIMM_STYLE = re.compile(r"\w+_patch\d+\w*|(tf|test|legacy|hf)_\w+|convnextv2_\w+|dm_nfnet\w+|eva02?_\w+")


def _likely_library_names(word: str) -> list[str]:
    """Return the libraries' names that a word looks like, where not both are installed so that it can be looked up."""
    if _TORCHVISION_STYLE.fullmatch(word):
        return [f"torchvision/{word}"]
    if _TIMM_STYLE.fullmatch(word):
        own_names = [own_name] if (own_name := _own_size(word)) else []
        return [f"timm/{word}", *own_names]
    if re.fullmatch(r"(resnet|resnext|wide_resnet|convnext|efficientnet|mobilenet|densenet|vgg|regnet|swin)\w*", word):
        return [f"timm/{word}", f"torchvision/{word}"]
    return []


def _own_size(word: str) -> str | None:
    """Return vitscale's own model of the shape that a name of a ViT says; None where there is none."""
    match = _PAPERS_VIT.fullmatch(word)
    if match is None:
        return None
    own_name = f"vit-{'ti' if match[1] == 'tiny' else match[1][0]}{match[2]}"
    return own_name if own_name in NAMED_MODELS else None


def note(written: str | None, *, name: str | None, hf: str | None) -> str:
    """Return what to say where a name stands for another one; empty where the study names the model itself.

    Args:
        written: `model.name` as the study has it.
        name: the name of the model that is trained, if it has one.
        hf: its folder or name on the hub, if it has one.
    """
    if written is None or written == name:
        return ""
    library_model = library_name(_HUB_PREFIX.sub("", written))
    if library_model is not None and library_model.without_tag == name:
        if not library_model.tag:
            return f'model.name = "{written}" is taken as "{name}"'
        return (
            f'model.name = "{written}" names weights by "{library_model.tag}", and weights start random: for these '
            f'weights set model.weights = "timm/{library_model.model}.{library_model.tag}"'
        )
    if name is not None:
        return f'model.name = "{written}" is taken as "{name}"'
    is_spelled_otherwise = hf is not None and _HUB_PREFIX.match(written) is not None
    return f'model.name = "{written}" is taken as "{hf}"' if is_spelled_otherwise else ""
