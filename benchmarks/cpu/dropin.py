"""Measure the overhead of the drop-in for transformers: the import, and the second from_pretrained of a model.

    python benchmarks/cpu/dropin.py MODEL --data rows.jsonl     # a question answering model, such as `assemble.py qa`

Every number is the median over fresh processes that alternate, as wall time and as CPU time. CPU time hardly depends on
other processes; if the two differ much, the machine was not idle.
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

sys.path.append(str(Path(__file__).parents[1]))

from provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "dropin.json"
CLOCKS = "(time.perf_counter(), time.process_time())"
IMPORT = f"import time; begin = {CLOCKS}\n{{}}\nend = {CLOCKS}\nprint(*[(b - a) * 1e3 for a, b in zip(begin, end)])"
IMPORTS = {
    "transformers": "from transformers import AutoTokenizer",
    "with_hasten": "from transformers import AutoTokenizer\n"
    "from hasten.transformers import AutoModelForQuestionAnswering",
}
# Modules that transformers imports for any model's config are loaded before timing starts.
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
HASTEN_OPTIONS = ", backend='onnxruntime', data=sys.argv[2]"


def main() -> None:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="rows that verify the first build")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    programs = {f"import_{name}": IMPORT.format(code) for name, code in IMPORTS.items()}
    programs["load_hasten"] = LOAD.format(module="hasten.transformers", options=HASTEN_OPTIONS)
    programs["load_transformers"] = LOAD.format(module="transformers", options="")
    run(programs["load_hasten"], args)  # builds the bundle, unless it is in the cache
    load_before = os.getloadavg()[0]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, code in programs.items():
            times[name].append(run(code, args))
    medians = {
        name: {
            "wall_ms": round(statistics.median(wall for wall, _ in runs), 1),
            "processor_ms": round(statistics.median(cpu for _, cpu in runs), 1),
        }
        for name, runs in times.items()
    }
    import_overhead = [
        with_hasten[1] - without[1]
        for with_hasten, without in zip(times["import_with_hasten"], times["import_transformers"], strict=True)
    ]
    results: dict[str, Any] = {
        **provenance(),
        "model": Path(args.model).name,
        "rounds": args.rounds,
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "median": medians,
        "import_over_transformers_processor_ms": round(statistics.median(import_overhead), 1),
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print(json.dumps({name: results[name] for name in list(results)[4:]}, indent=1))


def run(code: str, args: argparse.Namespace) -> tuple[float, float]:
    """Run a program and return the wall and CPU time in ms that it prints."""
    command = [sys.executable, "-c", code, args.model, str(args.data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, cpu = map(float, done.stdout.splitlines()[-1].split())
    return wall, cpu


if __name__ == "__main__":
    main()
