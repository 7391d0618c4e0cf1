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

_MOST_UNKNOWN_KEYS_LISTED = 50
"""Most unknown keys that are named one by one: a file with more is hardly a configuration."""

_COMMENT_PREFIXES = ("_", "#", "//", "$", "comment")
"""Beginnings of keys that people use for comments, in small letters."""


def release_not_in_the_table(view: ConfigurationView) -> Iterator[FileFinding]:
    """Yield a finding where the table of keys does not have the version, or DeepSpeed is not installed."""
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
    """Return the finding on a file that is Hjson but not JSON: with comments, stray commas or unquoted texts."""
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
    """Yield a finding for each key in the file that the release does not know in its place, refuses or deprecates.

    Only unknown keys are limited in number. At the first one beyond `_MOST_UNKNOWN_KEYS_LISTED` a finding says that
    there are more, and the rest of the file is not checked.
    """
    unknown_keys_listed = 0
    for key in keys_in(view):
        key_finding = _finding_on_key(view, key)
        if key_finding is None:
            continue
        if key_finding.kind == "unknown-key":
            if unknown_keys_listed == _MOST_UNKNOWN_KEYS_LISTED:
                yield _more_unknown_keys(view)
                return
            unknown_keys_listed += 1
        yield key_finding


def _more_unknown_keys(view: ConfigurationView) -> FileFinding:
    """Return the finding on a file with more unknown keys than are named."""
    return finding(
        "unknown-key",
        "warning",
        key="",
        message=f"There are more unknown keys than the {_MOST_UNKNOWN_KEYS_LISTED} that are told",
        fix="Look whether this is a DeepSpeed configuration",
        source=view.source("runtime/config.py"),
    )


def _finding_on_key(view: ConfigurationView, key: KeyInFile) -> FileFinding | None:
    """Return what is wrong with a key in its place; None where the release reads it, or it is a comment.

    The release has a fact on each key that it knows: "refused", "deprecated: NEW_NAME", or the type that it reads. The
    fact on the part around the key is "strict" where DeepSpeed refuses unknown keys in it, and "open" where it takes
    any.
    """
    release = view.release
    if key.dotted == "data_parallel_size" and release.fact("sequence_parallel_size") is not None:
        return None  # deepspeed/__init__.py, outside what the table is made from, makes a mesh of both
    key_fact = None if "." in key.name else release.fact(key.dotted)
    if key_fact == "refused":
        return _removed_key_finding(view, key)
    if key_fact is not None and key_fact.startswith("deprecated"):
        return _deprecated_key_finding(view, key)
    part_fact = release.fact(key.part)
    refuses_unknown_keys = part_fact == "strict"
    other_name = f"{key.part}.{key.name.removeprefix('stage3_')}"
    has_both_names = key.name.startswith("stage3_") and view.has(other_name)
    if refuses_unknown_keys and has_both_names:
        return _two_names_finding(view, key, other_name)
    if key_fact is not None or part_fact == "open":
        return None
    is_comment = key.name.lower().startswith(_COMMENT_PREFIXES)
    if is_comment and not refuses_unknown_keys:
        return None
    return _unknown_key_finding(view, key, is_refused=refuses_unknown_keys)


def _two_names_finding(view: ConfigurationView, key: KeyInFile, other_name: str) -> FileFinding:
    """Return the finding on a key that stands in the file with "stage3_" before its name and without."""
    message = f"It is another name of {other_name}, and DeepSpeed refuses a file with both"
    fix = remove(key.dotted, "Remove one of them")
    return finding("two-names", "error", key.dotted, message, fix, _source_of_part(view, key.part))


def _source_of_part(view: ConfigurationView, part: str) -> str:
    """Return the file of DeepSpeed that reads a part of the configuration, with its release, in words."""
    return view.source(_READING_FILE_BY_PART.get(part, "runtime/config.py"))


def _removed_key_finding(view: ConfigurationView, key: KeyInFile) -> FileFinding:
    """Return the finding on a key that earlier releases read and this one refuses."""
    release = view.release
    message = f"DeepSpeed {release.version} has this no more, and refuses a file that holds it"
    fix = f"Remove it, or run a release that read it ({release.read_in(key.dotted) or 'before 0.9.5'})"
    source = view.source("runtime/config.py")
    return finding("removed-key", "error", key.dotted, message, remove(key.dotted, fix), source)


def _deprecated_key_finding(view: ConfigurationView, key: KeyInFile) -> FileFinding:
    """Return the finding on a deprecated key; an error if its successor is there too, which DeepSpeed refuses."""
    successor = _successor(view, key.dotted)
    new_name = successor.removeprefix(f"{key.part}.")
    source = _source_of_part(view, key.part)
    if _has_either_name(view, successor):
        message = f"DeepSpeed refuses this deprecated key together with {new_name}"
        return finding("deprecated-key", "error", key.dotted, message, remove(key.dotted), source)
    message = f"DeepSpeed warns that this key is deprecated in favour of {new_name}"
    changes = {key.dotted: REMOVED} | _values_of_successor(view.value(key.dotted), successor)
    device = ' with "device": "cpu"' if f"{successor}.device" in changes else ""
    fixes = [
        Remedy(f"Use {successor}{device}", changes),
        remove(key.dotted, f"Remove it, or use {successor}"),
    ]
    return finding("deprecated-key", "warning", key.dotted, message, fixes, source)


def _successor(view: ConfigurationView, key: str) -> str:
    """Return the dotted key, or keys in words, in favour of which a key is deprecated.

    Example: "zero_optimization.offload_optimizer" for "zero_optimization.cpu_offload", whose fact is
    "deprecated: offload_optimizer".
    """
    fact = view.release.fact(key) or ""
    part = key.rpartition(".")[0]
    new_name = fact.partition(": ")[2]
    return f"{part}.{new_name}"


def _has_either_name(view: ConfigurationView, key: str) -> bool:
    """Whether the file has a key of zero_optimization, with or without "stage3_" before its name."""
    part, _, name = key.rpartition(".")
    return view.has(key) or view.has(f"{part}.stage3_{name}")


def _values_of_successor(value: object, successor: str) -> dict[str, Any]:
    """Return the dotted keys, with values, that say with a successor what a deprecated key says with its value.

    Return {} where there are several successors, or the key was a switch for an offload and is off.

    Example: {"zero_optimization.offload_optimizer.device": "cpu"} for the value True of "cpu_offload".
    """
    if " or " in successor:  # there are several, in words
        return {}
    if successor.endswith(("offload_optimizer", "offload_param")):
        return {f"{successor}.device": "cpu"} if value is True else {}
    return {successor: value}


def _unknown_key_finding(view: ConfigurationView, key: KeyInFile, *, is_refused: bool) -> FileFinding:
    """Return the finding on a key that the release does not know in its place.

    Three cases: the name of the key is a dotted path that should be nested; only other releases read the key; or no
    release does, and the advice is what it was probably meant for.

    Args:
        view: the file.
        key: the key.
        is_refused: whether DeepSpeed refuses the file for it; else it ignores the key.
    """
    release = view.release
    is_known_path = "." in key.name and release.fact(key.dotted) is not None
    if is_known_path:
        return _dotted_name_finding(view, key)
    effect = f"DeepSpeed {release.version} does not know this key, and ignores it without a word"
    if is_refused:
        effect = f"DeepSpeed {release.version} refuses a file with it"
    other_releases = release.read_in(key.dotted)  # in words: "from 0.9.5 to 0.12.6"
    if other_releases is not None:
        return finding(
            "key-of-another-release",
            "error" if is_refused else "warning",
            key=key.dotted,
            message=f"{effect}: only other releases read it ({other_releases})",
            fix=remove(_names_to(key), "Remove it, or run a release that reads it"),
            source="tools/make_deepspeed_keys.py, from DeepSpeed's own releases",
        )
    likely_fixes = _advice_for_unknown_key(view, key)
    severity: Severity = "error" if is_refused or likely_fixes else "warning"
    source = _source_of_part(view, key.part)
    return finding("unknown-key", severity, key.dotted, effect, [*likely_fixes, remove(_names_to(key))], source)


def _names_to(key: KeyInFile) -> tuple[str, ...]:
    """Return the names that lead to a key: ("zero_optimization", "stage"). The last one may have dots itself."""
    return (*key.part.split("."), key.name) if key.part else (key.name,)


def _dotted_name_finding(view: ConfigurationView, key: KeyInFile) -> FileFinding:
    """Return the finding on a key whose name is a dotted key that DeepSpeed knows: "zero_optimization.stage"."""
    place = _names_to(key)
    message = f"DeepSpeed {view.release.version} knows no names with dots, and ignores this one without a word"
    outer, _, inner = key.name.partition(".")
    value = key.value if not key.part else None
    nested = f'{{"{outer}": {{"{inner}": ...}}}}'
    fixes = [
        Remedy(f"Nest it: {nested}", {place: REMOVED, key.dotted: value}),
        remove(place, f"Remove it, or nest it: {nested}"),
    ]
    return finding("unknown-key", "error", key.dotted, message, fixes, _source_of_part(view, key.part))


def _advice_for_unknown_key(view: ConfigurationView, key: KeyInFile) -> list[Remedy]:
    """Return advice on what an unknown key was probably meant for: a similar name, or the same name in another part.

    Return an empty list where DeepSpeed knows neither.
    """
    release = view.release
    similar_name = _nearest_name(key.name.lower()[:80], tuple(release.children(key.part)))
    if similar_name is not None:
        return _advice_to_rename(view, key, f"{key.part}.{similar_name}" if key.part else similar_name)
    if len(key.name) <= 2 or key.name in _NAMES_IN_MANY_PARTS:
        return []
    same_name_elsewhere = [known_key for known_key in release.keys_ending_in(key.name) if known_key != key.dotted]
    current = [known_key for known_key in same_name_elsewhere if not _is_deprecated(view, known_key)]
    if current:
        return _advice_to_move(view, key, current)
    return _advice_to_rename(view, key, same_name_elsewhere[0]) if same_name_elsewhere else []


def _is_deprecated(view: ConfigurationView, known_key: str) -> bool:
    """Whether the release reads a dotted key, but warns that it is deprecated."""
    return (view.release.fact(known_key) or "").startswith("deprecated")


def _advice_to_move(view: ConfigurationView, key: KeyInFile, known_keys: list[str]) -> list[Remedy]:
    """Return advice to write a key in one of the other parts in which DeepSpeed knows its name.

    Args:
        view: the file.
        key: the key.
        known_keys: the dotted keys in those parts, one or more.
    """
    place = _names_to(key)
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
    """Return advice to write the value of an unknown key under a known one.

    Args:
        view: the file.
        key: the unknown key.
        known_key: the dotted key that was probably meant. Where it is deprecated, the advice names its successor.
    """
    place = _names_to(key)
    value = view.value(key.dotted) if not key.part or "." not in key.name else None
    new_key = known_key
    new_values: dict[str, Any] = {known_key: value}
    if _is_deprecated(view, known_key):
        new_key = _successor(view, known_key)
        new_values = _values_of_successor(None if "." in key.name else value, new_key)
    if _has_either_name(view, new_key):
        return [remove(place, f"Remove it: the file has {new_key} ({shown(view.value(new_key))})")]
    removal = f"Remove it, or write {new_key} if that is meant, in a value that fits the rest of the file"
    return [Remedy(f"Write {new_key} if that is meant", {place: REMOVED, **new_values}), remove(place, removal)]


_NAMES_IN_MANY_PARTS = ("enabled", "params", "dtype", "type", "device", "verbose", "debug", "mode", "name", "project")
"""Names that are in so many parts that finding one elsewhere is no hint."""


_READING_FILE_BY_PART = {
    "zero_optimization": "runtime/zero/config.py",
    "zero_optimization.offload_optimizer": "runtime/zero/offload_config.py",
    "zero_optimization.offload_param": "runtime/zero/offload_config.py",
    "activation_checkpointing": "runtime/activation_checkpointing/config.py",
    "flops_profiler": "profiling/config.py",
    "comms_logger": "comm/config.py",
    "timers": "utils/config.py",
    "timers.throughput": "utils/config.py",
}
"""Part of the configuration -> the file of DeepSpeed that reads it; the others are read in runtime/config.py."""
