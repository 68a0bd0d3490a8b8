"""What a sharded model (../shard.py, ../sharded.py) consists of.

trained, parts, stores     how parameters are cut, and what a rank keeps of them
units, gathering, freed    parameters that are gathered and freed by unit (zero3, hybrid)
coming                     parameters that are still being gathered after a step (zero1, zero2)
borrowed, accumulated      memory for gradients; which gradients were summed and stepped
stepped, cut_state, moved  the user's optimizer on this rank's parts
offload, cast, block_wise  the host's memory, other dtypes, 8-bit optimizers
gathered, written, meta    the whole model for a while; foreign writes; models without memory
divided                    whoever asks a parameter for its gradient
"""
