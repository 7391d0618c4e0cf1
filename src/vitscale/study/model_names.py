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
from vitscale.trial.library_names import LIBRARIES, LibraryName, library_name
from vitscale.trial.model_spec import NAMED_MODELS

_LONGEST_NAME = 200
_LIBRARY_PREFIXES = tuple(f"{library}/" for library in LIBRARIES)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_HUB_PREFIX = re.compile(r"hf[-_]hub:", re.IGNORECASE)
"""How timm itself marks names of the hub."""
_HUB_ADDRESS = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", re.ASCII)


class Meaning(NamedTuple):
    """What a name stands for: one of two fields of `ModelSpec`."""

    name: str | None = None
    hf: str | None = None
    """A folder's absolute path, or a name on the hub."""


class NameSource(NamedTuple):
    """Where a user names a model, for messages: a study or an option of the command line."""

    field: str
    """ "model.name" or "--model"."""
    assignment: str
    """How a name is given there, with {} for it: 'name = "{}"'."""
    folder_assignment: str
    """How a folder beside the study, or in the working directory, is given where its name can mean something else."""

    def giving(self, name: str) -> str:
        """Return how a name is given there: 'name = "vit-b16"' or "--model vit-b16"."""
        return self.assignment.format(name)


IN_STUDY = NameSource("model.name", 'name = "{}"', 'hf = "{}"')
BY_OPTION = NameSource("--model", "--model {}", "--model ./{}")


def meaning(study_path: Path, name: str, source: NameSource = IN_STUDY) -> Meaning:
    """Return what the name of a model means that is neither vitscale's own nor an installed package's.

    It means the first of these that it can: a folder beside the study file, a model of the library in front of it, one
    of vitscale's own models in another spelling, a name of the hub, a model that only one library has.

    Args:
        study_path: the study file; a folder is searched beside it.
        name: the name as the study has it.
        source: where it stands.

    Raises:
        RequestError: nothing is known by this name, or it can mean several models.
    """
    _check_form(name, source)
    plain_name = _HUB_PREFIX.sub("", name)
    folder = _configuration_folder(study_path, plain_name)
    if folder is not None:
        _check_no_model_of_library(plain_name, folder, source)
        return Meaning(hf=str(folder))
    if plain_name.startswith(_LIBRARY_PREFIXES):
        return _meaning_of_library_name(plain_name, study_name=name, source=source)
    own_name = _own_name_spelled(plain_name)
    if own_name is not None:
        return Meaning(name=own_name)
    if _HUB_ID.fullmatch(plain_name):
        return Meaning(hf=plain_name)
    return _meaning_of_word(plain_name, source)


def _check_form(name: str, source: NameSource) -> None:
    """Refuse what is no name at all: a text that is too long or has control characters, and the address of a page."""
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise unknown("model", name, _own_names(), next_step="Name a model of at most 200 printable characters")
    address = _HUB_ADDRESS.match(name)
    if address is not None:
        raise RequestError(
            f"{source.field} {shown(name)} is an address", next_step=f"Write {source.giving(address[1])}"
        )


def _own_names() -> set[str]:
    return {*NAMED_MODELS, *names("model")}


def _configuration_folder(study_path: Path, name: str) -> Path | None:
    """Return the folder beside the study file that holds a model's configuration; None where there is none."""
    folder = path_named_in(study_path, name)
    try:
        return folder if (folder / "config.json").is_file() else None
    except (OSError, ValueError):  # a name too long for a file
        return None


def _check_no_model_of_library(name: str, folder: Path, source: NameSource) -> None:
    """Refuse the name of a folder that is also the name of a model of timm or torchvision."""
    library_choice = _name_with_library(name)
    if library_choice is None:
        return
    raise RequestError(
        f"{source.field} {shown(name)} can mean the configuration in {folder} and {library_choice}",
        valid=[
            f"{source.folder_assignment.format(name)} for the folder",
            f"{source.giving(library_choice)} once the folder has another name",
        ],
    )


def _name_with_library(name: str) -> str | None:
    """Return a name with its library in front: "timm/resnet50" for itself and for "resnet50"; None for other names."""
    if library_name(name) is not None:
        return name
    libraries = library_models.libraries_with(name)
    return f"{libraries[0]}/{name}" if libraries else None


def _meaning_of_library_name(name: str, *, study_name: str, source: NameSource) -> Meaning:
    """Return the model that a name beginning with "timm/" or "torchvision/" means.

    Args:
        name: the name without a prefix of the hub.
        study_name: the name as the study has it, for the message.
        source: where it stands.

    Raises:
        RequestError: it has not the form of such a name, or the library is missing or has no such model.
    """
    library_model = library_name(name)
    if library_model is None:
        library = name.partition("/")[0]
        raise RequestError(
            f"{source.field} {shown(study_name)} is no name of {library}'s, which have letters, digits and _",
            next_step=f"Write {source.giving(f'{library}/...')} with a name as {library} lists it",
        )
    library_models.check_installed(library_model, source.field)
    return Meaning(name=library_model.without_tag)


def _own_name_spelled(name: str) -> str | None:
    """Return vitscale's own model that a spelling means: "vit-b16" for "ViT-B/16" and "vit_b16"; None for others.

    A library's exact name is no spelling of ours: torchvision's "vit_b_16" is another model than "vit-b16".
    """
    is_name_of_library = _TORCHVISION_STYLE.fullmatch(name) or library_models.libraries_with(name)
    if is_name_of_library:
        return None
    letters = _letters_and_digits(name)
    for own_name in NAMED_MODELS:
        if _letters_and_digits(own_name) == letters:
            return own_name
    return None


def _letters_and_digits(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _meaning_of_word(word: str, source: NameSource) -> Meaning:
    """Return the model of a library that a name without its library in front means.

    A name that exactly one library has is taken, but only where both are installed: which of them has it would
    otherwise depend on the machine.

    Raises:
        RequestError: no library has a model of this name, both have one, or a missing library may have one.
    """
    libraries = library_models.libraries_with(word)
    missing = [library for library in LIBRARIES if not library_models.is_installed(library)]
    if len(libraries) == 1 and not missing:
        return Meaning(name=f"{libraries[0]}/{word}")
    if libraries:
        raise _several_libraries(word, libraries, missing, source)
    likely_names = _names_elsewhere(word)
    if likely_names:
        step = _step_to_write(likely_names, source)
        raise RequestError(f"unknown model {shown(word)}", valid=likely_names, next_step=step)
    hint = meant_value(source.field, word)  # in words of a study; none for an option
    raise unknown("model", word, _own_names(), next_step=hint or _libraries_step(missing))


def _several_libraries(word: str, libraries: Sequence[str], missing: Sequence[str], source: NameSource) -> RequestError:
    """Return the error for a model that several libraries have or may have.

    Args:
        word: the model's name, without a library in front.
        libraries: installed libraries that have it.
        missing: libraries that are not installed.
        source: where the name stands.
    """
    may_have_it = f", and {missing[0]}, which is not installed, may have it too" if missing else ""
    choices = [f"{library}/{word}" for library in libraries]
    return RequestError(
        f"{source.field} {shown(word)} is a model of {' and of '.join(libraries)}{may_have_it}",
        valid=choices,
        next_step=_step_to_write(choices, source),
    )


def _step_to_write(names: Sequence[str], source: NameSource) -> str:
    """Return the next step that offers names: 'Write name = "timm/resnet50" or "torchvision/resnet50"'."""
    first_name, *others = names
    quote = '"' if source.assignment.endswith('"') else ""
    return " or ".join([f"Write {source.giving(first_name)}", *(f"{quote}{name}{quote}" for name in others)])


def _libraries_step(missing: Sequence[str]) -> str:
    """Return the next step that lists what else a name may be, and the libraries that are not installed."""
    step = 'Or write "timm/...", "torchvision/...", a name of the hub with its organisation, or a folder'
    if missing:
        step += f"; not installed here: {' and '.join(missing)}"
    return step


_DINOV2_SIZES = {"s": "small", "b": "base", "l": "large", "g": "giant"}
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
        return _dinov2_names(_DINOV2_SIZES[dinov2[1]], has_registers=dinov2[2] is not None)
    dinov3 = _DINOV3.fullmatch(word)
    if dinov3 is not None:
        return [f"facebook/dinov3-{dinov3[1]}-pretrain-lvd1689m"]
    for pattern, organisation in _HUB_ORGANISATIONS.items():
        if re.fullmatch(pattern, word):
            return [f"{organisation}/{word}"]
    if library_models.is_installed("timm") and library_models.is_installed("torchvision"):
        return []  # neither has the word, or it would have been taken
    return _likely_library_names(word)


def _dinov2_names(size: str, *, has_registers: bool) -> list[str]:
    """Return the names on the hub and in timm of a DINOv2 of a size such as "base"."""
    if has_registers:
        return [f"facebook/dinov2-with-registers-{size}", f"timm/vit_{size}_patch14_reg4_dinov2"]
    return [f"facebook/dinov2-{size}", f"timm/vit_{size}_patch14_dinov2"]


_TORCHVISION_STYLE = re.compile(r"vit_[blh]_\d+|swin_(v2_)?[tsb]|maxvit_t|efficientnet_v2_[sml]|convnext_(tiny|small)")
_TIMM_STYLE = re.compile(r"\w+_patch\d+\w*|(tf|test|legacy|hf)_\w+|convnextv2_\w+|dm_nfnet\w+|eva02?_\w+")


def _likely_library_names(word: str) -> list[str]:
    """Return the libraries' names that a word looks like, where not both are installed so that it can be looked up."""
    if _TORCHVISION_STYLE.fullmatch(word):
        return [f"torchvision/{word}"]
    if _TIMM_STYLE.fullmatch(word):
        own_name = _own_model_of_shape(word)
        return [f"timm/{word}"] if own_name is None else [f"timm/{word}", own_name]
    if re.fullmatch(r"(resnet|resnext|wide_resnet|convnext|efficientnet|mobilenet|densenet|vgg|regnet|swin)\w*", word):
        return [f"timm/{word}", f"torchvision/{word}"]
    return []


def _own_model_of_shape(word: str) -> str | None:
    """Return vitscale's model of the size and patch that a name states: "vit-b16" for "vit_base_patch16_224".

    None where the name has another form, or vitscale has no such model.
    """
    match = _PAPERS_VIT.fullmatch(word)
    if match is None:
        return None
    size = match[1]
    size_letters = "ti" if size == "tiny" else size[0]
    own_name = f"vit-{size_letters}{match[2]}"
    return own_name if own_name in NAMED_MODELS else None


def note(study_name: str | None, *, name: str | None, hf: str | None) -> str:
    """Return what to say where a name stands for another one; empty where the study names the model itself.

    Args:
        study_name: `model.name` as the study has it.
        name: the `name` that `meaning` made of it; None where it made an `hf`.
        hf: the folder or the name on the hub that `meaning` made of it, if it did.
    """
    if study_name is None or study_name == name:
        return ""
    if name is not None:
        tagged_model = _tagged_model(study_name, name)
        if tagged_model is not None:
            return _tag_note(study_name, tagged_model)
        return _taken_as(study_name, name)
    if hf is not None and _HUB_PREFIX.match(study_name):
        return _taken_as(study_name, hf)
    return ""  # a folder's path or a name of the hub, which only moved into another field


def _tagged_model(study_name: str, name: str) -> LibraryName | None:
    """Return the model of a library that a study names with a pretrained tag, where it is `name`; else None."""
    library_model = library_name(_HUB_PREFIX.sub("", study_name))
    if library_model is None or library_model.without_tag != name:
        return None
    return library_model if library_model.tag else None


def _taken_as(study_name: str, meant_name: str) -> str:
    """Return the note that a name is read as another one."""
    return f'model.name = "{study_name}" is taken as "{meant_name}"'


def _tag_note(study_name: str, tagged_model: LibraryName) -> str:
    """Return the note that a tag names weights, which are not loaded by it."""
    return (
        f'model.name = "{study_name}" names weights by "{tagged_model.tag}", and weights start random: for these '
        f'weights set model.weights = "timm/{tagged_model.model}.{tagged_model.tag}"'
    )
