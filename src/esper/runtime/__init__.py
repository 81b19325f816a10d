"""What Esper trains on: the table of tasks and the data behind it. Knows hosts; knows no envs and no training."""
