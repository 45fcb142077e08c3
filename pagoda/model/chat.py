"""ChatTemplate: messages -> prompt text, by the Jinja template that came with the model.

Templates are programs from strangers: they run in Jinja's immutable sandbox, without access to files, attributes or
imports. The dialect (filters, globals, whitespace) is Transformers', which templates are written for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagoda.errors import InvalidRequest, ModelError


class ChatTemplate:
    """A compiled template. `special_tokens` (`bos_token`, `eos_token`, ...) are variables that it may use.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt of a conversation, special tokens written out.

        Raises:
            InvalidRequest: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except Exception as error:  # A foreign program: it may raise anything, and these messages made it do so.
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
