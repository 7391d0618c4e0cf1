"""How much of its arithmetic a device gives to training: the rates achieved, measured and published.

The energy per image of a run is that of all ranks' devices, each device once, over the images of all ranks.

Published rates are those of NVIDIA GPUs by the name that the driver reports; MFU is a share of them. They are dense;
datasheets first give those with structured sparsity, which are twice as high. They are those of tensor cores where
these know the arithmetic, with sums in fp32, as PyTorch adds. The fp32 rate is that of the ordinary cores. PyTorch
computes fp32 products in tf32 where it is told to be faster. The figures have been checked against arithmetic
(multiprocessors x FLOP per clock x clock, within 1 %), but not yet against the documents named as their source: check
those before you publish an MFU.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.steps import LIGHT
from vitscale.errors import VitscaleError
from vitscale.store.lines import Steps
from vitscale.store.records import RankRecord
from vitscale.store.results import Run
from vitscale.trial.model_cost import training_flops
from vitscale.trial.trial import Precision, Trial


@dataclass(frozen=True)
class Peak:
    """What one arithmetic can reach on one type of GPU."""

    gpu: str
    """The GPU's common name."""
    dtype: str
    flops_per_second: float
    source: str

    @property
    def name(self) -> str:
        """The name in a report: "H100 SXM, bf16 dense, 989.4 TFLOP/s"."""
        return f"{self.gpu}, {self.dtype} dense, {self.flops_per_second / 1e12:,.6g} TFLOP/s"


@dataclass(frozen=True)
class _Type:
    gpu: str
    names: str
    """Regular expression for whole names, without "NVIDIA", which older drivers leave out."""
    teraflops: Mapping[str, float]
    source: str


def _half(teraflops: float, tf32: float | None, fp32: float, *, bf16: bool = True) -> dict[str, float]:
    """bf16 and fp16 run at one rate; the first tensor cores know neither bf16 nor tf32."""
    rates = {"fp16": teraflops, "fp32": fp32}
    return rates | ({"bf16": teraflops} if bf16 else {}) | ({"tf32": tf32} if tf32 is not None else {})


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, table 2"
_AMPERE_GAMING = "NVIDIA Ampere GA102 GPU Architecture whitepaper v2.1, appendix A"
_COMPUTED = "NVIDIA chip, its multiprocessors times its clock: no datasheet was read for this table"
_ADA_GAMING = "NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A"
_ADA_PROFESSIONAL = "NVIDIA Ada Lovelace Professional GPU Architecture whitepaper v1.1"
_BLACKWELL_GAMING = "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1, appendix A"
_BLACKWELL = "NVIDIA Blackwell datasheet, individual GPU specifications"
_P100 = "NVIDIA Tesla P100 datasheet (2016); it has no tensor cores, and adds fp16 up in fp16"
_V100 = "NVIDIA V100 datasheet (2020)"

_TYPES = (
    # Data centre, newest first. The H100 on a PCIe card, the NVL and the SXM module are three GPUs of different speed.
    _Type("GB200", r"GB200", _half(2500, 1250, 80), _BLACKWELL),
    _Type(
        "B300",
        r"B300 SXM6 AC",
        _half(2250, 1100, 75),
        "NVIDIA HGX B300 specification, an eighth of it, as a cloud provider gives it; a GB300's GPU is faster",
    ),
    _Type("B200", r"B200", _half(2250, 1100, 75), _BLACKWELL),
    _Type("H200 NVL", r"H200 NVL", _half(835.5, 417.5, 60), "NVIDIA H200 datasheet"),
    _Type("H200 SXM", r"H200", _half(989.4, 494.7, 66.9), "NVIDIA H200 datasheet; unrounded as for the H100 SXM"),
    _Type("GH200", r"GH200 (480GB|144G HBM3e)", _half(989.4, 494.7, 66.9), "NVIDIA GH200 datasheet; as the H100 SXM"),
    _Type("H100 NVL", r"H100 NVL", _half(835.5, 417.5, 60), "NVIDIA H100 datasheet"),
    _Type("H100 PCIe", r"H[18]00 PCIe", _half(756, 378, 51.2), _HOPPER),
    _Type("H100 SXM", r"H100 80GB HBM3|H800", _half(989.4, 494.7, 66.9), _HOPPER),
    # Made for export, with slower links than the H100 and A100, or (H20) fewer and slower tensor cores.
    _Type("H20", r"H20", _half(148, 74, 44), "NVIDIA H20 specification, as its sellers give it"),
    _Type("L40S", r"L40S", _half(362.05, 183, 91.6), "NVIDIA L40S datasheet"),
    _Type("L40", r"L40", _half(181.05, 90.5, 90.5), "NVIDIA L40 datasheet"),
    _Type("L20", r"L20", _half(119.5, 59.8, 59.8), "NVIDIA L20 specification, as its sellers give it"),
    _Type("L4", r"L4", _half(121, 60, 30.3), "NVIDIA L4 datasheet"),
    _Type(
        "A100",
        r"A[18]00-(SXM4|PCIE)-(40|80)GB|A[18]00 80GB PCIe|A100-SXM-(40|80)GB",
        _half(312, 156, 19.5),
        "NVIDIA A100 datasheet",
    ),
    _Type("A40", r"A40", _half(149.7, 74.8, 37.4), "NVIDIA A40 datasheet"),
    _Type("A30", r"A30", _half(165, 82, 10.3), "NVIDIA A30 datasheet"),
    _Type("A10", r"A10", _half(125, 62.5, 31.2), "NVIDIA A10 datasheet"),
    _Type("A10G", r"A10G", _half(70, 35, 35), _COMPUTED),
    _Type("T4", r"(Tesla )?T4", _half(65, None, 8.1, bf16=False), "NVIDIA T4 datasheet"),
    _Type("V100S PCIe", r"Tesla V100S-PCIE-32GB", _half(130, None, 16.4, bf16=False), _V100),
    _Type("V100 PCIe", r"Tesla V100-PCIE-(16|32)GB", _half(112, None, 14, bf16=False), _V100),
    _Type("V100 SXM2", r"Tesla V100-SXM2-(16|32)GB", _half(125, None, 15.7, bf16=False), _V100),
    _Type("P100 SXM2", r"Tesla P100-SXM2-16GB", _half(21.2, None, 10.6, bf16=False), _P100),
    _Type("P100 PCIe", r"Tesla P100-PCIE-(12|16)GB", _half(18.7, None, 9.3, bf16=False), _P100),
    _Type("K80", r"Tesla K80", {"fp32": 2.8}, "NVIDIA Tesla K80 board specification: one of its two GPUs, base clock"),
    # Workstations and gaming. GeForce tensor cores add up in fp32 at half the rate their datasheets lead with.
    _Type(
        "RTX PRO 6000 Blackwell Workstation",
        r"RTX PRO 6000 Blackwell Workstation Edition",
        _half(503.8, 251.9, 126),
        "NVIDIA RTX PRO Blackwell specification at a boost clock of 2,617 MHz, as tables of GPUs give it",
    ),
    _Type("RTX 6000 Ada", r"RTX 6000 Ada Generation", _half(364.2, 182.1, 91.1), _ADA_PROFESSIONAL),
    _Type("RTX A6000", r"RTX A6000", _half(154.8, 77.4, 38.7), _AMPERE_GAMING),
    _Type("RTX A5000", r"RTX A5000", _half(111.1, 55.5, 27.8), _COMPUTED),
    _Type("Quadro RTX 6000", r"Quadro RTX [68]000|TITAN RTX", _half(130.5, None, 16.3, bf16=False), _COMPUTED),
    _Type("RTX 5090", r"GeForce RTX 5090", _half(209.5, 104.8, 104.8), _BLACKWELL_GAMING),
    _Type("RTX 5080", r"GeForce RTX 5080", _half(112.6, 56.3, 56.3), _BLACKWELL_GAMING),
    _Type("RTX 4090", r"GeForce RTX 4090", _half(165.2, 82.6, 82.6), _ADA_GAMING),
    _Type("RTX 4080", r"GeForce RTX 4080", _half(97.5, 48.7, 48.7), _ADA_GAMING),
    _Type("RTX 3090 Ti", r"GeForce RTX 3090 Ti", _half(80, 40, 40), _ADA_GAMING),
    _Type("RTX 3090", r"GeForce RTX 3090", _half(71, 35.6, 35.6), _AMPERE_GAMING),
    _Type("RTX 3080", r"GeForce RTX 3080", _half(59.5, 29.8, 29.8), _AMPERE_GAMING),
    _Type("RTX 3070", r"GeForce RTX 3070", _half(40.6, 20.3, 20.3), _AMPERE_GAMING),
)


def peak(device_type: str, device_name: str, dtype: str) -> Peak | str:
    """The published peak of a device in bf16, fp16, tf32 or fp32; or why there is none to hold a rate against.

    A name counts only as a whole: "NVIDIA GeForce RTX 4090 D", a laptop's GPU and a slice of a GPU (MIG) are slower
    than what their names begin with.
    """
    if device_type != "cuda":
        return "a CPU has no published peak"
    bare = device_name.removeprefix("NVIDIA ").strip()
    known = next((gpu for gpu in _TYPES if re.fullmatch(gpu.names, bare)), None)
    if known is None:
        return f"no published peak of {device_name!r} is known here"
    if dtype not in known.teraflops:
        return f"the tensor cores of the {known.gpu} do not compute in {dtype}"
    return Peak(known.gpu, dtype, known.teraflops[dtype] * 1e12, known.source)


DTYPES: Mapping[Precision, str] = {"fp32": "fp32", "bf16": "bf16", "bf16-params": "bf16", "fp16": "fp16"}
"""Precision of a training -> dtype of its matrix products."""


@dataclass(frozen=True)
class Compute:
    """Rates of one run in the model's own FLOPs, 3 x forward (1 MAC = 2 FLOP): what is recomputed counts once."""

    achieved_flops_per_second: float | None
    """Per rank: FLOPs of an image x images/s of all ranks / ranks."""
    matmul_flops_per_second: float | None
    """Measured rate of the devices, mean over ranks."""
    peak: Peak | None
    reason: str
    """Why MFU is unknown; empty where it is known."""
    shares_of_matmul: Mapping[int, float]
    """Rank to its achieved rate / the rate of its own device; empty where ranks hold stages."""

    @property
    def share_of_matmul(self) -> float | None:
        """Achieved rate / measured rate."""
        return _ratio(self.achieved_flops_per_second, self.matmul_flops_per_second)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: achieved / published peak (Chowdhery et al., "PaLM", 2022, appendix B)."""
        return _ratio(self.achieved_flops_per_second, self.peak.flops_per_second if self.peak else None)


def compute(run: Run, figures: RunFigures) -> Compute:
    """Works out the rates of one run."""
    trial = run.header.trial
    told = figures.model.flops_per_image if figures.model is not None else None
    flops = flops_per_image(trial) if told is None else told
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
        # How much of the model each stage computes is not known in this room, and it is seldom an equal part.
        shares_of_matmul={} if achieved is None or trial.layout.pipeline > 1 else _by_rank(run, achieved, rates),
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
    if flops is None and trial.train.script is not None:
        return "a script tells the FLOPs of its model, if at all, as it runs: probe.describe(flops_per_image=...)"
    return "the FLOPs of this architecture are not known here" if flops is None else flops


def _peak(run: Run) -> Peak | str:
    """The peak of the devices, if they are all of one type."""
    devices: dict[tuple[str, str, str], None] = {}
    for rank in run.ranks:
        if rank.start is not None:
            device = rank.start.environment.device
            dtype = rank.matmul.dtype if rank.matmul else DTYPES[run.header.trial.train.precision]
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
    steps = Steps.of(rank.steps)
    return sum(steps.images[(steps.window == LIGHT) & ~steps.warmup].tolist())


def _ratio(value: float | None, whole: float | None) -> float | None:
    return None if value is None or whole is None else value / whole


NOT_RECORDED = "this run recorded no energy"
SHORTEST_SECONDS = 10.0
"""Shortest stretch that counts. NVML moves its counter every 20 to 100 ms: in such a stretch each end may be off by 1 %
at most."""
_WHOLE_HOST = "RAPL"
"""A reading whose source begins with this covers all ranks of its host."""


@dataclass(frozen=True)
class Energy:
    """What one run used per image; `reason` says why that is unknown."""

    joules_per_image: float | None
    source: str | None
    reason: str


def energy_per_image(run: Run, spans: Mapping[int, range]) -> Energy:
    """Joules of timed steps on all ranks / images of these steps. Ranks that share a model take the same images.

    Where one rank's energy is unknown, so is the run's.

    Args:
        run: the record.
        spans: epochs whose resources cover timed steps alone, and these steps. Those too short are left out.
    """
    if len(run.ranks) < run.header.trial.world.size:
        return Energy(None, None, "not every rank left a record")
    lines = [line for rank in run.ranks for line in rank.resources]
    if all(line.energy is None for line in lines):
        return Energy(None, None, NOT_RECORDED)
    seconds = {epoch: min(line.seconds for line in lines if line.epoch == epoch) for epoch in spans}
    long_enough = [epoch for epoch in sorted(spans) if seconds[epoch] >= SHORTEST_SECONDS]
    joules = [_of_epoch(run, epoch) for epoch in long_enough or sorted({line.epoch for line in lines})]
    if reason := next((unknown for unknown in joules if isinstance(unknown, str)), ""):
        return Energy(None, None, reason)
    if not long_enough:
        longest = f"the longest took {max(seconds.values()):.2g} s" if seconds else "there is none"
        return Energy(None, None, f"it takes a stretch of timed steps of {SHORTEST_SECONDS:g} s, and {longest}")
    images = 0
    for rank in run.ranks:
        for epoch in long_enough:
            steps, span = Steps.of(rank.steps), spans[epoch]
            own = steps.images[(steps.step >= span.start) & (steps.step < span.stop)]
            if len(own) != len(span):
                return Energy(None, None, f"not all images of epoch {epoch} were recorded")
            images += sum(own.tolist())
    if images == 0:
        return Energy(None, None, NOT_RECORDED)
    readings = [line.energy for line in lines if line.epoch in long_enough]
    sources = dict.fromkeys(reading.source for reading in readings if reading and reading.source)
    trained = images / run.header.trial.parallel.ranks_per_model
    return Energy(sum(each for each in joules if isinstance(each, float)) / trained, "; ".join(sources), "")


def _of_epoch(run: Run, epoch: int) -> float | str:
    """The joules of one epoch, summed over the ranks' devices, or why they are unknown."""
    counted: set[str] = set()
    covered_hosts: set[str] = set()
    without: list[tuple[str, str]] = []
    total = 0.0
    for rank in sorted(run.ranks, key=lambda rank: rank.rank):
        reading = next((line.energy for line in rank.resources if line.epoch == epoch), None)
        host = rank.start.environment.host if rank.start else ""
        if reading is None or reading.joules is None:
            without.append((host, (reading.reason if reading else None) or NOT_RECORDED))
            continue
        devices = set(reading.devices)
        if reading.source and reading.source.startswith(_WHOLE_HOST):
            covered_hosts.add(host)
        if devices and devices <= counted:
            continue  # ranks that share a device each read the whole of it
        if devices & counted:
            return f"rank {rank.rank} measured some of the devices of another rank, and others"
        counted |= devices
        total += reading.joules
    return next((reason for host, reason in without if host not in covered_hosts), total)
