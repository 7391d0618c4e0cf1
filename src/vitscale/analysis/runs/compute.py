"""How much of its arithmetic a device gives to training: the rate achieved, measured and published."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from vitscale.analysis.peaks import Peak, peak
from vitscale.analysis.runs.figures import RunFigures
from vitscale.errors import VitscaleError
from vitscale.store.records import RankRecord
from vitscale.store.results import Run
from vitscale.trial.model_spec import training_flops
from vitscale.trial.trial import Precision, Trial

_DTYPES: Mapping[Precision, str] = {"fp32": "fp32", "bf16": "bf16", "bf16-params": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Compute:
    """Rates of one run in the model's own FLOPs, 3 x forward (1 MAC = 2 FLOP): nothing computed twice counts twice."""

    achieved_flops_per_second: float | None
    """Per rank: FLOPs of an image x images/s of all ranks / ranks."""
    matmul_flops_per_second: float | None
    """Mean over ranks."""
    peak: Peak | None
    reason: str
    """Why MFU is unknown; empty where it is known."""
    shares_of_matmul: Mapping[int, float]
    """Rank to its achieved rate / the rate of its own device."""

    @property
    def share_of_matmul(self) -> float | None:
        """Achieved / measured."""
        return _ratio(self.achieved_flops_per_second, self.matmul_flops_per_second)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: achieved / published peak (Chowdhery et al., "PaLM", 2022, appendix B)."""
        return _ratio(self.achieved_flops_per_second, self.peak.flops_per_second if self.peak else None)


def compute(run: Run, figures: RunFigures) -> Compute:
    """Works out the rates of one run."""
    trial = run.header.trial
    flops = flops_per_image(trial)
    rates = {rank.rank: rank.matmul.flops_per_second for rank in run.ranks if rank.matmul is not None}
    everybody = len(rates) == trial.world.size
    published = _peak(run)
    reasons = [published] if isinstance(published, str) else []
    achieved = None
    if isinstance(flops, str):
        reasons.insert(0, flops)
    elif figures.images_per_second is None:
        reasons.insert(0, "no light step was timed")
    else:
        achieved = flops * figures.images_per_second / trial.world.size
    return Compute(
        achieved_flops_per_second=achieved,
        matmul_flops_per_second=statistics.fmean(rates.values()) if everybody and rates else None,
        peak=published if isinstance(published, Peak) else None,
        reason=reasons[0] if reasons else "",
        shares_of_matmul={} if achieved is None else _by_rank(run, achieved, rates),
    )


def flops_per_image(trial: Trial) -> int | str:
    """Training FLOPs of one image, or why they are unknown."""
    if trial.model.factory is not None:
        return "the FLOPs of a model made by a factory are unknown"
    try:
        flops = training_flops(trial.model)
    except ValueError:
        return "the model's shape was not recorded"
    except VitscaleError as error:  # a Hugging Face configuration that is not here any more
        return f"the model's FLOPs are unknown here: {error}"
    return "the FLOPs of this architecture are not known here" if flops is None else flops


def _peak(run: Run) -> Peak | str:
    """The peak of the devices, if they are all of one type."""
    devices: dict[tuple[str, str, str], None] = {}
    for rank in run.ranks:
        if rank.start is not None:
            device = rank.start.environment.device
            dtype = rank.matmul.dtype if rank.matmul else _DTYPES[run.header.trial.train.precision]
            devices[device.type, device.name, dtype] = None
    if not devices:
        return "no rank recorded its device"
    if len(devices) > 1:
        return f"the ranks computed on different devices: {', '.join(dict.fromkeys(name for _, name, _ in devices))}"
    ((device_type, name, dtype),) = devices
    return peak(device_type, name, dtype)


def _by_rank(run: Run, mean_achieved: float, rates: Mapping[int, float]) -> dict[int, float]:
    images = {rank.rank: _timed_images(rank) for rank in run.ranks}
    mean_images = statistics.fmean(images.values())
    if mean_images == 0:
        return {}
    return {rank: mean_achieved * images[rank] / mean_images / rate for rank, rate in rates.items() if rank in images}


def _timed_images(rank: RankRecord) -> int:
    return sum(line.images for line in rank.steps if line.window == "light" and not line.warmup)


def _ratio(value: float | None, whole: float | None) -> float | None:
    return None if value is None or whole is None else value / whole
