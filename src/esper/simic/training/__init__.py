"""What runs in an env step, and the loops around it."""
