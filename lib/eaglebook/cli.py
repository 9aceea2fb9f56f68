"""``eaglebook``: plan and run the notebooks, say what there is, read and convert draft checkpoints."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer
from rich.console import Console

from eaglebook import cli_checkpoint, paths
from eaglebook.errors import Interrupted, UserError

_DEBUG = False
_OF_CHECKPOINTS = ("inspect", "convert", "diff")


def commands(light: bool) -> typer.Typer:
    """All commands, or (``light``) those about checkpoints alone: papermill and pydantic take longer to import than they run."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
    app.callback()(options)
    if not light:
        from eaglebook import cli_plan, cli_runs

        app.command("run")(cli_runs.run)
        app.command("status")(cli_runs.status)
        app.command("report")(cli_runs.report_all)
        app.command("plan")(cli_plan.of)
    app.command("inspect")(cli_checkpoint.inspect)
    app.command("convert")(cli_checkpoint.convert)
    app.command("diff")(cli_checkpoint.diff)
    return app


def options(debug: Annotated[bool, typer.Option(help="Show tracebacks.")] = False) -> None:
    """Named here for --help; `main` takes it out of the command line."""
    del debug


def main() -> None:
    """The console script: errors as messages, exit code 2 for a user's error, 130 or 143 when stopped."""
    global _DEBUG
    if "--debug" in sys.argv:  # wherever it stands
        sys.argv.remove("--debug")
        _DEBUG = True
    first = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    try:
        code = commands(first in _OF_CHECKPOINTS)(standalone_mode=False)
    except UserError as error:
        if _DEBUG:
            raise
        say(f"error: {paths.scrub(str(error))}")
        sys.exit(2)
    except Interrupted as error:
        say(f"{error}. Run the same command again to go on.")
        sys.exit(128 + error.signum)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if _DEBUG:
            raise
        usage = getattr(error, "format_message", None)  # click's own: unknown option, missing argument
        message = usage() if usage else f"{type(error).__name__}: {error} (a bug; --debug shows where)"
        say(f"error: {paths.scrub(message)}")
        sys.exit(2 if usage else 1)
    sys.exit(code if isinstance(code, int) else 0)


def say(text: str) -> None:
    """On standard error, below whatever line was being written."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"\n{text}", markup=False)


if __name__ == "__main__":
    main()
