"""The public functions: the table, unknown names, keys that do not apply, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vitscale import sources
from vitscale.errors import RequestError
from vitscale.sources.base import default_cache_root
from vitscale.trial.trial import DataSpec


def test_an_unknown_dataset_is_refused_with_the_nearest() -> None:
    for action in (sources.check, sources.load):
        with pytest.raises(
            RequestError, match=r"'cifar1O'\. Did you mean 'cifar10'\?.*cifar100, digits, folder, hf, shards, synthetic"
        ):
            action(DataSpec(name="cifar1O"))


def test_a_name_of_200000_characters_is_shortened() -> None:
    with pytest.raises(RequestError) as caught:
        sources.check(DataSpec(name="x" * 200_000))
    assert len(str(caught.value)) < 340


@pytest.mark.parametrize("name", ["digits", "synthetic", "folder"])
@pytest.mark.parametrize(("key", "value"), [("md5", "0" * 32), ("download", True)])
def test_keys_of_an_archive_are_refused_where_there_is_none(name: str, key: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"data.{key} does not apply to the dataset '{name}'"):
        sources.check(DataSpec.model_validate({"name": name, "root": "/", key: value}))


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_a_root_that_is_not_used_is_noted(name: str) -> None:
    assert sources.check(DataSpec(name=name, root="/somewhere")).notes == (
        f"data.root is not used by the dataset '{name}'",
    )
    assert sources.check(DataSpec(name=name)).notes == ()


def test_importing_and_checking_is_light() -> None:
    program = (
        "import sys\nimport vitscale.sources as s\nfrom vitscale.trial.trial import DataSpec\n"
        "s.check(DataSpec(name='synthetic')); s.check(DataSpec(name='digits'))\n"
        "print(sorted({'torch', 'sklearn', 'scipy', 'PIL', 'rich', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("VITSCALE_CACHE", raising=False)
    assert default_cache_root() == Path("/home/someone/.cache/vitscale")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_root() == Path("/xdg/vitscale")
    monkeypatch.setenv("VITSCALE_CACHE", "/own")
    assert default_cache_root() == Path("/own")


def test_without_a_home_the_message_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "VITSCALE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)
    with pytest.raises(RequestError, match="Set VITSCALE_CACHE"):
        default_cache_root()
