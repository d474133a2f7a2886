"""Sizes of packed batches: each has one buffer layout and one CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.kernels.ops.attention import tile_config_for

_MIN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """The capacity of a packed batch: tokens, sequences, and picked tokens (those whose outputs are requested)."""

    tokens: int
    sequences: int
    picked: int = 0

    @classmethod
    def of(cls, tokens: int, sequences: int, picked: int | None = None) -> Bucket:
        """Return the smallest bucket that holds such a batch."""
        picked_capacity = 0 if picked is None else 1 << max(0, picked - 1).bit_length()
        return cls(round_up(max(_MIN_TOKENS, tokens)), 1 << (sequences - 1).bit_length(), picked_capacity)

    def holds(self, other: Bucket) -> bool:
        """Return whether every batch of the other bucket fits into this one."""
        is_longer, has_more_sequences = self.tokens >= other.tokens, self.sequences >= other.sequences
        return is_longer and has_more_sequences and self.picked >= other.picked

    @property
    def segment_sizes(self) -> list[int]:
        """Return the sizes of the buffer's segments.

        Per token: id, position, token type and sequence; then sequence starts, attention tiles and picked tokens.
        """
        max_tiles = self.tokens // self.tile_rows + self.sequences
        return [self.tokens] * 4 + [self.sequences + 1, 3 * max_tiles, self.picked]

    @property
    def tile_rows(self) -> int:
        """Return the number of query rows of an attention tile."""
        return tile_config_for(self.tokens, self.sequences).rows


def round_up(tokens: int) -> int:
    """Round up to a power of two up to 128 tokens, and to a sixteenth of the next power of two beyond.

    Beyond 128 tokens a bucket is at most an eighth larger than the batch.
    """
    power = 1 << (tokens - 1).bit_length()
    step = power if tokens <= 128 else power // 16
    return -(-tokens // step) * step
