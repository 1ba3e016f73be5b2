"""Kernels whose results on a real sm_90a GPU are kept, so that the emulator can be compared with it anywhere."""
