"""The feed-forward block on a GPU. Nothing here waits for the device; importing this imports no Triton.

forward    one call: decode (few tokens), block (many), row (the paper's), or dense and counted
training   a training step's forward and backward
decode, block, backward              what they launch, and on which workspace
block_launches, backward_launches    kernel by kernel
launch, tape, workspace              launches without Triton's front door, recorded and replayed
triton/    portable kernels          hopper/  compute capability 9.0, in Gluon      row/  the paper's
"""
