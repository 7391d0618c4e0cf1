"""Several ranks under the hook: who is slow is told from who waits for him; all end at the agreed step."""

from __future__ import annotations

import gzip
import json
import statistics

import pytest

from hook_runs import HookedRun, run_hooked
from vitscale.hook.lines import TRACES_FOLDER, HookedModelLine, HookedProfileLine, HookPlan

pytestmark = pytest.mark.ranks

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

DDP = """
import contextlib, os, time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()

class SlowBackward(torch.autograd.Function):
    slept = 0.0
    @staticmethod
    def forward(ctx, values):
        return values.clone()
    @staticmethod
    def backward(ctx, gradients):
        if rank == 1:
            began = time.perf_counter()
            time.sleep(0.04)
            SlowBackward.slept += time.perf_counter() - began
        return gradients

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(20, 8), nn.Linear(8, 5)
    def forward(self, values):
        return self.head(SlowBackward.apply(self.body(values)))

net = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4000, 20), torch.zeros(4000).long())
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=torch.utils.data.DistributedSampler(data))
backward = {}
slept = {}
for number, (values, labels) in enumerate(loader):
    step = number // 2 + 1
    is_last = number % 2
    with contextlib.nullcontext() if is_last else net.no_sync():
        loss = nn.functional.cross_entropy(net(values), labels)
        before = SlowBackward.slept
        began = time.perf_counter()
        loss.backward()
        backward[step] = backward.get(step, 0) + time.perf_counter() - began
        slept[step] = slept.get(step, 0) + SlowBackward.slept - before
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
        if step == 10:
            timed = [5, 8, 9, 10]
            timings = f"backward{rank}={sum(backward[s] for s in timed)} slept{rank}={sum(slept[s] for s in timed)}"
            os.write(1, f"\\n{timings}\\n".encode())  # at once: the other rank writes to the same pipe
print("finished")
"""
TIMED = (5, 8, 9, 10)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> HookedRun:
    plan = HookPlan(profile_from=6, profile_steps=2, stop_after=12)
    return run_hooked(tmp_path_factory.mktemp("ddp"), DDP, launcher=TORCHRUN, plan=plan)


def test_all_ranks_end_at_the_agreed_step_and_the_launcher_with_them(ddp: HookedRun) -> None:
    assert (ddp.exit_code, "finished" in ddp.output) == (0, False), ddp.output
    assert [rank.rank.rank for rank in ddp.ranks] == [0, 1]
    for rank in ddp.ranks:
        assert rank.rank.world_size == 2
        assert [step.number for step in rank.steps] == list(range(1, 13))
        assert (rank.end.step, rank.end.reason) == (12, "agreed step")
        assert rank.notes == []


def test_accumulated_steps_have_two_micro_steps(ddp: HookedRun) -> None:
    for rank in ddp.ranks:
        assert {(step.micro_steps, step.images) for step in rank.steps[1:]} == {(2, 8)}
        model = rank.of(HookedModelLine)[-1]
        assert (model.class_name, model.strategy, model.bucket_cap_mb) == ("Net", "DDP", 25)


def test_a_slow_backward_is_its_own_ranks_and_the_others_wait(ddp: HookedRun) -> None:
    own_seconds = []
    for number, rank in enumerate(ddp.ranks):
        steps = [step for step in rank.steps if step.number in TIMED]
        backward = sum(step.backward_seconds or 0.0 for step in steps)
        assert backward <= ddp.said(f"backward{number}")
        own = [step.own_backward_seconds for step in steps]
        assert None not in own
        own_seconds.append(sum(seconds or 0.0 for seconds in own))
        assert own_seconds[-1] <= backward
    assert own_seconds[1] >= ddp.said("slept1")
    slow_steps = [step for step in ddp.ranks[0].steps if step.number in TIMED]
    waited = [(step.backward_seconds or 0.0) - (step.own_backward_seconds or 0.0) for step in slow_steps]
    # Of both micro-steps: the first one, which exchanges nothing, delays the second one's exchange.
    typical_sleep = ddp.said("slept1") / len(TIMED)
    assert statistics.median(waited) == pytest.approx(typical_sleep, rel=0.5)


def test_profiled_steps_are_marked_and_their_trace_can_be_read(ddp: HookedRun) -> None:
    for rank in ddp.ranks:
        assert [step.number for step in rank.steps if step.profiled] == [6, 7]
        (profile,) = rank.of(HookedProfileLine)
        assert (profile.first_step, profile.steps) == (6, 2)
        trace = json.loads(gzip.decompress((ddp.results / TRACES_FOLDER / profile.trace).read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"ProfilerStep#0", "ProfilerStep#1"} <= names
        assert trace["distributedInfo"]["rank"] == rank.rank.rank
