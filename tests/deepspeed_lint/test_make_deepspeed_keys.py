"""The maker of the table: what it finds in a source written in all the ways of DeepSpeed's, and in DeepSpeed's own."""

from __future__ import annotations

import importlib
import io
import json
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from vitscale.deepspeed_lint.view import Release, known_releases

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "src/vitscale/deepspeed_lint/deepspeed_keys.json"

CONSTANTS = """
BATCH = "batch"
PRECISIONS = "bf16"
OLD = "bfloat16"
GRADIENT_CLIPPING_DEFAULT = 0.5
"""
MODELS = """
from enum import Enum
class DeepSpeedConfigModel(BaseModel): pass
class Where(str, Enum):
    here = "here"
    there = "there"
class Inner(DeepSpeedConfigModel):
    place: Where = "here"
    share: float = Field(1.0, ge=0.0, le=1.0)
class Outer(Inner):
    inner: Optional[Inner] = None
    size: int = Field(5, gt=0, alias="long_size")
    maybe: Optional[bool] = None
    anything: list = []
    past: bool = Field(
        None, json_schema_extra={"deprecated": True, "new_param": "inner", "new_param_fn": (lambda v: v)}
    )
"""
CONFIG = """
import copy
from .constants import *
from ..models import Outer
DEEPSPEED_OPTIMIZERS = [BATCH, "adam"]
_REMOVED_TOP_LEVEL_CONFIG_KEYS = {"gone": "went"}
_REMOVED_ZERO_CONFIG_KEYS = {"gone": "went"}
def get_batch(d): return get_scalar_param(d, BATCH, None)
def get_any(d, key="by_default"): return get_scalar_param(d, key, None)
def get_precision(d):
    for key in [PRECISIONS, OLD]:
        if key in d.keys():
            return get_scalar_param(d[key], "enabled", False)
def get_part(d):
    part = d.get("part", {})
    if part.get("first", None) is None:
        pass
    return {"x": part["second"] or part.get("third")}
def get_pipeline_config(d):
    config = {"stages": "auto"}
    for key, val in d.get("pipeline", {}).items():
        config[key] = val
def get_renamed(d):
    new = d.get("new", None)
    if new is None:
        new = d.get("old", {})
    return Outer(**new)
class Reader:
    def __init__(self, d):
        part = d["reader"] if "reader" in d else {}
        self._read(part)
    def _read(self, part):
        self.a = get_scalar_param(part, "a", 1)
class DeepSpeedConfig:
    def __init__(self, config, mpu=None):
        self._param_dict = config
        d = copy.copy(self._param_dict)
        self._initialize(d)
    def _initialize(self, d):
        self.batch = get_batch(d)
        get_any(d)
        get_any(d, key="by_name")
        self.precision = get_precision(d)
        get_part(d)
        get_pipeline_config(d)
        get_renamed(d)
        Reader(d)
        unheard_of(d.get("given_away"))
"""


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("make_deepspeed_keys")


def archive(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "deepspeed-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as members:
        for name, content in files.items():
            member = tarfile.TarInfo(f"deepspeed-1.0/deepspeed/{name}")
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
    return path


def test_every_way_of_reading_is_followed(tmp_path: Path, maker: Any) -> None:
    made = {"runtime/config.py": CONFIG, "runtime/constants.py": CONSTANTS, "models.py": MODELS}
    facts = maker.facts_of(archive(tmp_path, {name: text.encode() for name, text in made.items()}))
    of_inner = {"place": "one of here, there", "share": "float ge=0 le=1"}
    of_outer = of_inner | {
        "inner": "strict", "size": "int gt=0", "long_size": "int gt=0", "maybe": "bool or null", "anything": "value",
        "past": "deprecated: inner",
    } | {f"inner.{name}": fact for name, fact in of_inner.items()}  # fmt: skip
    assert facts["keys"] == {
        "batch": "value", "by_default": "value", "by_name": "value", "given_away": "value",
        "bf16": "read", "bf16.enabled": "value", "bfloat16": "read", "bfloat16.enabled": "value",
        "part": "read", "part.first": "value", "part.second": "value", "part.third": "value",
        "pipeline": "open", "pipeline.stages": "value",
        "reader": "read", "reader.a": "value",
        "new": "strict", "old": "strict",
        **{f"{part}.{name}": fact for part in ("new", "old") for name, fact in of_outer.items()},
        "gone": "refused", "zero_optimization.gone": "refused",
    }  # fmt: skip
    assert facts["defaults"] == {"gradient_clipping": "0.5"}
    assert set(facts["optimizers"]) == {"batch", "adam"}


def test_the_table_is_what_the_installed_source_says(tmp_path: Path, maker: Any) -> None:
    """The installed package is packed like an archive: importing nothing, the maker finds what the table holds."""
    package = Path(str(metadata.distribution("deepspeed").locate_file("deepspeed")))
    files = {str(path.relative_to(package)): path.read_bytes() for path in package.rglob("*.py")}
    facts = maker.facts_of(archive(tmp_path, files))
    release = Release(metadata.version("deepspeed"))
    assert release.exact
    assert {key: release.fact(key) for key in facts["keys"]} == facts["keys"]
    assert {key for key in json.loads(TABLE.read_text())["keys"] if release.fact(key)} == set(facts["keys"])
    assert sorted(release.names("optimizers")) == sorted(facts["optimizers"])
    assert sorted(release.names("schedulers")) == sorted(facts["schedulers"])
    assert str(release.default("gradient_clipping")) == facts["defaults"]["gradient_clipping"]


def test_the_table_is_as_the_maker_writes_it(maker: Any) -> None:
    text = TABLE.read_text()
    assert maker.written(json.loads(text)) == text
    assert known_releases() == maker.RELEASES


@pytest.mark.parametrize(
    ("holding", "said"),
    [
        (lambda version: True, "0.9.5.."),
        (lambda version: version == "0.9.5", "0.9.5..0.9.5"),
        (lambda version: version.startswith("0.1"), "0.10.3.."),
        (lambda version: version in ("0.9.5", "0.11.2", "0.12.6", "0.19.8"), "0.9.5..0.9.5, 0.11.2..0.12.6, 0.19.8.."),
    ],
)
def test_spans_of_releases(maker: Any, holding: Any, said: str) -> None:
    assert maker.spans(holding) == said
