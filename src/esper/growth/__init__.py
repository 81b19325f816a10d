"""Growing any model of the user's: sites, slots on them, the user's optimizer, and what came of it."""
