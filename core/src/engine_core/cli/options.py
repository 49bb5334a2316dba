"""From parsed arguments to a loaded client and generation options."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from engine_core.cli.output import BadUsage
from engine_core.errors import InvalidRequest
from engine_core.request import GenerateOptions

if TYPE_CHECKING:
    import argparse

    from engine_core.checkpoint.resolve import HubSnapshot
    from engine_core.cli.output import Output
    from engine_core.client import Client
    from engine_core.plugins import Plugins

__all__ = [
    "generation_options",
    "load_client",
    "load_plugins",
    "read_prompt",
    "resolve_model",
    "restore_cache",
    "save_cache",
]


def load_plugins(arguments: argparse.Namespace) -> Plugins:
    """Discover plugins, leaving out those the user blocked.

    Args:
        arguments: Parsed arguments with ``no_plugin``.

    Returns:
        The plugins; ``ENGINE_BLOCK_PLUGINS`` (comma-separated) blocks too.
    """
    from engine_core.plugins import Plugins

    from_environment = os.environ.get("ENGINE_BLOCK_PLUGINS", "")
    blocked = {name for name in from_environment.split(",") if name}
    return Plugins.load(block=frozenset(blocked | set(arguments.no_plugin)))


def resolve_model(arguments: argparse.Namespace) -> HubSnapshot:
    """Find the checkpoint that the arguments name.

    Args:
        arguments: Parsed arguments of a command with a model.

    Returns:
        Its directory.
    """
    from engine_core.checkpoint.resolve import resolve_hub

    return resolve_hub(arguments.model, cache_dir=arguments.hub_cache)


def load_client(arguments: argparse.Namespace, output: Output, **options: Any) -> Client:
    """Load the checkpoint that the arguments name.

    Args:
        arguments: Parsed arguments of a command with a model.
        output: Where the progress bar goes.
        **options: Further options of ``Client.load``.

    Returns:
        A running client.
    """
    from engine_core.client import Client

    return Client.load(
        resolve_model(arguments),
        plugins=load_plugins(arguments),
        family=arguments.family,
        compute_dtype=arguments.compute_dtype,
        quantized_weights=arguments.quantized_weights,
        on_load_progress=lambda done, total: output.progress("loading", done, total),
        **options,
    )


def read_prompt(text: str) -> str:
    """Take a prompt from the command line or from standard input.

    Args:
        text: The prompt, ``-`` for standard input.

    Returns:
        The prompt.

    Raises:
        BadUsage: Standard input is closed.
    """
    if text != "-":
        return text
    stream: TextIO | None = sys.stdin
    if stream is None:
        raise BadUsage("--prompt: '-' needs standard input, got a closed one")
    return stream.read()


def generation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Turn flags into options of ``Client.stream``.

    Args:
        arguments: Parsed arguments with the sampling flags.

    Returns:
        Keyword arguments.

    Raises:
        BadUsage: ``--chat-template-config`` is not a JSON object, or an option is out of its
            range; found out before the model is loaded.
    """
    options: dict[str, Any] = {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temp,
        "top_p": arguments.top_p,
        "top_k": arguments.top_k,
        "min_p": arguments.min_p,
        "min_tokens_to_keep": arguments.min_tokens_to_keep,
        "xtc_probability": arguments.xtc_probability,
        "xtc_threshold": arguments.xtc_threshold,
        "seed": arguments.seed,
        "stop": tuple(arguments.stop),
    }
    if arguments.repetition_penalty is not None:
        options["repetition_penalty"] = arguments.repetition_penalty
    if arguments.thinking is not None:
        options["thinking"] = arguments.thinking == "on"
    if arguments.chat_template_config is not None:
        try:
            config = json.loads(arguments.chat_template_config)
        except (ValueError, RecursionError) as error:
            raise BadUsage(
                f"--chat-template-config: must be a JSON object, got invalid JSON ({error})",
                code="cli.template_config",
            ) from error
        if not isinstance(config, dict):
            raise BadUsage(
                f"--chat-template-config: must be a JSON object, got {type(config).__name__}",
                code="cli.template_config",
            )
        options["template_options"] = config
    try:
        GenerateOptions.parse(**options)
    except InvalidRequest as error:
        raise BadUsage(str(error), code=error.code, hint=error.hint) from error
    return options


def restore_cache(client: Client, path: str | None, output: Output) -> None:
    """Load a prompt-cache file when there is one.

    Args:
        client: Client of the model it was written with.
        path: ``--prompt-cache-file``.
        output: Where a remark goes.

    Raises:
        CacheError: The file is damaged, of another model or too large.
    """
    # ``Path.exists`` raises for a name that is too long; saving reports that at the end.
    if path is not None and os.path.exists(path):  # noqa: PTH110
        output.note(f"Prompt cache: {client.load_cache(path)} tokens loaded")


def save_cache(
    client: Client, path: str | None, output: Output, *prompt: Any, **options: Any
) -> None:
    """Write a prompt-cache file when one is wanted.

    Args:
        client: The client.
        path: ``--prompt-cache-file``.
        output: Where a remark goes.
        *prompt: What ``Client.save_cache`` takes after the path.
        **options: As for ``Client.save_cache``.

    Raises:
        CacheError: Nothing is stored, or the file cannot be written.
    """
    if path is not None:
        output.note(f"Prompt cache: {client.save_cache(path, *prompt, **options)} tokens saved")
