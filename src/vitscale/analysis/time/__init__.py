"""The parts that the time of a step, or of a run, consists of.

exposure      waiting and transfer told apart, in one step of all ranks
breakdown     the parts of a step, per rank
traffic       what an optimizer step really sends, logical and physical, and the bandwidth reached
waterfall     from ideal to measured, in factors that multiply to the efficiency
run_waterfall the same for whole runs, with start-up, evaluation and checkpoint
"""
