"""Several hosts on one machine: namespaces with links of known bandwidth, ssh and CPU quotas. Needs root, on Linux."""

from vitscale.lab.laboratory import Laboratory, command_on, down, laboratories, laboratory, up
from vitscale.lab.state import LabPlan, parse_bandwidth

__all__ = ["LabPlan", "Laboratory", "command_on", "down", "laboratories", "laboratory", "parse_bandwidth", "up"]
