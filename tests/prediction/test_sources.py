from __future__ import annotations

from pathlib import Path

import pytest

import check_factory
from prediction_factory import resolved_study
from results_factory import one_curve
from vitscale import store
from vitscale.analysis import analyse
from vitscale.errors import StoreError, VitscaleError
from vitscale.prediction.evidence import evidence_of
from vitscale.prediction.network.links import Network
from vitscale.store import checks
from vitscale.store.checks import CollectiveFit, LoaderLine

RESULTS = resolved_study({1: [0.1], 2: [0.1]})
"""Its ranks ran on "node1"."""


@pytest.fixture
def own_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own folder of checks."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return checks.check_folder(None)


def network(folder: Path, declared: str | None = None, check: Path | None = None) -> Network:
    return evidence_of(folder, analyse(RESULTS), declared=declared, check=check).network


def stored(place: Path, *hosts: str, bandwidth: float = 1e9, day: int = 1) -> Path:
    """A check of one rank on each host, whose all-reduce reaches so many bytes per second between them."""
    ranks = [check_factory.checked(rank, len(hosts), host=host) for rank, host in enumerate(hosts)]
    fit = CollectiveFit(
        group="across nodes", operation="all_reduce", ranks=max(2, len(hosts)), latency_seconds=1e-4,
        bandwidth_bytes_per_second=bandwidth, largest_size_bytes=2**26, largest_seconds=0.1, worst_residual=0.0,
    )  # fmt: skip
    name = f"202601{day:02}T030405-abcdef"
    return checks.write_check(place, check_factory.record(*ranks, id=name, fits=(fit,)))


def test_without_a_check_the_network_is_assumed(tmp_path: Path, own_checks: Path) -> None:
    found = network(tmp_path)
    assert (found.inside.source, found.across.source) == ("assumed", "assumed")


def test_the_newest_check_of_the_results_is_taken(tmp_path: Path, own_checks: Path) -> None:
    stored(own_checks, "node1", bandwidth=9e9, day=9)
    stored(tmp_path / "checks", "a", "b", bandwidth=1e9, day=1)
    stored(tmp_path / "checks", "a", "b", bandwidth=2e9, day=2)
    across = network(tmp_path).across
    assert across.source == "check"
    assert across.bandwidth_bytes_per_second == pytest.approx(2e9)


def test_one_of_the_users_own_counts_where_it_ran_on_the_same_hosts(tmp_path: Path, own_checks: Path) -> None:
    stored(own_checks, "node1", "node2", day=2)
    assert network(tmp_path).across.source == "assumed"
    stored(own_checks, "node1", bandwidth=3e9, day=1)
    assert network(tmp_path).across.bandwidth_bytes_per_second == pytest.approx(3e9)


def test_a_check_of_another_device_by_the_same_host_name_tells_nothing(tmp_path: Path, own_checks: Path) -> None:
    """One rank of an H200 was forecast to take 14 times as long on two, by what processors of another machine sent."""
    recorded = analyse(store.load(Path(__file__).parents[1] / "analysis/recorded/h200-vit-b16-128.tar.gz"))

    def across(results: Path) -> float | None:
        found = evidence_of(results, recorded).network.across
        return found.bandwidth_bytes_per_second if found.source == "check" else None

    for day, (device, gpu) in enumerate((("cpu", "AMD EPYC"), ("cuda", "NVIDIA A100"), ("cuda", "NVIDIA H200")), 1):
        rank = check_factory.checked(0, 1, host="host-0", type=device, name=gpu)
        for folder in (own_checks, tmp_path / device / "checks"):
            wanted = check_factory.request(1, device=device)
            path = stored(folder, "host-0", bandwidth=1e9 * day, day=day)
            kept = checks.read_check(path).model_copy(update={"ranks": (rank,), "request": wanted})
            checks.write_check(folder, kept)
        known = across(tmp_path / "empty")
        assert known == (pytest.approx(3e9) if gpu == "NVIDIA H200" else None)
    assert across(tmp_path / "cpu") == pytest.approx(3e9), "the user's own, not that of processors beside the results"
    assert across(tmp_path / "cuda") == pytest.approx(3e9)


def test_a_named_check_and_a_declared_network_come_first(tmp_path: Path, own_checks: Path) -> None:
    stored(tmp_path / "checks", "a", "b", bandwidth=1e9)
    other = stored(tmp_path / "elsewhere", "c", "d", bandwidth=4e9)
    assert network(tmp_path, check=other).across.bandwidth_bytes_per_second == pytest.approx(4e9)
    declared = network(tmp_path, declared="25GbE").across
    assert declared.source == "declared"
    assert 1e9 < declared.bandwidth_bytes_per_second <= 25e9 / 8


def test_what_cannot_be_read_or_is_not_known_is_refused(tmp_path: Path, own_checks: Path) -> None:
    with pytest.raises(StoreError, match=r"none\.json cannot be read"):
        network(tmp_path, check=tmp_path / "none.json")
    with pytest.raises(VitscaleError, match="carrier pigeon"):
        network(tmp_path, declared="carrier pigeon")


def test_the_median_loader_is_taken_with_it(tmp_path: Path, own_checks: Path) -> None:
    loaders = [LoaderLine(images_per_second=rate, workers=0, batch=8) for rate in (100.0, 300.0, 500.0)]
    ranks = [check_factory.checked(rank, 3, loader=loader) for rank, loader in enumerate(loaders)]
    path = checks.write_check(tmp_path / "checks", check_factory.record(*ranks))
    assert path.exists()
    assert evidence_of(tmp_path, analyse(RESULTS)).loader_images_per_second == 300.0


def test_a_model_whose_shape_is_open_is_no_evidence(tmp_path: Path, own_checks: Path) -> None:
    unresolved = one_curve({1: [0.1], 2: [0.1]})
    assert evidence_of(tmp_path, analyse(unresolved)).series == ()
    assert len(evidence_of(tmp_path, analyse(RESULTS)).series) == 1


def test_a_check_may_be_asked_for_by_name_and_must_then_be_there(tmp_path: Path, own_checks: Path) -> None:
    with pytest.raises(VitscaleError, match="there is no check of the hosts"):
        network(tmp_path, declared="check")
    stored(tmp_path / "checks", "a", "b", bandwidth=2e9)
    assert network(tmp_path, declared="check").across.bandwidth_bytes_per_second == pytest.approx(2e9)
