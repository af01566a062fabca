"""Data sets on disk: their label files, and jobs over their frames."""
