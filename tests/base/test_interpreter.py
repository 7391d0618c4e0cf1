"""How a Python is started, and where it looks for modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launching import FOLDER, PYTHON, hosts, launch, world
from vitscale.base import interpreter
from vitscale.launchers import LAUNCHERS
from vitscale.schedulers.hostfile import Hostfile
from vitscale.schedulers.prepared import ranks_environment


def pythons_without_p(words: list[str]) -> list[str]:
    """What follows each Python of a command, where that is not `-P`; words inside a line for a shell count too."""
    told = " ".join(words).split()
    return [told[n + 1] for n, word in enumerate(told[:-1]) if word == PYTHON and told[n + 1] != "-P"]


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_whatever_a_launcher_starts_leaves_the_current_folder_out(name: str, nodes: int) -> None:
    on = hosts(nodes) if nodes > 1 else ()
    spawn = launch(LAUNCHERS[name], world(nodes, 2), on, folder=Path("/plain/runs/x"))
    spawn = Hostfile(on).adapt(spawn) if on else spawn
    for command in spawn.commands:
        assert pythons_without_p([*command]) == []
        assert any("-P" in word for word in command)


@pytest.mark.parametrize("dropped", [(), ("PYTHON",)])
def test_no_launcher_s_own_python_loses_the_variable(monkeypatch: pytest.MonkeyPatch, dropped: tuple[str, ...]) -> None:
    """DeepSpeed's launcher must see no other variable of Python's."""
    monkeypatch.delenv(interpreter.SAFE_PATH_VARIABLE, raising=False)
    assert ranks_environment({}, dropped)[interpreter.SAFE_PATH_VARIABLE]


def test_what_was_put_together_is_taken_apart() -> None:
    command = interpreter.python_module("a.module", "x", "-m", interpreter="/opt/python")
    assert command == ("/opt/python", "-P", "-m", "a.module", "x", "-m")
    assert interpreter.parse_module_command(command) == ("/opt/python", "a.module", ("x", "-m"))
    with pytest.raises(ValueError, match="no command that runs a module: python -m x"):
        interpreter.parse_module_command(["python", "-m", "x", str(FOLDER)])


@pytest.mark.parametrize(("of_user", "left"), [(None, None), ("", None), ("1", "1")])
def test_a_user_s_own_setting_of_the_variable_stays(of_user: str | None, left: str | None) -> None:
    environment = {} if of_user is None else {interpreter.SAFE_PATH_VARIABLE: of_user}
    environment |= interpreter.safe_path(environment)
    assert environment[interpreter.SAFE_PATH_VARIABLE]
    interpreter.forget_safe_path(environment)
    assert environment.get(interpreter.SAFE_PATH_VARIABLE) == left


def test_folders_of_a_study_come_last_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/first", "/second"])
    interpreter.append_to_search_path(["/third", "/second", "/third"])
    assert sys.path == ["/first", "/second", "/third"]


def test_the_current_folder_is_left_out_of_python_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for entry in ("", os.fspath(tmp_path)):
        monkeypatch.setattr(sys, "path", [entry, "/lib"])
        interpreter.leave_out_current_folder()
        assert sys.path == ["/lib"]
    monkeypatch.setattr(sys, "path", ["/bin", "/lib"])
    interpreter.leave_out_current_folder()
    assert sys.path == ["/bin", "/lib"]
