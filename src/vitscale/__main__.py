"""`python -m vitscale`."""

from vitscale.cli import main

main()
