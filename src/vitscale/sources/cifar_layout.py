"""What the official python-version archives of CIFAR-10 and CIFAR-100 contain.

From https://www.cs.toronto.edu/~kriz/cifar.html: Alex Krizhevsky, "Learning Multiple Layers of Features from Tiny
Images", 2009. The MD5 of the archives are published there; those of the files are of their members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Names, checksums and keys of one of the two archives."""

    name: str
    archive: str
    url: str
    archive_md5: str
    folder: str
    train_files: Mapping[str, str]
    """File name -> MD5."""
    held_out_files: Mapping[str, str]
    meta_file: tuple[str, str]
    """File name and MD5."""
    label_key: str
    class_names_key: str
    train_samples: int
    classes: tuple[str, ...]

    @property
    def files(self) -> dict[str, str]:
        """File name -> MD5 of every file that is read."""
        return {**self.train_files, **self.held_out_files, self.meta_file[0]: self.meta_file[1]}


HELD_OUT_SAMPLES = 10_000
IMAGE_SHAPE = (32, 32, 3)
MOST_ARCHIVE_BYTES = 256 << 20
"""The official archives have 170,498,071 and 169,001,437 bytes, and their content about 186 MB."""

_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR10 = Layout(
    name="cifar10",
    archive="cifar-10-python.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    folder="cifar-10-batches-py",
    train_files={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    held_out_files={"test_batch": "40351d587109b95175f43aff81a1287e"},
    meta_file=("batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
    label_key="labels",
    class_names_key="label_names",
    train_samples=50_000,
    classes=tuple(_CIFAR10_CLASSES.split()),
)

CIFAR100 = Layout(
    name="cifar100",
    archive="cifar-100-python.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    folder="cifar-100-python",
    train_files={"train": "16019d7e3df5f24257cddd939b257f8d"},
    held_out_files={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    meta_file=("meta", "7973b15100ade9c7d40fb424638fde48"),
    label_key="fine_labels",
    class_names_key="fine_label_names",
    train_samples=50_000,
    classes=tuple(_CIFAR100_CLASSES.split()),
)
