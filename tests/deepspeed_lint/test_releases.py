from __future__ import annotations

import pytest

from vitscale.deepspeed_lint.view import Release, known_releases
from vitscale.errors import RequestError


@pytest.mark.parametrize(
    ("wanted", "judged", "exact"),
    [
        (None, "0.19.8", True),
        ("0.9.5", "0.9.5", True),
        ("0.19.3", "0.19.3", True),
        ("0.17.2", "0.17.6", False),
        ("0.19.99", "0.19.8", False),
        ("0.8.3", "0.9.5", False),
        ("0.30.1", "0.19.8", False),
        ("1.0", "0.19.8", False),
        ("0.16.9+cu128", "0.16.9", False),
    ],
)
def test_a_version_or_the_one_nearest_to_it(wanted: str | None, judged: str, exact: bool) -> None:
    release = Release(wanted)
    assert (release.version, release.exact) == (judged, exact)


@pytest.mark.parametrize("wanted", ["", "x", "0", "0.19.8\x1b[2J", "9" * 5000, "1." + "9" * 5000])
def test_what_is_no_version_is_refused_with_the_valid_ones(wanted: str) -> None:
    with pytest.raises(RequestError, match=r"is no version of DeepSpeed\. Valid: 0\.9\.5, "):
        Release(wanted)


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("train_batch_size", "value", "value"),
        ("zero_optimization", "strict", "strict"),
        ("zero_optimization.reduce_bucket_size", "int ge=0", "int gt=0"),
        ("zero_optimization.stage", "one of 0, 1, 2, 3", "one of 0, 1, 2, 3"),
        ("zero_optimization.cpu_offload", "deprecated: offload_optimizer", "deprecated: offload_optimizer"),
        ("fp16", "read", "strict"),
        ("fp16.enabled", "value", "bool"),
        ("bf16.enabled", "value", "bool"),
        ("torch_autocast.enabled", None, "value"),
        ("timers.throughput.enabled", None, "bool"),
        ("elasticity", "read", "refused"),
        ("elasticity.enabled", "value", None),
        ("communication_data_type", "value", "value"),
        ("pipeline", "open", "open"),
        ("micro_batch_per_gpu", None, None),
    ],
)
def test_what_releases_do_with_a_key(key: str, old: str | None, new: str | None) -> None:
    assert Release("0.9.5").fact(key) == old
    assert Release("0.19.8").fact(key) == new


def test_when_things_changed() -> None:
    """Seen in DeepSpeed's own archives: constants.py and config.py of 0.19.2, 0.19.3, 0.19.6 and 0.19.7."""
    clipping = [Release(version).default("gradient_clipping") for version in ("0.9.5", "0.19.2", "0.19.3", "0.19.8")]
    assert clipping == [0.0, 0.0, 1.0, 1.0]
    assert "onebitadam" in Release("0.19.6").names("optimizers")
    assert "onebitadam" not in Release("0.19.7").names("optimizers")
    assert Release(None).read_in("elasticity") == "from 0.9.5 to 0.19.7"
    assert Release(None).read_in("disable_python_gc") == "since 0.19.8"
    assert Release(None).read_in("compile") == "in 0.13.5 and since 0.16.9"
    assert Release(None).read_in("micro_batch_per_gpu") is None


def test_the_releases_are_in_order() -> None:
    numbers = [tuple(map(int, version.split("."))) for version in known_releases()]
    assert numbers == sorted(numbers)
    assert len(numbers) >= 10
