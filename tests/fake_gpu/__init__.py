"""Inductor's code for a GPU that is not there: generated and compiled offline, forward and backward (README.md)."""
