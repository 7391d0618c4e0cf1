"""Known truth goes in, on real ranks, and must come out: delays, slow ranks, slow links, alone and together.

All by ratio. The link's truth is physical: on two ranks a ring all-reduce sends as many bytes as the gradients have,
each way, over a link whose rate the kernel's shaper sets.
"""

from __future__ import annotations

import functools
import gzip
import json
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.jobs import ENGINE_FIELDS, FULLY
from lab.hosts import Hosts, joined_hosts
from lab.ranks import make_trial, run_ranks
from vitscale.analysis.statistics import ratio
from vitscale.analysis.time.breakdown import Breakdown, breakdown
from vitscale.analysis.time.exposure import RankExposure, exposures
from vitscale.prediction.step.messages import messages
from vitscale.store.records import PARTS
from vitscale.store.results import Run
from vitscale.trial import model_cost
from vitscale.trial.model_spec import ModelSpec
from vitscale.trial.trial import Trial

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

RATES = (300, 600)
"""Of the link, in megabits per second."""
BURST_BYTES = 128 * 1024
"""Of every message, what the shaper lets through at once where the link was idle before."""
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
"""Of a full Ethernet frame, which the shaper counts, and of what TCP with timestamps carries in it."""
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ddp, many buckets": {"engine": "ddp", "bucket_mib": 1, "micro_batch": 16},
    "ddp, few buckets": {"engine": "ddp", "bucket_mib": 64, "micro_batch": 4},
    "deepspeed, ZeRO-0": {"engine": "deepspeed", "micro_batch": 4},
}
STEPS = 18
"""Of them three are explained."""
SMALL = ModelSpec(name="vit-ti16", image_size=16, patch_size=8, layers=1, hidden_size=32, heads=2, mlp_size=64)
"""Next to nothing to compute or to exchange: what a step takes is what was put into it, on a busy machine too."""
COMPUTING_SECONDS = 0.1
SLOW_SECONDS = 0.25
LOADER_SECONDS = 0.15


def explained(run: Run) -> Breakdown:
    """The run's breakdown, held to what every one must hold.

    What is left over is small in most steps: in any of them a busy machine may leave a rank without a core. Accelerate
    takes DeepSpeed's optimizer step inside backward, where some of it is in no part.
    """
    found = breakdown(run)
    assert found is not None
    train = run.header.trial.train
    hidden = {"optimizer"} if (train.engine, train.wrapper) == ("accelerate", "deepspeed") else set()
    for rank in found.ranks:
        parts = sum(value for value in rank.parts.values() if value is not None)
        assert parts <= (1 + 1e-6) * rank.seconds
        assert parts >= (0.97 if hidden else 1 - 1e-6) * rank.seconds
    shares = [
        (rank.parts["other"] or 0.0) / rank.seconds
        for line in run.ranks[0].explained
        for rank in of_step(run, line.step).ranks
    ]
    assert statistics.median(shares) <= 0.03
    assert found.reasons.keys() == {"h2d", "launch_gaps", *hidden}
    return found


def of_step(run: Run, step: int) -> Breakdown:
    """The breakdown of one explained step."""
    ranks = tuple(
        rank.model_copy(update={"explained": tuple(line for line in rank.explained if line.step == step)})
        for rank in run.ranks
    )
    found = breakdown(run.model_copy(update={"ranks": ranks}))
    assert found is not None
    return found


def typical_seconds(run: Run, rank: int, part: str) -> float:
    """The median over explained steps of one part of a rank's step: a machine that stalls in one step moves a mean."""
    return statistics.median(of_step(run, line.step).ranks[rank].sum_of(part) for line in run.ranks[0].explained)


def exposures_by_step(run: Run) -> list[tuple[RankExposure, ...]]:
    return [
        exposures([(rank.rank, next(line for line in rank.explained if line.step == step)) for rank in run.ranks])
        for step in sorted(line.step for line in run.ranks[0].explained)
    ]


def link_seconds(volume_bytes: float, rate: int) -> float:
    """What so many bytes take over a link of so many megabits per second."""
    return volume_bytes * FRAME_BYTES / PAYLOAD_BYTES * 8 / (rate * 1e6)


def wire_seconds(run: Run) -> float:
    """The median over explained steps of all transfer in a step, hidden behind compute or not."""
    return statistics.median(one.wire_seconds or 0.0 for step in exposures_by_step(run) for one in step)


@pytest.fixture(scope="module")
def link_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("linked")


Link = Callable[[int, int], Hosts]
Linked = Callable[[int, str], Run]


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    """So many hosts with links of the asked rate, the same for all that ask."""
    with ExitStack() as stack:
        yield functools.cache(lambda hosts, rate: stack.enter_context(joined_hosts(hosts, rate)))


@pytest.fixture(scope="module")
def linked(link_folder: Path, link: Link) -> Linked:
    """A configuration over a link of a rate, trained once."""

    @functools.cache
    def run(rate: int, name: str) -> Run:
        window = {"traces": name == "ddp, many buckets"}
        trial = make_trial(**CONFIGURATIONS[name], steps=STEPS, window=window)
        return run_ranks(trial, link_folder / str(rate), link(2, rate))

    return run


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory, link: Link) -> dict[str, Run]:
    """Rank 1 computes longer, over a slow link; and with a slow loader on rank 0 as well."""
    faults: dict[str, dict[str, float]] = {
        "slow rank": {"forward_seconds": SLOW_SECONDS, "rank": 1},
        "slow rank and slow loader": {"forward_seconds": SLOW_SECONDS, "rank": 1, "loader_seconds": LOADER_SECONDS},
    }
    trial = make_trial(**CONFIGURATIONS["ddp, few buckets"], steps=STEPS)
    return {
        name: run_ranks(trial, tmp_path_factory.mktemp("slowed"), link(2, RATES[-1]), fault)
        for name, fault in faults.items()
    }


@pytest.mark.parametrize(
    ("rate", "name"),
    [
        (300, "ddp, many buckets"),
        *((600, name) for name in CONFIGURATIONS),
        *(pytest.param(300, name, marks=pytest.mark.nightly) for name in list(CONFIGURATIONS)[1:]),
    ],
)
def test_wire_is_volume_over_bandwidth(linked: Linked, rate: int, name: str) -> None:
    run = linked(rate, name)
    volume_bytes = 4 * (model_cost.parameters(run.header.trial.model) or 0)
    assert wire_seconds(run) == pytest.approx(link_seconds(volume_bytes, rate), rel=0.15)


def test_many_buckets_overlap_with_backward_and_one_does_not(linked: Linked) -> None:
    """With one bucket all of the wire is exposed. With many, only what backward is too short to hide: never all of it,
    and never less than the last bucket, which is ready only when backward ends."""
    exposed_share = {}
    for which in ("many", "few"):
        run = linked(RATES[-1], f"ddp, {which} buckets")
        exposed_share[which] = explained(run).ranks[0].sum_of("wire") / statistics.fmean(
            one[0].wire_seconds or 0.0 for one in exposures_by_step(run)
        )
    assert exposed_share["few"] == pytest.approx(1.0, abs=0.1)
    buckets = len(linked(RATES[-1], "ddp, many buckets").ranks[0].explained[0].collectives)
    assert 5 <= buckets <= 20
    assert 0.5 / buckets < exposed_share["many"] < 0.9


@pytest.mark.parametrize("fault", ["slow rank", "slow rank and slow loader"])
def test_a_slow_rank_is_named_and_waited_for_while_wire_stays(
    linked: Linked, slowed: Mapping[str, Run], fault: str
) -> None:
    reference, found = linked(RATES[-1], "ddp, few buckets"), slowed[fault]
    own = explained(found)
    late = SLOW_SECONDS + (LOADER_SECONDS if "loader" in fault else 0.0)
    assert own.straggler is not None
    assert (own.straggler.rank, own.straggler.share_of_steps) == (1, 1.0)
    waiting, guilty = 0, 1
    assert typical_seconds(found, waiting, "wait") == pytest.approx(late, rel=0.2)
    assert typical_seconds(found, guilty, "wait") < 0.1 * late
    assert wire_seconds(found) == pytest.approx(wire_seconds(reference), rel=0.15)
    for rank in (waiting, guilty):
        assert typical_seconds(found, rank, "wire") == pytest.approx(typical_seconds(reference, 0, "wire"), rel=0.15)


STAGE_SECONDS = 0.06
"""Of a micro-batch's forward; its backward takes twice as long."""


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "schedule", "bubble"),
    [
        (2, 4, "1f1b", 1 / 5),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((2, 4, "gpipe", 1 / 5), (2, 4, "interleaved", 1 / 9), (4, 8, "1f1b", 3 / 11))
        ),
    ],
)
def test_the_bubble_of_stages_that_sleep(
    tmp_path: Path, ranks: int, micro_batches: int, schedule: str, bubble: float
) -> None:
    """(P - 1) / (v M + P - 1) of the step, on every rank: stages that sleep need no core."""
    parallel = {"pipeline": ranks, "schedule": schedule}
    model = SMALL.model_copy(update={"layers": 4})
    trial = make_trial(
        "ddp", ranks, model=model, parallel=parallel, micro_batch=2, grad_accum=micro_batches, samples=1024, steps=12
    )
    assert trial.parallel.bubble_share(micro_batches) == pytest.approx(bubble)
    run = run_ranks(trial, tmp_path, injected={"stage_seconds": STAGE_SECONDS})
    found = breakdown(run)
    assert found is not None
    for rank in found.ranks:
        known = sum(value for value in rank.parts.values() if value is not None)
        assert known + (rank.exposed_seconds or 0.0) == pytest.approx(rank.seconds, rel=1e-6)
        assert rank.sum_of("bubble") / rank.seconds == pytest.approx(bubble, rel=0.1)


SEGMENTER = ModelSpec(
    task="segmentation", name="swinv2-t", image_size=32, patch_size=2, hidden_size=16, heads=1, depths=(1, 1, 1),
    window_size=4, decoder_size=32,
)  # fmt: skip
NORM_BYTES = 800_000
"""More in each of a step's exchanges: eleven norms, forward and backward."""
SLOW_IMAGE_SECONDS = {2: 0.03, 3: 0.12}
"""By ranks: two of three share a core, and what that costs them must be little beside it."""


CALL_SECONDS = 0.01
"""At most, of a collective beside its bytes, in the mean over a few steps: in one of them TCP may keep an
acknowledgement back for 40 ms."""
SEGMENTING: dict[str, dict[str, Any]] = {
    name: fields | ({"bucket_mib": 1} if "zero_stage" in fields else {}) for name, fields in ENGINE_FIELDS.items()
}


def segmenting(name: str, ranks: int) -> Trial:
    data = {"name": "synthetic-masks", "source_size": 32, "classes": 10}
    how: dict[str, Any] = {"micro_batch": 8, "batch_norm": "synchronised", "model": SEGMENTER, "data": data}
    return make_trial(ranks=ranks, steps=STEPS, **how | SEGMENTING[name])


@pytest.mark.parametrize(
    ("name", "ranks", "rate"),
    [
        ("ddp", 2, 600),
        *(pytest.param(name, 2, 600, marks=pytest.mark.nightly) for name in SEGMENTING if name != "ddp"),
        *(pytest.param(name, 2, 300, marks=pytest.mark.nightly) for name in FULLY),
        *(pytest.param(name, 3, 300, marks=pytest.mark.nightly) for name in SEGMENTING),
    ],
)
def test_what_norms_exchange_is_their_own_part_and_a_slow_rank_stays_waiting(
    tmp_path: Path, link: Link, name: str, ranks: int, rate: int
) -> None:
    """Of a known size over a link of a known rate, in each micro-step; the rank that computes longer is waited for at
    the first exchange behind it. What the engine sends stays the transfer that it is."""
    slow = 1 if ranks == 2 else 0  # of three the first and the last share a core, and are slowed by that alike
    fault = {
        "norm_bytes": NORM_BYTES,
        "image_seconds": [SLOW_IMAGE_SECONDS[ranks] * (rank == slow) for rank in range(ranks)],
    }
    trial = segmenting(name, ranks)
    found = explained(run_ranks(trial, tmp_path, link(ranks, rate), fault))
    of_engine = messages(trial) or ()
    # A rank sends 2 (N - 1)/N of what it reduces, which is how gloo scatters too, and half of that where it gathers.
    ring = 2 * (ranks - 1) / ranks
    own_bytes = ring * sum(
        one.calls * one.tensor_bytes / (2 if one.operation == "all_gather" else 1) for one in of_engine
    )
    own_seconds, calls = link_seconds(own_bytes, rate), sum(one.calls for one in of_engine)
    late = trial.train.micro_batch * SLOW_IMAGE_SECONDS[ranks]
    guilty = found.ranks[slow]
    for rank in found.ranks:
        # Of each the shaper lets a burst through at once: as much, nearly, as its frames are more than their payload.
        assert rank.sum_of("norm") == pytest.approx(ring * 2 * 11 * NORM_BYTES * 8 / (rate * 1e6), rel=0.15)
        # Six of FSDP2's eleven own messages are smaller than a burst.
        at_once = calls * link_seconds(BURST_BYTES, rate) if name == "fsdp2" else 0.0
        assert 0.8 * (own_seconds - at_once) < rank.sum_of("wire") < own_seconds + calls * CALL_SECONDS
        if rank is guilty:
            continue
        # A busy machine slows either of them besides; waited for is what the one really computed longer.
        assert guilty.sum_of("forward", "backward") > late
        longer = guilty.sum_of("forward", "backward") - rank.sum_of("forward", "backward")
        assert rank.sum_of("wait") == pytest.approx(longer, rel=0.2)
        assert guilty.sum_of("wait") < 0.2 * rank.sum_of("wait")
    assert found.straggler is not None
    assert found.straggler.rank == slow


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEGMENTING)
def test_a_single_segmenting_rank_loads_and_computes_as_long_as_was_put_in(tmp_path: Path, name: str) -> None:
    """In the step that the machine disturbs least; and it waits for nobody."""
    fault = {"loader_seconds": LOADER_SECONDS, "forward_seconds": SLOW_SECONDS}
    plain, slowed = (
        run_ranks(segmenting(name, 1), tmp_path / kind, injected=injected)
        for kind, injected in (("plain", {}), ("slowed", fault))
    )
    assert explained(slowed).typical.sum_of("norm", "wire", "wait") < 0.05 * SLOW_SECONDS
    for part, seconds in (("data_wait", LOADER_SECONDS), ("forward", SLOW_SECONDS)):
        least, least_slowed = (
            min(of_step(run, line.step).typical.sum_of(part) for line in run.ranks[0].explained)
            for run in (plain, slowed)
        )
        assert least_slowed - least == pytest.approx(seconds, rel=0.1), part


def test_delay_and_slow_link_are_told_apart(slowed: Mapping[str, Run]) -> None:
    one, both = explained(slowed["slow rank"]), explained(slowed["slow rank and slow loader"])
    assert one.ranks[1].sum_of("data_wait") < 0.1 * LOADER_SECONDS
    assert both.ranks[1].sum_of("data_wait") == pytest.approx(LOADER_SECONDS, rel=0.1)
    assert both.ranks[0].sum_of("data_wait") < 0.1 * LOADER_SECONDS
    assert both.ranks[1].sum_of("forward") == pytest.approx(one.ranks[1].sum_of("forward"), rel=0.15)


def test_without_workers_data_wait_is_the_loaders_delay(tmp_path: Path) -> None:
    """Explained steps with and without the delay alternate in one run, so that the machine's mood falls on both: no
    part but the wait differs between them by more than it does among those without."""
    delay, period = 0.2, 6
    fault = {"loader_seconds": delay, "loader_period": period, "forward_seconds": COMPUTING_SECONDS}
    run = run_ranks(make_trial("none", 1, steps=36, micro_batch=8, model=SMALL), tmp_path, injected=fault)
    explained(run)
    delayed, plain = (
        [of_step(run, line.step).typical for line in run.ranks[0].explained if line.step // period % 2 == odd]
        for odd in (1, 0)
    )
    assert min(len(delayed), len(plain)) >= 3
    loading = loading_seconds(tmp_path)
    longer, shorter = ([s for s in loading if (s >= delay) == late] for late in (True, False))
    assert abs(len(longer) - len(shorter)) <= period
    for part in PARTS:
        with_delay, without = ([one.sum_of(part) for one in some] for some in (delayed, plain))
        difference = statistics.median(with_delay) - statistics.median(without)
        if part == "data_wait":
            assert difference == pytest.approx(statistics.median(longer) - statistics.median(shorter), rel=0.1)
        else:
            assert abs(difference) <= max(0.1 * delay, max(without) - min(without)), part


def loading_seconds(results: Path) -> list[float]:
    """What each batch of the only run took to load, its delay included."""
    (path,) = results.glob("runs/*/loading-seconds.txt")
    return [float(line) for line in path.read_text().splitlines()]


def test_workers_hide_what_they_can_of_the_delay(tmp_path: Path) -> None:
    """Two threads of 0.8 s a batch deliver one each 0.4 s on average; the rest of the step is hidden in that.

    A thread's batch takes 0.8 s and what this machine needs today to be back at work: as long as it did in this run.
    """
    delay, workers = 0.8, 2
    trial = make_trial("none", 1, steps=18, workers=workers, micro_batch=8, model=SMALL)
    fault = {"loader_seconds": delay, "forward_seconds": COMPUTING_SECONDS}
    run = run_ranks(trial, tmp_path, injected=fault)
    found = explained(run).typical
    computing = found.seconds - found.sum_of("data_wait")
    loading = statistics.fmean(loading_seconds(tmp_path))
    assert loading >= delay
    assert found.sum_of("data_wait") == pytest.approx(loading / workers - computing, rel=0.1)
    assert found.sum_of("forward", "backward") == pytest.approx(computing, rel=0.1)


REPEATS = 3


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Run], list[Run]]:
    """Runs of one rank, two at a time, and runs of two ranks. Each rank computes equally long, whatever the machine."""
    folder = tmp_path_factory.mktemp("alike")
    fault = {"forward_seconds": COMPUTING_SECONDS}
    one, two = (
        make_trial(
            "ddp",
            ranks,
            micro_batch=8,
            model=SMALL,
            samples=80 * ranks,
            window={"steps": None, "explain": False},
            epochs=2,
        )
        for ranks in (1, 2)
    )
    single: list[Run] = []
    double: list[Run] = []

    def alone(repeat: int, core: int) -> None:
        single.append(run_ranks(one, folder / f"core-{core}", None, fault, repeat=repeat, first_core=core))

    for repeat in range(REPEATS):
        pair = [threading.Thread(target=alone, args=(repeat, core)) for core in (0, 1)]
        for thread in pair:
            thread.start()
        for thread in pair:
            thread.join()
        double.append(run_ranks(two, folder / "both", None, fault, repeat=repeat))
    assert len(single) == 2 * REPEATS
    return single, double


def test_identical_ranks_reach_an_efficiency_of_one(alike: tuple[list[Run], list[Run]]) -> None:
    """Weak scaling with nothing to lose: the interval of the efficiency reaches into 1 within 3 %."""
    from vitscale.analysis.runs.figures import run_figures

    single, double = ([run_figures(run).epoch_seconds or 0.0 for run in runs] for runs in alike)
    efficiency = ratio(single, double)
    assert efficiency.low is not None
    assert efficiency.high is not None
    assert efficiency.low <= 1.03
    assert efficiency.high >= 0.97
    assert efficiency.value == pytest.approx(1.0, abs=0.15)


def test_light_steps_add_up_to_the_epochs_wall_time(alike: tuple[list[Run], list[Run]]) -> None:
    checked = 0
    for run in [*alike[0], *alike[1]]:
        for rank in run.ranks:
            for epoch in rank.epochs:
                steps = [line for line in rank.steps if line.epoch == epoch.epoch]
                if all(line.window == "light" and not line.warmup for line in steps):
                    assert sum(line.seconds for line in steps) == pytest.approx(epoch.seconds, rel=0.01)
                    checked += 1
    assert checked >= 3 * REPEATS


def test_exposed_communication_agrees_with_the_exported_trace(linked: Linked, link_folder: Path) -> None:
    """Rasterised from the trace file with none of the product's interval code: a microsecond is exposed where gloo is
    at work and no operator runs on any thread, but for the host's own work between two operators."""
    run = linked(RATES[-1], "ddp, many buckets")
    for rank, parts in enumerate(explained(run).ranks):
        traces = list((link_folder / str(RATES[-1])).glob(f"runs/{run.header.trial_id}-*/trace-rank-{rank}-*.json.gz"))
        assert len(traces) == len(run.ranks[rank].explained)
        exposed = [exposed_seconds(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]) for trace in traces]
        assert statistics.fmean(exposed) == pytest.approx(parts.exposed_seconds, rel=0.1)


def exposed_seconds(events: Sequence[Mapping[str, Any]]) -> float:
    whole = [event for event in events if event.get("ph") == "X" and "ts" in event]
    step = next(event for event in whole if event["name"] == "vitscale.step")
    begin, microseconds = float(step["ts"]), int(step["dur"])
    communicating, computing = np.zeros(microseconds, bool), np.zeros(microseconds, bool)
    for event in whole:
        start = float(event["ts"]) - begin
        marked = slice(max(0, int(start)), max(0, int(start + event["dur"])))
        if event["name"].startswith("gloo:"):
            communicating[marked] = True
        elif event.get("cat") == "cpu_op" and event["name"].startswith("aten::"):
            computing[marked] = True
    # By definition a gap of less than 100 us is the host's own work; a busy machine makes many of them.
    edges = np.flatnonzero(np.diff(np.concatenate(([True], computing, [True]))))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if end - start < 100:
            computing[start:end] = True
    return float((communicating & ~computing).sum()) / 1e6
