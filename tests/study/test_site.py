from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from study_factory import write_study
from vitscale.errors import RequestError
from vitscale.study.file import Overlay, StudyFile, overlay, read_site
from vitscale.study.sections import Study

SITE = """
[launch]
launcher = "mpirun"
hostfile = "hosts"
interface = "eth0"
[slurm]
partition = "gpu"
[node]
cores = 64
gpus = 4
"""


def site(folder: Path, text: str = SITE) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "site.toml"
    path.write_text(text)
    return path


def put_over(path: Path | None, **given: Any) -> Overlay:
    return overlay(path, **({"launcher": None, "scheduler": None, "hostfile": None} | given))


def study(folder: Path, over: Overlay, changes: dict[str, dict[str, Any]] | None = None) -> Study:
    return StudyFile.read(write_study(folder, changes), over).study


def refusal(folder: Path, over: Overlay, changes: dict[str, dict[str, Any]] | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        study(folder, over, changes)
    return str(caught.value)


def test_the_command_line_comes_over_the_site_file_and_that_over_the_study(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {"launch": {"launcher": "deepspeed", "threads_per_rank": 2}}
    changes["slurm"] = {"time": "10"}
    over = put_over(site(tmp_path / "cluster"), launcher="torchrun", scheduler="hostfile")
    found = study(tmp_path, over, changes)
    assert (found.launch.launcher, found.launch.scheduler) == ("torchrun", "hostfile")
    assert (found.launch.interface, found.launch.threads_per_rank) == ("eth0", 2)
    assert (found.slurm.partition, found.slurm.time) == ("gpu", "10")
    assert found.node is not None
    assert (found.node.cores, found.node.gpus) == (64, 4)
    assert study(tmp_path, put_over(None), changes).launch.launcher == "deepspeed"


def test_a_hostfile_is_beside_the_file_that_names_it_or_where_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    path = site(tmp_path / "cluster")
    assert put_over(path)["launch"]["hostfile"] == f"{tmp_path}/cluster/hosts"
    assert put_over(path, hostfile=Path("hosts"))["launch"]["hostfile"] == f"{tmp_path}/hosts"
    assert put_over(Path("cluster/site.toml"))["launch"]["hostfile"] == f"{tmp_path}/cluster/hosts"
    home = site(tmp_path / "cluster", '[launch]\nhostfile = "~/hosts"')
    assert put_over(home)["launch"]["hostfile"] == "/home/someone/hosts"


def test_nothing_given_puts_nothing_over(tmp_path: Path) -> None:
    assert put_over(None) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nmicro_batch = 4", "has a section 'train'. Valid: [launch], [slurm], [kubernetes], [node]. What"),
        ("name = 'x'", "has a key 'name' outside a section. Valid: [launch]"),
        ("launch = 3", "has a key 'launch' outside a section"),
        ("[[launch]]", "has a key 'launch' outside a section"),
        ("x = [", "is not TOML: "),
        ("", "is empty"),
        ("[launch]\nhostfile = '~nosuchuser/x'", "the path '~nosuchuser/x'"),
        ("x." * 400_000 + "y = 1", "is not TOML: it is nested too deeply"),
        ("[launch]\nx = " + "[" * 50_000, "is not TOML"),
    ],
)
def test_what_is_no_site_file_is_one_message(tmp_path: Path, text: str, said: str) -> None:
    path = site(tmp_path / "cluster", text)
    with pytest.raises(RequestError) as caught:
        read_site(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_site_file_that_is_not_there_is_named() -> None:
    with pytest.raises(RequestError, match=r"site file '/none.toml' cannot be read: No such file .* Give a TOML file"):
        read_site(Path("/none.toml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[launch]\nlauncer = "mpirun"',
            "unknown key 'launcer' in [launch]. Did you mean 'launcher'? Valid: environment, hostfile,",
        ),
        ("[launch]\nhostfile = 5", "launch.hostfile is 5, but should be text in quotes. Correct it in [launch]."),
        ('[launch]\nscheduler = "slrm"', "launch.scheduler is 'slrm', but should be 'auto', 'local', 'hostfile', 'sl"),
        ('[launch]\ninterface = "-x"', "launch.interface is '-x', but should be text of the form"),
        ('[launch.environment]\n"A B" = "x"', "launch.environment"),
        ('[launch.environment]\nA = "x\\u0000y"', r"launch.environment.A is 'x\x00y', but should be text of the form"),
        ('[slurm]\npython = "x\\u0000y"', r"slurm.python is 'x\x00y', but should be text of the form"),
        ('[slurm]\ntime = "soon"', """Write minutes ("90") or [days-]hours:minutes:seconds"""),
        ("[node]\ncores = 0", "node.cores is 0, but should be at least 1"),
    ],
)
def test_its_mistakes_are_not_looked_for_in_the_study_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        put_over(site(tmp_path / "cluster", text))
    message = str(caught.value)
    assert message.startswith(f"site file '{tmp_path / 'cluster' / 'site.toml'}': ")
    assert said in message
    assert "study.toml" not in message


def test_the_command_line_s_mistakes_neither(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        put_over(None, scheduler="slrm")
    message = str(caught.value)
    assert message.startswith("command line: launch.scheduler is 'slrm'")
    assert message.endswith("Did you mean 'slurm'?")


def test_a_section_may_be_made_of_both_and_what_lacks_in_both_is_told(tmp_path: Path) -> None:
    over = put_over(site(tmp_path / "cluster", "[node]\ngpus = 4"))
    found = study(tmp_path, over, {"node": {"cores": 8}})
    assert found.node is not None
    assert (found.node.cores, found.node.gpus) == (8, 4)
    assert refusal(tmp_path, over).endswith("node.cores is missing. Add cores = ... in [node].")


def test_what_is_put_over_is_not_varied(tmp_path: Path) -> None:
    """In a table of the sweep neither."""
    sweep = {"sweep": {"launch.launcher": ["torchrun", "mpirun"]}}
    said = "sweep.'launch.launcher' varies what --launcher or the site file decides. Remove one of the two."
    assert refusal(tmp_path, put_over(None, launcher="torchrun"), sweep).endswith(said)
    assert study(tmp_path, put_over(None, scheduler="local"), sweep)
    path = write_study(tmp_path)
    path.write_text(path.read_text() + '[sweep]\nlaunch = [{launcher = "mpirun", threads_per_rank = 1}]\n')
    with pytest.raises(RequestError, match=r"sweep.'launch.launcher' varies"):
        StudyFile.read(path, put_over(None, launcher="torchrun"))


@pytest.mark.parametrize("key", ["scheduler", "hostfile", "interface", "environment"])
def test_where_a_study_runs_is_not_varied(tmp_path: Path, key: str) -> None:
    message = refusal(tmp_path, {}, {"sweep": {f"launch.{key}": ["a", "b"]}})
    assert f"sweep.'launch.{key}' is no field that can be swept" in message


@pytest.mark.parametrize("field", ["slurm.partition", "node.cores", "measure.retries"])
def test_nor_what_is_asked_of_a_cluster(tmp_path: Path, field: str) -> None:
    assert f"sweep.'{field}' is no field that can be swept" in refusal(tmp_path, {}, {"sweep": {field: [1, 2]}})


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_another_scheduler_leaves_the_hostfile_of_the_study_aside(scheduler: str) -> None:
    given = overlay(None, launcher=None, scheduler=scheduler, hostfile=None)
    assert given == {"launch": {"scheduler": scheduler, "hostfile": None}}
