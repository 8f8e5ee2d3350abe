"""Owns the command line `serving-conv`: its commands, and how errors reach the user."""

from __future__ import annotations

import importlib.util
from typing import Any

import typer
from typer.core import TyperGroup

from serving_conv.doctor import doctor
from serving_conv.errors import ServingConvError
from serving_conv.replay.command import replay
from serving_conv.warmup_command import warmup

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Turns an error of the package into one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except ServingConvError as error:
            typer.echo(f"serving-conv: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
app.command()(replay)
app.command()(warmup)
app.command()(doctor)
if importlib.util.find_spec("serving_conv.engine_integration") is not None:  # absent in a source tree on PYTHONPATH
    from serving_conv.engine_integration.run_command import run

    app.command()(run)


@app.callback()
def _root() -> None:
    """Causal depthwise conv1d for inference engines: tools around the operator and the state pool."""


def main() -> None:
    """Entry point of the console script."""
    app()
