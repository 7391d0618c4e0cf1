"""A vision transformer with attention inside windows, of which only the most active ones are computed.

As SparseViT prunes them (Chen et al., "SparseViT: Revisiting Activation Sparsity for Efficient High-Resolution Vision
Transformer", CVPR 2023): a window's importance is the L2 norm of its activations, and the rest pass a block as they
are. `dense`, `sparse` (half of the windows) and `tiny` are factories: `model.factory = "sparse_vit:sparse"`.
"""

import torch
from torch import nn
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import gelu, scaled_dot_product_attention


class SparseViT(nn.Module):
    def __init__(self, num_classes, image_size, channels, *, width, depth, heads, patch, window, kept):
        super().__init__()
        self.heads = heads
        self.embed = Embedding(image_size // patch, channels, width, patch)
        self.blocks = nn.ModuleList(
            Block(width, width // heads, window, window // 2 * (number % 2), kept) for number in range(depth)
        )
        self.head = Head(width, num_classes)

    def forward(self, images):
        grid = self.embed(images)
        for block in self.blocks:
            grid = block(grid)
        return self.head(grid)

    # --- what lets ranks share it ---

    @property
    def in_order(self):
        """For parallel.pipeline: modules that make up forward, one after the other."""
        return ["embed", *(f"blocks.{number}" for number in range(len(self.blocks))), "head"]

    def tensor_plan(self, ranks, *, shard_norms):
        """For parallel.tensor: attention is cut by heads, the MLP by its width. All ranks see the same activations, and
        so keep the same windows."""
        if shard_norms or self.heads % ranks:
            raise ValueError(f"{ranks} tensor ranks must divide {self.heads} heads, with shard_norms = false")
        plan = {f"blocks.*.{name}": tp.ColwiseParallel() for name in ("query", "key", "value", "widen")}
        return plan | {f"blocks.*.{name}": tp.RowwiseParallel() for name in ("mixed", "narrow")}


class Embedding(nn.Module):
    """Patches and positions: [b, side, side, width] of images."""

    def __init__(self, side, channels, width, patch):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn(side, side, width) * 0.02)

    def forward(self, images):
        return self.patches(images).permute(0, 2, 3, 1) + self.positions


class Block(nn.Module):
    """Attention and MLP in the most active windows; every second block's windows are shifted, to join the others'."""

    def __init__(self, width, head_width, window, shift, kept):
        super().__init__()
        self.head_width, self.window, self.shift, self.kept = head_width, window, shift, kept
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mixed = (nn.Linear(width, width) for _ in range(4))
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, grid):
        batch, side, _, width = grid.shape
        across = side // self.window
        shifted = grid.roll((-self.shift, -self.shift), (1, 2))
        windows = (
            shifted.unflatten(1, (across, -1)).unflatten(3, (across, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        )
        # [b, windows, tokens, width]; which to keep is no matter of gradients.
        norms = torch.linalg.vector_norm(windows.detach().float(), dim=(2, 3))
        count = max(1, round(self.kept * across**2))
        chosen = norms.topk(count, dim=1).indices[:, :, None, None].expand(-1, -1, windows.shape[2], width)
        changed = self.transformed(windows.gather(1, chosen).flatten(0, 1)).unflatten(0, (batch, count))
        windows = windows.scatter(1, chosen, changed.to(windows.dtype))
        rows = windows.unflatten(2, (self.window, self.window)).unflatten(1, (across, across))
        return rows.transpose(2, 3).flatten(3, 4).flatten(1, 2).roll((self.shift, self.shift), (1, 2))

    def transformed(self, tokens):
        normed = self.before_attention(tokens)
        heads = [
            project(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        tokens = tokens + self.mixed(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return tokens + self.narrow(gelu(self.widen(self.before_mlp(tokens))))


class Head(nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, grid):
        return self.classifier(self.norm(grid.mean(dim=(1, 2))))


def dense(num_classes, image_size, channels):
    """All windows: 11 million parameters, windows of 7 x 7 patches of 8 x 8 pixels."""
    return of(num_classes, image_size, channels, kept=1.0)


def sparse(num_classes, image_size, channels):
    """Half of the windows."""
    return of(num_classes, image_size, channels, kept=0.5)


def of(num_classes, image_size, channels, kept):
    return SparseViT(num_classes, image_size, channels, width=384, depth=6, heads=6, patch=8, window=7, kept=kept)


def tiny(num_classes, image_size, channels):
    """For tests and a first try: images of 16 pixels."""
    return SparseViT(num_classes, image_size, channels, width=32, depth=3, heads=4, patch=2, window=4, kept=0.5)
