"""The verb that brings in others' results: import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import vitscale
from vitscale.cli import base
from vitscale.cli.base import app, option


@app.command("import")
def import_(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Log files of one format.", show_default=False)],
    output: base.OutputOption = None,
    log_format: Annotated[
        str,
        option("--format", "F", "Or epochs, deepspeed, trainer-state, train-log, csv, trace, nccl-tests, perftest."),
    ] = "auto",
    name: Annotated[str | None, option("--name", "NAME", "Name of the study.")] = None,
    model: base.ModelOption = None,
    parameters: base.ParametersOption = None,
    image_size: Annotated[int | None, option("--image-size", "PIXELS", "Image size of the model.")] = None,
    engine: base.EngineOption = None,
    zero_stage: Annotated[int | None, option("--zero-stage", "0-3", "DeepSpeed's ZeRO stage.")] = None,
    precision: base.PrecisionOption = None,
    micro_batch: base.MicroBatchOption = None,
    train_samples: Annotated[
        int | None, option("--train-samples", "N", "Training images of the whole dataset.")
    ] = None,
    gpus: Annotated[
        str | None, option("--gpus", "N", "Ranks, where logs do not say; 1,8: of each log in turn.")
    ] = None,
    cells: Annotated[
        str | None, option("--cells", "SPEED", "What cells hold, where a table does not say it: images_per_second, ...")
    ] = None,
    as_repeats: Annotated[
        bool, option("--as-repeats", "", "Take files of one setting for repeats, however much they differ.")
    ] = False,
    verbose: base.VerboseOption = False,
    json: base.JsonOption = False,
) -> None:
    """Others' logs as results: DeepSpeed, Hugging Face, timm, MMEngine; tables; traces. Then report and predict."""

    result = vitscale.import_results(
        logs,
        output=output,
        log_format=log_format,
        name=name,
        model=model,
        parameters=parameters,
        image_size=image_size,
        engine=engine,
        zero_stage=zero_stage,
        precision=precision,
        micro_batch=micro_batch,
        train_samples=train_samples,
        gpus=gpus,
        cells=cells,
        as_repeats=as_repeats,
    )
    if isinstance(result, vitscale.LinkImportResult) and not json:
        for sentence in result.sentences:
            base.ProgramConsole().print(sentence, markup=False, highlight=False, soft_wrap=True)
        return
    base.show_result(result, json=json, verbose=verbose)
