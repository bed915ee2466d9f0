"""A report as a DRIFT run over seven processes would leave it; figures are invented but of the right size."""

from __future__ import annotations

import math
from typing import Any


def sample_report() -> dict[str, Any]:
    """Return a new report with every section filled."""
    return {
        "run_id": "drift-20260314-091502-7f3a",
        "system": "drift",
        "label": "DRIFT",
        "form": "published",
        "secure_sum": "clear",
        "dataset": {
            "name": "MovieLens 100K",
            "users": 943,
            "items": 1682,
            "interactions": 100_000,
            "split_sha256": "feedbeef" * 8,
        },
        "seeds": [0, 1, 2],
        "settings": {
            "name": "drift",
            "data": {"path": None, "positive_from": 3.0, "columns": {}},
            "split": {"kind": "temporal", "train": 0.8, "validation": 0.1},
            "drift": {"dim": 16, "rate": 0.2, "ridge": 0.001, "theta": 2, "epochs": 8, "item_bias": False},
            "federation": {"owners": 3, "hosts": 2, "min_users": 20, "attacks": True},
        },
        "metrics": {
            "ndcg@10": {"mean": 0.21438, "std": 0.00187},
            "map@10": {"mean": 0.12192, "std": 0.00141},
            "ndcg_test_items@10": {"mean": 0.87921, "std": 0.00083},
            "map_test_items@10": {"mean": 0.83714, "std": 0.00102},
            "test_loss": {"mean": 0.46213, "std": 0.00214},
            "precision@10": {"mean": 0.18214, "std": 0.00162},
            "recall@10": {"mean": 0.13877, "std": 0.00148},
        },
        "reference": {
            "saros": {
                "label": "SAROS",
                "note": "centralised, same blocks",
                "metrics": {
                    "ndcg@10": {"mean": 0.20716, "std": 0.00203},
                    "map@10": {"mean": 0.11742, "std": 0.00151},
                    "ndcg_test_items@10": {"mean": 0.87044, "std": 0.00071},
                    "map_test_items@10": {"mean": 0.82903, "std": 0.00095},
                    "test_loss": {"mean": 0.47122, "std": 0.00187},
                },
                "history": _history(top=0.20716, rate=0.55, versions=21_000, per_epoch=1),
            },
            "random": {"metrics": _trivial(0.0121, 0.0052, 0.8437, 0.7901), "history": []},
            "popularity": {"metrics": _trivial(0.1483, 0.0791, 0.9003, 0.8672), "history": []},
            "positive_share": {"metrics": _trivial(0.0384, 0.0172, 0.8816, 0.8402), "history": []},
        },
        "history": _history(top=0.21438, rate=0.7, versions=34_600, per_epoch=3),
        "traffic": {
            "Exchange": _rpc(34_612, 3, 268_400_000, 251_900_000, 1.912, 9.47, 0.841, 1.033),
            "SubmitInteractions": _rpc(5_658, 0, 3_912_000, 402_000, 3.21, 18.6, 1.94, 1.22),
            "Fetch": _rpc(1_204, 0, 118_000, 71_200_000, 2.61, 14.9, 0.92, 1.61),
            "Poll": _rpc(612, 0, 31_000, 58_000, 412.0, 19_998.0, 410.2, 1.14),
            "Submit": _rpc(98, 0, 44_100, 9_800, 2.05, 7.2, 0.61, 1.4),
            "Register": _rpc(7, 0, 412_000, 61_000, 48.1, 96.2, 44.7, 3.2),
            "Enrol": _rpc(7, 0, 388_000, 241_000, 61.0, 122.0, 57.3, 3.5),
            "Lookup": _rpc(23, 0, 30_400, 190_000, 1.31, 3.3, 0.42, 0.91),
            "Flush": _rpc(0, 0, 0, 0, None, None, None, None),
            "Revocations": _rpc(64, 0, 1_300, 5_100, 0.84, 1.9, None, None),
        },
        "network": {
            "seconds": 61.2,
            "of": None,
            "by_party": {
                "client/host-0": {"seconds": 3.1, "share": 0.0507},
                "data-owner/late": {"seconds": 15.9, "share": 0.2598},
            },
        },
        "cpu_seconds": {
            "cos/cos": _service(31.4, 0.9, 0.0, apply=12.6, rows=8.4, evaluation=0.0, store=3.1),
            "thirdparty/directory": _service(2.2, 0.8, 0.31, store=0.4),
            "data-owner/genre-1-genre-4-genre-5": _service(
                14.8, 0.9, 0.19, gradients=8.9, blocks=1.7, store=0.9
            ),
            "data-owner/genre-2-genre-3-genre-6": _service(
                13.1, 0.9, 0.17, gradients=7.8, blocks=1.5, store=0.8
            ),
            "data-owner/late": _service(11.9, 0.9, 0.16, gradients=6.9, blocks=1.3, store=0.8),
            "client/host-0": _service(9.6, 0.9, 0.24, evaluation=5.3, store=0.7),
            "client/host-1": _service(9.3, 0.9, 0.23, evaluation=5.1, store=0.7),
        },
        "peak_rss_mb": {
            "cos/cos": 214.3,
            "thirdparty/directory": 88.1,
            "data-owner/genre-1-genre-4-genre-5": 121.7,
            "data-owner/genre-2-genre-3-genre-6": 119.9,
            "data-owner/late": 118.2,
            "client/host-0": 164.0,
            "client/host-1": 163.2,
        },
        "visibility": {
            "cos/cos": {
                "requested_rows": "seen",
                "item_gradient": "seen",
                "interaction": "not seen",
                "user_factor": "seen",
                "item_factor": "seen",
            },
            "data-owner/late": {
                "requested_rows": "seen",
                "item_gradient": "seen",
                "interaction": "seen",
                "user_factor": "seen",
                "item_factor": "seen",
            },
            "client/host-0": {
                "requested_rows": "not seen",
                "item_gradient": "not seen",
                "interaction": "not seen",
                "user_factor": "not seen",
                "item_factor": "seen",
            },
            "thirdparty/directory": {
                "requested_rows": "not seen",
                "item_gradient": "not seen",
                "interaction": "not seen",
                "user_factor": "not seen",
            },
        },
        "attacks": {
            "requested_rows": {
                "auc": 0.9987,
                "auc_with_popularity": 0.9989,
                "popularity_auc": 0.8712,
                "users": 943,
            },
            "gradient_sign": {"auc": 0.9712, "popularity_auc": 0.8712, "users": 943, "precision": 0.9812},
            "sealed_sizes": {
                "auc": 0.5031,
                "auc_with_popularity": 0.8698,
                "popularity_auc": 0.8712,
                "users": 943,
            },
        },
        "staleness": {
            "max_staleness": 60,
            "refused": 12,
            "histogram": {str(age): round(5200 * math.exp(-(((age - 6) / 5.5) ** 2))) for age in range(24)},
        },
        "owners_timeline": [
            {"time_s": 0.0, "version": 0, "owners": 2, "hosts": 2},
            {"time_s": 61.4, "version": 10_100, "owners": 3, "hosts": 2},
            {"time_s": 128.9, "version": 22_300, "owners": 2, "hosts": 2},
        ],
        "events": [
            {"time_s": 61.4, "text": "data-owner/late joined"},
            {"time_s": 128.9, "text": "data-owner/late left"},
        ],
        "theta_study": [
            {
                "theta": theta,
                "metrics": {
                    "ndcg@10": 0.2149 - 0.00002 * theta,
                    "ndcg_test_items@10": 0.8793 - 0.00004 * theta,
                },
                "rpcs": round(69_000 / theta) + 7_400,
                "cpu_seconds": 66.0 + 52.0 / theta,
            }
            for theta in (1, 2, 5, 10, 20)
        ],
        "versions": {"coterie": "0.1.0", "python": "3.11.11", "numpy": "2.3.1", "grpcio": "1.76.0"},
        "machine": {"system": "Linux", "processor": "x86-64", "cores": 2, "memory_gib": 7.7},
        "started": "2026-03-14T09:15:02+00:00",
        "duration_s": 207.4,
    }


def _history(*, top: float, rate: float, versions: int, per_epoch: int) -> list[dict[str, Any]]:
    entries = []
    for step in range(8 * per_epoch + 1):
        epochs = step / per_epoch
        grown = 1 - math.exp(-rate * epochs)
        entries.append(
            {
                "epoch": math.ceil(epochs),
                "version": round(versions * epochs / 8),
                "time_s": round(25.1 * epochs, 2),
                "train_loss": None if step == 0 else round(0.693 - 0.27 * grown, 5),
                "users": 943,
                "owners": 3 if 61.4 <= 25.1 * epochs < 128.9 else 2,
                "metrics": {
                    "ndcg@10": round(0.012 + (top - 0.012) * grown, 5),
                    "map@10": round(0.005 + (0.57 * top - 0.005) * grown, 5),
                    "ndcg_test_items@10": round(0.8437 + 0.17 * top * grown, 5),
                    "map_test_items@10": round(0.7901 + 0.22 * top * grown, 5),
                    "test_loss": round(0.693 - 0.231 * grown, 5),
                    "precision@10": round(0.012 + (0.85 * top - 0.012) * grown, 5),
                    "recall@10": round(0.007 + (0.65 * top - 0.007) * grown, 5),
                },
            }
        )
    return entries


def _trivial(
    ndcg: float, map_: float, ndcg_test: float, map_test: float
) -> dict[str, dict[str, float | None]]:
    keys = ("ndcg@10", "map@10", "ndcg_test_items@10", "map_test_items@10")
    return {
        key: {"mean": value, "std": None}
        for key, value in zip(keys, (ndcg, map_, ndcg_test, map_test), strict=True)
    }


def _rpc(
    calls: int,
    errors: int,
    out: int,
    into: int,
    p50: float | None,
    p99: float | None,
    server: float | None,
    network: float | None,
) -> dict[str, float | None]:
    return {
        "calls": calls,
        "errors": errors,
        "bytes_out": out,
        "bytes_in": into,
        "p50_ms": p50,
        "p99_ms": p99,
        "server_p50_ms": server,
        "network_p50_ms": network,
    }


def _service(total: float, start: float, security: float, **activities: float) -> dict[str, Any]:
    protecting = {"seal": 0.4, "open": 0.2, "key agreement": 0.3, "signatures": 0.1} if security else {}
    seconds = {name: round(share * security, 4) for name, share in protecting.items()}
    return {"total": total, "start": start, "security": security, "activities": {**activities, **seconds}}
