"""Keys: unknown, misspelt, misplaced, removed, deprecated, or of another release."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from vitscale.deepspeed_lint.advice import REMOVED, FileFinding, Remedy, remove
from vitscale.deepspeed_lint.view import ConfigurationView, KeyInFile, finding, keys_in
from vitscale.errors import shown
from vitscale.present.document import Severity

_MOST = 50
"""Most unknown keys that are named one by one: a file with more is hardly a configuration."""

_COMMENTS = ("_", "#", "//", "$", "comment")


def release_not_in_the_table(view: ConfigurationView) -> Iterator[FileFinding]:
    """A version that the table of keys lacks, or no installed DeepSpeed."""
    release = view.release
    source = "tools/make_deepspeed_keys.py"
    if not view.target.installed:
        message = f"DeepSpeed is not installed here: the file is judged for {release.version}"
        yield finding("deepspeed-version", "note", "", message, "Name the version you run with --deepspeed", source)
    elif not release.exact:
        message = (
            f"The table of keys does not know DeepSpeed {shown(release.target_version)}: the file is judged for the "
            f"nearest release that it knows, {release.version}"
        )
        fix = f"Look up keys that changed after {release.version} in the release notes"
        yield finding("deepspeed-version", "note", "", message, fix, source)


def not_json() -> FileFinding:
    """A file that is Hjson and no JSON: it has comments, commas that trail, or texts without quotes."""
    return finding(
        "not-json",
        "note",
        key="",
        message=(
            "The file is Hjson: DeepSpeed reads it, but the Hugging Face Trainer and Accelerate read JSON only, "
            "and fail"
        ),
        fix="Take out comments and trailing commas where one of these reads the file",
        source=(
            "deepspeed/runtime/config.py (hjson.load, since 0.8.1) and accelerate/utils/deepspeed.py of 1.15 "
            "(json.load)"
        ),
    )


def unknown_and_removed_keys(view: ConfigurationView) -> Iterator[FileFinding]:
    """Keys in the file that the release does not know in their place, refuses or deprecates."""
    unknown_count = 0
    for key in keys_in(view):
        found = _finding_on_key(view, key)
        if found is None:
            continue
        if found.kind == "unknown-key":
            unknown_count += 1
            if unknown_count > _MOST:
                yield finding(
                    "unknown-key",
                    "warning",
                    key="",
                    message=f"There are more unknown keys than the {_MOST} that are told",
                    fix="Look whether this is a DeepSpeed configuration",
                    source=view.source("runtime/config.py"),
                )
                return
        yield found


def _finding_on_key(view: ConfigurationView, key: KeyInFile) -> FileFinding | None:
    """Return what is wrong with a key in its place; None where the release reads it, or it is a comment."""
    release = view.release
    if key.dotted == "data_parallel_size" and release.fact("sequence_parallel_size") is not None:
        return None  # deepspeed/__init__.py, outside what the table is made from, makes a mesh of both
    fact = None if "." in key.name else release.fact(key.dotted)
    if fact == "refused":
        message = f"DeepSpeed {release.version} has this no more, and refuses a file that holds it"
        fix = f"Remove it, or run a release that read it ({release.read_in(key.dotted) or 'before 0.9.5'})"
        source = view.source("runtime/config.py")
        return finding("removed-key", "error", key.dotted, message, remove(key.dotted, fix), source)
    if fact is not None and fact.startswith("deprecated"):
        return _deprecated(view, key)
    is_part_strict = release.fact(key.part) == "strict"  # it refuses keys that it does not know
    other_name = f"{key.part}.{key.name.removeprefix('stage3_')}"
    if is_part_strict and key.name.startswith("stage3_") and view.has(other_name):
        message = f"It is another name of {other_name}, and DeepSpeed refuses a file with both"
        fix_one = remove(key.dotted, "Remove one of them")
        return finding("two-names", "error", key.dotted, message, fix_one, _source_of_part(view, key.part))
    is_comment = key.name.lower().startswith(_COMMENTS) and not is_part_strict
    takes_any_key = release.fact(key.part) == "open"
    if fact is None and not takes_any_key and not is_comment:
        return _unknown(view, key, is_refused=is_part_strict)
    return None


def _source_of_part(view: ConfigurationView, part: str) -> str:
    return view.source(_FILES.get(part, "runtime/config.py"))


def _deprecated(view: ConfigurationView, key: KeyInFile) -> FileFinding:
    """A deprecated key, which DeepSpeed refuses beside its successor."""
    successor = _successor(view, key.dotted)
    new_name = successor.removeprefix(f"{key.part}.")
    source = _source_of_part(view, key.part)
    if _has_either_name(view, successor):
        message = f"DeepSpeed refuses this deprecated key together with {new_name}"
        return finding("deprecated-key", "error", key.dotted, message, remove(key.dotted), source)
    message = f"DeepSpeed warns that this key is deprecated in favour of {new_name}"
    changes = {key.dotted: REMOVED} | _as_successor(view, key.dotted, successor)
    device = ' with "device": "cpu"' if f"{successor}.device" in changes else ""
    fixes = [
        Remedy(f"Use {successor}{device}", changes),
        remove(key.dotted, f"Remove it, or use {successor}"),
    ]
    return finding("deprecated-key", "warning", key.dotted, message, fixes, source)


def _successor(view: ConfigurationView, key: str) -> str:
    """Return the dotted key, or keys in words, in favour of which a key is deprecated."""
    fact = view.release.fact(key) or ""
    part = key.rpartition(".")[0]
    return f"{part}.{fact.partition(': ')[2]}"


def _has_either_name(view: ConfigurationView, key: str) -> bool:
    """Whether the file has a key of zero_optimization, with or without "stage3_" before its name."""
    part, _, name = key.rpartition(".")
    return view.has(key) or view.has(f"{part}.stage3_{name}")


def _as_successor(view: ConfigurationView, key: str, successor: str) -> dict[str, Any]:
    """Return changes that say the same under a key's new name; none where the old one was off."""
    value = view.value(key)
    if " or " in successor:  # there are several, in words
        return {}
    if successor.endswith(("offload_optimizer", "offload_param")):
        return {f"{successor}.device": "cpu"} if value is True else {}
    return {successor: value}


def _unknown(view: ConfigurationView, key: KeyInFile, *, is_refused: bool) -> FileFinding:
    """A key that the release does not know in its place, and what it was probably meant for.

    Args:
        view: the file.
        key: the key.
        is_refused: whether DeepSpeed refuses the file for it; else it ignores the key.
    """
    release = view.release
    if "." in key.name and release.fact(key.dotted) is not None:
        return _name_with_dots(view, key)
    effect = f"DeepSpeed {release.version} does not know this key, and ignores it without a word"
    if is_refused:
        effect = f"DeepSpeed {release.version} refuses a file with it"
    other_releases = release.read_in(key.dotted)
    if other_releases is not None:
        return finding(
            "key-of-another-release",
            "error" if is_refused else "warning",
            key=key.dotted,
            message=f"{effect}: only other releases read it ({other_releases})",
            fix=remove(_place_of(key), "Remove it, or run a release that reads it"),
            source="tools/make_deepspeed_keys.py, from DeepSpeed's own releases",
        )
    fixes = _advice_for_unknown(view, key)
    severity: Severity = "error" if is_refused or fixes else "warning"
    source = _source_of_part(view, key.part)
    return finding("unknown-key", severity, key.dotted, effect, [*fixes, remove(_place_of(key))], source)


def _place_of(key: KeyInFile) -> tuple[str, ...]:
    """Return the names that lead to a key, one by one, because its last name may have dots."""
    return (*key.part.split("."), key.name) if key.part else (key.name,)


def _name_with_dots(view: ConfigurationView, key: KeyInFile) -> FileFinding:
    """A key whose name is a dotted key that DeepSpeed knows, such as "zero_optimization.stage"."""
    place = _place_of(key)
    message = f"DeepSpeed {view.release.version} knows no names with dots, and ignores this one without a word"
    outer, _, inner = key.name.partition(".")
    value = key.value if not key.part else None
    nested = f'{{"{outer}": {{"{inner}": ...}}}}'
    fixes = [
        Remedy(f"Nest it: {nested}", {place: REMOVED, key.dotted: value}),
        remove(place, f"Remove it, or nest it: {nested}"),
    ]
    return finding("unknown-key", "error", key.dotted, message, fixes, _source_of_part(view, key.part))


def _advice_for_unknown(view: ConfigurationView, key: KeyInFile) -> list[Remedy]:
    """Return advice on what an unknown key was probably meant for: a name that resembles it, or another part.

    Empty where nothing resembles it.
    """
    release = view.release
    similar_name = _nearest_name(key.name.lower()[:80], tuple(release.children(key.part)))
    if similar_name is not None:
        return _advice_to_rename(view, key, f"{key.part}.{similar_name}" if key.part else similar_name)
    if len(key.name) <= 2 or key.name in _COMMON:
        return []
    deprecated: list[str] = []
    current: list[str] = []
    for known_key in release.places(key.name):
        if known_key == key.dotted:
            continue
        is_deprecated = (release.fact(known_key) or "").startswith("deprecated")
        (deprecated if is_deprecated else current).append(known_key)
    if current:
        return _advice_to_move(view, key, current)
    return _advice_to_rename(view, key, deprecated[0]) if deprecated else []


def _advice_to_move(view: ConfigurationView, key: KeyInFile, known_keys: list[str]) -> list[Remedy]:
    """Return advice to write a key in one of the other places where DeepSpeed knows it."""
    place = _place_of(key)
    for known_key in known_keys:
        if view.has(known_key):
            return [remove(place, f"Remove it: the file has {known_key}, which is the key for it")]
    text = f"It is known as {' and as '.join(known_keys[:2])}: write it there if that is meant"
    moved = Remedy(text, {place: REMOVED, known_keys[0]: view.value(key.dotted)})
    return [moved, remove(place, f"{text} and fits the rest of the file; else remove it")]


@lru_cache(maxsize=1024)  # advice is tried on the whole file, again and again
def _nearest_name(name: str, valid: tuple[str, ...]) -> str | None:
    """Return the valid name that resembles a misspelt one; None where none does."""
    matches = difflib.get_close_matches(name, valid, n=1, cutoff=0.7)
    return matches[0] if matches else None


def _advice_to_rename(view: ConfigurationView, key: KeyInFile, known_key: str) -> list[Remedy]:
    """Return advice to write an unknown key as one that is known, or as that one's successor if it is deprecated."""
    place = _place_of(key)
    value = view.value(key.dotted) if not key.part or "." not in key.name else None
    written: dict[str, Any] = {known_key: value}
    if (view.release.fact(known_key) or "").startswith("deprecated"):
        successor = _successor(view, known_key)
        only_this_key = ConfigurationView({key.name: value}, view.target, view.release)
        written = _as_successor(only_this_key, key.name, successor)
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
