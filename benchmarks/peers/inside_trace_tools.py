"""What a peer says of one trace, as JSON, in the peers' environment: inside_trace_tools.py hta|tracelens FILE [FOLDER].

Times in microseconds. HolisticTraceAnalysis leaves out the last step, and rounds each event to whole microseconds.
"""

from __future__ import annotations

import gzip
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any


def hta(path: str) -> dict[str, Any]:
    """By HolisticTraceAnalysis: its window, and what it reports of it."""
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: path}, trace_dir=".")
    told = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    return {
        "total": float(told["kernel_time(us)"]),
        "compute": float(told["compute_time(us)"]),
        "idle": float(told["idle_time(us)"]),
        "overlap": None if overlap != overlap else float(overlap) / 100,
    }


def tracelens(path: str, folder: str) -> dict[str, Any]:
    """By TraceLens, of a checkout."""
    sys.path.insert(0, folder)
    from TraceLens.TreePerf.gpu_event_analyser import GPUEventAnalyser

    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    for number, event in enumerate(events):
        event["UID"] = number
    told = GPUEventAnalyser(events).compute_metrics()
    whole = float(told["total_comm_time"])
    return {
        "total": float(told["total_time"]),
        "compute": float(told["computation_time"]),
        "exposed": float(told["exposed_comm_time"]),
        "idle": float(told["idle_time"]),
        "overlap": 1 - float(told["exposed_comm_time"]) / whole if whole else None,
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    try:
        answer = hta(sys.argv[2]) if sys.argv[1] == "hta" else tracelens(sys.argv[2], sys.argv[3])
    except Exception as error:  # whatever a peer raises is its answer
        answer = {"failed": f"{type(error).__name__}: {error}"[:80]}
    # Not getrusage: what it calls the peak is the starting process's too.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    answer["peak_mb"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps(answer))
