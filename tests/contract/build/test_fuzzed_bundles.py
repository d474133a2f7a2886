"""Mutated bundles must fail in one line or answer; benchmarks/fuzz_bundles.py tries more."""

from __future__ import annotations

import fuzz_bundles
from hasten.bundle import Bundle

BUNDLES = 60


def test_mutated_bundles_cause_no_faults(classifier_bundle: Bundle) -> None:
    """Bits flip, files are cut, swapped and linked, and graphs and manifests change; most bundles are sealed again."""
    results = fuzz_bundles.study([classifier_bundle.path], 0, BUNDLES, seed=1)
    assert results["faults"] == []
    assert results["bundles"] == BUNDLES
    runs = results["outcomes"]["run"]
    assert runs["equal answers"] > 0
    assert runs["BundleError"] > BUNDLES / 10
