"""Running statistics that keep what the agent sees and earns in a range it can learn from."""
