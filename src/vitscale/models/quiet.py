"""Keeps transformers and huggingface_hub from talking on every rank's terminal."""

from __future__ import annotations

import logging
from typing import Any


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
