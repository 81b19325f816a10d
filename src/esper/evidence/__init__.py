"""Judging controllers: arms, runs, results, statistics, verdicts, reports. Opens no split by itself."""
