"""Kernels in C++ for CPUs: what PyTorch would do in several passes over memory, or slowly."""
