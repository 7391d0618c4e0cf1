"""Keys: unknown, misspelt, misplaced, removed, deprecated, or of another release."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from vitscale.errors import shown
from vitscale.lint.view import View, finding, keys_of
from vitscale.present.document import Finding

_MOST = 50
"""Most unknown keys that are told one by one: a file with more is hardly a configuration."""

_COMMENTS = ("_", "#", "//", "$", "comment")


def release_not_in_the_table(view: View) -> Iterator[Finding]:
    """A version that the table of keys lacks, or no installed DeepSpeed."""
    release, setting = view.release, view.setting
    source = "tools/make_deepspeed_keys.py"
    if not setting.installed:
        message = f"DeepSpeed is not installed here: the file is judged for {release.version}"
        yield finding("deepspeed-version", "note", "", message, "Name the version you run with --deepspeed", source)
    elif not release.exact:
        message = (
            f"The table of keys does not know DeepSpeed {shown(release.wanted)}: the file is judged for the nearest "
            f"release that it knows, {release.version}"
        )
        fix = f"Look up keys that changed after {release.version} in the release notes"
        yield finding("deepspeed-version", "note", "", message, fix, source)


def not_json() -> Finding:
    """A file that is Hjson and no JSON: it has comments, commas that trail, or texts without quotes."""
    return finding(
        "not-json", "note", "",
        "The file is Hjson: DeepSpeed reads it, but the Hugging Face Trainer and Accelerate read JSON only, and fail",
        "Take out comments and trailing commas where one of these reads the file",
        "deepspeed/runtime/config.py (hjson.load, since 0.8.1) and accelerate/utils/deepspeed.py of 1.15 (json.load)",
    )  # fmt: skip


def unknown_and_removed_keys(view: View) -> Iterator[Finding]:
    """Keys in the file that the release does not know in their place, refuses or deprecates."""
    told = 0
    for key, name, part, _ in keys_of(view, view.config):
        for judged in _judged(view, key, name, part):
            told += judged.kind == "unknown-key"
            if told > _MOST and judged.kind == "unknown-key":
                yield finding(
                    "unknown-key", "warning", "", f"There are more unknown keys than the {_MOST} that are told",
                    "Look whether this is a DeepSpeed configuration", view.source("runtime/config.py"),
                )  # fmt: skip
                return
            yield judged


def _judged(view: View, key: str, name: str, part: str) -> Iterator[Finding]:
    release = view.release
    fact = None if "." in name else release.fact(key)
    refuses = release.fact(part) == "strict"
    if key == "data_parallel_size" and release.fact("sequence_parallel_size") is not None:
        return  # deepspeed/__init__.py, outside what the table is made from, makes a mesh of both
    source = view.source(_FILES.get(part, "runtime/config.py"))
    if fact == "refused":
        message = f"DeepSpeed {release.version} has this no more, and refuses a file that holds it"
        fix = f"Remove it, or run a release that read it ({release.read_in(key) or 'before 0.9.5'})"
        yield finding("removed-key", "error", key, message, fix, view.source("runtime/config.py"))
    elif fact is not None and fact.startswith("deprecated"):
        new = fact.partition(": ")[2]
        successor = f"{part}.{new}"
        message, fix = f"DeepSpeed warns that this key is deprecated in favour of {new}", f"Use {successor}"
        if view.has(successor) or view.has(f"{part}.stage3_{new}"):
            message = f"DeepSpeed refuses this deprecated key together with {new}"
            yield finding("deprecated-key", "error", key, message, "Remove it", source)
        else:
            yield finding("deprecated-key", "warning", key, message, fix, source)
    elif refuses and name.startswith("stage3_") and view.has(other := f"{part}.{name.removeprefix('stage3_')}"):
        message = f"It is another name of {other}, and DeepSpeed refuses a file with both"
        yield finding("two-names", "error", key, message, "Remove one of them", source)
    elif fact is None and release.fact(part) != "open" and not (not refuses and name.lower().startswith(_COMMENTS)):
        yield _unknown(view, key, name, part, refuses=refuses, source=source)


def _unknown(view: View, key: str, name: str, part: str, *, refuses: bool, source: str) -> Finding:
    release = view.release
    if "." in name and release.fact(key) is not None:
        message = f"DeepSpeed {release.version} knows no names with dots, and ignores this one without a word"
        first, _, rest = name.partition(".")
        return finding("unknown-key", "error", key, message, f'Nest it: {{"{first}": {{"{rest}": ...}}}}', source)
    done = (
        f"DeepSpeed {release.version} refuses a file with it"
        if refuses
        else f"DeepSpeed {release.version} does not know this key, and ignores it without a word"
    )
    elsewhere = release.read_in(key)
    if elsewhere is not None:
        return finding(
            "key-of-another-release", "error" if refuses else "warning", key,
            f"{done}: only other releases read it ({elsewhere})",
            "Remove it, or run a release that reads it", "tools/make_deepspeed_keys.py, from DeepSpeed's own releases",
        )  # fmt: skip
    near = difflib.get_close_matches(name.lower()[:80], release.children(part), n=1, cutoff=0.7)
    places = [known_key for known_key in release.places(name) if known_key != key] if len(name) > 2 else []
    if near:
        known_key = f"{part}.{near[0]}" if part else near[0]
        taken = f" (which the file also has: {shown(view.value(known_key))})" if view.has(known_key) else ""
        fix = f"Write {known_key}{taken} if that is meant"
    elif places and name not in _COMMON:
        fix = f"It is known as {' and as '.join(places[:2])}: write it there if that is meant"
    else:
        fix = "Remove it"
    meant = bool(near or (places and name not in _COMMON))
    return finding("unknown-key", "error" if refuses or meant else "warning", key, done, fix, source)


_COMMON = ("enabled", "params", "dtype", "type", "device", "verbose", "debug", "mode", "name", "project")
"""Names that are in so many parts that finding one elsewhere is no hint."""


_FILES = {
    "zero_optimization": "runtime/zero/config.py",
    "zero_optimization.offload_optimizer": "runtime/zero/offload_config.py",
    "zero_optimization.offload_param": "runtime/zero/offload_config.py",
    "activation_checkpointing": "runtime/activation_checkpointing/config.py",
    "flops_profiler": "profiling/config.py",
    "comms_logger": "comm/config.py",
    "timers": "utils/config.py",
    "timers.throughput": "utils/config.py",
}
