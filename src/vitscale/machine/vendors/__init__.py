"""Vendors of GPUs, a module each: nothing outside this package knows a vendor's library, variables or device files."""
