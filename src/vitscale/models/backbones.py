"""Models of transformers that have no head for a task: a vision tower below a linear classifier, or below UperNet.

A composite of image and text (CLIP, SigLIP) gives its vision tower; the rest of it is not built.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

from torch import Tensor, nn
from typing_extensions import override

from vitscale.models.forward_pass import forward_once
from vitscale.models.named import draw, quiet_transformers


class PooledClassifier(nn.Module):
    """A backbone, and a linear layer that makes logits of its pooled output."""

    def __init__(self, backbone: nn.Module, *, width: int, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(width, classes)
        draw(self.classifier)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of float images [b, c, H, W]."""
        logits: Tensor = self.classifier(pooled(self.backbone(images)))
        return logits


def pooled(output: Any) -> Tensor:
    """Return one vector of each image, [b, h], from what a backbone of transformers returns.

    It is the model's own pooled output. Where it has none it is the mean over all tokens [b, tokens, h] or pixels
    [b, h, height, width].

    Raises:
        TypeError: the output has neither.
    """
    pooler_output = getattr(output, "pooler_output", None)
    if isinstance(pooler_output, Tensor):
        return pooler_output.flatten(1)
    hidden = getattr(output, "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        raise TypeError(f"the backbone returned {type(output).__name__} without pooler_output and last_hidden_state")
    return hidden.mean(dim=1) if hidden.ndim == 3 else hidden.flatten(2).mean(dim=2)


def vision_configuration(config: Any) -> Any:
    """Return the configuration of the vision tower of a composite model; any other configuration as it is."""
    return getattr(config, "vision_config", None) or config


def backbone_class(config: Any) -> type[nn.Module] | None:
    """Return the class of transformers that builds a vision tower of this configuration; None where there is none."""
    mapping = quiet_transformers().AutoModel._model_mapping
    if type(config) in mapping:
        model_class: type[nn.Module] | tuple[type[nn.Module], ...] = mapping[type(config)]
        return model_class[0] if isinstance(model_class, tuple) else model_class
    return _unlisted_tower(type(config))


def _unlisted_tower(configuration: type) -> type[nn.Module] | None:
    """Return the model that takes images, of a configuration that transformers' own table leaves out."""
    module_name = configuration.__module__.replace(".configuration_", ".modeling_")
    if not module_name.startswith("transformers."):
        return None
    module = importlib.import_module(module_name)
    for _, model_class in inspect.getmembers(module, inspect.isclass):
        takes_images = getattr(model_class, "main_input_name", "") == "pixel_values"
        if getattr(model_class, "config_class", None) is configuration and takes_images:
            return cast("type[nn.Module]", model_class)
    return None


def classifier_on(backbone: nn.Module, *, channels: int, image_size: int, classes: int) -> PooledClassifier:
    """Return a classifier on a backbone, as wide as what the backbone gives for such images.

    Raises:
        ValueError: the backbone does not give one vector for each image.
        Exception: the backbone does not take such images; any type, from its forward.
    """
    vectors = pooled(forward_once(backbone, (2, channels, image_size, image_size)))
    if vectors.ndim != 2 or vectors.shape[0] != 2:
        raise ValueError(f"its pooled output has shape {tuple(vectors.shape)} for 2 images")
    return PooledClassifier(backbone, width=vectors.shape[1], classes=classes)


_MAPS = 4
"""Feature maps that UperNet takes."""


def upernet_configuration(config: Any, *, classes: int, auxiliary_head: bool) -> Any:
    """Return the configuration of UperNet on a backbone: on its last four stages, or on four of a ViT's blocks."""
    stages = [name for name in config.stage_names if name != "stem"]
    is_plain = len(stages) > _MAPS + 1  # each block of a ViT is a stage
    if is_plain:
        config.out_features = [stages[block - 1] for block in _four_blocks(len(stages))]
    else:
        config.out_features = stages[-_MAPS:]
    return quiet_transformers().UperNetConfig(
        backbone_config=config, use_auxiliary_head=auxiliary_head, num_labels=classes
    )


def set_four_maps(config: Any) -> None:
    """Let BEiT's own UperNet take four blocks, where the configuration names none."""
    if config.model_type in ("beit", "data2vec-vision") and len(config.out_indices or ()) != _MAPS:
        config.out_indices = [block - 1 for block in _four_blocks(config.num_hidden_layers)]


def _four_blocks(blocks: int) -> list[int]:
    """Return the numbers of four blocks at even distances, the last one included: 3, 6, 9 and 12 of 12."""
    return [blocks * part // _MAPS for part in range(1, _MAPS + 1)]
