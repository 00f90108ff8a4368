"""Random calls of the block, each compared with the float64 oracle: `python -m tests.fuzz --help`."""
