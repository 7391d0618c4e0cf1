"""The verb that says what nobody has measured: predict."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from vitscale.cli.base import (
    CheckpointOption,
    JsonOption,
    NodeMtbfOption,
    ParametersOption,
    ResultsArgument,
    VerboseOption,
    answer,
    app,
    compute_on_one_core,
    option,
)


@app.command()
def predict(
    results: ResultsArgument,
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
    parameters: ParametersOption = None,
    engine: Annotated[str | None, option("--engine", "NAME", "Another engine.")] = None,
    zero_stage: Annotated[int | None, option("--zero-stage", "STAGE", "Another ZeRO stage: 0 to 3.")] = None,
    precision: Annotated[str | None, option("--precision", "NAME", "fp32, bf16, bf16-params or fp16.")] = None,
    micro_batch: Annotated[int | None, option("--micro-batch", "IMAGES", "Images per rank and micro-step.")] = None,
    grad_accum: Annotated[int | None, option("--grad-accum", "N", "Micro-steps per optimizer step.")] = None,
    device: Annotated[str | None, option("--device", "NAME", "Another GPU: A100-SXM4-80GB, H100, L4.")] = None,
    price: Annotated[float | None, option("--price", "PRICE", "Of one GPU for an hour, in any currency.")] = None,
    gpu_memory: Annotated[
        str | None, option("--gpu-memory", "SIZE", "Of one GPU: 80GB.  [default: as recorded]")
    ] = None,
    epochs: Annotated[
        int | None, option("--epochs", "N", "Also the time to finish N epochs, failures included.")
    ] = None,
    checkpoint_seconds: CheckpointOption = None,
    node_mtbf: NodeMtbfOption = None,
    verbose: VerboseOption = False,
    json: JsonOption = False,
) -> None:
    """Time, efficiency, memory and cost on rank counts that nobody has measured, with intervals."""
    compute_on_one_core()
    from vitscale import analysis, store
    from vitscale.cli import base
    from vitscale.prediction import answering, finishing, fitting, questions
    from vitscale.prediction.evidence import evidence_of
    from vitscale.report.predicted import predict_document, predict_fields

    counts = None if gpus is None else base.rank_counts(gpus)
    memory = None if gpu_memory is None else base.size_bytes(gpu_memory, "--gpu-memory")
    horizon = finishing.horizon(epochs, checkpoint_seconds, node_mtbf)
    loaded = store.load(results)
    analysed = analysis.analyse(loaded)
    evidence = evidence_of(results, loaded, analysed, declared=network, check=check)
    changes = questions.Changes(
        model, image_size, engine, zero_stage, precision, micro_batch, grad_accum, device, parameters
    )
    evidence, changes = questions.told(evidence, changes)
    asked = questions.questions(
        evidence,
        counts or questions.counts_ahead(evidence),
        changes,
        series=series,
        nodes_of=nodes_of,
        price_per_gpu_hour=price,
        memory_capacity_bytes=memory,
    )
    answered = answering.answer(fitting.fit(evidence), asked)
    ends = finishing.finish(horizon, answered.predictions, evidence, analysed) if horizon else ()
    fields, document = partial(predict_fields, answered, ends), partial(predict_document, answered, ends)
    answer("predict", fields, document, json=json, verbose=verbose)
