"""Owns every exception of the package: one family, each with what came, what is wanted, and the remedy.

Nothing here imports torch, so tools and trace readers can raise without loading it.
"""

from __future__ import annotations

__all__ = ["BackendError", "CaptureError", "CommunicationError", "ContractError", "ServingConvError", "TraceError"]


class ServingConvError(Exception):
    """Base of the family.

    Attributes:
        argument: name of the argument, setting or resource that is wrong.
        got: what came.
        wanted: what is accepted.
        remedy: what the caller can do about it; may be empty when `wanted` says it all.
    """

    def __init__(self, argument: str, *, got: object, wanted: str, remedy: str = "") -> None:
        self.argument = argument
        self.got = str(got)
        self.wanted = wanted
        self.remedy = remedy
        text = f"{argument}: got {self.got}; wanted {wanted}"
        super().__init__(f"{text}. Remedy: {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields do not survive the default pickling, and workers send errors to parents.
        return (_rebuild, (type(self), self.argument, self.got, self.wanted, self.remedy))


class ContractError(ServingConvError, ValueError):
    """A call breaks the operator contract. Raised before anything is launched or written."""


class BackendError(ServingConvError, RuntimeError):
    """The backend that was asked for cannot run here."""


class CaptureError(ServingConvError, RuntimeError):
    """Something that only works outside graph capture was asked for under it."""


class CommunicationError(ServingConvError, RuntimeError):
    """An exchange between ranks failed: one is gone, or did not answer within the group's timeout."""


class TraceError(ServingConvError, ValueError):
    """A request trace cannot be read; `argument` is `file:line`. Nothing has been replayed or written."""


def _rebuild(kind: type[ServingConvError], argument: str, got: str, wanted: str, remedy: str) -> ServingConvError:
    return kind(argument, got=got, wanted=wanted, remedy=remedy)
