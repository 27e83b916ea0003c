"""A sink for OpenTelemetry."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.nouns.errors import UsageError
from paceline.sinks.numbers import address_of, name_of, numbers_of


class OpenTelemetry:
    """Sends a job's numbers as OpenTelemetry gauges, `paceline.train.loss` and so on: `sinks=[OpenTelemetry]`.

    Where: to the collector of `OTEL_EXPORTER_OTLP_ENDPOINT`, by HTTP, every `OTEL_METRIC_EXPORT_INTERVAL` ms. The
    attribute `job` is the run's name. `paceline.step` is the step; texts and pictures are not sent.

    Args:
        run_dir: the run directory of the job; None where there is none.
        provider: a MeterProvider in place of the one for the environment's endpoint; it is flushed at the end.

    Raises:
        UsageError: the package opentelemetry-sdk or its exporter is not installed, or nobody says where to send.

    Examples:
        >>> from dataclasses import replace
        >>> from opentelemetry.sdk.metrics import MeterProvider
        >>> from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        >>> from paceline.sinks.opentelemetry import OpenTelemetry
        >>> reader = InMemoryMetricReader()
        >>> provider = MeterProvider(metric_readers=[reader])
        >>> job = paceline.distribute(replace(workload, sinks=[lambda run_dir: OpenTelemetry(run_dir, provider)]))
        >>> for batch in job.batches():
        ...     mean = job.step(batch)
        >>> job.close()
    """

    def __init__(self, run_dir: Path | None, provider: Any = None) -> None:
        self.unsent = 0  # events since the collector last took the gauges
        self.address = ""
        if provider is None:
            endpoints = [os.environ.get(f"OTEL_EXPORTER_OTLP_{infix}ENDPOINT") for infix in ("METRICS_", "")]
            self.address = address_of(next(filter(None, endpoints), ""))
        self.provider = provider or _exporting_provider(self._has_sent)
        self.is_own = provider is None
        self.meter = self.provider.get_meter("paceline")
        self.gauges: dict[str, Any] = {}
        self.attributes = {"job": name_of(run_dir)}

    def write(self, event: Mapping[str, Any]) -> None:
        """Set the gauges of an event's numbers."""
        numbers = numbers_of(event)
        if numbers:
            numbers["step"] = event["step"]
            self.unsent += self.is_own
        for name, value in numbers.items():
            gauge = self.gauges.get(name)
            if gauge is None:
                # A name has only letters, digits and _ . - /, at most 255.
                path = re.sub(r"[^A-Za-z0-9_.\-/]", "_", name.replace("/", "."))[:240]
                gauge = self.gauges[name] = self.meter.create_gauge(f"paceline.{path}")
            gauge.set(value, self.attributes)

    def close(self) -> None:
        """Send the rest."""
        self.provider.force_flush()
        if self.is_own:
            self.provider.shutdown()

    def _has_sent(self) -> None:
        self.unsent = 0


def _exporting_provider(has_sent: Callable[[], None]) -> Any:
    """Return a provider that sends to the environment's endpoint, and calls `has_sent` each time it has."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
    except ImportError:
        raise UsageError(
            "can't send to OpenTelemetry",
            "the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http are not both installed",
            "pip install 'paceline[opentelemetry]', or leave OpenTelemetry out of sinks",
        ) from None
    if not any(os.environ.get(f"OTEL_EXPORTER_OTLP_{infix}ENDPOINT") for infix in ("", "METRICS_")):
        raise UsageError(
            "can't send to OpenTelemetry",
            "nobody says where its collector is",
            "set OTEL_EXPORTER_OTLP_ENDPOINT, such as http://collector:4318, or hand in a provider of your own",
        )

    class Exporter(OTLPMetricExporter):
        """Calls `has_sent` when the collector has taken the gauges."""

        def export(self, *arguments: Any, **options: Any) -> Any:
            result = super().export(*arguments, **options)
            if result is MetricExportResult.SUCCESS:
                has_sent()
            return result

    # Its own hook at the exit of the process would wait for a collector that is away.
    return MeterProvider(metric_readers=[PeriodicExportingMetricReader(Exporter())], shutdown_on_exit=False)
