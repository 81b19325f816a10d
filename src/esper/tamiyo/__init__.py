"""Tamiyo: watches, decides, learns nothing by itself. Signals, observations, legality, rules. No torch."""
