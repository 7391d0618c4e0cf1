"""Cards of models in the user's cache: a file for each, named by all that the card depends on.

These are the request, and the versions of the libraries that build and trace the model. The card of a factory is not
cached: its model depends on all modules that its module imports, of which nobody knows a digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from vitscale.base.distribution import versions_of
from vitscale.base.files import open_regular, whole_file
from vitscale.study.tracer_process import LARGEST_CARD_BYTES
from vitscale.trial.model_card import TRACER_VERSION, ModelCard, TraceRequest

BUILDERS = ("torch", "transformers", "timm", "torchvision")
"""Libraries whose versions may change what a model is."""


def read_card(request: TraceRequest) -> ModelCard | None:
    """Return a cached card; None where there is none, or where the file is no card of this request."""
    path = cached_path(request)
    if path is None:
        return None
    try:
        with open_regular(path, largest_bytes=LARGEST_CARD_BYTES) as file:
            card = ModelCard.model_validate_json(file.read())
    except (OSError, ValueError):
        return None
    return card if card.request == request else None


def write_card(card: ModelCard) -> None:
    """Cache a card, where the user has a folder for caches that can be written."""
    path = cached_path(card.request)
    if path is None:
        return
    with contextlib.suppress(OSError), whole_file(path, make_folder=True) as file:
        file.write(card.model_dump_json().encode())


def cached_path(request: TraceRequest) -> Path | None:
    """Return where a request's card is cached; the name covers everything that the card depends on.

    None for a factory's card, which is not cached, and for a user without a folder for caches.
    """
    cache = _cache_folder()
    if request.model.factory is not None or cache is None:
        return None
    versions = versions_of(BUILDERS) | {"tracer": TRACER_VERSION}
    identity = json.dumps({"request": request.model_dump(mode="json"), "versions": versions}, sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return cache / "vitscale" / "cards" / f"{digest[:32]}.json"


def _cache_folder() -> Path | None:
    """Return the user's folder for caches (XDG Base Directory Specification, which ignores relative paths)."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if folder.is_absolute():
        return folder
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the user has no entry in the system's table of users
        return None
