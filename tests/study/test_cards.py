"""Cards are traced by a real process of their own, kept, and missing with a reason."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from card_factory import make_card
from study import quick_tracer
from vitscale.engines import trace_requests
from vitscale.study import card_cache, cards, tracer_process, tracers
from vitscale.study.cards import find_cards
from vitscale.trial import model_cost
from vitscale.trial.known_models import KnownModels
from vitscale.trial.model_card import ModelCard
from vitscale.trial.model_spec import ModelSpec, resolve
from vitscale.trial.trace_messages import parse_answer
from vitscale.trial.trial import DataSpec, TrainSpec, Trial, WindowSpec, World

DINOV2 = {
    "model_type": "dinov2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
FACTORIES = """
import os
import subprocess
import time
from torch import nn

def linear(num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 5), nn.Linear(5, num_classes))

class Choosing(nn.Module):
    def __init__(self, num_classes, image_size):
        super().__init__()
        self.head = nn.Linear(3 * image_size**2, num_classes)
    def forward(self, images):
        return self.head(images.flatten(1)[images.flatten(1).sum(1) > 0])

def choosing(num_classes, image_size):
    return Choosing(num_classes, image_size)

def ending(num_classes, image_size):
    os._exit(3)

def printing(num_classes, image_size):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"junk\\n")
        except OSError:
            pass
    return linear(num_classes, image_size)

def endless(num_classes, image_size):
    with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file:
        file.write(f"{os.getpid()}\\n")
    while True:
        pass

def leaving_a_child(num_classes, image_size, name="leaving_a_child"):
    child = subprocess.Popen(["sleep", "600"])
    with open(os.path.join(os.path.dirname(__file__), name), "a") as file:
        file.write(f"{child.pid}\\n")
    return linear(num_classes, image_size)

def ending_with_a_child(num_classes, image_size):
    leaving_a_child(num_classes, image_size, "ending_with_a_child")
    os._exit(3)
"""
WIDER = FACTORIES.replace("5)", "50)").replace("(5,", "(50,")
IMPORTING = "from widths import HIDDEN\n" + FACTORIES.replace("5)", "HIDDEN)").replace("(5,", "(HIDDEN,")
IN_ONE_STUDY = (
    "choosing", "ending", "absent", "printing", "leaving_a_child", "ending_with_a_child", "linear",
)  # fmt: skip
PLANNING = """
import sys
from vitscale.study import tracer_process
from vitscale.study.cards import find_cards
from vitscale.trial.trial import Trial
tracer_process._TRACER_MODULE = "study.quick_tracer"
find_cards({"a": Trial.model_validate_json(sys.argv[1])}, {}, [sys.argv[2]])
"""
TESTS = Path(__file__).parents[1]


def know_nothing(monkeypatch: pytest.MonkeyPatch) -> KnownModels:
    """Let this process know no card, as another process would begin."""
    own = KnownModels()
    for module in (cards, model_cost):
        monkeypatch.setattr(module, "KNOWN_MODELS", own)
    return own


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KnownModels:
    """What this test alone knows, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return know_nothing(monkeypatch)


@pytest.fixture
def quick(known: KnownModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are traced by a stand-in that takes no torch."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(tracer_process, "_TRACER_MODULE", "study.quick_tracer")


def trial(model: ModelSpec, **train: Any) -> Trial:
    fields: dict[str, Any] = {"engine": "none", "precision": "fp32", "micro_batch": 2, "device": "cpu"} | train
    return Trial(
        model=resolve(model.model_copy(update={"image_size": 16}), 3),
        data=DataSpec(name="synthetic"),
        train=TrainSpec(**fields),
        world=World(ranks_per_node=1, threads_per_rank=1),
        window=WindowSpec(steps=1),
        launcher="torchrun",
    )


def of_factory(function: str, module: str = "my_models") -> Trial:
    return trial(ModelSpec(factory=f"{module}:{function}"))


def reason_of(known: KnownModels, asked: Trial) -> str:
    return known.reason(trace_requests.trace_request(asked))


def of_the_hub_in(folder: Path) -> Trial:
    """A trial of a model of the hub's, whose configuration is written into `folder`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DINOV2))
    return trial(ModelSpec(hf=str(folder)))


@pytest.fixture
def of_the_hub(tmp_path: Path) -> Trial:
    """A trial of a model of the hub's."""
    return of_the_hub_in(tmp_path / "model")


def trace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer_process, "_TRACER_MODULE", "no_such_module")


def test_a_model_of_the_hub_s_is_traced_once_and_then_kept(
    known: KnownModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its name has characters that end a line elsewhere, and that the locale cannot write."""
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    asked = of_the_hub_in(tmp_path / "mod\x85\u2028èle")
    kept, recomputed = find_cards({"a": asked}, {}, ())
    assert (kept.request.checkpointing, recomputed.request.checkpointing) == (False, True)
    # 4 patches and a class token; a block's two norms, q, k, v, output, two scales and an MLP of 32; mask token frozen.
    block = 2 * 32 + 4 * (16 * 16 + 16) + 2 * 16 + (16 * 32 + 32 + 32 * 16 + 16)
    embedding = 16 + 5 * 16 + 3 * 8 * 8 * 16 + 16
    assert kept.trainable_parameters == embedding + 2 * block + 32 + (32 * 3 + 3)
    assert kept.frozen_elements == 16
    assert model_cost.parameters(asked.model) == kept.parameters
    assert kept.versions.keys() >= {"torch", "transformers", "tracer"}

    # From here on nothing can be traced: the second study of this user takes what is kept.
    trace_nothing(monkeypatch)
    monkeypatch.setattr(cards, "KNOWN_MODELS", KnownModels())
    assert find_cards({"a": asked}, {}, ()) == (kept, recomputed)


def test_a_kept_card_that_is_broken_or_of_another_model_is_traced_again(
    quick: None, of_the_hub: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = trace_requests.trace_request(of_the_hub)
    path = card_cache.cached_path(request)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text('{"request": 1}')
    card, _ = find_cards({"a": of_the_hub}, {}, ())
    content = card.model_copy(update={"request": request.model_copy(update={"device": "cuda"})})
    path.write_text(content.model_dump_json())
    know_nothing(monkeypatch)
    assert card in find_cards({"a": of_the_hub}, {}, ())


def test_a_card_of_more_than_a_mebibyte_is_kept(
    quick: None, of_the_hub: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_cards({"a": of_the_hub}, {}, ())
    path = card_cache.cached_path(found[0].request)
    assert path is not None
    path.write_text(path.read_text() + " " * (2 << 20))
    know_nothing(monkeypatch)
    trace_nothing(monkeypatch)
    assert find_cards({"a": of_the_hub}, {}, ()) == found


def test_a_user_without_a_home_has_no_cache(of_the_hub: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    request = trace_requests.trace_request(of_the_hub)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    path = card_cache.cached_path(request)
    assert path is not None
    assert path.is_relative_to("/home/me/.cache")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert card_cache.cached_path(request) is None
    assert card_cache.read_card(request) is None
    card_cache.write_card(make_card().model_copy(update={"request": request}))


class Studies(NamedTuple):
    """What two studies found of the same factories, which were changed in between."""

    known: KnownModels
    """After the first study."""
    cards: dict[str, ModelCard]
    """Factory -> its card in the first study."""
    changed_cards: dict[str, ModelCard]
    """The same in the second one."""
    seconds: float
    """Of the first study."""
    folder: Path
    """The modules; and files, named by factories, with the ids of processes that they started."""


def by_factory(found: Sequence[ModelCard]) -> dict[str, ModelCard]:
    return {str(card.request.model.factory): card for card in found}


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studies]:
    """Two studies, each of which traces all its models in one process, as long as that lives."""
    folder = tmp_path_factory.mktemp("factories")
    (folder / "widths.py").write_text("HIDDEN = 5\n")
    (folder / "importing_models.py").write_text(IMPORTING)
    (folder / "my_models.py").write_text(FACTORIES)
    importing = of_factory("linear", "importing_models")
    trials = {function: of_factory(function) for function in IN_ONE_STUDY} | {"importing": importing}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setattr(tracers, "PROCESSES", 1)
        known = know_nothing(monkeypatch)
        begin = time.monotonic()
        found = find_cards(trials, dict.fromkeys(trials, "a" * 64), [str(folder)])
        seconds = time.monotonic() - begin
        (folder / "widths.py").write_text("HIDDEN = 50\n")
        (folder / "my_models.py").write_text(WIDER)
        again = {"linear": trials["linear"], "importing": importing}
        own = know_nothing(monkeypatch)
        found_again = find_cards(again, {"linear": "b" * 64, "importing": "a" * 64}, [str(folder)])
        # What is traced last is what the study trains.
        assert model_cost.parameters(again["linear"].model) == by_factory(found_again)["my_models:linear"].parameters
        assert own.reason(trace_requests.trace_request(again["linear"])) == ""
        yield Studies(known, by_factory(found), by_factory(found_again), seconds, folder)


def test_a_factory_s_card_is_of_the_modules_that_its_module_imports(studies: Studies) -> None:
    factory = "importing_models:linear"
    first, second = studies.cards[factory], studies.changed_cards[factory]
    assert first.request == second.request
    assert (first.parameters, second.parameters) == (3863, 38603)


def test_a_factory_s_card_is_of_the_bytes_of_its_module(studies: Studies) -> None:
    factory = "my_models:linear"
    first, second = studies.cards[factory], studies.changed_cards[factory]
    assert (first.request.model_digest, second.request.model_digest) == ("a" * 64, "b" * 64)
    assert (first.parameters, second.parameters) == (3863, 38603)


def test_why_a_model_has_no_card_names_what_stopped_it_and_others_have_theirs(studies: Studies) -> None:
    assert studies.cards.keys() == {"my_models:linear", "my_models:leaving_a_child", "importing_models:linear"}
    reasons = {function: reason_of(studies.known, of_factory(function)) for function in IN_ONE_STUDY}
    assert "nonzero" in reasons["choosing"] or "index" in reasons["choosing"]
    assert reasons["ending"] == "the process that counts models ended: 'exit code 3'"
    assert "no function of that name" in reasons["absent"]
    assert reasons["printing"] == "the process that counts models gave no card"
    assert reasons["linear"] == ""


@pytest.mark.parametrize("function", ["leaving_a_child", "ending_with_a_child"])
def test_a_child_that_a_factory_leaves_behind_holds_nothing_up(function: str, studies: Studies) -> None:
    assert studies.seconds < 600  # as long as the child sleeps
    assert (f"my_models:{function}" in studies.cards) == (function == "leaving_a_child")
    pids = written_pids(studies.folder / function)
    wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("junk_then_answer", "the process that counts models gave no card"),
        ("answer_to_another", "the process that counts models answered another request"),
        ("card_of_another", "the process that counts models answered another request"),
        ("answer_then_junk", ""),
        ("answer_twice", ""),
    ],
)
def test_a_line_that_is_no_answer_leaves_the_answers_to_other_requests_right(
    function: str, reason: str, quick: None, known: KnownModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracers, "PROCESSES", 1)  # which all models share
    trials = {name: of_factory(name) for name in ("before", function, "behind", "last")}
    found = find_cards(trials, {}, ())
    assert all(card == quick_tracer.card_of(card.request) for card in found)
    with_cards = trials.keys() - ({function} if reason else set())
    assert by_factory(found).keys() == {f"my_models:{name}" for name in with_cards}
    assert len(found) == 2 * len(with_cards)  # with activations kept, and computed again
    reasons = {name: reason_of(known, asked) for name, asked in trials.items()}
    assert reasons == dict.fromkeys(trials, "") | {function: reason}


def written_pids(file: Path, *, number: int = 1) -> list[int]:
    """The process ids that a file has, once there are so many."""
    wait_until(lambda: file.exists() and file.read_text().count("\n") >= number)
    return [int(line) for line in file.read_text().splitlines()]


def wait_until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process_id: int) -> bool:
    """Whether a process is there, and is no zombie that nobody has waited for."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_model_that_sleeps_is_not_tried_again(
    quick: None, known: KnownModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer_process, "_LONGEST_TRACE_SECONDS", 3)
    monkeypatch.setattr(tracer_process, "_LONGEST_IMPORT_SECONDS", 0)
    is_not_tried_again(of_factory("sleeping"), "counting this model took longer than 3 s", known, tmp_path)


def test_a_model_that_computes_too_long_is_not_tried_again(
    known: KnownModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models.py").write_text(FACTORIES)
    monkeypatch.setattr(tracers, "PROCESSES", 1)
    monkeypatch.setattr(tracer_process, "_LONGEST_TRACE_SECONDS", 1)
    monkeypatch.setattr(tracer_process, "_LONGEST_IMPORT_SECONDS", 120)
    is_not_tried_again(of_factory("endless"), "counting the model took longer than 1 CPU seconds", known, tmp_path)


def is_not_tried_again(slow: Trial, reason: str, known: KnownModels, folder: Path) -> None:
    """In none of its sizes."""
    trials = {
        str(size): slow.model_copy(update={"model": slow.model.model_copy(update={"image_size": size})})
        for size in (8, 12, 16, 24)
    }
    assert find_cards(trials, {}, [str(folder)]) == ()
    assert {reason_of(known, asked) for asked in trials.values()} == {reason}
    pids = written_pids(folder / "pids") if (folder / "pids").exists() else []  # imports may be slow
    assert len(pids) <= 2 * 2  # of one size by each process; where building on meta is stopped, it is tried on the CPU
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_plan_that_is_stopped_leaves_no_tracer_behind(number: signal.Signals, tmp_path: Path) -> None:
    arguments = [of_factory("sleeping").model_dump_json(), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    planning = subprocess.Popen(
        [sys.executable, "-c", PLANNING, *arguments], stderr=subprocess.DEVNULL, env=environment
    )
    try:
        pids = written_pids(tmp_path / "pids", number=2)  # with activations kept, and computed again
        planning.send_signal(number)
        planning.wait(20)
        wait_until(lambda: not any(is_running(pid) for pid in pids))
    finally:
        planning.kill()
        planning.wait()


def test_a_known_card_of_other_versions_is_traced_again(
    quick: None, of_the_hub: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, recomputed = find_cards({"a": of_the_hub}, {}, ())
    for versions in ({"tracer": "0"}, {"torch": "1.0"}):
        stranger_s = kept.model_copy(update={"versions": kept.versions | versions, "frozen_elements": 10**9})
        own = know_nothing(monkeypatch)
        own.put(stranger_s)
        assert find_cards({"a": of_the_hub}, {}, ()) == (kept, recomputed)
        assert own.card(kept.request) == kept
    own = know_nothing(monkeypatch)
    elsewhere_too = kept.model_copy(update={"versions": kept.versions | {"timm": "0.1"}, "frozen_elements": 10**9})
    monkeypatch.setattr(cards, "versions_of", lambda names: {name: kept.versions.get(name) for name in names})
    own.put_all([elsewhere_too, recomputed])
    trace_nothing(monkeypatch)
    assert find_cards({"a": of_the_hub}, {}, ()) == (elsewhere_too, recomputed)  # timm is not installed here
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    own = know_nothing(monkeypatch)
    own.put(stranger_s)
    assert find_cards({"a": of_the_hub}, {}, ()) == (stranger_s,)  # there is no torch to trace with


def test_a_factory_s_card_is_known_from_this_process_alone(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = of_factory("linear")
    card, recomputed = find_cards({"a": asked}, {}, ())
    own = know_nothing(monkeypatch)
    own.put(card.model_copy(update={"frozen_elements": 10**9}))
    assert find_cards({"a": asked}, {}, ()) == (card, recomputed)
    trace_nothing(monkeypatch)
    assert find_cards({"a": asked}, {}, ()) == (card, recomputed)


@pytest.mark.parametrize(("machine_gib", "trace_gib"), [(16, 4), (64, 8)])
def test_traces_side_by_side_take_no_more_than_half_of_the_machine_s_memory(
    machine_gib: int, trace_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (machine_gib << 30) // 4096}
    monkeypatch.setattr(os, "sysconf", values.__getitem__)
    assert tracer_process._memory_limit_bytes() == trace_gib << 30


@pytest.mark.parametrize("error", [{"reason": ""}, "", "a text", {}, None])
def test_an_error_without_words_is_no_card(error: object) -> None:
    line = json.dumps({"request_id": 1, "error": error}).encode()
    assert parse_answer(line) is None


def test_named_models_and_scripts_need_none(known: KnownModels, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_nothing(monkeypatch)
    assert find_cards({"a": trial(ModelSpec(name="vit-ti16"))}, {}, ()) == ()


def test_without_torch_the_reason_says_where_to_plan(known: KnownModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = of_factory("linear")
    assert find_cards({"a": asked}, {}, ()) == ()
    assert "plan on the machine that trains" in reason_of(known, asked)
