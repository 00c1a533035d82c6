"""`quasar-trt serve`."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import click

from quasar_trt.cli_options import ENGINE, KV_CACHE, THREADS, drafter_options
from quasar_trt.cli_types import PATH, Bytes, Real, Whole, read_text
from quasar_trt.errors import QuasarError


def _read_config(context: click.Context, param: click.Parameter, path: Path | None) -> None:
    """The file's values become defaults of the options that they name. Raises QuasarError for any other name."""
    if path is None:
        return
    import yaml

    try:
        values = yaml.safe_load(read_text("--config", path))
    except yaml.YAMLError as error:
        raise QuasarError(f"--config: cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise QuasarError(f"--config: {path} is no mapping; allowed: lines as 'port: 8000'")
    known = {each.name: each for each in context.command.params if isinstance(each, click.Option) and each is not param}
    defaults = {}
    for name, value in values.items():
        option = known.get(str(name).replace("-", "_"))
        if option is None:
            near = difflib.get_close_matches(str(name).replace("-", "_"), known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise QuasarError(f"--config: {path} has '{name}', which is no option of serve{hint}")
        if value is None:
            raise QuasarError(f"--config: {path} has '{name}' without a value; give one or leave it out")
        if isinstance(value, dict):
            defaults[option.name] = [f"{key}={json.dumps(each)}" for key, each in value.items()]
        else:
            defaults[option.name] = str(value)
    context.default_map = {**(context.default_map or {}), **defaults}


@click.command()
@click.argument("engine_dir", type=PATH)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=Whole(least=0, most=65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--served-model-name", metavar="NAME", help="What clients call the model; the directory's name by default."
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="QUASAR_TRT_API_KEY",
    help="What clients must send; also from QUASAR_TRT_API_KEY.",
)
@click.option("--chat-template", type=PATH, metavar="FILE", help="Jinja template in place of the model's own.")
@click.option(
    "--config",
    type=PATH,
    metavar="FILE.yaml",
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="Values of these options; those on the command line count first.",
)
@click.option("--max-requests", type=Whole(), default=256, show_default=True, help="Most completions that run or wait.")
@click.option("--max-body-bytes", type=Bytes(), default="1M", show_default=True, help="Most bytes of a request.")
@click.option(
    "--request-timeout", type=Real(), metavar="SECONDS", help="End a completion after so long; never by default."
)
@drafter_options("none")
@ENGINE
@THREADS
@KV_CACHE
def serve(
    engine_dir,
    host,
    port,
    chat_template,
    max_requests,
    max_body_bytes,
    request_timeout,
    served_model_name,
    api_key,
    drafter,
    drafter_option,
    engine,
    threads,
    kv_cache_memory_bytes,
):
    """Serve an engine over HTTP.

    Speaks OpenAI's API (/v1/chat/completions, /v1/completions); the page at / is for trying the model. Ctrl-C or SIGTERM
    lets running requests end; a second one aborts them.
    """
    try:
        from quasar_trt.server.options import ServerOptions
        from quasar_trt.server.run import bind
        from quasar_trt.server.run import serve as run
    except ModuleNotFoundError as error:
        raise QuasarError(f"serve needs {error.name}; install it with: pip install 'quasar-trt[serve]'") from None
    import logging

    from quasar_trt.cli import open_runner
    from quasar_trt.generation_config import GenerationConfig
    from quasar_trt.tokenizer import load_tokenizer

    options = ServerOptions(
        served_model_name=engine_dir.resolve().name if served_model_name is None else served_model_name,
        api_key=api_key,
        drafter=drafter,
        max_requests=max_requests,
        max_body_bytes=max_body_bytes,
        request_timeout=request_timeout,
    )
    bound = bind(host, port)
    runner = open_runner(engine_dir, drafter, drafter_option, engine, threads, kv_cache_memory_bytes)
    tokenizer = load_tokenizer(engine_dir) if runner.tokenizer is not None else None
    if chat_template is not None:
        if tokenizer is None:
            raise QuasarError(f"--chat-template is given, but {engine_dir} has no tokenizer; leave it out")
        tokenizer.chat_template = _read_template(chat_template)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sampling = GenerationConfig.read(engine_dir).sampling
    name = options.served_model_name
    run(
        runner,
        tokenizer,
        options,
        bound,
        sampling,
        lambda server: click.echo(f"serving {name} at {server.url}", err=True),
    )


def _read_template(path: Path) -> str:
    """Raises QuasarError for a file that is no template."""
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text = read_text("--chat-template", path)
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        raise QuasarError(f"--chat-template: {path} is no Jinja template: line {error.lineno}: {error}") from None
    return text
