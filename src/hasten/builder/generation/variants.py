"""Make the variants of a generative model: its graphs in the precision and for the device of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hasten.backends import BACKENDS, Artifact, Source
from hasten.builder.passes.pipeline import record_pass
from hasten.core.report import Pass
from hasten.core.tensors import Signature
from hasten.core.variant import CUDA, Variant
from hasten.quantize.analysis.overflow import DecoderText, Overflow, describe_overflows, find_decoder_overflows
from hasten.quantize.methods.blocks import BLOCK_FORMATS, quantize_decoder_blocks
from hasten.quantize.methods.fp16 import convert_to_fp16, fuse_norms


@dataclass
class VariantFactory:
    """Makes variants from the exported fp32 graphs; `texts` show which values leave the range of fp16."""

    graphs: Mapping[str, Path]
    signature: Signature
    texts: Sequence[DecoderText]
    work: Path
    passes: list[Pass]

    def make(self, variant: Variant) -> Artifact:
        """Quantize and convert the graphs as the variant needs, and store them for its backend."""
        graphs = self._joined if variant.device == CUDA else self.graphs
        if variant.precision in BLOCK_FORMATS:
            folder = self._new_folder(f"{variant.name}-blocks")
            quantized = quantize_decoder_blocks(graphs, folder, BLOCK_FORMATS[variant.precision])
            self._record("quantize", variant, graphs, quantized)
            graphs = quantized
        if variant.device == CUDA:
            fp32_tensors = {name: frozenset(item.tensor for item in items) for name, items in self._overflows.items()}
            converted = convert_to_fp16(graphs, self._new_folder(f"{variant.name}-fp16"), fp32_tensors)
            for name, overflows in self._overflows.items():
                if overflows:
                    notes = [*graph_notes(name, graphs), describe_overflows(overflows)]
                    self.passes.append(
                        record_pass("guard", graphs[name], graphs[name], variants=[variant.name], notes=notes)
                    )
            self._record("fp16", variant, graphs, converted)
            graphs = converted
        source, folder = Source(self.signature, graphs), self._new_folder(variant.name)
        return BACKENDS.get(variant.backend).make(source, variant, folder)

    @cached_property
    def _joined(self) -> dict[str, Path]:
        return fuse_norms(self.graphs, self._new_folder("joined"))

    @cached_property
    def _overflows(self) -> dict[str, tuple[Overflow, ...]]:
        return find_decoder_overflows(self._joined, self.texts)

    def _new_folder(self, name: str) -> Path:
        folder = self.work / name
        folder.mkdir()
        return folder

    def _record(self, name: str, variant: Variant, before: Mapping[str, Path], after: Mapping[str, Path]) -> None:
        self.passes += [
            record_pass(name, before[graph], after[graph], variants=[variant.name], notes=graph_notes(graph, before))
            for graph in before
        ]


def graph_notes(name: str, graphs: Mapping[str, Path]) -> list[str]:
    """Return a note that names the graph a pass went over, if there are several."""
    return [f"the {name}"] if len(graphs) > 1 else []
