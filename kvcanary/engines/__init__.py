"""Adapters: how each engine is watched from outside, without touching its source."""
