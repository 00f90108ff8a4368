"""The CPU backend: sparse execution with ordinary torch ops, no build step.

Its files:

    forward       a call, chunk by chunk: the selector (gate) projection, then the cheapest of three finishes
    backward      gradients on the active (token, neuron) pairs
    weights       how a call reads its weights: dtype, orientation, copies
    csr           the row path's primitives: sampled dot products, weighted row sums
    gemm          dense products in the form that is fastest on this machine
    measurements  timings of this CPU, taken once and kept
"""
