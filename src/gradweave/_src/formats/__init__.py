"""Files of other programs: what theirs say of a job is read, and ours are written for them."""
