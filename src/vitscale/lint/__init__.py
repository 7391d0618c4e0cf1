"""What a DeepSpeed configuration will really do: findings, rule by rule, each with its source and the fix.

from vitscale.lint import Setting, lint
findings = lint(config, Setting(parameters=86_567_656, gpus=8))
"""

from vitscale.lint.finding import SEVERITIES, Finding, Severity
from vitscale.lint.setting import Setting, setting_of
from vitscale.lint.table import lint

__all__ = ["SEVERITIES", "Finding", "Setting", "Severity", "lint", "setting_of"]
