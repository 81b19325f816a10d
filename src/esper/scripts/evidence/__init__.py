"""Parts of `esper evaluate`: arms, runs, results, statistics, verdicts, reports. They open no split by themselves."""
