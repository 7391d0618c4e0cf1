"""predict: time, efficiency, memory and cost on rank counts that nobody has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from vitscale import analysis
from vitscale.analysis import Analysis
from vitscale.api.arguments import StrPath, path_of, path_or_none, rank_counts
from vitscale.api.questions import PredictQuestion
from vitscale.pages.predicted import predict_document, predict_fields
from vitscale.prediction.answering import Changes
from vitscale.prediction.finishing import Finish
from vitscale.prediction.remarks import Remarks
from vitscale.prediction.results import Forecast
from vitscale.present.document import Document
from vitscale.present.units import counted, listed
from vitscale.present.unread import Unread
from vitscale.present.verb_result import VerbResult

_MOST_COUNTS_NAMED = 6
"""Rank counts that a `repr` names."""


@dataclass(frozen=True)
class TrainingPlan:
    """A whole training, to find the time to finish it, failures and checkpoints included."""

    epochs: int | None = None
    """Epochs to finish. None: `predict` gives no time to finish, `advise` takes those of the study."""
    checkpoint_seconds: float | None = None
    """Seconds to save one checkpoint; None: as recorded, else assumed."""
    node_mtbf_hours: float | None = None
    """Mean hours between failures of a host; None: a prior."""


@dataclass(frozen=True, repr=False)
class PredictResult(VerbResult):
    """Predictions for each series and rank count."""

    forecast: Forecast
    """Predictions, each with 90 % intervals and a label (measured, interpolated, extrapolated, prior-driven)."""
    finishes: tuple[Finish, ...]
    """The time to finish of each prediction; empty where no epochs were given."""
    remarks: Remarks
    """Sentences before the answer: unsteady runs, options that changed nothing."""
    analysis: Analysis
    """The results that it rests on."""

    verb = "predict"

    @property
    @override
    def unread(self) -> Sequence[Unread]:
        return self.analysis.unread

    @property
    @override
    def summary(self) -> str:
        ranks = sorted({prediction.gpus for prediction in self.forecast.predictions})
        series = len({prediction.series for prediction in self.forecast.predictions})
        return f"{counted(series, 'series', 'series')} on {listed(ranks, most=_MOST_COUNTS_NAMED)} ranks"

    @override
    def _answer_fields(self) -> Mapping[str, Any]:
        return predict_fields(self.forecast, self.finishes, self.remarks)

    @override
    def _answer_document(self) -> Document:
        return predict_document(self.forecast, self.finishes, self.remarks)


def predict(
    results: StrPath,
    gpus: Sequence[int] | int | None = None,
    *,
    series: str | None = None,
    nodes_of: int | None = None,
    network: str | None = None,
    check: StrPath | None = None,
    changes: Changes | None = None,
    price: float | None = None,
    gpu_memory: str | int | None = None,
    training: TrainingPlan | None = None,
) -> PredictResult:
    """Predicts time, efficiency, memory and cost on rank counts that nobody has measured, with intervals.

    Args:
        results: a results folder, or a bundle of it.
        gpus: rank counts; None: 2, 4 and 8 times the most measured.
        series: one curve of the report; None: all.
        nodes_of: ranks on each host; None: as measured.
        network: the link between hosts ("25GbE", "HDR", "4x200Gb/s"), or "check"; None: from a check.
        check: a stored check; None: the newest of the results.
        changes: what is to differ from what was measured: model, image size, engine, batch, GPU.
        price: price of one GPU for an hour, in any currency.
        gpu_memory: memory of one device: bytes, or text such as "80GB"; None: as recorded, or found here.
        training: epochs, to predict the time to finish them too.

    Returns:
        A prediction for each series and rank count; times in seconds.

    Raises:
        RequestError: an option is out of range, or these results cannot answer what is asked.
        StoreError: the folder holds no results, or they cannot be read.

    Example:
        >>> predicted = vitscale.predict("results", [8, 16], network="25GbE", nodes_of=8)
        >>> predicted
        <predict: 1 series on 8 and 16 ranks>
        >>> [prediction.nodes for prediction in predicted.forecast.predictions]
        [1, 2]
    """
    changes = changes or Changes()
    training = training or TrainingPlan()
    options = {
        "--nodes-of": nodes_of,
        "--network": network,
        "--check": path_or_none(check),
        "--model": changes.model,
        "--image-size": changes.image_size,
        "--parameters": changes.parameters,
        "--engine": changes.engine,
        "--zero-stage": changes.zero_stage,
        "--precision": changes.precision,
        "--micro-batch": changes.micro_batch,
        "--grad-accum": changes.grad_accum,
        "--device": changes.device,
        "--price": price,
        "--gpu-memory": gpu_memory,
        "--epochs": training.epochs,
        "--checkpoint-seconds": training.checkpoint_seconds,
        "--node-mtbf": training.node_mtbf_hours,
    }
    folder = path_of(results)
    analysed = analysis.analyse_folder(folder)
    question = PredictQuestion(folder, analysed, rank_counts(gpus), series)
    answer = question.answer(options)
    return PredictResult(answer.forecast, answer.finishes, question.remarks(answer, options), analysed)
