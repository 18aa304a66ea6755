"""The rollout engine, and the scoring of what it drew."""
