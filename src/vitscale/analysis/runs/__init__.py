"""What one run says, and which runs of a trial count together.

figures       the figures of one run
steps         which steps are alike, which are slow, what each adds to the time that passed; the pace of a run
warmup        which of a run's first steps were slow still
resources     processors, memory and GPUs
compute       energy, and the share of what a device can do
environments  whether two runs may be combined
repeats       how much of the spread of runs lies between allocations, and how many runs a trial needs
"""
