"""Our wrapper inside of other people's training loops; each module needs its library alone."""
