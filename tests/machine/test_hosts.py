from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitscale.errors import RequestError
from vitscale.machine.hosts import Host, is_this_machine, read_hostfile


def hostfile(folder: Path, text: str | bytes) -> Path:
    path = folder / "hosts"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", [Host("node1")]),
        ("node1 slots=4\nnode2 slots=8\n", [Host("node1", 4), Host("node2", 8)]),
        ("node1:4\nnode2\n", [Host("node1", 4), Host("node2")]),
        ("  node1\t slots=4  # the first\n\n# all\r\nnode2 slots=4\r\n", [Host("node1", 4), Host("node2", 4)]),
        ("node1 slot=2", [Host("node1", 2)]),
        ("node1 SLOTS=4", [Host("node1", 4)]),
        ("node1 max_slots=9 slots=2 user=x", [Host("node1", 2)]),
        ("10.0.0.7 slots=1\nfd00::7 slots=1", [Host("10.0.0.7", 1), Host("fd00::7", 1)]),
        ("gpu-3.example.org", [Host("gpu-3.example.org")]),
        ("\ufeffnode1", [Host("node1")]),
    ],
)  # fmt: skip
def test_what_deepspeed_and_open_mpi_read(tmp_path: Path, text: str, hosts: list[Host]) -> None:
    assert read_hostfile(hostfile(tmp_path, text)) == tuple(hosts)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("-oProxyCommand=touch slots=1", "-oProxyCommand=touch slots=1"),
        ("node1;reboot", "node1;reboot"),
        ("$(reboot) slots=4", "$(reboot) slots=4"),
        ("node1 four", "node1 four"),
        ("node1 slots=", "node1 slots="),
        ("node1 slots=0", "node1 slots=0"),
        ("node1:0", "node1:0"),
        ("node1 slots=-4", "node1 slots=-4"),
        ("node1 slots=4.5", "node1 slots=4.5"),
        ("node1 slots=99999", "node1 slots=99999"),
        ("node1 slots=\u0664", "node1 slots=\u0664"),
        ("n\u00f6de", "n\u00f6de"),
        ("\x1b[2Jnode", r"\x1b[2Jnode"),
        ("a" * 300, "a" * 100),
    ],
)
def test_a_line_that_is_none_is_shown_with_its_number(tmp_path: Path, line: str, shown: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_hostfile(hostfile(tmp_path, f"# hosts\nnode0 slots=1\n{line}\n"))
    message = str(caught.value)
    assert f"hostfile '{tmp_path}/hosts', line 3 is no line of a hostfile: '{shown}" in message
    assert message.endswith("Write one line per host: NAME slots=4.")
    assert message.isprintable()


def test_a_host_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="line 2 names a host twice: 'node1 slots=2'"):
        read_hostfile(hostfile(tmp_path, "node1 slots=4\nnode1 slots=2\n"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("# nobody\n\n", "names no host"),
        (b"\xff\xfe", "is not text"),
        ("".join(f"n{number}\n" for number in range(10_001)), "names 10,001 hosts"),
    ],
)
def test_a_file_that_is_no_hostfile_is_one_message(tmp_path: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_hostfile(hostfile(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"hostfile '{tmp_path}/none' cannot be read: No such file or directory"):
        read_hostfile(tmp_path / "none")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60) | st.text("no1:=slt #\n-", max_size=60))
def test_any_text_gives_hosts_or_one_message(tmp_path: Path, text: str) -> None:
    path = hostfile(tmp_path, text.encode(errors="surrogatepass"))
    try:
        hosts = read_hostfile(path)
    except RequestError as error:
        assert str(error).isprintable()  # noqa: PT017 - whether it is one is not known before
        return
    assert hosts
    assert len({host.name for host in hosts}) == len(hosts)
    assert all(host.slots is None or 1 <= host.slots <= 9999 for host in hosts)
    assert not any(host.name.startswith("-") or set(host.name) & set(" \t\n'\"$`;&|<>()\\") for host in hosts)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.1.1", "::1", socket.gethostname()])
def test_names_and_addresses_of_this_machine(name: str) -> None:
    assert is_this_machine(name)


@pytest.mark.parametrize(
    # Addresses set aside for documentation (RFC 5737), a name set aside for none (RFC 6761), and what is no name.
    "name",
    ["198.51.100.1", "2001:db8::1", "nobody.invalid", "a..b", "a" * 64],
)
def test_other_machines_and_names_that_lead_nowhere(name: str) -> None:
    assert not is_this_machine(name)
