"""The links of a GPU by NVML: NVLinks and their neighbours, PCIe, and the GPUs whose memory it may read."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from fake_nvml import UUID, FakeLinks, FakeNvml, installed
from vitscale.machine.gpu_links import gpu_links
from vitscale.machine.vendors.nvidia import NvidiaGpus
from vitscale.store.checks import GpuLinks

pytestmark = pytest.mark.computing


def read(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> GpuLinks:
    fake = FakeNvml()
    fake.links = FakeLinks(**fields)
    installed(fake, monkeypatch)
    return GpuLinks(**gpu_links(UUID))


def test_links_to_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch) == GpuLinks(
        pci_address="0000:1a:00.0",
        pcie_generation=4,
        pcie_gpu_generation=5,
        pcie_width=8,
        pcie_gpu_width=16,
        nvlink_generation=4,
        nvlinks_up=2,
        nvlinks_down=1,
        nvlink_neighbours=("switch", "switch"),
        peers={"0000:1b:00.0": "ok"},
    )


def test_links_to_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    links = read(monkeypatch, neighbour_kind=pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, version=4, states=(1, None, 1))
    assert (links.nvlink_generation, links.nvlinks_down) == (3, 0)
    assert links.nvlink_neighbours == ("0000:1b:00.0",) * 2
    assert read(monkeypatch, neighbour_kind=None).nvlink_neighbours == ("0000:1b:00.0",) * 2  # an older driver


def test_a_gpu_without_nvlinks(monkeypatch: pytest.MonkeyPatch) -> None:
    links = read(monkeypatch, states=())
    assert (links.nvlinks_up, links.nvlinks_down, links.nvlink_generation) == (None, None, None)


@pytest.mark.parametrize(
    ("status", "word"), [(1, "chipset not supported"), (4, "disabled by a driver setting"), (6, "unknown")]
)
def test_why_another_gpus_memory_cannot_be_read(status: int, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, peer_status=status).peers == {"0000:1b:00.0": word}


def test_what_nvml_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, peer_status=None).peers == {}
    installed(FakeNvml(), monkeypatch)
    assert GpuLinks(**gpu_links(UUID)) == GpuLinks()
    assert gpu_links("GPU-0") == {}


def test_links_and_settings_count_the_same_nvlinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a GPU with more links than a pynvml that does not say how many there may be was written for."""
    monkeypatch.delattr(pynvml, "NVML_NVLINK_MAX_LINKS")
    links = read(monkeypatch, states=(1,) * 20)
    assert links.nvlinks_up == NvidiaGpus().settings(UUID)["nvlinks"] == 20
