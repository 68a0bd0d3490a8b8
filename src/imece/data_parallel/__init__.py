"""Wrappers that let many ranks train one model: DistributedDataParallel, and sharded models built on it.

parallelize          chooses a strategy and wraps the model
replicate, sharded   the two wrappers
reducer, reducing/   reduce gradients while backward runs
shard, sharding/     keep a model in parts
average, norm        what a mean or a norm is over
regroup, joining     other ranks take over; ranks run out of inputs
"""
