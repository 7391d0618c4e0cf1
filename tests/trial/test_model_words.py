"""A count is worded once, for all verbs."""

from __future__ import annotations

from vitscale.trial.model_cost import ParameterCount
from vitscale.trial.model_words import CountedModel, parameter_fields, parameter_lines, parameters_in_words

FORMULA, TRACED = ParameterCount(5_717_416, "by formula"), ParameterCount(87_000_000, "traced")


def test_a_count_says_its_source_unless_a_formula_has_it() -> None:
    assert parameters_in_words([FORMULA]) == "5,717,416 parameters"
    assert parameters_in_words([TRACED]) == "87,000,000 parameters (traced)"
    assert parameters_in_words([ParameterCount(1000, "told"), None]) == "1,000 parameters (told), unavailable for some"
    assert parameters_in_words([None]) == "number of parameters unavailable"
    of_older_record = ParameterCount(7, "unknown")
    assert parameters_in_words([of_older_record]) == "7 parameters (unknown source: an older record does not say it)"
    several = [ParameterCount(number, "measured") for number in (4000, 1000, 2000)]
    assert parameters_in_words(several) == "1,000 or 2,000 or 4,000 parameters (measured)"
    assert parameters_in_words([*several, ParameterCount(3000, "measured")]) == "1,000 to 4,000 parameters (measured)"


def test_models_of_one_size_share_a_line() -> None:
    models = [CountedModel("a", TRACED), CountedModel("b", FORMULA), CountedModel("c", TRACED), CountedModel("a", None)]
    assert parameter_lines(models) == [
        "a: 87,000,000 parameters (traced), unavailable for some",
        "b: 5,717,416 parameters",
        "c: 87,000,000 parameters (traced)",
    ]
    assert parameter_lines([models[0], models[2]]) == ["a, c: 87,000,000 parameters (traced)"]


def test_an_unavailable_count_is_null_in_json() -> None:
    assert parameter_fields(TRACED) == {"parameters": 87_000_000, "parameters_source": "traced"}
    assert parameter_fields(None) == {"parameters": None, "parameters_source": None}
