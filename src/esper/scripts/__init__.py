"""Commands: thin entry points that parse, call and print."""
