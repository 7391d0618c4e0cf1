"""What everything may use: text files, wording of errors, spans of time."""
