"""The named vision transformers, by transformers' ViT with PyTorch's fused attention."""

from __future__ import annotations

from torch import nn

from vitscale.model_spec import ModelSpec
from vitscale.models.quiet import quiet_transformers


def build_named(spec: ModelSpec) -> nn.Module:
    """A ViT of the spec's shape without dropout.

    The layer norm's epsilon is 1e-6, as in the original ViT and in torchvision; transformers' default of 1e-12 is
    below what 16-bit weights can tell from 0.
    """
    transformers = quiet_transformers()
    config = transformers.ViTConfig(
        image_size=spec.image_size,
        patch_size=spec.patch_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        intermediate_size=spec.mlp_size,
        num_labels=spec.num_classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-6,
        attn_implementation="sdpa",
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model
