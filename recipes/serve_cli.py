"""`samebits serve`: an OpenAI-compatible server with a recipe's numerics, with the base and an adapter under names of their own.

Everything that can be known to be wrong is found before the engine is asked for. Exit status: 0 stopped by SIGINT or SIGTERM, 1 the
server ended by itself, 2 bad input or a port in use.
"""

from __future__ import annotations

import ipaddress
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .terminal import fail


def serve(
    recipe: Annotated[str, typer.Argument(help="recipe file, or the name of a shipped one")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, of the recipe or of verl")] = None,
    adapter: Annotated[Path | None, typer.Option(help="adapter folder of a run, runs/NAME/adapters/step_N")] = None,
    name: Annotated[str | None, typer.Option(help="name of the adapter as a model; default: recipe and folder")] = None,
    host: Annotated[str, typer.Option(help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    api_key_env: Annotated[str | None, typer.Option(metavar="VAR", help="environment variable that holds the key to ask for")] = None,
    hardware: Annotated[str, typer.Option(help="auto, cpu, h200, gb300-tp4, b300-tp4 or mi355x-tp4")] = "auto",
    print_only: Annotated[bool, typer.Option("--print", help="print the command and start nothing")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show what vLLM prints")] = False,
) -> None:
    """Serve a recipe's model, and an adapter of a run, with vLLM's OpenAI server."""
    if not verbose:
        warnings.simplefilter("ignore")
    from .config import RecipeError, load_recipe
    from .eval_engine import read_adapter
    from .server_process import ServerFailed, port_problem, run
    from .serving import choose, serve_command
    from .validate import examine, validate

    if name is not None and adapter is None:
        raise fail("--name names an adapter: give one with --adapter")
    if api_key_env is not None and not os.environ.get(api_key_env) and not print_only:
        raise fail(f"--api-key-env: the environment has no {api_key_env}")
    try:
        # A command may be printed for hardware that is not here.
        device = choose(hardware, "cpu").device if print_only and hardware != "auto" else None
        named = [] if device is None else [f"device={device}"]
        own, verl = load_recipe(recipe, [*(overrides or []), *named], planned=print_only)
        chosen = choose(hardware, own.device)
        served, missing = None, ()
        if chosen.engine == "samebits" and print_only:
            found = examine(own, verl, planned=True)
            spec, missing = found.spec, found.missing
        elif chosen.engine == "samebits":
            spec = validate(own, verl)
        if adapter is not None:
            if chosen.engine == "samebits":
                read_adapter(adapter, own, spec)
            served = (name or f"{own.name}-{adapter.resolve().name}", adapter)
            if served[0] == own.model_path.name:
                raise RecipeError(f"--name: {served[0]} is the name of the base")
        command = serve_command(own, verl, chosen, host=host, port=port, adapter=served)
        if print_only:
            print(command.text(api_key_env, missing))
            return
        if chosen.engine != "samebits":
            raise RecipeError(f"--hardware {chosen.name}: samebits starts no server there; --print shows the command for vLLM's own model")
        if chosen.device != own.device:
            raise RecipeError(f"--hardware {chosen.name} needs device={chosen.device}, the recipe has device={own.device}")
        problem = port_problem(host, port)
        if problem is not None:
            raise RecipeError(problem)
    except RecipeError as error:
        raise fail(str(error)) from None
    if api_key_env is None and not _loopback(host):
        print(f"samebits: without --api-key-env, whoever reaches {host}:{port} can use the model", file=sys.stderr)
    environment = dict(command.environment)
    environment["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "INFO" if verbose else "ERROR")
    if api_key_env is not None:
        environment["VLLM_API_KEY"] = os.environ[api_key_env]
    console = Console()
    console.print(f"starting {', '.join(command.names)} on {chosen.title}", highlight=False)
    address = f"[{host}]" if ":" in host else host
    local = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(address, address)

    def ready() -> None:
        console.print(f"ready: http://{address}:{port}/v1 serves {', '.join(command.names)}", highlight=False, soft_wrap=True)

    try:
        run(command.words(sys.executable), environment, f"http://{local}:{port}/health", ready, verbose)
    except ServerFailed as error:
        raise fail(str(error), 1) from None
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking torch and all of verl's configuration down in order would be most of the time that stopping takes


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
