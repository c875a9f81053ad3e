"""Runs that ended, to look at: one HTML page, or a trace for Perfetto."""
