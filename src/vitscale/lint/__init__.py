"""What a DeepSpeed configuration will really do: findings, rule by rule, each with its source and the fix.

from vitscale.lint import Setting, lint
findings = lint(config, Setting(parameters=86_567_656, gpus=8))
"""

from vitscale.lint.setting import Setting, setting_of
from vitscale.lint.table import lint, lint_document

__all__ = ["Setting", "lint", "lint_document", "setting_of"]
