"""Keys: unknown, misspelt, misplaced, removed, deprecated, or of another release."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from vitscale.deepspeed_lint.advice import REMOVED, FileFinding, Remedy, remove
from vitscale.deepspeed_lint.view import ConfigurationView, finding, keys_of
from vitscale.errors import shown
from vitscale.present.document import Severity

_MOST = 50
"""Most unknown keys that are told one by one: a file with more is hardly a configuration."""

_COMMENTS = ("_", "#", "//", "$", "comment")


def release_not_in_the_table(view: ConfigurationView) -> Iterator[FileFinding]:
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


def not_json() -> FileFinding:
    """A file that is Hjson and no JSON: it has comments, commas that trail, or texts without quotes."""
    return finding(
        "not-json", "note", "",
        "The file is Hjson: DeepSpeed reads it, but the Hugging Face Trainer and Accelerate read JSON only, and fail",
        "Take out comments and trailing commas where one of these reads the file",
        "deepspeed/runtime/config.py (hjson.load, since 0.8.1) and accelerate/utils/deepspeed.py of 1.15 (json.load)",
    )  # fmt: skip


def unknown_and_removed_keys(view: ConfigurationView) -> Iterator[FileFinding]:
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


def _judged(view: ConfigurationView, key: str, name: str, part: str) -> Iterator[FileFinding]:
    release = view.release
    fact = None if "." in name else release.fact(key)
    refuses = release.fact(part) == "strict"
    if key == "data_parallel_size" and release.fact("sequence_parallel_size") is not None:
        return  # deepspeed/__init__.py, outside what the table is made from, makes a mesh of both
    source = view.source(_FILES.get(part, "runtime/config.py"))
    if fact == "refused":
        message = f"DeepSpeed {release.version} has this no more, and refuses a file that holds it"
        fix = f"Remove it, or run a release that read it ({release.read_in(key) or 'before 0.9.5'})"
        yield finding("removed-key", "error", key, message, remove(key, fix), view.source("runtime/config.py"))
    elif fact is not None and fact.startswith("deprecated"):
        successor = _successor(view, key)
        new = successor.removeprefix(f"{part}.")
        if _has_either_name(view, successor):
            message = f"DeepSpeed refuses this deprecated key together with {new}"
            yield finding("deprecated-key", "error", key, message, remove(key), source)
        else:
            message = f"DeepSpeed warns that this key is deprecated in favour of {new}"
            changes = {key: REMOVED} | _as_successor(view, key, successor)
            device = ' with "device": "cpu"' if f"{successor}.device" in changes else ""
            fixes = [Remedy(f"Use {successor}{device}", changes), remove(key, f"Remove it, or use {successor}")]
            yield finding("deprecated-key", "warning", key, message, fixes, source)
    elif refuses and name.startswith("stage3_") and view.has(other := f"{part}.{name.removeprefix('stage3_')}"):
        message = f"It is another name of {other}, and DeepSpeed refuses a file with both"
        yield finding("two-names", "error", key, message, remove(key, "Remove one of them"), source)
    elif fact is None and release.fact(part) != "open" and not (not refuses and name.lower().startswith(_COMMENTS)):
        yield _unknown(view, key, name, part, refuses=refuses, source=source)


def _successor(view: ConfigurationView, key: str) -> str:
    """The dotted key, or keys in words, in favour of which a key is deprecated."""
    fact = view.release.fact(key) or ""
    part = key.rpartition(".")[0]
    return f"{part}.{fact.partition(': ')[2]}"


def _has_either_name(view: ConfigurationView, key: str) -> bool:
    """Whether the file has a key of zero_optimization, with or without "stage3_" before its name."""
    part, _, name = key.rpartition(".")
    return view.has(key) or view.has(f"{part}.stage3_{name}")


def _as_successor(view: ConfigurationView, key: str, successor: str) -> dict[str, Any]:
    """What says the same under the key's new name; nothing where the old one was off."""
    value = view.value(key)
    if successor.endswith(("offload_optimizer", "offload_param")) and " or " not in successor:
        return {f"{successor}.device": "cpu"} if value is True else {}
    return {} if " or " in successor else {successor: value}


def _unknown(view: ConfigurationView, key: str, name: str, part: str, *, refuses: bool, source: str) -> FileFinding:
    release = view.release
    place = (*part.split("."), name) if part else (name,)
    if "." in name and release.fact(key) is not None:
        message = f"DeepSpeed {release.version} knows no names with dots, and ignores this one without a word"
        first, _, rest = name.partition(".")
        value = view.config[name] if place == (name,) else None
        nest = f'Nest it: {{"{first}": {{"{rest}": ...}}}}'
        fixes = [Remedy(nest, {place: REMOVED, key: value}), remove(place, f"Remove it, or nest it: {nest[9:]}")]
        return finding("unknown-key", "error", key, message, fixes, source)
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
            remove(place, "Remove it, or run a release that reads it"),
            "tools/make_deepspeed_keys.py, from DeepSpeed's own releases",
        )  # fmt: skip
    fixes = _meant(view, key, name, part, place)
    severity: Severity = "error" if refuses or fixes else "warning"
    return finding("unknown-key", severity, key, done, [*fixes, remove(place)], source)


def _meant(view: ConfigurationView, key: str, name: str, part: str, place: tuple[str, ...]) -> list[Remedy]:
    """Advice on what an unknown key was probably meant for: a name that resembles it, or its place in another part."""
    near = _nearest_name(name.lower()[:80], tuple(view.release.children(part)))
    if near is not None:
        return _meant_as(view, key, place, f"{part}.{near}" if part else near)
    if len(name) <= 2 or name in _COMMON:
        return []
    places = [known_key for known_key in view.release.places(name) if known_key != key]
    replaced = [known_key for known_key in places if (view.release.fact(known_key) or "").startswith("deprecated")]
    current = [known_key for known_key in places if known_key not in replaced]
    if current:
        text = f"It is known as {' and as '.join(current[:2])}: write it there if that is meant"
        present = [known_key for known_key in current if view.has(known_key)]
        if present:
            return [remove(place, f"Remove it: the file has {present[0]}, which is the key for it")]
        moved = Remedy(text, {place: REMOVED, current[0]: view.value(key)})
        return [moved, remove(place, f"{text} and fits the rest of the file; else remove it")]
    return _meant_as(view, key, place, replaced[0]) if replaced else []


@lru_cache(maxsize=1024)  # advice is tried on the whole file, again and again
def _nearest_name(name: str, valid: tuple[str, ...]) -> str | None:
    """The valid name that resembles a misspelt one; None where none does."""
    return next(iter(difflib.get_close_matches(name, valid, n=1, cutoff=0.7)), None)


def _meant_as(view: ConfigurationView, key: str, place: tuple[str, ...], known_key: str) -> list[Remedy]:
    """Advice to write an unknown key as one that is known, or as that one's successor where it is deprecated."""
    value = view.value(key) if len(place) == 1 or "." not in place[-1] else None
    written: dict[str, Any] = {known_key: value}
    if (view.release.fact(known_key) or "").startswith("deprecated"):
        successor = _successor(view, known_key)
        holder = ConfigurationView({place[-1]: value}, view.setting, view.release)
        written = _as_successor(holder, place[-1], successor)
        known_key = successor
    if _has_either_name(view, known_key):
        return [remove(place, f"Remove it: the file has {known_key} ({shown(view.value(known_key))})")]
    fits = f"Remove it, or write {known_key} if that is meant, in a value that fits the rest of the file"
    return [Remedy(f"Write {known_key} if that is meant", {place: REMOVED, **written}), remove(place, fits)]


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
