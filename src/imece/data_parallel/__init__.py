"""Wrappers that let many ranks train one model: DistributedDataParallel, and the sharded strategies on top of
it.

    parallelize    chooses a strategy and wraps the model     replicate, sharded    the two wrappers
    reducer        reduces gradients while backward runs      reducing/             what the reducer consists
    of
    shard          the memory of sharded models               sharding/             what sharding consists of
    average, norm  what a mean or a norm is over              regroup, joining      ranks that change or run
    out
"""
