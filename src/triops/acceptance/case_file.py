"""One operator call in one file: safetensors, with the parameters as JSON in its header; or JSON alone, in which
tensors are described and not held (see `shapes`).

Reading runs no code from the file: tensors are bytes, parameters are JSON, and the operator is looked up by name.
A file that is cut off, malformed or of something else is refused with a `CaseError` that says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triops._op import OPERATORS
from triops._sample import module_of, tensors_of
from triops.acceptance.shapes import DescriptionError, described, layout, made

FORMAT = 1
SUFFIX = ".safetensors"
SHAPES_SUFFIX = ".case.json"
_MOST_JSON = 10**7  # bytes of a description, which takes a few hundred per tensor
_KEY = "triops case"
_SCALARS = (bool, int, float, str, type(None))


class CaseError(ValueError):
    """A file that holds no case, or one that cannot be run."""


@dataclass(frozen=True)
class Case:
    operator: str
    args: tuple[Any, ...]  # on the CPU
    outputs: list[Tensor] | None = None  # what the recorded call gave; None: it never came back
    about: dict[str, Any] = field(default_factory=dict)  # free words: device, versions, why it was saved
    described: bool = False  # the values of the tensors are drawn: the file holds shapes and ranges alone


def require_safetensors(what: str) -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise ModuleNotFoundError(
            f"{what} needs the package safetensors. Remedy: pip install safetensors, or pip install 'triops[cli]'"
        ) from None


def write(path: Path, case: Case) -> None:
    """Whole or not at all: a reader never sees half a file."""
    require_safetensors("writing a case file")
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    arguments = [_pack(value, f"input {i}", tensors) for i, value in enumerate(case.args)]
    outputs = None if case.outputs is None else [_pack(t, f"output {i}", tensors) for i, t in enumerate(case.outputs)]
    header = {
        "format": FORMAT, "operator": case.operator, "arguments": arguments, "outputs": outputs, "about": case.about,
    }  # fmt: skip
    write_whole(path, save(tensors, {_KEY: json.dumps(header)}))


def write_described(path: Path, operator: str, args: tuple[Any, ...], seed: int, about: dict[str, Any]) -> None:
    """As `write`, with descriptions in place of tensors. Plans, which say the same as other arguments, are left out."""
    derived = getattr(module_of(OPERATORS[operator]), "DERIVED", {}).get(operator, ())
    arguments = [
        None if name in derived else _describe(value, 100 * seed + i)
        for i, (name, value) in enumerate(zip(OPERATORS[operator].parameters, args, strict=True))
    ]
    header = {"format": FORMAT, "operator": operator, "arguments": arguments, "outputs": None, "about": about}
    write_whole(path, (json.dumps({_KEY: header}, indent=1) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:  # half a file on a full disk is of use to nobody
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def digest(operator: str, args: tuple[Any, ...], shapes_only: bool) -> bytes:
    """Equal for calls that are the same: in operator, parameters and data, or in operator, parameters and layouts."""
    found = hashlib.blake2b(operator.encode(), digest_size=16)
    for value in args:
        if isinstance(value, Tensor):
            found.update(repr(layout(value)).encode())
            if not shapes_only:
                data: Any = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                found.update(data)
        else:
            found.update(repr(value).encode())
    return found.digest()


def files_in(folder: Path) -> list[Path]:
    """The case files in a folder, in the order of their names."""
    return sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{SHAPES_SUFFIX}")])


def read(path: Path) -> Case:
    if not path.is_file():
        raise CaseError(f"{path}: no such file")
    if path.name.endswith(".json"):
        return _read_described(path)
    require_safetensors("reading a case file")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise CaseError(f"{path}: not a whole safetensors file ({error})") from None
    if text is None:
        raise CaseError(f"{path}: a safetensors file, but not a case that triops wrote")
    try:
        return _unpack(json.loads(text), tensors)
    except (CaseError, json.JSONDecodeError, RecursionError) as error:
        raise CaseError(f"{path}: {error}") from None


def _read_described(path: Path) -> Case:
    try:
        if path.stat().st_size > _MOST_JSON:
            raise CaseError("too large for a description of a case")
        header = json.loads(path.read_bytes())
        if not isinstance(header, dict) or _KEY not in header:
            raise CaseError("a JSON file, but not a case that triops wrote")
        return replace(_unpack(header[_KEY], {}), described=True)
    except (CaseError, DescriptionError, OSError, ValueError, RecursionError) as error:
        raise CaseError(f"{path}: {error}") from None
    except (RuntimeError, MemoryError):
        raise CaseError(f"{path}: its tensors do not fit into memory") from None


def _describe(value: Any, seed: int) -> Any:
    if isinstance(value, Tensor):
        return {"described": described(value, seed)}
    if isinstance(value, list | tuple):
        return [_describe(v, seed + i) for i, v in enumerate(value)]
    if isinstance(value, _SCALARS):
        return value
    raise TypeError(f"a case file cannot hold {type(value).__name__}")


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON value; a tensor goes to `tensors`, with the order in which its dimensions lie in memory."""
    if isinstance(value, Tensor):
        value = value.detach()
        order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
        # A clone each: safetensors refuses tensors that share memory.
        tensors[name] = value.permute(order).cpu().contiguous().clone()
        return {"tensor": name, "order": order}
    if isinstance(value, list | tuple):
        return [_pack(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, _SCALARS):
        return value
    raise TypeError(f"a case file cannot hold {type(value).__name__}")


def _unpack(header: Any, tensors: dict[str, Tensor]) -> Case:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CaseError(f"the case must be of format {FORMAT}")
    name, arguments, outputs = header.get("operator"), header.get("arguments"), header.get("outputs")
    operator = OPERATORS.get(name) if isinstance(name, str) else None
    if operator is None:
        raise CaseError(f"no operator {name!r} here; there are {', '.join(OPERATORS)}")
    if not isinstance(arguments, list) or len(arguments) != len(operator.parameters):
        raise CaseError(f"{name} takes {len(operator.parameters)} arguments: {', '.join(operator.parameters)}")
    if not (outputs is None or isinstance(outputs, list)):
        raise CaseError("outputs must be a list")
    args = tuple(_value(a, tensors) for a in arguments)
    results = None if outputs is None else tensors_of([_value(o, tensors) for o in outputs])
    about = header.get("about")
    return Case(operator.name, args, results, about if isinstance(about, dict) else {})


def _value(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(packed, dict) and "described" in packed:
        return made(packed["described"])
    if isinstance(packed, dict):
        name, order = packed.get("tensor"), packed.get("order")
        tensor = tensors.get(name) if isinstance(name, str) else None
        if tensor is None:
            raise CaseError(f"the tensor {name!r} is missing")
        if not isinstance(order, list) or sorted(map(repr, order)) != sorted(map(repr, range(tensor.dim()))):
            raise CaseError(f"{name}: the order of its dimensions is malformed")
        return tensor.permute(_inverse(order))
    if isinstance(packed, list):
        return [_value(p, tensors) for p in packed]
    if isinstance(packed, _SCALARS):
        return packed
    raise CaseError(f"an argument of type {type(packed).__name__} is malformed")


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]
