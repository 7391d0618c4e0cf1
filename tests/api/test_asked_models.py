"""`--model` takes the names that a study takes, and asks for a size that nothing counts."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from card_factory import make_card
from prediction_factory import asked_questions, make_network, resolved_study, series_of, stated_facts
from vitscale.analysis import analyse
from vitscale.api import asked_models
from vitscale.api.asked_models import ModelFinder
from vitscale.api.questions import PredictQuestion
from vitscale.engines.trace_requests import trace_request
from vitscale.errors import RequestError
from vitscale.prediction.answering import Changes, answer
from vitscale.prediction.evidence import Evidence
from vitscale.prediction.fitting import fit
from vitscale.prediction.model_requests import ModelRequest
from vitscale.prediction.results import Prediction
from vitscale.study import user_model
from vitscale.trial import known_models, model_cost
from vitscale.trial.known_models import KnownModels
from vitscale.trial.model_card import ModelCard
from vitscale.trial.model_cost import counted_parameters
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trial import Trial

HAS_TIMM = importlib.util.find_spec("timm") is not None
STEPS = {1: [0.1, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]}
MEASURED = series_of(analyse(resolved_study(STEPS))).points[-1].trial
"""vit-ti16 on images of 32 pixels in 10 classes."""
COUNTED = 5_489_482
"""Its parameters: 147,648 of patches, 1,152 of tokens, 12 x 444,864 of blocks, 384 of the norm, 1,930 of the head."""


class FakeTracer:
    """Stands for the process that traces: makes a card known, or why there is none."""

    def __init__(self, known: KnownModels) -> None:
        self.known = known
        self.traced: list[Trial] = []
        self.reason = ""

    def find_cards(self, trials: Mapping[str, Trial], digests: object, folders: Sequence[str]) -> tuple[ModelCard, ...]:
        for trial in trials.values():
            self.traced.append(trial)
            request = trace_request(trial)
            if self.reason:
                self.known.replace_with_reason(request, self.reason)
            else:
                card = make_card()
                self.known.put(card.model_copy(update={"request": request}))
        return ()


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTracer:
    """A tracer whose cards nothing else knows, in a folder with the configuration of a DINOv2."""
    known = KnownModels()
    for module in (asked_models, known_models, model_cost):
        monkeypatch.setattr(module, "KNOWN_MODELS", known)
    fake = FakeTracer(known)
    monkeypatch.setattr(asked_models, "find_cards", fake.find_cards)
    (tmp_path / "tiny").mkdir()
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    (tmp_path / "tiny/config.json").write_text(json.dumps({"model_type": "dinov2", **shape}))
    monkeypatch.chdir(tmp_path)
    return fake


def evidence() -> Evidence:
    return Evidence((series_of(analyse(resolved_study(STEPS))),), make_network())


def predicted(changes: Changes) -> Prediction:
    stated, rest = stated_facts(evidence(), changes)
    (prediction,) = answer(fit(stated), asked_questions(stated, (8,), rest)).predictions
    return prediction


def asked_model(name: str, image_size: int, measured: Trial, stated_parameters: int | None = None) -> ModelSpec:
    """What a finder that has found nothing yet finds."""
    return ModelFinder().find(ModelRequest(name, image_size, measured, stated_parameters))


def test_a_named_model_in_any_spelling_needs_no_tracer(tracer: FakeTracer) -> None:
    expected = resolve(ModelSpec(name="vit-b16", image_size=32), 10)
    assert asked_model("vit-b16", 32, MEASURED) == asked_model("ViT-B/16", 32, MEASURED) == expected
    assert tracer.traced == []


@pytest.mark.skipif(HAS_TIMM, reason="timm is installed")
def test_names_are_checked_as_plan_does_and_messages_speak_of_the_option(tracer: FakeTracer) -> None:
    with pytest.raises(RequestError, match="--model 'timm/resnet5' needs timm, which is not installed"):
        asked_model("timm/resnet5", 32, MEASURED)
    with pytest.raises(RequestError, match=r"Write --model timm/vit_base_patch16_224 or vit-b16\."):
        asked_model("vit_base_patch16_224", 32, MEASURED)
    with pytest.raises(RequestError, match=r"--model 'https://.*' is an address\. Write --model google/vit-x"):
        asked_model("https://huggingface.co/google/vit-x", 32, MEASURED)
    assert tracer.traced == []


def test_a_folder_is_traced_once_as_the_measured_trial_trains(tracer: FakeTracer, tmp_path: Path) -> None:
    spec = asked_model("tiny", 32, MEASURED)
    assert spec == asked_model("./tiny", 32, MEASURED)
    assert (spec.hf, spec.num_classes) == (str(tmp_path / "tiny"), 10)
    (traced,) = tracer.traced
    assert (traced.train, traced.model) == (MEASURED.train, spec)
    assert traced.model_digest == user_model.check(tmp_path / "study.toml", spec)
    count = counted_parameters(spec)
    assert count is not None
    assert count.source == "traced"
    resized = ModelFinder().find(ModelRequest(None, 64, traced))
    assert [trial.model for trial in tracer.traced] == [spec, resized]


def test_a_size_that_nothing_counts_is_asked_for(tracer: FakeTracer) -> None:
    tracer.reason = "torch is not installed"
    with pytest.raises(RequestError) as refused:
        asked_model("tiny", 32, MEASURED)
    assert str(refused.value) == (
        "the parameters of --model 'tiny' cannot be counted here: torch is not installed. Say them: --parameters 110M. "
        "Or predict on the machine that trains."
    )
    assert asked_model("tiny", 32, MEASURED, 110_000_000).parameter_count == 110_000_000
    assert len(tracer.traced) == 1  # why it fails is known


def test_a_size_that_is_known_is_not_told_again(tracer: FakeTracer) -> None:
    for name in ("vit-b16", "tiny"):
        with pytest.raises(RequestError, match=rf"--parameters 9,000: '{name}' is known, .* parameters.*Leave it out"):
            asked_model(name, 32, MEASURED, 9000)


def test_without_the_hub_the_size_may_be_told(tracer: FakeTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, file: str, field: str) -> Path:
        raise RequestError(f"{field} {name!r} cannot be had from the hub", next_step="Give a local folder")

    monkeypatch.setattr(user_model, "_hub_file", unreachable)
    with pytest.raises(RequestError) as refused:
        asked_model("facebook/dinov2-base", 32, MEASURED)
    assert str(refused.value) == (
        "--model 'facebook/dinov2-base' cannot be had from the hub. Give a local folder. Or say its size: "
        "--parameters 110M."
    )
    spec = asked_model("facebook/dinov2-base", 32, MEASURED, 86_600_000)
    assert (spec.hf, spec.parameter_count) == ("facebook/dinov2-base", 86_600_000)
    assert tracer.traced == []


def test_the_hub_is_asked_once_however_often_a_question_is_answered(
    tracer: FakeTracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers without each option ask for the same model; other precisions of a trial have the same configuration."""
    asked: list[str] = []

    def hub_file(name: str, file: str, field: str) -> Path:
        asked.append(name)
        return tmp_path / "tiny/config.json"

    monkeypatch.setattr(user_model, "_hub_file", hub_file)
    finder = ModelFinder()
    request = ModelRequest("someone/tiny", 32, MEASURED)
    first = finder.find(request)
    asked_of_first = len(asked)
    in_bf16 = MEASURED.model_copy(update={"train": MEASURED.train.model_copy(update={"precision": "bf16"})})
    assert finder.find_all({"again": request, "bf16": request._replace(measured=in_bf16)}) == {
        "again": first,
        "bf16": first,
    }
    assert len(asked) == asked_of_first > 0
    assert [trial.train.precision for trial in tracer.traced] == ["fp32", "bf16"]


def test_predict_finds_a_model_once_for_all_answers_without_an_option(
    tracer: FakeTracer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[ModelRequest] = []
    named_model = ModelFinder._named_model

    def counting(self: ModelFinder, name: str, request: ModelRequest) -> ModelSpec:
        found.append(request)
        return named_model(self, name, request)

    monkeypatch.setattr(ModelFinder, "_named_model", counting)
    question = PredictQuestion(tmp_path, analyse(resolved_study(STEPS)), (8,), None)
    options = dict.fromkeys(PredictQuestion.OPTIONS) | {"--model": "tiny", "--price": 2.0, "--network": "25GbE"}
    answer_to_all = question.answer(options)
    question.remarks(answer_to_all, options)
    assert answer_to_all.forecast.predictions[0].trial.model.hf == str(tmp_path / "tiny")
    assert len(found) == 1


def test_a_model_of_told_size_computes_as_its_parameters_and_pixels(tracer: FakeTracer) -> None:
    """Twice the parameters at twice the side: 8 times the compute, and the answer says that nothing measured it."""
    tracer.reason = "no card"
    told = predicted(Changes(model="tiny", image_size=64, parameters=str(2 * COUNTED)))
    (assumed,) = [one for one in told.assumptions if one.part == "compute of another model"]
    assert assumed.taken.startswith("8 times, as parameters x pixels are, within a factor of 2.7")
    assert told.label == "prior-driven"
    assert told.parameters == (2 * COUNTED, "told")


def test_a_prediction_says_what_its_ranks_counted_unless_it_is_another_model(tracer: FakeTracer) -> None:
    own = predicted(Changes())
    assert own.parameters == (COUNTED, "by formula")  # the ranks of these points recorded nothing
    series = series_of(analyse(resolved_study(STEPS)))
    recorded = model_cost.ParameterCount(777, "measured")
    points = tuple(dataclasses.replace(point, recorded_parameters=recorded) for point in series.points)
    measured = Evidence((dataclasses.replace(series, points=points),), make_network())
    for changes, count in ((Changes(), recorded), (Changes(model="vit-b16"), None)):
        (prediction,) = answer(fit(measured), asked_questions(measured, (8,), changes)).predictions
        assert prediction.parameters == (count or counted_parameters(prediction.trial.model))
