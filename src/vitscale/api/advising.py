"""advise: what to rent, under a deadline, a budget or a least efficiency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from vitscale import analysis
from vitscale.advice.job_files import JOB_FORMATS, job_text
from vitscale.advice.pipeline import Advice
from vitscale.advice.printing import advice_document, advice_fields
from vitscale.advice.request import Request
from vitscale.advice.sentences import in_short
from vitscale.advice.study_text import advised_trial, launch_lines, start_line, study_text
from vitscale.analysis import Analysis
from vitscale.api.arguments import StrPath, path_of, path_or_none, positive, rank_counts
from vitscale.api.new_files import write_new
from vitscale.api.predicting import TrainingPlan
from vitscale.api.questions import AdviseQuestion
from vitscale.base.distribution import write_wheel
from vitscale.errors import RequestError, shown, unknown
from vitscale.prediction.remarks import Remarks
from vitscale.present.document import Document
from vitscale.present.units import counted
from vitscale.present.unread import Unread
from vitscale.present.verb_result import VerbResult

STUDY_FORMAT = "study"
_LONGEST_STUDY_NAME = 90
"""Letters of a study's name that stay before "-advised"."""


@dataclass(frozen=True)
class AdviceLimits:
    """Limits that an answer must meet. None: no such limit."""

    deadline_seconds: float | None = None
    """Seconds within which the training is to be done, start-up included."""
    budget: float | None = None
    """The most to spend: money where a price is given, else GPU-hours."""
    min_efficiency: float | None = None
    """The least efficiency against one rank, in (0, 1]."""


@dataclass(frozen=True)
class AdviceChoices:
    """What to choose among. None: as measured."""

    gpus: Sequence[int] | int | None = None
    """These rank counts alone."""
    max_gpus: int | None = None
    """The most ranks to look at; None: 8 times the largest run."""
    nodes_of: int | None = None
    """Ranks of a full host."""
    devices: StrPath | None = None
    """A table (CSV) of instances with their prices to choose from."""
    any_batch: bool = False
    """Whether answers may train with another global batch than the study."""
    large_batch: bool = False
    """Whether they may train with few steps an epoch, or far above the gradient noise scale."""
    split: bool = False
    """Whether ranks may share a model: tensor, sequence and pipeline ([parallel])."""


@dataclass(frozen=True, repr=False)
class AdviseResult(VerbResult):
    """The advice, and its first answer as a study."""

    advice: Advice
    """All answers, what comes nearest, the Pareto front, what would narrow them."""
    study: str | None
    """The first answer as the text of a study file (TOML); None: there is none, or only its author can repeat it."""
    launch: tuple[str, ...]
    """The commands that would start its ranks; or one line that says why there are none."""
    remarks: Remarks
    """Sentences before the advice: unsteady runs, options that changed nothing."""
    analysis: Analysis
    """The results that it rests on."""
    start: str | None = None
    """The command that starts the file that was written; None: none was."""

    verb = "advise"

    @property
    def met(self) -> bool:
        """Whether the limits, if any, are met by something."""
        return self.advice.met

    @property
    @override
    def unread(self) -> Sequence[Unread]:
        return self.analysis.unread

    @property
    @override
    def summary(self) -> str:
        first_answer = self.advice.chosen
        if first_answer is None:
            return "no answer"
        configurations = counted(self.advice.looked_at, "configuration")
        beginning = "first answer" if self.met else "nothing meets the limits, nearest"
        return f"{beginning} {in_short(first_answer)}, {configurations} looked at"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return advice_fields(self.advice, self.study, self.remarks)

    @override
    def _answer_document(self) -> Document:
        return advice_document(self.advice, self.launch, self.start, self.remarks)


def advise(
    results: StrPath,
    *,
    limits: AdviceLimits | None = None,
    choices: AdviceChoices | None = None,
    training: TrainingPlan | None = None,
    price: float | None = None,
    network: str | None = None,
    images: int | None = None,
    series: str | None = None,
    parameters: str | None = None,
    gpu_memory: str | int | None = None,
    output: StrPath | None = None,
    output_format: str = STUDY_FORMAT,
    chart: StrPath | None = None,
    say: Callable[[str], None] | None = None,
) -> AdviseResult:
    """Advises what to rent: the fastest, the cheapest, the most ranks and the knee that meet the limits.

    Args:
        results: a results folder, or a bundle of it.
        limits: deadline, budget, least efficiency.
        choices: rank counts, hosts and instances to choose among, and what answers may change.
        training: how long to train, and what interrupts it; None: the epochs of the study.
        price: price of one GPU for an hour, in any currency.
        network: the link between hosts, such as "25GbE"; None: as measured.
        images: images of an epoch, where the results do not say.
        series: the curve to advise from; None: the one with the most information.
        parameters: the number of parameters of a model that has no name here, as text: "110M".
        gpu_memory: memory of one device: bytes, or text such as "80GB"; None: as recorded, or found here.
        output: a new file for the first answer.
        output_format: form of that file: "study", or what starts it there: "skypilot", "jobset".
        chart: a file (.png, .svg, .html) for a chart of time against cost.
        say: called with a line for each row of the table of instances that is left out.

    Returns:
        The advice; `met` says whether anything meets the limits. Times in seconds, costs in the currency of the price.

    Raises:
        RequestError: an option is out of range, these results cannot answer what is asked, or a file cannot be written.
        StoreError: the folder holds no results, or they cannot be read.

    Example:
        >>> limits = vitscale.AdviceLimits(deadline_seconds=3600, min_efficiency=0.5)
        >>> advised = vitscale.advise("results", limits=limits, price=2.5)
        >>> advised.met
        True
        >>> 'name = "documented-advised"' in advised.study
        True
    """
    choices = choices or AdviceChoices()
    training = training or TrainingPlan()
    _check_counts(choices, training, images)
    measured_request = _request(limits or AdviceLimits(), choices, training, price, series)
    if choices.devices is None:
        request = measured_request
    else:
        _refuse_options_of_measured_hosts(choices, gpu_memory, price)
        request = _with_instances(measured_request, path_of(choices.devices), say)
    options = {
        "--nodes-of": choices.nodes_of,
        "--network": network,
        "--images": images,
        "--parameters": parameters,
        "--gpu-memory": gpu_memory,
        "--any-batch": choices.any_batch,
        "--large-batch": choices.large_batch,
        "--split": choices.split,
        "--checkpoint-seconds": training.checkpoint_seconds,
        "--node-mtbf": training.node_mtbf_hours,
    }
    files = _AdviceFiles(path_or_none(output), output_format, path_or_none(chart))
    _check_files(files)
    folder = path_of(results)
    analysed = analysis.analyse_folder(folder)
    question = AdviseQuestion(folder, analysed, request)
    advice = question.answer(options)
    remarks = question.remarks(advice, options)
    without_study = AdviseResult(advice, study=None, launch=(), remarks=remarks, analysis=analysed)
    with_study = _with_study(without_study, must_be_written=files.output is not None)
    return _write_files(with_study, files)


class _AdviceFiles(NamedTuple):
    """Files to write. None: not asked for."""

    output: Path | None
    """For the first answer."""
    output_format: str
    """"study", or one of `JOB_FORMATS`."""
    chart: Path | None


def _request(
    limits: AdviceLimits, choices: AdviceChoices, training: TrainingPlan, price: float | None, series: str | None
) -> Request:
    """Return the limits and choices, checked. They are for hosts like the measured ones, without a table of instances.

    Raises:
        RequestError: a value is out of range.
    """
    return Request(
        deadline_seconds=positive(limits.deadline_seconds, "--deadline"),
        budget=positive(limits.budget, "--budget"),
        min_efficiency=positive(limits.min_efficiency, "--min-efficiency", most=1.0),
        price_per_gpu_hour=positive(price, "--price"),
        max_gpus=choices.max_gpus,
        gpus=rank_counts(choices.gpus),
        epochs=training.epochs,
        series=series,
    )


def _check_counts(choices: AdviceChoices, training: TrainingPlan, images: int | None) -> None:
    """Refuse counts below 1 or above a billion.

    Raises:
        RequestError: a count is out of range.
    """
    counts = {
        "--max-gpus": choices.max_gpus,
        "--nodes-of": choices.nodes_of,
        "--epochs": training.epochs,
        "--images": images,
    }
    for option, count in counts.items():
        if count is not None and not 1 <= count <= 10**9:
            raise RequestError(f"{option}: {count} cannot be", valid=["1 or more"])


def _refuse_options_of_measured_hosts(
    choices: AdviceChoices, gpu_memory: str | int | None, price: float | None
) -> None:
    """Refuse options that are only about hosts like the measured ones, where the answer has no such hosts.

    Beside a table of instances it has them only where their price is given.

    Raises:
        RequestError: such an option is given without a price.
    """
    if price is not None:
        return
    values = {"--split": choices.split, "--nodes-of": choices.nodes_of, "--gpu-memory": gpu_memory}
    for option, value in values.items():
        if value:
            raise RequestError(
                f"{option} says nothing of the instances of --devices",
                next_step="Add --price for hosts like the measured ones beside them, or leave it out",
            )


def _with_instances(request: Request, devices: Path, say: Callable[[str], None] | None) -> Request:
    """Return the request with the instances of a table; `say` gets a line for each row that is left out."""
    from vitscale.prediction.instances import read_instances

    instances, notes_on_skipped = read_instances(devices)
    if say is not None:
        for note in notes_on_skipped:
            say(note)
    return replace(request, instances=instances)


def _check_files(files: _AdviceFiles) -> None:
    """Refuse formats that are unknown or go with no file, before anything is computed.

    Raises:
        RequestError: a format is.
    """
    if files.chart is not None:
        from vitscale.pages.charts.advice import check_format

        check_format(files.chart)
    if files.output_format == STUDY_FORMAT:
        return
    if files.output_format not in JOB_FORMATS:
        raise unknown("format", files.output_format, (STUDY_FORMAT, *JOB_FORMATS))
    if files.output is None:
        raise RequestError("--format is of the file that -o names, and there is none", next_step="Add -o job.yaml")


def _with_study(result: AdviseResult, *, must_be_written: bool) -> AdviseResult:
    """Return the result with its first answer as a study, and the commands that would start it.

    Args:
        result: the advice.
        must_be_written: whether an answer that cannot be written as a study is an error; else the reason stands in
            place of the commands.
    """
    advice = result.advice
    first_answer = advice.chosen
    if first_answer is None:
        return result
    trial = advice.trials[first_answer.series]
    name = f"{result.analysis.study.name[:_LONGEST_STUDY_NAME]}-advised"
    try:
        text = study_text(name, first_answer, trial, advice.work)
        launch = launch_lines(advised_trial(first_answer, trial, advice.work))
    except RequestError as error:
        if must_be_written:
            raise
        return replace(result, launch=(f"unavailable: {error}",))
    return replace(result, study=text, launch=tuple(launch))


def _write_files(result: AdviseResult, files: _AdviceFiles) -> AdviseResult:
    """Write the files that are asked for; return the result with the command that starts the first answer."""
    start = None if files.output is None else _write_answer(result, files.output, files.output_format)
    if files.chart is not None:
        from vitscale.pages.charts.advice import write_advice_chart

        write_advice_chart(result.advice, files.chart)
    return replace(result, start=start)


def _write_answer(result: AdviseResult, output: Path, output_format: str) -> str:
    """Write the first answer as a study, or as the job that starts it; return the command that starts the file.

    The job installs this vitscale from a wheel, which is written beside the file.
    """
    first_answer = result.advice.chosen
    if first_answer is None or result.study is None:
        raise RequestError(f"{shown(str(output))} is not written: there is no answer to write")
    trial = result.advice.trials[first_answer.series]
    if output_format == STUDY_FORMAT:
        write_new(output, result.study)
        return start_line(output, first_answer, trial, None)
    wheel = write_wheel(output.absolute().parent)
    job = job_text(output_format, result.study, first_answer, trial, _gpu_types(result.analysis), wheel)
    write_new(output, job)
    return start_line(output, first_answer, trial, JOB_FORMATS[output_format].start)


def _gpu_types(analysed: Analysis) -> tuple[str, ...]:
    """Return the devices that trials ran on, each once."""
    types: dict[str, None] = {}
    for trial in analysed.trials.values():
        if trial.environment is not None:
            types |= dict.fromkeys(trial.environment.devices)
    return tuple(types)
