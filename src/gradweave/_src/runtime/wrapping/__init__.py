"""What is settled when a model is wrapped: options, whether all ranks agree, given plans."""
