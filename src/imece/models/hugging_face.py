"""The same model under Hugging Face's names: a folder that transformers loads, and back.

Nothing is computed: both pair the channels of a head in the same order, so every tensor stays as it is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from imece.errors import UserError
from imece.listing import some
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
# Others need scales, which are apart.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_POINTER = b"version https://git-lfs"
_CHUNK = 4 << 20  # elements that are there besides what they are read for
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
class _Place:
    """Where a tensor lies."""

    path: Path
    start: int  # bytes from the beginning of the file
    dtype: torch.dtype


@dataclass(frozen=True)
class HuggingFaceModel:
    """A folder's model. Its tensors are on the disk until they are asked for, whole or in part.

    Files are read and never mapped: a mapped page counts as this process's memory as long as it is mapped.
    """

    folder: Path
    config: TransformerConfig
    _places: Mapping[str, _Place] = field(repr=False)
    """By Hugging Face's names."""

    @classmethod
    def open(cls, folder: Path | str) -> HuggingFaceModel:
        """UserError, with the file's name, if it is missing or damaged, if the model is none that
        `Transformer` can be (another architecture, other rotary positions, quantised), or if a tensor
        is missing, of another shape, or too many. Of the files of tensors only the headers are read.
        """
        folder = Path(folder)
        config = read_config(folder / CONFIG)
        return cls(folder, config, _places(folder, _files(folder), config))

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor in the file, by its name in `Transformer`."""
        return self._places[hugging_face_name(name)].dtype

    def tensor(self, name: str) -> Tensor:
        """By its name in `Transformer`, in the dtype of the file. UserError if it cannot be read."""
        shape = shapes_of(self.config)[name]
        return self.slice(name, 0, math.prod(shape)).view(shape)

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the flat tensor, [stop - start]. UserError if they cannot be read."""
        place = self._places[hugging_face_name(name)]
        out = torch.empty(stop - start, dtype=place.dtype)
        left, at = out.view(torch.uint8).numpy().data, place.start + start * out.itemsize
        try:
            with place.path.open("rb", buffering=0) as file:
                while left:
                    got = os.preadv(file.fileno(), [left], at)
                    if not got:
                        raise UserError(f"{place.path}: cannot be read (it ends too early): get it again")
                    left, at = left[got:], at + got
        except OSError as error:
            raise UserError(f"{place.path}: cannot be read ({error.strerror}): get it again") from error
        return out

    @torch.no_grad()
    def fill(self, target: Tensor, name: str, start: int = 0) -> None:
        """Its elements from `start` on into a tensor on any device, of any dtype, all of it.

        No more than a fixed buffer is needed besides. UserError if they cannot be read, or are not finite.
        """
        flat = target.view(-1)
        for at in range(0, len(flat), _CHUNK):
            part = flat[at : at + _CHUNK]
            part.copy_(self.slice(name, start + at, start + at + len(part)))
            if not part.isfinite().all():
                key = hugging_face_name(name)
                raise UserError(
                    f"{self._places[key].path}: {key} has numbers that are not finite: get the file again"
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


def _places(folder: Path, files: Mapping[str, Path], config: TransformerConfig) -> dict[str, _Place]:
    """Of each tensor that the model has. UserError, by the files' headers alone."""
    shapes = hugging_face_shapes(config)
    if missing := [key for key in shapes if key not in files]:
        more = f", nor {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"{folder}: there is no tensor {missing[0]}{more}, but {CONFIG} asks for it: get the folder again"
        )
    if extra := [key for key in files if key not in shapes and not key.endswith(_COMPUTED)]:
        raise UserError(
            f"{folder}: {some(extra, _SHOWN)}, of which {CONFIG} knows nothing: get the folder "
            "again, or name another"
        )
    places = {}
    for path in dict.fromkeys(files[key] for key in shapes):
        begins, header = _header(path)
        for key in (key for key in shapes if files[key] == path):
            places[key] = _place(path, key, begins, header.get(key), shapes[key])
    return places


def _place(path: Path, key: str, begins: int, entry: Json | None, shape: Shape) -> _Place:
    if entry is None:
        raise UserError(f"{path}: it has no {key}, but {INDEX} says so: get both files again, from one place")
    if entry["dtype"] not in _DTYPES:
        raise UserError(
            f"{path}: {key} is {entry['dtype']}, so quantised; only floating point of 16 bits or more can "
            "be read: get the model as it was before"
        )
    if tuple(entry["shape"]) != shape:
        raise UserError(
            f"{path}: {key} is {entry['shape']}, by {CONFIG} it is {list(shape)}: get both files again, from "
            "one place"
        )
    return _Place(path, begins + int(entry["data_offsets"][0]), _DTYPES[entry["dtype"]])


def _header(path: Path) -> tuple[int, Json]:
    """Where a file's tensors begin, and what it says of each. UserError if that is not what it holds."""
    try:
        with safe_open(path, framework="pt"):
            pass  # all of it is there, and no two tensors overlap
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            content: Json = json.loads(file.read(size))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file, but {INDEX} names it: get the folder again") from error
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and _begins_with(path, _POINTER):
            raise UserError(
                f"{path}: only Git LFS's pointer to the file: git lfs pull gets the file"
            ) from error
        raise UserError(f"{path}: cannot be read ({error}): get the file again") from error
    return 8 + size, content


def _begins_with(path: Path, content: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(content)) == content


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
    return {key: path for key in _header(path)[1] if key != "__metadata__"}


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
