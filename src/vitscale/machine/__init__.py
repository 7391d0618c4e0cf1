"""The machine and the hosts that ranks run on."""
