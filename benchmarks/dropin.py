"""What standing in for transformers costs: the import, the second from_pretrained, and a call beside the session.

    python benchmarks/dropin.py MODEL      # a question answering model, such as assemble.py qa makes

Every figure is the median of fresh processes that take turns; nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from hasten.core.hardware import this_machine

HERE = Path(__file__).parent
ROUNDS = 5
IMPORT = "import time; begin = time.perf_counter()\n{}\nprint((time.perf_counter() - begin) * 1e3)"
IMPORTS = {
    "transformers": "from transformers import AutoTokenizer",
    "with_hasten": "from transformers import AutoTokenizer\n"
    "from hasten.transformers import AutoModelForQuestionAnswering",
}
LOAD = """
import sys, time
import torch, transformers
from {module} import AutoModelForQuestionAnswering
{warm}
begin = time.perf_counter()
model = AutoModelForQuestionAnswering.from_pretrained(sys.argv[1])
print((time.perf_counter() - begin) * 1e3)
"""
# What transformers loads by itself on the way to any model's configuration belongs to neither.
WARM = "transformers.AutoConfig.from_pretrained(sys.argv[1]); transformers.modeling_outputs.BaseModelOutput"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "dropin.json")
    args = parser.parse_args()
    run(LOAD.format(module="hasten.transformers", warm=""), args.model)  # builds it, if nobody did
    loads = {
        "hasten": LOAD.format(module="hasten.transformers", warm=WARM),
        "hasten_cold": LOAD.format(module="hasten.transformers", warm=""),
        "transformers": LOAD.format(module="transformers", warm=WARM),
    }
    programs = {f"import_{name}": IMPORT.format(code) for name, code in IMPORTS.items()}
    programs |= {f"load_{name}": code for name, code in loads.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, code in programs.items():
            times[name].append(run(code, args.model))
    medians = {name: round(statistics.median(own), 1) for name, own in times.items()}
    results: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "machine": this_machine(),
        "model": Path(args.model).name,
        "rounds": ROUNDS,
        "median_ms": medians,
        "import_over_transformers_ms": round(
            statistics.median(
                ours - theirs
                for ours, theirs in zip(times["import_with_hasten"], times["import_transformers"], strict=True)
            ),
            1,
        ),
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print(json.dumps({name: results[name] for name in ("median_ms", "import_over_transformers_ms")}, indent=1))


def run(code: str, model: str) -> float:
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
