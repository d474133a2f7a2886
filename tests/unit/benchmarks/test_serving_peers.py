"""Test the options that the serving studies pass to peers, and how peers split batches by length."""

from __future__ import annotations

import pytest

from serving.peers.options import Options, length_buckets, parse_arguments


@pytest.mark.parametrize("options", [Options(1, 2), Options(2, 1, 16), Options(2, 1, 32, has_buckets=True)])
def test_options_survive_the_command_line_of_a_peer(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["peer.py", "model/", "model.onnx", "8000", *options.arguments()])
    args = parse_arguments(None)
    assert (args.model, args.graph, args.port) == ("model/", "model.onnx", "8000")
    assert Options.of(args) == options


def test_length_buckets_hold_every_text_once_beside_texts_of_similar_length() -> None:
    lengths = [500, 3, 17, 16, 33, 32, 260, 1]
    buckets = length_buckets(lengths)
    assert buckets == [[1, 3, 7], [2, 5], [4], [0, 6]]
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(lengths)))
