"""Measures that a process can be asked for at any time."""

import os

from prometheus_client.parser import text_string_to_metric_families as parse

from coterie.net.admission import Admission, Limits
from coterie.telemetry.accounting import Accounting
from coterie.telemetry.exporter import Exporter
from coterie.telemetry.gauges import (
    PrometheusMetric,
    memory_limit,
    of_the_disk,
    of_the_memory,
    resident_bytes,
)


def read(measures):
    return {measure.name: measure.read() for measure in measures}


def test_space_is_that_of_the_volume_and_nothing_is_said_of_a_folder_that_is_gone(tmp_path):
    found = read(of_the_disk(tmp_path))
    volume = os.statvfs(tmp_path)
    assert found["coterie_disk_size_bytes"] == volume.f_blocks * volume.f_frsize
    assert 0 < found["coterie_disk_free_bytes"] <= found["coterie_disk_size_bytes"]
    assert set(read(of_the_disk(tmp_path / "gone")).values()) == {None}


def test_memory_grows_with_what_a_process_holds(tmp_path):
    before = resident_bytes()
    held = b"x" * (64 << 20)
    assert resident_bytes() - before > len(held) / 2
    assert resident_bytes(tmp_path / "statm") is None
    assert "coterie_resident_memory_bytes" in read(of_the_memory())


def test_the_limit_is_that_of_either_kind_of_control_group(tmp_path):
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory").mkdir()
    old = tmp_path / "memory/memory.limit_in_bytes"
    old.write_text("268435456\n")
    assert memory_limit(tmp_path) == 268435456
    old.write_text("9223372036854771712\n")  # none
    assert memory_limit(tmp_path) is None
    new = tmp_path / "memory.max"
    new.write_text("536870912\n")
    assert memory_limit(tmp_path) == 536870912
    new.write_text("max\n")
    assert memory_limit(tmp_path) is None


def test_the_page_has_measures_with_and_without_labels_and_leaves_out_what_is_not_known():
    measures = [
        PrometheusMetric("coterie_known", "Known.", lambda: 3.5),
        PrometheusMetric("coterie_unknown", "Unknown.", lambda: None),
    ]
    exporter = Exporter(Accounting(), {}, dict, lambda: True, Admission(Limits()), measures=measures)
    counts = {("train", "applied"): 2.0}
    measures.append(
        PrometheusMetric("coterie_rounds", "Rounds.", lambda: counts, ("purpose", "outcome"), counter=True)
    )
    page = b"".join(
        exporter._page({"PATH_INFO": "/metrics", "REQUEST_METHOD": "GET"}, lambda *_: None)
    ).decode()
    samples = {sample.name: sample for family in parse(page) for sample in family.samples}
    assert samples["coterie_known"].value == 3.5
    assert "coterie_unknown" not in samples
    assert samples["coterie_rounds_total"].labels == {"purpose": "train", "outcome": "applied"}
    assert samples["coterie_rounds_total"].value == 2
