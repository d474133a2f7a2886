"""Each option of `hasten serve` from the command line, the environment and a file, in this order."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hasten.cli import parser_for
from hasten.cli import serve as command
from hasten.core.errors import PlanError
from hasten.core.options import flag
from hasten.server.settings import OPTIONS, Replicas, Settings, unknown_variables

# For each metavar three texts that differ from each other and from the defaults, and their values.
VALUES: dict[str, list[tuple[str, object]]] = {
    "ADDRESS": [("::1", "::1"), ("10.0.0.1", "10.0.0.1"), ("0.0.0.0", "0.0.0.0")],
    "N": [("3", 3), ("5", 5), ("7", 7)],
    "US": [("300", 300), ("500", 500), ("0", 0)],
    "NAME": [("onnxruntime-fp32", "onnxruntime-fp32"), ("openvino-bf16", "openvino-bf16"), ("torch", "torch")],
    "TIME": [("3s", 3.0), ("2m", 120.0), ("0.5", 0.5)],
    "SIZE": [("3KB", 3072), ("2MB", 2**21), ("1gb", 2**30)],
    "FILE": [("one", Path("one")), ("two", Path("two")), ("three", Path("three"))],
    "FORMAT": [("json", "json"), ("text", "text"), ("json", "json")],
    "RUNNER": [("ray", "ray"), ("local", "local"), ("ray", "ray")],
    "COUNT": [("auto", Replicas(1, None)), ("2", Replicas(2, 2)), ("1-8", Replicas(1, 8))],
    "N|auto": [("3", 3), ("5", 5), ("7", 7)],
    "FRACTION": [("0.5", 0.5), ("1", 1.0), ("0.25", 0.25)],
    "": [("yes", True), ("no", False), ("1", True)],
}


def parsed(*words: str) -> dict[str, Any]:
    return vars(parser_for("serve", command).parse_intermixed_args(["bundle", *words]))


def arguments_for(name: str, text: str) -> list[str]:
    if not OPTIONS[name].is_flag:
        return [flag(name), text]
    return [flag(name) if text in ("yes", "1") else flag(f"no_{name}")]


@pytest.mark.parametrize("name", OPTIONS)
def test_arguments_precede_environment_and_environment_precedes_file(name: str, tmp_path: Path) -> None:
    (first, on_line), (second, in_environment), (third, in_file) = VALUES[OPTIONS[name].metavar]
    file = tmp_path / "serve.toml"
    file.write_text(f'{name} = "{third}"\n')
    environment = {f"HASTEN_{name.upper()}": second}
    line = parsed(*arguments_for(name, first))
    assert getattr(Settings.read(line, environment, file), name) == on_line
    assert getattr(Settings.read(parsed(), environment, file), name) == in_environment
    assert getattr(Settings.read(parsed(), {}, file), name) == in_file
    assert getattr(Settings.read(parsed(), {}, None), name) == getattr(Settings(), name)


def test_all_fields_but_bundles_are_options() -> None:
    assert ["bundles", *OPTIONS] == [field.name for field in dataclasses.fields(Settings)]


def test_toml_values_may_be_numbers_and_booleans(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('bundles = ["a", "b"]\nport = 9000\ngrpc = false\ndrain_timeout = 2.5\nmax_body = "1MB"\n')
    settings = Settings.read({}, {}, file)
    assert (settings.bundles, settings.port, settings.grpc) == (("a", "b"), 9000, False)
    assert (settings.drain_timeout, settings.max_body) == (2.5, 2**20)


def test_environment_may_name_the_file(tmp_path: Path) -> None:
    for name, port in (("one", 1), ("two", 2)):
        (tmp_path / name).write_text(f"port = {port}\n")
    environment = {"HASTEN_CONFIG": str(tmp_path / "one")}
    assert Settings.read(parsed(), environment).port == 1
    assert Settings.read(parsed(), environment, tmp_path / "two").port == 2


def test_bundles_are_read_from_the_environment() -> None:
    assert Settings.read({}, {"HASTEN_BUNDLES": "a 'with space'"}).bundles == ("a", "with space")
    assert Settings.read(parsed(), {"HASTEN_BUNDLES": "a"}).bundles == ("bundle",)
    for environment, message in (({}, "nothing to serve"), ({"HASTEN_BUNDLES": "'a"}, "HASTEN_BUNDLES")):
        with pytest.raises(PlanError, match=message):
            Settings.read({}, environment)


@pytest.mark.parametrize(
    ("words", "environment", "content", "message"),
    [
        (["--port", "70000"], {}, "", "--port: 70000 is not a port"),
        (["--max-queue", "0"], {}, "", "--max-queue: the value must be at least 1"),
        (["--max-body", "0"], {}, "", "--max-body: the value must be at least 1"),
        (["--drain-timeout", "soon"], {}, "", "--drain-timeout: 'soon' is not a duration"),
        (["--replicas", "some"], {}, "", r"--replicas: 'some' is not a whole number \(write 2, 1-8 or auto\)"),
        (["--replicas", "0-2"], {}, "", "--replicas: the value must be at least 1"),
        (["--replicas", "3-2"], {}, "", "--replicas: '3-2' is not a range"),
        (["--workers", "many"], {}, "", r"--workers: 'many' is not a whole number \(write 4 or auto\)"),
        (["--workers", "0"], {}, "", "--workers: the value must be at least 1"),
        (["--gpus", "0"], {}, "", "--gpus: '0' is not a fraction of a GPU"),
        (["--gpus", "2"], {}, "", "'2' is not a fraction of a GPU: a replica uses at most one"),
        ([], {"HASTEN_GRPC": "maybe"}, "", "HASTEN_GRPC: 'maybe' is neither"),
        ([], {"HASTEN_LOG_FORMAT": "xml"}, "", "HASTEN_LOG_FORMAT: 'xml' is not one of text, json"),
        ([], {}, "max_body = '1.5MB'", "max_body in .*serve.toml: '1.5MB' is not a size"),
        ([], {}, "port = 80.5", "port in .*serve.toml: '80.5' is not a whole number"),
        ([], {}, "host = ['a', 'b']", "host in .*serve.toml: expected a single value, not list"),
        ([], {}, "max_queu = 3", "sets 'max_queu', which is not an option: did you mean 'max_queue'"),
        ([], {}, "[limits]\nmax_queue = 3", "sets 'limits', which is not an option"),
        ([], {}, "port = ", "serve.toml is not TOML"),
        ([], {}, "bundles = 'a'", "bundles in .*serve.toml is not a list"),
    ],
)
def test_errors_name_their_source(
    words: list[str], environment: dict[str, str], content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(content)
    arguments = parsed(*words) | ({"bundles": []} if "bundles" in content else {})
    with pytest.raises(PlanError, match=message):
        Settings.read(arguments, environment, file)


def test_times_may_have_units() -> None:
    line = parsed("--timeout", "500ms", "--drain-timeout", "1m", "--max-batch-delay", "2ms")
    settings = Settings.read(line, {"HASTEN_READ_TIMEOUT": "2s"}, None)
    assert (settings.timeout, settings.drain_timeout, settings.read_timeout) == (0.5, 60.0, 2.0)
    assert settings.max_batch_delay == 2000
    assert Settings.read(parsed("--max-batch-delay", "250us"), {}).max_batch_delay == 250


def test_last_port_leaves_none_for_grpc() -> None:
    with pytest.raises(PlanError, match="no port after 65535 for gRPC"):
        Settings.read(parsed("--port", "65535"), {})
    for words in (["--grpc-port", "1"], ["--no-grpc"]):
        assert Settings.read(parsed("--port", "65535", *words), {}).port == 65535


def test_http_and_grpc_cannot_share_a_port() -> None:
    with pytest.raises(PlanError, match=r"HTTP and gRPC cannot share port 9000 \(choose another --grpc-port\)"):
        Settings.read(parsed("--port", "9000", "--grpc-port", "9000"), {})
    for words in (["--port", "0", "--grpc-port", "0"], ["--port", "9000", "--grpc-port", "9000", "--no-grpc"]):
        Settings.read(parsed(*words), {})


def test_unknown_variables_are_reported() -> None:
    known = ("CACHE", "API_KEYS", "REAL_MODELS", "TRITON_ENV", "MAX_QUEUE", "SERVICE_HOST", "PORT_8000_TCP")
    assert unknown_variables({f"HASTEN_{name}": "1" for name in known} | {"PATH": "x"}) == []
    (message,) = unknown_variables({"HASTEN_MAX_QUEU": "3"})
    assert message == "HASTEN_MAX_QUEU is set but is not an option: did you mean 'HASTEN_MAX_QUEUE'?"


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"cannot read settings from .*nothing.toml: No such file .*\(--config, or HASTEN_CONFIG"
    ):
        Settings.read(parsed(), {}, tmp_path / "nothing.toml")


def test_help_lists_each_option_and_its_default() -> None:
    text = " ".join(parser_for("serve", command).format_help().split())
    for name in OPTIONS:
        assert flag(name) in text
    for expected in ("(default: 8000)", "(default: 4MB)", "(default: 30s)", "(default: 127.0.0.1)", "HASTEN_"):
        assert expected in text
    assert "None" not in text
