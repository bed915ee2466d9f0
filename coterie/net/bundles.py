"""Key bundles between their wire form and the form that can be verified, for services."""

from __future__ import annotations

from coterie.secure_sum.bundles import bundle_from_wire, bundle_to_wire

__all__ = ["bundle_from_wire", "bundle_to_wire"]
