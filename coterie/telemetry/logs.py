"""Structured logs: one JSON object a line on standard error."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from coterie.telemetry.audit_log import audited

__all__ = ["configure"]


class _StandardError(io.TextIOBase):
    """Stream that writes to the present ``sys.stderr``; loggers are made once and outlive a replaced stream."""

    def write(self, text: str, /) -> int:
        # A full volume or a closed pipe of the log must not stop the service.
        with contextlib.suppress(OSError):
            return sys.stderr.write(text)
        return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure(level: str, *, service: str) -> None:
    """Send all logs to standard error as JSON lines.

    Parameters
    ----------
    level : str
        Lowest level that is written: debug, info, warning or error.
    service : str
        Role and name of the process, written on every line.
    """
    lowest = logging.getLevelNamesMapping()[level.upper()]
    common: list[Processor] = [
        _naming(service),
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            _auditing(lowest),
            *common,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        # What the audit log takes is of level info; other messages below the lowest level are dropped after it.
        wrapper_class=structlog.make_filtering_bound_logger(min(lowest, logging.INFO)),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _StandardError())),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard module: the same form for their messages.
    handler = logging.StreamHandler(cast(TextIO, _StandardError()))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info if level == "debug" else _only_the_type,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _auditing(lowest: int) -> Processor:
    levels = logging.getLevelNamesMapping()

    def audit(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        audited(event)
        if levels.get(method.upper(), lowest) < lowest:
            raise structlog.DropEvent
        return event

    return audit


def _naming(service: str) -> Processor:
    # Not a context variable, which threads that no task started would not have.
    def name(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    return name


def _only_the_type(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace an exception by the name of its type: its text may hold the data that was being handled."""
    error = event.pop("exc_info", None)
    error = error[1] if isinstance(error, tuple) else error
    if isinstance(error, BaseException):
        event["exception"] = type(error).__name__
    return event
