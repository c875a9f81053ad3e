"""Whether training by our wrappers is right on a user's own devices, found out in minutes."""
