"""A redacted bundle holds no secret that any of its files tells to be one, in whatever form, and is readable still."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import tarfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prediction_factory import resolved_study
from results_factory import write_results
from vitscale import store
from vitscale.store.bundles import write_bundle
from vitscale.store.redaction import Redactor
from vitscale.store.results import Results
from vitscale.store.secret_forms import looks_like_key, looks_random

KEY = "hunter31Passabc9"
TOLD_BY_A_TEXT = (
    "--token {}", "--token={}", "--hf_token '{}'", "--wandb-key {}", "--wandb={}", "--wandb {}", "--auth {}",
    "--pat {}", "-k {}", "-p {}", "--pass {}", "--api-key \"{}\"", "'--token', '{}'", "[\"--password\", \"{}\"]",
    "['-k', '{}']",
    "https://db.example/api?key={}", "https://db.example/api?a=1&sig={}&se=2030", "?access_token={}#x",
    "postgres://alice:{}@db/x", "Authorization: Bearer {}", "curl -H 'authorization: token {}'", "Bearer {}",
    "AWS_SECRET_ACCESS_KEY {}", "PGPASSWORD {}", "MY_PAT {}", "export HF_TOKEN={}", "WANDB_API_KEY: {}",
    "pwd={};", "pass: {};", "password is {}", "token {}", "Pwd={};Server=x", "curl -u admin:{} x", "--user admin:{}",
    "{{'WANDB_API_KEY': '{}'}}", "{{\"api_key\": \"{}\"}}", "{{\\\"api_key\\\": \\\"{}\\\"}}",
    "SharedAccessSignature={}", "AccountKey={};", "auth={}", "MY_CRED={}", "db.password={}",
    "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----",
    "-----BEGIN RSA PRIVATE KEY-----\\n{}\\n-----END RSA PRIVATE KEY-----",
    "[rank0]: -----BEGIN PRIVATE KEY-----\n[rank0]: {}",
)  # fmt: skip

WITH_MORE = ("sig={}%3D", "npm_{}", "dckr_pat_{}", "AIza{}{}", "hf_{}", "pypi-{}", "sk-ant-{}", "glpat-{}", "hvs.{}")
"""Forms in which the secret is more than what is put in."""


@pytest.mark.parametrize("form", TOLD_BY_A_TEXT + WITH_MORE)
def test_a_secret_that_a_log_tells_is_taken_out_of_all_of_it(form: str) -> None:
    """Of the place that tells it, and of another that does not: a line before it, in a file read before."""
    redactor = Redactor()
    text = form.format(KEY, KEY)
    redactor.learn_from(f"begins\n{text}\nends\n")
    assert KEY not in redactor.text(f"begins\n{text}\nends\n")
    elsewhere = text if form in WITH_MORE else KEY
    assert KEY not in redactor.text(f"it was ({elsewhere})")
    assert redactor.text("ends") == "ends"


def test_an_access_key_of_a_role_is_one() -> None:
    assert Redactor().text("as ASIAABCDEFGHIJKLMNOP in") == "as SECRET-0 in"


ORDINARY = (
    "epoch 3: loss 0.1234, pass: 3, keys: 197, tokens: 196, 1234 tokens/s, top-1 0.71",
    "KeyError: 'blocks.0.attn' is a missing key in the state_dict",
    "basic block of vit-base-patch16-224, bearer of news, authentic results by the author",
    "token embeddings of 197 positions; the secret of scaling; a password is needed",
    "python -m torch.distributed.run --nproc-per-node 4 -k vit-base-patch16-224 -p 8080 --wandb online",
    "compass: north, bypass=true, monkey: business, passes: 12, pattern: strided, signal: 15",
    "loaded torch.nn.modules.linear, vitscale.worker.environment and train.micro_batch.x from model.best.pt",
    "using x.y.to(device), a.b.io.read and libfoo.1.so with main.v2.py",
    "docker run --user 0 --rm; ssh -p 22; kill -k 9; SECRET-0 is what stands for a key of 12 letters",
    "mode=auto device=cuda:0 precision=bf16 keyframe=100",
)  # fmt: skip


@pytest.mark.parametrize("line", ORDINARY)
def test_an_ordinary_line_of_a_log_stays_as_it_is(line: str) -> None:
    redactor = Redactor()
    redactor.learn_from(line)
    assert redactor.text(line) == line


def test_short_and_common_values_stay_where_nothing_tells_them() -> None:
    """They would go out of every word and number that they stand in."""
    redactor = Redactor()
    redactor.learn_variables(
        {"A": "1", "B": "true", "C": "cuda", "D": "0,1,2,3,4,5,6,7", "A_TOKEN": "gpu", "B_TOKEN": "secret", "E": "ab-c"}
        | {"MODEL_KEY": "vit-b16", "MODE_KEY": "completed", "F": "12.8.1"}
    )
    redactor.learn_from(json.dumps({"command": ["--token", "fp32", "--key", "cuda"]}))
    text = "1 true cuda 0,1,2,3,4,5,6,7 gpu secret ab-c vit-b16 completed 12.8.1 fp32"
    assert redactor.text(text) == text


def test_a_short_mix_of_letters_and_digits_goes_where_it_stands_alone() -> None:
    redactor = Redactor()
    redactor.learn_variables({"SHORT": "abc12"})
    assert redactor.text("abc12, 'abc12' and xabc12 or abc123") == "SECRET-0, 'SECRET-0' and xabc12 or abc123"


def test_one_value_has_one_stand_in_whatever_it_is_recognised_by() -> None:
    redactor = Redactor()
    redactor.learn_variables({"MY_SETTING": KEY})
    told = redactor.value(
        {"settings": {"NCCL_X": KEY}, "command": ["--token", KEY, f"--key={KEY}"], "api_key": KEY, "detail": f"x{KEY}y"}
    )
    assert told == {
        "settings": {"NCCL_X": "SECRET-0"},
        "command": ["--token", "SECRET-0", "--key=SECRET-0"],
        "api_key": "SECRET-0",
        "detail": "xSECRET-0y",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ssh node17.cluster.corp.example.com as", "ssh host-0 as"),
        ("at db.corp.example.com:5432, DB.corp.example.com.", "at host-0:5432, host-0."),
        ("torch.nn.modules.linear and docs/x.y.html", "torch.nn.modules.linear and docs/x.y.html"),
    ],
)
def test_a_full_host_name_goes_though_it_is_no_host_of_the_run(text: str, told: str) -> None:
    assert Redactor().text(text) == told


def test_what_looks_like_a_key() -> None:
    keys = ("hunter2pass", "a1b2c3d4", "p4ssword")
    assert all(map(looks_like_key, keys))
    assert not any(map(looks_like_key, ("hunter2", "correcthorse", "12345678", "missing")))
    assert looks_random("hunter26passabc")
    assert not any(map(looks_random, ("vit-base-patch16-224", "imagenet1k-full", "resnet50", "online")))


def test_a_password_that_is_called_password_takes_no_option_s_name_away() -> None:
    redactor = Redactor()
    redactor.learn_variables({"DB_PASSWORD": "password"})
    assert "abcd12" not in redactor.text("--password abcd12")


def test_a_log_that_is_cut_ends_with_a_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a secret is recognised by nothing."""
    monkeypatch.setattr("vitscale.store.bundles._MOST_LOG_BYTES", 40)
    write_results(resolved_study({1: [0.1]}), tmp_path / "results")
    (run,) = (tmp_path / "results" / "runs").iterdir()
    (run / "log.txt").write_text(f"begins\nit is {'x' * 20} {KEY}\n")
    assert [text for name, text in redacted(tmp_path).items() if name.endswith("log.txt")] == ["begins\n"]


# --- a whole folder ------------------------------------------------------------------------------------------------


def redacted(folder: Path) -> dict[str, str]:
    """Every file of the redacted bundle of folder/results, tables decoded, by name."""
    write_bundle(folder / "results", folder / "bundle.tar.gz", redact=True, answer={"seen": "nothing"})
    texts = {}
    with tarfile.open(folder / "bundle.tar.gz") as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                texts[member.name] = _text_of(content.read(), member.name)
    return texts


def _text_of(content: bytes, name: str) -> str:
    if not name.endswith(".parquet"):
        return content.decode()
    return "\n".join(map(str, pl.read_parquet(io.BytesIO(content)).to_dicts()))


PLACES = (
    "option",
    "assigned",
    "nested",
    "comment",
    "variable",
    "setting",
    "override",
    "site",
    "command",
    "rank",
    "log",
)
"""Where the property test plants a secret that this place alone tells to be one."""
KEYS = st.from_regex(r"[a-z][A-Za-z0-9]{10,20}[0-9]Q", fullmatch=True)
AWKWARD = st.text(st.sampled_from("abcXYZ019 \"'\\/%&+=é{}[]$\t"), min_size=10, max_size=24).filter(
    lambda text: text.strip() == text and looks_like_key(text.replace(" ", "")) and not text.startswith(("-", "/", "~"))
)
"""What JSON, TOML, Python, shells and URLs all write in ways of their own."""


def planted(secrets: dict[str, str], folder: Path) -> Results:
    """Writes results whose study, records, logs and launch files hold the secrets, each told in one place and echoed in
    all others as this is printed: as it is, and in the lists and objects of Python, JSON and a shell."""
    results = resolved_study({1: [0.1, 0.101]})
    arguments = ["--token", secrets["option"], "--note", "x"]
    text = (
        f"# token {secrets['comment']}\nname = 'x'\n[train]\nscript = 'train.py'\narguments = {json.dumps(arguments)}\n"
        f"deepspeed_config = {{ monitor = {{ wandb_key = {json.dumps(secrets['nested'])} }} }}\n"
        f"[launch]\nenvironment = {{ WANDB_API_KEY = {json.dumps(secrets['variable'])}, "
        f"MY_SETTING = {json.dumps(secrets['setting'])} }}\n"
    )
    override = f"launch.environment.MY_PAT={json.dumps(secrets['override'])}"
    study = results.study.model_copy(update={"text": text, "overrides": (override,)})
    echoes = _echoed(secrets)
    runs = []
    for run in results.runs:
        command = ("python", "train.py", "--pass", secrets["command"], f"--password={secrets['assigned']}")
        header = run.header.model_copy(update={"command": command})
        (rank,) = run.ranks
        assert rank.start is not None
        around = rank.start.environment.model_copy(
            update={"settings": {"NCCL_X": secrets["rank"], "NCCL_DEBUG": "INFO"}}
        )
        rank = rank.model_copy(update={"start": rank.start.model_copy(update={"environment": around})})
        outcome = run.outcome.model_copy(update={"detail": echoes})
        runs.append(run.model_copy(update={"header": header, "outcome": outcome, "ranks": (rank,)}))
    write_results(results.model_copy(update={"study": study, "runs": tuple(runs)}), folder)
    first, second = sorted((folder / "runs").iterdir())
    (first / "log.txt").write_text(echoes)
    (second / "log.txt").write_text(f"{echoes}\nconnecting with password={secrets['log']}\n")
    (second / "launch.json").write_text(json.dumps({"environment": {"SITE_VALUE": secrets["site"]}}))
    (second / "rank-0.jsonl").open("a").write(f'{{"kind":"step","cut off {secrets["option"]}')
    return results


def _echoed(secrets: dict[str, str]) -> str:
    values = list(secrets.values())
    shell = shlex.join(values)
    return f"as it is: {' '.join(values)}\nPython: {values!r}\nJSON: {json.dumps(values)}\nshell: {shell}\n"


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("packed", [False, True])
def test_what_one_file_tells_to_be_a_secret_is_in_no_byte_of_the_bundle(
    data: st.DataObject, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secrets = {
        place: data.draw(KEYS if place in ("comment", "assigned", "log") else KEYS | AWKWARD) for place in PLACES
    }
    folder = tmp_path_factory.mktemp("planted")
    planted(secrets, folder / "results")
    if packed:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store.reading, "PACK_RUNS", 1)
            store.pack_finished(folder / "results")
        assert list((folder / "results" / "packs").iterdir())
    for name, text in redacted(folder).items():
        for place, secret in secrets.items():
            for written in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], shlex.quote(secret)):
                assert written not in text, (place, name)
    again = store.load(folder / "bundle.tar.gz")
    assert len(again.runs) == 2
    starts = [rank.start for run in again.runs for rank in run.ranks]
    assert {start.environment.settings["NCCL_DEBUG"] for start in starts if start is not None} == {"INFO"}


def test_a_secret_of_letters_alone_goes_everywhere_where_a_name_tells_it(tmp_path: Path) -> None:
    secrets = dict.fromkeys(PLACES, "a1b2c3d4e5") | {"option": "correcthorse", "variable": "batterystaple"}
    planted(secrets, tmp_path / "results")
    texts = redacted(tmp_path)
    assert not any(word in text for text in texts.values() for word in ("correcthorse", "batterystaple", "a1b2c3d4e5"))
    stand_ins = [re.findall(r"\bSECRET-\d+", text)[:1] for name, text in texts.items() if name.endswith("log.txt")]
    assert len({str(each) for each in stand_ins}) == 1, "the same in both logs"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("setting", ['000000=/"X', "000000=/ X", "000000=/{X", "000000=/%X"])
def test_a_setting_with_a_character_at_which_paths_end_is_no_path(tmp_path: Path, setting: str, packed: bool) -> None:
    """A path in a text ends before it, so that the rest of the value would stay."""
    secrets = dict.fromkeys(PLACES, "a00000000000Q") | {"rank": setting}
    planted(secrets, tmp_path / "results")
    if packed:
        store.pack_finished(tmp_path / "results")
    assert not any(setting in text for text in redacted(tmp_path).values())


def test_a_launch_file_that_is_a_pipe_or_no_json_harms_nothing(tmp_path: Path) -> None:
    write_results(resolved_study({1: [0.1, 0.1]}), tmp_path / "results")
    first, second = sorted((tmp_path / "results" / "runs").iterdir())
    os.mkfifo(first / "launch.json")
    (second / "launch.json").write_text('["no launch file"')
    assert any(name.endswith("study.json") for name in redacted(tmp_path))


def test_results_without_secrets_keep_their_words(tmp_path: Path) -> None:
    results: Any = resolved_study({1: [0.1]})
    write_results(results, tmp_path / "results")
    texts = redacted(tmp_path)
    assert not any("SECRET-" in text for text in texts.values())
    assert json.loads(texts["vitscale-bundle/study.json"])["text"] == results.study.text


def test_a_value_has_one_stand_in_whatever_it_is_recognised_by() -> None:
    """A study's text, a recorded variable and a log tell one file; a record and a log tell one revision."""
    file, revision = "/scratch/ada/nccl.log", "4423a906aabbccddeeff00112233445566778899"
    redactor = Redactor()
    in_study = redactor.text(f'environment = {{ NCCL_DEBUG_FILE = "{file}" }}')
    record = redactor.value({"settings": {"NCCL_DEBUG_FILE": file}, "git_revision": revision})
    in_log = redactor.text(f"writes to {file} at {revision}")
    assert in_study == f'environment = {{ NCCL_DEBUG_FILE = "{record["settings"]["NCCL_DEBUG_FILE"]}" }}'
    assert in_log == f"writes to {record['settings']['NCCL_DEBUG_FILE']} at {record['git_revision']}"


def test_a_share_of_windows_is_taken_out_as_a_path() -> None:
    redactor = Redactor()
    share = r"\\fileserver\share\jdoe\data.csv"
    for text in (f"reading {share} now", f"{share!r}", f'"{share}"', f"file={share}"):
        redacted_text = redactor.text(text)
        assert not any(word in redacted_text for word in ("fileserver", "share", "jdoe", "data.csv")), redacted_text
    assert redactor.text(f"reading {share} now").endswith(" now")
    assert redactor.text(r"the pattern \\d+ of 3") == r"the pattern \\d+ of 3"


@pytest.mark.parametrize(
    "url",
    [
        "http://host:8080/api?key=abcdef&project=customer",
        "https://10.1.2.3:8443/customer/api#abcdef",
        "grpc://gw.example.com:443?project=customer",
        "http://user@[2001:db8::7]:80/customer",
    ],
)
def test_what_follows_the_port_of_a_url_is_taken_out(url: str) -> None:
    text = Redactor().text(f"GET {url} 200 in 3 ms")
    assert not any(word in text for word in ("customer", "abcdef", "api", "example")), text
    assert text.endswith(" 200 in 3 ms")


def test_what_follows_the_port_of_a_known_host_is_taken_out_without_a_scheme() -> None:
    redactor = Redactor()
    redactor.learn("host", ["node7"])
    assert "customer" not in redactor.text("store at node7:29500/customer")
    assert redactor.text("500 images/s at 12:30/h") == "500 images/s at 12:30/h"
