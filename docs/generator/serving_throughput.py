"""The benchmark study of serving throughput, with the configurations of the peers."""

from __future__ import annotations

from statistics import median
from typing import Any

from generator.results import cpu_name, day, duration, load, machine_line, table
from generator.studies import Study

# hasten with the variant whose graph peers get, in fp32, and with the variant that a default build chooses, if another.
HASTEN, HASTEN_FP32, HASTEN_CHOSEN = "hasten", "hasten, fp32", "hasten, chosen variant"
# In the names of peers: the graph that they run.
SAME_GRAPH, STOCK_GRAPH = ", our graph", ", ONNX Runtime fp32"
_FILES = ("serving_throughput", "serving_throughput_arm64")


def throughput() -> Study:
    """Return the study of requests per second under mixed traffic, with the configuration of the peers."""
    runs = [load(file) for file in _FILES]
    answer: list[str] = []
    for results in runs:
        contenders = results["contenders"]
        names = sorted(contenders, key=lambda name: -over_rounds(contenders[name], "per_second"))
        rows = [
            [
                server_label(name),
                _configuration(name, results),
                f"{over_rounds(contenders[name], 'per_second'):.0f}{_errors(contenders[name])}",
                duration(over_rounds(contenders[name], "p50_ms")),
                duration(over_rounds(contenders[name], "p99_ms")),
                f"{contenders[name]['judged']['accuracy']:.3f}",
            ]
            for name in names
        ]
        answer += [
            f"{machine_and_day(results)}, {_rounds(results)}{without_tuning(results, 'tuning')}:",
            "",
            *table(["server", "configuration", "requests/s", "p50", "p99", "accuracy"], rows),
            "",
            faster_peers(results),
            "",
        ]
    first = runs[0]
    if "tuning" in first:
        answer += _tuning_table(first)
    versions = first["versions"]["peers"] | first["versions"].get("triton", {})
    return Study(
        title="Serving throughput",
        question="How many requests per second does a server answer under mixed traffic?",
        answer=answer[:-1],
        method=(
            f"{first['clients']} clients, each waiting for its answer; {first['share_of_long_texts']:.0%} of the texts "
            "are long film reviews, the others SST-2 sentences. Medians over rounds that go through all servers; one "
            "server is alive at a time.",
            "Accuracy is that of the answers to labelled SST-2 sentences before timing.",
            "*hasten's graph* is the int8 graph that hasten serves; compare it with *hasten*. Compare fp32 rows with "
            "*hasten, fp32*. With hasten's graph run FastAPI and the best of LitServe, Ray Serve and tritonserver, in "
            "their configurations for the stock graph.",
            "Tuned peers run in the configuration with the most requests/s of those that were tried: FastAPI "
            f"{versions['fastapi']}, LitServe {versions['litserve']}, Ray Serve {versions['ray']}, tritonserver "
            f"(nvidia-pytriton {versions['nvidia-pytriton']}, Python backend). Their environments have ONNX Runtime "
            f"{versions['onnxruntime']}; intra-op threads are the cores divided by the instances, "
            "or one for FastAPI, which runs requests side by side.",
            "*In length buckets* means that the batch is sorted by length and run in parts of similar length, by code "
            "in the peer's model. *Padded* pads the batch to its longest text, as in tutorials.",
            "FastAPI runs a plain function in its thread pool, without batching. *FastAPI, transformers* queues "
            "requests for one pipeline per worker, as in transformers' documentation.",
            "A server that runs requests as they come lets sentences overtake long reviews: its p50 is low and its p99 "
            "high. hasten batches texts of similar length and bounds the wait of long ones.",
        ),
        machines=tuple(map(machine_line, runs)),
        command="python benchmarks/serving/throughput.py --model DIR --data FILE --peers ENV --triton ENV --tune",
        files=_FILES,
    )


_CLAIMS = {"p50_ms": "a lower p50", "p99_ms": "a lower p99", "per_second": "more requests/s"}


def faster_peers(results: dict[str, Any]) -> str:
    """Return in words where a peer answers sooner, or more requests/s, than hasten in the same precision."""
    sentences = []
    for name in results["contenders"]:
        figures = {key: _pair(results, name, key) for key in _CLAIMS if _is_faster(results, name, key)}
        if figures:
            parts = [f"{_CLAIMS[key]} ({_against(key, *figures[key])})" for key in figures]
            sentences.append(f"*{server_label(name)}* has {' and '.join(parts)} than *{_rival(name)}*")
    return f"{'; '.join(sentences)}." if sentences else "No peer is ahead of hasten in the same precision."


def faster_servers(results: dict[str, Any]) -> str:
    """Return the names of peers that are ahead of hasten in the same precision, by figure."""
    claims = []
    for key, label in {"p50_ms": "p50", "p99_ms": "p99", "per_second": "requests/s"}.items():
        faster = [name for name in results["contenders"] if _is_faster(results, name, key)]
        if servers := sorted({name.partition(",")[0] for name in faster}):
            claims.append(f"{label}: {', '.join(servers)}")
    return f"Ahead of hasten in the same precision – {'; '.join(claims)}." if claims else "No peer is ahead."


def _against(key: str, theirs: float, ours: float) -> str:
    text = duration if key.endswith("_ms") else "{:.0f}".format
    return f"{text(theirs)} against {text(ours)}"


def _rival(peer: str) -> str:
    return HASTEN if peer.endswith(SAME_GRAPH) else HASTEN_FP32


def _pair(results: dict[str, Any], peer: str, key: str) -> tuple[float, float]:
    """Return a figure of a peer and of hasten in the same precision."""
    contenders = results["contenders"]
    return over_rounds(contenders[peer], key), over_rounds(contenders[_rival(peer)], key)


def _is_faster(results: dict[str, Any], peer: str, key: str) -> bool:
    theirs, ours = _pair(results, peer, key)
    return not peer.startswith("hasten") and (theirs > ours if key == "per_second" else theirs < ours)


def server_label(name: str) -> str:
    """Return the name of a contender of the throughput study as the pages show it."""
    if name == HASTEN_CHOSEN:
        return "hasten, default build"
    return name.replace(SAME_GRAPH, ", hasten's graph")


def _configuration(name: str, results: dict[str, Any]) -> str:
    """Return the variant that hasten serves, or the options of a peer."""
    chosen = results["bundle"]["chosen"]
    if name.startswith("hasten"):
        variants = {HASTEN: results.get("graph", chosen), HASTEN_FP32: "onnxruntime-fp32", HASTEN_CHOSEN: chosen}
        return f"`{variants[name]}`"
    options = results["contenders"][name].get("options")
    if options is None:
        return _default_configuration(name)
    backend = "Python backend, " if name.startswith("tritonserver") else ""
    return f"{backend}{_described(options)}"


def _described(options: dict[str, Any]) -> str:
    """Return the options of a peer in words."""
    instances, threads, size = options["instances"], options["threads"], options["max_batch_size"]
    batching = "no batching"
    if size > 1:
        batching = f"batches up to {size}, {'in length buckets' if options['has_buckets'] else 'padded'}"
    return f"{batching}; {_count(instances, 'instance')}, {_count(threads, 'thread')}{' each' if instances > 1 else ''}"


def _default_configuration(name: str) -> str:
    """Return the configuration of a peer in runs before peers were tuned."""
    if name.startswith("FastAPI") and "transformers" not in name:
        return "no batching; 1 instance"
    backend = "Python backend, " if name.startswith("tritonserver") else ""
    return f"{backend}batches up to 16, padded; 1 instance"


def _tuning_table(results: dict[str, Any]) -> list[str]:
    """Return the lines of the table of requests/s by configuration and peer."""
    tuning = results["tuning"]
    configurations = list(dict.fromkeys(_described(row) for rows in tuning["peers"].values() for row in rows))
    cells: dict[str, dict[str, str]] = {name: {} for name in tuning["peers"]}
    for name, rows in tuning["peers"].items():
        best = max((row for row in rows if not row["errors"]), key=lambda row: float(row["per_second"]))
        for row in rows:
            text = f"{row['per_second']:.1f}" if not row["errors"] else f"{row['errors']} errors"
            cells[name][_described(row)] = f"**{text}**" if row is best else text
    header = ["configuration", *(name.removesuffix(STOCK_GRAPH) for name in cells)]
    return [
        f"Tuning of the peers on {machine_and_day(tuning)}: requests/s of each configuration during "
        f"{tuning['seconds']:.0f} s. The table of this machine has the best ones (bold), measured for longer.",
        "",
        *table(header, [[each, *(column.get(each, "") for column in cells.values())] for each in configurations]),
        "",
    ]


def without_tuning(results: dict[str, Any], key: str) -> str:
    """Return a note for runs in which peers ran in configurations of tutorials."""
    if key in results:
        return ""
    return "; peers were not tuned then, and LitServe and Ray Serve wait 1 ms for a batch"


def _rounds(results: dict[str, Any]) -> str:
    """Return the number and length of the rounds, and the number of sentences that accuracy was measured on."""
    row = results["contenders"][HASTEN]
    rounds = f"{len(row['rounds'])} rounds of {results['seconds']:.0f} s"
    return f"{rounds}, accuracy on {row['judged']['rows']} sentences"


def _errors(contender: dict[str, Any]) -> str:
    """Return the number of failed requests, if there are any."""
    failed = sum(each["errors"] for each in contender["rounds"])
    return f" ({_count(failed, 'error')})" if failed else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def over_rounds(contender: dict[str, Any], key: str) -> float:
    """Return the median of a figure over the rounds of a contender."""
    return median(float(each[key]) for each in contender["rounds"])


def machine_and_day(results: dict[str, Any]) -> str:
    """Return the machine and the date of a run, in a few words."""
    return f"{cpu_name(results)}, {day(results)}"
