"""Errors that programs written for spconv may catch: it asserts, and triops says what was expected and what came."""


class RefusedValue(ValueError, AssertionError):
    """A ValueError that is an AssertionError as well."""


class RefusedType(TypeError, AssertionError):
    """A TypeError that is an AssertionError as well."""


def refusal(error: type[Exception]) -> type[Exception]:
    """The error to raise in place of a ValueError or a TypeError."""
    return {ValueError: RefusedValue, TypeError: RefusedType}.get(error, error)


__all__ = ["RefusedType", "RefusedValue", "refusal"]
