"""Warnings that repeat: said once, then once in a while, and when the trouble is over."""

import structlog
from structlog.testing import capture_logs

from coterie.telemetry.seldom import Seldom


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_trouble_is_said_once_then_once_in_a_while_and_when_it_is_over():
    clock = Clock()
    with capture_logs() as logs:
        seldom = Seldom(structlog.get_logger(), every_s=60.0, clock=clock)
        seldom.over("nothing was wrong")
        for _ in range(100):
            seldom.warning("no answer", peer="thirdparty/directory")
            clock.now += 1.0
        seldom.over("answers", peer="thirdparty/directory")
        seldom.over("answers", peer="thirdparty/directory")
        clock.now += 1.0
        seldom.warning("no answer", peer="thirdparty/directory")
    peer = {"peer": "thirdparty/directory"}
    assert logs == [
        {"event": "no answer", "log_level": "warning", **peer},
        {"event": "no answer", "log_level": "warning", **peer, "again": 60, "for_s": 60},
        {"event": "answers", "log_level": "info", **peer, "after_s": 100},
        {"event": "no answer", "log_level": "warning", **peer},
    ]
