"""The data of a user's own script: read by it alone, so that nothing is known here but how many images an epoch has."""

from __future__ import annotations

from pathlib import Path

from vitscale.errors import RequestError
from vitscale.sources.base import Dataset, Summary, class_count, refuse_other_keys
from vitscale.trial.trial import DataSpec


class OfScript:
    """The dataset `script`: `samples` is the user's word."""

    def check(self, spec: DataSpec) -> Summary:
        """Needs nothing but the numbers in `spec`."""
        refuse_other_keys(spec, ("channels",))
        return Summary(
            train_samples=spec.samples,
            held_out_samples=0,
            classes=tuple(f"class {number}" for number in range(class_count(spec))),
            image_shape=(spec.source_size, spec.source_size, spec.channels),
            fingerprint=f"script: {spec.samples} images, not seen here",
        )

    def load(self, spec: DataSpec, cache_root: Path) -> Dataset:  # noqa: ARG002  one signature for every source
        """Nothing to load.

        Raises:
            RequestError: always.
        """
        raise RequestError('data.name = "script" is of train.script alone', next_step="Name a dataset, or a script")
