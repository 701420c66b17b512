"""Settings: which are refused and how the error names them, where values come from, and the environment alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlserver.settings import ModelParameters, ModelSettings
from pydantic import ValidationError

from mlserver_torch_stream.byte_size import format_bytes, parse_bytes
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.settings import KNOWN_KEYS, ResolvedSettings, parse_settings
from tests import markdown

EMBEDDED = "embedded://smollm2-135m-instruct"


def parse(environ: dict[str, str] | None = None, **extra: object) -> ResolvedSettings:
    return parse_settings(EMBEDDED, extra, environ=environ or {})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("dtyp", "auto", "did you mean 'dtype'?"),
        ("max_rows", 3, "unknown key 'max_rows'"),
        ("zzz", 1, "known: model,"),
    ],
)
def test_an_unknown_key_is_named_with_its_nearest_neighbour(key: str, value: object, says: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown key {key!r}") as error:
        parse(**{key: value})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "float8"),
        ("device_map", [1]),
        ("device_map", {"lm_head": None}),
        ("max_memory", "20GiB"),
        ("trust_remote_code", "yes"),
        ("engine", "fast"),
        ("max_model_len", 1),  # no room for a token of an answer
        ("max_num_seqs", "many"),
        ("max_num_seqs", True),
        ("max_queued_requests", -1),
        ("chunked_prefill_size", 1.5),
        ("step_target", 0),
        ("kv_cache_memory", "four gigs"),
        ("kv_cache_memory", 0),
        ("threads", 0),
        ("threads", 100_000),
        ("quantization_config", "4bit"),
        ("default_sampling", [1]),
        ("speculative", 8),
        ("speculative", {}),
        ("speculative", {"prompt_lookup": 0}),
    ],
)
def test_a_wrong_value_names_its_key(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"parameters\.extra\.{key}: "):
        parse(**{key: value})


def test_default_sampling_knows_only_request_parameters_of_the_right_type() -> None:
    assert parse(default_sampling={"temperature": 1, "stop": ["\n"]}).settings.default_sampling["temperature"] == 1
    with pytest.raises(SettingsError, match=r"default_sampling: .*'temprature'; did you mean 'temperature'"):
        parse(default_sampling={"temprature": 1.0})
    with pytest.raises(SettingsError, match=r"default_sampling: top_k: "):
        parse(default_sampling={"top_k": "many"})


def test_speculative_names_the_way_to_draft() -> None:
    speculative = parse(speculative={"prompt_lookup": 8}).settings.speculative
    assert speculative is not None and speculative.prompt_lookup == 8
    with pytest.raises(SettingsError, match=r"speculative: .*'promt_lookup'; did you mean 'prompt_lookup'"):
        parse(speculative={"promt_lookup": 8})


@pytest.mark.parametrize(
    ("text", "count"),
    [(123, 123), ("123", 123), ("4GiB", 4 << 30), ("512MB", 512_000_000), ("1.5 kib", 1536), ("2TiB", 2 << 40)],
)
def test_memory_is_written_as_people_write_it(text: object, count: int) -> None:
    assert parse(kv_cache_memory=text).settings.kv_cache_memory == count


def test_device_numbers_survive_json() -> None:
    settings = parse(max_memory={"0": "1GiB", "cpu": "2GiB"}, device_map={"model": "0", "lm_head": "cpu"}).settings
    assert settings.max_memory == {0: "1GiB", "cpu": "2GiB"}
    assert settings.device_map == {"model": 0, "lm_head": "cpu"}


def test_the_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse().settings.max_queued_requests = 3  # type: ignore[misc]


def test_a_key_beside_extra_is_sent_to_its_place() -> None:
    with pytest.raises(SettingsError, match=r"parameters\.device_map: belongs in parameters\.extra\.device_map"):
        parse_settings(EMBEDDED, {}, {"device_map": "auto"}, environ={})
    with pytest.raises(SettingsError, match=r"parameters: unknown key 'extras'; did you mean 'extra'"):
        parse_settings(EMBEDDED, {}, {"extras": {}}, environ={})


@pytest.mark.parametrize("key", KNOWN_KEYS)
def test_a_variable_that_nobody_reads_is_an_error(key: str) -> None:
    with pytest.raises(SettingsError, match=f"MLSERVER_MODEL_{key.upper()} is not read"):
        parse({f"MLSERVER_MODEL_{key.upper()}": "1"})


def test_mlservers_own_variables_and_foreign_ones_are_no_error() -> None:
    parse({"MLSERVER_MODEL_NAME": "m", "MLSERVER_MODEL_SERVICE_HOST": "10.0.0.1", "DTYPE": "x"})


def test_lines_of_a_dotenv_file_are_no_misplaced_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("# mine\nexport SECRET=1\nTHREADS=9\nMLSERVER_MODEL_NAME=m\nMLSERVER_HTTP_PORT=1\n")
    strays = ModelParameters(uri=EMBEDDED).model_extra or {}
    assert strays  # MLServer swallows them: the reason for this test
    parse_settings(EMBEDDED, {}, strays, environ={})

    (tmp_path / ".env").write_text("MLSERVER_MODEL_DTYPE=float32\n")
    strays = ModelParameters(uri=EMBEDDED).model_extra or {}
    with pytest.raises(SettingsError, match=r"belongs in parameters\.extra\.dtype"):
        parse_settings(EMBEDDED, {}, strays, environ={})


def test_each_value_knows_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = {
        "implementation": "mlserver_torch_stream.TorchStreamRuntime",
        "parameters": {"uri": EMBEDDED, "extra": {"max_queued_requests": 7, "max_memory": {"0": "1GiB"}, "threads": 1}},
    }
    (tmp_path / "model-settings.json").write_text(json.dumps(file))
    extra = {"dtype": "float32", "max_memory": {"cpu": "2GiB"}, "threads": 2}
    environ = {"MLSERVER_MODEL_EXTRA": json.dumps(extra), "MLSERVER_TORCH_STREAM_CACHE": str(tmp_path)}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    parameters = ModelSettings.parse_file(str(tmp_path / "model-settings.json")).parameters
    assert parameters is not None

    resolved = parse_settings(parameters.uri, parameters.extra, parameters.model_extra, str(tmp_path), environ)

    assert resolved.settings.threads == 1, "the file beats the environment"
    assert resolved.settings.max_memory == {0: "1GiB", "cpu": "2GiB"}, "MLServer merges objects"
    expected = {
        "model": "parameters.uri in model-settings.json",
        "max_queued_requests": "model-settings.json",
        "max_memory": "model-settings.json and MLSERVER_MODEL_EXTRA",
        "threads": "model-settings.json",
        "dtype": "MLSERVER_MODEL_EXTRA",
        "cache_dir": "MLSERVER_TORCH_STREAM_CACHE",
        "max_model_len": "default",
    }
    assert {key: resolved.origins[key] for key in expected} == expected


def test_the_environment_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    environ = {"MLSERVER_MODEL_URI": str(tmp_path), "MLSERVER_MODEL_EXTRA": '{"max_queued_requests": 3}'}
    resolved = parse_settings(environ=environ)  # as with ModelSettings.parameters of None
    assert (resolved.source.kind, resolved.source.location) == ("folder", str(tmp_path))
    assert resolved.settings.max_queued_requests == 3
    assert resolved.origins["model"] == "MLSERVER_MODEL_URI"
    assert resolved.origins["max_queued_requests"] == "MLSERVER_MODEL_EXTRA"


@pytest.mark.parametrize(("text", "says"), [("{", "not JSON"), ("[1]", "must be a JSON object")])
def test_a_broken_variable_is_named(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=f"MLSERVER_MODEL_EXTRA: {says}"):
        parse_settings(EMBEDDED, environ={"MLSERVER_MODEL_EXTRA": text})


def test_no_model_at_all_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match=r"set parameters\.uri .*MLSERVER_MODEL_URI"):
        parse_settings(environ={})


def test_a_chat_template_may_be_a_file_beside_the_settings(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    resolved = parse_settings(EMBEDDED, {"chat_template": "chat.jinja"}, source_folder=str(tmp_path), environ={})
    assert resolved.settings.chat_template == "{{ messages }}"
    assert parse(chat_template="{{ inline }}").settings.chat_template == "{{ inline }}"
    with pytest.raises(SettingsError, match=r"chat_template: no such file: nowhere\.jinja"):
        parse(chat_template="nowhere.jinja")


def test_the_settings_files_that_we_ship_are_valid() -> None:
    root = Path(__file__).parents[2]
    files = list((root / "model-settings").glob("*/model-settings.json"))
    assert files
    for file in files:
        parameters = json.loads(file.read_text())["parameters"]
        parse_settings(parameters["uri"], parameters.get("extra", {}), {}, str(file.parent), {})
    server = json.loads((root / "settings.json").read_text())
    assert server["parallel_workers"] == 0
    assert server["gzip_enabled"] is False
    assert server["debug"] is False
    assert not [key for key in server if "port" in key], "a port in the file would beat its variable"


def test_strings_are_read_as_what_a_key_wants() -> None:
    """Seldon's Model.spec.parameters can contain only strings."""
    given = {
        "model": "embedded://smollm2-135m-instruct",
        "max_model_len": "2048",
        "trust_remote_code": "true",
        "request_timeout": "2.5",
        "kv_cache_memory": "1GiB",
        "default_sampling": '{"temperature": 0.5}',
        "device_map": '{"": "cpu"}',
        "dtype": "float32",
    }
    settings = parse_settings(extra=given, environ={}).settings
    assert (settings.max_model_len, settings.trust_remote_code, settings.request_timeout) == (2048, True, 2.5)
    assert (settings.kv_cache_memory, settings.default_sampling) == (2**30, {"temperature": 0.5})
    assert (settings.device_map, settings.dtype) == ({"": "cpu"}, "float32")
    assert (
        parse_settings(extra={"model": given["model"], "device_map": "auto"}, environ={}).settings.device_map == "auto"
    )
    with pytest.raises(SettingsError, match="max_model_len"):
        parse_settings(extra={**given, "max_model_len": "many"}, environ={})


def test_a_tokenizer_that_is_neither_a_folder_nor_a_hub_id_is_named() -> None:
    with pytest.raises(SettingsError, match=r"extra\.tokenizer: no such folder: /nowhere; write a hub id"):
        parse_settings(EMBEDDED, {"tokenizer": "/nowhere"}, environ={})
    for hub_id in ("gpt2", "hf://org/name"):
        assert parse_settings(EMBEDDED, {"tokenizer": hub_id}, environ={}).settings.tokenizer in ("gpt2", "org/name")


@pytest.mark.parametrize("value", [0, -1.0, "soon", None])
def test_the_time_of_a_step_is_a_positive_number_of_seconds(value: object) -> None:
    with pytest.raises(SettingsError, match=r"parameters\.extra\.step_timeout"):
        parse_settings(EMBEDDED, {"step_timeout": value}, environ={})


def test_the_default_time_of_a_step_is_for_the_slowest_that_is_not_broken() -> None:
    """At 50 GFLOP/s, a chunk takes 1434 s in a model of 70B parameters."""
    settings = parse_settings(EMBEDDED, {}, environ={}).settings
    assert settings.step_timeout >= 2 * 70e9 * settings.chunked_prefill_size / 50e9


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 bytes"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**29, "1.5 GiB")]
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert format_bytes(count) == words
    assert parse_bytes(words.removesuffix(" bytes")) == count


def test_on_gpus_a_step_is_larger_unless_the_settings_say_otherwise() -> None:
    ours = parse_settings(EMBEDDED, {"chunked_prefill_size": 64}, environ={}).settings
    assert (ours.max_num_seqs, ours.chunked_prefill_size) == (32, 64)
    assert (ours.on_gpus().max_num_seqs, ours.on_gpus().chunked_prefill_size) == (256, 64)
    assert EngineSettings().on_gpus().chunked_prefill_size == 2048


def test_the_page_on_engines_says_what_each_key_means_to_vllm() -> None:
    named = " ".join(row[0] for row in markdown.table("docs/engines.md", "Settings"))
    assert [key for key in KNOWN_KEYS if f"`{key}`" not in named] == []
