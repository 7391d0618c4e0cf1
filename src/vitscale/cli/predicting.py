"""The verbs that say what nobody has measured, and what to rent: predict, advise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import vitscale
from vitscale.cli import base
from vitscale.cli.base import app, option
from vitscale.errors import RequestError


@app.command()
def predict(
    results: base.ResultsArgument,
    gpus: Annotated[
        str | None,
        option("--gpus", "LIST", "Rank counts: 16,32,1024 or 1-8.  [default: 2, 4 and 8 times the most measured]"),
    ] = None,
    nodes_of: Annotated[int | None, option("--nodes-of", "M", "Ranks on each host.  [default: as measured]")] = None,
    network: Annotated[
        str | None,
        option("--network", "LINK", "Between hosts: 25GbE, HDR, 4x200Gb/s, or check.  [default: from a check]"),
    ] = None,
    check: Annotated[
        Path | None, option("--check", "FILE", "A stored check.  [default: the newest of RESULTS]")
    ] = None,
    series: Annotated[str | None, option("--series", "NAME", "One curve of the report.  [default: all]")] = None,
    model: Annotated[
        str | None, option("--model", "NAME", "Another model: vit-l16, timm/..., a name of the hub, or a folder.")
    ] = None,
    image_size: Annotated[int | None, option("--image-size", "PIXELS", "Another image size.")] = None,
    parameters: base.ParametersOption = None,
    engine: Annotated[str | None, option("--engine", "NAME", "Another engine.")] = None,
    zero_stage: Annotated[int | None, option("--zero-stage", "STAGE", "Another ZeRO stage: 0 to 3.")] = None,
    precision: base.PrecisionOption = None,
    micro_batch: base.MicroBatchOption = None,
    grad_accum: Annotated[int | None, option("--grad-accum", "N", "Micro-steps per optimizer step.")] = None,
    device: Annotated[str | None, option("--device", "NAME", "Another GPU: A100-SXM4-80GB, H100, L4.")] = None,
    price: base.PriceOption = None,
    gpu_memory: base.GpuMemoryOption = None,
    epochs: Annotated[
        int | None, option("--epochs", "N", "Tell the time to finish N epochs too, failures included.")
    ] = None,
    checkpoint_seconds: base.CheckpointOption = None,
    node_mtbf: base.NodeMtbfOption = None,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """Time, efficiency, memory and cost on rank counts that nobody has measured, with intervals."""
    base.compute_on_one_core()
    counts = None if gpus is None else base.rank_counts(gpus)

    result = vitscale.predict(
        results,
        counts,
        series=series,
        nodes_of=nodes_of,
        network=network,
        check=check,
        changes=vitscale.Changes(
            model=model,
            image_size=image_size,
            engine=engine,
            zero_stage=zero_stage,
            precision=precision,
            micro_batch=micro_batch,
            grad_accum=grad_accum,
            device=device,
            parameters=parameters,
        ),
        price=price,
        gpu_memory=gpu_memory,
        training=vitscale.TrainingPlan(epochs, checkpoint_seconds, node_mtbf),
    )
    base.show_result(result, json=json, verbose=verbose)


@app.command()
def advise(
    results: base.ResultsArgument,
    deadline: Annotated[str | None, option("--deadline", "TIME", "Be done within it: 90s, 30m, 2h, 1.5d.")] = None,
    budget: Annotated[
        float | None, option("--budget", "X", "Spend at most: money with --price, else GPU-hours.", base.money)
    ] = None,
    min_efficiency: Annotated[
        float | None, option("--min-efficiency", "E", "Against one rank: 80%, or 0.8.", base.share_of_whole)
    ] = None,
    price: base.PriceOption = None,
    devices: Annotated[
        Path | None, option("--devices", "FILE.csv", "Choose among these instances: a table of prices.")
    ] = None,
    max_gpus: Annotated[
        int | None, option("--max-gpus", "N", "Look no further.  [default: 8 x the largest run]")
    ] = None,
    gpus: Annotated[str | None, option("--gpus", "LIST", "Look at these rank counts alone: 8,16,32.")] = None,
    nodes_of: Annotated[int | None, option("--nodes-of", "M", "Ranks of a full host.  [default: as measured]")] = None,
    network: Annotated[str | None, option("--network", "NAME", "Link between hosts, such as 25GbE.")] = None,
    epochs: Annotated[int | None, option("--epochs", "E", "How long to train.  [default: as the study]")] = None,
    images: Annotated[int | None, option("--images", "N", "Images of an epoch, where the results do not say.")] = None,
    series: Annotated[str | None, option("--series", "NAME", "Which curve to advise from.")] = None,
    parameters: base.ParametersOption = None,
    gpu_memory: base.GpuMemoryOption = None,
    any_batch: Annotated[
        bool, option("--any-batch", "", "Let the answers train with another global batch than the study.")
    ] = False,
    large_batch: Annotated[
        bool, option("--large-batch", "", "Let them train with few steps an epoch, or far above the noise scale.")
    ] = False,
    split: Annotated[
        bool, option("--split", "", "Let ranks share a model, too: tensor, sequence and pipeline ([parallel]).")
    ] = False,
    checkpoint_seconds: base.CheckpointOption = None,
    node_mtbf: base.NodeMtbfOption = None,
    chart: Annotated[Path | None, option("--chart", "FILE", "Draw time against cost: .png, .svg or .html.")] = None,
    output: Annotated[Path | None, option("-o --output", "FILE", "Write the first answer as a study.")] = None,
    output_format: Annotated[
        str, option("--format", "F", "Form of that file: study, or what starts it there: skypilot, jobset.")
    ] = "study",
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """What to rent: fastest, cheapest, most ranks, the knee. Exits with 1 where nothing meets the limits."""
    base.compute_on_one_core()
    if price is None and devices is None:
        _refuse_currency(budget)
    deadline_seconds = None if deadline is None else base.seconds_of(deadline, "--deadline")
    counts = None if gpus is None else base.rank_counts(gpus)
    notes = base.ProgramConsole(stderr=True)
    result = vitscale.advise(
        results,
        limits=vitscale.AdviceLimits(deadline_seconds, budget, min_efficiency),
        choices=vitscale.AdviceChoices(
            gpus=counts,
            max_gpus=max_gpus,
            nodes_of=nodes_of,
            devices=devices,
            any_batch=any_batch,
            large_batch=large_batch,
            split=split,
        ),
        training=vitscale.TrainingPlan(epochs, checkpoint_seconds, node_mtbf),
        price=price,
        network=network,
        images=images,
        series=series,
        parameters=parameters,
        gpu_memory=gpu_memory,
        output=output,
        output_format=output_format,
        chart=chart,
        say=lambda note: notes.print(note, markup=False, highlight=False),
    )
    base.show_result(result, json=json, verbose=verbose)
    if not result.met:
        raise typer.Exit(1)


def _refuse_currency(budget: float | None) -> None:
    """Refuse a budget in a currency, where no price is known.

    Raises:
        RequestError: a currency stood beside the amount.
    """
    if isinstance(budget, base.Money) and budget.currency:
        message = f"--budget is in {budget.currency}, and no price is known: without one a budget is in GPU-hours"
        raise RequestError(message, next_step="Add --price of a GPU for an hour, or --devices with a table of prices")
