"""Cards are traced by a real process of their own, kept, and missing with a reason."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitscale.engines import trace_requests
from vitscale.study import cards
from vitscale.study.cards import find_cards
from vitscale.trial import model_cost
from vitscale.trial.known_models import KnownModels
from vitscale.trial.model_spec import ModelSpec, resolve
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

def sleeping(num_classes, image_size):
    with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)

def endless(num_classes, image_size):
    with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file:
        file.write(f"{os.getpid()}\\n")
    while True:
        pass

def leaving_a_child(num_classes, image_size):
    child = subprocess.Popen(["sleep", "600"])
    with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file:
        file.write(f"{child.pid}\\n")
    return linear(num_classes, image_size)

def ending_with_a_child(num_classes, image_size):
    leaving_a_child(num_classes, image_size)
    os._exit(3)
"""
PLANNING = """
import sys
from vitscale.study.cards import find_cards
from vitscale.trial.trial import Trial
find_cards({"a": Trial.model_validate_json(sys.argv[1])}, {}, [sys.argv[2]])
"""


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KnownModels:
    """What this test alone knows, and a cache of its own."""
    own = KnownModels()
    for module in (cards, model_cost):
        monkeypatch.setattr(module, "KNOWN_MODELS", own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return own


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


@pytest.fixture
def factories(tmp_path: Path) -> Callable[[str], Trial]:
    (tmp_path / "my_models.py").write_text(FACTORIES)
    return lambda function: trial(ModelSpec(factory=f"my_models:{function}"))


def test_a_model_of_the_hub_s_is_traced_once_and_then_kept(
    known: KnownModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(DINOV2))
    asked = trial(ModelSpec(hf=str(tmp_path / "model")))
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
    monkeypatch.setattr(cards, "_TRACER_MODULE", "no_such_module")
    monkeypatch.setattr(cards, "KNOWN_MODELS", KnownModels())
    assert find_cards({"a": asked}, {}, ()) == (kept, recomputed)


@pytest.fixture
def of_the_hub(tmp_path: Path) -> Trial:
    """A trial of a model of the hub's."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(DINOV2))
    return trial(ModelSpec(hf=str(tmp_path / "model")))


def know_nothing(monkeypatch: pytest.MonkeyPatch) -> KnownModels:
    """Let this process know no card, as another process would begin."""
    own = KnownModels()
    monkeypatch.setattr(cards, "KNOWN_MODELS", own)
    return own


def trace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_TRACER_MODULE", "no_such_module")


def test_a_kept_card_that_is_broken_or_of_another_model_is_traced_again(
    known: KnownModels, of_the_hub: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = trace_requests.trace_request(of_the_hub)
    path = cards._cached_path(request)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text('{"request": 1}')
    card, _ = find_cards({"a": of_the_hub}, {}, ())
    content = card.model_copy(update={"request": request.model_copy(update={"device": "cuda"})})
    path.write_text(content.model_dump_json())
    know_nothing(monkeypatch)
    assert card in find_cards({"a": of_the_hub}, {}, ())


def test_a_factory_s_card_is_of_the_modules_that_its_module_imports(
    known: KnownModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "widths.py").write_text("HIDDEN = 5\n")
    asked = trial(ModelSpec(factory="importing_models:linear"))
    code = FACTORIES.replace("5)", "HIDDEN)").replace("(5,", "(HIDDEN,")
    (tmp_path / "importing_models.py").write_text(f"from widths import HIDDEN\n{code}")
    first, *_ = find_cards({"a": asked}, {"a": "a" * 64}, [str(tmp_path)])
    (tmp_path / "widths.py").write_text("HIDDEN = 50\n")
    know_nothing(monkeypatch)
    second, *_ = find_cards({"a": asked}, {"a": "a" * 64}, [str(tmp_path)])
    assert (first.parameters, second.parameters) == (3863, 38603)


def test_a_card_of_more_than_a_mebibyte_is_kept(
    known: KnownModels, of_the_hub: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_cards({"a": of_the_hub}, {}, ())
    path = cards._cached_path(found[0].request)
    assert path is not None
    path.write_text(path.read_text() + " " * (2 << 20))
    know_nothing(monkeypatch)
    trace_nothing(monkeypatch)
    assert find_cards({"a": of_the_hub}, {}, ()) == found


def test_a_user_without_a_home_has_no_cache(of_the_hub: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    request = trace_requests.trace_request(of_the_hub)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    path = cards._cached_path(request)
    assert path is not None
    assert path.is_relative_to("/home/me/.cache")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cards._cached_path(request) is None
    assert cards._read_card(request) is None
    cards._write_card(request, b"{}")


def test_a_factory_s_card_is_of_the_bytes_of_its_module(
    known: KnownModels, factories: Callable[[str], Trial], tmp_path: Path
) -> None:
    asked = factories("linear")
    first, *_ = find_cards({"a": asked}, {"a": "a" * 64}, [str(tmp_path)])
    assert first.request.model_digest == "a" * 64
    wider = FACTORIES.replace("5)", "50)").replace("(5,", "(50,")
    (tmp_path / "my_models.py").write_text(wider)
    second, *_ = find_cards({"a": asked}, {"a": "b" * 64}, [str(tmp_path)])
    assert (first.parameters, second.parameters) == (3863, 38603)
    assert model_cost.parameters(asked.model) == second.parameters  # what is traced last is what the study trains


def test_why_a_model_has_no_card_names_what_stopped_it_and_others_have_theirs(
    known: KnownModels, factories: Callable[[str], Trial], tmp_path: Path
) -> None:
    functions = ("choosing", "ending", "absent", "linear")
    trials = {function: factories(function) for function in functions}
    found = find_cards(trials, {}, [str(tmp_path)])
    assert [card.request.model.factory for card in found] == ["my_models:linear"]
    reasons = {name: known.reason(trace_requests.trace_request(asked)) for name, asked in trials.items()}
    assert "nonzero" in reasons["choosing"] or "index" in reasons["choosing"]
    assert reasons["ending"] == "the process that counts models ended: 'exit code 3'"
    assert "no function of that name" in reasons["absent"]
    assert reasons["linear"] == ""


def written_pids(folder: Path, *, number: int = 1) -> list[int]:
    """The process ids that factories wrote, once there are so many."""
    wait_until(lambda: (folder / "pids").exists() and (folder / "pids").read_text().count("\n") >= number)
    return [int(line) for line in (folder / "pids").read_text().splitlines()]


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


@pytest.mark.parametrize("function", ["leaving_a_child", "ending_with_a_child"])
def test_a_child_that_a_factory_leaves_behind_holds_nothing_up(
    function: str, known: KnownModels, factories: Callable[[str], Trial], tmp_path: Path
) -> None:
    asked = factories(function)
    begin = time.monotonic()
    found = find_cards({"a": asked}, {}, [str(tmp_path)])
    assert time.monotonic() - begin < 100
    assert len(found) == (function == "leaving_a_child")
    pids = written_pids(tmp_path)
    wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("sleeping", "counting this model took longer than 3 s"),
        ("endless", "counting the model took longer than 3 CPU seconds"),
    ],
)
def test_a_model_that_takes_too_long_is_not_tried_again(
    function: str,
    reason: str,
    known: KnownModels,
    factories: Callable[[str], Trial],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cards, "_LONGEST_TRACE_SECONDS", 3)
    monkeypatch.setattr(cards, "_LONGEST_IMPORT_SECONDS", 12 if function == "sleeping" else 60)
    slow = factories(function)
    sizes = (8, 12, 16, 24)
    trials = {
        str(size): slow.model_copy(update={"model": slow.model.model_copy(update={"image_size": size})})
        for size in sizes
    }
    assert find_cards(trials, {}, [str(tmp_path)]) == ()
    requests = [trace_requests.trace_request(asked) for asked in trials.values()]
    assert {known.reason(request) for request in requests} == {reason}
    pids = (tmp_path / "pids").read_text().splitlines() if (tmp_path / "pids").exists() else []  # imports may be slow
    assert len(pids) <= 2 * 2  # of one size by each process; where building on meta is stopped, it is tried on the CPU
    assert not any(is_running(int(pid)) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_plan_that_is_stopped_leaves_no_tracer_behind(
    number: signal.Signals, factories: Callable[[str], Trial], tmp_path: Path
) -> None:
    arguments = [factories("sleeping").model_dump_json(), str(tmp_path)]
    planning = subprocess.Popen([sys.executable, "-c", PLANNING, *arguments], stderr=subprocess.DEVNULL)
    try:
        pids = written_pids(tmp_path, number=2)  # with activations kept, and computed again
        planning.send_signal(number)
        planning.wait(20)
        wait_until(lambda: not any(is_running(pid) for pid in pids))
    finally:
        planning.kill()
        planning.wait()


def test_a_known_card_of_other_versions_is_traced_again(
    known: KnownModels, of_the_hub: Trial, monkeypatch: pytest.MonkeyPatch
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


def test_a_factory_s_card_is_known_from_this_process_alone(
    known: KnownModels, factories: Callable[[str], Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = factories("linear")
    (card,) = find_cards({"a": asked}, {}, [str(tmp_path)])
    own = know_nothing(monkeypatch)
    own.put(card.model_copy(update={"frozen_elements": 10**9}))
    assert find_cards({"a": asked}, {}, [str(tmp_path)]) == (card,)
    trace_nothing(monkeypatch)
    assert find_cards({"a": asked}, {}, [str(tmp_path)]) == (card,)


@pytest.mark.parametrize(("machine_gib", "trace_gib"), [(16, 4), (64, 8)])
def test_traces_side_by_side_take_no_more_than_half_of_the_machine_s_memory(
    machine_gib: int, trace_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (machine_gib << 30) // 4096}
    monkeypatch.setattr(os, "sysconf", values.__getitem__)
    assert cards._memory_limit_bytes() == trace_gib << 30


def test_an_answer_may_have_characters_that_end_a_line_elsewhere(
    known: KnownModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mod\x85\u2028èle"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DINOV2))
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    assert len(find_cards({"a": trial(ModelSpec(hf=str(folder)))}, {}, ())) == 2


def test_an_error_without_words_is_no_card() -> None:
    request = trace_requests.trace_request(trial(ModelSpec(name="vit-ti16")))
    assert cards._take_answer(request, b'{"error": ""}') == "the process that counts models gave no card"


def test_named_models_and_scripts_need_none(known: KnownModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_TRACER_MODULE", "no_such_module")
    assert find_cards({"a": trial(ModelSpec(name="vit-ti16"))}, {}, ()) == ()


def test_without_torch_the_reason_says_where_to_plan(
    known: KnownModels, factories: Callable[[str], Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = factories("linear")
    assert find_cards({"a": asked}, {}, ()) == ()
    assert "plan on the machine that trains" in known.reason(trace_requests.trace_request(asked))
