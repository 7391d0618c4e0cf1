"""An encoder of image sequences and of text after CLIP, from transformers: a sequence is of the class of its text.

A sequence is an image of 3 x frames channels. `build` and the smaller `tiny` are factories:
`model.factory = "clip_sequence:build"`.
"""

import torch
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import normalize
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

WORDS, LENGTH = 64, 6
BEGIN, END = WORDS - 2, WORDS - 1


class SequenceClip(nn.Module):
    """Logits [b, classes]: how near the mean embedding of a sequence's frames is to that of each class's text."""

    def __init__(self, num_classes, image_size, channels, *, width, layers, heads, patch):
        super().__init__()
        self.frames = channels // 3
        self.own_frames = range(self.frames)
        self.group = None
        self.heads = heads
        shape = {
            "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
            "num_attention_heads": heads, "projection_dim": width, "attn_implementation": "sdpa",
        }  # fmt: skip
        self.vision = CLIPVisionModelWithProjection(CLIPVisionConfig(image_size=image_size, patch_size=patch, **shape))
        self.text = CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=WORDS, max_position_embeddings=LENGTH, bos_token_id=BEGIN, eos_token_id=END, **shape
            )
        )
        self.times = nn.Parameter(torch.randn(self.frames, 3, 1, 1) * 0.02)  # when a frame was: its colours, shifted
        self.scale = nn.Parameter(torch.tensor([2.7]))  # not of no dimension: FSDP2 shards along one
        self.register_buffer("prompts", prompts(num_classes), persistent=False)

    def forward(self, images):
        frames = images.unflatten(1, (self.frames, -1)) + self.times
        frames = frames[:, self.own_frames.start : self.own_frames.stop]
        embedded = self.vision(frames.flatten(0, 1)).image_embeds.unflatten(0, frames.shape[:2])
        pooled = embedded.sum(dim=1) / self.frames
        if self.group is not None:  # the other ranks' frames; their gradients come back the same way
            pooled = all_reduce(pooled, group=self.group)
        texts = self.text(self.prompts).text_embeds
        return self.scale.exp() * normalize(pooled, dim=-1) @ normalize(texts, dim=-1).T

    # --- what lets ranks share it ---

    def split_tokens(self, group):
        """For parallel.sequence: each rank of the group takes its own frames."""
        if group.size() > self.frames:
            raise ValueError(f"{self.frames} frames are too few for {group.size()} ranks")
        ends = [self.frames * rank // group.size() for rank in range(group.size() + 1)]
        self.own_frames = range(ends[group.rank()], ends[group.rank() + 1])
        self.group = group

    def tensor_plan(self, ranks, *, shard_norms):
        """For parallel.tensor: attention is cut by heads, the MLP by its width, in both encoders."""
        if shard_norms or self.heads % ranks:
            raise ValueError(f"{ranks} tensor ranks must divide {self.heads} heads, with shard_norms = false")
        plan = {}
        for name, _ in self.named_modules():
            if name.endswith(("q_proj", "k_proj", "v_proj", "fc1")):
                plan[name] = tp.ColwiseParallel()
            elif name.endswith(("out_proj", "fc2")):
                plan[name] = tp.RowwiseParallel()
        return plan


def prompts(classes):
    """Token ids [classes, length]: the digits of each class's number."""
    rows = [[BEGIN, *map(int, f"{number:0{LENGTH - 2}d}"), END] for number in range(classes)]
    return torch.tensor(rows)


def build(num_classes, image_size, channels):
    """Of ViT-S's shape."""
    return SequenceClip(num_classes, image_size, channels, width=384, layers=12, heads=6, patch=16)


def tiny(num_classes, image_size, channels):
    """For tests and a first try."""
    return SequenceClip(num_classes, image_size, channels, width=32, layers=1, heads=4, patch=8)
