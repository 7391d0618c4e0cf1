"""Where the time goes.

exposure      waiting and transfer told apart, in one step of all ranks
timelines     what a rank did at each moment of an explained step
breakdown     the parts of a step, per rank
traffic       what an optimizer step really sends, logical and physical, and the bandwidth reached
waterfall     from ideal to measured, in factors that multiply to the efficiency
run_waterfall the same of whole runs, with start-up, evaluation and checkpoint
"""
