"""`esper watch`: a run in the terminal. Needs the extra `watch` (Textual)."""
