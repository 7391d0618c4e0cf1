"""The plug-in that Slingshot needs: which one is found, and what a check says where there is none."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from check_factory import checked, interface, record
from vitscale.preflight.judging import judged
from vitscale.probes.network_plugin import network_plugin
from vitscale.store.checks import CheckedRank, NetworkPlugin

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared libraries as Linux has them")

RCCL = ("librccl-net.so", "libnccl-net.so")
MISSING = NetworkPlugin(name=None, problem="librccl-net.so: cannot open shared object file: No such file or directory")
FOUND = NetworkPlugin(name="librccl-net.so", problem=None)


def library(path: Path) -> None:
    """Puts a library that can be opened there: any one does."""
    extension = importlib.util.find_spec("msgspec._core")
    assert extension is not None
    shutil.copy(str(extension.origin), path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which libraries are looked for."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("libraries", "variables", "found"),
    [
        (["librccl-net.so"], {}, "librccl-net.so"),
        (["libnccl-net.so"], {}, "libnccl-net.so"),
        (["libnccl-net.so", "librccl-net.so"], {}, "librccl-net.so"),
        (["librccl-net-ofi.so"], {"NCCL_NET_PLUGIN": "ofi"}, "librccl-net-ofi.so"),
        (["libfabric-net.so"], {"NCCL_NET_PLUGIN": "libfabric-net.so"}, "libfabric-net.so"),
        ([], {}, None),
        (["librccl-net-ofi.so"], {}, None),
        (["librccl-net.so"], {"NCCL_NET_PLUGIN": "none"}, None),
    ],
)
def test_the_plugin_is_that_which_the_library_would_open(
    folder: Path, libraries: list[str], variables: dict[str, str], found: str | None
) -> None:
    for name in libraries:
        library(folder / name)
    plugin = network_plugin(RCCL, folder / "torch", variables)
    assert plugin.name == found
    assert (plugin.problem is None) == (found is not None)


def test_it_may_lie_beside_torchs_own_library(tmp_path: Path) -> None:
    library(tmp_path / "librccl-net.so")
    assert network_plugin(RCCL, tmp_path, {}) == FOUND


def test_why_there_is_none(folder: Path) -> None:
    assert network_plugin(RCCL, folder, {}) == MISSING
    assert network_plugin(RCCL, folder, {"NCCL_NET_PLUGIN": "none"}).problem == "NCCL_NET_PLUGIN = 'none'"
    (folder / "librccl-net.so").write_bytes(b"no library" * 100)
    assert "invalid ELF header" in (network_plugin(RCCL, folder, {}).problem or "")


def rank(number: int, **facts: Any) -> CheckedRank:
    """A rank on a host of its own with Slingshot, whose torch is built for ROCm."""
    slingshot = (interface("lo", "127.0.0.1/8"), interface("hsn0", f"10.1.0.{number + 1}/16", 200_000))
    usual: dict[str, Any] = {
        "interfaces": slingshot,
        "network_plugin": MISSING,
        "versions": {"rocm": "6.4.43483", "rccl": "2.22.3"},
    }
    return checked(number, **(usual | facts))


def plugin_findings(*ranks: CheckedRank) -> list[str]:
    return [finding.message for finding in judged(record(*ranks)) if finding.kind == "network-plugin-missing"]


def test_slingshot_without_its_plugin_is_a_warning() -> None:
    assert plugin_findings(rank(0), rank(1, network_plugin=FOUND)) == [
        "RCCL finds no plug-in for the Slingshot of host0, so ranks of several hosts exchange over TCP: "
        "librccl-net.so: cannot open shared object file: No such file or directory"
    ]
    (message,) = plugin_findings(rank(0, versions={"nccl": "2.27.3"}), rank(1))
    assert message.startswith("NCCL finds no plug-in for the Slingshot of host0 and host1")


def test_nothing_is_said_where_it_is_not_needed_or_not_known() -> None:
    assert plugin_findings(rank(0, network_plugin=FOUND), rank(1, network_plugin=FOUND)) == []
    assert plugin_findings(rank(0, network_plugin=None), rank(1, network_plugin=None)) == []
    assert plugin_findings(rank(0)) == []  # on one host
    ethernet = (interface("eth0", "10.0.0.1/24"),)
    assert plugin_findings(rank(0, interfaces=ethernet), rank(1, interfaces=ethernet)) == []
