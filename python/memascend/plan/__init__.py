"""Decides before a run: options, units, their order, and what lies in memory within a budget."""
