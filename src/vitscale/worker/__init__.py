"""What a rank does. `python -m vitscale.worker RUN_FOLDER`, started by any launcher."""
