"""Plans carried out by torch's own DistributedDataParallel."""
