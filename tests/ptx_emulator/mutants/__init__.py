"""Mutation score: single faults put into kernels that are known to be right, and what the emulator says of each.

A mutant that nothing reports is either proved redundant (redundant.py says how) or counted as missed.
"""
