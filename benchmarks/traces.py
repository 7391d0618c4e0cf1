"""Traces read by us and by peers, on one window and by one definition: traces.py FILE... [--tracelens FOLDER].

Peers live in an environment of their own beside the benchmarks (`.traces-venv`). HolisticTraceAnalysis (0.5.0, PyPI)
calls everything that is no compute "non-compute", counts synchronisation events as kernels, and drops the last step;
its window begins with ours, so ours is cut to its length. TraceLens is no package on PyPI (what is there is another
project): give a checkout. Definitions are those of `profiles/trace_figures.py`.

    --tracelens FOLDER  a checkout of github.com/AMD-AGI/TraceLens (the page's is of commit 171dd74)
    --synthesise BYTES  also times an import of 8 ranks made of the first file, of so many bytes unpacked
    --write PAGE        puts the tables into this page
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from between_marks import write_between

from vitscale.profiles.trace_figures import DeviceTime
from vitscale.profiles.trace_file import read_trace

ENVIRONMENT = Path(__file__).parent / ".traces-venv"
PEERS = ("HolisticTraceAnalysis==0.5.0", "tqdm", "orjson", "tabulate", "openpyxl")
INSIDE = Path(__file__).parent / "peers/inside_trace_tools.py"
OURS = """
import resource, sys
from vitscale.cli import main
sys.argv = ["vitscale", "import", *sys.argv[2:], "-o", sys.argv[1], "--json"]
try:
    main()
finally:
    own = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
    print((own + 2 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024, file=sys.stderr)
"""


def installed() -> Path:
    """The interpreter of the peers' environment, made where there is none."""
    python = ENVIRONMENT / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        (ENVIRONMENT / ".gitignore").write_text("*\n", encoding="utf-8")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEERS], check=True)
    return python


class Cost(NamedTuple):
    """Of a whole process with its children."""

    seconds: float
    cpu_seconds: float
    peak_mb: float

    def __str__(self) -> str:
        return f"{self.seconds:.1f} | {self.cpu_seconds:.1f} | {self.peak_mb:.0f}"


def ask(argv: list[str]) -> tuple[dict[str, Any], Cost]:
    """The answer of a process, and what it cost."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    answer: dict[str, Any] = json.loads(done.stdout)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return answer, Cost(seconds, used, answer.get("peak_mb") or float(done.stderr.split()[-1]))


def ours(paths: list[Path]) -> Cost:
    """Of an import; its memory is that of the process and twice that of its largest child."""
    with tempfile.TemporaryDirectory() as folder:
        return ask([sys.executable, "-c", OURS, f"{folder}/results", *map(str, paths)])[1]


def rows(path: Path, python: Path, tracelens: Path | None) -> list[str]:
    """A row of ours and of each peer, and one of ours on the peer's window."""
    device = DeviceTime(read_trace(path))
    if device.span is None:
        raise SystemExit(f"{path}: nothing ran on a device")
    begin = device.span[0]
    cost = ours([path])
    whole = device.shares(device.span)
    table = [_row(path.name, "vitscale", _figures(whole.as_json()), cost)]
    peers = [("HTA", [str(python), str(INSIDE), "hta", str(path)])]
    if tracelens is not None:
        peers.append(("TraceLens", [str(python), str(INSIDE), "tracelens", str(path), str(tracelens)]))
    for name, argv in peers:
        told, cost = ask(argv)
        if "failed" in told:
            table.append(f"| {path.name} | {name} | fails: {told['failed']} | | | | | {cost} |")
            continue
        table.append(_row(path.name, name, told, cost))
        if abs(told["total"] * 1000 - (device.span[1] - begin)) > 1e6:
            same = device.shares((begin, begin + told["total"] * 1000))
            table.append(_row(path.name, f"vitscale, {name}'s window", _figures(same.as_json()), None))
    return table


def _figures(shares: dict[str, Any]) -> dict[str, Any]:
    names = {"total": "total", "compute": "compute", "exposed": "exposed_communication", "idle": "idle"}
    figures = {short: shares[f"{name}_seconds"] * 1e6 for short, name in names.items()}
    return {**figures, "overlap": shares["communication_overlap_share"]}


def _row(path: str, who: str, told: dict[str, Any], cost: Cost | None) -> str:
    times = " | ".join(
        f"{told[key] / 1000:.3f}" if key in told else "" for key in ("total", "compute", "exposed", "idle")
    )
    overlap = "" if told.get("overlap") is None else f"{100 * told['overlap']:.1f} %"
    return f"| {path} | {who} | {times} | {overlap} | {cost or '| |'} |"


def synthesised(path: Path, size: int, folder: Path) -> list[Path]:
    """Eight ranks of `size` bytes unpacked together: the events of one file again and again, later each time."""
    content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    events = content.pop("traceEvents")
    length = len(json.dumps(events, indent=2))
    lasts = max(event["ts"] + event.get("dur", 0) for event in events if event.get("ph") == "X")
    lasts -= min(event["ts"] for event in events if event.get("ph") == "X")
    found = []
    for rank in range(8):
        content["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 8}
        found.append(folder / f"rank{rank}.json.gz")
        with gzip.open(found[-1], "wt", compresslevel=1) as file:
            file.write(json.dumps(content)[:-1] + ', "traceEvents": [')
            for again in range(max(1, round(size / 8 / length))):
                moved = [_again(event, again, lasts) for event in events]
                file.write((",\n" if again else "") + json.dumps(moved, indent=2)[1:-1])
            file.write("]}")
    return found


def _again(event: dict[str, Any], again: int, lasts: float) -> dict[str, Any]:
    moved = {**event, "ts": event["ts"] + again * (lasts + 1000)}
    if isinstance(correlation := event.get("args", {}).get("correlation"), int):
        moved["args"] = {**event["args"], "correlation": correlation + again * 10_000_000}
    if event["name"].startswith("ProfilerStep#"):
        moved["name"] = f"ProfilerStep#{int(event['name'][13:]) + 1000 * again}"
    return moved


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tracelens", type=Path)
    parser.add_argument("--synthesise", type=int)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    python = installed()
    times = ("total (ms)", "compute", "exposed communication", "idle", "overlapped")
    columns = (*times, "process (s)", "CPU (s)", "memory (MB)")
    lines = [f"| file | by | {' | '.join(columns)} |", f"|:--|:--|{'--:|' * len(columns)}"]
    for path in asked.files:
        lines += rows(path, python, asked.tracelens)
    if asked.synthesise:
        with tempfile.TemporaryDirectory() as folder:
            files = synthesised(asked.files[0], asked.synthesise, Path(folder))
            cost = ours(files)
        told = f"Eight ranks made of {asked.files[0].name}, {asked.synthesise / 1e6:,.0f} MB unpacked"
        spent = f"{cost.seconds:.1f} s, {cost.cpu_seconds:.1f} s of CPU, {cost.peak_mb:.0f} MB"
        lines += ["", f"{told}: {spent}; two processes read at once."]
    text = "\n".join(lines)
    print(text)
    if asked.write:
        write_between(asked.write, "traces", text)


if __name__ == "__main__":
    main()
