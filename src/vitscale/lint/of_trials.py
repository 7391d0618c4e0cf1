"""The findings on the DeepSpeed files of a study's trials, judged for each trial's model, ranks and own settings"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vitscale.lint.releases import installed_version
from vitscale.lint.setting import Setting
from vitscale.lint.table import lint
from vitscale.present.document import Finding, most_severe_first
from vitscale.trial import model_spec
from vitscale.trial.deepspeed_config import BATCH_KEYS
from vitscale.trial.trial import TrainSpec, Trial

_ALWAYS_SETTLED = (*BATCH_KEYS, "gradient_clipping", "timers.throughput", "steps_per_print")
"""What the engine writes into every configuration, so that it is open in no file."""

_SWITCHES = {"bf16": "torch_autocast", "bf16-params": "bf16", "fp16": "fp16"}


def findings_of(trials: Mapping[str, Trial]) -> tuple[Finding, ...]:
    """Each finding once, most severe first, about the trials that it concerns; none on trials without a file."""
    concerned: dict[Finding, list[str]] = {}
    for trial_id, trial in trials.items():
        config = trial.train.deepspeed_config
        for finding in lint(config, _setting(trial)) if config is not None else ():
            concerned.setdefault(finding, []).append(trial_id)
    return most_severe_first(
        [replace(finding, about=replace(finding.about, trials=tuple(ids))) for finding, ids in concerned.items()]
    )


def _setting(trial: Trial) -> Setting:
    version = installed_version()
    return Setting(
        model=trial.model.name,
        parameters=model_spec.parameters(trial.model),
        gpus=trial.world.size,
        deepspeed=version,
        installed=version is not None,
        stage=trial.train.zero_stage,
        settled=frozenset(_settled(trial.train)),
    )


def _settled(train: TrainSpec) -> list[str]:
    """The keys that this trial writes over or completes."""
    zero = {
        "overlap_comm": train.overlap_comm is not None,
        "reduce_bucket_size": train.bucket_mib is not None,
        "allgather_bucket_size": train.gather_bucket_mib is not None,
        "stage3_prefetch_bucket_size": train.gather_bucket_mib is not None,
        "offload_optimizer": train.offload != "none",
        "offload_param": train.offload == "parameters",
    }
    settled = [*_ALWAYS_SETTLED, *(f"zero_optimization.{name}" for name, given in zero.items() if given)]
    if train.gradient_dtype is not None:
        settled.append("communication_data_type")
    if train.precision in _SWITCHES:
        settled.append(_SWITCHES[train.precision])
    return settled
