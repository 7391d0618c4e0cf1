"""Hosts that answer, and hosts that do not: each by name, with its reason."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from vitscale.machine.hosts import Host
from vitscale.preflight.reach_verdicts import ask


def test_this_machine_answers_without_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (tmp_path / "request.json").write_text("{}")
    (found,) = ask([Host("127.0.0.1")], tmp_path / "request.json")
    assert (found.name, found.address, found.sees_folder) == ("127.0.0.1", "127.0.0.1", True)
    assert found.seconds is not None
    (found,) = ask([Host("localhost")], tmp_path / "missing.json")
    assert found.sees_folder is False


@pytest.mark.parametrize(
    ("script", "answers", "sees", "reason"),
    [
        ("exit 0", True, True, ""),
        ("exit 1", True, False, ""),
        ("echo 'Permission denied (publickey).' >&2; exit 255", False, None, "Permission denied (publickey)."),
        ("exit 255", False, None, "ssh failed"),
        ("kill -9 $$", False, None, "ssh failed"),
    ],
)
def test_what_ssh_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, answers: bool, sees: bool | None, reason: str
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    # An address of nobody's (RFC 5737), so that no name has to be resolved.
    (found,) = ask([Host("192.0.2.77")], Path("/x"))
    assert (found.seconds is not None, found.sees_folder, found.reason) == (answers, sees, reason)


def test_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_arguments: object, **_more: object) -> object:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = ask([Host("nowhere"), Host("elsewhere")], Path("/x"))
    assert [(one.name, one.address, one.seconds) for one in found] == [
        ("nowhere", None, None),
        ("elsewhere", None, None),
    ]
    assert found[0].reason == "its name is not resolved: Name or service not known"


def test_nobody_is_asked_where_there_is_nobody() -> None:
    assert ask([], Path("/x")) == ()
