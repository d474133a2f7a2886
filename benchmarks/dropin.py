"""What standing in for transformers costs: the import, and the second from_pretrained of a model.

    python benchmarks/dropin.py MODEL --data rows.jsonl     # a question answering model, such as assemble.py qa makes

Every figure is the median of fresh processes that take turns, as time passed and as time of the processor, which others
on the machine hardly change: where the two differ by much, it was not alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from origin import origin

HERE = Path(__file__).parent
CLOCKS = "(time.perf_counter(), time.process_time())"
IMPORT = f"import time; begin = {CLOCKS}\n{{}}\nend = {CLOCKS}\nprint(*[(b - a) * 1e3 for a, b in zip(begin, end)])"
IMPORTS = {
    "transformers": "from transformers import AutoTokenizer",
    "with_hasten": "from transformers import AutoTokenizer\n"
    "from hasten.transformers import AutoModelForQuestionAnswering",
}
# What transformers loads by itself on the way to any model's configuration belongs to neither.
LOAD = f"""
import sys, time
import torch, transformers
from {{module}} import AutoModelForQuestionAnswering
transformers.AutoConfig.from_pretrained(sys.argv[1]); transformers.modeling_outputs.BaseModelOutput
begin = {CLOCKS}
AutoModelForQuestionAnswering.from_pretrained(sys.argv[1]{{options}})
end = {CLOCKS}
print(*[(b - a) * 1e3 for a, b in zip(begin, end)])
"""
OURS = ", backend='onnxruntime', data=sys.argv[2]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="rows that the build is judged on, the first time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "dropin.json")
    args = parser.parse_args()
    programs = {f"import_{name}": IMPORT.format(code) for name, code in IMPORTS.items()}
    programs["load_hasten"] = LOAD.format(module="hasten.transformers", options=OURS)
    programs["load_transformers"] = LOAD.format(module="transformers", options="")
    run(programs["load_hasten"], args)  # builds it, if nobody did
    load_before = os.getloadavg()[0]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, code in programs.items():
            times[name].append(run(code, args))
    medians = {
        name: {
            "wall_ms": round(statistics.median(wall for wall, _ in own), 1),
            "processor_ms": round(statistics.median(busy for _, busy in own), 1),
        }
        for name, own in times.items()
    }
    over = [
        ours[1] - theirs[1]
        for ours, theirs in zip(times["import_with_hasten"], times["import_transformers"], strict=True)
    ]
    results: dict[str, Any] = {
        **origin(),
        "model": Path(args.model).name,
        "rounds": args.rounds,
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "median": medians,
        "import_over_transformers_processor_ms": round(statistics.median(over), 1),
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print(json.dumps({name: results[name] for name in list(results)[4:]}, indent=1))


def run(code: str, args: argparse.Namespace) -> tuple[float, float]:
    command = [sys.executable, "-c", code, args.model, str(args.data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, busy = map(float, done.stdout.splitlines()[-1].split())
    return wall, busy


if __name__ == "__main__":
    main()
