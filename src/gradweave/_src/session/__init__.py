"""Planning while a model trains, as decisions alone: no torch, no process group, no clock."""
