"""The kernel's files about network interfaces, as they are and as they may be."""

from __future__ import annotations

from pathlib import Path

from vitscale.probes.host import gpu_direct_modules, hostname_addresses, infiniband_ports, interfaces


def make(folder: Path, name: str, *, real: bool = True, **files: str) -> None:
    (folder / name).mkdir(parents=True)
    if real:
        (folder / name / "device").mkdir()
    for file, content in files.items():
        (folder / name / file).write_text(content + "\n")


def test_this_host_has_a_loopback_interface_that_works() -> None:
    loopback = next(one for one in interfaces() if one.name == "lo")
    assert (loopback.kind, loopback.up, loopback.speed_mbit) == ("loopback", True, None)
    assert "127.0.0.1/8" in loopback.addresses


def test_what_the_kernel_says(tmp_path: Path) -> None:
    make(tmp_path, "eth0", type="1", operstate="up", flags="0x1003", speed="25000")
    make(tmp_path, "veth1", real=False, type="1", operstate="up", flags="0x1003", speed="10000")
    make(tmp_path, "ib0", type="32", operstate="up", flags="0x1003", speed="100000")
    make(tmp_path, "eth1", type="1", operstate="down", flags="0x1002", speed="-1")
    make(tmp_path, "tun0", real=False, type="65534", operstate="unknown", flags="0x1091")
    make(tmp_path, "odd", type="x", operstate="unknown", flags="y", speed="fast")
    (tmp_path / "bonding_masters").write_text("bond0\n")
    found = {one.name: (one.kind, one.up, one.speed_mbit) for one in interfaces(tmp_path)}
    assert found == {
        "eth0": ("ethernet", True, 25_000),
        "veth1": ("ethernet", True, None),  # the kernel's 10,000 is made up
        "ib0": ("infiniband", True, 100_000),
        "eth1": ("ethernet", False, None),
        "tun0": ("other", True, None),
        "odd": ("other", False, None),
    }


def test_infiniband_ports(tmp_path: Path) -> None:
    for number, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        port = tmp_path / "mlx5_0" / "ports" / number
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    found = [(port.name, port.active, port.rate) for port in infiniband_ports(tmp_path)]
    assert found == [("mlx5_0:1", True, "100 Gb/sec (4X EDR)"), ("mlx5_0:2", False, "100 Gb/sec (4X EDR)")]
    assert infiniband_ports(tmp_path / "none") == ()


def test_the_hosts_own_name_resolves_to_addresses_or_to_none() -> None:
    assert all("." in address or ":" in address for address in hostname_addresses())


def test_where_an_adapter_sits(tmp_path: Path) -> None:
    """As /sys/class/infiniband has it, where `device` leads to the PCI device."""
    port = tmp_path / "mlx5_0" / "ports" / "1"
    device = tmp_path / "mlx5_0" / "device"
    port.mkdir(parents=True)
    device.mkdir()
    for file, text in (
        (port / "state", "4: ACTIVE"),
        (port / "rate", "400 Gb/sec (4X NDR)"),
        (port / "link_layer", "InfiniBand"),
        (device / "numa_node", "1"),
        (device / "current_link_speed", "32.0 GT/s PCIe"),
        (device / "current_link_width", "16"),
    ):
        file.write_text(text + "\n")
    (found,) = infiniband_ports(tmp_path)
    assert (found.link_layer, found.numa_node) == ("InfiniBand", 1)
    assert (found.pcie_speed, found.pcie_width) == ("32.0 GT/s PCIe", 16)
    (device / "numa_node").write_text("-1\n")  # a virtual machine whose firmware does not say
    assert infiniband_ports(tmp_path)[0].numa_node is None


def test_modules_by_which_adapters_read_gpu_memory(tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.write_text("nvidia_peermem 16384 0 - Live 0x0\nib_core 491520 9 rdma_cm,nvidia_peermem, Live 0x0\n")
    assert gpu_direct_modules(modules) == ("nvidia_peermem",)
    modules.write_text("ib_core 491520 9 rdma_cm, Live 0x0\n")
    assert gpu_direct_modules(modules) == ()
    assert gpu_direct_modules(tmp_path / "missing") is None
