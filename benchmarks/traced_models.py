"""Small models of many families, by their configuration, which no formula of vitscale counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dinov2": {
        "model_type": "dinov2", "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "mlp_ratio": 4,
        "image_size": 64, "patch_size": 8,
    },
    "dinov2_with_registers": {
        "model_type": "dinov2_with_registers", "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3,
        "mlp_ratio": 4, "image_size": 64, "patch_size": 8,
    },
    "beit": {
        "model_type": "beit", "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3,
        "intermediate_size": 384, "image_size": 64, "patch_size": 8, "drop_path_rate": 0.0,
    },
    "swin": {
        "model_type": "swin", "embed_dim": 24, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "window_size": 4,
        "image_size": 64, "patch_size": 4, "drop_path_rate": 0.0,
    },
    "swinv2": {
        "model_type": "swinv2", "embed_dim": 24, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "window_size": 4,
        "image_size": 64, "patch_size": 4, "drop_path_rate": 0.0,
    },
    "convnext": {
        "model_type": "convnext", "hidden_sizes": [24, 48, 96, 192], "depths": [2, 2, 2, 2], "image_size": 64,
    },
    "convnextv2": {
        "model_type": "convnextv2", "hidden_sizes": [24, 48, 96, 192], "depths": [2, 2, 2, 2], "image_size": 64,
    },
    "resnet": {
        "model_type": "resnet", "embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2],
        "layer_type": "bottleneck",
    },
    "pvt_v2": {
        "model_type": "pvt_v2", "hidden_sizes": [16, 32, 80, 128], "depths": [2, 2, 2, 2], "image_size": 64,
        "num_attention_heads": [1, 2, 5, 8], "drop_path_rate": 0.0,
    },
    "deit, distilled": {
        "model_type": "deit", "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3,
        "intermediate_size": 384, "image_size": 64, "patch_size": 8, "head_dim": 32,
    },
    "siglip_vision_model": {
        "model_type": "siglip_vision_model", "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3,
        "intermediate_size": 384, "image_size": 64, "patch_size": 8,
    },
}  # fmt: skip
"""Name -> config.json of a model of transformers."""


def write_configurations(folder: Path) -> dict[str, Path]:
    """Write each configuration into a folder of its own below `folder`; return name -> that folder."""
    folders = {}
    for name, configuration in CONFIGURATIONS.items():
        model_folder = folder / name.replace(", ", "-")
        model_folder.mkdir(parents=True, exist_ok=True)
        (model_folder / "config.json").write_text(json.dumps(configuration))
        folders[name] = model_folder
    return folders
