"""Importers: results that others recorded, as results of vitscale.

epochs         a table of epochs by rank
deepspeed      DeepSpeed's own log, with wall_clock_breakdown
trainer_state  Hugging Face's trainer_state.json
train_logs     what training loops print of their steps, of many programs
traces         traces of the PyTorch profiler
left_behind    states, traces and logs that a script without a Probe has left in its run
plain_csv      a table of measured times
links          what nccl-tests and perftest measured of a network
importing      the format of files, and the whole way from files to a results folder
trials, curves what was read, as trials and curves
records        the results folder
"""
