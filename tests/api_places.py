"""A folder with all that examples of the Python API name, and a program that runs each example twice."""

from __future__ import annotations

from pathlib import Path

from driving import TINY_MODEL
from prediction_factory import resolved_study
from results_factory import write_results

STUDY = f"""
name = "documented"
{TINY_MODEL}
[data]
name = "digits"
[train]
precision = "fp32"
micro_batch = 8
device = "cpu"
[scaling]
gpus = [1, 2]
[launch]
oversubscribe = true
[measure]
steps = 4
warmup_steps = 1
repeats = 1
explain = false
evaluate = false
"""
STEP_SECONDS = {1: [0.1, 0.101, 0.102], 2: [0.104, 0.105, 0.106], 4: [0.108, 0.109, 0.11]}
SLOWER = 1.5


def make_place(folder: Path) -> None:
    """Writes study.toml, ds.json, table.csv, and two results folders, of which `slower` takes half as long again."""
    (folder / "study.toml").write_text(STUDY)
    (folder / "ds.json").write_text('{"train_batch_size": 32, "gradient_acumulation_steps": 2}\n')
    (folder / "table.csv").write_text("gpus,images_per_second\n1,400\n2,780\n4,1500\n8,2800\n")
    for name, factor in (("results", 1.0), ("slower", SLOWER)):
        times = {gpus: [factor * seconds for seconds in runs] for gpus, runs in STEP_SECONDS.items()}
        results = resolved_study(times)
        named = results.study.model_copy(update={"name": "documented"})
        write_results(results.model_copy(update={"study": named}), folder / name)
