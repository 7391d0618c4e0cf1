"""What `predict` and `advise` ask of results with all their options, and with any one of them left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitscale.advice.pipeline import Advice, advised_from
from vitscale.advice.printing import advice_fields
from vitscale.advice.request import Request
from vitscale.analysis import Analysis
from vitscale.api.arguments import memory_bytes
from vitscale.pages.predicted import predict_fields
from vitscale.prediction import answering, finishing
from vitscale.prediction.evidence import Evidence, Series, evidence_of
from vitscale.prediction.finishing import Finish
from vitscale.prediction.fitting import Fitted, fit
from vitscale.prediction.labels import WHAT_IS_SENT
from vitscale.prediction.network.links import Network
from vitscale.prediction.remarks import Options, Remarks, changes_nothing, options_without_effect, unstable_runs
from vitscale.prediction.results import Assumption, Forecast
from vitscale.present import units
from vitscale.trial.model_cost import parameters
from vitscale.trial.trial import Trial


@dataclass(frozen=True)
class PredictAnswer:
    """The answer of `predict` with some options."""

    forecast: Forecast
    finishes: tuple[Finish, ...]
    recorded: Evidence
    """The evidence without what the options say of measured runs."""

    @property
    def recorded_series(self) -> tuple[Series, ...]:
        """What is recorded of the series that the answer is about."""
        names = {prediction.series for prediction in self.forecast.predictions}
        return tuple(series for series in self.recorded.series if series.name in names)


class _Asking:
    """A results folder that is asked several times: fitted once for each evidence that options make of it."""

    def __init__(self, results: Path, analysed: Analysis) -> None:
        self.results, self.analysed = results, analysed
        self._fits: list[Fitted] = []

    def _fitted(self, evidence: Evidence) -> Fitted:
        for fitted in self._fits:
            if fitted.evidence == evidence:
                return fitted
        self._fits.append(fit(evidence))
        return self._fits[-1]


class PredictAsking(_Asking):
    """`predict` of some series at some rank counts."""

    OPTIONS = (
        "--nodes-of", "--network", "--check", "--model", "--image-size", "--parameters", "--engine", "--zero-stage",
        "--precision", "--micro-batch", "--grad-accum", "--device", "--price", "--gpu-memory", "--epochs",
        "--checkpoint-seconds", "--node-mtbf",
    )  # fmt: skip
    """Options that are to change a figure. All others choose what is shown, or where."""

    def __init__(self, results: Path, analysed: Analysis, counts: tuple[int, ...] | None, series: str | None) -> None:
        super().__init__(results, analysed)
        self.counts, self.series = counts, series

    def answer(self, options: Options, *, scored: bool = True) -> PredictAnswer:
        """The answer with these options; `scored`: with how well such answers did.

        Raises:
            RequestError: it cannot be answered.
        """
        horizon = finishing.horizon(options["--epochs"], options["--checkpoint-seconds"], options["--node-mtbf"])
        changes = answering.Changes(
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
        recorded = evidence_of(self.results, self.analysed, declared=options["--network"], check=options["--check"])
        evidence, changes = answering.told(recorded, changes, options["--nodes-of"])
        questions = answering.questions(
            evidence,
            self.counts or answering.counts_ahead(evidence),
            changes,
            series=self.series,
            nodes_of=options["--nodes-of"],
            price_per_gpu_hour=options["--price"],
            memory_capacity_bytes=memory_bytes(options["--gpu-memory"]),
        )
        fitted = self._fitted(evidence)
        if scored:
            forecast = answering.answer(fitted, questions)
        else:
            predictions, left_out = answering.predictions(fitted, questions)
            forecast = Forecast(evidence, predictions, (), left_out)
        ends = finishing.finish(horizon, forecast.predictions, evidence, self.analysed) if horizon else ()
        return PredictAnswer(forecast, ends, recorded)

    def figures(self, options: Options) -> object:
        """All figures of the answer with these options."""
        answered = self.answer(options, scored=False)
        fields = predict_fields(answered.forecast)
        ends = [_finish_figures(end) for end in answered.finishes if not end.reason]
        return _rounded([[_figures(one) for one in fields["predictions"]], fields["left_out"], ends])

    def remarks(self, answered: PredictAnswer, options: Options) -> Remarks:
        """What is to be known before the answer."""
        idle = options_without_effect(options, self.figures)
        evidence = answered.forecast.evidence
        taken = answering.taken_as_measured(answered.recorded, evidence, besides=idle)
        effective = answering.facts_taken(answered.recorded, evidence).keys() - idle
        names_what_is_sent = bool(effective & {"--engine", "--model", "--parameters"})
        brought_in = self._brought_in(answered) if names_what_is_sent else ""
        without_effect = []
        for option in idle:
            why = _why_idle(option, options[option], answered)
            without_effect.append(changes_nothing(option, options[option], why))
        return Remarks(
            unstable_runs(self.analysed, answered.recorded_series),
            f"{taken} {brought_in}".strip(),
            tuple(without_effect),
        )

    def _brought_in(self, answered: PredictAnswer) -> str:
        """What the answer rests on since an option named the engine or the model of an import."""
        fitted = self._fitted(answered.forecast.evidence)
        for prediction in answered.forecast.predictions:
            if prediction.gpus == 1:
                continue
            if fitted.series[prediction.series].model.messages is not None:
                several_hosts = any(one.nodes > 1 for one in answered.forecast.predictions)
                return _what_is_sent(prediction.trial, fitted.evidence.network, several_hosts=several_hosts)
            return (
                "What is sent in a step stays unknown; that the model is known changes how far it is taken to overlap "
                "with compute."
            )
        return ""


def _what_is_sent(trial: Trial, network: Network, *, several_hosts: bool) -> str:
    """ "In each step, ddp sends what 110,000,000 parameters need, over a link that is not known."."""
    count = parameters(trial.model)
    what = "what the model needs" if count is None else f"what {units.counted(count, 'parameter')} need"
    link = network.across if several_hosts else network.inside
    over = "a link that is not known" if link.source == "assumed" else link.described
    return f"In each step, {trial.train.engine} sends {what}, over {over}."


_FIELDS = {"--engine": "engine", "--zero-stage": "zero_stage", "--precision": "precision",
           "--micro-batch": "micro_batch", "--grad-accum": "grad_accum"}  # fmt: skip
"""Option -> the field of training that it names."""
_REASONS = {"--price": "cost_per_epoch", "--gpu-memory": "oom_chance"}
"""Option -> the figure that there is because of it."""


def _why_idle(option: str, value: object, answered: PredictAnswer) -> str:
    """Why an option of `predict` changes no figure; empty where that is not known."""
    predictions = answered.forecast.predictions
    if why := _why_taken_as_measured(option, answered.recorded, answered.forecast.evidence):
        return why
    if option in _REASONS:
        return predictions[0].reasons.get(_REASONS[option], "")
    if option in ("--epochs", "--checkpoint-seconds", "--node-mtbf"):
        return next((end.reason for end in answered.finishes if end.reason), "")
    if option in _FIELDS and _is_measured(option, value, answered):
        return "that is what was measured"
    assumptions = [assumed for prediction in predictions for assumed in prediction.assumptions]
    placements = [(prediction.gpus, prediction.nodes) for prediction in predictions]
    return _why_transfers_are_the_same(option, assumptions, placements)


def _why_taken_as_measured(option: str, recorded: Evidence, evidence: Evidence) -> str:
    """Why an option that says what an import left open changes no figure; empty for all others.

    What is sent is another matter: it is to change the answer, and says itself what is missing for that.
    """
    fact = answering.facts_taken(recorded, evidence).get(option)
    if fact is None or option in _OF_TRANSFERS:
        return ""
    return (
        f"{fact} is taken for what was measured, which the import does not tell, so nothing is converted. To ask for "
        f"another one, import again and say what was measured"
    )


def _is_measured(option: str, value: object, answered: PredictAnswer) -> bool:
    """Whether an option names what is recorded of all series."""
    field = _FIELDS[option]
    last_points = [series.points[-1] for series in answered.recorded_series]
    recorded = [point.trial.train for point in last_points if f"train.{field}" not in point.assumed]
    return len(recorded) == len(last_points) and all(getattr(train, field) == value for train in recorded)


_OF_TRANSFERS = ("--network", "--check", "--engine", "--model", "--parameters")
"""Options that say what is sent, or how fast."""


def _why_transfers_are_the_same(
    option: str, assumptions: Iterable[Assumption], placements: Sequence[tuple[int, int]]
) -> str:
    """Why an option on transfers changes no figure.

    Args:
        option: the option.
        assumptions: those of the answers.
        placements: (ranks, hosts) of each answer.
    """
    if option == "--network" and all(hosts == 1 for _, hosts in placements):
        most = max((ranks for ranks, _ in placements), default=1)
        cure = f"add --nodes-of {most // 2}" if most > 1 else "ask for more ranks"
        return f"no answer lies on several hosts ({cure})"
    sent = next((assumed for assumed in assumptions if assumed.part == WHAT_IS_SENT), None)
    if option not in _OF_TRANSFERS or sent is None:
        return ""
    return f"what is sent is unknown (to tell it: {sent.measurement})"


class AdviseAsking(_Asking):
    """`advise` under the limits of a request."""

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
        """The advice with these options.

        Raises:
            RequestError: what is asked cannot be answered from these results.
        """
        job = finishing.Horizon.of(self.limits.epochs or 1, options["--checkpoint-seconds"], options["--node-mtbf"])
        asked = replace(
            self.limits,
            ranks_per_node=options["--nodes-of"],
            images=options["--images"],
            memory_capacity_bytes=memory_bytes(options["--gpu-memory"]),
            any_batch=bool(options["--any-batch"]),
            large_batch=bool(options["--large-batch"]),
            split=bool(options["--split"]),
            checkpoint_seconds=job.checkpoint_seconds,
            node_mtbf_seconds=job.node_mtbf_seconds,
        )
        return advised_from(self._fitted(self._evidence(options)), self.analysed, asked)

    def _recorded(self, options: Options) -> Evidence:
        return evidence_of(self.results, self.analysed, declared=options["--network"])

    def _evidence(self, options: Options) -> Evidence:
        changes = answering.Changes(parameters=options["--parameters"])
        return answering.told(self._recorded(options), changes, options["--nodes-of"])[0]

    def figures(self, options: Options) -> object:
        """All figures of the advice with these options."""
        return _rounded(_figures(advice_fields(self.answer(options), None)))

    def remarks(self, advice: Advice, options: Options) -> Remarks:
        """What is to be known before the answers."""
        idle = options_without_effect(options, self.figures)
        recorded, evidence = self._recorded(options), self._evidence(options)
        series = [one_series for one_series in evidence.series if one_series.name in advice.trials]
        without_effect = []
        for option in idle:
            why = _why_taken_as_measured(option, recorded, evidence) or _why_of_advice(option, advice)
            without_effect.append(changes_nothing(option, options[option], why))
        return Remarks(
            unstable_runs(self.analysed, series),
            answering.taken_as_measured(recorded, evidence, besides=idle),
            tuple(without_effect),
        )


_WHY_NO_BETTER = {
    "--any-batch": "no answer with another global batch is better",
    "--large-batch": "no answer of large-batch training is better",
    "--split": "no answer shares a model among ranks",
}


def _why_of_advice(option: str, advice: Advice) -> str:
    """Why an option of `advise` changes no figure; empty where that is not known."""
    if option in _WHY_NO_BETTER:
        return _WHY_NO_BETTER[option]
    if option == "--gpu-memory" and not advice.memory_known:
        return "what this model takes is not forecast"
    told = [*(answer.option for answer in advice.answers), *advice.front]
    placements = [(one.gpus, one.nodes) for one in told]
    return _why_transfers_are_the_same(option, advice.assumptions, placements)


_NO_FIGURES = (
    "assumptions", "reasons", "effective_draws", "looked_at", "dropped", "refused",
    "engine", "zero_stage", "precision", "micro_batch", "grad_accum", "global_batch", "image_size", "gpu",
    "memory_capacity_bytes", "limits", "price_per_gpu_hour",
)  # fmt: skip
"""Fields of an answer that are words, say how much was looked at, or repeat the question."""


def _figures(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an answer, with what is assumed for them, but not in which words."""
    assumed = [assumption["part"] for assumption in fields["assumptions"]]
    return {name: value for name, value in fields.items() if name not in _NO_FIGURES} | {"assumed": assumed}


def _finish_figures(end: Finish) -> tuple[float | None, ...]:
    return (end.work_seconds, end.wall_seconds, end.low, end.high, end.failures, end.lost_share, end.cost)


def _rounded(value: Any) -> Any:
    """The value with every number to six digits, at any depth: what differs further on is no other answer."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
