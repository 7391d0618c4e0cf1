"""Timing: measurements for which DeepSpeed makes the host wait for the device, which slows what is measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vitscale.deepspeed_lint.advice import FileFinding, Remedy
from vitscale.deepspeed_lint.view import ConfigurationView, finding


class _CostlySwitch(NamedTuple):
    """A switch that slows what is measured."""

    key: str
    rule: str
    message: str
    """What DeepSpeed does where it is on."""
    fix: str
    files: tuple[str, ...]
    """Files of DeepSpeed's source that show it."""


_COSTLY_SWITCHES = (
    _CostlySwitch(
        "wall_clock_breakdown", "synchronising-breakdown",
        "At the end of every micro-step the host waits for the device to read its timers, so it cannot run ahead; "
        "the parts that it prints are those of the slowed step",
        "Set it to false and take a profile of a few steps instead",
        ("runtime/engine.py (step)", "utils/timer.py (get_elapsed_msec)"),
    ),
    _CostlySwitch(  # switches `wall_clock_breakdown` on for the whole run, not only for the profiled step
        "flops_profiler.enabled", "synchronising-flops-profiler",
        "It counts FLOPs in one step, but switches wall_clock_breakdown on for the whole run, whose timers make "
        "the host wait in every micro-step",
        "Set it to false, and enable it in a run of its own, which is not timed",
        ("runtime/config.py (wall_clock_breakdown)",),
    ),
    _CostlySwitch(
        "comms_logger.enabled", "synchronising-comms-logger",
        "The device is synchronised after every collective: nothing overlaps any more, and the times that it logs "
        "are those of that run alone",
        "Set it to false, and enable it in a run of its own, which is not timed", ("comm/comm.py (timed_op)",),
    ),
    _CostlySwitch(
        "memory_breakdown", "memory-breakdown",
        "Around forward, backward and step rank 0 runs Python's garbage collector and resets the peak of memory "
        "use, so that no later figure of the peak holds",
        "Set it to false and read torch.cuda.max_memory_allocated() once at the end",
        ("runtime/utils.py (see_memory_usage)",),
    ),
    _CostlySwitch(
        "autotuning.enabled", "autotuning",
        "Training ends after the step autotuning.end_profile_step: this is a run for the tuner, with its profiler "
        "on, not one that trains",
        "Set it to false for training", ("runtime/engine.py (_autotuning_exit)",),
    ),
)  # fmt: skip


def costly_switches(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding for each switch that is on and slows every step, or ends training."""
    for switch in _COSTLY_SWITCHES:
        if view.is_on(switch.key):
            advice = Remedy(switch.fix, {switch.key: False})
            source = " and ".join(view.source(file) for file in switch.files)
            yield finding(switch.rule, "warning", switch.key, switch.message, advice, source)


def throughput_timer(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where the throughput timer is on, which synchronises the device twice in every micro-step.

    It is on by default.
    """
    timer = "timers.throughput"
    switch = f"{timer}.enabled"
    if view.leaves_open(switch):
        return
    is_on = view.flag(switch, default=True) is True
    synchronises = view.flag(f"{timer}.synchronized", default=True) is True
    if not (is_on and synchronises):
        return
    fix = Remedy("This release cannot switch it off; 0.14.5 and later can")
    if view.release.fact(timer) is not None:
        fix = Remedy('"timers": {"throughput": {"enabled": false}}', {switch: False})
    effect = "synchronises the device at the start and the end of every micro-step, whether or not it prints anything"
    source = f"{view.source('utils/timer.py')} (ThroughputTimer)"
    rule = "synchronising-throughput-timer"
    if view.has(switch):
        yield finding(rule, "warning", switch, f"The throughput timer {effect}", fix, source)
    else:
        yield finding(rule, "note", timer, f"The throughput timer is on by default and {effect}", fix, source)
