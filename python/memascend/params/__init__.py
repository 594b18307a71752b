"""Loads parameters while modules compute and evicts them afterwards."""
