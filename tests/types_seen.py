"""What a type checker makes of calls of imece's; `make lint` checks this file, and nothing runs it."""

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.optim import SGD

import imece


class Net(nn.Module):
    def loss(self, inputs: Tensor) -> Tensor:
        return inputs.sum()


def collectives(tensor: Tensor, async_op: bool) -> None:
    assert_type(imece.all_reduce(tensor, "avg", wire="bf16", schedule="hierarchical", label="x"), Tensor)
    assert_type(imece.all_reduce(tensor, async_op=False), Tensor)
    assert_type(imece.all_reduce(tensor, async_op=True), imece.Pending)
    assert_type(imece.all_reduce(tensor, async_op=True).wait(timeout_s=1), Tensor)
    assert_type(imece.all_reduce(tensor, async_op=async_op), Tensor | imece.Pending)
    assert_type(imece.reduce_scatter(tensor, tensor, "max", wire="int8"), Tensor)
    assert_type(imece.reduce_scatter(tensor, tensor, async_op=True), imece.Pending)
    assert_type(imece.all_gather(tensor, tensor, group=None), Tensor)
    assert_type(imece.all_gather(tensor, tensor, async_op=True), imece.Pending)
    assert_type(imece.broadcast(tensor, 0, schedule="pipelined_ring", parts=4), Tensor)
    assert_type(imece.broadcast(tensor, async_op=True), imece.Pending)
    assert_type(imece.reduce(tensor, 0), Tensor)
    assert_type(imece.reduce(tensor, async_op=True), imece.Pending)
    assert_type(imece.recv(imece.send(tensor, 1), 1), Tensor)
    assert_type(imece.barrier(async_op=True), imece.Pending[None])
    assert_type(imece.exchange([imece.Send(tensor, 1)], async_op=True).wait(), None)
    under_way: list[imece.Pending | imece.Pending[None]] = []  # of any call
    under_way += [imece.all_reduce(tensor, async_op=True), imece.barrier(async_op=True)]
    imece.all_reduce(tensor, parts=4)  # type: ignore[call-overload]


def models(net: Net, optimizer: SGD) -> None:
    assert_type(imece.DistributedDataParallel(net).module.loss(torch.ones(1)), Tensor)
    model, stepped = imece.parallelize(net, optimizer, "zero2")
    assert_type(model.module, Net)
    assert_type(stepped, SGD)
    assert_type(imece.parallelize(net, lambda parameters: SGD(parameters, lr=0.1))[1], SGD)
    assert_type(model.clip_grad_norm_(1.0), Tensor)
    for step in imece.steps(10, model, stepped):  # takes a model of any class
        with step as number:
            assert_type(number, int)


def number_of_rank(factor: float) -> float:
    return imece.init().rank * factor


def ranks() -> None:
    assert_type(imece.spawn(number_of_rank, (2.0,), ranks=2), list[float])
    assert_type(imece.init(), imece.Mesh)
    imece.all_reduced  # type: ignore[attr-defined] # noqa: B018
