"""Models that label every pixel: UperNet on Swin V2 or on a ViT's pyramid; and the logits of auxiliary heads.

UperNet is transformers' own; it takes feature maps of several sizes, which a plain ViT lacks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from vitscale.models.named import Encoder, draw, quiet_transformers, swin_configuration
from vitscale.trial.model_spec import ModelSpec

AUXILIARY_HEAD = "auxiliary_head"
"""What transformers' models of segmentation call the second head that they train with, and factories may."""


def build_named_segmentation(spec: ModelSpec) -> nn.Module:
    """The model that labels pixels of a resolved named spec."""
    if spec.depths is None:
        return PyramidSegmenter(spec)
    stages = [f"stage{number}" for number in range(1, len(spec.depths) + 1)]
    backbone = swin_configuration(spec, out_features=stages)
    model: nn.Module = quiet_transformers().UperNetForSemanticSegmentation(_upernet(spec, backbone_config=backbone))
    return model


def _upernet(spec: ModelSpec, **fields: Any) -> Any:
    size = spec.decoder_size or 0
    return quiet_transformers().UperNetConfig(
        hidden_size=size,
        auxiliary_channels=(size + 1) // 2,
        use_auxiliary_head=bool(spec.auxiliary_weight),
        num_labels=spec.num_classes,
        **fields,
    )


class PyramidSegmenter(nn.Module):
    """A ViT whose last hidden states become maps of 4, 2, 1 and 1/2 times their side, for UperNet's heads.

    After the simple feature pyramid of Li et al., "Exploring Plain Vision Transformer Backbones for Object Detection"
    (ECCV 2022), section 3, without its norms.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        quiet_transformers()
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

        self.vit = Encoder(spec)
        width = self.vit.width
        self.pyramid = nn.ModuleList(
            [
                nn.Sequential(_doubled(width), nn.GELU(), _doubled(width)),
                _doubled(width),
                nn.Identity(),
                nn.MaxPool2d(2),
            ]
        )
        config, widths = _upernet(spec), [width] * len(self.pyramid)
        self.decode_head = UperNetHead(config, widths)
        self.auxiliary_head = UperNetFCNHead(config, widths) if spec.auxiliary_weight else None
        for part in (self.pyramid, self.decode_head, self.auxiliary_head):
            for module in part.modules() if part is not None else ():
                if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                    draw(module)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes, H/4, W/4] (for patches of 16) of float images [b, c, H, W]."""
        hidden: Tensor = self.vit(images)[:, 1:]
        side = round(hidden.shape[1] ** 0.5)
        maps = [level(hidden.transpose(1, 2).unflatten(2, (side, side))) for level in self.pyramid]
        if self.auxiliary_head is not None and self.training:
            self.auxiliary_head(maps)  # seen by `AuxiliaryLogits`
        logits: Tensor = self.decode_head(maps)
        return logits


def _doubled(width: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(width, width, kernel_size=2, stride=2)


def auxiliary_head(model: nn.Module) -> nn.Module | None:
    """The model's auxiliary head; None where it has none."""
    return next((module for name, module in model.named_modules() if name.endswith(AUXILIARY_HEAD)), None)


class AuxiliaryLogits:
    """What a model's auxiliary head gives in training: its models keep it to themselves unless they have the labels.

    A loss without them would leave that head without gradients, and DDP waiting for these.
    """

    def __init__(self, model: nn.Module, weight: float | None) -> None:
        """`weight`: of its loss; None takes that of the model's own configuration, or 0.4."""
        head = auxiliary_head(model) if weight != 0 else None
        own = getattr(getattr(model, "config", None), "auxiliary_loss_weight", 0.4)
        self.weight = float(own if weight is None else weight)
        self._logits: Tensor | None = None
        self._hooks = [] if head is None else [head.register_forward_hook(self._keep)]

    def take(self) -> Tensor | None:
        """The logits [b, classes, h, w] of the forward pass just done; None where there is no such head."""
        logits, self._logits = self._logits, None
        return logits

    def close(self) -> None:
        """Leaves nothing on the model."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, head: nn.Module, images: object, output: Tensor) -> None:
        del head, images
        if torch.is_grad_enabled():
            self._logits = output
