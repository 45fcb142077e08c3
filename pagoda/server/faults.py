"""What pydantic says of a body, as one fault that names the field by its full path: `ranges[0].priority`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from pagoda.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)

_SHOULD_BE = "Input should be "
_VALUE_ERROR = "Value error, "
# What a value should be, by the kind of fault: in JSON's words, without the names of classes here.
_EXPECTED = {
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "a boolean",
    "bool_parsing": "a boolean",
}
_LENGTHS = {
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
}
_NEAR = 0.85  # of difflib: prompt_cache_key, which is a field of OpenAI's, is less like any of ours


def typed(kind: type[M], fields: Mapping[str, Any]) -> M:
    """The typed fields in a JSON object.

    Raises:
        InvalidRequest: one is missing, unknown, of the wrong type or out of bounds.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _first_fault(error, kind, fields) from None


def _first_fault(error: ValidationError, kind: type[BaseModel], fields: Mapping[str, Any]) -> InvalidRequest:
    """The first field at fault; a union's alternatives are one fault of the field that may be any of them."""
    faults = error.errors(include_url=False, include_input=False)
    first = faults[0]
    path, is_union = _path(first["loc"], fields, is_missing=first["type"] == "missing")
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".") or None
    match first:
        case {"type": "missing"}:
            message = f"{name} is required"
        case {"type": "extra_forbidden"}:
            message = f"{name} is no field that is known here: there are {', '.join(_siblings(kind, path))}"
        case _ if not is_union:
            message = f"{name} {wanted(first)}{_not_null(path, fields)}"
        case _:
            same = [each for each in faults if _path(each["loc"], fields) == (path, is_union)]
            said = " or ".join(dict.fromkeys(wanted(each).removeprefix("should ") for each in same))
            message = f"{name} should {said.replace(' or be ', ' or ')}{_not_null(path, fields)}"
    return InvalidRequest(message, param=name)


def _siblings(kind: type[BaseModel], path: Sequence[int | str]) -> Iterable[str]:
    """The fields that are known where a path ends."""
    kinds = [kind]
    for part in path[:-1]:
        if isinstance(part, str):
            types = [each.model_fields[part].annotation for each in kinds if part in each.model_fields]
            kinds = [below for each in types for below in _models(each)]
    return dict.fromkeys(name for each in kinds for name in each.model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models among a type's alternatives, or those of its elements."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def wanted(fault: Mapping[str, Any]) -> str:
    """What the value of one of pydantic's faults should be, to go after the field's name."""
    kind, said = fault["type"], str(fault["msg"])
    if kind in _EXPECTED:
        return f"should be {_EXPECTED[kind]}"
    if kind in _LENGTHS:
        return f"should have {_LENGTHS[kind].format_map(fault['ctx'])}"
    if said.startswith(_SHOULD_BE):
        return f"should be {said.removeprefix(_SHOULD_BE)}"
    return f"is refused: {said.removeprefix(_VALUE_ERROR)}"


def _not_null(path: Sequence[int | str], fields: Any) -> str:
    for part in path:
        fields = fields[part]
    return ", not null" if fields is None else ""


def check_spelling(fields: Iterable[str], known: Container[str], own: Iterable[str]) -> None:
    """Refuse a field that is nearly one of `own`: ignored, what it was to ask for would silently not happen.

    Raises:
        InvalidRequest: with the field that was probably meant.
    """
    wanted = list(own)
    for name in fields:
        if name not in known and (near := get_close_matches(name, wanted, n=1, cutoff=_NEAR)):
            raise InvalidRequest(f"{name[:100]} is no field that is known here: is {near[0]} meant?", param=name[:100])


def _path(
    loc: Sequence[int | str], fields: Mapping[str, Any], *, is_missing: bool = False
) -> tuple[tuple[int | str, ...], bool]:
    """The part of a location that is in the body, up to a union's name for an alternative; and whether it had one."""
    path: list[int | str] = []
    value: Any = fields
    for place, part in enumerate(loc):
        if isinstance(value, Mapping):
            is_here = part in value or (is_missing and place == len(loc) - 1)
            below = value.get(part)
        else:
            is_here = isinstance(value, list) and isinstance(part, int)
            below = value[part] if isinstance(part, int) and is_here and part < len(value) else None
        if not is_here:
            return tuple(path), True
        path.append(part)
        value = below
    return tuple(path), False
