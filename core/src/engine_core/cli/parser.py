"""Arguments of the ``engine`` command, spelled as users of mlx-lm know them."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.cli.output import Output

__all__ = ["build_parser"]


def _command(module: str) -> Callable[[argparse.Namespace, Output], int]:
    """Import a command's module only when the command runs."""

    def run(arguments: argparse.Namespace, output: Output) -> int:
        return int(importlib.import_module(f"engine_core.cli.{module}").run(arguments, output))

    return run


def _count(text: str) -> int:
    """Read a number of at least one."""
    number = int(text)
    if number < 1:
        msg = f"must be at least 1, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


_MODEL_HELP = "checkpoint directory, or OWNER/NAME in the local Hugging Face cache"


def _add_hub_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hub-cache",
        metavar="DIR",
        help="where OWNER/NAME is looked for (default: ~/.cache/huggingface/hub)",
    )


def _add_model(parser: argparse.ArgumentParser, *, positional: bool) -> None:
    """Add the arguments that name a checkpoint and say how to load it."""
    if positional:
        parser.add_argument("model", metavar="DIR", help=_MODEL_HELP)
    else:
        parser.add_argument("--model", required=True, metavar="DIR", help=_MODEL_HELP)
    _add_hub_cache(parser)
    parser.add_argument("--family", help="owner of the checkpoint when two plugins claim it")
    parser.add_argument(
        "--no-plugin", action="append", default=[], metavar="NAME", help="do not load this plugin"
    )
    parser.add_argument(
        "--compute-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of activations (default: float32 on CPU, the checkpoint's own on a GPU)",
    )
    parser.add_argument(
        "--quantized-weights",
        choices=("auto", "keep", "dequantize"),
        default="auto",
        help="keep packed weights or dequantize them at load (default: auto)",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options of one generation."""
    parser.add_argument("--max-tokens", "-m", type=int, default=256)
    parser.add_argument(
        "--temp", "--temperature", type=float, default=0.0, help="0 is greedy (default)"
    )
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--min-tokens-to-keep", type=int, default=1)
    parser.add_argument("--xtc-probability", type=float, default=0.0)
    parser.add_argument("--xtc-threshold", type=float, default=0.1)
    parser.add_argument("--repetition-penalty", type=float, default=None)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT")
    parser.add_argument(
        "--thinking", choices=("on", "off"), default=None, help="pass the template's toggle"
    )
    parser.add_argument(
        "--chat-template-config",
        metavar="JSON",
        default=None,
        help="JSON object passed to the chat template",
    )
    parser.add_argument(
        "--extra-eos-token", action="append", default=[], metavar="TOKEN", help="also ends a reply"
    )
    parser.add_argument(
        "--prompt-cache-file",
        metavar="FILE",
        default=None,
        help="start from the state in this file when it exists; save the state there at the end",
    )


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands.

    Returns:
        A parser whose result has ``run(arguments, output) -> int``.
    """
    from engine_core import __version__

    parser = argparse.ArgumentParser(
        prog="engine", description="Run language models locally on MLX."
    )
    parser.add_argument("--version", action="version", version=f"engine {__version__}")
    shared: dict[str, Any] = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, module: str, help_text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text, description=help_text, **shared)
        command.add_argument("--json", action="store_true", help="one JSON object a line")
        command.set_defaults(run=_command(module))
        return command

    generate = add("generate", "generate", "answer one prompt")
    _add_model(generate, positional=False)
    generate.add_argument("--prompt", "-p", required=True, help="'-' reads standard input")
    generate.add_argument("--system-prompt", default=None)
    generate.add_argument("--prefill-response", default=None, help="start of the reply")
    generate.add_argument(
        "--ignore-chat-template", action="store_true", help="complete the raw prompt"
    )
    _add_sampling(generate)

    chat = add("chat", "chat", "talk to a model: q quits, r resets, h helps")
    _add_model(chat, positional=False)
    chat.add_argument("--system-prompt", default=None)
    _add_sampling(chat)

    inspect = add("inspect", "inspection", "describe a checkpoint without reading its weights")
    inspect.add_argument("model", metavar="DIR", nargs="?", help=_MODEL_HELP)
    _add_hub_cache(inspect)
    inspect.add_argument("--family", help="owner of the checkpoint when two plugins claim it")
    inspect.add_argument("--no-plugin", action="append", default=[], metavar="NAME")
    inspect.add_argument("--backend", action="store_true", help="describe the MLX backend")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")

    probe = add("probe", "probe", "show what a checkpoint's chat template can do, and why")
    probe.add_argument("model", metavar="DIR", help=_MODEL_HELP)
    _add_hub_cache(probe)
    probe.add_argument("--family", help="owner of the checkpoint when two plugins claim it")
    probe.add_argument(
        "--no-plugin", action="append", default=[], metavar="NAME", help="do not load this plugin"
    )

    verify = add("verify", "verify", "load a checkpoint completely and run one token")
    _add_model(verify, positional=True)

    plugins = add("plugins", "plugins", "list family plugins and their state")
    plugins.add_argument("--no-plugin", action="append", default=[], metavar="NAME")
    plugins.add_argument(
        "--strict", action="store_true", help="exit 1 when one is not active or two claim one name"
    )

    bench = add("bench", "bench", "measure prefill and decode speed")
    _add_model(bench, positional=False)
    bench.add_argument("--prompt-tokens", type=_count, default=512)
    bench.add_argument("--max-tokens", "-m", type=_count, default=64)
    bench.add_argument("--runs", type=_count, default=3)
    return parser
