"""Define the options of a peer, their command line, and the split of a batch into length buckets."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

# Short beside the time of a batch, and long enough to take all waiting requests from a queue between processes.
BATCH_WAIT_S = 0.005


@dataclass(frozen=True)
class Options:
    """The configuration of a peer.

    `instances` are workers, replicas or model instances with a session each, `threads` the intra-op threads of a
    session. A `max_batch_size` of 1 turns batching off. `has_buckets` sorts a batch by length and runs it in parts of
    similar length; otherwise the whole batch is padded to its longest text.
    """

    instances: int
    threads: int
    max_batch_size: int = 1
    has_buckets: bool = False

    def arguments(self) -> list[str]:
        """Return the options as words of a command line."""
        values = {"instances": self.instances, "threads": self.threads, "max-batch-size": self.max_batch_size}
        return [*(f"--{name}={value}" for name, value in values.items()), *(["--buckets"] if self.has_buckets else [])]

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        """Return the options that the command line gives."""
        return cls(args.instances, args.threads, args.max_batch_size, args.buckets)


def parse_arguments(description: str | None, *further: str) -> argparse.Namespace:
    """Read the command line of a peer: MODEL GRAPH PORT, `further` positional arguments, and the options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "graph", "port", *further):
        parser.add_argument(name)
    parser.add_argument("--instances", type=int, default=1, help="workers, replicas or model instances")
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads of a session (default: all cores)")
    parser.add_argument("--max-batch-size", type=int, default=1, help="1 turns batching off")
    parser.add_argument("--buckets", action="store_true", help="pad a batch only among texts of similar length")
    return parser.parse_args()


def length_buckets(lengths: list[int]) -> list[list[int]]:
    """Return the indices of the texts by length: up to 16 tokens, then up to each further power of two."""
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        buckets.setdefault((max(length, 16) - 1).bit_length(), []).append(index)
    return [buckets[bits] for bits in sorted(buckets)]
