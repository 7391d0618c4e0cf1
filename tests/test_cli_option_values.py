from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vitscale import cli
from vitscale.api.arguments import size_bytes
from vitscale.cli.base import hours, money, rank_counts, seconds, share_of, share_of_whole
from vitscale.errors import RequestError
from vitscale.prediction.layouts import MOST_RANKS

pytestmark = pytest.mark.computing


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


def test_the_kelvin_sign_is_no_kilo() -> None:
    with pytest.raises(RequestError, match="is no size"):
        size_bytes("80\u212aB", "--gpu-memory")


@pytest.mark.parametrize(
    ("text", "amount", "currency"),
    [
        ("300", 300.0, ""), ("2.5", 2.5, ""), (".5", 0.5, ""), ("1e3", 1000.0, ""), ("$300", 300.0, "$"),
        ("$ 300", 300.0, "$"), ("300 EUR", 300.0, "EUR"), ("USD 2.50", 2.5, "USD"), ("\u20ac2.5", 2.5, "\u20ac"),
    ],
)  # fmt: skip
def test_amounts_with_and_without_a_currency(text: str, amount: float, currency: str) -> None:
    found = money(text, "--budget")
    assert (found, found.currency) == (amount, currency)


@pytest.mark.parametrize(
    ("text", "step"),
    [("1,500", "1500"), ("$1,500.50", "$1500.50"), ("2,5", "2.5"), ("much", "300, $300 or 300 EUR"), ("", "300, $300")],
)
def test_what_is_no_amount_says_how_to_write_one(text: str, step: str) -> None:
    with pytest.raises(RequestError) as refused:
        money(text, "--price")
    assert str(refused.value).startswith("--price: ")
    assert f" is no amount. Write {step}" in str(refused.value)


@pytest.mark.parametrize(("text", "share"), [("80%", 0.8), ("80 %", 0.8), ("0.8", 0.8), (".8", 0.8), ("1", 1.0)])
def test_shares_of_the_whole(text: str, share: float) -> None:
    assert share_of_whole(text, "--min-efficiency") == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "step"),
    [("80", "Write 80% if percent are meant"), ("1.5", "Write 1.5% if percent are meant"), ("120", ""), ("120%", ""),
     ("0", ""), ("-1", ""), ("high", ""), ("", ""), (".", ""), ("nan", "")],
)  # fmt: skip
def test_a_number_that_may_be_percent_is_not_guessed_at(text: str, step: str) -> None:
    with pytest.raises(RequestError) as refused:
        share_of_whole(text, "--min-efficiency")
    assert str(refused.value).endswith(f"Valid: numbers above 0 and at most 1, 80%.{' ' + step + '.' if step else ''}")


def test_shares_that_may_be_more_than_the_whole_are_told_in_percent() -> None:
    assert share_of("500%", "--fail-if-slower") == 5.0
    with pytest.raises(RequestError, match="Write 5% if percent are meant"):
        share_of("5", "--fail-if-slower")


@pytest.mark.parametrize(("text", "amount"), [("12", 12.0), ("12s", 12.0), ("2m", 120.0), ("0.5", 0.5)])
def test_seconds_with_and_without_their_unit(text: str, amount: float) -> None:
    assert seconds(text, "--checkpoint-seconds") == amount


@pytest.mark.parametrize(("text", "amount"), [("1000", 1000.0), ("1000h", 1000.0), ("30d", 720.0), ("90m", 1.5)])
def test_hours_with_and_without_their_unit(text: str, amount: float) -> None:
    assert hours(text, "--node-mtbf") == amount


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["advise", ".", "--budget", "$x"], "--budget: '$x' is no amount. Write 300, $300 or 300 EUR"),
        (["plan", "s.toml", "--price", "2,5"], "--price: '2,5' is no amount. Write 2.5"),
        (["predict", ".", "--price", "dear"], "--price: 'dear' is no amount"),
        (["advise", ".", "--min-efficiency", "80"], "Write 80% if percent are meant"),
        (["advise", ".", "--budget", "$300"], "--budget is in $, and no price is known"),
        (["advise", ".", "--max-gpus", "8x"], "--max-gpus: '8x' is no whole number"),
        (["predict", ".", "--micro-batch", "1.5"], "--micro-batch: '1.5' is no whole number"),
        (["lab", "up", "--cores-per-host", "50%"], "--cores-per-host: '50%' is no number"),
        (["predict", ".", "--checkpoint-seconds", "soon"], "--checkpoint-seconds: 'soon' is no duration"),
        (["predict", ".", "--node-mtbf", "often"], "--node-mtbf: 'often' is no duration"),
    ],
)
def test_a_wrong_value_is_said_in_our_words_with_the_value(words: list[str], said: str) -> None:
    """Not in those of the library that converts options, which leave the value out."""
    error = CliRunner().invoke(cli.app, words).exception
    assert isinstance(error, RequestError)
    assert error.exit_code == 2
    assert said in str(error)
