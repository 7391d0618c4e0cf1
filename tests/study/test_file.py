from __future__ import annotations

import json
import os
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from study_factory import EIGHT_CORES, summary, toml, write_study
from vitscale.errors import RequestError
from vitscale.study.expand import expand
from vitscale.study.file import StudyFile
from vitscale.study.sections import SWEEPABLE


def refusal(path: Path) -> str:
    """The one message that reading `path` ends in: short, printable, of one mistake on one line."""
    with pytest.raises(RequestError) as caught:
        StudyFile.read(path)
    message = str(caught.value)
    assert all(line.isprintable() for line in message.split("\n"))
    assert len(message) < 1500
    return message


def refusal_of(folder: Path, content: str | bytes) -> str:
    path = folder / "study.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return refusal(path)


def test_a_study_is_read_with_its_defaults(tmp_path: Path) -> None:
    file = StudyFile.read(write_study(tmp_path))
    study = file.study
    assert study.name == "example"
    assert study.scaling.gpus == (1, 2)
    assert (study.train.engine, study.train.precision, study.train.gradient_clipping) == ("ddp", "auto", 0.0)
    assert (study.measure.repeats, study.measure.warmup_steps) == (3, 3)
    assert file.text == (tmp_path / "study.toml").read_text()


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_bytes(b"\xef\xbb\xbf" + toml().encode())
    assert StudyFile.read(tmp_path / "study.toml").study.name == "example"


# --- files that are no study ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\t\n ", "is empty"),
        (b"\x00\x01\x02\xff\xfe", "is not text (byte 3 is not UTF-8)"),
        (b"name = 'x'\x00", "is not TOML"),
        (b"hello", "is not TOML"),
        (b"name = cifar", "is not TOML"),
        (b"[model", "is not TOML"),
        (b"name = 'a'\nname = 'b'", "is not TOML"),
        (b"[model]\n[model]", "is not TOML"),
        (b"x = " + b"9" * 5000, "is not TOML"),
        (b"#" * (1 << 20) + b"#", "is larger than 1 MiB"),
        (b"x = " + b"[" * 100_000, "is nested too deeply"),
        (b"a." * 100_000 + b"a = 1", "is nested too deeply"),
        (b"'a' . \"b\" ." * 20 + b"a = 1", "is nested too deeply"),
        (b'{"name": "x"}', "is not TOML"),
    ],
)
def test_what_is_no_toml_is_named_in_one_message(tmp_path: Path, content: bytes, said: str) -> None:
    message = refusal_of(tmp_path, content)
    assert said in message
    assert "study.toml" in message
    assert "examples/quickstart.toml" in message


def test_nesting_that_only_later_steps_stumble_over_is_refused_too(tmp_path: Path) -> None:
    deep = "[" * 300 + "]" * 300
    message = refusal_of(tmp_path, toml() + f'[sweep]\n"train.engine" = [{deep}]\n')
    assert "nested too deeply" in message or "train.engine is" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.toml", "No such file"),
        (".", "Is a directory"),
        ("/dev/zero", "larger than 1 MiB"),
        ("a" * 200_000, "File name too long"),
        ("nul\x00byte", "no such path"),
        ("\ud800", "no such path"),
        ("\x1b[31m.toml", "No such file"),
    ],
)
def test_a_path_that_cannot_be_read_is_named(tmp_path: Path, name: str, said: str) -> None:
    assert said in refusal(tmp_path / name)


def test_a_pipe_is_read_as_a_shell_gives_it(tmp_path: Path) -> None:
    """`vitscale plan <(generate)` names a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(toml()))
    writer.start()
    assert StudyFile.read(pipe).study.name == "example"
    writer.join()


# --- keys and values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "key", "suggestion"),
    [
        ("model", "image_sise", "image_size"),
        ("data", "nam", "name"),
        ("train", "micro_bach", "micro_batch"),
        ("scaling", "gpu", "gpus"),
        ("launch", "treads_per_rank", "threads_per_rank"),
        ("measure", "repeat", "repeats"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path, section: str, key: str, suggestion: str) -> None:
    message = refusal(write_study(tmp_path, {section: {key: 1}}))
    assert f"unknown key '{key}' in [{section}]" in message
    assert f"Did you mean '{suggestion}'?" in message


def test_an_unknown_key_of_a_table_in_a_list_is_named_with_that_tables_keys(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    path.write_text(path.read_text() + '[[slurm.sizes]]\nmin_nodes = 2\npartitions = "x"\n')
    message = refusal(path)
    assert "unknown key 'partitions' in [slurm.sizes]. Did you mean 'partition'?" in message
    assert "Valid: account, constraint, min_nodes, partition, qos, reservation, time." in message


def test_an_unknown_section_is_named_with_the_nearest(tmp_path: Path) -> None:
    message = refusal(write_study(tmp_path, {"messure": {"steps": 1}}))
    assert "unknown key 'messure' at the top level" in message
    assert "Did you mean 'measure'?" in message


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(tmp_path: Path) -> None:
    assert "It belongs in [train]" in refusal(write_study(tmp_path, {"measure": {"epochs": 3}}))
    for section, word, meant in (
        ("train", "lr", "Write learning_rate in [train]."),
        ("train", "batch_size", "Write micro_batch in [train]"),
        ("train", "amp", 'Write precision = "bf16" in [train].'),
        ("scaling", "world-size", "Write gpus = [1, 2, 4] in [scaling]."),
        ("data", "num_workers", "Write workers in [data]."),
    ):
        assert f"unknown key '{word}' in [{section}]. {meant}" in refusal(write_study(tmp_path, {section: {word: 1}}))
    assert "It belongs in [train]" in refusal_of(tmp_path, "micro_batch = 3\n" + toml())


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("train", "micro_batch", "64", "is '64', but should be a whole number. Write it without quotes."),
        ("train", "micro_batch", 64.0, "is 64.0, but should be a whole number. Correct it in [train]."),
        ("train", "micro_batch", True, "should be a whole number"),
        ("train", "micro_batch", 0, "train.micro_batch is 0, but should be at least 1"),
        ("train", "micro_batch", -3, "should be at least 1"),
        ("train", "micro_batch", 10**400, "should be at most 1000000"),
        ("train", "epochs", [3], 'should be a whole number. To vary it, write "train.epochs" = [...] in [sweep].'),
        ("measure", "repeats", [3], "should be a whole number. Correct it in [measure]."),
        ("train", "offload", "cpu", """'optimizer' or 'parameters'. Write offload = "optimizer" (its states"""),
        ("train", "offload", True, 'Write offload = "optimizer" (its states lie on the host)'),
        ("launch", "environment", ["A=1"], "should be a table. Write [launch.environment] on a line of its own"),
        ("train", "drop_last", 1, "train.drop_last is 1, but should be true or false"),
        ("train", "drop_last", "yes", "should be true or false. Write true."),
        ("train", "drop_last", "sometimes", "should be true or false. Correct it in [train]."),
        ("train", "micro_batch", "abc", "should be a whole number. Correct it in [train]."),
        ("train", "learning_rate", -0.1, "should be greater than 0"),
        ("train", "momentum", 1.0, "should be less than 1"),
        ("train", "gradient_clipping", "auto", "should be a number"),
        ("train", "zero_stage", 4, "should be at most 3"),
        ("train", "zero_stage", True, "should be a whole number"),
        ("train", "seed", 2**31, "should be less than 2147483648"),
        ("train", "engine", 5, "train.engine is 5, but should be text in quotes"),
        ("train", "deepspeed_config", {"a": 1}, "should be text in quotes"),
        ("train", "precision", "fp8", "should be 'fp32', 'bf16', 'bf16-params', 'fp16' or 'auto'"),
        ("train", "precision", "bf-16", "Did you mean 'bf16'?"),
        ("train", "device", "gpu", "should be 'cpu', 'cuda' or 'auto'"),
        ("scaling", "mode", "strong", "should be 'strong-micro', 'strong-global' or 'weak'"),
        ("scaling", "gpus", 4, "scaling.gpus is 4, but should be a list. Write gpus = [4]."),
        ("sweep", "train.engine", "ddp", """should be a list. Write "train.engine" = ["ddp"]."""),
        ("scaling", "gpus", "1,2", "should be a list. Write gpus = [1, 2]."),
        ("scaling", "gpus", True, "should be a list. Correct it in [scaling]."),
        ("scaling", "gpus", -4, "should be a list. Correct it in [scaling]."),
        ("scaling", "gpus", "a b", "should be a list. Correct it in [scaling]."),
        ("sweep", "train.micro_batch", "8, 16", """should be a list. Write "train.micro_batch" = [8, 16]."""),
        ("train", "arguments", "--x=1,2", """should be a list. Write arguments = ["--x=1,2"]."""),
        ("train", "arguments", "--x='1'", "should be a list. Correct it in [train]."),
        ("slurm", "container_mounts", "a\\b", "should be a list. Correct it in [slurm]."),
        ("data", "columns", ["a", "b", "c"], "and of the classes' column. Correct it in [data]."),
        ("train", "deepspeed_config", [], "should be text in quotes. Correct it in [train]."),
        ("scaling", "gpus", [], "scaling.gpus is [], but should be a list of at least 1"),
        ("scaling", "gpus", [1, 0], "scaling.gpus.1 is 0, but should be at least 1"),
        ("scaling", "gpus", [1, "2"], "Write it without quotes"),
        ("scaling", "gpus", [1.5], "should be a whole number"),
        ("scaling", "gpus", list(range(1, 1002)), "should be a list of at most 1000"),
        ("scaling", "fraction_per_gpu", 1.5, "should be at most 1"),
        ("data", "fraction", 0.0, "should be greater than 0"),
        ("data", "root", 7, "should be text in quotes"),
        ("launch", "threads_per_rank", 0, "should be at least 1"),
        ("measure", "repeats", 0, "should be at least 1"),
        ("measure", "hang_seconds", 0.0, "should be greater than 0"),
        ("model", "image_size", "224", "model.image_size is '224', but should be a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_it_should_be(
    tmp_path: Path, section: str, key: str, value: Any, said: str
) -> None:
    path = tmp_path / "study.toml"
    if isinstance(value, dict):
        path.write_text(toml({section: {key: "HERE"}}).replace('"HERE"', "{ a = 1 }"))
    else:
        write_study(tmp_path, {section: {key: value}})
    assert said in refusal(path)
    assert "\n" not in refusal(path), "one mistake, one line"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(
    ("section", "key"),
    [("train", "learning_rate"), ("train", "weight_decay"), ("train", "momentum"), ("data", "fraction"),
     ("data", "held_out"), ("measure", "timeout_seconds"), ("scaling", "fraction_per_gpu")],
)  # fmt: skip
def test_a_number_that_is_none_is_refused(tmp_path: Path, section: str, key: str, value: str) -> None:
    text = toml({section: {key: "HERE"}}).replace('"HERE"', value)
    assert f"{section}.{key} is {value.replace('1e999', 'inf')}, but should be" in refusal_of(tmp_path, text)


def test_an_integer_too_long_to_be_written_out_is_named_by_its_type(tmp_path: Path) -> None:
    text = toml({"train": {"epochs": "HERE"}}).replace('"HERE"', "0x" + "f" * 10_000)
    assert "train.epochs is (int too large to show), but should be at most 1000000" in refusal_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('model = ["vit-ti16"]', "model is ['vit-ti16'], but should be a table. Write [model] on a line of its own"),
        ('model = "vit-ti16"', "model is 'vit-ti16', but should be a table"),
        ("[[model]]\nname = 'x'", "should be a table"),
        ("sweep = 3", "sweep is 3, but should be a table"),
        ("[sweep]\n'train.engine' = 'ddp'", "sweep.train.engine is 'ddp', but should be a list"),
        ("name = 3", "name is 3, but should be text in quotes"),
        ("name = 2020-01-01", "but should be text in quotes"),
    ],
)
def test_a_value_where_a_section_should_be_and_the_other_way_round(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model]\n[data]\nname = 'x'", 'name is missing. Add name = "..."'),
        ("name = 'x'\n[data]\nname = 'x'", 'model is missing. Add [model] with name = "..."'),
        ("name = 'x'\n[model]\n[data]", 'data.name is missing. Add name = "..." in [data]'),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal_of(tmp_path, text)


@pytest.mark.parametrize(
    "name", ["", "a" * 101, "a" * 200_000, "../up", "a/b", ".hidden", "-o", "two words", "é", "a\n"]
)
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    message = refusal(write_study(tmp_path, name=name))
    assert "name is '" in message
    assert "Use 1 to 100 letters, digits" in message


def test_a_hundred_characters_are_a_name(tmp_path: Path) -> None:
    assert StudyFile.read(write_study(tmp_path, name="a" * 100)).study.name == "a" * 100


def test_hostile_keys_and_values_reach_no_terminal_raw_and_stay_short(tmp_path: Path) -> None:
    escape = "\\u001b[2J\\u202e"
    long = "k" * 200_000
    for text in (
        f'"{escape}" = 1\n' + toml(),
        toml({"train": {"precision": "HERE"}}).replace("HERE", escape),
        toml() + f'[sweep]\n"{escape}" = [1]\n',
        toml() + f'[sweep]\n"{escape}" = 1\n',
        f"{long} = 1\n" + toml(),
        toml() + f'[sweep]\n"{long}" = 1\n',
        toml({"train": {"engine": "HERE"}}).replace("HERE", "x") + f'[measure]\n"{long}" = 1\n',
    ):
        refusal_of(tmp_path, text)


def test_each_mistake_has_its_line(tmp_path: Path) -> None:
    alone = toml({"train": {"lr": 0.1}})
    line = alone.splitlines().index('"lr" = 0.1') + 1
    assert f"study.toml', line {line}: unknown key 'lr' in [train]. Write learning_rate" in refusal_of(tmp_path, alone)
    two = alone.replace('"gpus" =', "gpu =")
    places = [number for number, text in enumerate(two.splitlines(), 1) if text.split(" ")[0] in ('"lr"', "gpu")]
    first, *mistakes = refusal_of(tmp_path, two).split("\n")
    assert first.endswith("study.toml':")
    assert {f"  line {place}" for place in places} == {mistake.split(":")[0] for mistake in mistakes}
    assert "Did you mean 'gpus'? Valid: " in " ".join(mistakes)


def test_more_than_five_mistakes_are_counted(tmp_path: Path) -> None:
    message = refusal(write_study(tmp_path, {"train": {f"wrong{n}": 1 for n in range(9)}}))
    assert message.count("unknown key") == 5
    assert message.endswith("(and 4 more).")


# --- sweeps --------------------------------------------------------------------------------------------------------


def test_a_sweep_is_the_cartesian_product_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write_study(tmp_path, {"sweep": {"train.micro_batch": [8, 16], "train.engine": ["ddp", "deepspeed"]}})
    file = StudyFile.read(path)
    points = list(file.points())
    assert file.raw == tomllib.loads(file.text)
    assert [(point.train.micro_batch, point.train.engine) for _, point, _ in points] == [
        (8, "ddp"), (8, "deepspeed"), (16, "ddp"), (16, "deepspeed"),
    ]  # fmt: skip
    assert points[1][0] == {"train.micro_batch": 8, "train.engine": "deepspeed"}


def test_a_swept_field_counts_as_set_by_hand(tmp_path: Path) -> None:
    path = write_study(tmp_path, {"sweep": {"launch.threads_per_rank": [1]}})
    ((_, _, by_hand),) = StudyFile.read(path).points()
    assert {"launch.threads_per_rank", "train.micro_batch", "model.name"} <= by_hand
    assert "train.engine" not in by_hand


def test_without_a_sweep_there_is_one_point(tmp_path: Path) -> None:
    file = StudyFile.read(write_study(tmp_path))
    ((labels, point, _),) = file.points()
    assert labels == {}
    assert point == file.study


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"train.engin": ["ddp"]}, "Did you mean 'train.engine'?"),
        ({"engine": ["ddp"]}, "is no field that can be swept"),
        ({"scaling.gpus": [[1], [2]]}, "is no field that can be swept"),
        ({"measure.repeats": [1, 2]}, "is no field that can be swept"),
        ({"data.root": ["a", "b"]}, "is no field that can be swept"),
        ({"launch.oversubscribe": [True]}, "is no field that can be swept"),
        ({"name": ["a"]}, "is no field that can be swept"),
        ({"train.engine": []}, "is an empty list. Give at least one value"),
        ({"train.engine": ["ddp", "none", "ddp"]}, "holds a value twice"),
        ({"train.micro_batch": [8, 8.0]}, "holds a value twice"),
        ({"train.micro_batch": [8, "16"]}, "train.micro_batch is '16', but should be a whole number"),
        ({"train.micro_batch": [8, [16]]}, "train.micro_batch is [16], but should be a whole number"),
        ({"train.micro_batch": [[8], [8]]}, "holds a value twice"),
        ({"scaling.mode": ["weak", "strong"]}, "scaling.mode is 'strong', but should be 'strong-micro'"),
        ({"model.image_size": [32, 0]}, "model.image_size is 0, but should be at least 1"),
    ],
)
def test_a_wrong_sweep_is_refused(tmp_path: Path, sweep: dict[str, Any], said: str) -> None:
    assert said in refusal(write_study(tmp_path, {"sweep": sweep}))


def test_tables_under_a_field_are_refused(tmp_path: Path) -> None:
    text = toml() + '[[sweep."train.engine"]]\na = 1\n[[sweep."train.engine"]]\nb = 1\n'
    assert "train.engine is {'a': 1}, but should be text in quotes" in refusal_of(tmp_path, text)


ENGINES = """
[sweep]
train = [                                  # over several lines
  { engine = "none" },
  { engine = "deepspeed", zero_stage = 2 },
]
"train.micro_batch" = [8, 16]
"""


def test_the_fields_of_a_table_vary_together_and_with_every_other_key(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(toml() + ENGINES)
    file = StudyFile.read(tmp_path / "study.toml")
    points = list(file.points())
    assert [labels for labels, _, _ in points] == [
        {"train.engine": "none", "train.micro_batch": 8},
        {"train.engine": "none", "train.micro_batch": 16},
        {"train.engine": "deepspeed", "train.zero_stage": 2, "train.micro_batch": 8},
        {"train.engine": "deepspeed", "train.zero_stage": 2, "train.micro_batch": 16},
    ]
    assert [(study.train.engine, study.train.zero_stage, study.train.micro_batch) for _, study, _ in points] == [
        ("none", 0, 8), ("none", 0, 16), ("deepspeed", 2, 8), ("deepspeed", 2, 16),
    ]  # fmt: skip
    assert [{"train.zero_stage", "train.engine"} & by_hand for _, _, by_hand in points] == [
        {"train.engine"}, {"train.engine"}, {"train.engine", "train.zero_stage"}, {"train.engine", "train.zero_stage"},
    ]  # fmt: skip
    assert file.swept_fields == {"train.engine", "train.zero_stage", "train.micro_batch"}


def test_an_array_of_tables_is_the_same_sweep(tmp_path: Path) -> None:
    text = toml() + "[[sweep.train]]\nengine = 'none'\n[[sweep.train]]\nengine = 'deepspeed'\nzero_stage = 2\n"
    (tmp_path / "study.toml").write_text(text)
    points = list(StudyFile.read(tmp_path / "study.toml").points())
    assert [labels for labels, _, _ in points] == [
        {"train.engine": "none"}, {"train.engine": "deepspeed", "train.zero_stage": 2},
    ]  # fmt: skip


def test_a_table_holds_fields_of_other_sections_by_their_dotted_names(tmp_path: Path) -> None:
    table = '{ engine = "fsdp2", "parallel.tensor" = 2, "model.image_size" = 32 }'
    (tmp_path / "study.toml").write_text(toml() + f'[sweep]\ntrain = [{{ engine = "none" }}, {table}]\n')
    points = list(StudyFile.read(tmp_path / "study.toml").points())
    assert [(study.train.engine, study.parallel.tensor) for _, study, _ in points] == [("none", 1), ("fsdp2", 2)]
    assert points[1][0] == {"train.engine": "fsdp2", "parallel.tensor": 2, "model.image_size": 32}


def test_modes_stand_in_tables_too(tmp_path: Path) -> None:
    text = toml() + "[sweep]\nscaling = [{ mode = 'weak' }, { mode = 'strong-global' }]\n"
    (tmp_path / "study.toml").write_text(text)
    assert StudyFile.read(tmp_path / "study.toml").modes == ("weak", "strong-global")


def test_a_table_without_a_mode_leaves_the_study_s(tmp_path: Path) -> None:
    """So that what only that mode needs is not refused."""
    changes: dict[str, dict[str, Any]] = {"scaling": {"mode": "strong-global"}, "train": {"global_batch": 128}}
    tables = "[sweep]\nscaling = [{ mode = 'strong-micro' }, { gpus_per_node = 2 }]\n"
    (tmp_path / "study.toml").write_text(toml(changes) + tables)
    file = StudyFile.read(tmp_path / "study.toml")
    assert file.modes == ("strong-micro", "strong-global")
    trials = expand(file, EIGHT_CORES, lambda _: summary()).trials.values()
    assert {trial.global_batch for trial in trials if trial.world.size == 2} == {64, 128}


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("train = [{}]", "sweep.'train' holds an empty table. Give each table at least one field"),
        ("train = []", "sweep.'train' is an empty list"),
        ("train = ['ddp']", "sweep.'train' names a section, and holds 'ddp'. Give tables of fields that go together"),
        ("train = [{ engine = 'ddp' }, [{ engine = 'none' }]]", "names a section, and holds [{'engine': 'none'}]"),
        ("train = [{ engine = 'ddp' }, { engine = 'ddp' }]", "sweep.'train' holds a value twice"),
        ("train = [{ engin = 'ddp' }]", "'engin' is no field of [train] that can be swept. Did you mean 'engine'? V"),
        ("train = [{ engin = 'ddp' }]", "Did you mean 'engine'?"),
        ("data = [{ root = 'a' }]", "'root' is no field of [data] that can be swept"),
        ("launch = [{ oversubscribe = true }]", "'oversubscribe' is no field of [launch]"),
        ("scaling = [{ gpus = [1] }]", "'gpus' is no field of [scaling] that can be swept. Valid: gpus_per_node, mode"),
        ("measure = [{ repeats = 1 }]", "sweep.'measure' is no field that can be swept"),
        ("train = [{ engine = 'ddp' }]\n'train.engine' = ['none']",
         "sweep.'train' and sweep.'train.engine' both vary train.engine. Give all values of a field under one"),
        ("'train.zero_stage' = [1]\ntrain = [{ engine = 'ddp' }, { zero_stage = 2 }]",
         "sweep.'train.zero_stage' and sweep.'train' both vary train.zero_stage"),
        ("train = [{ zero_stage = 5 }]", "train.zero_stage is 5, but should be at most 3. Correct it in [sweep]."),
        ("train = [{ zero_stage = [1, 2] }]", "is [1, 2], but should be a whole number. Correct it in [sweep]."),
        ("gpus = [1, 2]", "'gpus' is no field that can be swept. It is a list already: write gpus = [1, 2, 4] in"),
        ("train.engine = ['ddp']", "sweep.train is {'engine': ['ddp']}, but should be a list. Write a field in quotes"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused(tmp_path: Path, sweep: str, said: str) -> None:
    assert said in refusal_of(tmp_path, f"{toml()}[sweep]\n{sweep}\n")


def test_tables_count_as_one_value_each(tmp_path: Path) -> None:
    tables = ", ".join(f"{{ engine = 'ddp', micro_batch = {n} }}" for n in range(1, 3001))
    message = refusal_of(tmp_path, f"{toml()}[sweep]\ntrain = [{tables}]\n'train.seed' = [1, 2]\n")
    assert "make 36,000 runs" in message  # 3,000 tables x 2 seeds x 2 rank counts x 3 repeats


def test_every_sweepable_field_can_be_swept(tmp_path: Path) -> None:
    for field in SWEEPABLE:
        wrong = 1 if field == "train.arguments" else "x"
        message = refusal(write_study(tmp_path, {"sweep": {field: [[wrong]]}}))
        # The value is judged, or its first item, and not the field.
        assert any(f"{named}, but should be" in message for named in (f"{field} is ['x']", f"{field}.0 is {wrong!r}"))


def test_a_study_too_large_to_run_is_refused_before_it_is_laid_out(tmp_path: Path) -> None:
    numbers = list(range(1, 101))
    sweep = {"train.micro_batch": numbers, "train.seed": numbers, "model.image_size": numbers}
    message = refusal(write_study(tmp_path, {"sweep": sweep}))
    assert "make 6,000,000 runs. Valid: at most 20,000" in message  # 100^3 points x 2 rank counts x 3 repeats


def test_the_modes_of_a_study(tmp_path: Path) -> None:
    assert StudyFile.read(write_study(tmp_path)).modes == ("strong-micro",)
    path = write_study(tmp_path, {"sweep": {"scaling.mode": ["weak", "strong-global"]}})
    assert StudyFile.read(path).modes == ("weak", "strong-global")


# --- anything at all -----------------------------------------------------------------------------------------------


def said_of(path: Path) -> str | None:
    """What reading `path` says; None where it is a study."""
    try:
        StudyFile.read(path)
    except RequestError as error:
        return str(error)
    return None


FULL = (
    toml(
        {
            "train": {"engine": "deepspeed", "learning_rate": 0.001, "precision": "fp32"},
            "launch": {"launcher": "torchrun", "oversubscribe": True},
            "measure": {"repeats": 2, "hang_seconds": 60.5},
            "sweep": {"train.engine": ["ddp", "deepspeed"], "scaling.mode": ["weak", "strong-micro"]},
        }
    )
    + "model = [{ layers = 2 }, { layers = 4, heads = 2 }]\n"
)
FRAGMENTS = st.sampled_from(
    ["[", "]", "[[", "]]", "{", "}", '"', "'", '"""', "=", ".", ",", "\n", "#", "nan", "-inf", "1e400",
     "0x" + "f" * 9000, "9" * 400, "true", "1979-05-27", "[model]", "[sweep]", "\\u001b",
     "\\ud800", "\x00", "\x1b", "é", "[]", "{}",
     "a.b.c", '"train.engine" = [[1]]', "train = [{engine = 1}, {}]", "[[sweep.train]]", "name",
     "[train]\nmicro_batch=[1]"]
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(FULL)), st.integers(0, 40), FRAGMENTS | st.text(max_size=8)), max_size=4))
@example([(0, len(FULL), "")])
def test_a_mutilated_study_is_read_or_refused_but_never_crashes(
    tmp_path: Path, cuts: list[tuple[int, int, str]]
) -> None:
    text = FULL
    for place, length, inserted in cuts:
        text = text[:place] + inserted + text[place + length :]
    path = tmp_path / "study.toml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    said = said_of(path)
    assert said is None or (said.replace("\n", "").isprintable() and len(said) < 4000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_but_never_crash(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "study.toml").write_bytes(content)
    with pytest.raises(RequestError):
        StudyFile.read(tmp_path / "study.toml")


TABLES = st.lists(
    st.dictionaries(
        st.sampled_from(["engine", "zero_stage", "micro_batch", "compile", "engin", "root"]),
        st.sampled_from(["none", "ddp", "deepspeed", 0, 2, 64, True, [1]]),
        max_size=3,
    ),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TABLES, st.booleans())
def test_any_tables_are_every_combination_or_one_message(
    tmp_path: Path, tables: list[dict[str, Any]], beside: bool
) -> None:
    def inline(table: dict[str, Any]) -> str:
        return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + "}"

    path = tmp_path / "study.toml"
    also = "'data.fraction' = [0.5, 1.0]\n" if beside else ""
    path.write_text(f"{toml()}[sweep]\ntrain = [{', '.join(map(inline, tables))}]\n{also}")
    said = said_of(path)
    if said is not None:
        assert said.replace("\n", "").isprintable()
        assert len(said) < 1500
        return
    points = list(StudyFile.read(path).points())
    assert [labels for labels, _, _ in points] == [
        {**{f"train.{key}": value for key, value in table.items()}, **more}
        for table in tables
        for more in ([{"data.fraction": 0.5}, {"data.fraction": 1.0}] if beside else [{}])
    ]
    for labels, study, by_hand in points:
        assert labels.keys() <= by_hand
        assert all(getattr(study.train, field[6:]) == value for field, value in labels.items() if field[:5] == "train")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "measure.steps is True, but should be a whole number"),
        ("5", "measure.steps is '5', but should be a whole number or \"auto\""),
        ("aut", "measure.steps is 'aut', but should be a whole number or \"auto\""),
        (5.0, "measure.steps is 5.0, but should be a whole number"),
    ],
)
def test_steps_are_a_whole_number_or_auto(tmp_path: Path, value: object, said: str) -> None:
    assert said in refusal(write_study(tmp_path, {"measure": {"steps": value}}))


def test_a_word_that_is_meant_gets_one_correction(tmp_path: Path) -> None:
    said = refusal(write_study(tmp_path, {"train": {"device": "gpu"}}))
    assert 'Write device = "cuda"' in said
    assert "Did you mean" not in said
