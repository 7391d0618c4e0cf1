"""Findings of a check about the plug-in by which NCCL or RCCL uses Slingshot, the network of HPE Cray machines.

Neither library knows Slingshot: without a plug-in for libfabric they exchange over TCP, and training scales badly over
hosts without any error (lumi-ai-factory/laifs-container-recipes, issue 18).
"""

from __future__ import annotations

from collections.abc import Iterable

from vitscale.preflight.network_verdicts import facts_by_host
from vitscale.preflight.verdict import warning
from vitscale.present.document import About, Finding
from vitscale.present.units import listed
from vitscale.store.checks import CheckRecord, FactsLine

_SLINGSHOT_INTERFACES = "hsn"
"""Beginning of the names of Slingshot's interfaces ("high speed network")."""


def missing_plugin(record: CheckRecord) -> Iterable[Finding]:
    """Warn of hosts with Slingshot and without the plug-in that it needs, where there are several hosts."""
    facts = facts_by_host(record)
    if len(facts) < 2:
        return
    hosts = [host for host, host_facts in facts.items() if _lacks_plugin(host_facts)]
    if not hosts:
        return
    plugin = facts[hosts[0]].network_plugin
    problem = plugin.problem if plugin is not None else None
    library = "RCCL" if "rccl" in facts[hosts[0]].environment.versions else "NCCL"
    yield warning(
        kind="network-plugin-missing",
        message=f"{library} finds no plug-in for the Slingshot of {listed(hosts)}, so ranks of several hosts exchange "
        f"over TCP: {problem or 'no reason is known'}",
        advice="Load the site's aws-ofi-nccl (aws-ofi-rccl) and libfabric, or use a container with both, so that "
        "LD_LIBRARY_PATH or NCCL_NET_PLUGIN leads to the plug-in. With NCCL_DEBUG=INFO the ranks' output then has "
        "'NET/OFI' and 'Using network Libfabric' or 'AWS Libfabric'",
        about=About(hosts=tuple(hosts)),
    )


def _lacks_plugin(facts: FactsLine) -> bool:
    """Whether a host has Slingshot, and its library of collectives finds no plug-in; False where that is not known."""
    has_slingshot = any(each.name.startswith(_SLINGSHOT_INTERFACES) and each.up for each in facts.interfaces)
    plugin = facts.network_plugin
    return has_slingshot and plugin is not None and plugin.name is None
