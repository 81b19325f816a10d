"""Simic: trains the controller. Rewards, the agent, the loop; it knows no streams and no views."""
