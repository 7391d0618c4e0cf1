"""Explains why a training is slow: runs the user's command as it is, watches its ranks, says what costs most.

session      starts the command with the hook (`vitscale.hook`) and ends it
rank_files   reads the lines that ranks wrote             -> HookedRank of each rank
answer       works out the parts of a step and the causes -> ExplainAnswer
words        says the answer to a reader
"""
