"""Programs in the shapes that people write, under the hook: what it writes against what they timed themselves.

Each program prints what it timed as `key=seconds`, for the steps that the test compares.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hook_runs import HookedRun, environment, place_hook, read_ranks, run_hooked
from vitscale.hook.autocast import AutocastProbe
from vitscale.hook.lines import (
    RANKS_FOLDER,
    HookedLoaderLine,
    HookedModelLine,
    HookedNoteLine,
    HookedOptimizerLine,
    HookedStepLine,
    HookPlan,
)

TRAINING = """
import sys, time
import torch
from torch import nn

class Pictures(torch.utils.data.Dataset):
    slept = 0.0
    def __init__(self, count, seconds=0.0):
        self.count, self.seconds = count, seconds
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        began = time.perf_counter()
        time.sleep(self.seconds)
        Pictures.slept += time.perf_counter() - began
        return torch.randn(3, 4, 4), index % 5

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(48, 8))
        self.head = nn.Linear(8, 5)
    def forward(self, images):
        return self.head(self.body(images))

def say(**values):
    print(*(f"{key}={value}" for key, value in values.items()), flush=True)
"""

PLAIN = (
    TRAINING
    + """
torch.manual_seed(0)
net = Net()
decayed = torch.optim.AdamW([{"params": net.body.parameters()}, {"params": net.head.bias}], lr=0.01)
plain = torch.optim.SGD([net.head.weight], lr=0.01)
loader = torch.utils.data.DataLoader(Pictures(20, 0.004), batch_size=4, shuffle=True)
validation = torch.utils.data.DataLoader(Pictures(12), batch_size=6)
data = planted = pauses = 0.0
steps = 0
for epoch in range(3):
    batches = iter(loader)
    while True:
        began = time.perf_counter()
        slept = Pictures.slept
        batch = next(batches, None)
        if batch is None:
            break
        steps += 1
        if steps > 2:
            data += time.perf_counter() - began
            planted += Pictures.slept - slept
        began = time.perf_counter()
        time.sleep(0.02)  # slow logging
        if steps > 2:
            pauses += time.perf_counter() - began
        images, labels = batch
        loss = nn.functional.cross_entropy(net(images), labels)
        decayed.zero_grad(), plain.zero_grad()
        loss.backward()
        decayed.step()
        plain.step()
    net.eval()
    with torch.no_grad():
        for images, labels in validation:
            net(images)
    net.train()
    torch.save(net, "net.pt")
torch.manual_seed(1)
say(data=data, planted=planted, pauses=pauses, state=sum(p.detach().sum().item() for p in net.parameters()))
hooked = [m for m in net.modules() if "_compiled_call_impl" in m.__dict__]
copy = torch.load("net.pt", weights_only=False)
say(hooked=len(hooked), copied=sum("_compiled_call_impl" in m.__dict__ for m in copy.modules()))
"""
)


def parts_of(step: HookedStepLine) -> float:
    parts = [step.data_seconds, step.forward_seconds, step.backward_seconds, step.optimizer_seconds]
    return sum(part or 0.0 for part in parts) + step.other_seconds


def total(steps: Sequence[HookedStepLine], field: str) -> float:
    return sum(float(getattr(step, field)) for step in steps)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> HookedRun:
    return run_hooked(tmp_path_factory.mktemp("plain"), PLAIN)


def test_each_step_of_two_optimizers_is_one_and_its_parts_add_up(plain: HookedRun) -> None:
    steps = plain.only_rank.steps
    assert [step.number for step in steps] == list(range(1, 16)), plain.output
    assert [step.images for step in steps[1:]] == [4] * 14
    assert {step.micro_steps for step in steps} == {1}
    for step in steps:
        assert parts_of(step) == pytest.approx(step.seconds)
    assert plain.only_rank.notes == []
    assert plain.only_rank.end.reason == "exit"
    assert plain.only_rank.end.step == 15


def test_a_sleep_in_the_dataset_is_in_data(plain: HookedRun) -> None:
    """Between what the dataset slept and what the loop waited, with the ends of two epochs on top."""
    steps = plain.only_rank.steps[2:]
    assert plain.said("planted") <= total(steps, "data_seconds")
    within_epochs = [step for step in steps if step.number not in (6, 11)]
    assert total(within_epochs, "data_seconds") <= plain.said("data")
    (spot,) = plain.only_rank.samples("data").rows[:1]
    assert (Path(spot.file).name, spot.function) == ("train.py", "__getitem__")


def test_a_sleep_in_the_loop_is_in_other_with_its_line(plain: HookedRun) -> None:
    steps = plain.only_rank.steps[2:]
    assert plain.said("pauses") <= total(steps, "other_seconds")
    (spot,) = plain.only_rank.samples("other").rows[:1]
    source = (plain.results.parent / "train.py").read_text().splitlines()
    assert "slow logging" in source[spot.line - 1]


def test_evaluation_is_a_break_and_in_no_step(plain: HookedRun) -> None:
    breaks = plain.only_rank.breaks
    assert [cut.after_step for cut in breaks] == [5, 10]
    assert {(cut.kind, cut.evaluated_batches) for cut in breaks} == {("evaluation", 2)}


def test_facts_of_model_loader_and_optimizers(plain: HookedRun) -> None:
    rank = plain.only_rank
    model = rank.of(HookedModelLine)[-1]
    elements = 48 * 8 + 8 + 8 * 5 + 5
    assert (model.class_name, model.parameters, model.strategy) == ("Net", elements, "none")
    assert (model.dtype, model.compiled, model.autocast) == ("float32", False, "none")
    (loader,) = rank.of(HookedLoaderLine)
    assert (loader.workers, loader.batch_size, loader.dataset) == (0, 4, "Pictures")
    assert (loader.sampler, loader.prefetch_factor) == ("RandomSampler", None)
    optimizers = [(line.class_name, line.groups) for line in rank.of(HookedOptimizerLine)]
    assert optimizers == [("AdamW", 2), ("SGD", 1)]
    assert (rank.rank.rank, rank.rank.world_size, rank.rank.threads, rank.rank.device) == (0, 1, 1, "cpu")


def test_the_program_computes_what_it_does_without_the_hook(plain: HookedRun, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    alone = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(None), capture_output=True, text=True, check=True
    )
    states = [word for word in alone.stdout.split() if word.startswith("state=")]
    assert [float(word.partition("=")[2]) for word in states] == [plain.said("state")]
    assert plain.said("hooked") == 1
    assert plain.said("copied") == 0


COMPILED = (
    TRAINING
    + """
import warnings
warnings.simplefilter("error", UserWarning)
graphs = []
def backend(graph, examples):
    graphs.append(graph)
    return graph.forward
net = Net()
if sys.argv[1] == "wrapped":
    model = torch.compile(net, backend=backend)
else:
    net.compile(backend=backend)
    model = net
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss
for images, labels in torch.utils.data.DataLoader(Pictures(24), batch_size=4):
    optimizer.step(closure)
say(graphs=len(graphs))
raise LookupError("of the program")
"""
)


@pytest.mark.parametrize("way", ["wrapped", "in_place"])
def test_a_compiled_model_in_a_closure_is_timed_and_compiled_once(way: str, tmp_path: Path) -> None:
    run = run_hooked(tmp_path, COMPILED, options=[way])
    assert run.said("graphs") == 1, run.output
    model = run.only_rank.of(HookedModelLine)[-1]
    assert (model.class_name, model.compiled) == ("Net", True)
    assert len(run.only_rank.steps) == 6
    for step in run.only_rank.steps[2:]:
        assert step.forward_seconds is not None
        assert step.backward_seconds is not None
        assert parts_of(step) == pytest.approx(step.seconds)
    assert run.exit_code == 1
    assert run.output.splitlines()[-1] == "LookupError: of the program"
    assert run.only_rank.end.reason == "exception: LookupError"


WORKERS = (
    TRAINING
    + """
def main():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(
        Pictures(4000), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1], persistent_workers=True
    )
    for images, labels in loader:
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
if __name__ == "__main__":
    main()
    say(finished=1)
"""
)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_write_nothing_and_are_ended_at_the_agreed_step(method: str, tmp_path: Path) -> None:
    run = run_hooked(tmp_path, WORKERS, options=[method], plan=HookPlan(profile_from=4, profile_steps=2, stop_after=9))
    rank = run.only_rank
    assert (run.exit_code, "finished" in run.output) == (0, False), run.output
    assert len(rank.steps) == 9
    assert [step.number for step in rank.steps if step.profiled] == [4, 5]
    assert (rank.end.step, rank.end.reason, rank.end.cleaned) == (9, "agreed step", ["2 loader workers"])
    (loader,) = rank.of(HookedLoaderLine)
    assert (loader.workers, loader.prefetch_factor, loader.persistent_workers) == (2, 2, True)


def test_a_process_without_torch_loads_nothing_and_writes_nothing(tmp_path: Path) -> None:
    program = "import sys; print('vitscale_hook' in sys.modules, 'dataclasses' in sys.modules)"
    run = run_hooked(tmp_path, program)
    assert (run.output.split(), run.ranks) == (["False", "False"], [])


def test_an_isolated_python_is_left_alone(tmp_path: Path) -> None:
    run = run_hooked(tmp_path, "import sys; print(sys.meta_path[0].__name__)", launcher=["-I"])
    assert run.output.strip() != "WatchingFinder"
    assert run.ranks == []


def test_the_programs_own_sitecustomize_runs_as_without_the_hook(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.of_the_site = __name__, __file__\n")
    results = tmp_path / "results"
    variables = environment(place_hook(results))
    variables["PYTHONPATH"] += f":{own}"
    program = "import sitecustomize, sys; print(of_the_site, sitecustomize.__file__, sys.meta_path[0])"
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    file = str(own / "sitecustomize.py")
    assert done.stdout.startswith(f"('sitecustomize', '{file}') {file} ")
    assert "WatchingFinder" in done.stdout
    assert done.stderr == ""


FORKED_AND_BROKEN = (
    TRAINING
    + """
import vitscale_hook.marks
def train(steps):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(steps):
        if step == 4:
            vitscale_hook.marks.Mark = None  # as if the hook had a fault
        net(torch.randn(2, 3, 4, 4)).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=train, args=(8,))
    child.start()
    child.join()
    say(code=child.exitcode)
"""
)


def test_a_fault_of_the_hook_turns_it_off_and_the_program_goes_on(tmp_path: Path) -> None:
    """In a rank that was forked, which ends without atexit, and has no loader."""
    run = run_hooked(tmp_path, FORKED_AND_BROKEN)
    assert run.said("code") == 0, run.output
    rank = run.only_rank
    assert len(rank.steps) == 4
    assert rank.steps[1].data_seconds is None
    (note,) = rank.of(HookedNoteLine)
    assert note.text.startswith("the hook turned itself off after step marks failed: TypeError")
    assert read_ranks(run.results)[0].end.step == 4


SAVING = (
    TRAINING
    + """
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Pictures(400), batch_size=4)
for step, (images, labels) in enumerate(loader, start=1):
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
    torch.save(net.state_dict(), f"weights-{step}.pt")
    with torch.no_grad():
        net(images)
    torch.save(optimizer.state_dict(), f"optimizer-{step}.pt")
"""
)


def test_a_rank_does_not_end_between_two_files_of_a_checkpoint(tmp_path: Path) -> None:
    """What follows the agreed step's optimizer belongs to it: the process ends before the next forward of training."""
    run = run_hooked(tmp_path, SAVING, options=["--token", "hf_secret"], plan=HookPlan(stop_after=7))
    assert (run.only_rank.end.step, run.only_rank.end.reason) == (7, "agreed step"), run.output
    assert {path.name for path in tmp_path.glob("*.pt")} == {
        f"{name}-{step}.pt" for name in ("weights", "optimizer") for step in range(1, 8)
    }
    (rank_file,) = (run.results / RANKS_FOLDER).iterdir()
    assert "hf_secret" not in rank_file.read_text()


def test_nothing_is_placed_in_a_module_that_data_parallel_replicates() -> None:
    """A replica copies what stands in its module's place: each would call the layer of the first device."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    AutocastProbe().place_in(torch.nn.DataParallel(net))
    assert not any("_compiled_call_impl" in module.__dict__ for module in net.modules())
    AutocastProbe().place_in(net)
    assert "_compiled_call_impl" in net[0].__dict__
