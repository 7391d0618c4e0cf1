"""Which image goes to which rank and step, its way into memory, and what is done to it on the device."""

from vitscale.datasets.batches import Batch, Batches
from vitscale.datasets.loss import confusion, counted_labels, label_losses, means, scores, slot_loss, tally
from vitscale.datasets.order import EpochOrder, Slot
from vitscale.datasets.preprocess import Preprocess
from vitscale.datasets.scenes import Scenes, sliding

__all__ = [
    "Batch", "Batches", "EpochOrder", "Preprocess", "Scenes", "Slot", "confusion", "counted_labels", "label_losses",
    "means", "scores", "sliding", "slot_loss", "tally",
]  # fmt: skip
