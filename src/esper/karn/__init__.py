"""Reads runs: decode and replay the log, fold it into a view, judge it, show it. Knows files, never live objects."""
