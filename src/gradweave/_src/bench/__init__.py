"""Experiments on clusters, emulated or real: what launchers ask, and what each rank runs."""
