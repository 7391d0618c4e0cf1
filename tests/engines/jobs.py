"""What the equality tests train: every engine on 1, 2 and 3 ranks, so that each world is started once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.curves import SEGMENTED_STEPS, STEPS, Job

Train = dict[str, Any]


def _zero(stage: int, **fields: Any) -> Train:
    return {"engine": "deepspeed", "zero_stage": stage, **fields}


def _accelerate(backend: str, **fields: Any) -> Train:
    return {"engine": "accelerate", "accelerate_backend": backend, **fields}


ENGINE_FIELDS: dict[str, Train] = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "zero-0": _zero(0),
    "zero-1": _zero(1),
    "zero-2": _zero(2),
    "zero-3": _zero(3),
    "zero-2-offload": _zero(2, offload="optimizer"),
    "zero-3-offload": _zero(3, offload="parameters"),
    "accelerate-ddp": _accelerate("ddp"),
    "accelerate-zero-0": _accelerate("deepspeed", zero_stage=0),
    "accelerate-zero-1": _accelerate("deepspeed", zero_stage=1),
    "accelerate-zero-2": _accelerate("deepspeed", zero_stage=2),
    "accelerate-zero-3": _accelerate("deepspeed", zero_stage=3),
}
"""Name of an engine in these jobs -> its fields of [train]; all that run on CPU ranks. (Accelerate ignores FSDP there
and would train DDP; Megatron-Core: test_megatron.)"""

ADAMW: Train = {"optimizer": "adamw", "learning_rate": 0.001}
SGD: Train = {"optimizer": "sgd", "learning_rate": 0.05}
LAMB: Train = {"optimizer": "lamb", "learning_rate": 0.005}
CLIPPED: Train = {"gradient_clipping": 0.5}
"""Below the norms of all steps here: 0.6 to 2."""
ACCUMULATED: Train = {"grad_accum": 3}

SETTINGS: dict[str, Train] = {
    "adamw-clipped": ADAMW | CLIPPED,
    "sgd-accumulated": SGD | ACCUMULATED,
    "adamw-accumulated": ADAMW | ACCUMULATED,
    "sgd-clipped": SGD | CLIPPED,
}
OF_WORLD = {
    1: ("adamw-accumulated", "sgd-clipped"),
    2: ("adamw-clipped", "sgd-accumulated"),
    3: ("adamw-clipped", "sgd-accumulated"),
}
"""Each engine meets both optimizers, both accumulations, and clipping on and off, at every number of ranks."""
BEHIND_ACCELERATE = ("accelerate-zero-0", "accelerate-zero-1", "accelerate-zero-2")
FULLY = ("ddp", "fsdp2", "zero-0", "zero-1", "zero-2", "zero-3")
"""Engines that at two ranks meet all of `SETTINGS`."""

RATE: Train = ADAMW | {
    "learning_rate_warmup_steps": 3, "learning_rate_scaling": "sqrt", "learning_rate_base_batch": 9,
}  # fmt: skip
"""Twice the learning rate, reached in three steps."""
RATED = ("ddp", "fsdp2", "zero-0", "zero-3", "accelerate-ddp", "accelerate-zero-2")

AUTOCAST: Train = ADAMW | {"precision": "bf16"}
AUTOCAST_ENGINES = ("ddp", "fsdp2", "zero-0", "zero-1", "zero-2", "zero-3", "accelerate-ddp", "accelerate-zero-1")
MICRO_BATCHES = (1, 2, 3, 4)
PURE: Train = ADAMW | {"precision": "bf16-params"}
PURE_ENGINES = ("zero-0", "zero-1", "zero-2", "zero-3")
MASTERED: Train = PURE | {"master_weights": True}
"""What FSDP2 needs for what DeepSpeed's bf16 is: fp32 weights that are updated beside those that compute."""

ROUNDED = (("ddp", "fp16"), ("fsdp2", "bf16"), ("zero-0", "bf16"), ("zero-0", "fp16"),
           ("accelerate-ddp", "fp16"))  # fmt: skip

SHARES: dict[int, dict[int, list[int]]] = {
    2: {1: [25, 11], 3: [10, 2]},
    3: {1: [23, 9, 4], 3: [7, 4, 1]},
}
"""Images per micro-step of each rank, by ranks and accumulation: as ranks of unlike speed take them."""
SHARED = {2: ("sgd-clipped", "sgd-accumulated"), 3: ("adamw-clipped", "sgd-accumulated")}
SHARED_ONCE = ("accelerate-ddp", "accelerate-zero-0", "accelerate-zero-3")
"""Engines that meet unequal shares in one setting of three ranks; `FULLY` meet them in all of `SHARED`."""

SAVED_BEFORE, RESUMED_UNTIL = 4, 7
"""From the middle of an epoch into the next; as far goes what resumed trainings are held against."""
SAVED = ("ddp", "fsdp2", "zero-0", "zero-1", "zero-2", "zero-3", "zero-2-offload", "zero-3-offload",
         "accelerate-ddp", "accelerate-zero-3")  # fmt: skip
"""Whose `adamw-clipped` of two ranks leaves a checkpoint."""
SAVED_SGD = ("ddp", "zero-1", "zero-3")
RESUMED: dict[int, tuple[tuple[str, str], ...]] = {
    1: (*((name, name) for name in SAVED), ("zero-3", "none"), ("ddp", "zero-3"), ("fsdp2", "zero-1")),
    2: tuple((name, name) for name in SAVED),
    3: (("ddp", "zero-3"), ("fsdp2", "ddp"), ("zero-1", "zero-1"), ("zero-3", "fsdp2"), ("zero-3", "zero-3"),
        ("zero-2-offload", "zero-3-offload"), ("accelerate-zero-3", "accelerate-ddp"), ("fsdp2", "fsdp2")),
}  # fmt: skip
"""Ranks to (the checkpoint's engine, the engine that goes on); each is of two ranks."""
RESUMED_SGD: dict[int, tuple[tuple[str, str], ...]] = {
    1: (("zero-3", "none"),),
    2: (("ddp", "ddp"), ("zero-1", "zero-1"), ("zero-3", "zero-3")),
    3: (("ddp", "zero-3"), ("zero-1", "fsdp2")),
}
RESUMED_BY_DAY: dict[int, tuple[tuple[str, str], ...]] = {
    1: (("zero-3", "none"), ("ddp", "zero-3"), ("fsdp2", "zero-1"), ("zero-0", "zero-0"),
        ("zero-2-offload", "zero-2-offload"), ("accelerate-zero-3", "accelerate-zero-3")),
    2: tuple((name, name) for name in ("fsdp2", "zero-1", "zero-2", "zero-3", "zero-3-offload", "accelerate-ddp")),
    3: (("ddp", "zero-3"), ("fsdp2", "ddp"), ("zero-1", "zero-1"), ("zero-3", "fsdp2"),
        ("zero-2-offload", "zero-3-offload")),
}  # fmt: skip
"""Of `RESUMED`: every engine leaves a checkpoint for one that goes on, or goes on with one."""
REHEARSED_BY_DAY = ("ddp", "fsdp2", "zero-1", "zero-3", "accelerate-zero-3")
REHEARSED_STEPS = 3
"""An epoch, short last step included."""
MEASURED = ("fsdp2", "zero-1", "zero-3")


SEGMENTED: Train = {"batch_norm": "synchronised", "optimizer": "sgd", "learning_rate": 1e-4}
"""From random weights a larger rate amplifies rounding tenfold a step, in one process with torch's own norms too."""
FINE_TUNED: Train = SEGMENTED | {"optimizer": "adamw", "learning_rate": 6e-5}
GROWN = 3.0
"""Times as large as fresh ones are the weights that are fine-tuned: beside fresh ones, of 0.02 before norms, each of
AdamW's steps is so large that rounding grows to 1e-5 in twenty, in one process too."""
FAST: Train = FINE_TUNED | {"learning_rate": 1e-3}
"""Of rounding it makes as much as one process does with torch's own norms, which a `local` one has."""
LOCAL: Train = {"batch_norm": "local"}
SEGMENTED_ACCUMULATED: Train = SEGMENTED | {"grad_accum": 2, "drop_last": True, "learning_rate": 3e-5}
"""Where an epoch's last step is short, other numbers of ranks divide it into other micro-steps, and norms see these."""


COUNTED = ("ddp segmented", "zero-3 segmented", "fsdp2 segmented accumulated")
"""Whose collectives are counted too."""


SEGMENTED_BEFORE = SEGMENTED_STEPS - 4
"""From the middle of an epoch into the next, over a short step."""
SEGMENTED_SAVED = ("ddp", "fsdp2", "zero-2", "zero-3")
"""Whose fine-tuning on two ranks leaves a checkpoint."""
SEGMENTED_RESUMED: dict[int, tuple[tuple[str, str], ...]] = {
    1: (("zero-2", "none"), ("zero-3", "zero-3"), ("fsdp2", "ddp")),
    2: (*((name, name) for name in SEGMENTED_SAVED), ("zero-3", "accelerate-ddp")),
    3: (("zero-2", "fsdp2"), ("ddp", "zero-3"), ("zero-3", "zero-1"), ("fsdp2", "accelerate-zero-3")),
}
"""As `RESUMED`."""
SEGMENTED_BY_DAY = {
    1: ("segmented", "segmented fine-tuned", "segmented accumulated", "none from zero-2 segmented",
        "segmented fast", "segmented fast local", "segmented fast threads"),
    2: ("ddp segmented", "zero-2 segmented fine-tuned", "fsdp2 segmented accumulated", "zero-2 segmented fast"),
    3: ("ddp segmented", "fsdp2 from zero-2 segmented"),
}  # fmt: skip
"""ZeRO-3, whose steps take a second on three ranks of two cores, labels scenes there."""


def segmented(ranks: int, two_ranks: Path, *, by_day: bool) -> list[Job]:
    """Every engine labels pixels at every number of ranks; some with another optimizer, model or norm.

    By day a few of these. Two ranks come first: in their folder the others find checkpoints.
    """
    jobs = [_job(f"{engine} segmented", ENGINE_FIELDS[engine] | SEGMENTED) for engine in ENGINE_FIELDS]
    if ranks == 1:
        none: Train = {"engine": "none"}
        jobs += [_job("segmented", none | SEGMENTED), _job("segmented fine-tuned", none | FINE_TUNED)]
        jobs += [_job("segmented accumulated", none | SEGMENTED_ACCUMULATED), _job("segmented vit", none | SEGMENTED)]
        jobs += [_job("segmented fast", none | FAST), _job("segmented fast local", none | FAST | LOCAL)]
        jobs += [_job("segmented fast threads", none | FAST) | {"threads": 2}]
    if ranks == 2:
        jobs += [_job(f"{engine} segmented fine-tuned", ENGINE_FIELDS[engine] | FINE_TUNED) for engine in FULLY]
        jobs += [_job(f"{engine} segmented fast", ENGINE_FIELDS[engine] | FAST) for engine in FULLY]
        jobs += [
            _job(f"{engine} segmented accumulated", ENGINE_FIELDS[engine] | SEGMENTED_ACCUMULATED)
            for engine in ("ddp", "fsdp2", "zero-2")
        ]
        jobs += [_job("ddp segmented vit", ENGINE_FIELDS["ddp"] | SEGMENTED)]
        jobs += [_job("ddp segmented local", ENGINE_FIELDS["ddp"] | SEGMENTED | LOCAL)]
    for job in jobs:
        job["steps"] = SEGMENTED_STEPS
        engine, _, setting = job["name"].partition(" ")
        if ranks == 2 and setting == "segmented fine-tuned" and engine in SEGMENTED_SAVED:
            job["save_before"] = SEGMENTED_BEFORE
    for saved, resumed in SEGMENTED_RESUMED[ranks]:
        fields = ENGINE_FIELDS.get(resumed, {"engine": "none"}) | FINE_TUNED
        jobs.append(_job(f"{resumed} from {saved} segmented", fields, SEGMENTED_STEPS))
        jobs[-1]["load"] = str(two_ranks / f"{saved} segmented fine-tuned")
    for job in jobs:
        job["traffic"] = ranks == 2 and job["name"] in COUNTED
        job["segments"] = "vit" if job["name"].endswith("vit") else "swin"
        if job["train"]["learning_rate"] == FINE_TUNED["learning_rate"]:
            job["grown"] = GROWN
    return [job for job in jobs if not by_day or job["name"] in SEGMENTED_BY_DAY[ranks]]


SCENES_STEPS = 3
"""An epoch; its last step has four images."""


def of_scenes(ranks: int, folder: Path) -> list[Job]:
    """Labels pixels of files in ADE20K's layout, evaluated whole and by windows; both on ranks that share tokens, and
    in stages."""
    jobs = []
    for engine, evaluation in (("ddp", "whole"), ("zero-3", "sliding")) + (("none", "whole"),) * (ranks == 1):
        job = _job(f"{engine} scenes", ENGINE_FIELDS.get(engine, {"engine": engine}) | SEGMENTED)
        job |= {"steps": SCENES_STEPS, "segments": "swin", "scenes": str(folder), "evaluation": evaluation}
        jobs.append(job)
    if ranks < 3:
        name = "none" if ranks == 1 else "ddp"
        for model, evaluation in (("shared-swin", "whole"), ("shared-vit", "sliding")):
            shared = _job(f"{name} {model} scenes", SEGMENTED | {"engine": name}, 3)
            shared |= {"segments": model, "scenes": str(folder), "evaluation": evaluation}
            jobs.append(shared | {"parallel": {"sequence": ranks}})
    if ranks == 2:
        in_stages: Job = {"parallel": {"pipeline": 2, "schedule": "gpipe"}}  # type: ignore[typeddict-item]
        jobs += [job | in_stages | {"name": f"staged {job['name']}"} for job in (jobs[0], shared)]
    return jobs


def of_world(ranks: int, two_ranks: Path, *, by_day: bool) -> list[Job]:
    """All that is trained on so many ranks; by day what `at_night` leaves.

    Two ranks come first: in their folder the others find checkpoints.
    """
    jobs = [
        _job(f"{engine} {setting}", ENGINE_FIELDS[engine] | SETTINGS[setting])
        for engine in ENGINE_FIELDS
        for setting in (SETTINGS if ranks == 2 and engine in FULLY else OF_WORLD[ranks])
    ]
    if ranks == 1:
        jobs += _references()
    if ranks == 2:
        for job in jobs:
            engine, setting = job["name"].split()
            if (setting == "adamw-clipped" and engine in SAVED) or (setting == "sgd-clipped" and engine in SAVED_SGD):
                job["save_before"] = SAVED_BEFORE
            if setting == "adamw-accumulated" and engine in MEASURED:
                job["measure"] = True
        jobs += _more_on_two_ranks()
        jobs += _resumed_otherwise(two_ranks)
    jobs += [job for setting in SHARED.get(ranks, ()) for job in _of_unequal_shares(ranks, setting)]
    for setting, pairs in (("adamw-clipped", RESUMED[ranks]), ("sgd-clipped", RESUMED_SGD[ranks])):
        for saved, resumed in pairs:
            fields = ENGINE_FIELDS.get(resumed, {"engine": "none"}) | SETTINGS[setting]
            job = _job(f"{resumed} from {saved} {setting}", fields, RESUMED_UNTIL)
            job["load"] = str(two_ranks / f"{saved} {setting}")
            jobs.append(job)
    return [job for job in jobs if not (by_day and at_night(ranks, job["name"]))]


def at_night(ranks: int, name: str) -> bool:
    """Whether a job is trained at night alone: its engine meets its settings by day too, but not every pair of them at
    every number of ranks.

    DeepSpeed behind Accelerate is by day at stage 3, and at the others with unequal shares, autocast or a rising rate
    alone. At two ranks engines meet two of the four settings, or what else needs them; at three one of them, or that
    with unequal shares.
    """
    engine, *setting = name.split()
    if setting[:1] == ["from"] and setting[2:] == ["adamw-clipped"]:
        return (setting[1], engine) not in RESUMED_BY_DAY[ranks]
    if engine in ENGINE_FIELDS and setting[-1:] == ["shares"]:
        return setting[0] == ("sgd-accumulated" if ranks == 2 else "adamw-clipped")
    if setting == ["rehearsed"]:
        return engine not in REHEARSED_BY_DAY
    if engine not in ENGINE_FIELDS or len(setting) != 1 or setting[0] not in SETTINGS:
        return False
    if engine in BEHIND_ACCELERATE:
        return True
    if ranks == 2:
        needed = {"adamw-accumulated": MEASURED, "sgd-clipped": SAVED_SGD}
        return engine not in needed.get(setting[0], ENGINE_FIELDS)
    return ranks == 3 and setting[0] == "sgd-accumulated"


def _references() -> list[Job]:
    """The single process without any engine."""
    none: Train = {"engine": "none"}
    plain = {"adamw": ADAMW, "sgd": SGD, "lamb": LAMB, "rate": RATE}
    plain |= {"adamw-clipped": ADAMW | CLIPPED, "sgd-clipped": SGD | CLIPPED}
    split = {f"autocast-{parts}": AUTOCAST | {"grad_accum": parts} for parts in MICRO_BATCHES}
    jobs = [_job(name, none | fields, RESUMED_UNTIL) for name, fields in plain.items()]
    return jobs + [_job(name, none | fields) for name, fields in (split | {"pure": PURE}).items()]


def _more_on_two_ranks() -> list[Job]:
    jobs = [_job(f"{engine} rate", ENGINE_FIELDS[engine] | RATE) for engine in RATED]
    jobs += [_job(f"{engine} autocast", ENGINE_FIELDS[engine] | AUTOCAST) for engine in AUTOCAST_ENGINES]
    jobs += [_job(f"{engine} pure", ENGINE_FIELDS[engine] | PURE) for engine in PURE_ENGINES]
    jobs.append(_job("fsdp2 pure", ENGINE_FIELDS["fsdp2"] | MASTERED))
    jobs += [_job(f"{engine} lamb", ENGINE_FIELDS[engine] | LAMB) for engine in ("ddp", "zero-0")]
    jobs += [
        _job(f"{engine} sends {dtype}", ENGINE_FIELDS[engine] | SGD | {"gradient_dtype": dtype})
        for engine, dtype in ROUNDED
    ]
    for job in jobs:
        if job["name"] in ("ddp lamb", "zero-0 pure", "zero-1 pure"):
            job["save_before"], job["steps"] = SAVED_BEFORE, RESUMED_UNTIL
    for engine in ENGINE_FIELDS:
        jobs.append(_job(f"{engine} rehearsed", ENGINE_FIELDS[engine] | SETTINGS["sgd-accumulated"], REHEARSED_STEPS))
        jobs[-1]["rehearse"] = True
    broken = {"zero-1 adamw": "default-clipping", "ddp sgd": "summed-gradients", "ddp adamw": "summed-gradients"}
    for name, how in broken.items():
        engine, optimizer = name.split()
        job = _job(f"{name} {how}", ENGINE_FIELDS[engine] | (SGD if optimizer == "sgd" else ADAMW))
        job["wrong"] = how
        jobs.append(job)
    return jobs


def _of_unequal_shares(ranks: int, setting: str) -> list[Job]:
    """Every engine, and one whose ranks each take the mean of their own images."""
    fields = SETTINGS[setting]
    fields = fields | {"micro_batches": SHARES[ranks][fields.get("grad_accum", 1)]}
    engines = FULLY + (SHARED_ONCE if ranks == 3 and setting == "sgd-accumulated" else ())
    jobs = [_job(f"{engine} {setting} shares", ENGINE_FIELDS[engine] | fields) for engine in engines]
    if ranks == 2:
        jobs.append(_job(f"ddp {setting} unweighted", ENGINE_FIELDS["ddp"] | fields))
        jobs[-1]["wrong"] = "unweighted"
    return jobs


def _resumed_otherwise(two_ranks: Path) -> list[Job]:
    """Other optimizers and precisions, and one that forgets half of what it loads."""
    jobs = []
    for saved, resumed, fields in (
        ("ddp lamb", "zero-0 lamb", LAMB),
        ("zero-0 pure", "zero-0 pure", PURE),
        ("zero-1 pure", "zero-3 pure", PURE),
        ("ddp adamw-clipped", "ddp forgetting", SETTINGS["adamw-clipped"]),
    ):
        job = _job(f"{resumed} from {saved}", ENGINE_FIELDS[resumed.split()[0]] | fields, RESUMED_UNTIL)
        job["load"] = str(two_ranks / saved)
        job["forget"] = "forgetting" in resumed
        jobs.append(job)
    return jobs


def _job(name: str, train: Train, steps: int = STEPS) -> Job:
    return {"name": name, "train": train, "steps": steps}
