"""Works out the FLOP/s of a run against what its devices can do, and its energy per image.

Three rates of a device, in FLOP/s:

    achieved     FLOPs of the model's training per image x images/s, per rank
    of matmul    large matrix products, measured on this device after training
    peak         published for this type of GPU; achieved / peak is MFU (model FLOPs utilisation)

The energy per image of a run is that of all ranks' devices, each device once, over the images of all ranks.

Published rates are those of GPUs by the name that the driver reports; MFU is a share of them. They are dense;
datasheets first give those with structured sparsity, which are twice as high. They are those of tensor cores (AMD:
matrix cores) where these know the arithmetic, with sums in fp32, as PyTorch adds. NVIDIA's fp32 rate is that of the
ordinary cores, for its tensor cores know no fp32; PyTorch computes fp32 products in tf32 where this is allowed. An
MI250 or MI250X is two GPUs to PyTorch, so each has half of what its data sheet gives. The figures have been checked
against arithmetic (multiprocessors x FLOP per clock x clock, within 1 %), but not yet against the documents named as
their source: check those before you publish an MFU.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitscale.analysis.runs.figures import RunFigures
from vitscale.analysis.runs.steps import LIGHT
from vitscale.errors import VitscaleError
from vitscale.store.lines import Steps
from vitscale.store.records import EnergyReading, RankRecord, ResourcesLine
from vitscale.store.results import Run
from vitscale.trial.model_cost import has_formula, training_flops
from vitscale.trial.trial import Precision, Trial


@dataclass(frozen=True)
class Peak:
    """The published rate of one dtype on one type of GPU."""

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
class _Gpu:
    """The published rates of one type of GPU."""

    name: str
    """Its common name."""
    name_pattern: str
    """Regular expression for whole names, without "NVIDIA", which older drivers leave out, or "AMD"."""
    teraflops_by_dtype: Mapping[str, float]
    source: str


def _teraflops_by_dtype(half: float, tf32: float | None, fp32: float, *, bf16: bool = True) -> dict[str, float]:
    """Return dtype -> TFLOP/s. bf16 and fp16 run at one rate, `half`; the first tensor cores have no bf16 and tf32."""
    rates = {"fp16": half, "fp32": fp32}
    if bf16:
        rates["bf16"] = half
    if tf32 is not None:
        rates["tf32"] = tf32
    return rates


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, table 2"
_AMPERE_GAMING = "NVIDIA Ampere GA102 GPU Architecture whitepaper v2.1, appendix A"
_COMPUTED = "NVIDIA chip, its multiprocessors times its clock: no datasheet was read for this table"
_ADA_GAMING = "NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A"
_ADA_PROFESSIONAL = "NVIDIA Ada Lovelace Professional GPU Architecture whitepaper v1.1"
_BLACKWELL_GAMING = "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1, appendix A"
_BLACKWELL = "NVIDIA Blackwell datasheet, individual GPU specifications"
_P100 = "NVIDIA Tesla P100 datasheet (2016); it has no tensor cores, and adds fp16 up in fp16"
_V100 = "NVIDIA V100 datasheet (2020)"
_MI350 = "AMD Instinct MI350 series data sheets; unrounded by the chip's compute units and clock"
_MI200 = "AMD Instinct MI200 series data sheet, half of its figures"

_GPUS = (
    # Data centre, newest first. The H100 on a PCIe card, the NVL and the SXM module are three GPUs of different speed.
    _Gpu("GB200", r"GB200", _teraflops_by_dtype(2500, 1250, 80), _BLACKWELL),
    _Gpu(
        "B300",
        r"B300 SXM6 AC",
        _teraflops_by_dtype(2250, 1100, 75),
        "NVIDIA HGX B300 specification, an eighth of it, as a cloud provider gives it; a GB300's GPU is faster",
    ),
    _Gpu("B200", r"B200", _teraflops_by_dtype(2250, 1100, 75), _BLACKWELL),
    _Gpu("H200 NVL", r"H200 NVL", _teraflops_by_dtype(835.5, 417.5, 60), "NVIDIA H200 datasheet"),
    _Gpu(
        "H200 SXM",
        r"H200",
        _teraflops_by_dtype(989.4, 494.7, 66.9),
        "NVIDIA H200 datasheet; unrounded as for the H100 SXM",
    ),
    _Gpu(
        "GH200",
        r"GH200 (480GB|144G HBM3e)",
        _teraflops_by_dtype(989.4, 494.7, 66.9),
        "NVIDIA GH200 datasheet; as the H100 SXM",
    ),
    _Gpu("H100 NVL", r"H100 NVL", _teraflops_by_dtype(835.5, 417.5, 60), "NVIDIA H100 datasheet"),
    _Gpu("H100 PCIe", r"H[18]00 PCIe", _teraflops_by_dtype(756, 378, 51.2), _HOPPER),
    _Gpu("H100 SXM", r"H100 80GB HBM3|H800", _teraflops_by_dtype(989.4, 494.7, 66.9), _HOPPER),
    # Made for export, with slower links than the H100 and A100, or (H20) fewer and slower tensor cores.
    _Gpu("H20", r"H20", _teraflops_by_dtype(148, 74, 44), "NVIDIA H20 specification, as its sellers give it"),
    _Gpu("L40S", r"L40S", _teraflops_by_dtype(362.05, 183, 91.6), "NVIDIA L40S datasheet"),
    _Gpu("L40", r"L40", _teraflops_by_dtype(181.05, 90.5, 90.5), "NVIDIA L40 datasheet"),
    _Gpu("L20", r"L20", _teraflops_by_dtype(119.5, 59.8, 59.8), "NVIDIA L20 specification, as its sellers give it"),
    _Gpu("L4", r"L4", _teraflops_by_dtype(121, 60, 30.3), "NVIDIA L4 datasheet"),
    _Gpu(
        "A100",
        r"A[18]00-(SXM4|PCIE)-(40|80)GB|A[18]00 80GB PCIe|A100-SXM-(40|80)GB",
        _teraflops_by_dtype(312, 156, 19.5),
        "NVIDIA A100 datasheet",
    ),
    _Gpu("A40", r"A40", _teraflops_by_dtype(149.7, 74.8, 37.4), "NVIDIA A40 datasheet"),
    _Gpu("A30", r"A30", _teraflops_by_dtype(165, 82, 10.3), "NVIDIA A30 datasheet"),
    _Gpu("A10", r"A10", _teraflops_by_dtype(125, 62.5, 31.2), "NVIDIA A10 datasheet"),
    _Gpu("A10G", r"A10G", _teraflops_by_dtype(70, 35, 35), _COMPUTED),
    _Gpu("T4", r"(Tesla )?T4", _teraflops_by_dtype(65, None, 8.1, bf16=False), "NVIDIA T4 datasheet"),
    _Gpu("V100S PCIe", r"Tesla V100S-PCIE-32GB", _teraflops_by_dtype(130, None, 16.4, bf16=False), _V100),
    _Gpu("V100 PCIe", r"Tesla V100-PCIE-(16|32)GB", _teraflops_by_dtype(112, None, 14, bf16=False), _V100),
    _Gpu("V100 SXM2", r"Tesla V100-SXM2-(16|32)GB", _teraflops_by_dtype(125, None, 15.7, bf16=False), _V100),
    _Gpu("P100 SXM2", r"Tesla P100-SXM2-16GB", _teraflops_by_dtype(21.2, None, 10.6, bf16=False), _P100),
    _Gpu("P100 PCIe", r"Tesla P100-PCIE-(12|16)GB", _teraflops_by_dtype(18.7, None, 9.3, bf16=False), _P100),
    _Gpu("K80", r"Tesla K80", {"fp32": 2.8}, "NVIDIA Tesla K80 board specification: one of its two GPUs, base clock"),
    # Workstations and gaming. GeForce tensor cores add up in fp32 at half the rate their datasheets lead with.
    _Gpu(
        "RTX PRO 6000 Blackwell Workstation",
        r"RTX PRO 6000 Blackwell Workstation Edition",
        _teraflops_by_dtype(503.8, 251.9, 126),
        "NVIDIA RTX PRO Blackwell specification at a boost clock of 2,617 MHz, as tables of GPUs give it",
    ),
    _Gpu("RTX 6000 Ada", r"RTX 6000 Ada Generation", _teraflops_by_dtype(364.2, 182.1, 91.1), _ADA_PROFESSIONAL),
    _Gpu("RTX A6000", r"RTX A6000", _teraflops_by_dtype(154.8, 77.4, 38.7), _AMPERE_GAMING),
    _Gpu("RTX A5000", r"RTX A5000", _teraflops_by_dtype(111.1, 55.5, 27.8), _COMPUTED),
    _Gpu(
        "Quadro RTX 6000",
        r"Quadro RTX [68]000|TITAN RTX",
        _teraflops_by_dtype(130.5, None, 16.3, bf16=False),
        _COMPUTED,
    ),
    _Gpu("RTX 5090", r"GeForce RTX 5090", _teraflops_by_dtype(209.5, 104.8, 104.8), _BLACKWELL_GAMING),
    _Gpu("RTX 5080", r"GeForce RTX 5080", _teraflops_by_dtype(112.6, 56.3, 56.3), _BLACKWELL_GAMING),
    _Gpu("RTX 4090", r"GeForce RTX 4090", _teraflops_by_dtype(165.2, 82.6, 82.6), _ADA_GAMING),
    _Gpu("RTX 4080", r"GeForce RTX 4080", _teraflops_by_dtype(97.5, 48.7, 48.7), _ADA_GAMING),
    _Gpu("RTX 3090 Ti", r"GeForce RTX 3090 Ti", _teraflops_by_dtype(80, 40, 40), _ADA_GAMING),
    _Gpu("RTX 3090", r"GeForce RTX 3090", _teraflops_by_dtype(71, 35.6, 35.6), _AMPERE_GAMING),
    _Gpu("RTX 3080", r"GeForce RTX 3080", _teraflops_by_dtype(59.5, 29.8, 29.8), _AMPERE_GAMING),
    _Gpu("RTX 3070", r"GeForce RTX 3070", _teraflops_by_dtype(40.6, 20.3, 20.3), _AMPERE_GAMING),
    # AMD's, newest first. "VF" is a whole GPU in a virtual machine.
    _Gpu("MI355X", r"Instinct MI355X( VF)?", _teraflops_by_dtype(2516.6, None, 157.3), _MI350),
    _Gpu("MI350X", r"Instinct MI350X( VF)?", _teraflops_by_dtype(2306.9, None, 144.2), _MI350),
    _Gpu(
        "MI325X",
        r"Instinct MI325X( VF)?",
        _teraflops_by_dtype(1307.4, 653.7, 163.4),
        "AMD Instinct MI325X data sheet",
    ),
    _Gpu(
        "MI300X",
        r"Instinct MI300X( VF)?",
        _teraflops_by_dtype(1307.4, 653.7, 163.4),
        "AMD Instinct MI300X data sheet",
    ),
    _Gpu("MI300A", r"Instinct MI300A", _teraflops_by_dtype(980.6, 490.3, 122.6), "AMD Instinct MI300A data sheet"),
    _Gpu("MI250X (one of its two dies)", r"Instinct MI250X", _teraflops_by_dtype(191.5, None, 47.9), _MI200),
    _Gpu("MI250 (one of its two dies)", r"Instinct MI250", _teraflops_by_dtype(181, None, 45.3), _MI200),
    _Gpu("MI210", r"Instinct MI210", _teraflops_by_dtype(181, None, 45.3), "AMD Instinct MI210 brochure"),
    _Gpu(
        "MI100",
        r"Instinct MI100",
        {"fp16": 184.6, "bf16": 92.3, "fp32": 46.1},
        "AMD Instinct MI100 brochure (2020); bf16 runs at half the rate of fp16",
    ),
)
_NAMES_OF_SEVERAL = {"AMD Instinct MI250X / MI250": "the driver's name stands for two types of GPU, of unlike speed"}
"""Whole names that drivers give to several types of GPU -> why no peak is known."""


def peak(device_type: str, device_name: str, dtype: str) -> Peak | str:
    """Return the published peak of a device in bf16, fp16, tf32 or fp32; or, as a text, why none is known.

    A name counts only as a whole: "NVIDIA GeForce RTX 4090 D", a laptop's GPU and a slice of a GPU (MIG) are slower
    than what their names begin with.
    """
    if device_type != "cuda":
        return "a CPU has no published peak"
    if device_name in _NAMES_OF_SEVERAL:
        return f"no published peak of {device_name!r} is known: {_NAMES_OF_SEVERAL[device_name]}"
    gpu = _find_gpu(device_name)
    if gpu is None:
        return f"no published peak of {device_name!r} is known here"
    if dtype not in gpu.teraflops_by_dtype:
        units = "matrix cores" if gpu.source.startswith("AMD ") else "tensor cores"
        return f"the {units} of the {gpu.name} do not compute in {dtype}"
    return Peak(gpu.name, dtype, flops_per_second=gpu.teraflops_by_dtype[dtype] * 1e12, source=gpu.source)


def _find_gpu(device_name: str) -> _Gpu | None:
    """Return the type of GPU with this whole name, such as "NVIDIA A100-SXM4-80GB"; None where it is not listed."""
    bare_name = device_name.removeprefix("NVIDIA ").removeprefix("AMD ").strip()
    for gpu in _GPUS:
        if re.fullmatch(gpu.name_pattern, bare_name):
            return gpu
    return None


DTYPES: Mapping[Precision, str] = {"fp32": "fp32", "bf16": "bf16", "bf16-params": "bf16", "fp16": "fp16"}
"""Precision of a training -> dtype of its matrix products."""


FlopsSource = Literal["by formula", "traced", "told", "unknown"]
"""How the FLOPs of a model are known: "traced" by counting its operators; "told" by a user's own script; "unknown"
where an older record of a script has them without saying how."""


class ImageFlops(NamedTuple):
    """FLOPs of training one image, forward and backward (1 MAC = 2 FLOP), and how they are known."""

    flops: int
    source: FlopsSource


@dataclass(frozen=True)
class Compute:
    """Rates of one run in the model's own FLOPs, 3 x forward (1 MAC = 2 FLOP): what is recomputed counts once."""

    image_flops: ImageFlops | None
    """What the rates rest on; None where it is unknown."""
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
    def peak_name(self) -> str | None:
        """The published peak that MFU is a share of; None where none is known."""
        return self.peak.name if self.peak is not None else None

    @property
    def share_of_matmul(self) -> float | None:
        """Achieved rate / measured rate."""
        return _ratio(self.achieved_flops_per_second, self.matmul_flops_per_second)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: achieved / published peak (Chowdhery et al., "PaLM", 2022, appendix B)."""
        peak_rate = self.peak.flops_per_second if self.peak is not None else None
        return _ratio(self.achieved_flops_per_second, peak_rate)


def compute(run: Run, figures: RunFigures) -> Compute:
    """Work out the rates of one run."""
    trial = run.header.trial
    image_flops = _flops_of_run(trial, figures)  # a text: why they are unknown
    published_peak = _peak_of_run(run)  # a text: why it is unknown
    reasons: list[str] = []
    achieved = None
    if isinstance(image_flops, str):
        reasons.append(image_flops)
    elif figures.images_per_second is None:
        reasons.append("no light step was timed")
    else:
        achieved = image_flops.flops * figures.images_per_second / trial.world.size
    if isinstance(published_peak, str):
        reasons.append(published_peak)
    matmul_rates = {rank.rank: rank.matmul.flops_per_second for rank in run.ranks if rank.matmul is not None}
    is_measured_on_all_ranks = bool(matmul_rates) and len(matmul_rates) == trial.world.size
    shares_of_matmul: Mapping[int, float] = {}
    # How much of the model each stage computes is not known here, and it is seldom an equal part.
    if achieved is not None and trial.layout.pipeline <= 1:
        shares_of_matmul = _shares_of_matmul(run, achieved, matmul_rates)
    return Compute(
        image_flops=None if isinstance(image_flops, str) else image_flops,
        achieved_flops_per_second=achieved,
        matmul_flops_per_second=statistics.fmean(matmul_rates.values()) if is_measured_on_all_ranks else None,
        peak=published_peak if isinstance(published_peak, Peak) else None,
        reason=reasons[0] if reasons else "",
        shares_of_matmul=shares_of_matmul,
    )


def _flops_of_run(trial: Trial, figures: RunFigures) -> ImageFlops | str:
    """Return the training FLOPs of one image, as a script recorded them, else of its model; or why they are unknown."""
    model = figures.model
    if model is not None and model.flops_per_image is not None:
        return ImageFlops(model.flops_per_image, model.flops_source or "unknown")
    flops = flops_per_image(trial)
    if isinstance(flops, str):
        return flops
    return ImageFlops(flops, "by formula" if has_formula(trial.model) else "traced")


def flops_per_image(trial: Trial) -> int | str:
    """Return the training FLOPs of one image; or, as a text, why they are unknown."""
    try:
        flops = training_flops(trial.model, images=trial.train.micro_batch)
    except ValueError:
        return "the model's shape was not recorded"
    except VitscaleError as error:  # a Hugging Face configuration that is not here any more
        return f"the model's FLOPs are unknown here: {error}"
    if flops is not None:
        return flops
    if trial.train.script is not None:
        return "a script tells the FLOPs of its model, if at all, as it runs: probe.describe(flops_per_image=...)"
    return "the FLOPs of this model are not known here: it has no card (`vitscale plan` on the machine that trains)"


class _Device(NamedTuple):
    """What a rank computed on."""

    type: str
    """cpu or cuda."""
    name: str
    dtype: str
    """Dtype of its matrix products."""


def _peak_of_run(run: Run) -> Peak | str:
    """Return the peak of the devices if they are all of one type; else, as a text, why it is unknown."""
    precision = run.header.trial.train.precision
    devices = []
    for rank in run.ranks:
        if rank.start is not None:
            device = rank.start.environment.device
            dtype = rank.matmul.dtype if rank.matmul else DTYPES[precision]
            devices.append(_Device(device.type, device.name, dtype))
    if not devices:
        return "no rank recorded its device"
    different_devices = dict.fromkeys(devices)
    if len(different_devices) > 1:
        different_names = dict.fromkeys(device.name for device in different_devices)
        return f"the ranks computed on different devices: {', '.join(different_names)}"
    (only_device,) = different_devices
    return peak(only_device.type, only_device.name, only_device.dtype)


def _shares_of_matmul(run: Run, mean_achieved: float, matmul_rates: Mapping[int, float]) -> dict[int, float]:
    """Return rank -> its achieved rate / the rate of its own device, for ranks that measured it.

    Args:
        run: the record.
        mean_achieved: the achieved rate, mean over ranks; a rank with more images per step achieves more.
        matmul_rates: rank -> the measured rate of its device.
    """
    images_by_rank = {rank.rank: _timed_images(rank) for rank in run.ranks}
    mean_images = statistics.fmean(images_by_rank.values())
    if mean_images == 0:
        return {}
    shares = {}
    for rank, matmul_rate in matmul_rates.items():
        shares[rank] = mean_achieved * images_by_rank[rank] / mean_images / matmul_rate
    return shares


def _timed_images(rank: RankRecord) -> int:
    """Return the images of the rank's light steps (run without the profiler) after marked warm-up."""
    steps = Steps.of(rank.steps)
    return sum(steps.images[(steps.window == LIGHT) & ~steps.warmup].tolist())


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio of two figures; None where one is unknown."""
    if numerator is None or denominator is None:
        return None
    return numerator / denominator


NOT_RECORDED = "this run recorded no energy"
SHORTEST_SECONDS = 10.0
"""Shortest stretch that counts. NVML moves its counter every 20 to 100 ms: in such a stretch each end may be off by 1 %
at most."""
_WHOLE_HOST_SOURCE = "RAPL"
"""A reading whose source begins with this covers all ranks of its host."""


@dataclass(frozen=True)
class Energy:
    """The energy of one run per image; `reason` says why it is unknown."""

    joules_per_image: float | None
    source: str | None
    reason: str


class _EnergyUnknown(Exception):
    """Raised, with the reason, where the energy of a run is unknown."""


def energy_per_image(run: Run, spans: Mapping[int, range]) -> Energy:
    """Return joules of timed steps on all ranks / images of these steps. Ranks that share a model take the same images.

    Where one rank's energy is unknown, so is the run's.

    Args:
        run: the record.
        spans: epochs whose resources cover timed steps alone, and these steps. Those too short are left out.
    """
    try:
        return _energy_if_known(run, spans)
    except _EnergyUnknown as unknown:
        return Energy(joules_per_image=None, source=None, reason=str(unknown))


def _energy_if_known(run: Run, spans: Mapping[int, range]) -> Energy:
    """Return the energy of a run, at least 10 s of it. Arguments are those of `energy_per_image`.

    Raises:
        _EnergyUnknown: with the reason.
    """
    if len(run.ranks) < run.header.trial.world.size:
        raise _EnergyUnknown("not every rank left a record")
    lines = list(itertools.chain.from_iterable(rank.resources for rank in run.ranks))
    if all(line.energy is None for line in lines):
        raise _EnergyUnknown(NOT_RECORDED)
    seconds_by_epoch = {epoch: _shortest_seconds(lines, epoch) for epoch in spans}
    long_epochs = [epoch for epoch in sorted(spans) if seconds_by_epoch[epoch] >= SHORTEST_SECONDS]
    if not long_epochs:
        for epoch in sorted({line.epoch for line in lines}):
            # Raises the reason why the epoch's energy is unknown, which says more than that no epoch is long enough.
            _joules_of_epoch(run, epoch)
        raise _EnergyUnknown(_too_short_reason(seconds_by_epoch))
    joules = [_joules_of_epoch(run, epoch) for epoch in long_epochs]
    images = _images_of_spans(run, {epoch: spans[epoch] for epoch in long_epochs})
    if images == 0:
        raise _EnergyUnknown(NOT_RECORDED)
    sources: dict[str, None] = {}
    for line in lines:
        if line.epoch in long_epochs and line.energy and line.energy.source:
            sources[line.energy.source] = None
    different_images = images / run.header.trial.parallel.ranks_per_model
    return Energy(joules_per_image=sum(joules) / different_images, source="; ".join(sources), reason="")


def _shortest_seconds(lines: Sequence[ResourcesLine], epoch: int) -> float:
    """Return the seconds of an epoch's shortest line: those that it covers on all ranks."""
    return min(line.seconds for line in lines if line.epoch == epoch)


def _too_short_reason(seconds_by_epoch: Mapping[int, float]) -> str:
    """Return in words that no stretch of timed steps is long enough, and how long the longest is."""
    longest = "there is none"
    if seconds_by_epoch:
        longest = f"the longest took {max(seconds_by_epoch.values()):.2g} s"
    return f"it takes a stretch of timed steps of {SHORTEST_SECONDS:g} s, and {longest}"


def _images_of_spans(run: Run, spans: Mapping[int, range]) -> int:
    """Return the number of images in these steps of each epoch, all ranks together.

    Raises:
        _EnergyUnknown: a rank lacks one of the steps.
    """
    images = 0
    for rank in run.ranks:
        steps = Steps.of(rank.steps)
        for epoch, span in spans.items():
            images_of_span = steps.images[(steps.step >= span.start) & (steps.step < span.stop)]
            if len(images_of_span) != len(span):
                raise _EnergyUnknown(f"not all images of epoch {epoch} were recorded")
            images += sum(images_of_span.tolist())
    return images


class _RankReading(NamedTuple):
    """The energy that one rank read in an epoch."""

    rank: int
    host: str
    reading: EnergyReading | None
    """None where it recorded none."""

    @property
    def joules(self) -> float | None:
        return self.reading.joules if self.reading is not None else None

    @property
    def devices(self) -> set[str]:
        return set(self.reading.devices) if self.reading is not None else set()

    @property
    def covers_host(self) -> bool:
        """Whether it covers all ranks of its host."""
        source = self.reading.source if self.reading is not None else None
        return self.joules is not None and source is not None and source.startswith(_WHOLE_HOST_SOURCE)

    @property
    def reason(self) -> str:
        """Why there are no joules."""
        reason = self.reading.reason if self.reading is not None else None
        return reason or NOT_RECORDED


def _joules_of_epoch(run: Run, epoch: int) -> float:
    """Return the joules of one epoch, summed over the ranks' devices.

    Raises:
        _EnergyUnknown: a rank's energy is unknown, and no other rank's covers it; or devices overlap in part.
    """
    readings = [_reading_of_rank(rank, epoch) for rank in sorted(run.ranks, key=lambda rank: rank.rank)]
    joules = _joules_of_devices(readings)
    covered_hosts = {reading.host for reading in readings if reading.covers_host}
    for reading in readings:
        if reading.joules is None and reading.host not in covered_hosts:
            raise _EnergyUnknown(reading.reason)
    return joules


def _reading_of_rank(rank: RankRecord, epoch: int) -> _RankReading:
    """Return the reading in the rank's first line of an epoch."""
    host = rank.start.environment.host if rank.start else ""
    for line in rank.resources:
        if line.epoch == epoch:
            return _RankReading(rank.rank, host, line.energy)
    return _RankReading(rank.rank, host, reading=None)


def _joules_of_devices(readings: Sequence[_RankReading]) -> float:
    """Return the sum of the known joules, each device once: ranks that share a device each read the whole of it.

    Raises:
        _EnergyUnknown: a rank read some devices of another rank, and others: they cannot be told apart.
    """
    counted_devices: set[str] = set()
    joules = 0.0
    for reading in readings:
        if reading.joules is None:
            continue
        is_counted = bool(reading.devices) and reading.devices <= counted_devices
        if is_counted:
            continue
        if reading.devices & counted_devices:
            raise _EnergyUnknown(f"rank {reading.rank} measured some of the devices of another rank, and others")
        counted_devices |= reading.devices
        joules += reading.joules
    return joules
