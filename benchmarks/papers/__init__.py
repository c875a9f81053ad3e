"""The papers' simulated results beside the papers' own figures: ``make results``."""
