"""Bundles: they say what their folder says, say nothing of whose it is where that is asked for, and harm nobody."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import cli, store
from vitscale.errors import StoreError
from vitscale.store import packs
from vitscale.store.bundles import unpacked, write_bundle
from vitscale.store.redaction import Redactor
from vitscale.store.results import Results

Call = Callable[..., str]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "results"
    write_results(resolved_study({1: [0.1, 0.101], 2: [0.104, 0.105], 4: [0.108, 0.109]}), folder)
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """What a command prints, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["vitscale", *map(str, arguments)])
        with contextlib.suppress(SystemExit):
            cli.main()
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def members(bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as archive:
        files = [member for member in archive if member.isfile()]
        return {member.name: (archive.extractfile(member) or io.BytesIO()).read() for member in files}


def test_every_verb_says_of_a_bundle_what_it_says_of_the_folder(results: Path, call: Call) -> None:
    told = json.loads(call("export", results, "-o", "sent.tar.gz", "--json"))
    bundle = Path("sent.tar.gz")
    assert told["sha256"] == hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert told["files"]["study.json"] == hashlib.sha256((results / "study.json").read_bytes()).hexdigest()
    for verb in (["report", "--format", "json"], ["predict", "--gpus", "8", "--json"], ["advise", "--json"]):
        assert json.loads(call(verb[0], bundle, *verb[1:])) == json.loads(call(verb[0], results, *verb[1:]))
    compared = call("compare", results, bundle)
    assert "3 trials compared with results: 3 the same runs" in compared
    assert "differ" not in compared
    assert "sent/report.html" in call("report", bundle)
    assert Path("sent/report.html").stat().st_size > 10_000


def test_the_same_results_give_the_same_bytes(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results, tmp_path / "copy")
    for name, folder in (("a", results), ("b", tmp_path / "copy")):
        write_bundle(folder, tmp_path / f"{name}.tar.gz", redact=True)
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_a_bundle_of_packed_runs_and_of_interrupted_ones(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    folder = tmp_path / "many"
    shutil.copytree(results, folder)
    sorted((folder / "runs").iterdir())[0].joinpath("outcome.json").unlink()
    monkeypatch.setattr(store.reading, "PACK_RUNS", 2)
    store.pack_finished(folder)
    assert packs.pack_files(folder)
    (folder / "runs" / sorted(store.RunIndex(folder).packs)[0] / "log.txt").write_text("done on node1\n")
    for redact in (False, True):
        write_bundle(folder, tmp_path / "bundle.tar.gz", redact=redact)
        again = store.load(tmp_path / "bundle.tar.gz")
        told = store.load(folder)
        assert len(again.runs) == len(told.runs) == 5
        assert again.problems == told.problems
        assert [run.ranks[0].steps for run in again.runs] == [run.ranks[0].steps for run in told.runs]
        hosts = {rank.start.environment.host for run in again.runs for rank in run.ranks if rank.start}
        assert hosts == {"host-0" if redact else "node1"}


def planted(results: Results, told: Mapping[str, str]) -> Results:
    """Results that tell of a host, an allocation, a home and a key wherever a run may."""
    runs = []
    for place, run in enumerate(results.runs):
        host = f"{told['host']}{place % 2}.{told['domain']}"
        ranks = []
        for rank in run.ranks:
            assert rank.start is not None
            around = rank.start.environment.model_copy(
                update={
                    "host": host,
                    "allocation": f"slurm {4711 + place % 2}",
                    "git_revision": "0123456789abcdef",
                    "settings": {"NCCL_SOCKET_IFNAME": f"={host}", "HF_TOKEN": told["key"], "OMP_NUM_THREADS": "4"},
                }
            )
            ranks.append(rank.model_copy(update={"start": rank.start.model_copy(update={"environment": around})}))
        command = (
            "python",
            f"/home/{told['user']}/train.py",
            "--api-key",
            told["key"],
            f"--password={told['key']}",
            host,
        )
        header = run.header.model_copy(update={"hosts": (host,), "command": command})
        reason = f"{told['user']} on {host}: /scratch/{told['user']}/data is full"
        outcome = run.outcome.model_copy(update={"detail": reason, "host": host})
        runs.append(run.model_copy(update={"header": header, "outcome": outcome, "ranks": tuple(ranks)}))
    return results.model_copy(update={"runs": tuple(runs)})


def test_a_report_of_a_bundle_takes_no_other_report_s_place(results: Path, call: Call) -> None:
    write_bundle(results, Path("study-1.1.tar.gz"), redact=False)
    for name in ("study-1.2.tar.gz", "live.tgz", "plain"):
        shutil.copy("study-1.1.tar.gz", name)
    shutil.copytree(results, "live")
    pages = {
        "study-1.1.tar.gz": "study-1.1", "study-1.2.tar.gz": "study-1.2", "live.tgz": "live-report",
        "plain": "plain-report",
    }  # fmt: skip
    for bundle, folder in pages.items():
        assert f"\n{folder}/trials.csv\n" in call("report", bundle, "--format", "methods,csv")
        assert not (Path(folder) / "study.json").exists()
    assert not list(Path("live").glob("*.csv"))


def test_a_bundle_goes_into_a_file(results: Path, call: Call) -> None:
    os.mkfifo("pipe.tar.gz")
    Path("link.tar.gz").symlink_to("real.tar.gz")
    for output in ("pipe.tar.gz", "-"):
        assert "is no file. Name a file with -o" in call("export", results, "-o", output)
    for output in ("new/sub/bundle.tar.gz", "link.tar.gz"):
        assert "SHA-256" in call("export", results, "-o", output)
    assert Path("link.tar.gz").is_symlink()
    assert Path("real.tar.gz").read_bytes() == Path("new/sub/bundle.tar.gz").read_bytes()


NAMES = st.from_regex(r"[a-z][a-z0-9]{5,11}q", fullmatch=True)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(host=NAMES, user=NAMES, domain=NAMES, key=st.from_regex(r"[A-Za-z0-9]{12,30}Q", fullmatch=True))
def test_nothing_that_was_planted_is_in_a_redacted_bundle(
    tmp_path_factory: pytest.TempPathFactory, host: str, user: str, domain: str, key: str
) -> None:
    folder = tmp_path_factory.mktemp("planted")
    told = {"host": host, "user": user, "domain": f"{domain}.example", "key": key}
    write_results(planted(resolved_study({1: [0.1, 0.101]}), told), folder / "results")
    first, second = sorted((folder / "results" / "runs").iterdir())
    (first / "log.txt").write_text(
        f"{host}0 and {host.upper()}1.{domain}.example; /home/{user}/a b\nexport WANDB_API_KEY={key}\n"
        f"https://{user}:{key}@example.org ~{user}/x {user}@{domain}.example 10.0.0.7 token: {key}\n"
    )
    (second / "rank-0.jsonl").open("a").write(f'{{"kind":"step","cut off on {host}1')
    write_bundle(folder / "results", folder / "bundle.tar.gz", redact=True)
    for name, content in members(folder / "bundle.tar.gz").items():
        for secret in (*told.values(), domain, "0123456789abcdef", "4711", "10.0.0.7"):
            assert secret.lower() not in content.decode().lower(), (secret, name)
    runs = store.load(folder / "bundle.tar.gz").runs
    around = [rank.start.environment for run in runs for rank in run.ranks if rank.start is not None]
    assert [one.host for one in around] == ["host-0", "host-1"]
    assert len({one.allocation for one in around}) == 2
    assert len({one.git_revision for one in around}) == 1
    assert around[0].settings["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("host", ["completed", "cpu", "kind", "host", "ended", "step"])
def test_a_host_that_is_called_as_a_word_of_the_format_leaves_the_bundle_readable(host: str, tmp_path: Path) -> None:
    study = planted(resolved_study({1: [0.1]}), {"host": "", "user": "ada", "domain": "x", "key": "K" * 12})
    run = study.runs[0]
    header = run.header.model_copy(update={"hosts": (host,)})
    write_results(study.model_copy(update={"runs": (run.model_copy(update={"header": header}),)}), tmp_path / "results")
    write_bundle(tmp_path / "results", tmp_path / "bundle.tar.gz", redact=True)
    (again,) = store.load(tmp_path / "bundle.tar.gz").runs
    assert re.fullmatch(r"host-\d", again.header.hosts[0])
    assert again.outcome.kind == "completed"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("host gpu07.cluster.local, 10.1.2.3:29500", "host host-0, ADDRESS-0:29500"),
        ("/home/ada/code/run.py line 3", "PATH-0 line 3"),
        ("fe80::1:2:3:4 is up at 12:34:56", "ADDRESS-0 is up at 12:34:56"),
        ("2001:db8:0:1:1:1:1:1 and 02:42:ac:11:00:02", "ADDRESS-0 and ADDRESS-1"),
        ("GPU-12345678-1234-1234-1234-123456789abc", "GPU-UUID-0"),
        ("ada@example.org wrote 1.5 of 3.4.5 GB/s", "MAIL-0 wrote 1.5 of 3.4.5 GB/s"),
        ("adaptive steps of ada", "adaptive steps of USER-0"),
        ("gpu07 waits for GPU07", "host-0 waits for host-0"),
        ("../ada/x and ./y", "PATH-0 and PATH-1"),
        ("197 tokens per second of --token abcdef", "197 tokens per second of --token SECRET-0"),
        ("HF_TOKEN=hf_abcdefghijkl", "HF_TOKEN=SECRET-0"),
        ("cd '/scratch/Ada Doe/x y' && ls", "cd 'PATH-0' && ls"),
        ("mia@login01 ran C:\\Users\\Mia\\x", "USER-0 ran PATH-0"),
        ("commit 4423a906aabbccddeeff00112233445566778899", "commit REVISION-0"),
        ("the folder /data/Jane Doe/my runs/x is not seen", "the folder PATH-0 is not seen"),
        ("cd /data/Jane\\ Doe/runs && ls /a", "cd PATH-0 && ls PATH-1"),
        ('No such file: "/data/Jane\'s set/img.jpg"', 'No such file: "PATH-0"'),
        ("\x1b[1m--password hunter22", "\x1b[1m--password SECRET-0"),
        ("rm\\n--api-key abcd1234", "rm\\n--api-key SECRET-0"),
        ("a--token abcdefgh", "a--token SECRET-0"),
        ("--data /home/jo/imgs --opt a/b --mode x/y", "--data PATH-0 --opt a/b --mode x/y"),
        ("rate at /scratch/q was 300 images/s and 5 GB/s", "rate at PATH-0 was 300 images/s and 5 GB/s"),
        ("/usr/bin/python exited 1/2 tasks", "PATH-0 exited 1/2 tasks"),
        ("see /home/x/data and/or set a/b", "see PATH-0 and/or set a/b"),
        ("cd /srv/a && make b/c", "cd PATH-0 && make b/c"),
        ("no /x/y | grep z/w", "no PATH-0 | grep z/w"),
        ("/data/My - Jane Doe/set 2/x, /data/Ada & Jane Doe/.cache/s", "PATH-0, PATH-1"),
    ],
)
def test_what_is_taken_out_of_a_text(text: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    redactor = nobody(monkeypatch)
    redactor.learn("host", ["gpu07.cluster.local"])
    redactor.learn("USER", ["ada"])
    assert redactor.text(text) == told


def test_an_option_s_path_is_taken_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["train.py", "--data=/data/Jane Doe/set 1", "epochs=3"]
    assert nobody(monkeypatch).value(command) == ["train.py", "--data=PATH-0", "epochs=3"]


def test_a_word_of_many_letters_takes_no_time_to_look_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an encoded picture in a log: half a minute for 10,000 letters, were each letter a beginning."""
    words = ("x" * 40_000, "-" * 10_000, "token" * 2000, "a--" * 13_000, "--token" * 5000)
    began = time.process_time()
    assert all(nobody(monkeypatch).text(word) == word for word in words)
    assert time.process_time() - began < 10.0


def nobody(monkeypatch: pytest.MonkeyPatch) -> Redactor:
    monkeypatch.setattr("getpass.getuser", lambda: "nobody")
    monkeypatch.setenv("HOME", "/nonexistent")
    return Redactor()


def test_of_variables_only_plain_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "=ib0:1,gpu07",
        "TORCH_HOME": "/home/ada",
        "OMP_NUM_THREADS": "4",
        "A_TOKEN": "word",
    }
    told = nobody(monkeypatch).value(
        {"settings": variables, "uuid": "GPU-1", "allocation": None, "git_revision": "abc"}
    )
    kept = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "VALUE-0",
        "TORCH_HOME": "VALUE-1",
        "OMP_NUM_THREADS": "4",
        "A_TOKEN": "VALUE-2",
    }
    assert told == {"settings": kept, "uuid": "uuid-0", "allocation": None, "git_revision": "git_revision-0"}


def archive_of(path: Path, *entries: tuple[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in entries:
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                archive.addfile(content)
                continue
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo()
    entry.type, entry.linkname = kind, target
    return entry


TOP = "vitscale-bundle"
HOSTILE: dict[str, tuple[tuple[str, Any], ...]] = {
    "is no file of a bundle": ((f"{TOP}/../../escaped", b"x"),),
    "'/etc/escaped' in it is no file of a bundle": (("/etc/escaped", b"x"),),
    "'vitscale-bundle/runs/..' in it": ((f"{TOP}/runs/..", link(tarfile.DIRTYPE, "")),),
    "'vitscale-bundle/study.json' in it is no file": ((f"{TOP}/study.json", link(tarfile.SYMTYPE, "/etc/passwd")),),
    "'vitscale-bundle/manifest.json' in it is no file": ((f"{TOP}/manifest.json", link(tarfile.LNKTYPE, "x")),),
    "'vitscale-bundle/answer.json' in it is no file": ((f"{TOP}/answer.json", link(tarfile.FIFOTYPE, "")),),
    "its manifest is missing": ((f"{TOP}/study.json", b"{}"),),
    "'study.json' in it is not what its manifest says": (
        (f"{TOP}/study.json", b"{}"),
        (f"{TOP}/manifest.json", b'{"sha256": {"study.json": "00"}}'),
    ),
    "'packs/x' in it is not what its manifest says": ((f"{TOP}/manifest.json", b'{"sha256": {"packs/x": "00"}}'),),
    "File exists": ((f"{TOP}/study.json", b"{}"), (f"{TOP}/study.json", b"{}")),
    "Expecting value": ((f"{TOP}/manifest.json", b"no json"),),
    "unpacks to more than 64 MiB": ((f"{TOP}/study.json", b"\0" * (66 << 20)),),
}


@pytest.mark.parametrize("said", HOSTILE)
def test_a_hostile_archive_is_refused_with_one_message(said: str, tmp_path: Path) -> None:
    bundle = archive_of(tmp_path / "bundle.tar.gz", *HOSTILE[said])
    with pytest.raises(StoreError) as refused:
        store.load(bundle)
    assert said in str(refused.value)
    assert "is no bundle that can be read" in str(refused.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["bundle.tar.gz"]


def test_a_header_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = tarfile.XHDTYPE, 2 << 30
    (tmp_path / "bundle.tar.gz").write_bytes(gzip.compress(entry.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 4096))
    with pytest.raises(StoreError, match="a header is larger than any bundle's"):
        unpacked(tmp_path / "bundle.tar.gz")


@given(data=st.data())
def test_a_changed_byte_is_refused_or_changes_nothing(
    data: st.DataObject, results: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    folder.mkdir(exist_ok=True)
    whole = folder / "whole.tar.gz"
    if not whole.exists():
        write_bundle(results, whole, redact=False)
    content = bytearray(whole.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    (folder / "bundle.tar.gz").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(StoreError):
        assert store.load(folder / "bundle.tar.gz") == store.load(whole)


def test_a_file_that_is_no_archive_is_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('name = "x"\n')
    said = call("report", "study.toml")
    assert said.startswith("vitscale: 'study.toml' is no bundle that can be read: Not a gzipped file")
    assert len(said.splitlines()) == 1


def test_a_path_with_blanks_that_a_record_tells_is_known_in_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a log tells where it ends."""
    redactor = nobody(monkeypatch)
    redactor.learn_from('{"folder": "/data/Ada Doe/study one", "note": "a / b"}')
    assert redactor.text("reads /data/Ada Doe/study one/images now") == "reads PATH-0 now"


def test_a_file_that_is_no_bundle_is_not_replaced_by_one(results: Path, call: Call, tmp_path: Path) -> None:
    study, bundle = tmp_path / "study.toml", tmp_path / "b.tar.gz"
    study.write_text("name = 'mine'\n")
    assert "'study.toml' is there already, and is no bundle. Name another file with -o" in " ".join(
        call("export", results, "-o", "study.toml").split()
    )
    assert study.read_text() == "name = 'mine'\n"
    call("export", results, "-o", "b.tar.gz")
    first = bundle.stat().st_ino
    assert "SHA-256" in call("export", results, "-o", "b.tar.gz")
    assert bundle.stat().st_ino != first
