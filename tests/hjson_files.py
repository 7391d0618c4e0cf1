"""Hjson files in all its spellings, each with the line of every key, for tests of what reads them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

WORDS = (
    "stage",
    "fp16",
    "enabled",
    "optimizer",
    "type",
    "params",
    "lr",
    "betas",
    "zero_optimization",
    "a b",
    "it's",
    "é",
)
NUMBERS = ("0", "16", "-3", "5e8", "1e-8", "16.0", "1.5E+3", "2e10", "12345678901", "-0.0", "0.1")
TEXTS = (
    "auto",
    "cpu",
    "AdamW",
    "a, b",
    "/local/nvme",
    "x # no comment",
    "3 of 4",
    "true story",
    "-1 or so",
    "a: {b}",
    "",
)
COMMENTS = (" # one: 1", " // two: {", " /* three: [ */", ' # "four": 4')


class HjsonFile(NamedTuple):
    """A text and dotted key -> the line where it stands first."""

    text: str
    lines: dict[str, int]


@dataclass
class _Writer:
    random: random.Random
    parts: list[str] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    line: int = 1

    def write(self, text: str) -> None:
        self.parts.append(text)
        self.line += text.count("\n")

    def gap(self, *, needs_line_end: bool = False) -> None:
        if self.random.random() < 0.2:
            comment = self.random.choice(COMMENTS)
            self.write(comment)
            needs_line_end = needs_line_end or not comment.endswith("*/")
        if needs_line_end or self.random.random() < 0.5:
            self.write("\n" + " " * self.random.randrange(4))

    def value(self, depth: int, above: str) -> bool:
        """Writes a value; whether only the end of a line ends it."""
        kind = self.random.random()
        if depth < 3 and kind < 0.3:
            self.object(depth + 1, above)
        elif depth < 3 and kind < 0.4:
            self.array(depth + 1)
        elif kind < 0.7:
            self.write(self.random.choice((*NUMBERS, "true", "false", "null")))
        else:
            return self.string()
        return False

    def string(self) -> bool:
        text = self.random.choice(TEXTS)
        form = self.random.random()
        if form < 0.5 or not text:
            self.write(json.dumps(text, ensure_ascii=self.random.random() < 0.5))
        elif form < 0.6:
            self.write("'" + text + "'")
        elif form < 0.7:
            self.write(f"'''\n  {text}\n  more: [of it]\n  '''")
        else:
            self.write(text)
            return True
        return False

    def object(self, depth: int, above: str, *, braces: bool = True) -> None:
        if braces:
            self.write("{")
        for name in self.random.sample(WORDS, self.random.randrange(1, 5)):
            self.gap()
            key = f"{above}.{name}" if above else name
            self.lines.setdefault(key, self.line)
            bare = name.isalnum() and self.random.random() < 0.3
            self.write(name if bare else json.dumps(name))
            self.write(self.random.choice((":", " : ", ":\n", ": /* of: it */ ")))
            ends_line = self.value(depth, key)
            self.separate(ends_line=ends_line)
        self.gap()
        if braces:
            self.write("}")

    def array(self, depth: int) -> None:
        self.write("[")
        for _ in range(self.random.randrange(4)):
            self.gap()
            if self.random.random() < 0.2:
                self.write("{}")
                self.separate(ends_line=False)
            else:
                self.separate(ends_line=self.value(3, ""))
        self.gap()
        self.write("]")

    def separate(self, *, ends_line: bool) -> None:
        if ends_line:
            self.write("\n")
        elif self.random.random() < 0.7:
            self.write(",")
        else:
            self.gap(needs_line_end=True)


def hjson_file(seed: int) -> HjsonFile:
    """A file by chance, the same for the same seed."""
    writer = _Writer(random.Random(seed))
    writer.gap()
    writer.object(0, "", braces=writer.random.random() < 0.8)
    writer.gap()
    return HjsonFile("".join(writer.parts), writer.lines)


def mutated(text: str, seed: int) -> str:
    """The text with a few characters taken out, doubled or put in."""
    chance = random.Random(seed)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice(("", *"{}[],:\"'#/*\n-1")) + text[at + chance.randrange(3) :]
    return text


def exactly(values: Any) -> str:
    """The values as text, in which 1 and 1.0, and another order of keys, are told apart."""
    return json.dumps(values)
