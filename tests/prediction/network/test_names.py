"""Names of networks, worked out by hand; and any text at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.errors import RequestError
from vitscale.prediction.network.links import VALID, declared_link

REACHED = 0.5


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("25GbE", 3.125),
        ("100GbE", 12.5),
        ("10gbe", 1.25),
        ("10 GigE", 1.25),
        ("EDR", 12.5),
        ("HDR", 25.0),
        ("hdr", 25.0),
        ("HDR200", 25.0),
        ("HDR100", 12.5),
        ("NDR", 50.0),
        ("200Gb/s", 25.0),
        ("200 Gbit/s", 25.0),
        ("200gbps", 25.0),
        ("200 Gb/sec", 25.0),
        ("12.5GB/s", 12.5),
        ("800 MB/s", 0.8),
        ("100mbit", 0.0125),
        ("1gbit", 0.125),
        ("1Tbit", 125.0),
        ("4x200Gb/s", 100.0),
        ("8 x 50 GB/s", 400.0),
        ("2x25GbE", 6.25),
        ("  HDR ", 25.0),
    ],
)
def test_by_hand(text: str, gigabytes: float) -> None:
    link = declared_link(text)
    assert link.bandwidth_bytes_per_second == pytest.approx(REACHED * gigabytes * 1e9)
    assert (link.source, link.described) == ("declared", text.strip())
    assert link.bandwidth_spread > 0.1
    assert link.latency_spread > 0


def test_fdr_passes_less_than_it_signals() -> None:
    """14.0625 Gb/s on each of four lanes, of which 64 in 66 bits are data."""
    assert declared_link("FDR").bandwidth_bytes_per_second == pytest.approx(REACHED * 54.5e9 / 8, rel=0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the network '' is no network"),
        ("fast", "'fast' is no network"),
        ("100", "'100' is no network"),
        ("GbE", "'GbE' is no network"),
        ("-25GbE", "'-25GbE' is no network"),
        ("1e3Gb/s", "is no network"),
        ("nanGbE", "is no network"),
        ("٣GbE", "is no network"),
        ("0GbE", "'0GbE' passes nothing"),
        ("0x25GbE", "passes nothing"),
        ("4xHDR", "HDR names one adapter, '4x200Gb/s' four"),
        ("4X EDR", "EDR names one adapter, '4x100Gb/s' four"),
    ],
)
def test_what_is_refused_is_told_with_what_is_not(text: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        declared_link(text)
    assert said in str(refused.value)
    assert all(valid in str(refused.value) for valid in VALID)


def test_all_that_it_names_as_valid_is() -> None:
    assert all(declared_link(name).bandwidth_bytes_per_second > 0 for name in VALID)


@given(st.text(max_size=50) | st.from_regex(r"\A[0-9x. ]{0,8}[kmgtGMKT]?[bB]?(it|E|/s|ps)?\Z"))
def test_any_text_is_a_link_or_is_refused(text: str) -> None:
    try:
        link = declared_link(text)
    except RequestError:
        return
    assert 0 < link.bandwidth_bytes_per_second < 1e30


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(["GbE", "Gb/s", "GB/s", "mbit", "kbps", "Tbit"]))
def test_more_is_faster(one: int, other: int, unit: str) -> None:
    lower, higher = sorted((one, other))
    slow, fast = (declared_link(f"{count}{unit}").bandwidth_bytes_per_second for count in (lower, higher))
    assert slow <= fast
    assert declared_link(f"2x{lower}{unit}").bandwidth_bytes_per_second == pytest.approx(2 * slow)
