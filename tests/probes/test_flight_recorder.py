from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.probes import traffic
from vitscale.probes.traffic import NO_DTYPE, Unreadable, parse, size_ring
from vitscale.profiles.kernels import operation


def raw(record: int = 0, name: str = "gloo:all_reduce", **fields: Any) -> dict[str, Any]:
    return {
        "record_id": record, "profiling_name": name, "time_created_ns": 1_000 + record,
        "process_group": ["0", "default_pg"], "input_sizes": [[3, 4]], "input_dtypes": ["Float"],
        "output_sizes": [[3, 4]], "output_dtypes": ["Float"], **fields,
    }  # fmt: skip


def dump(*entries: dict[str, Any], version: str = "2.10") -> str:
    return json.dumps({"version": version, "entries": list(entries)})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all_reduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("all_reduce_barrier", "barrier"),
        ("barrier", "barrier"),
        ("_all_gather_base", "all_gather"),
        ("_allgather_base", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("_broadcast_oop", "broadcast"),
        ("_reduce_oop", "reduce"),
        ("reduce", "reduce"),
        ("all_to_all", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("send 0->1", "send"),
        ("recv 1<-0", "recv"),
        ("sendrecv", "sendrecv"),
        ("window_put", "window_put"),
    ],
)
def test_operations_get_the_fields_names_and_the_unknown_keeps_its_own(name: str, expected: str) -> None:
    assert operation(name) == expected


def test_an_entry_as_gloo_writes_it() -> None:
    (entry,) = parse(dump(raw(7, "gloo:all_gather", output_sizes=[[2, 3, 4]], input_dtypes=["BFloat16"],
                              output_dtypes=["BFloat16"])))  # fmt: skip
    assert (entry.record, entry.created_ns, entry.communicator) == (7, 1_007, "0")
    assert (entry.operation, entry.dtype) == ("all_gather", "bfloat16")
    assert (entry.input_elements, entry.output_elements) == (12, 24)


def test_entries_come_out_oldest_first_and_dtypes_in_torchs_names() -> None:
    names = ["Float", "Double", "Half", "BFloat16", "Byte", "Int", "Long", "Float8_e4m3fn", "Strange"]
    entries = parse(
        dump(*[raw(n, input_dtypes=[name], output_dtypes=[name]) for n, name in reversed(list(enumerate(names)))])
    )
    assert [entry.record for entry in entries] == list(range(len(names)))
    assert [entry.dtype for entry in entries] == [
        "float32", "float64", "float16", "bfloat16", "uint8", "int32", "int64", "float8_e4m3fn", "strange",
    ]  # fmt: skip


def test_a_barrier_has_no_tensor() -> None:
    (entry,) = parse(dump(raw(name="gloo:barrier", input_sizes=[], input_dtypes=[], output_sizes=[], output_dtypes=[])))
    assert (entry.operation, entry.dtype, entry.input_elements, entry.output_elements) == ("barrier", NO_DTYPE, 0, 0)


def test_a_coalesced_collective_is_one_for_each_dtype() -> None:
    entries = parse(
        dump(
            raw(name="nccl:reduce_scatter_tensor_coalesced", input_sizes=[[8], [4], [2]],
                input_dtypes=["Float", "BFloat16", "Float"], output_sizes=[[4], [2], [1]],
                output_dtypes=["Float", "BFloat16", "Float"])
        )
    )  # fmt: skip
    assert [(e.dtype, e.input_elements, e.output_elements) for e in entries] == [("float32", 10, 5), ("bfloat16", 4, 2)]


def test_the_end_of_a_group_is_no_collective_of_its_own() -> None:
    """Its members have entries of their own; where it has tensors itself it stands under its own name."""
    nothing: dict[str, Any] = {"input_sizes": [], "input_dtypes": [], "output_sizes": [], "output_dtypes": []}
    entries = parse(dump(raw(0, "nccl:all_reduce"), raw(1, "nccl:coalesced", **nothing), raw(2, "nccl:coalesced")))
    assert [entry.operation for entry in entries] == ["all_reduce", "coalesced"]


def test_an_empty_ring_is_empty() -> None:
    assert parse(json.dumps({"version": "2.10"})) == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (dump(version="3.0"), "the flight recorder writes version 3.0, and vitscale reads 2.x"),
        (json.dumps({}), "the flight recorder writes version None, and vitscale reads 2.x"),
        (dump({"record_id": 1}), "an entry of the flight recorder cannot be read: KeyError 'profiling_name'"),
        (dump(raw(input_sizes=[[2], [3]])), "an entry of the flight recorder cannot be read: ValueError"),
        (dump(raw(input_sizes=[["x"]])), "an entry of the flight recorder cannot be read: TypeError"),
    ],
)
def test_what_it_does_not_know_it_says_instead_of_guessing(text: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        list(parse(text))


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4))
def test_elements_are_the_products_of_the_sizes_together(sizes: list[list[int]]) -> None:
    expected = 0
    for size in sizes:
        elements = 1
        for side in size:
            elements *= side
        expected += elements
    dtypes = ["Float"] * len(sizes)
    (entry,) = parse(dump(raw(input_sizes=sizes, output_sizes=sizes, input_dtypes=dtypes, output_dtypes=dtypes)))
    assert entry.input_elements == entry.output_elements == expected


def test_the_ring_is_sized_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "77")
    size_ring()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "77"
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    size_ring()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "16384"


def test_a_recorder_that_is_switched_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    with pytest.raises(Unreadable, match="switched off"):
        traffic.entries("gloo")


class Recorders:
    """A build with NCCL: a recorder for it, and one for all others, each filled by its own backend alone."""

    def __init__(self, nccl: str, others: str) -> None:
        self.nccl, self.others = nccl, others

    def _dump_nccl_trace_json(self, *, includeCollectives: bool, onlyActive: bool) -> str:
        return self.nccl if includeCollectives and not onlyActive else "{}"

    def _dump_fr_trace_json(self, *, includeCollectives: bool, onlyActive: bool) -> str:
        return self.others if includeCollectives and not onlyActive else "{}"


def test_the_recorder_of_the_backend_in_use_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, others = dump(raw(0, "nccl:all_reduce")), dump(raw(0, "gloo:barrier"), raw(1, "gloo:broadcast"))
    monkeypatch.setattr(traffic, "c10d", Recorders(nccl, others))
    assert [entry.operation for entry in traffic.entries("nccl")] == ["all_reduce"]
    assert [entry.operation for entry in traffic.entries("gloo")] == ["barrier", "broadcast"]


def test_a_backend_without_a_recorder_is_named() -> None:
    with pytest.raises(Unreadable, match="no flight recorder of mpi that can be read"):
        traffic.entries("mpi")
