"""What a model that writes is made into: its graphs in a variant's precision, for its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hasten.backends import BACKENDS, Artifact, Source
from hasten.builder.passes import record
from hasten.core.report import Pass
from hasten.core.tensors import Signature
from hasten.core.variant import CUDA, Variant
from hasten.quantize.overflow import Overflow, describe
from hasten.quantize.written import BLOCKS, quantize_written
from hasten.quantize.written_half import halve_written, join_norms
from hasten.quantize.written_range import Text, overflows_written


@dataclass
class Kit:
    """Graphs in fp32, as they were exported, and texts to see on how large values become."""

    graphs: Mapping[str, Path]
    signature: Signature
    texts: Sequence[Text]
    work: Path
    passes: list[Pass]

    def make(self, variant: Variant) -> Artifact:
        graphs = self._joined if variant.device == CUDA else self.graphs
        if variant.precision in BLOCKS:
            made = quantize_written(graphs, self._folder(variant, "blocks"), BLOCKS[variant.precision])
            self._record("quantize", variant, graphs, made)
            graphs = made
        if variant.device == CUDA:
            beyond = {name: frozenset(one.tensor for one in found) for name, found in self._overflows.items()}
            made = halve_written(graphs, self._folder(variant, "halves"), beyond)
            for name, found in self._overflows.items():
                if found:
                    notes = [*which(name, graphs), describe(found)]
                    self.passes.append(
                        record("guard", graphs[name], graphs[name], variants=[variant.name], notes=notes)
                    )
            self._record("halve", variant, graphs, made)
            graphs = made
        folder = self.work / variant.name
        folder.mkdir()
        return BACKENDS.get(variant.backend).make(Source(self.signature, graphs), variant, folder)

    @cached_property
    def _joined(self) -> dict[str, Path]:
        folder = self.work / "joined"
        folder.mkdir()
        return join_norms(self.graphs, folder)

    @cached_property
    def _overflows(self) -> dict[str, tuple[Overflow, ...]]:
        return overflows_written(self._joined, self.texts)

    def _folder(self, variant: Variant, what: str) -> Path:
        made = self.work / f"{variant.name}-{what}"
        made.mkdir()
        return made

    def _record(self, name: str, variant: Variant, before: Mapping[str, Path], after: Mapping[str, Path]) -> None:
        self.passes += [
            record(name, before[graph], after[graph], variants=[variant.name], notes=which(graph, before))
            for graph in before
        ]


def which(name: str, graphs: Mapping[str, Path]) -> list[str]:
    """Of several graphs, the one that a pass went over."""
    return [f"the {name}"] if len(graphs) > 1 else []
