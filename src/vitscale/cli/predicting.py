"""The verbs that say what nobody has measured, and what to rent: predict, advise."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitscale.cli import base
from vitscale.cli.base import app, option
from vitscale.errors import RequestError, shown, unknown

if TYPE_CHECKING:
    from vitscale.prediction.instances import Instance


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
    model: Annotated[str | None, option("--model", "NAME", "Another model: vit-l16, or a Hugging Face folder.")] = None,
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
    from vitscale import analysis
    from vitscale.cli.asking import PredictAsking
    from vitscale.pages.predicted import predict_document, predict_fields

    counts = None if gpus is None else base.rank_counts(gpus)
    options = {
        "--nodes-of": nodes_of,
        "--network": network,
        "--check": check,
        "--model": model,
        "--image-size": image_size,
        "--parameters": parameters,
        "--engine": engine,
        "--zero-stage": zero_stage,
        "--precision": precision,
        "--micro-batch": micro_batch,
        "--grad-accum": grad_accum,
        "--device": device,
        "--price": price,
        "--gpu-memory": gpu_memory,
        "--epochs": epochs,
        "--checkpoint-seconds": checkpoint_seconds,
        "--node-mtbf": node_mtbf,
    }
    analysed = analysis.analyse_folder(results)
    asking = PredictAsking(results, analysed, counts, series)
    answered = asking.answer(options)
    of_answer = answered.forecast, answered.finishes, asking.remarks(answered, options)
    fields, document = partial(predict_fields, *of_answer), partial(predict_document, *of_answer)
    base.answer("predict", fields, document, unread=analysed.unread, json=json, verbose=verbose)


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
    from vitscale import analysis
    from vitscale.advice.job_files import JOB_FORMATS, job_text
    from vitscale.advice.printing import advice_document, advice_fields
    from vitscale.advice.request import Request
    from vitscale.advice.study_text import advised_trial, launch_lines, start_line, study_text
    from vitscale.base.distribution import write_wheel
    from vitscale.cli.asking import AdviseAsking

    for flag, count in (
        ("--max-gpus", max_gpus), ("--nodes-of", nodes_of), ("--epochs", epochs), ("--images", images)
    ):  # fmt: skip
        if count is not None and not 1 <= count <= 10**9:
            raise RequestError(f"{flag}: {count} cannot be", valid=["1 or more"])
    if isinstance(budget, base.Money) and budget.currency and price is None and devices is None:
        what = f"--budget is in {budget.currency}, and no price is known: without one a budget is in GPU-hours"
        raise RequestError(what, next_step="Add --price of a GPU for an hour, or --devices with a table of prices")
    of_measured = {"--split": split, "--nodes-of": nodes_of, "--gpu-memory": gpu_memory}
    if devices is not None and price is None and (given := [name for name, value in of_measured.items() if value]):
        step = "Add --price for hosts like the measured ones beside them, or leave it out"
        raise RequestError(f"{given[0]} says nothing of the instances of --devices", next_step=step)
    instances: tuple[Instance, ...] = ()
    left_out: tuple[str, ...] = ()
    if devices is not None:
        from vitscale.prediction.instances import read_instances

        instances, left_out = read_instances(devices)
    for note in left_out:
        base.ProgramConsole(stderr=True).print(note, markup=False, highlight=False)
    limits = Request(
        deadline_seconds=None if deadline is None else base.seconds_of(deadline, "--deadline"),
        budget=base.positive(budget, "--budget"),
        min_efficiency=min_efficiency,
        price_per_gpu_hour=base.positive(price, "--price"),
        max_gpus=max_gpus,
        gpus=None if gpus is None else base.rank_counts(gpus),
        epochs=epochs,
        series=series,
        instances=instances,
    )
    options = {
        "--nodes-of": nodes_of,
        "--network": network,
        "--images": images,
        "--parameters": parameters,
        "--gpu-memory": gpu_memory,
        "--any-batch": any_batch,
        "--large-batch": large_batch,
        "--split": split,
        "--checkpoint-seconds": checkpoint_seconds,
        "--node-mtbf": node_mtbf,
    }
    if chart is not None:
        from vitscale.pages.charts.advice import check_format, write_advice_chart

        check_format(chart)
    if output_format != "study":
        if output_format not in JOB_FORMATS:
            raise unknown("format", output_format, ("study", *JOB_FORMATS))
        if output is None:
            raise RequestError("--format is of the file that -o names, and there is none", next_step="Add -o job.yaml")
    analysed = analysis.analyse_folder(results)
    asking = AdviseAsking(results, analysed, limits)
    advice = asking.answer(options)
    chosen = advice.chosen
    study, launch, start = None, [], None
    if chosen is not None:
        try:
            trial = advice.trials[chosen.series]
            study = study_text(f"{analysed.study.name[:90]}-advised", chosen, trial, advice.work)
            launch = launch_lines(advised_trial(chosen, trial, advice.work))
        except RequestError as error:
            if output is not None:
                raise
            launch = [f"unavailable: {error}"]
    if output is not None:
        written, verb = study, None
        if study is not None and chosen is not None and output_format != "study":
            around = [result.environment for result in analysed.trials.values() if result.environment is not None]
            gpu_types = tuple(dict.fromkeys(device for environment in around for device in environment.devices))
            verb = JOB_FORMATS[output_format].start
            wheel = write_wheel(output.absolute().parent)
            written = job_text(output_format, study, chosen, advice.trials[chosen.series], gpu_types, wheel)
        if written is None or chosen is None:
            raise RequestError(f"{shown(str(output))} is not written: there is no answer to write")
        base.write_new(output, written)
        start = start_line(output, chosen, advice.trials[chosen.series], verb)
    if chart is not None:
        write_advice_chart(advice, chart)
    remarks = asking.remarks(advice, options)
    document = partial(advice_document, advice, launch, start, remarks)
    fields = partial(advice_fields, advice, study, remarks)
    base.answer("advise", fields, document, unread=analysed.unread, json=json, verbose=verbose)
    if not advice.met:
        raise typer.Exit(1)
