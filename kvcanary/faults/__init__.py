"""Faults on purpose: what can be broken, which check must see it, and how soon."""
