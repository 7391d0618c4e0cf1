from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launching import hosts, launch, world
from results_factory import rich_study
from study_factory import expanded
from vitscale import engines, sources
from vitscale.analysis import analyse
from vitscale.errors import RequestError
from vitscale.importers.contents import ImportOptions
from vitscale.importers.importing import import_logs
from vitscale.launchers import LAUNCHERS, Spawn, find_launcher, usable_launcher, with_launch_commands
from vitscale.pages.outputs import Reported, package_figures
from vitscale.runner.one_run import refuse_elsewhere
from vitscale.schedulers import LocalHost, make_scheduler
from vitscale.study.sections import LaunchSection, SlurmSection
from vitscale.trial.trial import DataSpec

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

Install = Callable[..., None]


def _name_of(kind: str) -> str:
    """The name that the package offers; of schedulers `flux` is one of ours."""
    return "oar" if kind == "scheduler" else "flux"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lays a package with an entry point of one kind on sys.path, as pip would."""

    def install(target: str, source: str = PLUGIN, kind: str = "launcher", package: str = "flux-for-vitscale") -> None:
        site = tmp_path / "site"
        information = site / f"{package.replace('-', '_')}-1.0.dist-info"
        information.mkdir(parents=True)
        (site / "flux_plugin.py").write_text(source)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        name = _name_of(kind)
        (information / "entry_points.txt").write_text(f"[vitscale.{kind}s]\n{name} = {target}\ntorchrun = {target}\n")
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

    flux = usable_launcher("flux", world(1, 4))
    assert launch(flux, world(1, 4)).commands[0][:3] == ("flux", "run", "-n4")
    with pytest.raises(RequestError, match=r"launch.launcher = 'flux' cannot be used: it is for one node"):
        usable_launcher("flux", world(2, 4), hosts(2))


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


def test_a_name_of_two_packages_is_refused_with_both(install: Install, tmp_path: Path) -> None:
    install("flux_plugin:Flux")
    shutil.copytree(tmp_path / "site", tmp_path / "again")
    sys.path.append(str(tmp_path / "again"))  # `install` has its path restored
    assert find_launcher("flux"), "one distribution that is listed twice is no clash"
    install("flux_plugin:an_object", package="another-flux")
    with pytest.raises(
        RequestError, match="launcher 'flux' is offered by several packages: another-flux and flux-for-vitscale"
    ):
        find_launcher("flux")
    assert find_launcher("torchrun") is LAUNCHERS["torchrun"], "ours is ours"


def checked(_: Path) -> object:
    return sources.check(DataSpec(name="flux"))


def prepared(_: Path) -> None:
    sources.prepare(DataSpec(name="flux"))


def planned(folder: Path) -> object:
    launcher = usable_launcher("flux", world(1, 4))
    return with_launch_commands("flux", launcher, world(1, 4), Spawn((("python",),), folder))


def scheduled(folder: Path) -> object:
    return make_scheduler("oar", LaunchSection(), SlurmSection(), None, folder)


def read(folder: Path) -> object:
    return import_logs([folder], "flux", ImportOptions(), folder / "results")


def drawn(_: Path) -> object:
    return package_figures(["flux"], Reported(analyse(rich_study())))


SOURCE = "class Flux:\n  def check(self, spec): {}\n  def load(self, spec, root): {}\n"
LAUNCHER = """
class Flux:
    def unavailable(self): {}
    def unfit(self, world, hosts): {}
    def launch(self, world, spawn): {}
"""
FUNCTION = "def Flux(*asked):\n  {}\n"
VIEW = "from vitscale.present.document import Figure, FigureView\n" + FUNCTION.format(
    "return Figure('f', 'F', (FigureView('v', {}, '', '', {'mark': 'point'}, {}, ''),))"
)
NO_LICENCE = "OSError: no licence (flux_plugin.py, line "


@pytest.mark.parametrize(
    ("kind", "use", "source", "said"),
    [
        ("dataset", checked, SOURCE.format("return 64", "..."), "it returned 64, and no Summary"),
        ("dataset", checked, SOURCE.format("raise OSError('no licence')", "..."), NO_LICENCE),
        ("dataset", prepared, SOURCE.format("...", "raise OSError('no licence')"), NO_LICENCE),
        ("dataset", prepared, SOURCE.format("...", "return None"), "it returned None, and no Dataset"),
        ("launcher", planned, LAUNCHER.format("raise OSError('no licence')", "...", "..."), NO_LICENCE),
        ("launcher", planned, LAUNCHER.format("...", "return 3", "..."), "it returned 3, and no str or None"),
        ("launcher", planned, LAUNCHER.format("...", "...", "raise OSError('no licence')"), NO_LICENCE),
        ("launcher", planned, LAUNCHER.format("...", "...", "..."), "it returned None, and no Spawn"),
        ("scheduler", scheduled, FUNCTION.format("..."), "it returned None, and no Placement or Submitter"),
        ("scheduler", scheduled, FUNCTION.format("raise OSError('no licence')"), NO_LICENCE),
        ("importer", read, FUNCTION.format("raise OSError('no licence')"), NO_LICENCE),
        ("importer", read, FUNCTION.format("return []"), "it returned [], and no LogContents"),
        ("chart", drawn, FUNCTION.format("raise OSError('no licence')"), NO_LICENCE),
        ("chart", drawn, FUNCTION.format("return 'png'"), "it returned 'png', and no Figure or None"),
        ("chart", drawn, VIEW, "spec of view 'v' has no datasets.rows, the rows of its table"),
    ],
)
def test_one_that_raises_or_returns_something_else_is_a_message(
    install: Install, tmp_path: Path, kind: str, use: Callable[[Path], object], source: str, said: str
) -> None:
    install("flux_plugin:Flux", source, kind)
    with pytest.raises(RequestError) as caught:
        use(tmp_path)
    told = str(caught.value)
    assert told.startswith(f"{kind} '{_name_of(kind)}' of flux-for-vitscale (flux_plugin:Flux) failed: ")
    assert said in told
    assert told.endswith(f"Repair or remove that package, or use another {kind}.")


ENGINE = """
from vitscale.engines.facts import EngineFacts

Flux = EngineFacts(engine="flux_plugin:{}", packages=({}))


class Engine: ...
"""


@pytest.fixture
def fresh_facts() -> Iterator[None]:
    """Facts of engines are kept by name."""
    engines.of_engine.cache_clear()
    yield
    engines.of_engine.cache_clear()


@pytest.mark.usefixtures("fresh_facts")
def test_what_an_engine_needs_is_told_with_the_package_that_offers_it(install: Install) -> None:
    install("flux_plugin:Flux", ENGINE.format("Engine", "'no-such-package',"), "engine")
    with pytest.raises(RequestError) as caught:
        refuse_elsewhere(LocalHost(), iter(["ddp", "flux"]))
    assert str(caught.value) == (
        "ranks on this machine need no-such-package, which is not installed. "
        "Install no-such-package, which engine 'flux' of flux-for-vitscale needs."
    )


METER = "class Flux:\n    def begin(self, device): ...\n"
MODEL = "def Flux({}): ...\n"


@pytest.mark.usefixtures("fresh_facts")
@pytest.mark.parametrize(
    ("kind", "changes", "source", "said"),
    [
        ("meter", {"measure": {"meters": ["flux"]}}, METER, "has no end"),
        ("meter", {"measure": {"meters": ["flux"]}}, "Flux = 'x'", "is a constant"),
        ("meter", {"measure": {"meters": ["flux"]}}, "Fluxx = 'x'", "has no 'Flux'. Valid: Fluxx"),
        ("meter", {"measure": {"meters": ["flux"]}}, METER + "    def end(self): ...", ""),
        ("meter", {"measure": {"meters": ["flux"]}}, "class Flux(Base): ...\nclass Base: ...", ""),
        ("engine", {"train": {"engine": "flux"}}, ENGINE.format("Enginee", ""), "has no 'Enginee'"),
        ("engine", {"train": {"engine": "flux"}}, ENGINE.format("Engine", ""), ""),
        ("model", {"model": {"name": "flux"}}, "Flux = 'x'", "is a constant"),
        ("model", {"model": {"name": "flux"}}, MODEL.format("size"), "arguments num_classes and image_size"),
        ("model", {"model": {"name": "flux"}}, MODEL.format("num_classes, image_size"), ""),
        ("model", {"model": {"name": "flux"}}, MODEL.format("**sizes"), ""),
    ],
)
def test_what_only_ranks_load_is_looked_at_before_they_start_without_importing_it(
    install: Install, tmp_path: Path, kind: str, changes: dict[str, dict[str, Any]], source: str, said: str
) -> None:
    install("flux_plugin:Flux", source, kind)
    changes = {"scaling": {"gpus": [1]}, **changes}
    if kind == "model":
        changes["model"] |= {"patch_size": None}
    if not said:
        assert expanded(tmp_path, changes).trials
    else:
        with pytest.raises(RequestError) as caught:
            expanded(tmp_path, changes)
        told = str(caught.value)
        assert said in told
        who = (
            "model.factory 'flux_plugin:Flux'"
            if kind == "model"
            else f"{kind} 'flux' of flux-for-vitscale (flux_plugin:"
        )
        assert told.startswith(who)
    assert kind == "engine" or "flux_plugin" not in sys.modules
