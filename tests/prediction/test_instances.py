"""Price tables: this program's own columns and those of SkyPilot's catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitscale.errors import RequestError
from vitscale.prediction.instances import read_instances

SKY = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
gpu_8x_v100,V100,8.0,92.0,448.0,6.32,asia,"{'Gpus': [{'Name': 'V100', 'Count': 8.0}], 'TotalGpuMemoryInMiB': 16384}",
gpu_8x_v100,V100,8.0,92.0,448.0,5.00,europe,"{'Gpus': [{'Name': 'V100', 'Count': 8.0}], 'TotalGpuMemoryInMiB': 16384}",
gpu_8x_v100,V100,8.0,92.0,448.0,5.50,us,,
cpu_4x_general,,,4.0,16.0,0.2,asia,,
gpu_1x_a100,A100-80GB,1.0,30.0,200.0,1.29,asia,,0.5
,H100,1,,,2.0,us,,
tpu,tpu-v4-8,1,,,12.88,us,,
"""


def table(folder: Path, text: str) -> Path:
    path = folder / "prices.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_catalogue_of_skypilot(tmp_path: Path) -> None:
    found, left_out = read_instances(table(tmp_path, SKY))

    assert [(one.name, one.gpu.name, one.gpus, one.price_per_hour) for one in found] == [
        ("gpu_8x_v100", "Tesla V100-SXM2-16GB", 8, 5.0), ("gpu_1x_a100", "A100-SXM4-80GB", 1, 1.29),
    ]  # fmt: skip
    assert found[0].price_per_gpu_hour == pytest.approx(0.625)
    assert left_out == (
        "prices.csv: GPUs that are unknown here are left out: tpu-v4-8",
        "prices.csv: 1 broken line left out: line 7 (it names no instance)",
    )


def test_own_columns_have_a_network_each(tmp_path: Path) -> None:
    rows = "instance,gpu,count,price,network\nslow,V100,8,6,10GbE\nfast,V100,8,7,8x200Gb/s\n"
    (slow, fast), left_out = read_instances(table(tmp_path, rows))

    assert left_out == ()
    assert slow.network is not None
    assert fast.network is not None
    assert fast.network.bandwidth_bytes_per_second == pytest.approx(160 * slow.network.bandwidth_bytes_per_second)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("instance,gpu,count\na,V100,8\n", "price"),
        ("instance,gpu,count,price\na,V101,8,5\n", r"the GPU 'V101' is unknown\. Valid: Tesla V100"),
        ("instance,gpu,count,price\na,V100,8,-5\n", "'-5' is no price"),
        ("instance,gpu,count,price\na,V100,8,nan\n", "'nan' is no price"),
        ("instance,gpu,count,price\na,V100,0,5\n", "'0' is no whole number"),
        ("instance,gpu,count,price\nb,,,5\n", "no row has a GPU"),
    ],
)
def test_a_table_without_one_instance_is_one_message(tmp_path: Path, rows: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_instances(table(tmp_path, rows))
