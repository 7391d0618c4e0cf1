"""Explain: a command as it is, watched from inside its ranks, and why a step takes as long as it does.

results_folder   the folder of one explanation: the hook, the plan, the ranks' files
command_output   the command's output: passed on, and kept within limits
processes        the command's processes: which they are, and how they are ended
reach            what keeps the hook from the ranks
step_progress    how far each rank is, from the end of its file
written_files    files that the command wrote in its folder
session          the whole: start, watch, plan, end
rank_files       the ranks' files, which are untrusted, as records

The function is `vitscale.explain`, so that the package cannot have its name.
"""
