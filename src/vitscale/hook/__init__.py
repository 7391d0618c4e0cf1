"""Hook in a training process of the user: marks steps and their parts, samples stacks, profiles, ends the rank.

`vitscale explain` copies this folder to its results as the package `vitscale_hook`, with `sitecustomize.py` beside it.
Everything here runs in the user's process: standard library only, relative imports only, Python 3.9 and later; torch's
modules are taken from `sys.modules` once the program has imported them. The control plane imports `lines` alone.
"""
