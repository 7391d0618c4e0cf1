from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitscale.engines.deepspeed.config import check_batch, contradictions, fixed_fields, read, synchronised
from vitscale.errors import RequestError


def refusal_of(folder: Path, content: str | bytes) -> str:
    path = folder / "ds.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RequestError) as caught:
        read(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    return message


def test_a_file_is_returned_as_it_is(tmp_path: Path) -> None:
    content = {
        "zero_optimization": {"stage": 1},
        "unknown_to_us": {"x": [1, 2.5, None, "auto"]},
        "bf16": {"enabled": "auto"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(content))
    assert read(tmp_path / "ds.json") == content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ('{"a": 1]', "is no JSON or Hjson at line 1, column 8: Found ']' where a key name was expected."),
        ('{\n "a": 1\n "b" 2}', "is no JSON or Hjson at line 3, column 6: Expecting ':' delimiter"),
        ("not json", "holds 'not json'. Valid: one object"),
        (b"\xff\xfe\x00", "is not text (byte 0 is not UTF-8)"),
        ("[1, 2]", "holds [1, 2]. Valid: one object"),
        ('"x"', "holds 'x'. Valid: one object"),
        ("null", "holds None"),
        ('{"a": 1, "a": 2}', "key 'a' stands twice in one object"),
        ('{"x": {"lr": 1, "lr": 1}}', "key 'lr' stands twice"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ('{"a": 1e999}', "too large for a float"),
        ('{"a": [{"b": -1e999}]}', "too large for a float"),
        ('{"a": ' + "9" * 5000 + "}", "is no JSON or Hjson: a whole number in it has 5,000 digits"),
        ('{"a": "\\ud800"}', "holds half of a character"),
        ('{"\\ud800": 1}', "holds half of a character"),
        ('{"a": ' * 100_000, "is nested too deeply"),
        ('{"a": ' * 30 + "1" + "}" * 30, "is nested too deeply"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "is larger than 1 MiB"),
        ('{"\x1b[2J": 1}', "is no JSON or Hjson at line 1"),
        ('{"a": 1, "\\u001b[2J": 1, "\\u001b[2J": 1}', "stands twice"),
    ],
)
def test_what_is_no_configuration_is_named_in_one_message(tmp_path: Path, content: str | bytes, said: str) -> None:
    assert said in refusal_of(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"train_batch_size": "32"}', "train_batch_size is '32', but should be a whole number. Write it without"),
        ('{"train_batch_size": true}', "train_batch_size is True, but should be a whole number"),
        ('{"train_batch_size": 32.5}', "should be a whole number"),
        ('{"train_micro_batch_size_per_gpu": 0}', "should be at least 1"),
        ('{"gradient_accumulation_steps": -1}', "should be at least 1"),
        ('{"gradient_clipping": "1.0"}', "gradient_clipping is '1.0', but should be a number"),
        ('{"gradient_clipping": true}', "should be a number"),
        ('{"gradient_clipping": -1}', "should be at least 0"),
        ('{"zero_optimization": 2}', "zero_optimization is 2, but should be a table"),
        ('{"zero_optimization": {"stage": "2"}}', "zero_optimization.stage is '2', but should be a whole number"),
        ('{"zero_optimization": {"stage": true}}', "should be a whole number"),
        ('{"zero_optimization": {"stage": 4}}', "should be at most 3"),
        ('{"fp16": true}', "fp16 is True, but should be a table"),
        ('{"bf16": {"enabled": "true"}}', "bf16.enabled is 'true', but should be true or false"),
        ('{"bf16": {"enabled": 1}}', "bf16.enabled is 1, but should be true or false"),
        ('{"torch_autocast": []}', "torch_autocast is [], but should be a table"),
        ('{"optimizer": "AdamW"}', "optimizer is 'AdamW', but should be a table"),
        ('{"optimizer": {"params": {}}}', "optimizer.type is missing"),
        ('{"optimizer": {"type": 3}}', "should be text in quotes"),
        ('{"optimizer": {"type": "Adam", "params": {"lr": "0.1"}}}', "optimizer.params.lr is '0.1', but should be"),
        ('{"optimizer": {"type": "Adam", "params": [1]}}', "should be a table"),
        ('{"wall_clock_breakdown": "yes"}', "wall_clock_breakdown is 'yes', but should be true or false"),
    ],
)  # fmt: skip
def test_a_wrong_type_in_a_key_we_look_at_is_named(tmp_path: Path, content: str, said: str) -> None:
    assert said in refusal_of(tmp_path, content)


@pytest.mark.parametrize(
    ("name", "said"),
    [("no.json", "No such file"), (".", "Is a directory"), ("a\x00", "no such path"), ("a" * 5000, "too long")],
)
def test_a_path_that_cannot_be_read_is_named(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(RequestError, match=f"{said}.*train.deepspeed_config names a JSON file"):
        read(tmp_path / name)


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(RequestError, match="larger than 1 MiB"):
        read(Path("/dev/zero"))


def test_many_keys_take_no_quadratic_time(tmp_path: Path) -> None:
    """100,000 different keys: comparing each with each would take minutes, here it is under a hundred looks a key."""
    text = "{" + ",".join(f'"{n}":1' for n in range(90_000)) + "}"
    (tmp_path / "ds.json").write_text(text)
    began = time.process_time()
    json.loads(text)
    once = time.process_time() - began
    began = time.process_time()
    assert len(read(tmp_path / "ds.json")) == 90_000
    assert time.process_time() - began < 100 * once + 1


@pytest.mark.parametrize(
    ("config", "fixed"),
    [
        ({}, {}),
        ({"fp16": {"enabled": False}}, {}),
        ({"fp16": {}}, {}),
        ({"fp16": {"enabled": True}}, {"train.precision": "fp16"}),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, {"train.precision": "bf16-params"}),
        ({"bfloat16": {"enabled": True}}, {"train.precision": "bf16-params"}),
        ({"bf16": None, "bfloat16": {"enabled": True}}, {"train.precision": "bf16-params"}),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, {}),
        ({"communication_data_type": "FP32"}, {"train.gradient_dtype": "fp32"}),
        ({"communication_data_type": "auto"}, {}),
        ({"communication_data_type": None}, {}),
        ({"torch_autocast": {"enabled": True}}, {"train.precision": "bf16"}),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, {"train.precision": "bf16"}),
        ({"torch_autocast": {"enabled": True, "dtype": "auto"}}, {"train.precision": "bf16"}),
        ({"torch_autocast": {"enabled": False}}, {"train.precision": "fp32"}),
        ({"torch_autocast": {"enabled": False}, "bf16": {"enabled": True}}, {"train.precision": "bf16-params"}),
        ({"gradient_clipping": 0.0}, {"train.gradient_clipping": 0.0}),
        ({"zero_optimization": {"stage": 0}}, {"train.zero_stage": 0}),
        ({"zero_optimization": {"overlap_comm": True}}, {}),
        (
            {
                "optimizer": {
                    "type": "SGD",
                    "params": {"lr": 1, "momentum": 0.5, "weight_decay": "auto", "nesterov": True},
                }
            },
            {"train.optimizer": "SGD", "train.learning_rate": 1.0, "train.momentum": 0.5},
        ),
    ],
)
def test_what_a_file_fixes(config: dict[str, Any], fixed: dict[str, Any]) -> None:
    assert fixed_fields(config) == fixed


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "enables bf16-params and fp16 at once"),
        ({"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "enables fp16 and bf16 at once"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype is 'float16'"),
    ],
)
def test_two_precisions_at_once_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        fixed_fields(config)


def test_contradictions_are_all_named_with_both_values() -> None:
    config = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    study = {
        "train.gradient_clipping": 0.0,
        "train.zero_stage": 2,
        "train.precision": "fp32",
        "train.engine": "deepspeed",
    }
    assert contradictions(config, study) == [
        "train.gradient_clipping is 0.0 in the study but 1.0 in the DeepSpeed configuration",
        "train.precision is 'fp32' in the study but 'bf16-params' in the DeepSpeed configuration",
    ]


@pytest.mark.parametrize(
    ("field", "value", "key", "theirs"),
    [
        ("offload", "optimizer", "offload_optimizer", {"device": "cpu"}),
        ("offload", "optimizer", "cpu_offload", True),
        ("offload", "parameters", "cpu_offload_param", True),
        ("gather_bucket_mib", 1, "stage3_prefetch_bucket_size", 1_000_000),
        ("gather_bucket_mib", 1, "prefetch_bucket_size", 1_000_000),
    ],
)
def test_what_only_one_may_set_is_known_by_all_its_names(field: str, value: Any, key: str, theirs: Any) -> None:
    (said,) = contradictions({"zero_optimization": {key: theirs}}, {f"train.{field}": value})
    assert said.endswith(f"in the study, and the DeepSpeed configuration sets zero_optimization.{key} too")


@pytest.mark.parametrize(
    ("in_file", "in_study", "said"),
    [
        (8, 8, []),
        ("8", 8, []),
        (0, 1, []),
        ("auto", 8, []),
        (8, 4, ["train.hpz is 4 in the study but 8 in the DeepSpeed configuration"]),
        (8, 1, ["train.hpz is 1 in the study but 8 in the DeepSpeed configuration"]),
    ],
)
def test_hpz_may_stand_in_both_if_it_is_the_same(in_file: object, in_study: int, said: list[str]) -> None:
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": in_file}}
    assert contradictions(config, {"train.hpz": in_study}) == said


def test_the_dtype_of_gradients_may_stand_in_both_if_it_is_the_same() -> None:
    config = {"communication_data_type": "fp32"}
    assert contradictions(config, {"train.gradient_dtype": "fp32"}) == []
    assert contradictions(config, {"train.gradient_dtype": "bf16"}) == [
        "train.gradient_dtype is 'bf16' in the study but 'fp32' in the DeepSpeed configuration"
    ]


VALUES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("mode", ["strong-micro", "strong-global", "weak"])
@pytest.mark.parametrize("config", [{}, dict.fromkeys(VALUES, "auto")])
def test_absent_and_auto_batch_keys_fit_every_mode(mode: str, config: dict[str, Any]) -> None:
    check_batch(config, mode, VALUES)


@pytest.mark.parametrize("mode", ["strong-micro", "strong-global", "weak"])
@pytest.mark.parametrize("key", VALUES)
def test_the_right_number_fits_and_a_global_batch_only_under_strong_global(mode: str, key: str) -> None:
    if key == "train_batch_size" and mode != "strong-global":
        with pytest.raises(
            RequestError, match=rf"train_batch_size is 64, but under scaling.mode = '{mode}'.*Remove {key} "
        ):
            check_batch({key: VALUES[key]}, mode, VALUES)
    else:
        check_batch({key: VALUES[key]}, mode, VALUES)


@pytest.mark.parametrize("mode", ["strong-micro", "strong-global", "weak"])
@pytest.mark.parametrize("key", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_the_wrong_number_names_both(mode: str, key: str) -> None:
    with pytest.raises(RequestError, match=f"{key} is 5 in the file but {VALUES[key]} in the study.*Remove {key} from"):
        check_batch({key: 5}, mode, VALUES)


@pytest.mark.parametrize(("config", "expected"), [(None, False), ({}, False), ({"wall_clock_breakdown": True}, True)])
def test_synchronised_timing_is_noticed(config: dict[str, Any] | None, expected: bool) -> None:
    assert synchronised(config) is expected


KEYS = st.sampled_from(
    ["train_batch_size", "gradient_clipping", "zero_optimization", "stage", "bf16", "fp16", "enabled", "optimizer",
     "type", "params", "lr", "torch_autocast", "dtype", "wall_clock_breakdown", "other"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def said_of(path: Path) -> str | None:
    """What reading `path` says; None where it is a configuration."""
    try:
        fixed_fields(read(path))
    except RequestError as error:
        return str(error)
    return None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS, JSON, max_size=5) | JSON, st.integers(0, 60), st.text(max_size=3))
def test_any_json_and_its_mutilation_is_read_or_refused(tmp_path: Path, content: object, cut: int, put: str) -> None:
    text = json.dumps(content)
    for candidate in (text, text[:cut] + put + text[cut + 1 :]):
        (tmp_path / "ds.json").write_bytes(candidate.encode("utf-8", errors="surrogatepass"))
        said = said_of(tmp_path / "ds.json")
        assert said is None or said.isprintable()
