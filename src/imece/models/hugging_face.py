"""The same model under Hugging Face's names: a folder that transformers loads, and back.

Nothing is computed: both pair the channels of a head in the same order, so every tensor stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from imece.errors import UserError
from imece.models.hugging_face_config import Json, content_of, shape_from
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer

Shape = tuple[int, ...]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of a model in several files: which tensor is in which
# What belongs to the tokenizer of a folder, and how text is to be made with it.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

_ENDS = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
_IN_BLOCK = {
    "attention.norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_DTYPES = ("F64", "F32", "F16", "BF16")  # others need scales, which are apart
# In some files, and nothing that is trained: a tied head once more, and tables that positions say.
_COMPUTED = ("lm_head.weight", ".rotary_emb.inv_freq")
_SHOWN = 3


def hugging_face_name(name: str) -> str:
    """ "blocks.3.mlp.up.weight" -> "model.layers.3.mlp.up_proj.weight". ValueError if no parameter has it."""
    stem, _, kind = name.rpartition(".")
    blocks, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if kind == "weight" and stem in _ENDS:
        return f"{_ENDS[stem]}.weight"
    known = part in _IN_BLOCK and (kind == "weight" or (kind == "bias" and not part.endswith("norm")))
    if not known or blocks != "blocks" or not layer.isdigit():
        raise ValueError(f"{name!r} is no parameter of a Transformer")
    return f"model.layers.{layer}.{_IN_BLOCK[part]}.{kind}"


def to_hugging_face(
    config: TransformerConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype = torch.float32,
    end: int | None = None,
    like: str | None = None,
) -> tuple[Json, Iterator[tuple[str, Tensor]]]:
    """The content of config.json, for files in `dtype`, and the tensors with their new names, as they are.

    `tensors` are those of `Transformer.named_parameters` in any order; they are taken one by one, as the
    second result is read, and so are its errors: ValueError for a tensor too many or too few, or of another
    shape. end: the token behind each document, which is the one before each document too. like: the
    model_type to be, where the shape can be that of several. ValueError for a shape that is that of none.
    """
    return content_of(config, dtype, end, like), _renamed(config, tensors)


def from_hugging_face(folder: Path | str) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """The shape, and all parameters by the names that `Transformer` has for them, in the dtype of the file.

    UserError as `HuggingFaceModel.open`.
    """
    model = HuggingFaceModel.open(folder)
    return model.config, {name: model.tensor(name) for name in shapes_of(model.config)}


@dataclass(frozen=True)
class HuggingFaceModel:
    """A folder's model. Its tensors are on the disk until they are asked for."""

    folder: Path
    config: TransformerConfig
    _files: Mapping[str, Path]
    """Hugging Face's name of a tensor -> the file that has it."""

    @classmethod
    def open(cls, folder: Path | str) -> HuggingFaceModel:
        """UserError, with the file's name, if it is missing or damaged, if the model is none that
        `Transformer` can be (another architecture, other rotary positions, quantised), or if a tensor
        is missing, of another shape, or too many. Of the files of tensors only the headers are read.
        """
        folder = Path(folder)
        config = read_config(folder / CONFIG)
        files = _files(folder)
        _check_tensors(folder, files, config)
        return cls(folder, config, files)

    def tensor(self, name: str) -> Tensor:
        """By its name in `Transformer`, in the dtype of the file. UserError if it cannot be read."""
        key = hugging_face_name(name)
        with _opened(self._files[key]) as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    @torch.no_grad()
    def fill(self, target: Tensor, name: str) -> None:
        """A parameter, on any device, of any dtype. UserError if it cannot be read, or is not finite."""
        target.copy_(self.tensor(name))
        if not target.isfinite().all():
            raise UserError(
                f"{self._files[hugging_face_name(name)]}: {hugging_face_name(name)} has numbers that are not "
                "finite: get the file again"
            )


def read_config(path: Path) -> TransformerConfig:
    """What a config.json describes. UserError, with its name, if it is missing, or no model to read here."""
    content = read_json(path)
    try:
        return shape_from(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path}: not a model that can be read here ({reason}): name another folder"
        ) from error


def hugging_face_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Of all tensors, by their new names, in the order of the model."""
    return {hugging_face_name(name): shape for name, shape in shapes_of(config).items()}


def generation_config(end: int) -> Json:
    """The content of generation_config.json: a text begins after an end token, and stops before one."""
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "do_sample": True}


def tokenizer_config(config: TransformerConfig, end: str) -> Json:
    """The content of tokenizer_config.json, beside a tokenizer.json. end: the end token as text."""
    return {
        # Named, for transformers would else take Llama's own class, which changes what tokenizer.json says.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": config.max_seq,
        "clean_up_tokenization_spaces": False,
    }


def _renamed(
    config: TransformerConfig, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    expected = shapes_of(config)
    for name, tensor in tensors:
        shape = expected.pop(name, None)
        if shape != tuple(tensor.shape):
            wanted = "is none of this model's, or came twice" if shape is None else f"should be {list(shape)}"
            raise ValueError(f"{name}, {list(tensor.shape)}, {wanted}")
        yield hugging_face_name(name), tensor.detach()
    if expected:
        raise ValueError(f"{len(expected)} tensors are missing, such as {next(iter(expected))}")


def shapes_of(config: TransformerConfig) -> dict[str, Shape]:
    """Of all parameters, by their names in `Transformer`."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _check_tensors(folder: Path, files: Mapping[str, Path], config: TransformerConfig) -> None:
    """By the files' headers alone."""
    shapes = hugging_face_shapes(config)
    if missing := [key for key in shapes if key not in files]:
        more = f", nor {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"{folder}: there is no tensor {missing[0]}{more}, but {CONFIG} asks for it: get the folder again"
        )
    if extra := [key for key in files if key not in shapes and not key.endswith(_COMPUTED)]:
        more = f" and {len(extra) - _SHOWN} more" if extra[_SHOWN:] else ""
        raise UserError(
            f"{folder}: {', '.join(extra[:_SHOWN])}{more}, of which {CONFIG} knows nothing: get the folder "
            "again, or name another"
        )
    for path in dict.fromkeys(files[key] for key in shapes):
        with _opened(path) as file:
            for key in (key for key in shapes if files[key] == path):
                _check_tensor(path, key, file.get_slice(key), shapes[key])


def _check_tensor(path: Path, key: str, stored: Any, shape: Shape) -> None:
    if (dtype := stored.get_dtype()) not in _DTYPES:
        raise UserError(
            f"{path}: {key} is {dtype}, so quantised; only floating point of 16 bits or more can "
            "be read: get the model as it was before"
        )
    if tuple(found := stored.get_shape()) != shape:
        raise UserError(
            f"{path}: {key} is {found}, by {CONFIG} it is {list(shape)}: get both files again, from one place"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file, but {INDEX} names it: get the folder again") from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}): get the file again") from error


def _files(folder: Path) -> dict[str, Path]:
    """Tensor -> the file that has it."""
    index = folder / INDEX
    if index.is_file():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not all(_is_plain_name(name) for name in where.values()):
            raise UserError(f"{index}: damaged, no weight_map of file names: get the file again")
        return {key: folder / name for key, name in where.items()}
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{path}: no such file, nor {INDEX}: only safetensors are read, no pickles")
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


def read_json(path: Path) -> Json:
    """A file of one JSON object. UserError, with its name, if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file: name a folder of Hugging Face's format") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}): get the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON {type(content).__name__}, not an object: get the file again")
    return content
