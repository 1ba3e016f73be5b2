"""Operand layouts as CuTe's headers state them, enumerated into numbers: the tests hold layouts.py against them."""
