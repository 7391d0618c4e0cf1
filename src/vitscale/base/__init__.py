"""What all other packages may use: text files and locks, forks, plugins, spans of time."""
