"""What the headings of others' columns stand for: by this program's names, or by others that leave nothing open, such
as "Images/sec", "step time (ms)" and "8 GPUs".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vitscale.present.units import counted

OF_A_SETTING = (
    *("gpus", "nodes", "gpus_per_node", "layout", "micro_batch", "grad_accum", "global_batch", "fraction", "dataset"),
    *("cluster", "gpu", "series", "engine", "zero_stage", "precision", "model", "parameters"),
)
"""Columns that every table may have."""


@dataclass(frozen=True)
class Heading:
    """The heading of one column."""

    text: str
    """The text in the file."""
    column: str
    """This program's name for the column; else the text in small letters."""
    factor: float = 1.0
    """Factor from the file's unit to seconds."""
    inverse: bool = False
    """The cells are steps in a second."""

    @classmethod
    def of(cls, text: str) -> Heading:
        """The heading that the text of a cell stands for."""
        lower = text.lower()
        if lower in OWN:
            return cls(text, lower)
        words = _SPACES.sub(" ", lower.strip("*`")).strip()
        if (own := words.replace(" ", "_")) in OWN:
            return cls(text, own)
        words = _OF_TRACKERS.sub(lambda match: "per device " if match[1] == "device" else "", _NOTED.sub("", words))
        words = _SPACE_OF_NAMES.sub("", _OF_ONE.sub(r"\1 per ", words))
        if words in OF_A_RUN:
            return cls(text, words)
        column = next((column for column, pattern in _MEANT.items() if pattern.fullmatch(words)), lower)
        if column == "steps_per_second":
            return cls(text, "step_seconds", inverse=True)
        units = _UNIT.findall(words) if column in _SECONDS else []
        return cls(text, column, _UNITS[units[-1]] if units else 1.0)

    @classmethod
    def of_all(cls, texts: Sequence[str]) -> tuple[Heading, ...]:
        """The headings of a table's columns: beside "epoch time max" an "epoch time min" is the least, not minutes."""
        words = [_SPACES.sub(" ", text.lower()) for text in texts]
        least = any(_OF_SEVERAL.search(each) for each in words)
        headings = [
            cls(text, text.lower()) if least and each.endswith(" min") else cls.of(text)
            for text, each in zip(texts, words, strict=True)
        ]
        for part in ("step", "epoch"):
            same = [at for at, heading in enumerate(headings) if heading.column == part]
            for at in sorted(same, key=lambda at: ("/" in words[at], not words[at].startswith("global")))[1:]:
                if part == "step" or "/" in words[at]:
                    headings[at] = cls(texts[at], "")  # steps of an epoch beside those of the run, or the same again
        if any(heading.column == "step_seconds" and not heading.inverse for heading in headings):
            # Steps a second beside the seconds of a step are the same once more.
            headings = [replace(own, column="", inverse=False) if own.inverse else own for own in headings]
        return tuple(headings)

    @property
    def is_set(self) -> bool:
        """Whether it is the name of what a user sets, which tells rows apart whatever stands below it."""
        return _SETTINGS.fullmatch(self._words) is not None

    @property
    def is_a_model(self) -> bool:
        """Whether it is the name of what is trained, which differs from row to row where nothing else does."""
        return _MODELS.fullmatch(self._words) is not None

    @property
    def of_a_repeat(self) -> bool:
        """Whether it is that of a result, a moment, a place or a number of a run, in which true repeats differ."""
        if self.is_set:
            return False
        name = _SPACES.sub(" ", _IN_BRACKETS.sub("", self._words))  # "Node type" is a type, and no node
        told = (match for pattern in (_RESULTS, _COMPARED) for match in pattern.finditer(name))
        of_its_end = any(match.end() == len(name) and match[0] not in _WAYS for match in told)
        return of_its_end or _COMPARED.search(self._words[len(name) :]) is not None

    def tells_ends(self, cells: Iterable[str]) -> bool:
        """Whether it is a column of how runs ended."""
        return self.column in ("state", "status") and not _ENDS.isdisjoint(cell.lower() for cell in cells)

    def is_unfinished(self, cell: str) -> bool:
        """Whether its cell says of a run that it has not ended as it should."""
        return self.column in ("state", "status") and cell.lower() in _UNFINISHED

    @property
    def tells_phases(self) -> bool:
        """Whether its cells may say of a row that it is of evaluation or inference."""
        return self._words in ("phase", "mode", "split", "stage")

    def holds_no(self, speed: Heading | None) -> bool:
        """Whether the row of this name holds something else than the speeds that its caption or its columns tell."""
        if self.column in SPEEDS:
            return speed is not None and self.column != speed.column
        if speed is None:
            return _COMPARED.search(self._words) is not None
        other = r"\b(?:time|duration)\b" if speed.column.startswith("images") else r"\b(?:throughput|rate)\b"
        return (_COMPARED.search(self._words) or re.search(other, self._words)) is not None

    @property
    def _words(self) -> str:
        sized = re.sub(r"[(\[][SBTLH][)\]]", "", self.text)  # "Swin (S)" is small, and no time in seconds
        return _SPACES.sub(" ", sized.lower().strip("*`")).strip()


RATES = ("images_per_second", "images_per_second_per_gpu", "images_per_second_per_node")
SPEEDS = ("step_seconds", "epoch_seconds", *RATES)
"""Columns of which a table of measurements has at least one."""
_UNFINISHED = {"crashed", "failed", "running", "killed", "pending", "preempted", "preempting", "cancelled", "canceled"}
"""What trackers and schedulers say of runs that have not ended as they should."""
_ENDS = {*_UNFINISHED, "finished", "completed", "complete", "succeeded", "success", "done", "ok"}
_SECONDS = ("step_seconds", "epoch_seconds")
OF_A_RUN = ("epoch", "step", "rank")
"""Columns whose rows are parts of one run."""
OWN = {*OF_A_SETTING, *SPEEDS, *OF_A_RUN, "run", "loss", "accuracy"}
_HOST = r"(?:node|host|machine|server)"
_PART = rf"(?:gpu|device|rank|card|accelerator|process|worker|{_HOST})"
_NOTED = re.compile(r" ?(?:\[[\d*\u2020\u2021]{1,2}\]|[\u00b9\u00b2\u00b3\u2020\u2021*])$")
"""The mark of a footnote."""
_NAME = "(train|training|perf|performance|throughput|speed)"
_SPACE_OF_NAMES = re.compile(rf"^{_NAME}/ ?(?!s(?:ec|econd)?\b|gpu|{_PART}s?\b|local\b)(?=\w)")
"""What trackers (wandb, TensorBoard) put before a name, as in "train/images_per_sec"."""
_OF_TRACKERS = re.compile(
    r"^(?:metrics|params|config|summary)[./](?=\w)|^(?:train\||throughput/)?(device|global)/(?=samples per s)"
)
"""The same of MLflow; and of Lightning and Composer, whose "device/samples_per_sec" is each GPU's."""
_OF_ONE = re.compile(rf"^{_NAME} ?/ ?(?={_PART}\b)")
"""The same where the slash means per, as in "Throughput/device"."""
_SPACES = re.compile(r"[\s_]+")
_UNITS = {"hh:mm:ss": 1.0, "h:mm:ss": 1.0}  # as `parse_duration` reads them; "h" alone would match before
_UNITS |= {"ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0, "h": 3600.0, "hours": 3600.0}
_UNITS |= {"secs": 1.0, "mins": 60.0, "hrs": 3600.0}
_UNIT = re.compile(rf"\b(?:{'|'.join(_UNITS)})\b")
_COUNT = r"(?:#|no\.?|n|nb\.?|num\.?|(?:total )?number|total)?(?: of)? ?"
BATCH = r"(?:(?:mini-?)?batch(?:[ _-]?sizes?)?|bs)"
_PER, _IN = r"(?: ?/ ?| per )", rf"[ \[(,]+{_UNIT.pattern}[\])]?"
_THOUSAND = r"(?:\b(?:k|m|thousands?|millions?|x ?1,?000|1,?000|10\^\d|1e\d)|\u00d7 ?1,?000)(?: of)?"
_OTHER = (
    r"(?!.*\b(?:std|stddev|min|max|peak|best|eval|evaluation|val|validation|test|inference|ideal|linear|target"
    r"|theoretical|expected|predict(?:ed|ion)|simulated|estimated?|projected|extrapolated|modell?ed|relative|delta"
    r"|normali[sz]ed|(?:upper|lower)[ -]bound|speed[ -]?up|decod(?:e|ing)|i/?o|augment(?:ation)?|preprocess(?:ing)?"
    r"|forward)\b)"
    r"(?!(?:(?!\b(?:after|excl|excluding|without|with|incl|including)\b).)*\b(?:warm-?up|(?:data)?load(?:ing|er))\b)"
    rf"(?!.*{_THOUSAND} ?(?:images?|imgs?|samples?|sequences?|examples?)\b)"
)
"""No time or rate of training as it was measured, in images."""
_OF_WHOM = rf"(?!(?:gpu|device|rank|local|worker|process|{_HOST})[ -])"
"""Not "GPU images/s", which is each one's or that of all."""
_EACH = r"(?:(?:per|each)[ -](?:gpu|device|rank|card|accelerator|process|worker|replica)|single[ -]gpu)"
_EACH_HOST = rf"(?:per|each)[ -]{_HOST}"
_ALONE = r"(?:(?!\d|batch|image|img|sample|sequence|example|process|worker).)*"
"""What may stand before it: "64 images per GPU" tells of no rate."""
_MEAN = r"mean|median|average|avg\.?"
_WHICH = rf"(?:(?:{_MEAN}|train|training) )?"
_OF_SEVERAL = re.compile(r"\b(?:max|mean|avg|average|std|stddev|median)[)\]. ]*$")
_A_SECOND = rf"{_PER}s(?:ec(?:ond)?)?"
_RATE = rf"{_OTHER}(?:[\w .,:-]{{1,40}}[ \[(])?[\[(]?(?:images?|imgs?|samples?|sequences?|examples?){_A_SECOND}"
_REMARK = (
    r"(?: ?[\[(](?:global|aggregate|total|all gpus|mean|median|average|bf16|fp16|fp32|tf32|amp|mixed precision)[\])])?"
)
_MEANT = {
    column: re.compile(pattern)
    for column, pattern in {
        "gpus": rf"{_COUNT}(?:gpus?|gpu\(s\)|ranks|devices|accelerators|gcds|cards)(?: used| ?\(total\)| ?#)?"
        r"|world size|gpu count|nproc",
        "nodes": rf"{_COUNT}(?:nodes|hosts|machines|servers)",
        "gpus_per_node": rf"{_COUNT}(?:gpus?|ranks|devices|accelerators){_PER}{_HOST}",
        "images_per_second": rf"{_OF_WHOM}(?!.*\b(?:{_EACH}|each)\b)(?!{_ALONE}\b{_EACH_HOST}\b){_RATE}[\])]?{_REMARK}",
        "images_per_second_per_gpu": rf"{_RATE}{_PER}(?:gpu|device|rank|card|process|worker)[\])]?"
        rf"|(?={_ALONE}\b(?:{_EACH}|each\b(?! \w))){_RATE}[\])]?|{_RATE} ?[\[(]{_EACH}[\])]",
        "images_per_second_per_node": rf"{_RATE}{_PER}{_HOST}[\])]?|(?={_ALONE}\b{_EACH_HOST}\b){_RATE}[\])]?",
        "steps_per_second": rf"{_OTHER}{_WHICH}(?:steps?|iterations?|iters?|its?){_A_SECOND}",
        **{
            column: rf"{_WHICH}{what}(?: (?:time|duration))?(?:,? (?:{_MEAN}))?{_IN}(?: (?:{_MEAN}))?"
            rf"|{_WHICH}{own} (?:time|duration){_IN}"
            rf"|{_WHICH}(?:wall(?:[- ]clock)? )?time(?:{_PER}| for (?:one|an?) )(?:training )?{own}{_IN}"
            rf"|{_UNIT.pattern}{_PER}{own}"
            for column, what, own in (
                ("step_seconds", r"(?:step|iteration|iter\.?|it)", r"(?:step|iteration|iter\.?|it|batch)"),
                ("epoch_seconds", "epoch", "epoch"),
            )
        },
        "step": r"(?:global )?(?:step|iteration|iter)(?: (?:number|index|no\.?))?",
        "micro_batch": rf"(?:per[ -]gpu|local|micro|device)[ -]?{BATCH}"
        rf"|{BATCH} ?[\[(]?{_PER}(?:gpu|device|rank|card|accelerator|replica)[\])]?"
        rf"|per[ -]device(?: train)? {BATCH}|(?:train )?micro {BATCH} per gpu|{BATCH} ?[\[(]per gpu[\])]|mbs",
        "global_batch": rf"(?:global|total|effective|aggregate|overall)(?:[ -]train)?[ -]?{BATCH}|images per step"
        rf"|{BATCH} ?[\[(](?:global|total)[\])]|gbs",
        "grad_accum": r"grad(?:ient)?\.?[ -]acc(?:um(?:ulation)?)?\.?(?:[ -]steps)?|accumulate[ -]grad[ -]batches"
        r"|accum(?:ulation)?\.?(?:[ -](?:steps?|iters?))?|update[ -]freq",
    }.items()
}
"""Column -> other names of it, in small letters and with spaces for underscores; none that may mean another column."""
_RATE_TOLD = re.compile(
    rf"\b(?:images?|imgs?|samples?|sequences?|examples?){_PER}s(?:ec(?:ond)?s?)?\b({_PER}(?:gpu|device)\b)?"
)
_TIME_TOLD = re.compile(
    rf"\b(?:step|iteration|iter|epoch)(?: times?)?(?: in |[ \[(,]+){_UNIT.pattern}"
    rf"|{_UNIT.pattern}{_PER}(?:step|iteration|iter|epoch)\b"
)
NO_TRAINING = re.compile(r"\b(?:eval|evaluation|val|validation|inference|latency)\b")
_TRAINING = re.compile(r"\b(?:pre-?)?train(?:s|ed|ing)?\b")
_NO_SPEED = re.compile(
    r"\b(?:speed-?ups?|efficiency|ratio|relative|accuracy|top-?[15]|loss|memory|power|energy|utili[sz]ation|mfu|hfu"
    r"|t?flops|costs?)\b"
)
"""What captions speak of, and rows hold, that is no speed, whatever unit stands beside it."""
_COMPARED = re.compile(
    rf"{_NO_SPEED.pattern}|\b(?:scaling|ideal|linear|vs|versus|latency|hours|days|watts?|lr|learning rate)\b|[%$]"
    r"|[(\[](?:k?wh?|k?j|h|min|minutes|m?s|sec|seconds|[gmt]i?b)(?:/\w+)?[)\]]|(?:/ ?|\bper )s(?:ec(?:ond)?)?\b"
    rf"|^(?:[a-z-]+ )?{BATCH}(?: ?[(\[]?(?:/|per) ?\w+[)\]]?)?$"
)
"""Rows that hold no speed, or one of another unit, whatever unit a caption tells."""
_SETTINGS = re.compile(
    r"(?:[\w-]+ )?(?:models?|backbones?|arch|architectures?|networks?|methods?|strateg(?:y|ies)|frameworks?"
    r"|librar(?:y|ies)|implementations?|backend|config(?:uration)?s?|settings?|variants?|modes?|systems?|hardware|gpu"
    r"|interconnect|dtype|resolutions?|(?:image|img|input|crop|patch|bucket|hidden|model) sizes?|depth|width|layers?"
    rf"|optimi[sz]ers?|(?:sequence|seq) ?len(?:gth)?|parallelism|tp|pp|workers|compile|sharding|zero|{BATCH})"
    r"(?: (?:name|type|speed))?(?: ?[(\[][^)\]]*[)\]])?"
)
"""Headings of what a user sets, which tells rows apart whatever stands below it."""
_IN_BRACKETS = re.compile(r" ?[(\[][^)\]]*[)\]]$")
_WAYS = ("scaling", "linear", "relative", "lr", "learning rate")
"""Words that may tell how something was run, and no result."""
_MODELS = re.compile(
    r"(?:[\w-]+ )?(?:models?|backbones?|arch|architectures?|networks?|methods?|resolutions?|depth|width"
    r"|(?:image|img|input|crop|patch|hidden|model) sizes?)(?: (?:name|type))?(?: ?[(\[][^)\]]*[)\]])?"
)
_RESULTS = re.compile(
    r"\b(?:acc|top ?[15]|error|score|perplexity|miou|mem|gi?b|mi?b|w|joules?|k?wh|util|flops?|mean|avg|average|median"
    r"|min|max|std|stddev|stdev|sem|var|p\d\d|ci|times?|elapsed|duration|latency|throughput|rate|seconds?|secs?|s|ms|minutes"
    r"|h|tokens|grad norm|temp|temperature|clock|ids?|uuid|index|idx|row|date|day|week|month|year|timestamp|started"
    r"|finished|begin|end|start|when|seed|repeat|repetition|rep|replicate|trial|attempt|try|job|node|host|hostname"
    r"|node ?list|commit|sha|hash|url|log|file|path|steps|epochs|iterations?|iters?|warm-?up|rounds?|port|pid|images"
    r"|samples|fan)\b|^(?:speed|number|no\.?|#|device|worker|process|local rank)$"
)
_THOUSANDS, _VALUE = re.compile(rf"{_THOUSAND} ?$"), re.compile(r"(?<![\w.,/-])\d+(?:[.,]\d+)* ?$")
_OF_HOST = re.compile(rf"{_ALONE}\b{_EACH_HOST}\b"), re.compile(rf"{_PER}{_HOST}\b")
_EACH_TOLD, _EACH_ALONE = re.compile(rf"\b{_EACH}\b"), re.compile(rf"{_ALONE}\b{_EACH}\b")
_TYPE = r"((?!x ?\d)[a-z]+\d\w*)"
_COUNT_TOLD = re.compile(
    rf"\b(\d{{1,6}})(?: ?x)? ?{_TYPE}?(?: (?:80|40|32|16) ?gb)? ?(?:gpus?|ranks|devices)\b"
    r"|\b(?:gpus?|ranks|world size) ?[=:]? ?(\d{1,6})\b"
    r"|\b(\d{1,6})(?: ?x ?| (?=[abhlpv]\d{2,3}s?\b|t4\b))((?!x ?\d)[a-z]+\d\w*?)s?(?:[ -]\(?\d{2,3} ?gb\)?)?(?!\w)"
)
_OF_EACH = re.compile(
    r"\b(\d{1,6})(?: (?:nodes?|hosts?|machines?|servers?))? ?[x\u00d7] ?(\d{1,6})(?: ?x)?"
    rf"(?= ?(?:{_TYPE}|(?:gpus?|ranks|devices)\b))"
)
_JOINED_TYPE = re.compile(r"\b(\d+)(([a-z]+)(\d+)\w*?) ?(?:gpus?|ranks|devices)")
"""A count, a word that ends in a number, and the word for GPUs, as in "8A100 GPUs" and in "1node4gpus"."""
_GPU_NAME = re.compile(
    r"[abhlmptvk]\d|g[hb]\d|[rg]tx|mi\d|tesla|titan|quadro|geforce|radeon|instinct|arc\d|max\d|gfx|dgx|hgx|gaudi|hpu|npu|xpu"
    r"|ascend|tpu|ipu|mtt|x|e\d"
)
"""How the names of accelerators begin, in small letters; "x" multiplies a name, and "e" a power of ten."""
_HOST_WORD = re.compile(rf"n|{_HOST}s?")
_OF_THREE = re.compile(r"\d ?[x\u00d7] ?\d+ ?[x\u00d7] ?\d")
_LONGEST = 200
_NODES_TOLD = re.compile(r"\b(\d{1,6}) ?(?:nodes?|hosts?|machines?|servers?)\b")
_REST = re.compile(r"[\s()\[\],:/|@-]*")
CELLS_OF = "cells of "
"""How the column of speeds begins where a table with a column for each GPU count does not say what they are."""


@dataclass(frozen=True)
class Count:
    """The GPUs that the heading of a column counts, as "16 GPUs (2 nodes)" does."""

    gpus: int
    nodes: int | None
    gpu: str
    """GPU type; empty: not told."""
    speed: Heading | None
    """What the heading says the cells are."""

    @staticmethod
    def readings(text: str) -> tuple[str, ...]:
        """What a count with letters after it may mean that are no GPU's name, each with what to write for it.

        Empty where it is plain: "8A100 GPUs". Three for "2node4gpus": "2 nodes with 4 GPUs each (columns nodes and
        gpus_per_node: 2 and 4)", and so on.
        """
        match = _JOINED_TYPE.search(_SPACES.sub(" ", text[:_LONGEST].lower()))
        if match is None or _GPU_NAME.match(match[2]):
            return ()
        before, name, word, after = match.groups()
        gpus = counted(int(after), "GPU")
        of_a_type = f"{counted(int(before), 'GPU')} of a type {name.upper()} (columns gpus and gpu: {before} and "
        of_a_type += f"{name.upper()})"
        if not _HOST_WORD.fullmatch(word):
            return of_a_type, f"{gpus} (a column gpus: {after})"
        nodes = counted(int(before), "node")
        return (
            f"{nodes} with {gpus} each (columns nodes and gpus_per_node: {before} and {after})",
            f"{gpus} in all on {nodes} (columns gpus and nodes: {after} and {before})",
            of_a_type,
        )

    @classmethod
    def of(cls, text: str) -> Count | None:
        """The count that a heading tells; None where it tells none, or anything else beside a speed."""
        words = _SPACES.sub(" ", text[:_LONGEST].lower().replace("\u00d7", "x")).strip()
        of_each = _OF_EACH.search(words)
        if of_each:  # "2x8 GPUs" are 16 on two nodes
            words = words.replace(of_each[0], f"{int(of_each[1]) * int(of_each[2])}x", 1)
        told = None if _OF_THREE.search(words) else _COUNT_TOLD.search(words)
        if told is None:
            return None
        nodes = _NODES_TOLD.search(words)
        if of_each and nodes and nodes[1] != of_each[1]:
            return None
        gpus = next(number for number in (told[1], told[3], told[4]) if number)
        gpu = (told[2] or told[5] or "").upper()
        rest = words.replace(told[0], " ", 1)
        rest = (rest.replace(nodes[0], " ", 1) if nodes else rest).replace("( )", " ").strip(" ,:|@-")
        speed = None if _REST.fullmatch(rest) else Heading.of(rest)
        if int(gpus) < 1 or (speed is not None and speed.column not in SPEEDS):
            return None
        hosts = of_each or nodes
        return cls(int(gpus), int(hosts[1]) if hosts else None, gpu, speed)


def not_of_training(texts: Iterable[str]) -> str:
    """The nearest of a table's captions and headings that tells of no training; empty where one tells of training."""
    near = [text[:_LONGEST] for text in texts]
    if any(_TRAINING.search(text.lower()) for text in near):
        return ""
    return next((text for text in near if NO_TRAINING.search(text.lower())), "")


def speed_told(texts: Iterable[str]) -> Heading | None:
    """The one speed that headings or captions name ("Throughput in images/s on V100"); None: they name none, or two."""
    told = {}
    for text in texts:
        words = _SPACES.sub(" ", text[:_LONGEST].lower())
        if NO_TRAINING.search(words):
            continue
        if (other := _NO_SPEED.search(words)) is not None:
            unit = _RATE_TOLD.search(words) or _TIME_TOLD.search(words)
            if unit is None or other.start() < unit.start() or _VALUE.search(words[: unit.start()]):
                break  # "Peak memory at 5,800 images/s": the cells may be either, whatever a text further away says
        for match in _RATE_TOLD.finditer(words):
            before = words[: match.start()]
            if _THOUSANDS.search(before):
                return None
            if _VALUE.search(before):
                continue  # "We reach 5,800 images/s": a value, and no unit of others
            if _OF_HOST[0].match(before) or _OF_HOST[1].match(words, match.end()):
                return None  # of each node, and a caption's table seldom tells how many there are
            each = _EACH_TOLD.search(before) is not None
            if each and not _EACH_ALONE.match(before):
                return None  # "batch 64 per GPU, images/s": nobody knows what else is per GPU
            told[f"images_per_second{'_per_gpu' if match[1] or each else ''}", 1.0] = match[0]
        for match in _TIME_TOLD.finditer(words):
            if match[0].endswith(" min") and re.search(r"\b(?:max|mean|avg|average|std|median)\b", words):
                continue
            factor = _UNITS[_UNIT.findall(match[0])[-1]]
            told[f"{'epoch' if 'epoch' in match[0] else 'step'}_seconds", factor] = match[0]
    if len(told) != 1:
        return None
    (((column, factor), text),) = told.items()
    closed = text + "".join({"(": ")", "[": "]"}.get(sign, "") for sign in text)
    return Heading(closed, column, factor)
