"""Planning, carried out on one rank of many while the model trains."""
