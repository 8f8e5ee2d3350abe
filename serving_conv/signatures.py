"""Derives text from the contract: torch schemas, docstring blocks and the README's argument tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from serving_conv.contract import ACTIVATIONS, MAX_WIDTH, MIN_WIDTH, Entry, Option, TensorArgument

__all__ = ["documented", "markdown_tables", "schema"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LETTERS = {
    "rows": "R",
    "channels": "C",
    "width": "W",
    "slots": "S",
    "positions": "L",
    "sequences": "N",
    "sequences+1": "N+1",
    "scratch": "scratch",
    "checkpoints": "K",
}


def schema(entry: Entry, *, out: bool) -> str:
    """The `torch.library` schema of an entry, without a namespace.

    Two overloads exist, because a custom operator may not return one of its inputs: the plain one allocates
    and returns the result and has no `out`; the `.out` one writes to `out` and returns nothing.
    """
    parts: list[str] = []
    alias = iter("abcdefgh")
    starred = False
    for argument in entry.arguments:
        if argument.name == "out" and not out:
            continue
        if argument.keyword and not starred:
            parts.append("*")
            starred = True
        parts.append(_schema_argument(argument, next(alias) if _mutated(argument) else ""))
    name = f"{entry.name}.out" if out else entry.name
    return f"{name}({', '.join(parts)}) -> {'()' if out else 'Tensor'}"


def _mutated(argument: TensorArgument | Option) -> bool:
    return isinstance(argument, TensorArgument) and argument.mutated


def _schema_argument(argument: TensorArgument | Option, alias: str) -> str:
    if isinstance(argument, Option):
        default = f'"{argument.default}"' if isinstance(argument.default, str) else argument.default
        return f"{argument.schema_type} {argument.name}={default}"
    kind = f"Tensor({alias}!)" if alias else "Tensor"
    if argument.optional and argument.name != "out":
        return f"{kind}? {argument.name}=None"
    return f"{kind} {argument.name}"


def shape_text(argument: TensorArgument) -> str:
    """The shape in letters, as `[R, C]`."""
    return "[" + ", ".join(_LETTERS[axis] for axis in argument.axes) + "]"


def dtype_text(argument: TensorArgument) -> str:
    """The accepted types, as a reader would say them."""
    if argument.same_dtype_as:
        return f"the type of {argument.same_dtype_as}"
    *rest, last = argument.dtypes
    return f"{', '.join(rest)} or {last}" if rest else last


def documented(entry: Entry) -> Callable[[_Function], _Function]:
    """Decorator that appends the argument block of the contract to a docstring."""

    def decorate(function: _Function) -> _Function:
        function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n{_argument_block(entry)}"
        return function

    return decorate


def _argument_block(entry: Entry) -> str:
    lines = [
        f"    Letters: R rows (packed tokens), C channels, W taps ({MIN_WIDTH} to {MAX_WIDTH}), S slots, "
        "L positions in a slot, N sequences.",
        "",
        "    Args:",
    ]
    for argument in entry.arguments:
        if isinstance(argument, Option):
            lines.append(f"        {argument.name} ({argument.schema_type}): {argument.meaning}.")
        else:
            lines.append(
                f"        {argument.name}: {shape_text(argument)}, {dtype_text(argument)}, "
                f"{argument.layout.value}: {argument.meaning}."
            )
    lines += [
        "",
        "    Returns:",
        f"        {entry.returns}.",
        "",
        "    Raises:",
        "        ContractError: a shape, type, stride, device, overlap or option breaks the contract. It names the",
        "            argument, what came, what is wanted and the remedy; nothing has been launched or written.",
    ]
    return "\n".join(lines) + "\n"


def markdown_tables(entries: tuple[Entry, ...]) -> str:
    """The argument tables of the README, one per entry."""
    blocks = []
    for entry in entries:
        rows = [f"**`{entry.name}`**: {entry.summary}", "", "| argument | shape, type | memory | meaning |"]
        rows.append("|---|---|---|---|")
        for argument in entry.arguments:
            star = "*" if argument.keyword else ""
            if isinstance(argument, Option):
                choices = argument.choices or ("an integer",)
                kind = " or ".join(f"`{c!r}`" if c in ACTIVATIONS else str(c) for c in choices)
                rows.append(
                    f"| `{argument.name}`{star} | {kind} | | {argument.meaning}; default `{argument.default!r}` |"
                )
            else:
                optional = " or absent" if argument.optional else ""
                rows.append(
                    f"| `{argument.name}`{star} | `{shape_text(argument)}` {dtype_text(argument)}{optional} "
                    f"| {argument.layout.value} | {argument.meaning} |"
                )
        rows += ["", f"Returns {entry.returns}. `*` keyword only."]
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks) + "\n"
