"""Published tables held against predictions: a folder in, errors of known tables out, one message for a bad index."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from paired import OURS, clopper_pearson, errors, same_intervals
from published_folder import gpu_pairs, other_splits, read
from published_tables import evaluate, main, points_of

from vitscale.errors import RequestError

ROOT = Path(__file__).parents[2]
EXTERNAL = Path(os.environ.get("VITSCALE_PUBLISHED_TABLES") or ROOT.parent / "shared" / "external")


def folder(to: Path, rates: dict[int, float], column: str = "images_per_second", **changes: Any) -> Path:
    """A folder with one series "s", fitted on all counts but the largest, which is held."""
    *fit, held = sorted(rates)
    to.mkdir(exist_ok=True)
    with (to / "s.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gpus", "layout", column, "micro_batch", "gpu", "note"])
        writer.writerows([gpus, "8-gpus-per-node", rate, 32, "V100", ""] for gpus, rate in rates.items())
    entry = {"name": "s", "file": "s.csv", "fit": fit, "held": [held], "per_node": 8, "source": "a/b: README.md"}
    (to / "index.json").write_text(json.dumps({"series": [entry | changes]}), encoding="utf-8")
    return to


def test_a_constant_step_is_predicted_exactly_by_every_peer_and_nearly_by_us(tmp_path: Path) -> None:
    points, notes = evaluate(read(folder(tmp_path, {n: 100.0 * n for n in (1, 2, 4, 8)})))
    assert not notes
    (found,) = points
    assert (found.source, found.unit, found.gpus, found.label) == ("a/b", "s", 8, "extrapolated")
    ours, *peers = found.predicted.values()
    assert ours == pytest.approx(800, rel=0.05)
    assert found.low < 800 < found.high
    assert peers == pytest.approx([800] * 5)


def test_peers_find_the_laws_that_made_the_tables(tmp_path: Path) -> None:
    """Amdahl: 1/X = 0.001 + 0.009/N; Ernest's step of 32 images on each GPU: 0.3 + 0.02 ln N s."""
    amdahl = {n: 1 / (0.001 + 0.009 / n) for n in (1, 2, 4, 8)}
    (found,), _ = evaluate(read(folder(tmp_path, amdahl)))
    for name in ("Amdahl", "USL", "Ernest, fixed job"):
        assert found.predicted[name] == pytest.approx(amdahl[8], rel=1e-6)
    ernest = {n: 32 * n / (0.3 + 0.02 * math.log(n)) for n in (1, 2, 4, 8)}
    (found,), _ = evaluate(read(folder(tmp_path, ernest)))
    assert found.predicted["Ernest, one step"] == pytest.approx(ernest[8], rel=1e-6)


def test_seconds_of_a_step_say_the_same_as_images_per_second(tmp_path: Path) -> None:
    rates = {1: 100.0, 2: 195.0, 4: 380.0, 8: 700.0}
    (by_rate,), _ = evaluate(read(folder(tmp_path / "a", rates)))
    steps = {n: 32 * n / rate for n, rate in rates.items()}
    (by_step,), _ = evaluate(read(folder(tmp_path / "b", steps, "step_seconds")))
    for name, rate in by_rate.predicted.items():
        assert by_step.predicted[name] / by_step.measured == pytest.approx(rate / by_rate.measured), name
    assert by_step.high / by_step.low == pytest.approx(by_rate.high / by_rate.low)


def test_series_on_two_gpu_types_are_found_by_what_else_they_share(tmp_path: Path) -> None:
    """x_net_amp on V100 and y_net_amp on A100 alone: another repository, batch or program is no pair."""
    series = [
        ("x_net_amp", "V100", "a/b:"), ("y_net_amp", "A100", "a/b:"), ("y_other_amp", "A100", "a/b:"),
        ("z_net_amp", "A100", "c/d:"), ("v_net_amp", "V100", "a/b:"),
    ]  # fmt: skip
    entries = []
    for name, gpu, source in series:
        (tmp_path / f"{name}.csv").write_text(f"gpus,images_per_second,micro_batch,gpu\n1,9,32,{gpu}\n2,17,32,{gpu}\n")
        entries.append({"name": name, "file": f"{name}.csv", "fit": [1], "held": [2], "source": source})
    (tmp_path / "index.json").write_text(json.dumps({"series": entries}), encoding="utf-8")
    found = [(words, one.entry.name, other.entry.name) for words, one, other in gpu_pairs(read(tmp_path))]
    assert found == [("net amp", "x_net_amp", "y_net_amp"), ("net amp", "y_net_amp", "v_net_amp")]


def test_other_splits_are_those_that_the_index_has_not(tmp_path: Path) -> None:
    """Of 1, 2, 4, 8 and 64 the index fits all but the last; 64 is more than four times all others."""
    (table,) = read(folder(tmp_path, {n: 100.0 * n for n in (1, 2, 4, 8, 64)}))
    splits = [(one.entry.fit, one.entry.held) for one in other_splits([table, table])]
    assert splits == [((1, 2), (4, 8)), ((1, 2, 4), (8,))]


def test_what_the_product_refuses_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    points, notes = evaluate(read(folder(tmp_path, {1: 100.0, 2: 190.0, 8: 700.0}, network="a fast one")))
    assert not points
    assert "'a fast one' is no network" in notes["s"]


def test_a_model_that_has_no_name_here_is_left_untold(tmp_path: Path) -> None:
    rates = {1: 100.0, 8: 700.0, 16: 1000.0}
    (named,), notes = evaluate(read(folder(tmp_path, rates, model="no-such-net")))
    (untold,), none = evaluate(read(folder(tmp_path, rates)))
    assert named == untold
    assert not none
    assert "its model was left untold: unknown model 'no-such-net'" in notes["s"]
    assert not evaluate(read(folder(tmp_path, rates, engine="ddp", parameters=25_000_000)))[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"held": [16]}, r"series 1 's': s\.csv has no row of 16 GPUs"),
        ({"fit": []}, r"series 1 's': fit: .*at least 1 item"),
        ({"fit": [1, 8]}, r"series 1 's': 8 GPUs are both fitted and held"),
        ({"per_node": "many"}, r"series 1 's': per_node: .*integer"),
        ({"file": "../s.csv"}, r"series 1 's': file: .*pattern"),
        ({"file": "t.csv"}, r"series 1 's': .*No such file"),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as error:
        read(folder(tmp_path, {1: 100.0, 2: 190.0, 8: 700.0}, **changes))
    assert re.search(said, str(error.value))


@pytest.mark.parametrize("text", ["", "[]", '{"series": 3}', '{"series": [3, null]}', "{" * 10_000])
def test_an_index_that_is_none_is_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=r"index\.json"):
        read(tmp_path)


def test_a_rate_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"s\.csv, row 2: neither images_per_second nor step_seconds"):
        read(folder(tmp_path, {1: 100.0, 2: -1.0, 8: 700.0}))


@pytest.mark.parametrize("text", ["", "[]", '{"points": [{"series": "s"}]}', '{"points": [3]}'])
def test_earlier_points_that_are_none_are_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "before.json").write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=r"before\.json. cannot be used: .*Give a file that --out wrote"):
        points_of(tmp_path / "before.json")


def test_the_command_over_published_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two series of one source and one of another: no line is longer than 80, and against itself nothing differs."""
    if not (EXTERNAL / "index.json").is_file():
        pytest.skip(f"published tables are not at {EXTERNAL}; VITSCALE_PUBLISHED_TABLES names another folder")
    wanted = ("dlperf_ngc_pt_bert_fp16_b64", "dlperf_ngc_pt_bert_fp16_b64_2node", "tf_ec2_resnet152")
    entries = json.loads((EXTERNAL / "index.json").read_text(encoding="utf-8"))["series"]
    some = tmp_path / "some"
    some.mkdir()
    for entry in (chosen := [one for one in entries if one["name"] in wanted]):
        (some / entry["file"]).write_bytes((EXTERNAL / entry["file"]).read_bytes())
    (some / "index.json").write_text(json.dumps({"series": chosen}), encoding="utf-8")
    out = tmp_path / "now.json"
    monkeypatch.setattr("sys.argv", ["published_tables.py", str(some), "--out", str(out)])
    main()
    monkeypatch.setattr("sys.argv", ["published_tables.py", str(some), "--against", str(out)])
    main()
    told = capsys.readouterr().out
    assert "3 series, 5 points: vitscale is off by " in told
    assert "3 series are 2 units" in told
    assert "Oneflow-Inc/DLPerf: 3 points" in told
    assert re.search(r"5 points in common\n.*\nvitscale +\+0\.0 +\+0\.0 \+0\.0", told)
    assert max(map(len, told.splitlines())) <= 80
    points = points_of(out)
    assert max(abs(math.log(one.predicted[OURS] / one.measured)) for one in points) < 0.6


@pytest.mark.nightly
def test_intervals_hold_on_published_tables_and_no_peer_is_closer() -> None:
    """Finding 3 of the review: 78 % of the extrapolated ones held, and rates came out 6 % too high."""
    if not (EXTERNAL / "index.json").is_file():
        pytest.skip(f"published tables are not at {EXTERNAL}; VITSCALE_PUBLISHED_TABLES names another folder")
    points, _ = evaluate(read(EXTERNAL))
    held = same_intervals(points, OURS).held
    for label in ("extrapolated", "prior-driven"):
        of_it = held[[point.label == label for point in points]]
        low, high = clopper_pearson(int(of_it.sum()), len(of_it))
        assert low <= 0.9 <= high
    means = {model: abs(errors(points, model)).mean() for model in points[0].predicted}
    assert min(means, key=means.__getitem__) == OURS
    assert means[OURS] < 0.072
    assert abs(errors(points, OURS).mean()) < 0.02
