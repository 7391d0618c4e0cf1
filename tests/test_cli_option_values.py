from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.cli.base import rank_counts, size_bytes
from vitscale.errors import RequestError
from vitscale.prediction.layouts import MOST_RANKS


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("16,32,1024", (16, 32, 1024)),
        ("1-4", (1, 2, 3, 4)),
        (" 8 , 2 - 4,3", (2, 3, 4, 8)),
        ("7", (7,)),
        ("5-5", (5,)),
        ("100000", (100_000,)),
    ],
)
def test_lists_and_ranges(text: str, counts: tuple[int, ...]) -> None:
    assert rank_counts(text) == counts


@given(st.lists(st.integers(1, MOST_RANKS), min_size=1, max_size=20))
def test_a_list_comes_back_in_order_and_once(counts: list[int]) -> None:
    assert rank_counts(",".join(map(str, counts))) == tuple(sorted(set(counts)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no rank count"),
        ("16,,32", "'' is no rank count"),
        ("16,many", "'many' is no rank count"),
        ("-4", "'-4' is no rank count"),
        ("1e3", "'1e3' is no rank count"),
        ("2.5", "'2.5' is no rank count"),
        ("0", "0 ranks cannot be"),
        ("0-8", "0 ranks cannot be"),
        ("100001", "100001 ranks cannot be. Valid: 1 to 100,000"),
        ("8-2", "'8-2' runs backwards"),
        ("1-1001", "more than 1,000 rank counts"),
        ("1-600,2001-2600", "more than 1,000 rank counts"),
        ("9" * 400, "is no rank count"),
        ("\x1b[31m4", "is no rank count"),
    ],
)
def test_what_is_no_count_is_named(text: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        rank_counts(text)
    assert said in str(refused.value)
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80_000_000_000), ("80 GiB", 80 * 2**30), ("1.5gb", 1_500_000_000), ("512MiB", 512 * 2**20)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text, "--gpu-memory") == size


@pytest.mark.parametrize("text", ["80", "GB", "-1GB", "1e9GB", "80 G", "0GB", "nanGB", "infGB", "9" * 400 + "GB"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(RequestError, match="--gpu-memory: "):
        size_bytes(text, "--gpu-memory")
