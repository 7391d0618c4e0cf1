"""The device's random words against published values and against the numpy twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.datasets.batches import Purpose, device_mix64, stream, uniform_integers
from vitscale.sources.base import mix64


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1), max_size=20), st.integers(0, 2**64 - 1))
def test_the_same_words_as_numpy(positions: list[int], number: int) -> None:
    words = device_mix64(torch.tensor(positions, dtype=torch.int64), number)
    assert np.array_equal(words.numpy().view(np.uint64), mix64(np.array(positions, dtype=np.uint64), number))


def test_the_generator_is_splitmix64(monkeypatch: pytest.MonkeyPatch) -> None:
    # With offset 0 position i gives word i of SplitMix64 seeded with 0, as published with its reference code.
    monkeypatch.setattr("vitscale.datasets.batches._finalise_int", lambda _: 0)
    words = device_mix64(torch.arange(3), 0).numpy().view(np.uint64)
    assert [hex(word) for word in words] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


@pytest.mark.parametrize("count", [2, 3, 9, 57])
def test_integers_are_uniform(count: int) -> None:
    drawn = uniform_integers(torch.arange(100_000), stream(Purpose.MIRROR, 1), count)
    seen = torch.bincount(drawn, minlength=count)
    assert len(seen) == count
    deviation = (seen - 100_000 / count).abs().max().item()
    assert deviation < 5 * (100_000 / count) ** 0.5


@given(
    st.sets(
        st.tuples(st.sampled_from(Purpose), st.integers(0, 2**31 - 1), st.integers(0, 2**28 - 1)),
        min_size=2,
        max_size=2,
    )
)
def test_no_two_streams_are_one(keys: set[tuple[Purpose, int, int]]) -> None:
    first, second = (stream(*key) for key in keys)
    assert first != second
    assert 2**63 <= first < 2**64


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (2**31, 0), (0, -1), (0, 2**28)])
def test_a_number_without_a_stream_is_a_bug(seed: int, epoch: int) -> None:
    with pytest.raises(ValueError, match="no stream"):
        stream(Purpose.ORDER, seed, epoch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_draws_what_the_cpu_draws() -> None:
    positions = torch.arange(100_000)
    for number in (0, 2**64 - 1, stream(Purpose.MIRROR, 5, 3)):
        assert torch.equal(device_mix64(positions.cuda(), number).cpu(), device_mix64(positions, number))
        assert torch.equal(uniform_integers(positions.cuda(), number, 9).cpu(), uniform_integers(positions, number, 9))
