"""A hierarchical vision transformer behind a convolutional stem: maps that halve in side and double in width.

`build` and the smaller `tiny` are factories: `model.factory = "hsvit:build"`.
"""

from torch import nn
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import gelu, scaled_dot_product_attention


class HierarchicalViT(nn.Module):
    """A stem of convolutions to a quarter of the side; levels of blocks; a classifier on the mean of the last map."""

    def __init__(self, num_classes, channels, widths, depths, heads):
        super().__init__()
        self.heads = heads
        self.stem = nn.Sequential(
            nn.Conv2d(channels, widths[0] // 2, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(widths[0] // 2, widths[0], 3, stride=2, padding=1),
        )  # fmt: skip
        before = [widths[0], *widths[:-1]]
        self.levels = nn.ModuleList(map(Level, before, widths, depths, heads))
        self.head = Head(widths[-1], num_classes)

    def forward(self, images):
        maps = self.stem(images)
        for level in self.levels:
            maps = level(maps)
        return self.head(maps)

    # --- what lets ranks share it ---

    @property
    def in_order(self):
        """For parallel.pipeline: modules that make up forward, one after the other."""
        names = ["stem"]
        for number, level in enumerate(self.levels):
            names += [f"levels.{number}.merge", *(f"levels.{number}.blocks.{n}" for n in range(len(level.blocks)))]
        return [*names, "head"]

    def tensor_plan(self, ranks, *, shard_norms):
        """For parallel.tensor: attention is cut by heads, the MLP by its width."""
        if shard_norms or any(heads % ranks for heads in self.heads):
            raise ValueError(f"{ranks} tensor ranks must divide {self.heads} heads, with shard_norms = false")
        block = "levels.*.blocks.*"
        plan = {f"{block}.{name}": tp.ColwiseParallel() for name in ("query", "key", "value", "widen")}
        return plan | {f"{block}.{name}": tp.RowwiseParallel() for name in ("mixed", "narrow")}


class Level(nn.Module):
    """Maps of half the side, but for the first level, and blocks on them."""

    def __init__(self, before, width, depth, heads):
        super().__init__()
        self.merge = nn.Conv2d(before, width, 2, stride=2) if before != width else nn.Identity()
        self.blocks = nn.Sequential(*(Block(width, width // heads) for _ in range(depth)))

    def forward(self, maps):
        return self.blocks(self.merge(maps))


class Block(nn.Module):
    """Positions by a depthwise convolution, then attention over all places of the map, and an MLP."""

    def __init__(self, width, head_width):
        super().__init__()
        self.head_width = head_width  # not the number of heads: a tensor rank has a part of them
        self.positions = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mixed = (nn.Linear(width, width) for _ in range(4))
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, maps):
        tokens = (maps + self.positions(maps)).flatten(2).transpose(1, 2)
        normed = self.before_attention(tokens)
        heads = [
            project(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        tokens = tokens + self.mixed(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        tokens = tokens + self.narrow(gelu(self.widen(self.before_mlp(tokens))))
        return tokens.transpose(1, 2).unflatten(2, maps.shape[2:])


class Head(nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, maps):
        return self.classifier(self.norm(maps.mean(dim=(2, 3))))


def build(num_classes, image_size, channels):
    """18 million parameters; images of any size."""
    del image_size
    return HierarchicalViT(num_classes, channels, widths=(96, 192, 384), depths=(2, 4, 9), heads=(2, 4, 8))


def tiny(num_classes, image_size, channels):
    """For tests and a first try."""
    del image_size
    return HierarchicalViT(num_classes, channels, widths=(16, 32), depths=(1, 2), heads=(2, 4))
