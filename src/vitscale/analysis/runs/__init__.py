"""What one run says, and which runs of a trial count together.

figures       the figures of one run
steps         which steps are alike, which are slow, what each adds to the time that passed
pace          how fast a run goes, from its steps or from whole epochs
warmup        which of a run's first steps were slow still
resources     processors, memory and GPUs, with `energy` and the share of what a device can do (`compute`)
environments  whether two runs may be combined
allocations   how much of the spread of runs lies between allocations
target_ci     how many runs a trial needs to be known as closely as asked
"""
