"""What training learned.

convergence   accuracy by images and by seconds, the cost of a target accuracy, the batch up to which a larger one pays
drift         does a trial compute what the others do?
"""
