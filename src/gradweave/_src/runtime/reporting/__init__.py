"""What wrappers tell of their training: times, findings, and the run that is saved."""
