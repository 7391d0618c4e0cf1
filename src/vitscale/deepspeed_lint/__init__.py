"""What a DeepSpeed configuration will really do: findings, rule by rule, each with its source and the fix.

from vitscale.deepspeed_lint import Setting, lint
findings = lint(config, Setting(parameters=86_567_656, gpus=8))
"""

from vitscale.deepspeed_lint.rules import lint, lint_document, lint_fields, lint_file
from vitscale.deepspeed_lint.view import LintTarget, setting_of

__all__ = ["LintTarget", "lint", "lint_document", "lint_fields", "lint_file", "setting_of"]
