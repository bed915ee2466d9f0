"""Structured logs: one JSON object a line on standard error."""

from __future__ import annotations

import io
import logging
import sys
from typing import TextIO, cast

import structlog

__all__ = ["configure"]


class _StandardError(io.TextIOBase):
    """Standard error as it is at the moment of writing; loggers are made once and outlive a replaced stream."""

    def write(self, text: str, /) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure(level: str, *, service: str) -> None:
    """Send all logs to standard error as JSON lines.

    Parameters
    ----------
    level : str
        Lowest level that is written: debug, info, warning or error.
    service : str
        Role and name of the process, on every line.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _StandardError())),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")
