"""What a trial that trains something else leads to in the analysis of a whole study, and on its page."""

from __future__ import annotations

from report_forms import page
from results_factory import make_curve, make_results, make_trial, steady_run
from vitscale.analysis import Analysis, analyse


def study() -> Analysis:
    """DDP, FSDP2 and DeepSpeed on 1 and 2 ranks; after the first update the loss of DeepSpeed on 2 ranks is 1 % off."""
    curves, runs = [], []
    for engine in ("ddp", "fsdp2", "deepspeed"):
        trials = [make_trial(engine, gpus) for gpus in (1, 2)]
        curves.append((make_curve(trials), trials))
        for trial in trials:
            off = 1.01 if (engine, trial.world.size) == ("deepspeed", 2) else 1.0
            losses = [2.0 / (1 + 0.1 * step) * (off if step else 1.0) for step in range(400)]
            runs += [steady_run(trial, 0.1 + 0.001 * repeat, repeat, losses=losses) for repeat in range(3)]
    return analyse(make_results(curves, runs))


def test_a_drift_is_found_named_and_left_out() -> None:
    found = study()
    (drifting,) = [trial for trial in found.trials.values() if trial.drifts]
    assert (drifting.trial.train.engine, drifting.trial.world.size) == ("deepspeed", 2)
    (verdict,) = [verdict for verdict in found.findings if verdict.kind == "drift"]
    assert verdict.about.trials == (drifting.trial_id,)
    assert found.findings[0] is verdict
    assert not [one for one in found.comparisons if drifting.trial_id in (one.first_trial, one.second_trial)]
    (waterfall,) = [one for one in found.waterfalls if one.trial_id == drifting.trial_id]
    assert waterfall.reason == "its loss drifts: it does other work than the baseline"


def test_the_page_tells_of_equality_and_holds_each_curve_against_one() -> None:
    text = " ".join(page(study()).split())
    assert "the losses of 3 trials are those of a trial that must compute the same, exactly; 1 drifts." in text
    assert "<h3>strong-micro: times as fast as ddp</h3>" in text
    assert '<tr><td class="words">fsdp2</td><td>1.00x<span class="bounds">no difference, ' in text
    assert 'drifts<span class="bounds">1 % off</span>' in text
    assert "deepspeed ZeRO-0 on 2 ranks: its loss differs by 1 % from that of ddp on 2 ranks" in text
