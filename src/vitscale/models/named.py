"""The named models: transformers' Swin V2, and a vision transformer of our own, which classify, or label every pixel
below a head of UperNet's; and the logits of auxiliary heads.

UperNet is transformers' own; it takes feature maps of several sizes, which a plain ViT lacks. The ViT is that
of Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021), with fused attention.

It is their `ViTForImageClassification` without dropout, to the bit: the same names of parameters, the same
weights from the same seed, the same logits and gradients (`tests/models/test_vit.py` holds them together). Under
autocast it casts what queries, keys and values read once instead of three times, and adds their gradients in 16 bits.
What it is without is the import of transformers' modelling code, which takes each rank longer than that of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from vitscale.models.autocast import autocast_dtype
from vitscale.trial.model_spec import ModelSpec

_DEVIATION = 0.02
"""Standard deviation of initial weights."""
_EPSILON = 1e-6
"""Epsilon of layer norms, as in the original ViT and in torchvision; transformers' default of 1e-12 is below what
16-bit weights can tell from 0."""


class VisionTransformer(nn.Module):
    """Patches, a class token, positions; blocks with their norms in front; a classifier on the class token."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.vit = Encoder(spec)
        self.class_token = ClassToken()
        self.classifier = nn.Linear(self.vit.width, spec.num_classes or 0)
        draw(self.classifier)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of float images [b, c, H, W]."""
        logits: Tensor = self.classifier(self.class_token(self.vit(images)))
        return logits

    @property
    def in_order(self) -> list[str]:
        """The modules that `forward` takes an image through, one after the other."""
        blocks = [f"vit.layers.{block}" for block in range(len(self.vit.layers))]
        return ["vit.embeddings", *blocks, "vit.layernorm", "class_token", "classifier"]


class ClassToken(nn.Module):
    """The class token [b, h] of hidden states [b, tokens, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.taken_of: Callable[[Tensor], Tensor] = _first_token
        """Takes the class token of hidden states; it is replaced where ranks share the tokens."""

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return self.taken_of(hidden)


def _first_token(hidden: Tensor) -> Tensor:
    return hidden[:, 0]


class Encoder(nn.Module):
    """All of the ViT before a head; it gives hidden states [b, 1 + patches, h] of images, the class token first."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        patch, width, layers, heads, mlp = (
            spec.patch_size, spec.hidden_size, spec.layers, spec.heads, spec.mlp_size,
        )  # fmt: skip
        if patch is None or width is None or layers is None or heads is None or mlp is None:
            raise ValueError("a model is built of a resolved spec: call resolve(spec, dataset_classes) first")
        self.width = width
        self.embeddings = _Embeddings(spec.image_size, spec.channels, patch, width)
        self.layers = nn.ModuleList([_Block(width, heads, mlp) for _ in range(layers)])
        self.layernorm = nn.LayerNorm(width, eps=_EPSILON)
        self._initialise()

    @override
    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.embeddings(images)
        for block in self.layers:
            hidden = block(hidden)
        normed: Tensor = self.layernorm(hidden)
        return normed

    def _initialise(self) -> None:
        """Draws weights in transformers' order, so that the same seed gives the same weights."""
        draw(self.embeddings.patch_embeddings.projection)
        for tensor in (self.embeddings.position_embeddings, self.embeddings.cls_token):
            nn.init.trunc_normal_(tensor, std=_DEVIATION)
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                draw(module)


class _Embeddings(nn.Module):
    def __init__(self, image_size: int, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.patch_embeddings = _Patches(channels, patch, width)
        self.position_embeddings = nn.Parameter(torch.randn(1, (image_size // patch) ** 2 + 1, width))
        self.own_tokens: range | None = None
        """The tokens that are made on this rank, where ranks share them; None: all."""

    @override
    def forward(self, images: Tensor) -> Tensor:
        if self.own_tokens is not None:
            return self._own(images, self.own_tokens)
        patches: Tensor = self.patch_embeddings(images)
        return torch.cat((self.cls_token.expand(len(images), -1, -1), patches), dim=1) + self.position_embeddings

    def _own(self, images: Tensor, tokens: range) -> Tensor:
        """Some of the tokens, computed from the rows of patches in which they lie.

        Weights that none of them needs stay in the graph, so that every rank has a gradient of each weight.
        """
        side = self.patch_embeddings.projection.kernel_size[0]
        row = images.shape[-1] // side
        begin, end = max(tokens.start - 1, 0), max(tokens.stop - 1, 1)  # patches: token 0 is the class token
        first, last = begin // row, -(-end // row)
        patches: Tensor = self.patch_embeddings(images[:, :, first * side : last * side])
        kept = patches[:, begin - first * row : end - first * row][:, : len(tokens) - (tokens.start == 0)]
        whole = torch.cat((self.cls_token.expand(len(images), -1, -1), kept), dim=1)
        return whole[:, int(tokens.start > 0) :] + self.position_embeddings[:, tokens.start : tokens.stop]


class _Patches(nn.Module):
    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    @override
    def forward(self, images: Tensor) -> Tensor:
        projected: Tensor = self.projection(images)
        return projected.flatten(2).transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.layernorm_before = nn.LayerNorm(width, eps=_EPSILON)
        self.layernorm_after = nn.LayerNorm(width, eps=_EPSILON)
        self.mlp = _Mlp(width, mlp)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.attention(self.layernorm_before(hidden)) + hidden
        after: Tensor = self.mlp(self.layernorm_after(hidden)) + hidden
        return after


class Attention(nn.Module):
    """Attention of a block: all heads at once, with `attend` between the projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = scaled_dot_product_attention
        """Attention over q, k and v, [b, heads, tokens, d] each; it is replaced where ranks share the tokens."""
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = _cast_once(hidden)
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = self.attend(query, key, value)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class _Mlp(nn.Module):
    def __init__(self, width: int, mlp: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, mlp)
        self.fc2 = nn.Linear(mlp, width)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.fc2(nn.functional.gelu(self.fc1(_cast_once(hidden))))
        return out


def _cast_once(hidden: Tensor) -> Tensor:
    """Casts hidden states to the dtype in which autocast multiplies, if it is on.

    Each matrix that reads them would cast its own copy otherwise, keep it for backward, and cast its gradient back
    before the sum (decision 0034).
    """
    dtype = autocast_dtype(hidden.device.type)
    return hidden if dtype is None else hidden.to(dtype)


def draw(layer: nn.Linear | nn.Conv2d | nn.ConvTranspose2d) -> None:
    """Draws a layer's initial weights as transformers does."""
    nn.init.normal_(layer.weight, std=_DEVIATION)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def build_swin(spec: ModelSpec) -> nn.Module:
    """The classifier that a resolved spec of Swin describes."""
    model: nn.Module = quiet_transformers().Swinv2ForImageClassification(
        swin_configuration(spec, num_labels=spec.num_classes)
    )
    # Its buffers are constants that follow from the shape. DDP would broadcast them in every forward, and in a rooted
    # operation a wait cannot be told from a transfer.
    names = [name for name, _ in model.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model.to(torch.float32)


def swin_configuration(spec: ModelSpec, **fields: Any) -> Any:
    """transformers' `Swinv2Config` of a resolved spec.

    There is no dropout, as in the named ViTs: what a rank drops would differ with the number of ranks.

    Raises:
        ValueError: the spec is not resolved.
    """
    if spec.depths is None or spec.heads is None:
        raise ValueError("a model is built of a resolved spec: call resolve(spec, dataset_classes) first")
    return quiet_transformers().Swinv2Config(
        image_size=spec.image_size,
        patch_size=spec.patch_size,
        num_channels=spec.channels,
        embed_dim=spec.hidden_size,
        depths=spec.depths,
        num_heads=tuple(spec.heads << stage for stage in range(len(spec.depths))),
        window_size=spec.window_size,
        pretrained_window_sizes=(0,) * len(spec.depths),  # the default is for four stages
        drop_path_rate=0.0,
        **fields,
    )


def quiet_transformers() -> Any:
    """Imports transformers, sets its log and the hub's to errors, switches progress bars off, and returns it.

    The import itself loads little; a model's module is loaded on first use of its class.
    """
    import transformers
    from huggingface_hub.utils.tqdm import disable_progress_bars

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
    return transformers


DECODE_HEAD, AUXILIARY_HEAD = "decode_head", "auxiliary_head"
"""Names in transformers' segmentation models of UperNet's head and of the second one that they train with; a factory's
model may use them too."""


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
    """A ViT below UperNet's heads, with a pyramid of maps between them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        quiet_transformers()
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

        self.vit = Encoder(spec)
        self.pyramid = Pyramid(self.vit.width)
        config, widths = _upernet(spec), [self.vit.width] * len(self.pyramid)
        self.decode_head = UperNetHead(config, widths)
        self.auxiliary_head = UperNetFCNHead(config, widths) if spec.auxiliary_weight else None
        for part in (self.pyramid, self.decode_head, self.auxiliary_head):
            for module in part.modules() if part is not None else ():
                if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                    draw(module)

    @property
    def in_order(self) -> list[str]:
        """The modules that `forward` takes an image through; both heads take the pyramid's maps."""
        heads = [AUXILIARY_HEAD] if self.auxiliary_head is not None else []
        blocks = [f"vit.layers.{block}" for block in range(len(self.vit.layers))]
        return ["vit.embeddings", *blocks, "vit.layernorm", "pyramid", *heads, DECODE_HEAD]

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes, H/4, W/4] (for patches of 16) of float images [b, c, H, W]; see `Pyramid`."""
        maps = self.pyramid(self.vit(images))
        if self.auxiliary_head is not None and self.training:
            self.auxiliary_head(maps)  # seen by `AuxiliaryLogits`
        logits: Tensor = self.decode_head(maps)
        return logits


class Pyramid(nn.ModuleList):
    """Maps of 4, 2, 1 and 1/2 times the side of a ViT's hidden states [b, tokens, h].

    After the simple feature pyramid of Li et al., "Exploring Plain Vision Transformer Backbones for Object Detection"
    (ECCV 2022), section 3, without its norms.
    """

    def __init__(self, width: int) -> None:
        levels = (nn.Sequential(_doubled(width), nn.GELU(), _doubled(width)), _doubled(width), nn.Identity())
        super().__init__([*levels, nn.MaxPool2d(2)])
        self.with_all_tokens: Callable[..., Tensor] = _as_they_are
        """Picks the encoder's hidden states [b, tokens, h] whose pixels are labelled here: all of them, or, where ranks
        share the tokens, all ranks' tokens of some of the images."""
        self.every_image = False
        """Whether each rank labels every image, where ranks share the tokens."""

    @override
    def forward(self, hidden: Tensor) -> list[Tensor]:
        patches = self.with_all_tokens(hidden, every_image=self.every_image)[:, 1:]
        side = round(patches.shape[1] ** 0.5)
        return [level(patches.transpose(1, 2).unflatten(2, (side, side))) for level in self]


def _as_they_are(hidden: Tensor, *, every_image: bool) -> Tensor:
    del every_image
    return hidden


def _doubled(width: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(width, width, kernel_size=2, stride=2)


def auxiliary_head(model: nn.Module) -> nn.Module | None:
    """The model's auxiliary head; None where it has none."""
    return next((module for name, module in model.named_modules() if name.endswith(AUXILIARY_HEAD)), None)


class AuxiliaryLogits:
    """The output of a model's auxiliary head in training, which the model returns to nobody without labels.

    A loss without it would leave that head without gradients, and DDP waiting for them.
    """

    def __init__(self, model: nn.Module, weight: float | None) -> None:
        """`weight`: that of the head's loss; None takes it from the model's own configuration, or else 0.4."""
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
        """Removes what it has put on the model."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, head: nn.Module, images: object, output: Tensor) -> None:
        del head, images
        if torch.is_grad_enabled():
            self._logits = output
