"""Holds parameters and forward FLOPs of traced models against what timm and torchvision publish.

    .venv-vision/bin/python benchmarks/model_flops.py --timm benchmark-infer-amp-nchw-pt240-cu124-rtx3090.csv
                                                      [--only NAME ...] [--write docs/models.md]

timm's table of its inference benchmark (in results/ of its repository) has millions of parameters and billions of
multiply-adds of each model and image size. Its counter adds 2 for each element of a batch norm and 5 for each of a
layer norm (fvcore, `get_norm_flop_counter`), which are added here too. torchvision holds both figures in the package
(`num_params` and `_ops` of the weights).

A model agrees if its parameters are equal, as far as they are printed, and its multiply-adds are within 1 % or 0.01
billions. All of torchvision are traced, and at least one of each family of timm.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from between_marks import write_between
from torch.utils._python_dispatch import TorchDispatchMode

from vitscale.models.tracing import trace
from vitscale.models.tracing.building import meta_model
from vitscale.trial.model_card import TraceRequest
from vitscale.trial.model_spec import ModelSpec, resolve

BATCH_NORM_MACS, LAYER_NORM_MACS = 2, 5
"""What timm's counter adds for each element."""
IMAGES = 2

_TIMM_NAMES = """
vit_base_patch16_224 vit_small_patch32_224 deit_tiny_patch16_224 deit3_small_patch16_224
deit_tiny_distilled_patch16_224 beitv2_base_patch16_224 swin_tiny_patch4_window7_224 swin_s3_tiny_224
swinv2_tiny_window8_256 swinv2_cr_tiny_ns_224 convnext_tiny convnext_atto convnextv2_nano resnet18 resnet50
resnext50_32x4d seresnet50 wide_resnet50_2 ecaresnet26t resnetv2_50 efficientnet_b0 tf_efficientnetv2_b0
mobilenetv3_large_100 mobilenetv2_100 mnasnet_100 ghostnet_100 regnetx_008 regnety_016 cait_xxs24_224
xcit_tiny_12_p16_224 xcit_nano_12_p8_224 mobilevit_s mobilevitv2_100 maxvit_tiny_tf_224 coatnet_0_rw_224
maxxvit_rmlp_nano_rw_256 davit_tiny edgenext_small volo_d1_224 levit_128 pvt_v2_b0 twins_svt_small
twins_pcpvt_small crossvit_tiny_240 mixer_b16_224 gmlp_s16_224 resmlp_12_224 fastvit_t8 efficientformer_l1
efficientformerv2_s0 nest_tiny poolformer_s12 poolformerv2_s12 inception_next_tiny tnt_s_patch16_224
visformer_tiny gcvit_xxtiny vgg11 densenet121 darknet53 hrnet_w18_small dla34 inception_v3 inception_v4
xception41 coat_tiny convit_tiny pit_ti_224 focalnet_tiny_srf repvgg_a2 res2net50_26w_4s rexnet_100
hardcorenas_a vit_tiny_r_s16_p8_224 eva02_tiny_patch14_336 hiera_tiny_224 tiny_vit_5m_224 efficientvit_b0
repvit_m1 mobilenetv4_conv_small vit_small_patch14_dinov2 convmixer_768_32 sequencer2d_s dm_nfnet_f0
cs3darknet_m
"""
TIMM = _TIMM_NAMES.split()
"""Models of timm, at least one of each family that its table has."""


class Published(NamedTuple):
    """What a library says of one of its models."""

    name: str
    image_size: int
    classes: int
    parameters: float
    rounded_to: float
    """Half of the last digit that is published."""
    giga_macs: float
    counts_norms: bool
    """Whether its multiply-adds have those of norms too."""


class Row(NamedTuple):
    """A model as published and as counted."""

    published: Published
    parameters: int | None
    giga_macs: float | None
    seconds: float
    reason: str = ""
    """Why the model was not counted."""

    @property
    def agrees(self) -> bool:
        if self.parameters is None or self.giga_macs is None:
            return False
        published = self.published
        has_same_parameters = abs(self.parameters - published.parameters) <= published.rounded_to
        difference = abs(self.giga_macs - published.giga_macs)
        return has_same_parameters and difference <= max(0.01 * published.giga_macs, 0.01)


class NormElements(TorchDispatchMode):
    """Counts the elements that norms normalise."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if "batch_norm" in name:
            self.macs += BATCH_NORM_MACS * args[0].numel()
        elif "layer_norm" in name or "group_norm" in name:
            self.macs += LAYER_NORM_MACS * args[0].numel()
        return func(*args, **(kwargs or {}))


def norm_macs(request: TraceRequest) -> float:
    """What timm's counter adds for the norms of one image."""
    model = meta_model(request).eval()
    side = request.model.image_size
    with torch.no_grad(), NormElements() as elements:
        model(torch.empty(IMAGES, 3, side, side, device="meta"))
    return elements.macs / IMAGES


def of_timm(table: Path) -> Iterator[Published]:
    wanted = set(TIMM)
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["model"] in wanted:
                wanted.discard(row["model"])  # its first size
                parameters = float(row["param_count"].replace(",", "")) * 1e6
                macs = float(row["infer_gmacs"].replace(",", ""))
                yield Published(
                    f"timm/{row['model']}", int(row["infer_img_size"]), 1000, parameters, 5000, macs, counts_norms=True
                )
    if wanted:
        print(f"not in the table: {', '.join(sorted(wanted))}")


def of_torchvision() -> Iterator[Published]:
    for name in torchvision.models.list_models(module=torchvision.models):
        weights = next(iter(torchvision.models.get_model_weights(name)))
        meta = weights.meta
        size = weights.transforms().crop_size[0]
        classes = len(meta["categories"] or range(1000))
        yield Published(f"torchvision/{name}", size, classes, meta["num_params"], 0, meta["_ops"], counts_norms=False)


def counted(published: Published) -> Row:
    start = time.perf_counter()
    try:
        spec = resolve(ModelSpec(name=published.name, image_size=published.image_size), published.classes)
        request = TraceRequest(model=spec)
        card = trace(request)
        seconds = time.perf_counter() - start
        flops = card.flops("forward")
        macs = (flops.fixed / IMAGES + flops.per_image) / 2
        if published.counts_norms:
            macs += norm_macs(request)
    except Exception as error:
        return Row(published, None, None, time.perf_counter() - start, f"{type(error).__name__}: {str(error)[:100]}")
    return Row(published, card.parameters, macs / 1e9, seconds)


def as_table(rows: list[Row]) -> str:
    agreeing = [row for row in rows if row.agrees]
    longest = max(rows, key=lambda row: row.seconds)
    text = [
        f"{len(agreeing)} of {len(rows)} models agree. A trace took {longest.seconds:.1f} s at most "
        f"({longest.published.name}). The others:",
        "",
        "| model | parameters published | counted | billions of multiply-adds published | counted | reason |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for row in rows:
        if not row.agrees:
            parameters = "" if row.parameters is None else f"{row.parameters:,}"
            macs = "" if row.giga_macs is None else f"{row.giga_macs:.3f}"
            published = row.published
            text.append(
                f"| {published.name} at {published.image_size} | {published.parameters:,.0f} | {parameters} | "
                f"{published.giga_macs} | {macs} | {row.reason} |"
            )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", type=Path, help="table of timm's inference benchmark")
    parser.add_argument("--only", nargs="*", default=[], help="names with their library in front")
    parser.add_argument("--write", type=Path, help="a document with the table's markers")
    options = parser.parse_args()
    published = [*of_torchvision(), *(of_timm(options.timm) if options.timm else ())]
    if options.only:
        published = [row for row in published if row.name in options.only]
    table = as_table([counted(row) for row in published])
    print(table)
    if options.write:
        write_between(options.write, "published counts", f"\n{table}\n")


if __name__ == "__main__":
    main()
