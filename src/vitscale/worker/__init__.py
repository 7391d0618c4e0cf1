"""What a rank does. Any launcher starts it as `python -m vitscale.worker RUN_FOLDER`."""
