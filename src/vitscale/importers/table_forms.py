"""Brings tables as people publish them into one form: a row for each measurement, a column for its GPU count.

Others have a column for each GPU count, a row of GPU counts, several speeds side by side, or a name in a column of its
own for what is compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from vitscale.importers.contents import spelled_seconds
from vitscale.importers.grids import Grid, Line
from vitscale.importers.headings import BATCH, CELLS_OF, OF_A_RUN, OF_A_SETTING, OWN, SPEEDS, Count, Heading, speed_told
from vitscale.trial.trial import Precision

_EMPTY = re.compile(r"[-\u2013\u2014]*|n/?a|oom", re.IGNORECASE)
_UNIT_OF_RATE = re.compile(r"(?:(?<=\d )|(?<=\d[kK] )|(?<=\d)(?![kK]\b))[A-Za-z][A-Za-z/. ]*$")
_EACH_RATE = re.compile(
    r"\b(?:throughput|speed)\b[^.;:]{0,60}\bper[ -]gpu\b|\bper[ -]gpu\b[^.;:]{0,60}\b(?:throughput|speed)\b"
)
_NUMBER = re.compile(r"[\d.,]+(?:e[+-]?\d+)?", re.IGNORECASE)
_SAID = re.compile(
    r"\b(?:training|throughput|speed|performance|time|images?|imgs?|samples?|sequences?|sec(?:ond)?s?|m?s)\b",
    re.IGNORECASE,
)
_OF_A_REPEAT = re.compile(
    r"\b(?:\d{4}-\d\d|\d{1,2}:\d\d|\d{1,4}[./]\d{1,2}[./]\d{1,4}|(?:mon|tues|wednes|thurs|fri|satur|sun)day"
    r"|(?:run|repeat|trial|seed|rep|try|attempt|job)\W*\d+)\b",
    re.IGNORECASE,
)
"""Cells that are moments, or numbers of repeats."""
_NO_NAME = re.compile(rf"{_NUMBER.pattern}|true|false|yes|no|on|off", re.IGNORECASE)
"""Cells that say nothing without their heading."""
_MOST_NAMED = 8
"""Rows that a note names; of more it says that there are."""
_FIRST_RANK = re.compile(r"\b(?:gpu|rank|device|cuda)[ _:#=-]?0\b")
_NAMES = {"model", "series", "engine", "cluster", "gpu", "dataset", "precision", "layout"}
_OF_ANOTHER = re.compile(r"\b(?:pre-?train|fine-?tun|baseline|published|reported|original)")
"""Headings of GPUs on which something else ran."""
_OF_A_NODE = re.compile(r"\b(?:node|host|machine|server|instance)\b")
_REMARKS = re.compile(r"\b(?:notes?|comments?|remarks?|status|error)\b")
_MOST_SERIES, _MOST_SPEEDS = 200, 50


@dataclass(frozen=True)
class Form:
    """A table in which each row is one measurement."""

    headings: tuple[Heading, ...]
    body: tuple[Line, ...] = ()
    series: str = ""
    """The name that tells its rows from those of others in the file."""
    precision: str = ""
    """The precision that the name tells."""
    filled: tuple[str, ...] = ()
    """Sentences on cells that are taken from rows above."""


def forms(grid: Grid, cells: str | None = None, micro_batch: int | None = None) -> tuple[Form, ...]:
    """The forms of one table: as many as it has speeds side by side.

    Args:
        grid: the table.
        cells: name of the speed that its cells are, for a table with a column or row for each GPU count.
        micro_batch: images per GPU and micro-step, if the user says them: no column is taken for the batch of all then.
    """
    grid, filled = _filled(grid)
    speed = Heading.of(cells) if cells else speed_told((grid.caption, grid.title))
    form = _with_units(_turned(grid, speed) or _by_count(grid, speed) or _with_counts(grid))
    form = _of_each_gpu(form, (grid.caption, grid.title))
    form = form if micro_batch else _of_all_gpus(form)
    return tuple(replace(each, filled=(*filled, *form.filled)) for each in _each_speed(form))


def _filled(grid: Grid) -> tuple[Grid, tuple[str, ...]]:
    """The table with the names of its sections in a column of their own, and names where cells are merged; and what
    was filled so."""
    columns = [heading.column for heading in Heading.of_all(grid.head)]
    if {"run", *OF_A_RUN} & set(columns) or len(columns) < 2:
        return grid, ()
    told = []
    sections = [_section(cells, len(columns)) for _, cells in grid.body]
    if "series" not in columns and _are_sections(sections, [cells for _, cells in grid.body]):
        name, body = "", []
        for section, (line, cells) in zip(sections, grid.body, strict=True):
            name = section or name
            if not section:
                body.append((line, (*cells, name) if len(cells) == len(columns) else cells))
        grid = replace(grid, head=(*grid.head, "series"), body=tuple(body))
        told.append("rows with a name alone are taken for the series of the rows below them")
    for at, text in enumerate(grid.head[: len(columns)]):
        named = columns[at] in _NAMES or (
            columns[at] not in OWN and not _REMARKS.search(text.lower()) and (at == 0 or Heading.of(text).is_set)
        )
        if named and _are_merged([cells[at] for _, cells in grid.body if len(cells) == len(grid.head)]):
            above, body = "", []
            for line, cells in grid.body:
                above = (cells[at] or above) if len(cells) == len(grid.head) else above
                body.append((line, (*cells[:at], above, *cells[at + 1 :]) if len(cells) == len(grid.head) else cells))
            grid = replace(grid, body=tuple(body))
            told.append(f"empty cells of {text[:100]!r} are taken for the name above them")
    return grid, tuple(told)


def _section(cells: Sequence[str], width: int) -> str:
    """The name in a row that has nothing else, in its first cell or across all; empty: it is another row."""
    name = cells[0] if cells else ""
    alone = len(cells) in (1, width) and (not any(cells[1:]) or all(cell == name for cell in cells))
    return name if alone and not _NUMBER.fullmatch(name) and not _EMPTY.fullmatch(name) and not Count.of(name) else ""


def _are_sections(sections: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether these rows name what stands below them, and are no rows that lack all but their name."""
    at = [number for number, section in enumerate(sections) if section]
    lasts = [number for number in at if number + 1 == len(rows) or sections[number + 1]]
    firsts = [cells[0] for section, cells in zip(sections, rows, strict=True) if not section and cells]
    if all(not cell or _NUMBER.fullmatch(cell) for cell in firsts):
        return bool(firsts and at) and at[0] == 0 and not lasts
    return len(at) > 1 and at[0] == 0 and not lasts


def _are_merged(cells: Sequence[str]) -> bool:
    """Whether blanks in a column of names mean the name above: each name stands once, at the top of its rows."""
    names = [cell for cell in cells if cell]
    return (
        0 < len(names) < len(cells)
        and bool(cells[0])
        and not any(_NUMBER.fullmatch(name) or _EMPTY.fullmatch(name) for name in names)
        and all(name != names[before] for before, name in enumerate(names[1:]))
    )


def _of_each_gpu(form: Form, texts: Sequence[str]) -> Form:
    """The form with its rates taken for each GPU's where a caption or heading says so ("Throughput per GPU")."""
    told = any(_EACH_RATE.search(text.lower()) and not re.search(rf"\b{BATCH}\b", text.lower()) for text in texts)
    if not told or "images_per_second_per_gpu" in {own.column for own in form.headings}:
        return form
    headings = (
        replace(own, column="images_per_second_per_gpu") if own.column == "images_per_second" else own
        for own in form.headings
    )
    return replace(form, headings=tuple(headings))


def _of_all_gpus(form: Form) -> Form:
    """The form with a batch that grows exactly as the GPUs do named as that of all: each GPU's would stay as it is."""
    columns = [heading.column for heading in form.headings]
    batches = [at for at, heading in enumerate(form.headings) if re.fullmatch(rf"(?:train[ _])?{BATCH}", columns[at])]
    if len(batches) != 1 or "gpus" not in columns or {"global_batch", "micro_batch"} & set(columns):
        return form
    of_each: dict[int, set[int]] = {}
    for _, cells in form.body:
        row = dict(zip(columns, cells, strict=False))
        told = [row.get("gpus", ""), row.get(columns[batches[0]], "").replace(",", ""), row.get("grad_accum") or "1"]
        if not all(text.isdecimal() and len(text) < 10 and int(text) for text in told):
            return form
        gpus, batch, several = map(int, told)
        if batch % (gpus * several):
            return form
        of_each.setdefault(gpus, set()).add(batch // gpus)
    if len(of_each) < 2 or len(set(map(frozenset, of_each.values()))) > 1:
        return form
    headings = [replace(own, column="global_batch") if at in batches else own for at, own in enumerate(form.headings)]
    why = f"{headings[batches[0]].text[:100]!r} grows as the GPUs do: it is taken for the batch of all"
    return replace(form, headings=tuple(headings), filled=(*form.filled, why))


def _turned(grid: Grid, speed: Heading | None) -> Form | None:
    """The table turned by a quarter, where its first row has GPU counts: "GPUs", 1 and 8, or "1 GPU" and "8 GPUs" over
    rows that are called by their speeds."""
    names, *texts = grid.head
    rows = [cells for _, cells in grid.body if len(cells) == len(grid.head)]
    headings = list(Heading.of_all([cells[0] for cells in rows if cells]))
    told = [count.gpus for text in texts if (count := Count.of(text)) and not (count.speed or count.nodes or count.gpu)]
    named = [own.column in SPEEDS or Heading.of(f"{own.text} (s)").column in SPEEDS for own in headings]
    counts = list(map(str, told)) if any(named) else []
    if Heading.of(names).column == "gpus" and all(text.isdecimal() for text in texts):
        counts = texts
    if len(counts) < 2 or len(counts) < len(texts):
        return None
    for at, heading in enumerate(headings):
        if speed and heading.column not in OWN and not heading.holds_no(speed):
            headings[at] = replace(speed, text=heading.text)
    body = ((grid.line, (count, *(cells[at] for cells in rows))) for at, count in enumerate(counts, 1))
    return Form((Heading(names, "gpus"), *headings), tuple(body))


def _by_count(grid: Grid, speed: Heading | None) -> Form | None:
    """The table with a row for each of its cells, where it has a column for each GPU count."""
    if any(_FIRST_RANK.search(text.lower()) for text in grid.head):
        return None  # "GPU 1" beside "GPU 0" is the second one
    counts = {at: count for at, text in enumerate(grid.head) if (count := Count.of(text))}
    others = [(at, Heading.of(text)) for at, text in enumerate(grid.head) if at not in counts]
    if len({count.gpus for count in counts.values()}) < 2 or "gpus" in {heading.column for _, heading in others}:
        return None
    told = {count.speed and (count.speed.column, count.speed.factor) for count in counts.values()}
    of_cells = next(iter(counts.values())).speed or speed if len(told) == 1 else None
    names = [grid.head[at] for at in counts]
    of_counts = [Heading(", ".join(names), "gpus"), of_cells or Heading(CELLS_OF + names[0], CELLS_OF + names[0])]
    nodes, types = (any(getattr(count, of) for count in counts.values()) for of in ("nodes", "gpu"))
    of_counts += [Heading("nodes", "nodes")] * nodes + [Heading("gpu", "gpu")] * types
    lines = [(line, row) for line, row in grid.body if len(row) == len(grid.head)]
    others_of = [[row[at] for at, _ in others if Heading.of(row[at]).holds_no(of_cells)] for _, row in lines]
    left = dict.fromkeys(name for names in others_of for name in names)
    body = tuple(
        (
            line,
            (
                *(str(count.gpus), row[at]),
                *([str(count.nodes or "")] * nodes + [count.gpu] * types),
                *(row[other] for other, _ in others),
            ),
        )
        for (line, row), no_speed in zip(lines, others_of, strict=True)
        if not no_speed
        for at, count in counts.items()
        if not _EMPTY.fullmatch(row[at])
    )
    names = [repr(name[:100]) for name in list(left)[:_MOST_NAMED]]
    if len(left) > _MOST_NAMED:
        names.append("...")
    named = ", ".join(names)
    why = (f"rows are left out that by their name hold another speed or none: {named}",) if left else ()
    return Form((*of_counts, *(heading for _, heading in others)), body, filled=why)


def _with_counts(grid: Grid) -> Form:
    """The table as it stands; a column all of whose cells count GPUs ("8 GPUs") tells them. Beside a column of nodes
    only GPUs of a "node type" are known for what they are: those of each node."""
    headings = list(Heading.of_all(grid.head))
    rows = [cells for _, cells in grid.body if len(cells) == len(headings)]
    columns = {heading.column for heading in headings}
    counting = []
    for at, own in enumerate(headings):
        counts = [Count.of(row[at]) for row in rows]
        if own.column not in OWN - {"gpu"} and all(count and count.speed is None for count in counts):
            counting += [] if _OF_ANOTHER.search(own.text.lower()) else [(own, {row[at] for row in rows}, at)]
    if len(counting) == 1 and "gpus" not in columns:
        ((own, different, at),) = counting
        if "nodes" not in columns and len(different) > 1:
            headings[at] = replace(own, column="gpus")
        elif {"nodes", "gpus_per_node"} & columns == {"nodes"} and _OF_A_NODE.search(own.text.lower()):
            headings[at] = replace(own, column="gpus_per_node")
    return Form(tuple(headings), grid.body)


def _with_units(form: Form) -> Form:
    """The form with headings that lack a unit completed by cells that each have one, of a rate ("400 img/s") or of time
    ("5m12s")."""
    headings, columns = list(form.headings), {heading.column for heading in form.headings}
    rows = [cells for _, cells in form.body if len(cells) == len(headings)]
    for at, own in enumerate(headings):
        units = {unit[0] if (unit := _UNIT_OF_RATE.search(row[at])) else "" for row in rows}
        if rows and all(spelled_seconds(row[at]) is not None for row in rows):
            units = {"s"}
        told = Heading.of(f"{own.text.removeprefix(CELLS_OF)} ({units.pop()})" if len(units) == 1 else "")
        if own.column not in OWN and told.column in SPEEDS and told.column not in columns:
            headings[at] = replace(told, text=own.text.removeprefix(CELLS_OF))
    return replace(form, headings=tuple(headings))


def _each_speed(form: Form) -> Iterator[Form]:
    """The form for each of the columns that hold the same kind of speed, and with a series for names in its cells."""
    form = _named(form)
    columns = [heading.column for heading in form.headings]
    (column, count), *_ = Counter(column for column in columns if column in SPEEDS).most_common(1) or [("", 0)]
    if not 2 <= count <= _MOST_SPEEDS:
        yield replace(
            form, precision=_precision_in(form.headings[columns.index(column)].text, columns) if column else ""
        )
        return
    names = [_name(heading.text) for heading in form.headings if heading.column == column]
    if not all(names) or len(set(names)) < len(names):
        names = [heading.text for heading in form.headings if heading.column == column]
    at_speeds = [at for at, heading in enumerate(form.headings) if heading.column == column]
    for own, name in zip(at_speeds, names, strict=True):
        kept = [at for at, heading in enumerate(form.headings) if at == own or heading.column not in SPEEDS]
        yield Form(
            tuple(form.headings[at] for at in kept),
            tuple(
                (line, tuple(cells[at] for at in kept))
                for line, cells in form.body
                if len(cells) == len(columns) and not _EMPTY.fullmatch(cells[own])
            ),
            name,
            _precision_in(name, columns),
        )


def _precision_in(name: str, columns: Sequence[str]) -> str:
    """The precision that the name of a speed tells where no column does; empty: none."""
    told = [precision for precision in get_args(Precision) if re.search(rf"\b{precision}\b", name.lower())]
    return told[0] if len(told) == 1 and "precision" not in columns else ""


def _name(text: str) -> str:
    """What of a heading tells it from others of the same speed."""
    return " ".join(re.sub(r"[()\[\]/:,-]+|\bper\b", " ", _SAID.sub(" ", text)).split())


def _named(form: Form) -> Form:
    """The form with the columns of names as its series, and with those that alone tell rows of one setting apart."""
    columns = [heading.column for heading in form.headings]
    if "gpus" not in columns or "run" in columns:
        return form
    rows = [cells for _, cells in form.body if len(cells) == len(columns)]
    counts = [row[columns.index("gpus")] for row in rows]
    unknown = [
        at
        for at, (column, heading) in enumerate(zip(columns, form.headings, strict=True))
        if column not in OWN
        and not column.startswith(CELLS_OF)
        and not heading.of_a_repeat
        and not heading.tells_ends(row[at] for row in rows)
    ]
    cells_of = {at: list(zip(counts, (row[at] for row in rows), strict=True)) for at in unknown}
    told = {"series", *OF_A_RUN} & set(columns)
    naming = [] if told else [at for at in unknown if names_series(cells_of[at])]
    known = [at for at, column in enumerate(columns) if column in {*OF_A_SETTING, *OF_A_RUN}]
    alike = _alike(rows, [*known, *naming])
    for at in sorted(unknown, key=lambda at: not form.headings[at].is_set):
        differ = any(row[at] != same[0][at] for same in alike for row in same)
        if differ and at not in naming and _tells_apart(form.headings[at], cells_of[at]):
            naming.append(at)
            alike = _alike(rows, [*known, *naming])
    if not naming:
        return form
    naming = [at for at, column in enumerate(columns) if column == "series" or at in naming]
    numbers = {at for at in naming if columns[at] != "series" and any(_NO_NAME.fullmatch(row[at]) for row in rows)}
    texts = {at: f"{form.headings[at].text} ".lstrip() if at in numbers else "" for at in naming}
    body = tuple(
        (
            line,
            (
                *cells,
                ", ".join(texts[at] + cells[at] for at in naming if cells[at]) if len(cells) == len(columns) else "",
            ),
        )
        for line, cells in form.body
    )
    named = Heading(" and ".join(form.headings[at].text or "(no heading)" for at in naming), "series")
    others = [replace(heading, column="") if at in naming else heading for at, heading in enumerate(form.headings)]
    return replace(form, headings=(*others, named), body=body)


def names_series(cells: Sequence[tuple[str, str]]) -> bool:
    """Whether a column's cells name what is compared: no numbers, in several rows each, some at several GPU counts.

    Args:
        cells: (GPU count, cell) of each row.
    """
    at_counts = _at_counts(cells)
    return (
        2 <= len(at_counts) <= min(_MOST_SERIES, len(cells) // 2)
        and not any(_NUMBER.fullmatch(cell) or _OF_A_REPEAT.search(cell) for cell in at_counts)
        and any(len(counts) > 1 for counts in at_counts.values())
    )


def _at_counts(cells: Sequence[tuple[str, str]]) -> dict[str, set[str]]:
    at_counts: dict[str, set[str]] = {}
    for count, cell in cells:
        at_counts.setdefault(cell, set()).add(count)
    return at_counts


def _alike(rows: Sequence[tuple[str, ...]], known: Sequence[int]) -> list[list[tuple[str, ...]]]:
    """The rows that agree in the known columns, where they are several."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault(tuple([row[own] for own in known]), []).append(row)
    return [same for same in groups.values() if len(same) > 1]


def _tells_apart(heading: Heading, cells: Sequence[tuple[str, str]]) -> bool:
    """Whether a column in which rows of one setting differ says what was run, and not what came out, when, or where."""
    at_counts = _at_counts(cells)
    if len(at_counts) > _MOST_SERIES or any(map(_OF_A_REPEAT.search, at_counts)):
        return False
    again = [len(counts) > 1 for counts in at_counts.values()]
    if heading.is_set:  # what grows with the GPUs, or names each row, tells no curves apart
        return heading.is_a_model or any(again) or len({count for count, _ in cells}) == 1
    if not any(_NUMBER.fullmatch(cell) for cell in at_counts):
        return not heading.text or (any(again) and len(at_counts) < len(cells))
    numbers = sorted(int(cell) for cell in at_counts if cell.isdecimal() and len(cell) < 10)
    counted = numbers[:1] in ([0], [1]) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return len(numbers) == len(at_counts) <= len(cells) // 2 and all(again) and not counted
