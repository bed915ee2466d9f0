"""Prometheus metrics and a health page of a service, on a port of their own.

No label ever holds a participant, a user or an item: labels are RPC names, sides, reasons, activities, purposes and
outcomes of rounds, and the versions of the process.
"""

from __future__ import annotations

import platform
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coterie.errors import CoterieError
from coterie.telemetry.accounting import Accounting
from coterie.telemetry.gauges import PrometheusMetric
from coterie.wire.versions import NEWEST, OLDEST, release

__all__ = ["AdmissionSource", "CertificateSource", "Exporter", "TrafficSource"]


_LOOK_S = 0.05
"""Interval at which the server's thread looks whether to stop, seconds; a stopping service waits as long."""


class TrafficSource(Protocol):
    """Source of totals by RPC, such as a meter of calls."""

    def summary(self) -> Mapping[str, Mapping[str, Any]]:
        """Return calls, errors, bytes and percentiles by RPC."""


class AdmissionSource(Protocol):
    """Source of the number of calls in progress, and of refused calls by limit and caller's role."""

    calls: int
    turned_away: Counter[tuple[str, str]]


class CertificateSource(Protocol):
    """Source of facts about a certificate that is renewed."""

    @property
    def end(self) -> float:
        """End of the certificate, Unix seconds."""

    @property
    def renewed(self) -> int:
        """Number of renewals."""

    @property
    def failed(self) -> int:
        """Number of failed attempts to renew."""


class _Collector:
    def __init__(
        self,
        accounting: Accounting,
        traffic: Mapping[str, TrafficSource],
        refusals: Callable[[], Mapping[tuple[str, str], int]],
        serving: Callable[[], bool],
        admission: AdmissionSource,
        conditions: Callable[[], Mapping[str, bool]],
        certificate: CertificateSource | None,
        measures: Sequence[PrometheusMetric],
    ) -> None:
        self._measures = measures
        self._certificate = certificate
        self._accounting = accounting
        self._traffic = traffic
        self._refusals = refusals
        self._serving = serving
        self._admission = admission
        self._conditions = conditions

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "coterie_build_info",
            "1; the labels are the release, and the versions of the protocol that it speaks.",
            labels=["version", "protocol", "oldest_protocol", "python"],
        )
        info.add_metric([release(), str(NEWEST), str(OLDEST), platform.python_version()], 1.0)
        yield info
        calls = CounterMetricFamily("coterie_rpc_calls", "Finished calls.", labels=["side", "rpc"])
        errors = CounterMetricFamily("coterie_rpc_errors", "Failed calls.", labels=["side", "rpc"])
        volume = CounterMetricFamily(
            "coterie_rpc_bytes", "Message bytes.", labels=["side", "rpc", "direction"]
        )
        times = GaugeMetricFamily(
            "coterie_rpc_milliseconds", "Recent times.", labels=["side", "rpc", "quantile"]
        )
        for side, source in self._traffic.items():
            for rpc, totals in source.summary().items():
                calls.add_metric([side, rpc], totals["calls"])
                errors.add_metric([side, rpc], totals["errors"])
                volume.add_metric([side, rpc, "in"], totals["bytes_in"])
                volume.add_metric([side, rpc, "out"], totals["bytes_out"])
                for quantile in ("p50", "p99"):
                    if totals[f"{quantile}_ms"] is not None:
                        times.add_metric([side, rpc, quantile], totals[f"{quantile}_ms"])
        yield from (calls, errors, volume, times)
        refused = CounterMetricFamily("coterie_refusals", "Refused requests.", labels=["rpc", "reason"])
        for (rpc, reason), count in self._refusals().items():
            refused.add_metric([rpc, reason], count)
        yield refused
        away = CounterMetricFamily(
            "coterie_limited", "Calls turned away or cut off by a limit.", labels=["limit", "caller"]
        )
        for (limit, role), count in dict(self._admission.turned_away).items():
            away.add_metric([limit, role or "none"], count)
        yield away
        yield GaugeMetricFamily("coterie_open_calls", "Calls at present.", value=self._admission.calls)
        cpu = CounterMetricFamily("coterie_cpu_seconds", "CPU time by activity.", labels=["activity"])
        account = self._accounting.cpu_seconds()
        for name, seconds in account["activities"].items():
            cpu.add_metric([name], seconds)
        cpu.add_metric(["total"], account["total"])
        yield cpu
        yield GaugeMetricFamily("coterie_peak_rss_mebibytes", "Peak memory.", value=Accounting.peak_rss_mb())
        if self._certificate is not None:
            yield GaugeMetricFamily(
                "coterie_certificate_expiry_timestamp_seconds",
                "End of the certificate, Unix seconds.",
                value=self._certificate.end,
            )
            renewals = CounterMetricFamily(
                "coterie_certificate_renewals", "Attempts to renew the certificate.", labels=["outcome"]
            )
            renewals.add_metric(["renewed"], self._certificate.renewed)
            renewals.add_metric(["failed"], self._certificate.failed)
            yield renewals
        yield GaugeMetricFamily("coterie_serving", "1 while healthy.", value=float(self._serving()))
        conditions = GaugeMetricFamily(
            "coterie_condition",
            "1 while it holds; all must for the service to be healthy.",
            labels=["condition"],
        )
        for name, held in self._conditions().items():
            conditions.add_metric([name], float(held))
        yield conditions
        for measure in tuple(self._measures):
            yield from _family(measure)


def _family(measure: PrometheusMetric) -> Iterator[Metric]:
    found = measure.read()
    if found is None:
        return
    kind = CounterMetricFamily if measure.counter else GaugeMetricFamily
    family = kind(measure.name, measure.help, labels=measure.labels)
    for labels, value in found.items() if isinstance(found, Mapping) else [((), found)]:
        family.add_metric(labels, value)
    yield family


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Write nothing: requests for metrics are not logged."""


class _IPv6Server(WSGIServer):
    address_family = socket.AF_INET6


class Exporter:
    """HTTP server of ``/metrics`` and ``/healthz`` (200 while the service is healthy, else 503), in a thread.

    Measures that are appended to the sequence later are served as well.
    """

    def __init__(
        self,
        accounting: Accounting,
        traffic: Mapping[str, TrafficSource],
        refusals: Callable[[], Mapping[tuple[str, str], int]],
        serving: Callable[[], bool],
        admission: AdmissionSource,
        conditions: Callable[[], Mapping[str, bool]] = dict,
        certificate: CertificateSource | None = None,
        measures: Sequence[PrometheusMetric] = (),
    ) -> None:
        collector = _Collector(
            accounting, traffic, refusals, serving, admission, conditions, certificate, measures
        )
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        metrics = make_wsgi_app(registry)

        def page(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            if environ.get("PATH_INFO") != "/healthz":
                answer: Iterable[bytes] = metrics(environ, start_response)
                return answer
            healthy = serving()
            start_response(
                "200 OK" if healthy else "503 Service Unavailable", [("Content-Type", "text/plain")]
            )
            return [b"SERVING\n" if healthy else b"NOT_SERVING\n"]

        self._page = page
        self._server: WSGIServer | None = None

    def start(self, address: str) -> None:
        """Listen on an address ``host:port`` and serve from a new thread.

        Raises
        ------
        CoterieError
            The address is taken or not this machine's.
        """
        host, _, port = address.rpartition(":")
        kind = _IPv6Server if host.startswith("[") else WSGIServer
        try:
            self._server = make_server(
                host.strip("[]"), int(port), self._page, server_class=kind, handler_class=_Quiet
            )
        except OSError as error:
            raise CoterieError(f"cannot serve metrics on {address}: {error.strerror}") from error
        threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="metrics", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop serving and close the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
