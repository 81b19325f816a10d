"""A training run on disk and from outside: its folder, lock, checkpoints, log, signals and end."""
