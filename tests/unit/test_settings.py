"""Every option of `hasten serve` from the command line, the environment and a file, in that order."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hasten.cli import parser_for
from hasten.cli import serve as command
from hasten.core.errors import PlanError
from hasten.server.settings import OPTIONS, Replicas, Settings, flag, unknown_variables

# For each kind of value three that differ from each other and from all defaults, and what they are read as.
VALUES: dict[str, list[tuple[str, object]]] = {
    "ADDRESS": [("::1", "::1"), ("10.0.0.1", "10.0.0.1"), ("0.0.0.0", "0.0.0.0")],
    "N": [("3", 3), ("5", 5), ("7", 7)],
    "US": [("300", 300), ("500", 500), ("0", 0)],
    "NAME": [("onnxruntime-fp32", "onnxruntime-fp32"), ("openvino-bf16", "openvino-bf16"), ("torch", "torch")],
    "TIME": [("3s", 3.0), ("2m", 120.0), ("0.5", 0.5)],
    "SIZE": [("3KB", 3072), ("2MB", 2**21), ("1gb", 2**30)],
    "FILE": [("one", Path("one")), ("two", Path("two")), ("three", Path("three"))],
    "FORM": [("json", "json"), ("text", "text"), ("json", "json")],
    "ENGINE": [("ray", "ray"), ("here", "here"), ("ray", "ray")],
    "COUNT": [("auto", Replicas(1, None)), ("2", Replicas(2, 2)), ("1-8", Replicas(1, 8))],
    "SHARE": [("0.5", 0.5), ("1", 1.0), ("0.25", 0.25)],
    "": [("yes", True), ("no", False), ("1", True)],
}


def parsed(*words: str) -> dict[str, Any]:
    return vars(parser_for("serve", command).parse_intermixed_args(["bundle", *words]))


def on_the_line(name: str, text: str) -> list[str]:
    if not OPTIONS[name].is_flag:
        return [flag(name), text]
    return [flag(name) if text in ("yes", "1") else flag(f"no_{name}")]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_line_comes_before_the_environment_and_that_before_the_file(name: str, tmp_path: Path) -> None:
    (first, on_line), (second, in_environment), (third, in_file) = VALUES[OPTIONS[name].metavar]
    file = tmp_path / "serve.toml"
    file.write_text(f'{name} = "{third}"\n')
    environment = {f"HASTEN_{name.upper()}": second}
    line = parsed(*on_the_line(name, first))
    assert getattr(Settings.read(line, environment, file), name) == on_line
    assert getattr(Settings.read(parsed(), environment, file), name) == in_environment
    assert getattr(Settings.read(parsed(), {}, file), name) == in_file
    assert getattr(Settings.read(parsed(), {}, None), name) == getattr(Settings(), name)


def test_every_field_but_the_bundles_is_an_option() -> None:
    assert ["bundles", *OPTIONS] == [field.name for field in dataclasses.fields(Settings)]


def test_toml_has_types_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('bundles = ["a", "b"]\nport = 9000\ngrpc = false\ndrain = 2.5\nmax_body = "1MB"\n')
    found = Settings.read({}, {}, file)
    assert (found.bundles, found.port, found.grpc, found.drain, found.max_body) == (("a", "b"), 9000, False, 2.5, 2**20)


def test_the_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    for name, port in (("one", 1), ("two", 2)):
        (tmp_path / name).write_text(f"port = {port}\n")
    environment = {"HASTEN_CONFIG": str(tmp_path / "one")}
    assert Settings.read(parsed(), environment).port == 1
    assert Settings.read(parsed(), environment, tmp_path / "two").port == 2


def test_bundles_from_the_environment() -> None:
    assert Settings.read({}, {"HASTEN_BUNDLES": "a 'with space'"}).bundles == ("a", "with space")
    assert Settings.read(parsed(), {"HASTEN_BUNDLES": "a"}).bundles == ("bundle",)
    for environment, wrong in (({}, "nothing to serve"), ({"HASTEN_BUNDLES": "'a"}, "HASTEN_BUNDLES")):
        with pytest.raises(PlanError, match=wrong):
            Settings.read({}, environment)


@pytest.mark.parametrize(
    ("words", "environment", "content", "wrong"),
    [
        (["--port", "70000"], {}, "", "--port: there is no port 70000"),
        (["--max-queue", "0"], {}, "", "--max-queue: it must be at least 1"),
        (["--max-body", "0"], {}, "", "--max-body: it must be at least 1"),
        (["--drain", "soon"], {}, "", "--drain: 'soon' is not a duration"),
        (["--replicas", "some"], {}, "", r"--replicas: 'some' is not a whole number \(write 2, 1-8 or auto\)"),
        (["--replicas", "0-2"], {}, "", "--replicas: it must be at least 1"),
        (["--replicas", "3-2"], {}, "", "--replicas: '3-2' ends before it begins"),
        (["--gpus", "0"], {}, "", "--gpus: '0' is not a share of a GPU"),
        (["--gpus", "2"], {}, "", "'2' is not a share of a GPU, and a replica computes on one"),
        ([], {"HASTEN_GRPC": "maybe"}, "", "HASTEN_GRPC: 'maybe' is neither"),
        ([], {"HASTEN_LOG": "xml"}, "", "HASTEN_LOG: 'xml' is none of text, json"),
        ([], {}, "max_body = '1.5MB'", "max_body in .*serve.toml: '1.5MB' is not a size"),
        ([], {}, "port = 80.5", "port in .*serve.toml: '80.5' is not a whole number"),
        ([], {}, "host = ['a', 'b']", "host in .*serve.toml: it is one value, not list"),
        ([], {}, "max_queu = 3", "sets 'max_queu', which is no option: did you mean 'max_queue'"),
        ([], {}, "[limits]\nmax_queue = 3", "sets 'limits', which is no option"),
        ([], {}, "port = ", "serve.toml is not TOML"),
        ([], {}, "bundles = 'a'", "bundles in .*serve.toml is not a list"),
    ],
)
def test_an_error_names_its_source(
    words: list[str], environment: dict[str, str], content: str, wrong: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(content)
    given = parsed(*words) | ({"bundles": []} if "bundles" in content else {})
    with pytest.raises(PlanError, match=wrong):
        Settings.read(given, environment, file)


def test_times_have_units() -> None:
    line = parsed("--timeout", "500ms", "--drain", "1m", "--max-wait", "2ms")
    found = Settings.read(line, {"HASTEN_READ_TIMEOUT": "2s"}, None)
    assert (found.timeout, found.drain, found.max_wait, found.read_timeout) == (0.5, 60.0, 2000, 2.0)
    assert Settings.read(parsed("--max-wait", "250us"), {}).max_wait == 250


def test_there_is_no_port_after_the_last() -> None:
    with pytest.raises(PlanError, match="no port after 65535 for gRPC"):
        Settings.read(parsed("--port", "65535"), {})
    for words in (["--grpc-port", "1"], ["--no-grpc"]):
        assert Settings.read(parsed("--port", "65535", *words), {}).port == 65535


def test_two_protocols_do_not_share_a_port() -> None:
    with pytest.raises(PlanError, match=r"HTTP and gRPC cannot share port 9000 \(--grpc-port takes another\)"):
        Settings.read(parsed("--port", "9000", "--grpc-port", "9000"), {})
    for words in (["--port", "0", "--grpc-port", "0"], ["--port", "9000", "--grpc-port", "9000", "--no-grpc"]):
        Settings.read(parsed(*words), {})


def test_variables_that_nothing_reads_are_told() -> None:
    known = ("CACHE", "API_KEYS", "REAL_MODELS", "TRITON_ENV", "MAX_QUEUE", "SERVICE_HOST", "PORT_8000_TCP")
    assert unknown_variables({f"HASTEN_{name}": "1" for name in known} | {"PATH": "x"}) == []
    (wrong,) = unknown_variables({"HASTEN_MAX_QUEU": "3"})
    assert wrong == "HASTEN_MAX_QUEU is set, and is no option: did you mean 'HASTEN_MAX_QUEUE'?"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no settings at .*nothing.toml: No such file .*\(--config, or HASTEN_CONFIG"):
        Settings.read(parsed(), {}, tmp_path / "nothing.toml")


def test_help_tells_of_each_option_and_its_default() -> None:
    text = " ".join(parser_for("serve", command).format_help().split())
    for name in OPTIONS:
        assert flag(name) in text
    for expected in ("(default: 8000)", "(default: 32MB)", "(default: 30s)", "(default: 127.0.0.1)", "HASTEN_"):
        assert expected in text
    assert "None" not in text


def test_a_supervised_server_is_given_the_same_words() -> None:
    words = ["--port", "0", "--no-grpc", "--config", "serve.toml", "--supervise", "--json", "--drain", "2s"]
    before = parser_for("serve", command).parse_intermixed_args(["one", "two", *words])
    after = parser_for("serve", command).parse_intermixed_args(command._words(before))
    assert after == before
    assert argparse.Namespace(**{**vars(before), "supervise": False}) == parser_for(
        "serve", command
    ).parse_intermixed_args([*command._words(before), "--no-supervise"])
