"""Computes the micro-batches of one step layer by layer, with the bits of computing them one after the other."""
