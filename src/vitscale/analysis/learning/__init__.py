"""What was learned.

convergence   accuracy by images and by seconds, what a target accuracy took
noise_scale   up to which global batch a larger one still pays
drift         does a trial compute what the others do?
"""
