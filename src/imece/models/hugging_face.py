"""Reads and writes the model as a folder of Hugging Face's format, which transformers loads.

No tensor is changed, only its name: both sides pair the channels of a head in the same order. A model of a
kind that `Transformer` cannot be is transformers' own (foreign.py).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from imece.errors import UserError
from imece.listing import some
from imece.models.foreign import ForeignConfig, NotInstalledError
from imece.models.hugging_face_config import OtherKindError, content_of, shape_from
from imece.models.language_model import LanguageConfig, outline
from imece.models.shape import TransformerConfig
from imece.models.stored import Piece, Shape
from imece.reading import Json, json_object

CONFIG = "config.json"
INSTEAD = "name a folder of Hugging Face's format"  # if a file is not there
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # which tensor is in which file, for a model in several files
# Files of a folder's tokenizer, and of how text is formatted for it.
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
# Other dtypes need scales, which lie in other tensors.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_POINTER = b"version https://git-lfs"
_CHUNK = 4 << 20  # elements in memory at a time while a tensor is read elsewhere
# In some files, but not parameters: a tied head once more, and tables that can be computed.
_COMPUTED = ("lm_head.weight", ".rotary_emb.inv_freq")
_SHOWN = 3


def hugging_face_name(name: str) -> str:
    """ "blocks.3.mlp.up.weight" -> "model.layers.3.mlp.up_proj.weight". ValueError for an unknown
    parameter."""
    stem, _, kind = name.rpartition(".")
    blocks, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if kind == "weight" and stem in _ENDS:
        return f"{_ENDS[stem]}.weight"
    known = part in _IN_BLOCK and (kind == "weight" or (kind == "bias" and not part.endswith("norm")))
    if not known or blocks != "blocks" or not layer.isdigit():
        raise ValueError(f"{name!r} is no parameter of a Transformer")
    return f"model.layers.{layer}.{_IN_BLOCK[part]}.{kind}"


def _forms(config: LanguageConfig, name: str, shape: Shape) -> tuple[tuple[Piece, ...], ...]:
    """As `ForeignConfig.forms`. ValueError for an unknown parameter."""
    if isinstance(config, ForeignConfig):
        return config.forms(name)
    return ((Piece(hugging_face_name(name), shape),),)


def to_hugging_face(
    config: LanguageConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype = torch.float32,
    end: int | None = None,
    like: str | None = None,
) -> tuple[Json, Iterator[tuple[str, Tensor]]]:
    """(content of config.json for files in `dtype`, the tensors of files with their names, unchanged).

    `tensors` are those of the model's `named_parameters` in any order. They are taken one by one while the
    second result is read; so its errors come then: ValueError for a tensor too many, too few, or of a wrong
    shape. end: the token behind each document, which also stands before each document. like: the model_type
    to write if the shape fits several. ValueError if it fits none. Of a foreign model the content is what it
    was.
    """
    if isinstance(config, ForeignConfig):
        name = str(dtype).removeprefix("torch.")
        content: Json = json.loads(config.content) | {"dtype": name, "torch_dtype": name}
    else:
        content = content_of(config, dtype, end, like)
    return content, _renamed(config, tensors)


def from_hugging_face(folder: Path | str) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """(shape, all parameters by `Transformer`'s names in the dtype of the file).

    UserError as from `HuggingFaceModel.open`, and for a model of another kind.
    """
    model = HuggingFaceModel.open(folder)
    if isinstance(model.config, ForeignConfig):
        raise UserError(
            f"{folder}: a {model.config.kind}, which Transformer cannot be: read it with transformers"
        )
    return model.config, {name: model.tensor(name) for name in shapes_of(model.config)}


@dataclass(frozen=True)
class _Place:
    """Where elements of a tensor of the model, in order, lie on the disk."""

    path: Path
    key: str  # their tensor's name there
    start: int  # bytes from the start of the file
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True)
class HuggingFaceModel:
    """The model in a folder. Its tensors stay on the disk until they are read, whole or in part.

    Files are read, never mapped: a mapped page would count as this process's memory while it is mapped.
    """

    folder: Path
    config: LanguageConfig
    _places: Mapping[str, tuple[_Place, ...]] = field(repr=False)

    @classmethod
    def open(cls, folder: Path | str) -> HuggingFaceModel:
        """The model in this folder. Of the tensors' files only the headers are read.

        UserError, with the file's name, if a file is missing or damaged, if no model can be built of it
        (quantised, or of another kind than ours and transformers is not installed or does not know it), or if
        a tensor is missing, of a wrong shape, or unknown.
        """
        folder = Path(folder)
        config = read_config(folder / CONFIG)
        return cls(folder, config, _places(folder, _files(folder), config))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the files of the tensor with this name in the model; of several, one that has the
        values of all."""
        return functools.reduce(torch.promote_types, (place.dtype for place in self._places[name]))

    def tensor(self, name: str) -> Tensor:
        """The tensor with this name in the model, in that dtype. UserError if it cannot be read."""
        shape = shapes_of(self.config)[name]
        return self.slice(name, 0, math.prod(shape)).view(shape)

    def slice(self, name: str, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the flat tensor, [stop - start]. UserError if they cannot be read."""
        out = torch.empty(stop - start, dtype=self.dtype(name), device="cpu")
        for place, first, last, at in self._within(name, start, stop):
            part = out[at : at + last - first]
            if place.dtype == out.dtype:
                _read(place, first, part)
            else:
                own = torch.empty(len(part), dtype=place.dtype, device="cpu")
                _read(place, first, own)
                part.copy_(own)
        return out

    def _within(self, name: str, start: int, stop: int) -> Iterator[tuple[_Place, int, int, int]]:
        """(place, its elements [first, last), how far behind `start` they are) of the elements
        [start, stop)."""
        begin = 0
        for place in self._places[name]:
            first, last = max(start, begin) - begin, min(stop, begin + place.elements) - begin
            if first < last:
                yield place, first, last, begin + first - start
            begin += place.elements

    @torch.no_grad()
    def fill(self, target: Tensor, name: str, start: int = 0) -> None:
        """Fill all of `target`, of any dtype on any device, with the tensor's elements from `start` on.

        Needs only a buffer of fixed size besides. UserError if the elements cannot be read or are not finite.
        """
        flat = target.view(-1)
        for at in range(0, len(flat), _CHUNK):
            part = flat[at : at + _CHUNK]
            part.copy_(self.slice(name, start + at, start + at + len(part)))
            for place, first, last, there in self._within(name, start + at, start + at + len(part)):
                if not part[there : there + last - first].isfinite().all():
                    raise UserError(
                        f"{place.path}: {place.key} has numbers that are not finite: get the file again"
                    )


def read_config(path: Path) -> LanguageConfig:
    """What a config.json describes: a shape of ours, or else a model of transformers. UserError, with its
    name, if it is missing or describes another model."""
    content = json_object(path, INSTEAD)
    try:
        try:
            return shape_from(content)
        except OtherKindError as other:
            return _foreign(content, other)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path}: not a model that can be read here ({reason}): name another folder"
        ) from error


def _foreign(content: Json, other: OtherKindError) -> ForeignConfig:
    try:
        return ForeignConfig.of(content)
    except NotInstalledError:
        raise ValueError(f"{other}; other kinds need transformers: pip install 'imece[hf]'") from None
    except ValueError as error:
        raise ValueError(f"{other}; {error}") from error


def hugging_face_shapes(config: LanguageConfig) -> dict[str, Shape]:
    """The shapes of all tensors of files by their names there, in the order of the model."""
    forms = (_forms(config, name, shape)[0] for name, shape in shapes_of(config).items())
    return {piece.key: piece.shape for form in forms for piece in form}


def generation_config(end: int) -> Json:
    """The content of generation_config.json: a text begins after an end token, and stops before one."""
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "do_sample": True}


def tokenizer_config(config: LanguageConfig, end: str) -> Json:
    """The content of tokenizer_config.json, beside a tokenizer.json. end: the end token as text."""
    return {
        # Without a class transformers would take Llama's own, which changes what tokenizer.json says.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",  # or a model that goes on with several prompts would go on after the padding
        "model_max_length": config.max_seq,
        "clean_up_tokenization_spaces": False,
    }


def _renamed(config: LanguageConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    expected = shapes_of(config)
    for name, tensor in tensors:
        shape = expected.pop(name, None)
        if shape != tuple(tensor.shape):
            wanted = "is none of this model's, or came twice" if shape is None else f"should be {list(shape)}"
            raise ValueError(f"{name}, {list(tensor.shape)}, {wanted}")
        flat, start = tensor.detach().reshape(-1), 0
        for piece in _forms(config, name, shape)[0]:
            stop = start + math.prod(piece.shape)
            yield piece.key, flat[start:stop].view(piece.shape)
            start = stop
    if expected:
        raise ValueError(f"{len(expected)} tensors are missing, such as {next(iter(expected))}")


def shapes_of(config: LanguageConfig) -> dict[str, Shape]:
    """The shapes of all parameters by their names in the model, and of buffers that files have."""
    if isinstance(config, ForeignConfig):
        return dict(config.shapes)
    return {name: tuple(parameter.shape) for name, parameter in outline(config).named_parameters()}


def _places(folder: Path, files: Mapping[str, Path], config: LanguageConfig) -> dict[str, tuple[_Place, ...]]:
    """Where each of the model's tensors lies, by the model's names. UserError if the files' headers do not
    agree with the config."""
    forms = {name: _forms(config, name, shape) for name, shape in shapes_of(config).items()}
    found = {
        name: next((form for form in several if all(piece.key in files for piece in form)), None)
        for name, several in forms.items()
    }
    missing = [
        piece.key
        for name, form in found.items()
        if form is None
        for piece in forms[name][0]
        if piece.key not in files
    ]
    if missing:
        more = f", nor {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(
            f"{folder}: there is no tensor {missing[0]}{more}, but {CONFIG} asks for it: get the folder again"
        )
    known = {piece.key for several in forms.values() for form in several for piece in form}
    if extra := [key for key in files if key not in known and not _is_computed(config, key)]:
        raise UserError(
            f"{folder}: {some(extra, _SHOWN)}, of which {CONFIG} knows nothing: get the folder "
            "again, or name another"
        )
    chosen = {name: form for name, form in found.items() if form is not None}
    paths = dict.fromkeys(files[piece.key] for form in chosen.values() for piece in form)
    headers = {path: _header(path) for path in paths}
    return {
        name: tuple(_place(files[piece.key], piece, *headers[files[piece.key]]) for piece in form)
        for name, form in chosen.items()
    }


def _is_computed(config: LanguageConfig, key: str) -> bool:
    """Whether a tensor in a file is no parameter, but can be computed."""
    return key.endswith(_COMPUTED) or (isinstance(config, ForeignConfig) and config.is_computed(key))


def _place(path: Path, piece: Piece, begins: int, header: Json) -> _Place:
    key, entry = piece.key, header.get(piece.key)
    if entry is None:
        raise UserError(f"{path}: it has no {key}, but {INDEX} says so: get both files again, from one place")
    if entry["dtype"] not in _DTYPES:
        raise UserError(
            f"{path}: {key} is {entry['dtype']}, so quantised; only floating point of 16 bits or more can "
            "be read: get the model as it was before"
        )
    if tuple(entry["shape"]) != piece.shape:
        raise UserError(
            f"{path}: {key} is {entry['shape']}, by {CONFIG} it is {list(piece.shape)}: get both "
            "files again, from one place"
        )
    start = begins + int(entry["data_offsets"][0])
    return _Place(path, key, start, _DTYPES[entry["dtype"]], math.prod(piece.shape))


def _read(place: _Place, start: int, out: Tensor) -> None:
    """Fill `out`, on the CPU and of the file's dtype, with the place's elements from `start` on. UserError if
    they cannot be read."""
    try:
        with place.path.open("rb") as file:
            file.seek(place.start + start * out.itemsize)
            if file.readinto(out.view(torch.uint8).numpy().data) < out.nbytes:
                raise UserError(f"{place.path}: cannot be read (it ends too early): get it again")
    except OSError as error:
        raise UserError(f"{place.path}: cannot be read ({error.strerror}): get it again") from error


def _header(path: Path) -> tuple[int, Json]:
    """(where the file's tensors begin, what it says of each). UserError if the file does not hold that."""
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
    """Tensor -> the file that holds it."""
    index = folder / INDEX
    if index.is_file():
        where = json_object(index, INSTEAD).get("weight_map")
        if not isinstance(where, dict) or not all(_is_plain_name(name) for name in where.values()):
            raise UserError(f"{index}: damaged, no weight_map of file names: get the file again")
        return {key: folder / name for key, name in where.items()}
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{path}: no such file, nor {INDEX}: only safetensors are read, no pickles")
    return {key: path for key in _header(path)[1] if key != "__metadata__"}


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name
