"""Portable kernels, in Triton: every GPU runs them, and so does the interpreter."""
