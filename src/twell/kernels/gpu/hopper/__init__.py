"""Kernels for compute capability 9.0, in Gluon; each does what its portable namesake does."""
