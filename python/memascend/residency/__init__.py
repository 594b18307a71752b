"""Brings parameters to memory while modules compute, and lets them go: placeholders, gates, eviction."""
