"""The hosts' network: a switch in a namespace of its own, and a link of known bandwidth from it to every host.

Both ends of a link are shaped where they send: a host sends at most at the rate, and receives at most at it, as over a
full-duplex cable. In a ring each host sends 2(N-1)/N*S bytes to one neighbour and gets as many from the other, so a
ring all-reduce of S bytes takes 2(N-1)/N*S/B. Shaped on the host's side alone, N-1 hosts that send to one would reach
it at N-1 times the rate.
"""

from __future__ import annotations

from vitscale.lab.namespaces import call_inside
from vitscale.lab.processes import Process
from vitscale.lab.programs import call

INTERFACE = "eth0"
MOST_HOSTS = 64
_BRIDGE = "bridge0"
# A larger burst lets small messages pass at several times the rate.
_BURST = "128kb"
_LONGEST_QUEUE = "50ms"


def address(number: int) -> str:
    """The address of host `number`, from 0."""
    return f"10.77.0.{number + 1}"


def start_switch(switch: Process) -> None:
    """Makes a namespace the switch that hosts are linked to."""
    call_inside(switch, "ip", "link", "add", _BRIDGE, "type", "bridge")
    call_inside(switch, "ip", "link", "set", _BRIDGE, "up")


def link(switch: Process, host: Process, number: int, bandwidth_mbit: float | None) -> None:
    """Links a host to the switch; None leaves the link as fast as it is."""
    port = _port(number)
    # Both ends are born inside: no interface is ever seen outside the lab.
    peer = ("peer", "name", port, "netns", str(switch.pid))
    call("ip", "link", "add", INTERFACE, "netns", str(host.pid), "type", "veth", *peer)
    call_inside(switch, "ip", "link", "set", port, "master", _BRIDGE, "up")
    call_inside(host, "ip", "address", "add", f"{address(number)}/24", "dev", INTERFACE)
    for device in ("lo", INTERFACE):
        call_inside(host, "ip", "link", "set", device, "up")
    if bandwidth_mbit is not None:
        shape = ("tbf", "rate", f"{bandwidth_mbit:f}mbit", "burst", _BURST, "latency", _LONGEST_QUEUE)
        for end, device in ((host, INTERFACE), (switch, port)):
            call_inside(end, "tc", "qdisc", "add", "dev", device, "root", *shape)


def set_link(switch: Process, number: int, state: str) -> None:
    """Sets the switch's end of a host's link "down", which is as if its cable were pulled, or "up"."""
    call_inside(switch, "ip", "link", "set", _port(number), state)


def _port(number: int) -> str:
    return f"port{number}"
