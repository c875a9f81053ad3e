"""Our wrapper inside of other people's training loops; each file imports its library when used."""
