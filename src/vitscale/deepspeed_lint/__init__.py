"""Findings on a DeepSpeed configuration: what it does that its author may not expect, with the source and the fix.

from vitscale.deepspeed_lint import LintTarget, lint
findings = lint(config, LintTarget(parameters=86_567_656, gpus=8))
"""

from vitscale.deepspeed_lint.rules import lint, lint_document, lint_fields, lint_file
from vitscale.deepspeed_lint.view import LintTarget, lint_target

__all__ = ["LintTarget", "lint", "lint_document", "lint_fields", "lint_file", "lint_target"]
