"""Engines: what works beside the threads, and the instructions that start it or wait for it. One family a file."""
