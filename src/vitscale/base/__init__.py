"""What all other packages may use: text files and locks, Pythons and forks, Parquet, plugins, spans of time."""
