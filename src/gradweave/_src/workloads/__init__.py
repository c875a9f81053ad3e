"""What there is to train: a replayed trace, small models, real data."""
