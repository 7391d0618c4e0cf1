from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launching import hosts, launch, world
from vitscale.errors import RequestError
from vitscale.launchers import LAUNCHERS, find_launcher, launcher_named

PLUGIN = """
from dataclasses import replace


class Flux:
    def launch(self, world, spawn):
        return replace(spawn, commands=(("flux", "run", f"-n{world.size}", *spawn.rank_command),))

    def unavailable(self):
        return None

    def unfit(self, world, hosts):
        return "it is for one node" if world.nodes > 1 else None


an_object = Flux()
"""

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lays a package with one entry point on sys.path, as pip would."""

    def install(target: str, source: str = PLUGIN) -> None:
        site = tmp_path / "site"
        information = site / "flux_for_vitscale-1.0.dist-info"
        information.mkdir(parents=True)
        (site / "flux_plugin.py").write_text(source)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: flux-for-vitscale\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[vitscale.launchers]\nflux = {target}\ntorchrun = {target}\n")
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, "flux_plugin", raising=False)

    return install


@pytest.mark.parametrize("target", ["flux_plugin:Flux", "flux_plugin:an_object"])
def test_another_packages_launcher_is_loaded_when_named(install: Install, target: str) -> None:
    install(target, PLUGIN)
    assert find_launcher("torchrun") is LAUNCHERS["torchrun"], "ours cannot be replaced"
    with pytest.raises(RequestError, match="Valid: deepspeed, flux, local, mpirun, srun, torchrun"):
        find_launcher("fluxx")
    assert "flux_plugin" not in sys.modules, "it is not imported before it is named"

    flux = launcher_named("flux", world(1, 4))
    assert launch(flux, world(1, 4)).commands[0][:3] == ("flux", "run", "-n4")
    with pytest.raises(RequestError, match=r"launch.launcher = 'flux' cannot be used: it is for one node"):
        launcher_named("flux", world(2, 4), hosts(2))


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        ("flux_plugin:Flux", "import a_module_that_is_not_there", "ModuleNotFoundError: No module named"),
        ("flux_plugin:Flux", "raise SystemExit('sorry')", "SystemExit: sorry"),
        ("flux_plugin:Flux", "Flux = 3", "it has no launch and no unavailable and no unfit"),
        ("flux_plugin:Flux", "class Flux:\n    def __init__(self, queue): ...", "TypeError: "),
        ("flux_plugin:Fluxx", PLUGIN, "AttributeError: "),
        ("flux plugin", PLUGIN, "cannot be loaded"),
    ],
)
def test_a_broken_one_is_a_message(install: Install, target: str, source: str, said: str) -> None:
    install(target, source)
    with pytest.raises(RequestError) as caught:
        find_launcher("flux")
    assert str(caught.value).startswith(f"launcher 'flux' of flux-for-vitscale ({target}) cannot be loaded: ")
    assert said in str(caught.value)
    assert str(caught.value).endswith("Repair or remove that package, or use another launcher.")
    assert find_launcher("torchrun")
