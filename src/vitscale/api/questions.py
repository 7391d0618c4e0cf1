"""Answers of `predict` and `advise` to all their options, with remarks on options that change nothing.

To find such options, the answer is computed again without each option, and only its figures are compared.

Evidence is what the results hold, as predictions need it. An import may leave facts of its runs open (their engine,
model, precision): an option that states such a fact changes the evidence, not the question.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from vitscale.advice.pipeline import Advice, advised_from
from vitscale.advice.printing import advice_fields
from vitscale.advice.request import Request
from vitscale.analysis import Analysis
from vitscale.api.arguments import memory_bytes
from vitscale.api.asked_models import ModelFinder
from vitscale.pages.predicted import predict_fields
from vitscale.prediction import answering, finishing
from vitscale.prediction.evidence import Evidence, Series, evidence_of
from vitscale.prediction.finishing import Finish
from vitscale.prediction.fitting import Fitted, fit
from vitscale.prediction.labels import WHAT_IS_SENT
from vitscale.prediction.model_requests import requests_by_series, requests_by_trial
from vitscale.prediction.predicting import Question
from vitscale.prediction.remarks import Options, OptionWithoutEffect, Remarks, options_without_effect, unstable_runs
from vitscale.prediction.results import Assumption, Forecast
from vitscale.present import units
from vitscale.trial.model_cost import parameters
from vitscale.trial.trial import Trial


@dataclass(frozen=True)
class PredictAnswer:
    """The predictions of `predict`, and the evidence that they rest on."""

    forecast: Forecast
    finishes: tuple[Finish, ...]
    recorded: Evidence
    """The evidence as recorded: without facts of measured runs that options state."""

    @property
    def evidence_with_facts(self) -> Evidence:
        """The evidence that the predictions rest on: as recorded, with the facts that options state."""
        return self.forecast.evidence

    @property
    def recorded_series(self) -> tuple[Series, ...]:
        """The series that the answer is about, as recorded."""
        names = {prediction.series for prediction in self.forecast.predictions}
        return tuple(series for series in self.recorded.series if series.name in names)


class _Question:
    """A question to one results folder, which is answered for one set of options after the other."""

    def __init__(self, results: Path, analysed: Analysis) -> None:
        self.results = results
        self.analysed = analysed
        self._earlier_fits: list[Fitted] = []
        """A fit takes most of an answer's time, and most options leave the evidence as it is."""

    def _fit_to(self, evidence: Evidence) -> Fitted:
        """Return the fit to this evidence, which is computed once."""
        for fitted in self._earlier_fits:
            if fitted.evidence == evidence:
                return fitted
        fitted = fit(evidence)
        self._earlier_fits.append(fitted)
        return fitted


class PredictQuestion(_Question):
    """The question of `predict`: time and cost of some series at some rank counts."""

    OPTIONS = (
        "--nodes-of", "--network", "--check", "--model", "--image-size", "--parameters", "--engine", "--zero-stage",
        "--precision", "--micro-batch", "--grad-accum", "--device", "--price", "--gpu-memory", "--epochs",
        "--checkpoint-seconds", "--node-mtbf",
    )  # fmt: skip
    """Options that are to change a figure. All others choose what is shown, or where."""

    def __init__(self, results: Path, analysed: Analysis, counts: tuple[int, ...] | None, series: str | None) -> None:
        super().__init__(results, analysed)
        self.counts = counts
        self.series = series
        self._models = ModelFinder()

    def answer(self, options: Options, *, scored: bool = True) -> PredictAnswer:
        """Return the answer with these options.

        Args:
            options: an option -> its value, for all of `OPTIONS`.
            scored: whether to test predictions on these results, for the answer to state how well they did. It takes
                longer.

        Raises:
            RequestError: it cannot be answered.
        """
        horizon = finishing.horizon(options["--epochs"], options["--checkpoint-seconds"], options["--node-mtbf"])
        recorded = evidence_of(self.results, self.analysed, declared=options["--network"], check=options["--check"])
        evidence, changes = self._with_stated_facts(recorded, options)
        questions = self._questions(evidence, changes, options)
        fitted = self._fit_to(evidence)
        forecast = answering.answer(fitted, questions) if scored else _unscored_forecast(fitted, questions)
        finishes = finishing.finish(horizon, forecast.predictions, evidence, self.analysed) if horizon else ()
        return PredictAnswer(forecast, finishes, recorded)

    def _with_stated_facts(self, recorded: Evidence, options: Options) -> answering.StatedFacts:
        """Return the evidence with the facts of measured runs that options state, and what they ask for beyond it."""
        changes = _changes_of_training(options)
        models = self._models.find_all(requests_by_trial(recorded, changes))
        return answering.with_stated_facts(recorded, changes, options["--nodes-of"], models)

    def _questions(self, evidence: Evidence, changes: answering.Changes, options: Options) -> tuple[Question, ...]:
        """Return a question for each series asked about, with the models that the changes ask for."""
        counts = self.counts or answering.counts_ahead(evidence)
        nodes_of = options["--nodes-of"]
        price = options["--price"]
        askable = answering.askable_series(
            evidence, counts, changes, series=self.series, nodes_of=nodes_of, price_per_gpu_hour=price
        )
        return answering.questions(
            evidence,
            counts,
            changes,
            series=self.series,
            nodes_of=nodes_of,
            price_per_gpu_hour=price,
            memory_capacity_bytes=memory_bytes(options["--gpu-memory"]),
            models=self._models.find_all(requests_by_series(askable, changes)),
        )

    def figures(self, options: Options) -> object:
        """Return all figures of the answer with these options, to be compared by `==`."""
        answer = self.answer(options, scored=False)
        fields = predict_fields(answer.forecast)
        predictions = [_comparable_figures(prediction) for prediction in fields["predictions"]]
        finishes = [_finish_figures(finish) for finish in answer.finishes if not finish.reason]
        return _with_rounded_floats([predictions, fields["left_out"], finishes])

    def remarks(self, answer: PredictAnswer, options: Options) -> Remarks:
        """Return the remarks that stand before the answer to these options.

        They say which facts of measured runs options have stated, and why an option changes no figure.

        Args:
            answer: the answer to these options.
            options: an option -> its value, for all of `OPTIONS`.
        """
        ineffective_options = options_without_effect(options, self.figures)
        without_effect = []
        for option in ineffective_options:
            value = options[option]
            without_effect.append(OptionWithoutEffect(option, value, _why_no_effect(option, value, answer)))
        on_stated_facts = self._sentences_on_stated_facts(answer, ineffective_options)
        return _remarks(self.analysed, on_stated_facts, without_effect)

    def _sentences_on_stated_facts(self, answer: PredictAnswer, ineffective_options: Collection[str]) -> list[str]:
        """Return sentences on facts of measured runs that an import left open, and that options state.

        They leave out the options without effect, which have remarks of their own.
        """
        sentences = [
            answering.taken_as_measured(answer.recorded, answer.evidence_with_facts, besides=ineffective_options)
        ]
        stated_facts = answering.facts_taken(answer.recorded, answer.evidence_with_facts)  # by option
        effective_options = stated_facts.keys() - ineffective_options
        decides_what_is_sent = not effective_options.isdisjoint(("--engine", "--model", "--parameters"))
        if decides_what_is_sent:
            sentences.append(self._sentence_on_traffic(answer))
        return sentences

    def _sentence_on_traffic(self, answer: PredictAnswer) -> str:
        """Return a sentence on what a step sends, where an option stated an import's engine or model.

        It is empty where all predictions are of one rank, which sends nothing.
        """
        predictions = answer.forecast.predictions
        distributed = [prediction for prediction in predictions if prediction.gpus > 1]
        if not distributed:
            return ""
        fitted = self._fit_to(answer.evidence_with_facts)
        first = distributed[0]
        has_several_hosts = any(prediction.nodes > 1 for prediction in predictions)
        return _sentence_on_what_is_sent(fitted, first.series, first.trial, has_several_hosts=has_several_hosts)


def _unscored_forecast(fitted: Fitted, questions: Sequence[Question]) -> Forecast:
    """Return the predictions without a test of how well such predictions did on these results."""
    predictions, left_out = answering.predictions(fitted, questions)
    return Forecast(fitted.evidence, predictions, (), left_out)


def _remarks(
    analysed: Analysis, on_stated_facts: Sequence[str], without_effect: Sequence[OptionWithoutEffect]
) -> Remarks:
    """Return the remarks on an answer.

    Args:
        analysed: the results.
        on_stated_facts: sentences on facts of measured runs that options state; empty ones are left out.
        without_effect: the options that change nothing.
    """
    return Remarks(
        unstable_runs=unstable_runs(analysed),
        taken_as_measured=" ".join(sentence for sentence in on_stated_facts if sentence),
        without_effect=tuple(without_effect),
    )


def _changes_of_training(options: Options) -> answering.Changes:
    """Return what is to differ from what was measured, by the options of `predict`."""
    return answering.Changes(
        model=options["--model"],
        image_size=options["--image-size"],
        engine=options["--engine"],
        zero_stage=options["--zero-stage"],
        precision=options["--precision"],
        micro_batch=options["--micro-batch"],
        grad_accum=options["--grad-accum"],
        device=options["--device"],
        parameters=options["--parameters"],
    )


def _sentence_on_what_is_sent(fitted: Fitted, series: str, trial: Trial, *, has_several_hosts: bool) -> str:
    """Return a sentence on what a step sends, for an answer that did not know it before an option stated a fact.

    Example: "In each step, ddp sends what 110,000,000 parameters need, over a link that is not known."

    Args:
        fitted: the fit that an answer is from.
        series: the series that the answer continues.
        trial: the trial of the answer.
        has_several_hosts: whether an answer lies on several hosts.
    """
    if fitted.series[series].model.messages is None:
        return (
            "What is sent in a step stays unknown; that the model is known changes how far it is taken to overlap "
            "with compute."
        )
    count = parameters(trial.model)
    need = "the model needs" if count is None else f"{units.counted(count, 'parameter')} need"
    network = fitted.evidence.network
    link = network.across if has_several_hosts else network.inside
    link_words = "a link that is not known" if link.source == "assumed" else link.described
    return f"In each step, {trial.train.engine} sends what {need}, over {link_words}."


_FIELD_BY_OPTION = {"--engine": "engine", "--zero-stage": "zero_stage", "--precision": "precision",
                    "--micro-batch": "micro_batch", "--grad-accum": "grad_accum"}  # fmt: skip
"""Option -> the field of training that it sets."""
_FIGURE_BY_OPTION = {"--price": "cost_per_epoch", "--gpu-memory": "oom_chance"}
"""Option -> the figure that is computed only with it."""
_FINISH_OPTIONS = ("--epochs", "--checkpoint-seconds", "--node-mtbf")
_TRANSFER_OPTIONS = ("--network", "--check", "--engine", "--model", "--parameters")
"""Options that decide how many bytes are sent, or how fast."""


def _why_no_effect(option: str, value: object, answer: PredictAnswer) -> str:
    """Return why an option of `predict` changes no figure, as a clause; empty where that is not known."""
    predictions = answer.forecast.predictions
    why_not_converted = _why_nothing_is_converted(option, answer.recorded, answer.evidence_with_facts)
    if why_not_converted:
        return why_not_converted
    if option in _FIGURE_BY_OPTION:
        return predictions[0].reasons.get(_FIGURE_BY_OPTION[option], "")
    if option in _FINISH_OPTIONS:
        reasons = [finish.reason for finish in answer.finishes if finish.reason]
        return reasons[0] if reasons else ""
    if option in _FIELD_BY_OPTION and _is_measured(option, value, answer):
        return "that is what was measured"
    assumptions: list[Assumption] = []
    for prediction in predictions:
        assumptions += prediction.assumptions
    placements = [_RanksOnHosts(prediction.gpus, prediction.nodes) for prediction in predictions]
    return _why_transfers_are_the_same(option, assumptions, placements)


def _why_nothing_is_converted(option: str, recorded: Evidence, evidence: Evidence) -> str:
    """Return why an option that states a fact which an import left open changes no figure, as a clause.

    It is empty for all other options, and for those that decide what is sent in a step: these do change the answer
    where enough is known, and `_why_transfers_are_the_same` says what is missing.
    """
    fact = answering.facts_taken(recorded, evidence).get(option)
    if fact is None or option in _TRANSFER_OPTIONS:
        return ""
    return (
        f"{fact} is taken for what was measured, which the import does not tell, so nothing is converted. To ask for "
        f"another one, import again and say what was measured"
    )


def _is_measured(option: str, value: object, answer: PredictAnswer) -> bool:
    """Whether an option's value is what was recorded, not assumed, at the most ranks of every series."""
    field = _FIELD_BY_OPTION[option]
    for series in answer.recorded_series:
        last_point = series.points[-1]
        is_recorded = f"train.{field}" not in last_point.assumed
        if not is_recorded or getattr(last_point.trial.train, field) != value:
            return False
    return True


class _RanksOnHosts(NamedTuple):
    """How many ranks an answer has, on how many hosts."""

    ranks: int
    hosts: int


def _why_transfers_are_the_same(
    option: str, assumptions: Iterable[Assumption], placements: Sequence[_RanksOnHosts]
) -> str:
    """Return why an option changes no time of communication, as a clause; empty where that is not known.

    Args:
        option: the option without effect.
        assumptions: those of all answers.
        placements: where each answer runs.
    """
    if option == "--network" and all(placement.hosts == 1 for placement in placements):
        most_ranks = max((placement.ranks for placement in placements), default=1)
        cure = f"add --nodes-of {most_ranks // 2}" if most_ranks > 1 else "ask for more ranks"
        return f"no answer lies on several hosts ({cure})"
    if option not in _TRANSFER_OPTIONS:
        return ""
    for assumption in assumptions:
        if assumption.part == WHAT_IS_SENT:
            return f"what is sent is unknown (to tell it: {assumption.measurement})"
    return ""


class AdviseQuestion(_Question):
    """The question of `advise`: what to rent under the limits of a request."""

    OPTIONS = (
        "--nodes-of", "--network", "--images", "--parameters", "--gpu-memory", "--any-batch", "--large-batch",
        "--split", "--checkpoint-seconds", "--node-mtbf",
    )  # fmt: skip
    """Options that may change a figure and need not. Limits are judged beside each answer, --price and --devices are in
    each cost, --epochs in each time; all others choose what is looked at, or where it is written."""

    def __init__(self, results: Path, analysed: Analysis, limits: Request) -> None:
        super().__init__(results, analysed)
        self.limits = limits

    def answer(self, options: Options) -> Advice:
        """Return the advice with these options.

        Raises:
            RequestError: what is asked cannot be answered from these results.
        """
        epochs = self.limits.epochs or 1  # only the checkpoints and failures of this horizon are used
        horizon = finishing.Horizon.of(epochs, options["--checkpoint-seconds"], options["--node-mtbf"])
        request = replace(
            self.limits,
            ranks_per_node=options["--nodes-of"],
            images=options["--images"],
            memory_capacity_bytes=memory_bytes(options["--gpu-memory"]),
            any_batch=bool(options["--any-batch"]),
            large_batch=bool(options["--large-batch"]),
            split=bool(options["--split"]),
            checkpoint_seconds=horizon.checkpoint_seconds,
            node_mtbf_seconds=horizon.node_mtbf_seconds,
        )
        fitted = self._fit_to(self._evidence_with_facts(options))
        return advised_from(fitted, self.analysed, request)

    def _recorded_evidence(self, options: Options) -> Evidence:
        """Return the evidence as recorded: without facts of measured runs that options state."""
        return evidence_of(self.results, self.analysed, declared=options["--network"])

    def _evidence_with_facts(self, options: Options) -> Evidence:
        """Return the evidence with the facts of measured runs that options state."""
        changes = answering.Changes(parameters=options["--parameters"])
        recorded = self._recorded_evidence(options)
        return answering.with_stated_facts(recorded, changes, options["--nodes-of"]).evidence

    def figures(self, options: Options) -> object:
        """Return all figures of the advice with these options, to be compared by `==`."""
        return _with_rounded_floats(_comparable_figures(advice_fields(self.answer(options), None)))

    def remarks(self, advice: Advice, options: Options) -> Remarks:
        """Return the remarks that stand before the advice with these options."""
        ineffective_options = options_without_effect(options, self.figures)
        recorded = self._recorded_evidence(options)
        with_facts = self._evidence_with_facts(options)
        without_effect = []
        for option in ineffective_options:
            reason = _why_nothing_is_converted(option, recorded, with_facts) or _why_no_effect_on_advice(option, advice)
            without_effect.append(OptionWithoutEffect(option, options[option], reason))
        on_stated_facts = [answering.taken_as_measured(recorded, with_facts, besides=ineffective_options)]
        stated_facts = answering.facts_taken(recorded, with_facts)  # by option
        if "--parameters" in stated_facts and "--parameters" not in ineffective_options:
            on_stated_facts.append(self._sentence_on_traffic(advice, with_facts))
        return _remarks(self.analysed, on_stated_facts, without_effect)

    def _sentence_on_traffic(self, advice: Advice, evidence: Evidence) -> str:
        """Return a sentence on what a step of the first answer sends, where an option stated an import's parameters.

        It is empty without an answer, and for one rank, which sends nothing.
        """
        first_answer = advice.chosen
        if first_answer is None or first_answer.gpus == 1:
            return ""
        measured_trial = advice.trials[first_answer.series]
        train = measured_trial.train.model_copy(update={"engine": first_answer.candidate.engine})
        trial = measured_trial.model_copy(update={"train": train})
        fitted = self._fit_to(evidence)
        return _sentence_on_what_is_sent(fitted, first_answer.series, trial, has_several_hosts=first_answer.nodes > 1)


_REASON_BY_ADVISE_OPTION = {
    "--any-batch": "no answer with another global batch is better",
    "--large-batch": "no answer of large-batch training is better",
    "--split": "no answer shares a model among ranks",
}


def _why_no_effect_on_advice(option: str, advice: Advice) -> str:
    """Return why an option of `advise` changes no figure; empty where that is not known."""
    if option in _REASON_BY_ADVISE_OPTION:
        return _REASON_BY_ADVISE_OPTION[option]
    if option == "--gpu-memory" and not advice.memory_known:
        return "what this model takes is not forecast"
    configurations = [*(answer.option for answer in advice.answers), *advice.front]
    placements = [_RanksOnHosts(configuration.gpus, configuration.nodes) for configuration in configurations]
    return _why_transfers_are_the_same(option, advice.assumptions, placements)


_FIELDS_WITHOUT_FIGURES = (
    "assumptions", "reasons", "effective_draws", "looked_at", "dropped", "refused",
    "engine", "zero_stage", "precision", "micro_batch", "grad_accum", "global_batch", "image_size", "gpu",
    "memory_capacity_bytes", "host_memory_capacity_bytes", "limits", "price_per_gpu_hour",
)  # fmt: skip
"""Fields of an answer that are no figures: words, numbers of what was looked at, and what repeats the question."""


def _comparable_figures(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of an answer, with the names of the assumed parts in place of the assumptions' words."""
    figures = {name: value for name, value in fields.items() if name not in _FIELDS_WITHOUT_FIGURES}
    figures["assumed"] = [assumption["part"] for assumption in fields["assumptions"]]
    return figures


def _finish_figures(finish: Finish) -> tuple[float | None, ...]:
    """Return the figures of a time to finish."""
    return (
        finish.work_seconds,
        finish.wall_seconds,
        finish.low,
        finish.high,
        finish.failures,
        finish.lost_share,
        finish.cost,
    )


def _with_rounded_floats(value: Any) -> Any:
    """Return the value with all of its floats as text of six digits, at any depth, so that rounding errors are equal.

    Example: {"seconds": [0.1234567, 3]} gives {"seconds": ["0.123457", 3]}.
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return {name: _with_rounded_floats(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_rounded_floats(item) for item in value]
    return value
