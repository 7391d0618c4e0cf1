"""Importers: results that others recorded, as results of vitscale."""
