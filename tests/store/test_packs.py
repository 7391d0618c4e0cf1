"""Finished runs as columns: nothing is lost or changed, whenever the driver dies, and whatever lies in the folder."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from report_forms import terminal
from results_factory import explained_run, make_curve, make_results, make_trial, rich_study, write_results
from vitscale.analysis import analyse_folder
from vitscale.base import parquet
from vitscale.errors import StoreError
from vitscale.present.terminal import lines
from vitscale.runner.live import study_view, view_document
from vitscale.store import RunIndex, load, pack_finished, packs, reading, without_lines
from vitscale.store.bundles import write_bundle
from vitscale.store.packs import RUN_FOLDER, pack_files, pack_runs, read_outcomes, read_pack
from vitscale.store.reading import RunKey
from vitscale.store.records import FORMAT, RankRecord
from vitscale.store.results import Results, Run

RUNS = 5
"""Of a pack here."""


def by_name(results: Results) -> dict[str, Run]:
    return {run.header.folder: run for run in results.runs}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs of all kinds: completed, failed, with explained steps, without ranks."""
    folder = tmp_path_factory.mktemp("written")
    study = rich_study()
    trial = make_trial("ddp", 2)
    own = explained_run(trial, [{"forward": 0.1, "backward": 0.2, "wire": 0.05}] * 2, repeat=7)
    curve = make_curve([trial])
    known = [run for run in study.runs if run.header.trial_id != trial.identity()]
    trials = [*study.study.trials.values()]
    results = make_results([(study.study.curves[0], trials), (curve, [trial])], [*known[:8], *known[-9:], own])
    write_results(results, folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packs, "PACK_RUNS", RUNS)
    monkeypatch.setattr(reading, "PACK_RUNS", RUNS)
    return Path(shutil.copytree(written, tmp_path / "results"))


@pytest.mark.parametrize("letter", ["a", "\N{GREEK SMALL LETTER ALPHA}", "\N{GRINNING FACE}", "\\", "\x1b"])
def test_a_decoding_error_arrives_whatever_letters_a_file_puts_into_it(tmp_path: Path, letter: str) -> None:
    pl.DataFrame({letter * 300: [1]}).write_parquet(tmp_path / "odd.parquet")
    with pytest.raises(parquet.ParquetError, match='unable to find column "wanted"'):
        parquet.decoded(tmp_path / "odd.parquet", ["wanted"], whole=False)


def test_packed_runs_say_what_their_files_said(folder: Path) -> None:
    before = load(folder)
    pack_finished(folder)
    assert len(pack_files(folder)) == len(before.runs) // RUNS
    after = load(folder)
    assert by_name(after) == by_name(before)
    assert after.problems == before.problems == ()
    assert [run.header for run in after.runs] == [run.header for run in before.runs]


def test_lines_that_were_let_go_are_read_again(folder: Path) -> None:
    pack_finished(folder)
    for run in load(folder).runs:
        slim = pickle.loads(pickle.dumps(without_lines(folder, run)))  # noqa: S301 - of this process
        assert (slim.header, slim.outcome) == (run.header, run.outcome)
        for later, record in zip(slim.ranks, run.ranks, strict=True):
            assert later.__dict__.keys() < record.__dict__.keys() | {"_read"}
            assert all(getattr(later, name) == getattr(record, name) for name in RankRecord.model_fields)
            with pytest.raises(AttributeError, match="nothing"):
                later.nothing  # noqa: B018 - it is asked for


def test_what_is_packed_is_gone_from_its_folder_and_what_people_read_is_not(folder: Path) -> None:
    for path in folder.glob("runs/*"):
        (path / "log.txt").write_text("printed")
    pack_finished(folder)
    packed = RunIndex(folder).packs
    assert len(packed) >= RUNS
    assert {name.name for run in packed for name in (folder / "runs" / run).iterdir()} == {"log.txt"}
    assert not list(folder.glob("packs/*.removing"))


def test_the_index_is_the_same_before_and_after(folder: Path) -> None:
    before = RunIndex(folder)
    pack_finished(folder)
    after = RunIndex(folder)
    assert (after.attempts, after.finished, after.earlier) == (before.attempts, before.finished, before.earlier)


def test_fewer_runs_than_a_pack_holds_stay_as_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PACK_RUNS", 1000)
    pack_finished(folder)
    assert pack_files(folder) == []


def test_a_driver_that_packs_keeps_nothing_of_what_it_has_parsed(folder: Path) -> None:
    load(folder)
    pack_finished(folder)
    held = [packs._parse_first_line.cache_info().currsize, packs._parse_trial.cache_info().currsize]
    load(folder)
    assert held == [0, 0]
    assert packs._parse_first_line.cache_info().currsize > 0, "a reader parses once what runs share"


def test_a_run_with_a_broken_line_keeps_its_lines(folder: Path) -> None:
    path = sorted(folder.glob("runs/*/rank-0.jsonl"))[0]
    path.write_bytes(path.read_bytes() + b"{broken\n")
    before = load(folder)
    pack_finished(folder)
    assert path.exists()
    assert (by_name(load(folder)), load(folder).problems) == (by_name(before), before.problems)


def test_a_run_whose_folder_is_deleted_does_not_count(folder: Path) -> None:
    pack_finished(folder)
    before = load(folder).problems
    gone = next(iter(RunIndex(folder).packs))
    shutil.rmtree(folder / "runs" / gone)
    assert gone not in by_name(load(folder))
    assert gone not in {name for name, _ in RunIndex(folder).finished.values()}
    found = RUN_FOLDER.fullmatch(gone)
    assert found is not None
    used = RunIndex(folder).attempts[RunKey(found["trial"], int(found["repeat"]))]
    assert used >= int(found["attempt"]), "done again under its name, it would be read from the pack"
    assert load(folder).problems == before, "it is left out, and not interrupted"


class Died(BaseException):
    """As SIGKILL: nothing that would clean up after an error may run for it."""


def dying_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Ends the process, so to say, at the `count`-th change of the disk; returns how many there were."""
    seen = 0

    def dying(what: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal seen
            seen += 1
            if seen > count:
                raise Died
            return what(*args, **kwargs)

        return wrapped

    for name in ("replace", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    monkeypatch.setattr(os, "fsync", dying(os.fsync))
    return lambda: seen


def test_whenever_the_driver_dies_nothing_is_lost_and_the_next_one_finishes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among two packs and a run that is left: each moment is read twice."""
    for run in sorted((folder / "runs").iterdir())[2 * RUNS + 1 :]:
        shutil.rmtree(run)
    before = load(folder)
    whole = by_name(before)
    for count in range(10_000):
        own = Path(shutil.copytree(folder, tmp_path / f"dies-{count}"))
        with monkeypatch.context() as patch:
            dying_after(count, patch)
            try:
                pack_finished(own)
                died = False
            except Died:
                died = True
        now = load(own)
        assert (by_name(now), now.problems) == (whole, ()), count
        pack_finished(own)
        assert by_name(load(own)) == whole
        assert not list(own.glob("packs/*.removing"))
        assert not list(own.glob("packs/.*"))
        shutil.rmtree(own)
        if not died:
            break
    assert count > 20


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "link", "folder", "pipe", "text"])
def test_a_damaged_pack_is_named_and_the_other_runs_are_read(folder: Path, tmp_path: Path, damage: str) -> None:
    pack_finished(folder)
    pack, *others = pack_files(folder)
    names = set(read_pack(pack))
    data = pack.read_bytes()
    pack.unlink()
    match damage:
        case "link":
            (tmp_path / "elsewhere").write_bytes(data)
            pack.symlink_to(tmp_path / "elsewhere")
        case "folder":
            pack.mkdir()
        case "pipe":
            os.mkfifo(pack)
        case _:
            middle = len(data) // 2
            pack.write_bytes(
                {
                    "cut": data[:middle],
                    "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
                    "empty": b"",
                    "text": b"no parquet",
                }[damage]
            )
    now = load(folder)
    assert names.isdisjoint(by_name(now))
    assert len(now.runs) >= RUNS * len(others)
    problem = next(problem for problem in now.problems if pack.name in problem)
    assert problem.startswith(f"packs/{pack.name} cannot be read: ")
    assert problem.endswith("its runs are left out")
    assert ".:" not in problem


def test_who_reports_or_watches_is_told_of_a_damaged_pack_first(folder: Path) -> None:
    pack_finished(folder)
    pack, *_ = pack_files(folder)
    pack.write_bytes(pack.read_bytes()[:100])

    reported = " ".join(terminal(analyse_folder(folder)))
    view = study_view(folder, 1e9)
    watched = " ".join(line.plain for line in lines(view_document(view, folder), 200))

    for told in (reported, watched):
        assert "put " in told.split("packs/")[0]
        assert f"{pack.name} cannot be read" in told
    assert "the same command does only these" not in reported
    assert "goes on" not in watched
    assert "to be done again" not in watched.replace("to do its runs again", "")
    pack.unlink()
    assert not study_view(folder, 1e9).damaged


def test_a_pack_that_is_damaged_before_its_files_are_gone_falls_back_on_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = by_name(load(folder))
    monkeypatch.setattr(packs, "_remove_packed_files", lambda *_: None)
    pack_finished(folder)
    pack_files(folder)[0].write_bytes(b"")
    assert by_name(load(folder)) == whole


def forged(folder: Path, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Path:
    """The first pack with other content, under a name that says so."""
    (pack, *_) = pack_files(folder)
    memory = io.BytesIO()
    change(pl.read_parquet(pack)).write_parquet(memory)
    pack.unlink()
    new = pack.with_name(f"000001-{parquet.content_digest(memory.getvalue())}.parquet")
    new.write_bytes(memory.getvalue())
    return new


FORGERIES: dict[str, Callable[[pl.DataFrame], pl.DataFrame]] = {
    "a path": lambda frame: frame.with_columns(folder=pl.lit("../../../etc")),
    "no folder": lambda frame: frame.with_columns(folder=pl.lit(None, dtype=pl.String)),
    "a negative step": lambda frame: frame.with_columns(step=pl.col("step").list.eval(pl.element() - 10)),
    "an endless step": lambda frame: frame.with_columns(seconds=pl.col("seconds").list.eval(pl.element() * 1e308 * 10)),
    "another length": lambda frame: frame.with_columns(epoch=pl.col("epoch").list.head(1)),
    "nulls": lambda frame: frame.with_columns(images=pl.col("images").list.eval(pl.lit(None, dtype=pl.Int64))),
    "a window": lambda frame: frame.with_columns(window=pl.col("window").list.eval(pl.element() + 200)),
    "a type": lambda frame: frame.with_columns(rank=pl.col("rank").cast(pl.String)),
    "a column less": lambda frame: frame.drop("lines"),
    "no line": lambda frame: frame.with_columns(lines=pl.lit('{"kind":"end"},{"kind":"rm"}')),
    "deep lines": lambda frame: frame.with_columns(lines=pl.lit('{"kind":' * 5000)),
    "a huge number": lambda frame: frame.with_columns(
        lines=pl.lit(
            '{"kind":"phase","name":"data","seconds":1.0},{"kind":"matmul","dtype":"x","size":' + "9" * 30 + "}"
        )
    ),
    "NaN": lambda frame: frame.with_columns(header=pl.lit("NaN")),
    "no trial": lambda frame: frame.with_columns(trial=pl.lit("{}")),
    "no header": lambda frame: frame.with_columns(header=pl.lit(None, dtype=pl.String)),
}


@pytest.mark.parametrize("how", FORGERIES)
def test_a_forged_pack_is_one_message(folder: Path, how: str) -> None:
    pack_finished(folder)
    pack = forged(folder, FORGERIES[how])
    with pytest.raises(StoreError, match=f"packs/{pack.name} cannot be read: ") as caught:
        read_pack(pack)
    assert str(caught.value).isprintable()
    assert any(pack.name in problem for problem in load(folder).problems)


def test_no_bytes_bring_down_who_reads_what_may_be_decoded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where the digest in the name is that of the damaged content."""
    good = _small_pack(tmp_path_factory)
    results = tmp_path_factory.mktemp("damaged")
    (results / "packs").mkdir()
    rng = random.Random(20261124)
    for number in range(60):
        content = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        (results / f"packs/{number:06}-{parquet.content_digest(bytes(content))}.parquet").write_bytes(content)
    while name := packs.undecodable_pack(results):
        (results / "packs" / name).unlink()
    assert len(packs.pack_files(results)) > 40
    for path in packs.pack_files(results):
        for read in (read_pack, read_outcomes):
            with contextlib.suppress(StoreError):
                read(path)


def aborting(good: bytes) -> bytes:
    """A pack with a page of less than no values, at which polars 2.1 ends its process."""
    row = pl.read_parquet(io.BytesIO(good)).head(1)
    odd = pl.int_range(800) % 2 == 0
    memory = io.BytesIO()
    many = pl.concat([row] * 800).with_columns(outcome=pl.when(odd).then(pl.col("outcome")).otherwise(None))
    many.write_parquet(memory, compression="uncompressed", statistics=False)
    content = bytearray(memory.getvalue())
    # Thrift's 800, before the bits that tell every other value from null; and its -1024.
    place = content.rindex(b"\x15\xc0\x0c", 0, content.index(b"\x55" * 99))
    content[place + 1 : place + 3] = b"\xff\x0f"
    return bytes(content)


def test_a_pack_that_ends_its_decoder_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    good = _small_pack(tmp_path_factory)
    results = tmp_path_factory.mktemp("crafted")
    (results / "packs").mkdir()
    bad = aborting(good)
    names = [
        f"{number:06}-{parquet.content_digest(each)}.parquet" for number, each in enumerate((good, bad, good), start=1)
    ]
    for name, content in zip(names, (good, bad, good), strict=True):
        (results / "packs" / name).write_bytes(content)
    assert packs.undecodable_pack(results) == names[1]
    (results / "study.json").write_text("{}")
    write_bundle(results, results / "b.tar.gz", redact=False)
    with pytest.raises(StoreError, match=f"packs/{names[1]} in it cannot be decoded"):
        load(results / "b.tar.gz")
    (results / "packs" / names[1]).unlink()
    assert packs.undecodable_pack(results) is None


def test_a_pack_that_ends_its_decoder_costs_a_plain_folder_only_its_runs(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also of packs that come after it, which another decoder reads; and whoever asks is not ended."""
    pack_finished(folder)
    whole = by_name(load(folder))
    assert len(pack_files(folder)) > 1
    bad = aborting(_small_pack(tmp_path_factory))
    name = f"000000-{parquet.content_digest(bad)}.parquet"
    (folder / "packs" / name).write_bytes(bad)
    loaded = load(folder)
    assert by_name(loaded) == whole
    assert [
        problem for problem in loaded.problems if f"packs/{name} cannot be read: it has ended the process" in problem
    ]
    with pytest.raises(StoreError, match=f"packs/{name} cannot be read"):
        read_pack(folder / "packs" / name)


def test_a_pack_that_ends_its_decoder_is_left_out_of_the_bundle_of_its_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pack_finished(folder)
    runs = len(load(folder).runs)
    bad = aborting(_small_pack(tmp_path_factory))
    name = f"000000-{parquet.content_digest(bad)}.parquet"
    (folder / "packs" / name).write_bytes(bad)
    bundle = folder / "b.tar.gz"
    write_bundle(folder, bundle, redact=False, unread=load(folder).unread)
    back = load(bundle)
    (unread,) = back.unread
    assert (len(back.runs), unread.file) == (runs, f"packs/{name}")
    assert unread.reason.startswith(f"packs/{name} cannot be read: it has ended the process")


def test_a_pack_that_asks_for_more_than_its_share_of_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_finished(folder)
    monkeypatch.setattr(parquet, "_memory_bytes", lambda: 2000)
    with pytest.raises(StoreError, match="cannot be read: its content is larger than the memory"):
        read_pack(pack_files(folder)[0])


def test_forks_have_decoders_of_their_own(folder: Path) -> None:
    """Two processes that use one pipe would take each other's answers."""
    pack_finished(folder)
    path = pack_files(folder)[0]
    question = {"path": str(path), "columns": ["folder"], "whole": False}
    own = parquet._decoder_of_process()
    answer = own.ask(question)
    child = os.fork()
    if child == 0:
        other = parquet._decoder_of_process()
        is_right = other is not own and other.ask(question) == answer
        other.end()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert own.ask(question) == answer


def test_packs_are_decoded_where_memory_is_limited_already(written: Path, tmp_path: Path) -> None:
    """As by `ulimit -v` on a login node, below the limit that decoding sets for itself."""
    folder = tmp_path / "results"
    shutil.copytree(written, folder)
    pack_runs(folder, dict(list(by_name(load(folder)).items())[:RUNS]))
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))\n"
    code += (
        "from pathlib import Path; from vitscale.store.packs import undecodable_pack; "
        "print(undecodable_pack(Path(sys.argv[1])))"
    )
    told = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert told.stdout == "None\n", told.stderr


_CONTENT: list[bytes] = []


def _small_pack(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if not _CONTENT:
        results = tmp_path_factory.mktemp("small")
        study = rich_study()
        write_results(study.model_copy(update={"runs": study.runs[:1]}), results)
        (run,) = load(results).runs
        _CONTENT.append(packs.pack_runs(results, {run.header.folder: run}).read_bytes())
    return _CONTENT[0]


def test_the_study_of_a_packed_folder_is_of_a_format_that_older_readers_refuse() -> None:
    assert FORMAT >= 10
