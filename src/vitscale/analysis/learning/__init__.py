"""What was learned.

convergence   accuracy by images and by seconds, what a target accuracy took; up to which global batch a larger one pays
drift         does a trial compute what the others do?
"""
