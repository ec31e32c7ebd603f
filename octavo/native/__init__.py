"""Octavo's C++ kernels for CPUs: compiled on the machine at first use, run as programs of operations."""
