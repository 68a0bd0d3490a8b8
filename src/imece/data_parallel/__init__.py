"""Wrappers that let many ranks train one model: DistributedDataParallel, and sharded models built on it.

parallelize, auto            wraps the model; chooses a strategy for it
replicate, sharded           the two wrappers
reducer, reducing/           reduce gradients while backward runs
shard, sharding/             keep a model in parts
strategy, average, norm      what is divided; what a mean or a norm is over
regroup, joining             other ranks take over; ranks run out of inputs
same, buffers, batch_norm    what is alike on all ranks, and stays so
across, other_models         other parts of the same model; other models with the same parameters
alone, closure               steps of whole parameters by which ranks would drift apart
script_writes                writes of the script by which they would
registered                   parameters that modules got since a model was wrapped
script                       the user's line that a warning names
optimizer, optimizer_state   any torch optimizer: questions about it; what it keeps, for other ranks
grad_scaler, compiled        torch's GradScaler and torch.compile with any strategy
torch_calls                  torch's own clipping functions on a rank's parts
footprint                    bytes on one rank, expected and counted
arguments, torch_names       torch's interface; outputs.py finds tensors in what a module returned
"""
