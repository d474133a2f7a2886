"""What every build goes by, and its steps: timed, shown, and named by whatever goes wrong in them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.builder.outline import Given, Outline
from hasten.core.errors import HastenError, StageError
from hasten.core.hardware import Machine, this_machine
from hasten.core.plan import Plan
from hasten.core.progress import Progress
from hasten.core.report import Pass, Stage


@dataclass
class Staged:
    plan: Plan
    about: Outline
    given: Given
    work: Path
    progress: Progress
    force: bool
    # Where a model lies whose name in the plan is not an address.
    directory: Path | None
    # The module whose quantizers make a variant, where it has some.
    quantized: Any = None
    # Whether the optimal shape alone is timed, which is enough to choose by.
    is_brief: bool = False
    machine: Machine = field(default_factory=this_machine)
    stages: list[Stage] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Time a step, show it, and give whatever goes wrong in it its name."""
        notes: list[str] = []
        begin = time.perf_counter()
        self.progress.start(name)
        ok = False
        try:
            yield notes
            ok = True
        except (HastenError, OSError):
            raise
        except Exception as error:
            raise StageError(f"{name} failed: {type(error).__name__}: {error}") from error
        finally:
            self.progress.finish("; ".join(notes), ok=ok)
        self.stages.append(Stage(name, time.perf_counter() - begin, tuple(notes)))
