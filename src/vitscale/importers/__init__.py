"""Importers: results that others recorded, as results of vitscale.

epochs         a table of epochs by rank
deepspeed      DeepSpeed's own log, with wall_clock_breakdown
trainer_state  Hugging Face's trainer_state.json
traces         of the PyTorch profiler
left_behind    both, where a script without a Probe has left them in its run
plain_csv      a table of measured times
links          what nccl-tests and perftest measured of a network
importing      which of them files are, and the whole way from them to a folder
trials, curves what was found, as trials and curves
records        the results folder
"""
