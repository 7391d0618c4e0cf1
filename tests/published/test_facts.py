"""The published facts: made as they say, and read as they are."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from vitscale.published import published

REPOSITORY = Path(__file__).parents[2]
PAPER = Path(os.environ.get("VITSCALE_PAPER_DATA", REPOSITORY.parent / "shared" / "paper"))
FILE = REPOSITORY / "src" / "vitscale" / "published" / "facts.json"

HEAD = "cluster,gpu,layout,dataset,fraction,micro_batch,run,gpus,epoch,rank,epoch_seconds,loss,accuracy\n"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_published_facts", REPOSITORY / "tools/make_published_facts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slowest_rank_then_median_epoch_then_mean_run(tmp_path: Path) -> None:
    rows = [
        # run, epoch, rank, seconds: run 1 takes 10, 12 and 50 (median 12), run 2 takes 14; of its second epoch one rank
        # alone tells.
        (1, 1, 0, 9.0), (1, 1, 1, 10.0), (1, 2, 0, 12.0), (1, 2, 1, 8.0), (1, 3, 0, 50.0), (1, 3, 1, 1.0),
        (2, 1, 0, 14.0), (2, 1, 1, 13.0), (2, 2, 0, 99.0),
    ]  # fmt: skip
    table = tmp_path / "epochs.csv"
    table.write_text(
        HEAD + "".join(f"vector,T4,single-node,cifar10,1.0,64,{run},2,{e},{rank},{s},,\n" for run, e, rank, s in rows)
    )
    (fact,) = tool().facts(table)
    assert (fact["epoch_seconds"], fact["runs"], fact["epochs"], fact["gpus"]) == (13.0, 2, 1, 2)


def test_the_file_is_what_the_tool_makes_of_the_raw_data() -> None:
    if not (PAPER / "epochs.csv").is_file():
        pytest.skip(f"no epochs.csv in {PAPER}: set VITSCALE_PAPER_DATA to the folder of the published raw data")
    assert json.loads(FILE.read_text())["facts"] == tool().facts(PAPER / "epochs.csv")


def test_it_holds_facts_and_no_raw_data() -> None:
    content = json.loads(FILE.read_text())
    assert "2602.21081" in content["source"]["arxiv"]
    assert len(published().facts) == len(content["facts"]) < 70
    assert FILE.stat().st_size < 16_000
    assert not {"loss", "accuracy", "rank", "epoch"} & {key for one in content["facts"] for key in one}


def test_strong_scaling_of_one_layout_by_gpu_count() -> None:
    found = published().of(dataset="cifar100", micro_batch=64, layout="single-node")
    assert [fact.gpus for fact in found] == list(range(1, 9))
    assert found[0].epoch_seconds == 1813.93
    assert {fact.devices for fact in found} == {("Tesla T4",)}
    spread = published().of(dataset="cifar100", micro_batch=64, layout="one-gpu-per-node")
    assert [fact.gpus for fact in spread] == list(range(2, 9))


def test_weak_scaling_grows_its_data_with_the_gpus() -> None:
    found = published().of(dataset="cifar10", micro_batch=16, cluster="vector", weak=True)
    assert [fact.gpus for fact in found] == list(range(1, 9))
    assert [fact.fraction for fact in found] == pytest.approx([n / 10 for n in range(1, 9)])


def test_nothing_was_published_of_other_workloads() -> None:
    assert published().of(dataset="digits", micro_batch=64) == ()
    assert published().of(dataset="cifar10", micro_batch=48) == ()


def test_clusters_of_unlike_hosts_are_known() -> None:
    assert published().unlike_clusters == ("tesla",)
