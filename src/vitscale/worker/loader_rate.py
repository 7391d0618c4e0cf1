"""The rate of a study's data loader alone: its batches are read and thrown away."""

from __future__ import annotations

import time

from vitscale import sources
from vitscale.datasets import Batches, EpochOrder
from vitscale.store.check_records import LoaderLine
from vitscale.trial.trial import Trial
from vitscale.worker.place import Place

_WARM_UP_BATCHES = 3


def loader_rate(trial: Trial, place: Place, seconds: float, *, pin: bool) -> LoaderLine:
    """Reads batches for `seconds`, epoch after epoch, as training would. Called on all ranks at once.

    Raises:
        RequestError: the data is not here, or damaged.
    """
    dataset = sources.load(trial.data)
    images, timed, epoch, batches_taken = 0, 0.0, 0, 0
    while timed < seconds:
        order = EpochOrder(
            len(dataset.train),
            seed=trial.train.seed,
            epoch=epoch,
            micro_batches=[trial.train.micro_batch] * place.world_size,
            grad_accum=1,
            fraction=trial.data.fraction,
        )
        with Batches(dataset.train, order, rank=place.rank, workers=trial.data.workers, pin=pin) as batches:
            began = time.perf_counter()
            for batch in batches:
                now = time.perf_counter()
                batches_taken += 1
                if batches_taken > _WARM_UP_BATCHES:  # the first may be ready before they are asked for
                    images, timed = images + len(batch.images), timed + now - began
                began = now
                if timed >= seconds:
                    break
        epoch += 1
    return LoaderLine(images_per_second=images / timed, workers=trial.data.workers, batch=trial.train.micro_batch)
