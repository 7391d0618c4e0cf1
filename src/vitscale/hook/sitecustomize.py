"""Entry of the hook: Python runs it at the start of each interpreter that finds it in PYTHONPATH.

It runs the sitecustomize that it shadows, and watches for the modules of torch and DeepSpeed that the hook times. The
hook itself is loaded with the first of them, so a process without torch pays for this file alone.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

PACKAGE = "vitscale_hook"
WATCHED_MODULES = frozenset(
    (
        "torch.autograd",
        "torch.optim.optimizer",
        "torch.serialization",
        "torch.utils.data.dataloader",
        "deepspeed.runtime.engine",
    )
)


class WatchingFinder:
    """Finder before all others, which has the hook installed in a watched module as soon as that has been executed."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a watched module as the other finders have it; None for any other module."""
        if name not in WATCHED_MODULES:
            return None
        spec = self._spec_of_others(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._watch(spec.loader)
        return spec

    def _spec_of_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        """Replace exec_module of this one loader until it has run; a loader that allows no attribute stays as it is."""
        execute = loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._install(module)

        try:
            loader.exec_module = execute_and_install
        except AttributeError:
            return

    def _install(self, module: ModuleType) -> None:
        """Install the hook in the module; a hook that fails here leaves the program as it is."""
        try:
            _load_package(self._folder)
            from vitscale_hook.installing import install  # type: ignore[import-not-found]

            install(module, self._folder)
        except Exception:  # noqa: S110, the program must never notice the hook
            pass


def _load_package(folder: str) -> None:
    """Load the hook's package from its folder, whatever the program has made of sys.path since."""
    if PACKAGE in sys.modules:
        return
    package_folder = os.path.join(folder, PACKAGE)
    spec = spec_from_file_location(
        PACKAGE, os.path.join(package_folder, "__init__.py"), submodule_search_locations=[package_folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(PACKAGE)
    package = module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)


def _run_shadowed_sitecustomize(folder: str) -> None:
    """Run the sitecustomize that Python would run without the hook, in the place of this module.

    It may raise anything: Python reports that as it does without the hook.
    """
    other_entries = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    spec = PathFinder.find_spec("sitecustomize", other_entries)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _start() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.meta_path.insert(0, WatchingFinder(folder))
    _run_shadowed_sitecustomize(folder)


if __name__ == "sitecustomize":
    _start()
