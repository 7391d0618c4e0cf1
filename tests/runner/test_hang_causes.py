"""For whom a hanging run's ranks wait, by dumps of torch's flight recorder in NCCL's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_factory import make_environment
from run_endings import ending, outcome, rank, status, statuses
from vitscale.profiles.flight_recorder import GroupMembers, UnreadableRecorder, recorded_groups
from vitscale.runner.hang_causes import find_cause, recorder_findings
from vitscale.store.recorder_dumps import OpenCall, RecordedGroup, RecorderDump, dump_path
from vitscale.store.records import DeviceRecord, StartLine
from vitscale.store.results import Outcome

WORLD = ("0", "default_pg")
SHARDS = ("1", "mesh_shard")


def entry(number: int, state: str = "completed", group: tuple[str, str] = WORLD, **changes: Any) -> dict[str, Any]:
    """One collective as NCCL's recorder of torch 2.13 writes it."""
    fields = {
        "record_id": number, "pg_id": int(group[0]), "process_group": list(group), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:all_reduce", "time_created_ns": 1_000 + number,
        "input_sizes": [[256, 4]], "input_dtypes": ["Float"], "output_sizes": [[256, 4]], "output_dtypes": ["Float"],
        "state": state, "retired": state == "completed", "is_p2p": False, "timeout_ms": 600_000,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
    }  # fmt: skip
    return fields | changes


def torch_dump(*entries: dict[str, Any], ranks: int = 4, **changes: Any) -> str:
    """A whole dump of NCCL's recorder."""
    last = {str(each["pg_id"]): {"last_enqueued_collective": str(each["collective_seq_id"])} for each in entries}
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))},
        "1": {"name": "1", "desc": "mesh_shard", "ranks": "[0, 1]"},
    }
    content = {
        "version": "2.10", "comm_lib_version": "2.27.5", "nccl_comm_state": {}, "pg_config": config,
        "pg_status": last, "entries": list(entries),
    }  # fmt: skip
    return json.dumps(content | changes)


def of_ranks(*dumps: str | None) -> dict[int, RecorderDump]:
    """What ranks record, from torch's text; None: a rank that has not answered."""
    return {number: RecorderDump(groups=recorded_groups(text)) for number, text in enumerate(dumps) if text is not None}


ENTERED = torch_dump(entry(6), entry(7, "scheduled"))
BEGUN = torch_dump(entry(6), entry(7, "started"))
AHEAD = torch_dump(entry(7, "scheduled"), entry(8, "scheduled"), entry(9, "scheduled"))
BEFORE = torch_dump(entry(5), entry(6))
CALL = "all_reduce number 7 of group 0 (default_pg) (1,024 elements)"


@pytest.mark.parametrize(
    ("dumps", "sentence", "ranks"),
    [
        ((AHEAD, ENTERED, AHEAD, BEFORE), f"rank 3 has not entered {CALL}, in which rank 0, 1 and 2 wait", (3,)),
        (
            (ENTERED, BEFORE, BEFORE, BEFORE),
            f"rank 1, 2 and 3 have not entered {CALL}, in which rank 0 waits",
            (1, 2, 3),
        ),
        (
            (ENTERED, AHEAD, ENTERED, ENTERED),
            f"all 4 ranks have entered {CALL}, and it does not end: look at the network and the GPUs between them, not "
            "at one rank's program",
            (),
        ),
        (
            (BEGUN, BEGUN, ENTERED, BEGUN),
            f"the GPU of rank 2 has not begun {CALL}, which all ranks have entered: an earlier kernel there does not "
            "end",
            (2,),
        ),
        (
            (ENTERED, ENTERED, torch_dump(entry(7, "scheduled", profiling_name="nccl:_all_gather_base")), ENTERED),
            "collective number 7 of group 0 (default_pg) is all_reduce on rank 0, 1 and 3 and all_gather on rank 2: "
            "ranks take unlike paths through the program",
            (2,),
        ),
    ],
)
def test_the_rank_that_has_not_entered_is_waited_for(
    dumps: tuple[str, ...], sentence: str, ranks: tuple[int, ...]
) -> None:
    cause = find_cause(of_ranks(*dumps), 4)
    assert cause is not None
    assert (cause.sentence, cause.ranks) == (sentence, ranks)


def test_who_waits_in_another_group_is_not_to_blame() -> None:
    """Rank 0 waits among all for rank 1, and that one among its shards for rank 0; but rank 2 waits for nobody."""
    shard_wait = torch_dump(entry(6), entry(3, "scheduled", SHARDS, profiling_name="nccl:_all_gather_base"))
    world_wait = torch_dump(entry(7, "scheduled"), entry(2, "completed", SHARDS))
    cause = find_cause(of_ranks(world_wait, shard_wait, BEFORE), 3)
    assert cause is not None
    assert cause.ranks == (2,)
    assert cause.sentence == f"rank 2 has not entered {CALL}, in which rank 0 waits"
    cause = find_cause(of_ranks(world_wait, shard_wait), 2)
    assert cause is not None
    assert cause.ranks == ()
    assert cause.sentence == (
        f"ranks wait for each other, rank 0 in {CALL} for rank 1 and rank 1 in all_gather number 3 of group 1 "
        "(mesh_shard) (1,024 elements) for rank 0: they call collectives in unlike orders"
    )


@pytest.mark.parametrize("dumps", [(BEFORE, BEFORE), (ENTERED, None), (torch_dump(), torch_dump())])
def test_where_too_little_is_known_nobody_is_blamed(dumps: tuple[str | None, ...]) -> None:
    """No open collective; or all that are known have entered it, and the other rank has not answered."""
    assert find_cause(of_ranks(*dumps), 2) is None


def test_messages_between_two_ranks_are_no_collectives() -> None:
    message = entry(9, "scheduled", profiling_name="nccl:recv 0<-1", is_p2p=True)
    (group,) = recorded_groups(torch_dump(entry(6), message, pg_status={}))
    assert (group.last_entered, group.open_calls) == (6, ())


def test_a_group_that_a_rank_has_not_used_has_its_members_from_torch() -> None:
    """gloo's recorder knows no ranks of its groups (torch 2.13), nor groups without an entry."""
    gloo = torch_dump(entry(1, "scheduled", retired=True), pg_config={"": {"name": "", "desc": "", "ranks": "[]"}})
    own_groups = [GroupMembers("0", "default_pg", (0, 1)), GroupMembers("5", "pair", (0, 1))]
    world, pair = recorded_groups(gloo, own_groups)
    assert world == RecordedGroup(name="0", description="default_pg", members=(0, 1), last_entered=1, open_calls=())
    assert (pair.name, pair.members, pair.last_entered) == ("5", (0, 1), 0)


NO_DUMPS = (
    "",
    "[]",
    "3",
    "{}",
    '{"version": "3.1"}',
    torch_dump(entries=[{"record_id": 1}]),
    torch_dump(entry(1, "scheduled", input_sizes=[["x"]])),
    '{"version": "2.10", "pg_config": {"0": {"ranks": "[0, [1]]"}}}',
    "[" * 100_000,
)


@pytest.mark.parametrize("text", NO_DUMPS)
def test_a_dump_of_another_form_is_unavailable(text: str) -> None:
    with pytest.raises(UnreadableRecorder, match="the flight recorder"):
        recorded_groups(text)


def put(folder: Path, *dumps: RecorderDump | None) -> None:
    for number, dump in enumerate(dumps):
        if dump is not None:
            dump_path(folder, number).write_text(dump.model_dump_json())


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


def hang(log: Path, *phases: str, device: Literal["cpu", "cuda"] = "cuda") -> Outcome:
    """The outcome of a hang whose ranks' hosts stand in these phases."""
    environment = make_environment(0, device=DeviceRecord(type=device, name="H100"))
    beats = [status(heard_seconds=129.5, phase=phase) for phase in phases]
    ends = ending(None, stopped="hang", limit_seconds=30.0, statuses=statuses(*beats), seen_seconds=130.0)
    records = []
    for number in range(len(phases)):
        start = StartLine(format=1, trial="t", rank=number, world_size=len(phases), environment=environment)
        records.append(rank(number, start=start))
    return outcome(log, ends, *records, world_size=len(phases), text="the log")


def test_a_hang_names_the_rank_by_its_collectives_and_not_by_its_host(log: Path) -> None:
    """Rank 0's host is furthest behind, and the GPU of rank 2 has not come to what the others wait in."""
    put(log.parent, *of_ranks(ENTERED, ENTERED, BEFORE).values())
    found = hang(log, "forward", "backward", "backward")
    assert (found.kind, found.rank) == ("hang", 2)
    assert found.reason == (
        f"no rank recorded anything for 30 s: rank 2 has not entered {CALL}, in which rank 0 and 1 wait; it stands in "
        "backward of step 4"
    )


@pytest.mark.parametrize(
    ("dumps", "why"),
    [
        ((None, None), "no rank has written down its collectives"),
        ((RecorderDump(reason="the flight recorder is off"), None), "the flight recorder is off"),
        ((RecorderDump(), RecorderDump()), "no collective is open whose ranks are all known"),
    ],
)
def test_without_a_recorder_the_place_is_that_of_the_host(
    log: Path, dumps: tuple[RecorderDump | None, ...], why: str
) -> None:
    put(log.parent, *dumps)
    place = "no rank recorded anything for 30 s: rank 0 stands in forward of step 4, and the others wait for it"
    found = hang(log, "forward", "backward")
    assert (found.rank, found.reason) == (
        0, f"{place}. That is where its host stands, and a GPU may be steps behind its host: {why}",
    )  # fmt: skip
    assert hang(log, "forward", "backward", device="cpu").reason == place


def test_a_stopped_rank_is_the_cause_whatever_the_collectives_show(log: Path) -> None:
    put(log.parent, *of_ranks(ENTERED, BEFORE).values())
    beating = status(heard_seconds=129.5)
    ends = ending(
        None, stopped="hang", limit_seconds=30.0, statuses=statuses(beating, beating), seen_seconds=130.0,
        stopped_ranks=frozenset({0}),
    )  # fmt: skip
    assert "rank 0 is stopped (SIGSTOP)" in outcome(log, ends, rank(0), rank(1)).reason


@pytest.mark.parametrize("text", ["", "{}x", '{"groups": 3}', '{"groups": [], "code": "x"}', "\x80"])
def test_a_file_that_is_no_dump_is_none(tmp_path: Path, text: str) -> None:
    dump_path(tmp_path, 0).write_bytes(text.encode("latin-1"))
    assert recorder_findings(tmp_path, 2).cause is None


CALLS = st.builds(OpenCall, number=st.integers(1, 4), operation=st.sampled_from(["all_reduce", "x"]),
                  elements=st.integers(0, 9), has_begun=st.booleans())  # fmt: skip
GROUPS = st.builds(
    RecordedGroup, name=st.sampled_from("ab"), description=st.sampled_from(["", "default_pg"]),
    members=st.none() | st.lists(st.integers(-1, 9), max_size=4).map(tuple), last_entered=st.integers(-1, 5),
    open_calls=st.lists(CALLS, max_size=3).map(tuple),
)  # fmt: skip


@given(st.dictionaries(st.integers(0, 3), st.builds(RecorderDump, groups=st.lists(GROUPS, max_size=3).map(tuple))))
def test_nobody_is_blamed_who_waits_for_others(dumps: dict[int, RecorderDump]) -> None:
    """Whatever ranks have written: a rank that is waited for has no open collective that others lack."""
    cause = find_cause(dumps, 4)
    if cause is not None and "has not entered" in cause.sentence:
        assert set(cause.ranks) <= dumps.keys()
