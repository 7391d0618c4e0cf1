"""Timing: measurements for which DeepSpeed makes the host wait for the device, which slows what is measured."""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.deepspeed_lint.advice import FileFinding, Remedy
from vitscale.deepspeed_lint.view import ConfigurationView, finding

_COSTLY_SWITCHES = (
    (
        "wall_clock_breakdown", "synchronising-breakdown",
        "At the end of every micro-step the host waits for the device to read its timers, so it cannot run ahead; "
        "the parts that it prints are those of the slowed step",
        "Set it to false and take a profile of a few steps instead",
        ("runtime/engine.py (step)", "utils/timer.py (get_elapsed_msec)"),
    ),
    (  # switches `wall_clock_breakdown` on for the whole run, not only for the profiled step
        "flops_profiler.enabled", "synchronising-flops-profiler",
        "It counts FLOPs in one step, but switches wall_clock_breakdown on for the whole run, whose timers make "
        "the host wait in every micro-step",
        "Set it to false, and enable it in a run of its own, which is not timed",
        ("runtime/config.py (wall_clock_breakdown)",),
    ),
    (
        "comms_logger.enabled", "synchronising-comms-logger",
        "The device is synchronised after every collective: nothing overlaps any more, and the times that it logs "
        "are those of that run alone",
        "Set it to false, and enable it in a run of its own, which is not timed", ("comm/comm.py (timed_op)",),
    ),
    (
        "memory_breakdown", "memory-breakdown",
        "Around forward, backward and step rank 0 runs Python's garbage collector and resets the peak of memory "
        "use, so that no later figure of the peak holds",
        "Set it to false and read torch.cuda.max_memory_allocated() once at the end",
        ("runtime/utils.py (see_memory_usage)",),
    ),
    (
        "autotuning.enabled", "autotuning",
        "Training ends after the step autotuning.end_profile_step: this is a run for the tuner, with its profiler "
        "on, not one that trains",
        "Set it to false for training", ("runtime/engine.py (_autotuning_exit)",),
    ),
)  # fmt: skip
"""(switch, rule, what DeepSpeed does where it is on, what to do, source files)."""


def costly_switches(view: ConfigurationView) -> Iterator[FileFinding]:
    """Switches that slow every step, or end training."""
    for key, rule, message, fix, files in _COSTLY_SWITCHES:
        if view.on(key):
            advice = Remedy(fix, {key: False})
            yield finding(rule, "warning", key, message, advice, " and ".join(map(view.source, files)))


def throughput_timer(view: ConfigurationView) -> Iterator[FileFinding]:
    """The throughput timer, which is on by default and synchronises the device twice in every micro-step."""
    timer = "timers.throughput"
    if view.open(f"{timer}.enabled"):
        return
    if view.flag(f"{timer}.enabled", True) is not True or view.flag(f"{timer}.synchronized", True) is not True:
        return
    can_be_off = view.release.fact(timer) is not None
    given = view.has(f"{timer}.enabled")
    yield finding(
        "synchronising-throughput-timer", "warning" if given else "note", f"{timer}.enabled" if given else timer,
        ("The throughput timer" if given else "The throughput timer is on by default and")
        + " synchronises the device at the start and the end of every micro-step, whether or not it prints anything",
        Remedy('"timers": {"throughput": {"enabled": false}}', {f"{timer}.enabled": False}) if can_be_off else
        "This release cannot switch it off; 0.14.5 and later can",
        f"{view.source('utils/timer.py')} (ThroughputTimer)",
    )  # fmt: skip
