"""Builds and traces every vision type of transformers by its default configuration, and tabulates what came out.

    .venv/bin/python benchmarks/model_families.py [--only TYPE ...] [--write docs/models.md]

A type is one of transformers' tables of image classification, of backbones, or of `MORE`. For each the table has what
vitscale puts on it (the type's own head, or a linear one on the pooled output), the parameters with 10 classes, the
FLOPs of an image's forward, the blocks that checkpointing and FSDP2 take, and what an image keeps for backward on a GPU
under bf16 autocast; or why there is no card. Nothing is downloaded; weights are never made.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from between_marks import write_between

from vitscale.models.named import quiet_transformers
from vitscale.models.tracing import trace
from vitscale.trial.model_card import ModelCard, TraceRequest
from vitscale.trial.model_spec import ModelSpec, resolve

MORE = (
    "clip_vision_model",
    "siglip_vision_model",
    "siglip2_vision_model",
    "dinov3_vit",
    "dinov3_convnext",
    "vit_mae",
    "sam_vision_model",
)
"""Types of vision towers that stand in neither table."""
CLASSES = 10


class Row(NamedTuple):
    """A type, and what tracing its default configuration gave."""

    model_type: str
    has_own_head: bool
    image_size: int
    seconds: float
    card: ModelCard | None
    reason: str = ""


def model_types() -> dict[str, bool]:
    """Type -> whether transformers has a head of image classification for it."""
    quiet_transformers()
    from transformers.models.auto import modeling_auto

    with_head = dict.fromkeys(modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, True)
    backbones = dict.fromkeys(modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES, False)
    return dict(sorted((dict.fromkeys(MORE, False) | backbones | with_head).items()))


def traced(model_type: str, *, has_own_head: bool, folder: Path) -> Row:
    """Trace a type by its default configuration, for a GPU under bf16 autocast."""
    start = time.perf_counter()
    image_size = 224
    try:
        config = quiet_transformers().AutoConfig.for_model(model_type)
        image_size = _image_size(config)
        content = config.to_diff_dict() | {"model_type": model_type}
        (folder / "config.json").write_text(json.dumps(content, default=str))
        spec = resolve(ModelSpec(hf=str(folder), image_size=image_size), CLASSES)
        card = trace(TraceRequest(model=spec, device="cuda", autocast_dtype="bf16"))
    except Exception as error:
        reason = " ".join(str(error).replace(str(folder), "DEFAULTS").split())[:160] or type(error).__name__
        return Row(model_type, has_own_head, image_size, time.perf_counter() - start, None, reason)
    return Row(model_type, has_own_head, image_size, time.perf_counter() - start, card)


def _image_size(config: Any) -> int:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or 224
    return int(size[0] if isinstance(size, list | tuple) else size)


def as_table(rows: list[Row]) -> str:
    with_card = [row for row in rows if row.card is not None]
    longest = max(with_card, key=lambda row: row.seconds)
    text = [
        f"{len(with_card)} of {len(rows)} types have a card. The longest trace took {longest.seconds:.1f} s "
        f"({longest.model_type}).",
        "",
        "| type | head | image size | parameters | GFLOP an image | blocks | MiB an image keeps |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for row in with_card:
        card = row.card
        assert card is not None
        flops = card.flops("forward").of(1) / 1e9
        blocks = sum(part.block > 0 for part in card.parts)
        kept = sum(part.kept.per_image for part in card.parts) / 2**20
        head = "its own" if row.has_own_head else "linear"
        counts = f"{card.parameters:,} | {flops:.2f} | {blocks or 'none'} | {kept:.1f}"
        text.append(f"| {row.model_type} | {head} | {row.image_size} | {counts} |")
    text += ["", "| type without a card | why |", "| --- | --- |"]
    text += [f"| {row.model_type} | {row.reason.replace('|', '/')} |" for row in rows if row.card is None]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="types")
    parser.add_argument("--write", type=Path, help="a document with the table's markers")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model_type, has_own_head in model_types().items():
            if not options.only or model_type in options.only:
                rows.append(traced(model_type, has_own_head=has_own_head, folder=Path(folder)))
    table = as_table(rows)
    print(table)
    if options.write:
        write_between(options.write, "types of transformers", f"\n{table}\n")


if __name__ == "__main__":
    main()
