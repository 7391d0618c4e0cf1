"""Timing: what DeepSpeed measures by making the host wait for the device, which slows what it measures"""

from __future__ import annotations

from collections.abc import Iterator

from vitscale.lint.view import View, finding
from vitscale.present.document import Finding


def wall_clock_breakdown(view: View) -> Iterator[Finding]:
    """Timers around each phase of each micro-step, read at once."""
    if view.on("wall_clock_breakdown"):
        yield finding(
            "synchronising-breakdown", "warning", "wall_clock_breakdown",
            "At the end of every micro-step the host waits for the device to read its timers, so it cannot run ahead; "
            "the parts that it prints are those of the slowed step",
            "Set it to false and take a profile of a few steps instead",
            f"{view.source('runtime/engine.py')} (step) and {view.source('utils/timer.py')} (get_elapsed_msec)",
        )  # fmt: skip


def throughput_timer(view: View) -> Iterator[Finding]:
    """On by default, and it synchronises the device twice in every micro-step."""
    timer = "timers.throughput"
    if view.open(f"{timer}.enabled") or f"{timer}.enabled" in view.setting.settled:
        return
    if view.flag(f"{timer}.enabled", True) is not True or view.flag(f"{timer}.synchronized", True) is not True:
        return
    can_be_off = view.release.fact(timer) is not None
    given = view.has(f"{timer}.enabled")
    yield finding(
        "synchronising-throughput-timer", "warning" if given else "note", f"{timer}.enabled" if given else timer,
        ("The throughput timer" if given else "The throughput timer is on by default and")
        + " synchronises the device at the start and the end of every micro-step, whether or not it prints anything",
        '"timers": {"throughput": {"enabled": false}}' if can_be_off else
        "This release cannot switch it off; 0.14.5 and later can",
        f"{view.source('utils/timer.py')} (ThroughputTimer)",
    )  # fmt: skip


def flops_profiler(view: View) -> Iterator[Finding]:
    """It switches `wall_clock_breakdown` on for the whole run, not for its one step."""
    if view.on("flops_profiler.enabled"):
        yield finding(
            "synchronising-flops-profiler", "warning", "flops_profiler.enabled",
            "It counts FLOPs in one step, but switches wall_clock_breakdown on for the whole run, whose timers make "
            "the host wait in every micro-step",
            "Enable it in a run of its own, which is not timed",
            f"{view.source('runtime/config.py')} (wall_clock_breakdown)",
        )  # fmt: skip


def comms_logger(view: View) -> Iterator[Finding]:
    """Every collective becomes blocking."""
    if view.on("comms_logger.enabled"):
        yield finding(
            "synchronising-comms-logger", "warning", "comms_logger.enabled",
            "The device is synchronised after every collective: nothing overlaps any more, and the times that it logs "
            "are those of that run alone",
            "Enable it in a run of its own, which is not timed", f"{view.source('comm/comm.py')} (timed_op)",
        )  # fmt: skip


def memory_breakdown(view: View) -> Iterator[Finding]:
    """Python's garbage collector runs around every phase, and peaks are forgotten."""
    if view.on("memory_breakdown"):
        yield finding(
            "memory-breakdown", "warning", "memory_breakdown",
            "Around forward, backward and step rank 0 runs Python's garbage collector and resets the peak of memory "
            "use, so that no later figure of the peak holds",
            "Set it to false and read torch.cuda.max_memory_allocated() once at the end",
            f"{view.source('runtime/utils.py')} (see_memory_usage)",
        )  # fmt: skip


def autotuning(view: View) -> Iterator[Finding]:
    """A tuning run ends by itself after a few steps."""
    if view.on("autotuning.enabled"):
        yield finding(
            "autotuning", "warning", "autotuning.enabled",
            "Training ends after the step autotuning.end_profile_step: this is a run for the tuner, with its profiler "
            "on, not one that trains",
            "Set it to false for training", f"{view.source('runtime/engine.py')} (_autotuning_exit)",
        )  # fmt: skip
