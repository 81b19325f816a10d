"""Kasmina changes topology: hosts, slots, seeds, their life, saving and export. It does not know why."""
