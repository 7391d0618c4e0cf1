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
    if hidden.ndim == 3:
        return hidden.mean(dim=1)
    pixels = hidden.flatten(2)  # [b, h, height * width]
    return pixels.mean(dim=2)


def vision_configuration(config: Any) -> Any:
    """Return the configuration of the vision tower of a composite model; any other configuration as it is."""
    return getattr(config, "vision_config", None) or config


def backbone_class(config: Any) -> type[nn.Module] | None:
    """Return the class of transformers that builds a vision tower of this configuration; None where there is none."""
    config_class = type(config)
    classes_by_config = quiet_transformers().AutoModel._model_mapping
    if config_class not in classes_by_config:
        return _unlisted_backbone_class(config_class)
    model_class: type[nn.Module] | tuple[type[nn.Module], ...] = classes_by_config[config_class]
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _unlisted_backbone_class(config_class: type) -> type[nn.Module] | None:
    """Return the class that takes images, of a configuration that transformers' own table leaves out.

    It is searched in the module beside the configuration's: `modeling_clip` beside `configuration_clip`.
    """
    module_name = config_class.__module__.replace(".configuration_", ".modeling_")
    if not module_name.startswith("transformers."):
        return None
    module = importlib.import_module(module_name)
    for _, model_class in inspect.getmembers(module, inspect.isclass):
        has_this_configuration = getattr(model_class, "config_class", None) is config_class
        takes_images = getattr(model_class, "main_input_name", "") == "pixel_values"
        if has_this_configuration and takes_images:
            return cast("type[nn.Module]", model_class)
    return None


def classifier_on(backbone: nn.Module, *, channels: int, image_size: int, classes: int) -> PooledClassifier:
    """Return a classifier on a backbone, as wide as the vectors that the backbone gives for such images.

    Raises:
        ValueError: the backbone does not give one vector for each image.
        Exception: the backbone does not take such images; any type, from its forward.
    """
    vectors = pooled(forward_once(backbone, (2, channels, image_size, image_size)))
    if vectors.ndim != 2 or vectors.shape[0] != 2:
        raise ValueError(f"its pooled output has shape {tuple(vectors.shape)} for 2 images")
    return PooledClassifier(backbone, width=vectors.shape[1], classes=classes)


_UPERNET_MAPS = 4
"""Feature maps that UperNet takes."""


def upernet_configuration(config: Any, *, classes: int, auxiliary_head: bool) -> Any:
    """Return the configuration of UperNet on a backbone: on its last four stages, or on four of a ViT's blocks.

    Args:
        config: the backbone's configuration; its `out_features` are set in place.
        classes: number of classes of the labels.
        auxiliary_head: whether a second head is trained beside UperNet's own.
    """
    stages = [name for name in config.stage_names if name != "stem"]
    is_vit = len(stages) > _UPERNET_MAPS + 1  # transformers calls each block of a ViT a stage
    if is_vit:
        config.out_features = [stages[number - 1] for number in _four_block_numbers(len(stages))]
    else:
        config.out_features = stages[-_UPERNET_MAPS:]
    return quiet_transformers().UperNetConfig(
        backbone_config=config, use_auxiliary_head=auxiliary_head, num_labels=classes
    )


def set_four_maps(config: Any) -> None:
    """Let BEiT's own UperNet take four blocks, where the configuration names none."""
    if config.model_type not in ("beit", "data2vec-vision"):
        return
    names_four_blocks = len(config.out_indices or ()) == _UPERNET_MAPS
    if not names_four_blocks:
        config.out_indices = [number - 1 for number in _four_block_numbers(config.num_hidden_layers)]


def _four_block_numbers(blocks: int) -> list[int]:
    """Return the numbers, from 1 on, of four blocks at even distances, the last one included: 3, 6, 9, 12 of 12."""
    return [blocks * quarters // _UPERNET_MAPS for quarters in range(1, _UPERNET_MAPS + 1)]
