"""Adapters (LoRA, Hu et al. 2021; QLoRA, Dettmers et al. 2023) beside a frozen model, by peft.

    base     the frozen model of --from. It is sharded where parameters are (except the scales of 4-bit
             matrices). Checkpoints have only its digests: each command that needs it reads its own folder
    adapter  A [rank, in] and B [out, rank] beside a matrix W [out, in]: W x + alpha / rank * B A x

A begins at random and B with zeros, so the model begins as the base. With lora.quantize all matrices
(models/matrices.py), with or without adapters, are NF4: codes of 4 bits, and a scale of 8 bits for every 64
elements.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from imece.checkpoint.load import Source
from imece.checkpoint.state.names import MODEL
from imece.checkpoint.state.weights import held, on_all
from imece.data_parallel.replicate import DistributedDataParallel
from imece.errors import UserError
from imece.listing import many, some
from imece.membership.pieces import Pieces
from imece.models.language_model import LanguageConfig, LanguageModel
from imece.models.matrices import matrices_of
from imece.observe.units import si
from imece.train.config import LoraSection, TrainConfig, flat
from imece.train.model.precision import Precision

ADAPTER_A, ADAPTER_B = ".lora_A.default.weight", ".lora_B.default.weight"
_BASE = ".base_layer"
_QUANT_TYPE = "nf4"
_SHOWN = 12  # names of matrices in a message


def check_asked(config: TrainConfig) -> None:
    """UserError if adapters are asked for together with an option that they do not support, or options of
    theirs without them."""
    if not config.lora.rank:
        usual = flat(LoraSection())
        if given := [name for name, value in flat(config.lora).items() if value != usual[name]]:
            raise UserError(
                f"--lora.{given[0]} without --lora.rank: name a rank, such as 16, or leave it out"
            )
        return
    asked = f"--lora.rank {config.lora.rank}"
    if not config.model.weights:
        raise UserError(
            f"{asked}: adapters stand beside a model that is trained already: name its folder with --from, "
            "or leave that option out"
        )
    if config.optimizer.kind != "adamw":
        raise UserError(
            f"{asked} and --optimizer.kind {config.optimizer.kind}: adapters are trained with adamw: leave "
            "one of them out"
        )


def check_libraries(lora: LoraSection, *, to_train: bool = True) -> None:
    """UserError, with what to install, if a package for adapters is missing. to_train: False if they are only
    merged."""
    needed = [("peft", "hf", "--lora.rank")] if lora.rank and to_train else []
    if lora.rank and lora.quantize != "none":
        needed.append(("bitsandbytes", "quant", f"--lora.quantize {lora.quantize}"))
    for package, extra, option in needed:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{option} needs {package}: pip install 'imece[{extra}]'")


def check_targets(config: TrainConfig, shape: LanguageConfig) -> None:
    """UserError if adapters are to stand beside a matrix that the model has not."""
    every = matrices_of(shape) if config.lora.rank else {}
    for target in config.lora.targets if config.lora.rank else ():
        if not any(_is_called(name, target) for name in every):
            known = list(dict.fromkeys(name.rpartition(".")[2] for name in every))
            raise UserError(
                f"--lora.targets {target}: the model of {config.model.weights} has no such matrix, but "
                f"{some(known, _SHOWN)}: name some of these, or leave the option out for all"
            )


def targets_of(lora: LoraSection, shape: LanguageConfig) -> list[str]:
    """The names of the modules that get adapters, in the model's order."""
    return [name for name in matrices_of(shape) if _is_target(name, lora)]


def adapted(
    config: TrainConfig, base: Source, model: LanguageModel, device: torch.device, precision: Precision
) -> LanguageModel:
    """Add adapters to a model on the meta device. A quantised model also gets memory on `device` and the
    values of `base`, because codes cannot be cut. Otherwise whoever divides the model gives it memory, and
    `begin_beside` its values.

    At most one matrix is on the CPU at a time. UserError if the base cannot be read.
    """
    lora = config.lora
    if lora.quantize == "none":
        add(model, lora)
        return model
    for name, matrix in matrices_of(model.config).items():
        weight = matrix.upright(base.tensor(f"{MODEL}{name}.weight"))
        _replace(model, name, _quantised(model.get_submodule(name), weight, device, precision))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            memory = torch.empty(parameter.shape, device=device)
            base.fill(memory, MODEL + name)
            # The same object, which may be a head too.
            swap_tensors(parameter, nn.Parameter(memory, requires_grad=False))
    add(model, lora)
    with torch.no_grad():
        for name, value in first_values(model, config.seed):
            model.get_parameter(name).copy_(value)
    return model


@torch.no_grad()
def begin_beside(config: TrainConfig, base: Source, model: DistributedDataParallel) -> None:
    """Give the model the values of `base`, of which each rank reads what it keeps, and the adapters their
    first values. All ranks call this. UserError if the base cannot be read."""
    first, shape = first_pieces(config, model.module), cast(LanguageModel, model.module).config
    adapters = {*first.names()}

    def read() -> None:
        for name, start, memory in held(model):
            of_base = name.replace(f"{_BASE}.", ".")
            if MODEL + name in adapters:
                first.fill(memory, MODEL + name, start)
            elif is_quantised(of_base, config.lora, shape):
                codes = quantised(base.tensor(MODEL + of_base), of_base, shape)[0].view(-1)
                memory.copy_(codes[start : start + memory.numel()].view(memory.shape))
            else:
                base.fill(memory, MODEL + of_base, start)

    on_all(model, read)
    model.take_over_masters()


def first_values(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """The first values of all adapters, float32 on the CPU: the same on every rank and at any time."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(ADAPTER_A):
            value = torch.empty(parameter.shape)
            yield name, nn.init.kaiming_uniform_(value, math.sqrt(5), generator=generator)
        elif name.endswith(ADAPTER_B):
            yield name, torch.zeros(parameter.shape)


def first_pieces(config: TrainConfig, model: nn.Module) -> Pieces:
    """`first_values` as a source from which a training state can be loaded."""
    start = Pieces()
    for name, value in first_values(model, config.seed):
        start.add(MODEL + name, tuple(value.shape), 0, value.view(-1))
    return start


def describe(model: LanguageModel, lora: LoraSection) -> str:
    """ "LoRA rank 16 on 7 layers a block: 0.9M of 135M parameters trained"."""
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    kind = f"QLoRA ({lora.quantize})" if lora.quantize != "none" else "LoRA"
    adapters, whole = len(targets_of(lora, model.config)), si(model.config.parameter_count)
    each, over = divmod(adapters, model.config.layers)
    where = many(adapters, "layer") if over else f"{many(each, 'layer')} a block"
    return f"{kind} rank {lora.rank} on {where}: {si(trained)} of {whole} parameters trained"


def live_name(name: str, lora: LoraSection, shape: LanguageConfig) -> str:
    """The name of a parameter of the base once adapters are beside it."""
    module, _, key = name.rpartition(".")
    return f"{module}{_BASE}.{key}" if module in matrices_of(shape) and _is_target(module, lora) else name


def is_quantised(name: str, lora: LoraSection, shape: LanguageConfig) -> bool:
    """Whether this parameter of the base is quantised."""
    module, _, key = name.rpartition(".")
    return lora.quantize != "none" and key == "weight" and module in matrices_of(shape)


def quantised(weight: Tensor, name: str, shape: LanguageConfig) -> tuple[Tensor, Tensor]:
    """(codes, uint8; the weight that they stand for, float32) of the parameter `name` on the CPU. Codes are
    of an upright matrix."""
    matrix = matrices_of(shape)[name.removesuffix(".weight")]
    codes, read = codes_of(matrix.upright(weight.float()))
    return codes, matrix.upright(read)


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, uint8; the matrix that they stand for, float32) of a float32 matrix on the CPU."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight, quant_type=_QUANT_TYPE, compress_statistics=True)
    return codes, functional.dequantize_4bit(codes, state)


def _is_called(name: str, target: str) -> bool:
    """As peft has it: `target` is the name, or its end behind a dot."""
    return name == target or name.endswith(f".{target}")


def _is_target(name: str, lora: LoraSection) -> bool:
    """Whether this matrix gets an adapter."""
    return not lora.targets or any(_is_called(name, target) for target in lora.targets)


def _quantised(module: nn.Module, weight: Tensor, device: torch.device, precision: Precision) -> nn.Module:
    """The layer with `weight`, [out, in], quantised: on the CPU for any device, so that a later command finds
    the same codes."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    out, inputs = weight.shape
    linear = Linear4bit(
        inputs, out, bias=False, compute_dtype=precision.dtype, quant_type=_QUANT_TYPE, device="meta",
    )  # fmt: skip
    linear.bias = cast(nn.Parameter | None, module.bias)  # still on the meta device
    linear.support_avx512bf16_for_cpu = False  # otherwise validation would rearrange the codes
    parameter = Params4bit(weight.float(), requires_grad=False, quant_type=_QUANT_TYPE, module=linear)
    linear.weight = parameter.to("cpu").to(device)
    return cast(nn.Module, linear)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, module)


def add(model: LanguageModel, lora: LoraSection) -> None:
    """Add adapters beside the model's matrices, and freeze everything else."""
    import peft

    targets, in_codes = targets_of(lora, model.config), lora.quantize != "none"
    model.__dict__["is_loaded_in_4bit"] = in_codes  # so peft knows bitsandbytes' layers
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha_or_usual, lora_dropout=lora.dropout, target_modules=targets,
        fan_in_fan_out=not in_codes and lies(model.config),
    )  # fmt: skip
    on_meta = any(each.is_meta for each in model.parameters())
    peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)


def lies(shape: LanguageConfig) -> bool:
    """Whether the model's matrices are stored lying: peft's fan_in_fan_out."""
    return any(matrix.lies for matrix in matrices_of(shape).values())
