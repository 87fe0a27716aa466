"""Scenario files: a tiny pool, what happens to it, and what must be reported. The notation is in the documentation."""
