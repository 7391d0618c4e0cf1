"""The models that the installed timm and torchvision have, as their source files list them.

Their source is read as text, because importing them takes seconds, and torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path

from vitscale.base.distribution import install_command
from vitscale.errors import RequestError, shown
from vitscale.trial.library_names import LIBRARIES, Library, LibraryName

_DECLARATIONS: dict[Library, re.Pattern[str]] = {
    "timm": re.compile(r"^@register_model\ndef (\w+)\(", re.MULTILINE),
    "torchvision": re.compile(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)\(", re.MULTILINE),
}
"""How a library's source declares a model of a name. torchvision's detectors lie in subfolders, which are not read."""
_MOST_SUGGESTIONS = 5


def is_installed(library: str) -> bool:
    """Whether a package is there to be imported; it is not imported."""
    return _folder(library) is not None


@cache
def models_of(library: Library) -> frozenset[str]:
    """Return the names of all classifiers that a library has; none where it is not installed."""
    declaration = _DECLARATIONS[library]
    names: set[str] = set()
    for source_text in _source_texts(library):
        names.update(declaration.findall(source_text))
    return frozenset(names)


def libraries_with(model: str) -> list[Library]:
    """Return the installed libraries that have a model of exactly this name."""
    return [library for library in LIBRARIES if model in models_of(library)]


def check_installed(name: LibraryName, field: str = "model.name") -> None:
    """Check that the library is installed, and has the model and its tag. `field` has the name, for messages.

    Raises:
        RequestError: the library is missing (the next step names what installs it), or has no such model or tag.
    """
    library = name.library
    subject = f"{field} {shown(name.without_tag)}"
    if not is_installed(library):
        raise RequestError(f"{subject} needs {library}, which is not installed", next_step=install_step(library))
    models = models_of(library)
    if name.model not in models:
        raise RequestError(
            f"{subject}: the installed {library} has no model {shown(name.model)}",
            valid=[f"{library}/{model}" for model in _nearest_names(name.model, models)],
            next_step=f"Correct the name; the installed {library} has {len(models):,} classifiers",
        )
    if name.tag:
        _check_tag(name, field)


def install_step(library: str) -> str:
    """Return the next step where a library is missing."""
    return f"Run {install_command(library)}"


def _nearest_names(model: str, models: frozenset[str]) -> list[str]:
    """Return some names like `model`, the nearest first; the first ones of the alphabet where none is like it."""
    sorted_names = sorted(models)
    like_names = difflib.get_close_matches(model, sorted_names, n=_MOST_SUGGESTIONS)
    return like_names or sorted_names[:_MOST_SUGGESTIONS]


def _check_tag(name: LibraryName, field: str) -> None:
    """Refuse a pretrained tag that the library does not know for the model."""
    tags = _tags(name)
    if name.tag in tags:
        return
    raise RequestError(
        f"{field}: {name.library} knows no weights {shown(name.tag)} of {name.without_tag}",
        valid=[f"{name.without_tag}.{tag}" for tag in tags[:_MOST_SUGGESTIONS]],
        next_step=f'Write "{name.without_tag}"; a tag changes nothing in the model',
    )


def _tags(name: LibraryName) -> list[str]:
    """Return the pretrained tags of a model of timm in its source's order; none for torchvision, which has no tags."""
    if name.library != "timm":
        return []
    # A key of a dict; a star marks the default tag: "vit_base_patch16_224.augreg2_in21k_ft_in1k*":
    tag_pattern = re.compile(rf"""["']{re.escape(name.model)}\.([\w.]+)\*?["']\s*:""")
    tags: list[str] = []
    for source_text in _source_texts("timm"):
        tags += tag_pattern.findall(source_text)
    return tags


@cache
def _source_texts(library: Library) -> list[str]:
    """Return the texts of the files in which a library declares models; none where it is not installed."""
    folder = _folder(library)
    if folder is None:
        return []
    paths = sorted((folder / "models").glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths]


def _folder(library: str) -> Path | None:
    """Return the folder of an installed package; None where there is none."""
    try:
        spec = importlib.util.find_spec(library)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])
