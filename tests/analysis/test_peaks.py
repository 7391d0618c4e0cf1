"""Published peaks: against the arithmetic of the chips, and by the whole name that a driver reports."""

from __future__ import annotations

import pytest

from vitscale.analysis.runs.compute import Peak, peak


def of(name: str, dtype: str = "bf16") -> Peak:
    found = peak("cuda", name, dtype)
    assert isinstance(found, Peak), found
    return found


# Multiprocessors, dense fp16 FLOP per multiprocessor and clock with sums in fp32, and the boost clock in GHz under
# which NVIDIA states tensor rates. Their product must come to the published figure.
CHIPS = {
    "NVIDIA B200": (148, 8192, 1.86),
    "NVIDIA B300 SXM6 AC": (148, 8192, 1.86),
    "NVIDIA GB200": (152, 8192, 2.0),
    "NVIDIA H200": (132, 4096, 1.83),
    "NVIDIA H200 NVL": (132, 4096, 1.545),
    "NVIDIA GH200 480GB": (132, 4096, 1.83),
    "NVIDIA H100 80GB HBM3": (132, 4096, 1.83),
    "NVIDIA H100 PCIe": (114, 4096, 1.62),
    "NVIDIA H100 NVL": (132, 4096, 1.545),
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.41),
    "NVIDIA A100-PCIE-40GB": (108, 2048, 1.41),
    "NVIDIA A100 80GB PCIe": (108, 2048, 1.41),
    "NVIDIA H800": (132, 4096, 1.83),
    "NVIDIA H800 PCIe": (114, 4096, 1.62),
    "NVIDIA A800-SXM4-80GB": (108, 2048, 1.41),
    "NVIDIA H20": (78, 1024, 1.853),
    "NVIDIA A10G": (80, 512, 1.71),
    "NVIDIA RTX A5000": (64, 1024, 1.695),
    "Quadro RTX 6000": (72, 1024, 1.77),
    "Quadro RTX 8000": (72, 1024, 1.77),
    "NVIDIA TITAN RTX": (72, 1024, 1.77),
    "NVIDIA A30": (56, 2048, 1.44),
    "NVIDIA A40": (84, 1024, 1.74),
    "NVIDIA A10": (72, 1024, 1.695),
    "NVIDIA L4": (58, 1024, 2.04),
    "NVIDIA L20": (92, 512, 2.52),
    "NVIDIA L40": (142, 512, 2.49),
    "NVIDIA L40S": (142, 1024, 2.49),
    "Tesla T4": (40, 1024, 1.59),
    "Tesla V100-SXM2-16GB": (80, 1024, 1.53),
    "Tesla V100-PCIE-32GB": (80, 1024, 1.37),
    "Tesla V100S-PCIE-32GB": (80, 1024, 1.597),
    "NVIDIA RTX A6000": (84, 1024, 1.8),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (188, 1024, 2.617),
    "NVIDIA RTX 6000 Ada Generation": (142, 1024, 2.505),
    "NVIDIA GeForce RTX 3070": (46, 512, 1.725),
    "NVIDIA GeForce RTX 3080": (68, 512, 1.71),
    "NVIDIA GeForce RTX 3090": (82, 512, 1.695),
    "NVIDIA GeForce RTX 3090 Ti": (84, 512, 1.86),
    "NVIDIA GeForce RTX 4080": (76, 512, 2.505),
    "NVIDIA GeForce RTX 4090": (128, 512, 2.52),
    "NVIDIA GeForce RTX 5080": (84, 512, 2.617),
    "NVIDIA GeForce RTX 5090": (170, 512, 2.407),
}


@pytest.mark.parametrize("name", CHIPS)
def test_a_published_peak_is_what_the_chip_can_do(name: str) -> None:
    processors, flops_per_clock, gigahertz = CHIPS[name]
    assert of(name, "fp16").flops_per_second == pytest.approx(processors * flops_per_clock * gigahertz * 1e9, rel=0.01)


@pytest.mark.parametrize(
    "name", [name for name in CHIPS if not any(old in name for old in ("V100", "T4", "Quadro", "TITAN"))]
)
def test_bf16_runs_at_the_rate_of_fp16_and_tf32_at_half(name: str) -> None:
    assert of(name, "bf16").flops_per_second == of(name, "fp16").flops_per_second
    assert of(name, "tf32").flops_per_second == pytest.approx(of(name, "fp16").flops_per_second / 2, rel=0.025)


@pytest.mark.parametrize("name", CHIPS)
def test_fp32_is_that_of_the_ordinary_cores(name: str) -> None:
    assert of(name, "fp32").flops_per_second <= 0.51 * of(name, "fp16").flops_per_second


def test_a_peak_names_itself_and_its_source() -> None:
    assert of("NVIDIA H100 80GB HBM3").name == "H100 SXM, bf16 dense, 989.4 TFLOP/s"
    assert of("NVIDIA B200").name == "B200, bf16 dense, 2,250 TFLOP/s"
    assert all(of(name, "fp32").source.startswith("NVIDIA ") for name in CHIPS)


def test_cards_and_modules_of_one_name_are_told_apart() -> None:
    assert [of(f"NVIDIA {name}").gpu for name in ("H100 80GB HBM3", "H100 PCIe", "H100 NVL", "H200", "H200 NVL")] == [
        "H100 SXM", "H100 PCIe", "H100 NVL", "H200 SXM", "H200 NVL",
    ]  # fmt: skip


def test_older_drivers_leave_the_makers_name_out() -> None:
    assert of("A100-SXM4-40GB") == of("NVIDIA A100-SXM4-40GB")
    assert of("GeForce RTX 3090") == of("NVIDIA GeForce RTX 3090")


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A10G-24C",
        "NVIDIA H100",
        "NVIDIA H20-3e",
        "NVIDIA GB300",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "Tesla V100-SXM3-32GB",
        "AMD Instinct MI300X HF",
        "AMD Instinct MI308X",
        "H100 80GB HBM3 something",
        "",
    ],
)
def test_a_name_that_only_begins_like_a_known_one_is_unknown(name: str) -> None:
    assert peak("cuda", name, "bf16") == f"no published peak of {name!r} is known here"


# Compute units, dense FLOP per compute unit and clock in fp16, bf16, tf32 (None: unknown to it) and fp32, and the clock
# in GHz under which AMD states rates (CDNA white papers). Of an MI250 and MI250X: of one of the two dies.
AMD_CHIPS = {
    "AMD Instinct MI100": (120, (1024, 512, None, 256), 1.502),
    "AMD Instinct MI210": (104, (1024, 1024, None, 256), 1.7),
    "AMD Instinct MI250": (104, (1024, 1024, None, 256), 1.7),
    "AMD Instinct MI250X": (110, (1024, 1024, None, 256), 1.7),
    "AMD Instinct MI300A": (228, (2048, 2048, 1024, 256), 2.1),
    "AMD Instinct MI300X": (304, (2048, 2048, 1024, 256), 2.1),
    "AMD Instinct MI300X VF": (304, (2048, 2048, 1024, 256), 2.1),
    "AMD Instinct MI325X": (304, (2048, 2048, 1024, 256), 2.1),
    "AMD Instinct MI350X": (256, (4096, 4096, None, 256), 2.2),
    "AMD Instinct MI355X": (256, (4096, 4096, None, 256), 2.4),
}


@pytest.mark.parametrize("name", AMD_CHIPS)
def test_a_published_peak_of_amds_is_what_the_chip_can_do(name: str) -> None:
    units, flops_per_clock, gigahertz = AMD_CHIPS[name]
    for dtype, flops in zip(("fp16", "bf16", "tf32", "fp32"), flops_per_clock, strict=True):
        if flops is None:
            assert "matrix cores of the MI" in str(peak("cuda", name, dtype))
        else:
            assert of(name, dtype).flops_per_second == pytest.approx(units * flops * gigahertz * 1e9, rel=0.002)
            assert of(name, dtype).source.startswith("AMD Instinct MI")


def test_a_name_that_stands_for_two_types_of_gpu_has_no_peak() -> None:
    name = "AMD Instinct MI250X / MI250"
    assert "stands for two types of GPU" in str(peak("cuda", name, "bf16"))


def test_arithmetic_that_the_tensor_cores_lack_has_no_peak() -> None:
    assert peak("cuda", "Tesla T4", "bf16") == "the tensor cores of the T4 do not compute in bf16"
    assert peak("cuda", "Tesla V100-SXM2-16GB", "tf32") == "the tensor cores of the V100 SXM2 do not compute in tf32"


def test_a_cpu_has_none() -> None:
    assert peak("cpu", "NVIDIA H100 PCIe", "bf16") == "a CPU has no published peak"
