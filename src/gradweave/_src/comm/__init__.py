"""Running collectives on torch process groups."""
