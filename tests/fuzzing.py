"""Every reader of what others wrote, on inputs that nobody meant: `python tests/fuzzing.py --inputs 100000`.

An input is a sound file with some of its bytes changed, cut, doubled or replaced by what readers stumble over; of
JSON every second has values of its own replaced instead, so that it is read to its end. It is made of the reader's
name and its number alone: what fails is made again by `--reader NAME --from NUMBER --inputs 1`, and a run that was
cut goes on with `--from`. A reader may answer, or raise the program's own error; anything else, an answer that takes
longer than `_HANG_SECONDS`, memory beyond `_MOST_BYTES` or a file beside its folder is a fault. Inputs that once were
faults are kept in `fuzz_cases/`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz_readers import READERS
from vitscale.errors import VitscaleError

CASES = Path(__file__).parent / "fuzz_cases"
_HANG_SECONDS = 30
_MOST_BYTES = 6 << 30
STUMBLES = (
    b"NaN", b"Infinity", b"-1", b"1e400", b"9" * 400, b"0x10", b"null", b"true", b"{}", b"[]", b'""', b"[" * 3000,
    b"{" * 3000, b'{"a":' * 2000, b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n", b",,,,", b'"', b"\\u0000",
    b"\\ud800", b"../../x", b"/etc/passwd", b"%s%n", b"<script>", b"$(touch x)", b"\x1b[2J", b"\xe2\x80\xae", b"-0",
    b"1_000", b"'" * 3,
)  # fmt: skip
"""What readers stumble over."""


def mutated(seed: bytes, source: random.Random) -> bytes:
    """A sound file with one to eight things done to it."""
    content = bytearray(seed)
    for _ in range(source.choice((1, 1, 2, 3, 8))):
        at = source.randrange(len(content) + 1)
        end = min(len(content), at + source.choice((1, 2, 8, 64, 1024)))
        match source.randrange(7):
            case 0:
                content[at:end] = source.choice(STUMBLES)
            case 1:
                content[at:at] = source.choice(STUMBLES)
            case 2:
                del content[at:end]
            case 3:
                content[at:at] = content[at:end] * source.choice((1, 2, 20))
            case 4:
                del content[at:]
            case 5 if content:
                content[at % len(content)] ^= 1 << source.randrange(8)
            case _:
                other = source.randrange(len(content) + 1)
                content[at:end] = content[other : other + end - at]
    return bytes(content)


_ODD: tuple[object, ...] = (
    None, True, -1, 0, 1e308, -0.0, 10**30, 2**63, "", "0", "\ud800", "../../x", "\u202e\x1b[2J", "1e999", [], {}, [[]],
    [None], {"": 0}, [0] * 300, "x" * 70_000,
)  # fmt: skip


def _with_odd_values(document: object, source: random.Random) -> bytes:
    """JSON of the same form, with one to three of its values replaced, removed, doubled or exchanged."""
    whole = [document]
    for _ in range(source.choice((1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        unseen: list[Any] = [whole]
        while unseen:
            each = unseen.pop()
            own = list(each.items() if isinstance(each, dict) else enumerate(each))
            places += [(each, key) for key, _ in own]
            unseen += [value for _, value in own if isinstance(value, dict | list)]
        within, key = source.choice(places)
        match source.randrange(5):
            case 0 if len(places) > 1 and within is not whole:
                del within[key]
            case 1:
                other, another = source.choice(places)
                within[key] = copy.deepcopy(other[another])
            case 2 if isinstance(within, list):
                within.append(copy.deepcopy(within[key]))
            case _:
                within[key] = copy.deepcopy(source.choice(_ODD))
    return json.dumps(whole[0]).encode()


def case(reader: str, number: int) -> bytes:
    """The input of a number: the same everywhere."""
    source = random.Random(f"{reader} {number}")
    seed = _seed(reader)
    if number % 2 and (documents := _documents(reader)):
        lines = seed.splitlines(keepends=True) if len(documents) > 1 else [seed]
        at = source.randrange(len(documents))
        lines[at] = _with_odd_values(copy.deepcopy(documents[at]), source) + b"\n"
        return b"".join(lines)
    return mutated(seed, source)


@cache
def _documents(reader: str) -> list[object]:
    """The sound file as JSON, or as a line of JSON each; empty where it is none."""
    seed = _seed(reader)
    for parts in ([seed], seed.splitlines()):
        try:
            return [json.loads(part) for part in parts]
        except ValueError:
            continue
    return []


@cache
def _seed(reader: str) -> bytes:
    return READERS[reader][0]()


def fault(reader: str, content: bytes) -> BaseException | None:
    """What a reader does with an input that it must not."""
    with tempfile.TemporaryDirectory(prefix="vitscale-fuzz-") as folder:
        path = Path(folder) / "own" / "input"
        path.parent.mkdir()
        path.write_bytes(content)
        signal.alarm(_HANG_SECONDS)
        try:
            READERS[reader][1](path)
        except VitscaleError:
            pass
        except (Exception, Hang) as error:
            return error
        finally:
            signal.alarm(0)
        written = [entry.name for entry in os.scandir(folder)]
        return None if written == ["own"] else PermissionError(f"it wrote beside its folder: {written}")


class Hang(BaseException):
    """No `Exception`: a reader that makes its own error of all of those would hide it."""


def _hung(_: int, __: FrameType | None) -> None:
    raise Hang(f"no answer for {_HANG_SECONDS} s")


def main(arguments: list[str] | None = None) -> int:
    """Tries the inputs; 1 where one was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1000, help="of each reader")
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first")
    parser.add_argument("--reader", choices=READERS, action="append", help="these alone")
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGALRM, _hung)
    if arguments is None:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    faults = 0
    for reader in asked.reader or READERS:
        began = time.monotonic()
        for number in range(asked.first, asked.first + asked.inputs):
            error = fault(reader, content := case(reader, number))
            if error is not None:
                faults += 1
                print(f"{reader} {number}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                if arguments is None:
                    (CASES / f"{reader.replace(' ', '-')}-{number}").write_bytes(content)
        seconds = time.monotonic() - began
        print(f"{reader}: {asked.inputs:,} inputs in {seconds:.0f} s", flush=True)
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
