from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vitscale.errors import RequestError
from vitscale.study import user_model
from vitscale.trial.model_spec import ModelSpec

SOURCE = """
import torch.nothing_of_the_kind  # never imported here, so it does not matter
from elsewhere import borrowed as lent

made = lambda num_classes, image_size: None

if made:
    def build(num_classes, image_size): ...
class Net: ...
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "beside").mkdir()
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    return tmp_path / "beside" / "study.toml"


@pytest.mark.parametrize("function", ["build", "Net", "made", "lent"])
@pytest.mark.parametrize("folder", ["beside", "working"])
def test_a_factory_is_found_without_being_imported(study: Path, folder: str, function: str) -> None:
    (study.parent.parent / folder / "mine.py").write_text(SOURCE)
    assert user_model.check(study, ModelSpec(factory=f"mine:{function}")) is None


def test_a_factory_in_a_package(study: Path) -> None:
    package = study.parent / "pack" / "inner"
    package.mkdir(parents=True)
    (study.parent / "pack" / "__init__.py").write_text("raise SystemError('imported')")
    (package / "nets.py").write_text("def build(num_classes, image_size): ...")
    user_model.check(study, ModelSpec(factory="pack.inner.nets:build"))
    with pytest.raises(RequestError, match=r"no module 'pack\.inner\.missing'"):
        user_model.check(study, ModelSpec(factory="pack.inner.missing:build"))


def test_what_does_not_tell_its_names_is_left_to_the_rank(study: Path) -> None:
    (study.parent / "stars.py").write_text("from elsewhere import *")
    user_model.check(study, ModelSpec(factory="stars:anything"))


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("nonexistent_module:build", "there is no module 'nonexistent_module'"),
        ("mine:nofunc", "has no 'nofunc'. Valid: Net, build, lent, made, torch"),
        ("broken:build", "broken.py, line 1 is no Python"),
    ],
)
def test_a_factory_that_is_not_there(study: Path, factory: str, said: str) -> None:
    (study.parent / "mine.py").write_text(SOURCE)
    (study.parent / "broken.py").write_text("def build(:")
    with pytest.raises(RequestError) as caught:
        user_model.check(study, ModelSpec(factory=factory))
    assert said in str(caught.value)


def config(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"} | changes))
    return folder


def test_a_digest_is_of_the_configuration_and_not_of_its_place(study: Path) -> None:
    here, there = config(study.parent / "here"), config(study.parent / "there")
    digests = [user_model.check(study, ModelSpec(hf=str(folder))) for folder in (here, there)]
    assert digests[0] == digests[1] is not None
    config(there, hidden_dropout_prob=0.5)
    assert user_model.check(study, ModelSpec(hf=str(there))) != digests[0]


def test_a_folder_without_a_configuration(study: Path) -> None:
    (study.parent / "empty").mkdir()
    with pytest.raises(RequestError, match=r"config\.json"):
        user_model.check(study, ModelSpec(hf=str(study.parent / "empty")))


def test_a_hub_name_that_cannot_be_had(
    study: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One message: what its library tells of each try is not another."""
    import huggingface_hub

    def gone(*_: object, **__: object) -> str:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", gone)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", gone)
    with pytest.raises(RequestError, match="cannot be had from the hub: no network at all"):
        user_model.check(study, ModelSpec(hf="some/model"))
    assert not caplog.records


@pytest.mark.parametrize(("answers", "cached_alone"), [(True, False), (False, True)])
def test_a_hub_that_cannot_be_reached_is_asked_once_and_its_cache_is_used(
    study: Path, monkeypatch: pytest.MonkeyPatch, answers: bool, cached_alone: bool
) -> None:
    """Its own library asks six times, over half a minute."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    asked: list[object] = []

    def metadata(_url: str) -> None:
        if not answers:
            raise OSError("Temporary failure in name resolution")
        response: Any = SimpleNamespace(headers={}, request=None)
        raise HfHubHTTPError("503", response=response)

    def download(_name: str, file: str, *, local_files_only: bool) -> str:
        asked.append(local_files_only)
        return str(config(study.parent / "cache") / file)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert user_model.check(study, ModelSpec(hf="some/model")) is not None
    assert asked == [cached_alone]


def test_a_named_model_needs_no_check(study: Path) -> None:
    assert user_model.check(study, ModelSpec(name="vit-b16")) is None


def test_a_type_without_a_head_for_the_task_is_refused_before_anything_starts(study: Path) -> None:
    """transformers' own table, read as text: nothing of it is imported."""
    folder = study.parent / "words"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert", "hidden_size": 64}')
    with pytest.raises(RequestError, match="of type 'bert', for which transformers has no classification of images"):
        user_model.check(study, ModelSpec(hf=str(folder)))
    for kind in ("convnext", "deit", "swinv2", "vit"):
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        assert user_model.check(study, ModelSpec(hf=str(folder)))


def test_a_module_that_is_installed_comes_before_one_of_the_same_name_beside_the_study(tmp_path: Path) -> None:
    """As ranks find it: what lies in a folder takes the place of nothing that is installed."""
    (tmp_path / "colorsys.py").write_text("def build(num_classes, image_size): ...\n")
    with pytest.raises(RequestError, match=r"colorsys.py has no 'build'.* give yours another name"):
        user_model.check(tmp_path / "study.toml", ModelSpec(factory="colorsys:build"))
