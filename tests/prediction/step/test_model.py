"""Each part of a step, by hand: one draw, all parameters said."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtri

from vitscale.engines.messages import Message
from vitscale.prediction.network.links import Link, LinkSource, Network
from vitscale.prediction.parameters import NAMES
from vitscale.prediction.step.model import Draws, Loading, StepModel, StepTimes, Worlds

NOTHING = math.log(1e-12)
ALL_OF_IT = 40.0
BYTES = 1e9
"""Of the one all-reduce that the engine below sends."""


def link(bandwidth: float) -> Link:
    return Link(bandwidth, 1e-12, 0.1, 0.1, "check", "by hand")


INSIDE, ACROSS, PAIR = link(10e9), link(1e9), link(5e9)
NETWORK = Network(INSIDE, ACROSS, between_two={("inside", "all_reduce"): PAIR})
AFTER = (Message("all_reduce", BYTES, 1, "after", None, "last"),)
BESIDE = (Message("all_reduce", BYTES, 1, "backward", 0.0, "last"),)


def draws(**logs: float) -> Draws:
    """Every parameter at nothing, or at the factor 1; compute of a micro-step is 1 s."""
    neutral = {
        "compute",
        "alone",
        "bandwidth inside",
        "latency inside",
        "bandwidth across",
        "latency across",
        "overlap",
        "tree advantage",
        "either way",
    }
    given = {name.replace(" ", "_"): 0.0 if name in neutral else NOTHING for name in NAMES}
    given = given | {"further_growth": ALL_OF_IT} | logs
    return {name: np.array([[given[name.replace(" ", "_")]]]) for name in NAMES}


def model(messages: tuple[Message, ...] | None = (), **fields: Any) -> StepModel:
    content: dict[str, Any] = {
        "messages": messages, "norms": (), "backend": "gloo", "shards_optimizer": False, "backward_share": 0.6,
        "reference_micro_batch": 32, "network": NETWORK, "loading": None,
    }  # fmt: skip
    return StepModel(**(content | fields))


def at(ranks: int, per_node: int = 8, micro_batch: int = 32, grad_accum: int = 1, slowdown: float = 1.0) -> Worlds:
    numbers = (ranks, min(ranks, per_node), micro_batch, grad_accum, slowdown)
    return Worlds(*(np.array([float(number)]) for number in numbers))


def parts(found: StepTimes) -> dict[str, float]:
    return {name: float(getattr(found, name)[0, 0]) for name in NONE}


NONE = {"compute": 1.0, "optimizer": 0.0, "data_wait": 0.0, "wait": 0.0, "wire": 0.0, "norm": 0.0}


def near(expected: dict[str, float]) -> Any:
    return pytest.approx(NONE | expected, abs=1e-6)


def test_one_rank_computes_and_nothing_else() -> None:
    assert parts(model(AFTER).times(draws(), at(1))) == near({})


def test_compute_grows_with_images_and_micro_steps_but_for_what_is_fixed() -> None:
    """q + (1 - q) 64/32 with q = 0.2 is 1.8, three times."""
    found = model().times(draws(fixed_share=math.log(0.2)), at(1, micro_batch=64, grad_accum=3))
    assert parts(found) == near({"compute": 3 * 1.8})


def test_a_rank_that_is_alone_computes_at_its_own_pace() -> None:
    faster = draws(alone=math.log(0.5))
    assert parts(model().times(faster, at(1))) == near({"compute": 0.5})
    assert parts(model().times(faster, at(2))) == near({})


def test_all_wait_for_the_slowest_of_like_devices() -> None:
    """3 % and 4 % together are 5 %; the largest of 8 normals is expected at Phi^-1(7.625 / 8.25)."""
    found = model().times(draws(devices=math.log(0.03), jitter=math.log(0.04)), at(8))
    assert parts(found) == near({"wait": 0.05 * float(ndtri(7.625 / 8.25))})


def test_lateness_is_that_of_two_ranks_and_grows_as_the_slowest_of_more() -> None:
    """On top of what devices differ by; a rank alone waits for nobody."""
    late = draws(lateness=math.log(0.2))
    assert parts(model().times(late, at(1))) == near({})
    assert parts(model().times(late, at(2))) == near({"wait": 0.2})
    assert parts(model().times(late, at(8))) == near({"wait": 0.2 * float(ndtri(7.625 / 8.25) / ndtri(1.625 / 2.25))})
    both = model().times(draws(lateness=math.log(0.2)), at(2, slowdown=1.5))
    assert parts(both) == near({"wait": 0.5 + 0.2})


def test_all_wait_for_the_slowest_type_of_unlike_devices() -> None:
    assert parts(model().times(draws(), at(4, slowdown=1.5))) == near({"wait": 0.5})


def test_an_optimizer_that_is_sharded_takes_its_share() -> None:
    update = draws(optimizer=math.log(0.4))
    assert parts(model().times(update, at(4))) == near({"optimizer": 0.4})
    assert parts(model(shards_optimizer=True).times(update, at(4))) == near({"optimizer": 0.1})


def test_what_is_sent_after_backward_is_exposed() -> None:
    """A ring of four over 10 GB/s: 2 * 3/4 * 1 GB. Over two hosts of two the slower link counts."""
    assert parts(model(AFTER).times(draws(), at(4))) == near({"wire": 0.15})
    assert parts(model(AFTER).times(draws(), at(4, per_node=2))) == near({"wire": 1.5})


def test_what_norms_exchange_is_hidden_by_nothing_and_sent_in_each_micro_step() -> None:
    """Ten norms on four ranks: 20 rings of 2 * 3 hops of 1 ms, and 10 * 16 kB at 2 * 3/4 over 10 GB/s; three times."""
    late = Network(Link(10e9, 1e-3, 0.1, 0.1, "check", "by hand"), ACROSS)
    norms = tuple(Message("all_reduce", 8e3, 10, phase, None, "all") for phase in ("forward", "backward"))
    own = model(BESIDE, norms=norms, network=late)
    found = parts(own.times(draws(), at(4, grad_accum=3)))
    assert found["norm"] == pytest.approx(3 * (0.12 + 10 * 16e3 * 1.5 / 10e9))
    assert found["wire"] == pytest.approx(
        parts(model(BESIDE, network=late).times(draws(), at(4, grad_accum=3)))["wire"]
    )
    whole = own.times(draws(), at(4, grad_accum=3))
    assert float(whole.total[0, 0]) == pytest.approx(sum(found.values()))
    assert parts(own.times(draws(), at(1)))["norm"] == 0.0


def test_two_ranks_have_links_of_their_own() -> None:
    """2 * 1/2 * 1 GB at the 5 GB/s that a check saw between two."""
    assert parts(model(AFTER).times(draws(), at(2))) == near({"wire": 0.2})


def test_parameters_move_what_they_are_named_for() -> None:
    twice = math.log(2)
    assert parts(model(AFTER).times(draws(bandwidth_inside=twice), at(4))) == near({"wire": 0.075})
    assert parts(model(AFTER).times(draws(bandwidth_across=twice), at(4))) == near({"wire": 0.15})
    assert parts(model(AFTER).times(draws(overlap=twice), at(4))) == near({"wire": 0.3})


def test_what_backward_hides_is_paid_for_by_contention() -> None:
    """0.15 s beside 0.6 s of backward are hidden; a fifth of them is lost."""
    assert parts(model(BESIDE).times(draws(), at(4))) == near({})
    assert parts(model(BESIDE).times(draws(contention=math.log(0.2)), at(4))) == near({"compute": 1.03})


def test_what_sticks_out_of_backward_is_exposed() -> None:
    """1.5 s over two hosts beside 0.6 s of backward: 0.9 s, and 0.6 s hidden."""
    found = model(BESIDE).times(draws(contention=math.log(0.5)), at(4, per_node=2))
    assert parts(found) == near({"wire": 0.9, "compute": 1.3})


def test_a_loader_beside_training_is_waited_for_where_it_is_the_slower() -> None:
    slow, quick = Loading(0.05, ahead=True), Loading(0.01, ahead=True)
    assert parts(model(loading=slow).times(draws(), at(1))) == near({"data_wait": 0.6})  # 32 * 0.05 less the second
    assert parts(model(loading=quick).times(draws(), at(1))) == near({})


def test_a_loader_between_steps_is_always_waited_for() -> None:
    found = model(loading=Loading(0.01, ahead=False)).times(draws(), at(1, grad_accum=2))
    assert parts(found) == near({"data_wait": 0.64, "compute": 2.0})


def test_what_nobody_knows_the_bytes_of_grows_as_a_ring_does() -> None:
    """0.09 * 2 * 3/4 inside a host; between two hosts 0.2 times the root of 0.09 more; a tenth for each doubling beyond
    two; and a hundredth for each rank beyond the first."""
    shares = {"transfer_share": math.log(0.09), "across_share": math.log(0.2)}
    assert parts(model(None).times(draws(**shares), at(4))) == near({"wire": 0.135})
    assert parts(model(None).times(draws(**shares), at(4, per_node=2))) == near({"wire": 0.135 + 0.06})
    grown = draws(**shares, growth=math.log(0.1))
    assert parts(model(None).times(grown, at(2))) == near({"wire": 0.09})
    assert parts(model(None).times(grown, at(8))) == near({"wire": 0.09 * 2 * 7 / 8 * 1.2})
    each = draws(**shares, share_of_each_rank=math.log(0.01))
    assert parts(model(None).times(each, at(4))) == near({"wire": 0.135 + 0.03})


def test_of_what_lengthens_a_step_further_there_may_be_half_or_nothing() -> None:
    """A ring's bytes stay, 0.09 * 2 * 3/4. Between two hosts 0.2 times the root of 0.09 is added, and three
    hundredths for 3 ranks more. Known messages have all of it."""
    growing = {"transfer_share": math.log(0.09), "across_share": math.log(0.2), "share_of_each_rank": math.log(0.01)}
    for share, wire in ((ALL_OF_IT, 0.225), (0.0, 0.18), (-ALL_OF_IT, 0.135)):
        asked = draws(**growing, slower_inside=math.log(0.01), devices=math.log(0.05), further_growth=share)
        found, beyond = model(None).times(asked, at(4, per_node=2)), at(2, per_node=2)
        part = (wire - 0.135) / 0.09
        assert parts(found) == near({"wire": wire, "wait": parts(found)["wait"]})
        whole = parts(model(None).times({**asked, "further growth": np.array([[ALL_OF_IT]])}, at(4)))["wait"]
        assert parts(found)["wait"] == pytest.approx(part * whole, abs=1e-9)
        left_out = model(None).left_out(asked, at(4, per_node=4), beyond)[0, 0]
        assert math.log(left_out) == pytest.approx(0.01 * part, abs=1e-9)
        assert model(()).left_out(asked, at(4, per_node=4), beyond)[0, 0] == pytest.approx(math.exp(0.01))


@pytest.mark.parametrize(("advantage", "factor"), [(30.0, 1.5), (0.0, 1.25), (-30.0, 1.0)])
def test_from_two_hosts_to_four_transfers_grow_by_as_much_as_two_hosts_are_spared(
    advantage: float, factor: float
) -> None:
    """A ring of hosts sends 2 (n-1)/n, so 1 and 1.5; one over all ranks as much on two hosts as on four."""
    shares = {"transfer_share": math.log(1e-9), "across_share": math.log(1e4), "tree_advantage": advantage}
    two, four = (model(None).times(draws(**shares), at(2 * n, per_node=2)).wire for n in (2, 4))
    assert four / two == pytest.approx(factor, rel=1e-3)


def test_what_is_left_out_is_nothing_where_it_was_measured_and_grows_with_doublings_of_ranks_and_of_hosts() -> None:
    """Measured on 4 ranks of a host of 8. 16 ranks on 2 hosts: the first crossing has a parameter of its own, so two
    doublings inside. 64 on 8 hosts: two doublings of hosts beyond two, and two inside."""
    rates = draws(slower_inside=math.log(0.01), slower_across=math.log(0.1))
    measured = at(4, per_node=8)

    def slower(ranks: int) -> float:
        return math.log(float(model(None).left_out(rates, at(ranks, per_node=8), measured)[0, 0]))

    assert slower(2) == slower(4) == 0.0
    assert slower(8) == pytest.approx(0.01)
    assert slower(16) == pytest.approx(0.01)
    assert slower(64) == pytest.approx(0.01 + 2 * 0.1)


def test_configurations_and_draws_broadcast() -> None:
    two = {name: np.vstack([rows, rows]) for name, rows in draws().items()}
    two["compute"] = np.array([[0.0], [math.log(2)]])
    worlds = Worlds(*(np.array(column, dtype=float) for column in ([1, 4, 4], [1, 4, 2], [32] * 3, [1, 1, 2], [1] * 3)))
    found = model(AFTER).times(two, worlds)
    assert found.total == pytest.approx(np.array([[1.0, 1.15, 3.5], [2.0, 2.15, 5.5]]), abs=1e-6)


@pytest.mark.parametrize(("source", "slower"), [("assumed", 2.0), ("declared", 2.0), ("check", 1.0)])
def test_an_imported_program_that_is_slow_inside_is_slow_between_hosts_too(source: LinkSource, slower: float) -> None:
    """A quarter of the link inside is half of the one between, unless that was checked; two ranks on two hosts."""
    network = Network(replace(INSIDE, source="assumed"), replace(ACROSS, source=source))
    imported = model(AFTER, network=network, imported=True)
    slow, fast = draws(bandwidth_inside=-math.log(4)), draws(bandwidth_inside=math.log(4))
    alone = parts(model(AFTER, network=network).times(slow, at(2, 1)))["wire"]
    assert alone == pytest.approx(1.0)
    assert parts(imported.times(slow, at(2, 1)))["wire"] == pytest.approx(slower)
    assert parts(imported.times(fast, at(2, 1)))["wire"] == pytest.approx(1.0)
