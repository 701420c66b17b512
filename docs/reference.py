"""Writes the reference into the pages, from the code: settings, parameters, endpoints, metrics, errors and commands.

All descriptions come from where the code declares things. ``make docs-reference`` runs this; with ``--check`` it names
the pages that differ from the code, and writes nothing.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_DOCS = Path(__file__).parent
_PACKAGE = "mlserver_torch_stream"
_MADE = "`make docs-reference` writes this page from the code."
Rows = list[tuple[str, ...]]


# Each group is a table of settings.md; groups and names are in the order in which an operator needs them.
MODEL_SETTINGS = {
    "the model": "model revision dtype cache_dir trust_remote_code allow_pickle",
    "limits": "max_num_seqs max_model_len kv_cache_memory prefix_cache_memory max_queued_requests max_queued_tokens "
    "queue_timeout request_timeout step_timeout",
    "speed": "threads weights quantization_config chunked_prefill_size step_target stream_interval stream_interval_ms "
    "speculative engine fast_path attn_implementation",
    "several devices": "device_map max_memory offload_folder pipeline tensor_parallel_size replicas",
    "prompts and answers": "default_sampling tokenizer chat_template tool_parser reasoning_parser",
    "vLLM": "vllm vllm_python lora_modules",
}
SERVER_SETTINGS = {
    "security": "api_keys_file metrics_without_key repository_without_key tls_cert_file tls_key_file "
    "tls_client_ca_file model_roots",
    "limits": "max_body_bytes stalled_reader_timeout piece_timeout sse_ping_interval",
    "start and shutdown": "skip_failed_models drain_delay drain_grace",
    "logs and metrics": "log_requests log_prompts vllm_metric_names torchserve_metric_names",
    "APIs": "page model_aliases unknown_parameters batch_store batch_max_file_bytes grpc_port_triton "
    "grpc_port_torchserve",
    "management": "management_port_torchserve management_address management_token management_token_file "
    "disable_token_authorization enable_model_api model_store torchserve_config allowed_urls",
    "vLLM": "vllm_python runtime_lora_updating lora_root",
}


def model_settings(group: str) -> Rows:
    from mlserver_torch_stream.engine_settings import EngineSettings

    rows = {name: (_code(name), _default(field), text) for name, field, text in _fields(EngineSettings)}
    return [("key", "default", "meaning"), *chosen(rows, MODEL_SETTINGS, group)]


def server_settings(group: str) -> Rows:
    from mlserver_torch_stream.server.options import PREFIX, ServerOptions

    fields = _fields(ServerOptions)
    rows = {name: (_code(f"{PREFIX}{name.upper()}"), _default(field), text) for name, field, text in fields}
    return [("variable", "default", "meaning"), *chosen(rows, SERVER_SETTINGS, group)]


def chosen(rows: Mapping[str, tuple[str, ...]], groups: Mapping[str, str], group: str) -> Rows:
    """Returns the rows of a group.

    Raises ValueError if a setting is in no group, or a group names an unknown setting.
    """
    wrong = rows.keys() ^ " ".join(groups.values()).split()
    if wrong:
        raise ValueError(f"docs/reference.py: each setting must be in one group: {', '.join(sorted(wrong))}")
    return [rows[name] for name in groups[group].split()]


def request_parameters() -> Rows:
    from mlserver_torch_stream.protocol.parameters import PARAMETERS

    rows = [(_code(each.name), _codes(each.aliases), "T" if each.tensor else "", each.meaning) for each in PARAMETERS]
    return [("parameter", "aliases", "T", "meaning"), *rows]


def parameters_of_other_servers() -> Rows:
    from mlserver_torch_stream.protocol.values import METADATA, UNIMPLEMENTED

    refused = [
        (_code(name), "refused", " and ".join(_code(json.dumps(each)) for each in harmless))
        for name, harmless in UNIMPLEMENTED.items()
    ]
    rows = [*refused, *((_code(name), "ignored", "") for name in METADATA)]
    return [("parameter", "treatment", "refused except for"), *rows]


def metrics() -> Rows:
    from mlserver_torch_stream.engine.shared_pool import ProcessResources
    from mlserver_torch_stream.server.observability.metrics import EngineMetrics, TokenMetrics, WeightsMetrics
    from mlserver_torch_stream.server.observability.request_observer import RequestMetrics

    families = [
        *WeightsMetrics(ProcessResources()).collect(),
        *TokenMetrics(EngineMetrics(), RequestMetrics()).collect(),
    ]
    rows = []
    for each in families:
        name = f"{each.name}_total" if each.type == "counter" else each.name
        rows.append((_code(name), each.type, _codes(getattr(each, "_labelnames", ())), each.documentation))
    return [("metric", "type", "labels", "meaning"), *rows]


# The modules whose errors an endpoint may answer, and whether gRPC has such endpoints. What only TorchServe's endpoints
# answer is in docs/torchserve.md.
_ERRORS = {
    "errors": True,
    "server.rest.connection": True,
    "handlers.pool.handler_request": True,
    "server.rest.batch_routes": False,
    "cloud.batches.batch_store": False,
}


def errors() -> Rows:
    """Returns each class of error with its REST status, and the gRPC code that MLServer derives from it, if any."""
    from mlserver_torch_stream.errors import RequestError

    rows: Rows = []
    for name, over_grpc in _ERRORS.items():
        for each in vars(import_module(f"{_PACKAGE}.{name}")).values():
            if not (inspect.isclass(each) and issubclass(each, RequestError) and each.__module__.endswith(name)):
                continue
            if each is not RequestError:
                rest = f"{each.status}{' and `Retry-After`' if each.retry_after else ''}"
                rows.append((rest, _summary(each), _grpc(each.status) if over_grpc else "", _codes([each.code])))
    return [("REST", "error", "gRPC", "OpenAI's `code`"), *sorted(rows, key=lambda row: row[0])]


def _grpc(status: int) -> str:
    from mlserver.grpc.utils import STATUS_CODE_MAPPING

    from mlserver_torch_stream.server.status import StreamStatus, extend_grpc_codes

    if status == 401:
        return "UNAUTHENTICATED"  # server/access/guards.py refuses the call before MLServer sees it
    extend_grpc_codes()
    unary, stream = (STATUS_CODE_MAPPING.get(kind(status)) for kind in (int, StreamStatus))
    return f"{unary.name if unary else ''}{f'; {stream.name} on a stream' if stream else ''}"


# The sections of docs/reference/endpoints.md; a path stands in the first one whose pattern it matches.
_SECTIONS = (
    (r"/v1/(files|batches).*", "Files and batches", "../batches.md"),
    (r"/v1/models/.*:(predict|explain)|/(predictions|explanations)/.*|/(\{model_name\}|models)/.*|/ping|/api-.*",
     "TorchServe's inference API", "../torchserve.md#torchserves-own-paths"),
    (r"/v1/messages.*", "Anthropic's API", "../anthropic.md"),
    (r"/v1/.*", "OpenAI's API", "../openai.md"),
    (r"/(de)?tokenize", "Tokens, as vLLM has them", "../openai.md#tokens"),
    (r"/v2/models(/[^/]+)?/(stats|config)", "Triton's configuration and statistics", "../triton.md#calls"),
    (r"/v2/models/[^/]+/(infer|generate)(_stream)?", "V2 protocol and flat JSON", "../protocol.md"),
    (r"/health|/v2/health/.*|/v2/models/[^/]+/ready", "Health", "../operations.md#health"),
    (r"/metrics", "Metrics", "../operations.md#metrics"),
    (r"/|/page/.*", "The page, and TorchServe's description of the server", "../page.md"),
    (r"/v2.*|/openapi.json", "Metadata, documents and the repository of MLServer", "../protocol.md#endpoints"),
)  # fmt: skip
_VERSION, _OPENAI = "/versions/{model_version}", "/openai"


def endpoints() -> str:
    """Returns the REST endpoints of a server with all features enabled."""
    from mlserver_torch_stream.server.management.management_app import document

    sections: dict[tuple[str, str], Rows] = {(title, page): [] for _, title, page in _SECTIONS}
    for path, methods in sorted(_rest_paths().items()):
        bare = path.removeprefix(_OPENAI).replace(_VERSION, "")
        title, page = next((title, page) for pattern, title, page in _SECTIONS if re.fullmatch(pattern, bare))
        sections[title, page].append((_code(path), ", ".join(sorted(methods)) or "any"))
    management = [
        (_code(path), ", ".join(sorted(each.upper() for each in methods if each != "parameters")))
        for path, methods in document()["paths"].items()
    ]
    sections["TorchServe's management API, on a port of its own", "../torchserve.md#the-management-api"] = management
    return "\n".join(
        f"## {title}\n\nSee [{page.removeprefix('../')}]({page}).\n\n{_table([('path', 'methods'), *rows])}"
        for (title, page), rows in sections.items()
    )


def _rest_paths() -> dict[str, set[str]]:
    """Returns each path of the REST port with its methods; no methods mean any method."""
    from mlserver.handlers import DataPlane, ModelRepositoryHandlers
    from mlserver.registry import MultiModelRegistry
    from mlserver.repository import ModelRepositoryFactory
    from mlserver.rest.server import RESTServer
    from mlserver.settings import Settings

    from mlserver_torch_stream.protocol.spellings import REST_ROUTES
    from mlserver_torch_stream.server.extension import add_routes
    from mlserver_torch_stream.server.host import ServerHost
    from mlserver_torch_stream.server.options import ServerOptions
    from mlserver_torch_stream.server.rest import endpoints
    from mlserver_torch_stream.server.state import server_state

    settings, registry = Settings(parallel_workers=0), MultiModelRegistry()
    repository = ModelRepositoryHandlers(ModelRepositoryFactory.resolve_model_repository(settings), registry)
    host = ServerHost(RESTServer(settings, DataPlane(settings, registry), repository))
    state, options = server_state(), ServerOptions(page=True)
    add_routes(host, state, options)
    endpoints.add_endpoints(host, state.lifecycle, options, REST_ROUTES)
    found: dict[str, set[str]] = {}
    for route in host.router.routes:
        path = re.sub(r"^/page/.*", "/page/{file}", re.sub(r":path\}", "}", route.path))
        if path != "/v1/{rest}" and path != "/openai/v1/{rest}":
            found.setdefault(path, set()).update(set(route.methods or ()) - {"HEAD"})
    return found


def commands() -> str:
    """Returns the options of each command, as its parser declares them."""
    from mlserver_torch_stream import cli
    from mlserver_torch_stream.cli.cloud_options import parser as cloud

    parsers = {name: import_module(f"{cli.__name__}.{module}") for name, (module, _) in cli._COMMANDS.items()}
    made = {name: cloud() if name == "cloud" else module._parser() for name, module in parsers.items()}
    parts: list[str] = []
    for name, parser in made.items():
        twin = parser.prog.removeprefix("mlserver-torch-stream ")
        known = twin != name and twin in made
        alike = [f"## {name}\n\nThe same as [{twin}](#{twin}).\n"]
        parts += alike if known else _command(parser, cli._COMMANDS[name][1], name)
    return "\n".join(parts)


def _command(parser: argparse.ArgumentParser, line: str, name: str) -> Iterator[str]:
    inner = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    about = parser.description or f"{line[0].upper()}{line[1:]}."
    yield f"## {name}\n\n{about}{f' {parser.epilog}' if parser.epilog else ''}\n"
    for each in inner:
        lines = {choice.dest: choice.help or "" for choice in each._choices_actions}
        for word, command in each.choices.items():
            yield from _command(command, lines[word], f"{name} {word}")
    rows = [_option(parser, each) for each in parser._actions if each not in inner and each.dest != "help"]
    if rows:
        yield _table([("argument", "meaning"), *rows])


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, ...]:
    formatter = parser._get_formatter()
    values = (
        formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
        if action.option_strings
        else ""
    )
    if action.nargs == 0:
        values = ""
    names = [f"{name} {values}".strip() for name in action.option_strings] or [str(action.metavar or action.dest)]
    return _codes(names), formatter._expand_help(action)


# The tables within pages: each stands behind a comment with its name.
_TABLES: Mapping[str, tuple[str, Callable[[], Rows]]] = {
    **{f"model settings, {group}": ("settings.md", partial(model_settings, group)) for group in MODEL_SETTINGS},
    **{f"server settings, {group}": ("settings.md", partial(server_settings, group)) for group in SERVER_SETTINGS},
    "request parameters": ("settings.md", request_parameters),
    "parameters of other servers": ("openai.md", parameters_of_other_servers),
    "metrics": ("operations.md", metrics),
    "errors": ("protocol.md", errors),
}
_PAGES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "reference/endpoints.md": (
        "# REST endpoints\n\nThe paths of the REST port, with everything switched on, and of TorchServe's management "
        'API. Where the methods are "any", the endpoint itself refuses a wrong one. gRPC\'s services are in '
        f"[protocol.md](../protocol.md#endpoints). {_MADE}\n",
        endpoints,
    ),
    "reference/commands.md": (f"# Commands\n\nThe commands of `mlserver-torch-stream`. {_MADE}\n", commands),
}


def pages() -> dict[str, str]:
    """Returns each page of docs/ that has a part of the reference, as the code requires it.

    Raises ValueError for a page without a place for its table.
    """
    made = {page: f"{head}\n{body()}" for page, (head, body) in _PAGES.items()}
    for name, (page, rows) in _TABLES.items():
        text = made.get(page) or (_DOCS / page).read_text(encoding="utf-8")
        comment = f"<!-- make docs-reference: {name} -->\n"
        before, found, after = text.partition(comment)
        if not found:
            raise ValueError(f"{page}: has no line {comment!r}")
        made[page] = before + found + _table(rows()) + re.sub(r"\A(\|.*\n)*", "", after)
    return made


def main(arguments: list[str]) -> int:
    """Returns 0, or 1 if a page differs and ``--check`` is given."""
    differing = [
        (_DOCS / page, text)
        for page, text in pages().items()
        if not (_DOCS / page).is_file() or (_DOCS / page).read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path, _ in differing:
            print(f"docs/{path.relative_to(_DOCS)} differs from the code: run `make docs-reference`")
        return 1 if differing else 0
    for path, text in differing:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, str]]:
    """Yields the fields with the docstrings below them. Raises ValueError for a field without one."""
    (tree,) = [
        each for each in ast.parse(textwrap.dedent(inspect.getsource(model))).body if isinstance(each, ast.ClassDef)
    ]
    texts: dict[str, str] = {}
    for line, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
            texts[line.target.id] = " ".join(ast.literal_eval(below.value).split())
    for name, field in model.model_fields.items():
        if name not in texts:
            raise ValueError(f"{model.__name__}.{name}: has no docstring under it")
        yield name, field, texts[name]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "" if value is None else _code(json.dumps(value))


def _summary(thing: type[Any]) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _code(text: str) -> str:
    return f"`{text}`"


def _codes(names: Iterable[str | None]) -> str:
    return ", ".join(_code(name) for name in names if name)


def _table(rows: Rows) -> str:
    head, *body = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
