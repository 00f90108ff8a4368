"""GPU kernels of the feed-forward block, in Triton, with Hopper variants in Gluon.

    selector   gate matmul whose epilogue activates, marks and stores active neurons only
    lists      per block of tokens, the list of its active neurons
    up         gathered up projection times the gate, packed
    down       gathered down projection
    few        the same block for a few tokens (decode), two launches
    rows       the paper's row format: packed words, then up and down per token
    hopper     selector, up and down for compute capability 9.0

Nothing here synchronises with the host. Importing this package does not import Triton.
"""
