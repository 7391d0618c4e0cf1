"""`python -m vitscale`."""

from vitscale.base.interpreter import leave_out_current_folder

leave_out_current_folder()

from vitscale.cli import main  # noqa: E402 - modules of the current folder must not come before its own

main()
