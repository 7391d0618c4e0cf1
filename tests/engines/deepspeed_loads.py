"""Reads files as the installed DeepSpeed does: paths on standard input, for each its values or null on standard output.

Run in a process of its own, for it imports torch.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Of DeepSpeedConfig only what reads the file runs, not what checks its values."""
    from deepspeed.runtime import config

    def nothing(*_: Any) -> None:
        return None

    if hasattr(config, "_reject_removed_config_keys"):
        config._reject_removed_config_keys = nothing
    for name in ("_initialize_params", "_configure_train_batch_size", "_do_sanity_check"):
        setattr(config.DeepSpeedConfig, name, nothing)
    answers: list[Any] = []
    for path in json.load(sys.stdin):
        try:
            answers.append(json.dumps(config.DeepSpeedConfig(path)._param_dict))
        except Exception:
            answers.append(None)
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
