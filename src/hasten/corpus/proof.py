"""State what computed an output: bundle, variant, machine, versions, and the agreement that was checked here."""

from __future__ import annotations

from typing import Any

import msgspec

from hasten.bundle import Bundle
from hasten.core.report import Verdict
from hasten.core.system.hardware import this_machine
from hasten.core.version import __version__
from hasten.measure.open_verified import Verified


def proof_of(bundle: Bundle, verified: Verified) -> dict[str, Any]:
    """Return the proof that travels with the output; it is the same whenever the job runs on this machine."""
    manifest, machine = bundle.manifest, this_machine()
    return {
        "hasten": __version__,
        "bundle": manifest.digest,
        "model": msgspec.to_builtins(manifest.model),
        "task": manifest.task.name,
        "variant": str(verified.artifact.variant),
        "agreement": _agreement(verified.verdict),
        "machine": str(machine),
        "system": machine.system,
        "python": machine.python,
        "libraries": machine.libraries,
    }


def _agreement(verdict: Verdict) -> dict[str, Any]:
    """Return how the variant agreed with the stored reference on this machine."""
    agreement = verdict.agreement
    return {
        "measure": agreement.measure,
        "value": agreement.value,
        "rows": agreement.rows,
        "flips": agreement.flips,
        "passed": verdict.passed,
        "reason": verdict.reason,
    }
