"""The figures and the claims as JSON, for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vitscale.published import published
from vitscale.report.like_paper.accuracy_tests import AccuracyTest
from vitscale.report.like_paper.claims import Claims, accuracy_words, hosts_sentence
from vitscale.report.like_paper.drawn import Drawn
from vitscale.report.like_paper.host_pairs import HostPair
from vitscale.report.words import finite

SCHEMA = 1


def to_json(drawn: Sequence[Drawn], tested: Claims) -> str:
    """One object: `schema`, `source`, `claims`, `figures`. Unknown values are null."""
    content = {
        "schema": SCHEMA,
        "source": str(published().source),
        "claims": {
            "accuracy": [_accuracy(test) for test in tested.accuracy],
            "accuracy_at_equal_batch": [_accuracy(test) for test in tested.equal_batch],
            "hosts": [_hosts(pair) for pair in tested.hosts],
        },
        "figures": [
            {
                "number": one.paper.number,
                "title": one.paper.title,
                "draws": one.paper.draws,
                "drawn": one.lack is None,
                "missing": one.lack.reason if one.lack is not None else None,
                "steps": list(one.lack.steps) if one.lack is not None else [],
                "text": list(one.figure.text),
            }
            for one in drawn
        ],
    }
    return json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _accuracy(test: AccuracyTest) -> dict[str, Any]:
    return {
        "workload": test.name,
        "gpus": test.gpus,
        "base_gpus": test.base_gpus,
        "global_batch": test.batches[1],
        "base_global_batch": test.batches[0],
        "split": test.samples.split,
        "images": test.samples.images,
        "difference": test.result.difference,
        "low": test.result.low,
        "high": test.result.high,
        "counting_error": test.result.counting_error,
        "p": test.result.p,
        "p_adjusted": test.result.p_adjusted,
        "verdict": test.result.verdict,
        "text": accuracy_words(test),
    }


def _hosts(pair: HostPair) -> dict[str, Any]:
    test = pair.test
    return {
        "workload": pair.name,
        "ratio": test.ratio.centre,
        "low": test.ratio.low,
        "high": test.ratio.high,
        "scatter": test.scatter,
        "margin": test.margin,
        "p_equivalence": test.p_equivalence,
        "cannot_exclude": test.cannot_exclude,
        "verdict": test.verdict,
        "counts": [
            {
                "gpus": one.gpus,
                "ratio": one.ratio.centre,
                "low": one.ratio.low,
                "high": one.ratio.high,
                "runs": [one.one_host_runs, one.several_hosts_runs],
            }
            for one in test.counts
        ],
        "text": hosts_sentence(test),
    }
