"""Print the seconds of each stage of a process up to its first answers, as JSON; `gpu_throughput.py` starts it.

startup_stages.py BUNDLE VARIANT SENTENCE PARAGRAPH BEGIN    (BEGIN: the time at which the process was started)
"""

from __future__ import annotations

import json
import sys
import time

_STARTED = time.time()
# Server batches, as `hasten serve` prepares them by default.
_TOKENS, _ROWS = 8192, 256


def main(path: str, variant: str, sentence: str, paragraph: str, begin: str) -> None:
    """Run the stages one by one and print their seconds."""
    stages = {"interpreter": _STARTED - float(begin)}
    last = time.perf_counter()

    def finish(stage: str) -> None:
        nonlocal last
        now = time.perf_counter()
        stages[stage] = now - last
        last = now

    import hasten
    from hasten.backends import SupportsBuckets
    from hasten.bundle import open_bundle
    from hasten.core.system.hardware import this_machine
    from hasten.predictor import Predictor

    finish("import hasten")
    this_machine()
    finish("probe machine")
    bundle = open_bundle(path)
    bundle.tokenizer()
    finish("open bundle")
    if variant.endswith("@cuda"):
        import torch

        finish("import torch")
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        finish("CUDA context")
        import triton

        assert triton.__version__
        finish("import triton")
    predictor = hasten.load(path, variant)
    assert isinstance(predictor, Predictor)
    finish("load")
    predictor(sentence)
    finish("first answer")
    predictor(sentence)
    finish("second answer")
    predictor(paragraph)
    finish("first paragraph")
    session = predictor.session
    if isinstance(session, SupportsBuckets):
        samples = session.samples(_TOKENS, _ROWS)
        for batch in samples:
            predictor.session.run(batch)
        finish(f"all {len(samples)} buckets")
    print(json.dumps(stages))


if __name__ == "__main__":
    main(*sys.argv[1:])
