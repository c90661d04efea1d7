# SPDX-License-Identifier: Apache-2.0
"""The console script ``vllm-pr``."""

import signal
import sys
from typing import Annotated

import typer

from vllm_pr import outputs
from vllm_pr.bench.command import bench
from vllm_pr.demo import demo
from vllm_pr.doctor.cli import doctor
from vllm_pr.lint_upstream import lint_upstream
from vllm_pr.matrix import matrix
from vllm_pr.newest import newest
from vllm_pr.patching import commands as patching
from vllm_pr.patching.errors import PatchError
from vllm_pr.proof import proof
from vllm_pr.prove import prove
from vllm_pr.serve import serve
from vllm_pr.upstream.command import upstream

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
patching.register(app)
app.command()(bench)
app.command()(demo)
app.command()(prove)
app.command()(proof)
app.command()(doctor)
app.command()(serve)
app.command()(matrix)
app.command()(lint_upstream)
app.command()(newest)
app.command()(upstream)


@app.command()
def sdist(
    release: Annotated[str, typer.Argument(help="A known release, such as 0.33.0.")],
) -> None:
    """Print the folder of a release's source tree (fetched when it is not there)."""
    from vllm_pr.releases import sdist_tree

    print(sdist_tree(release))


@app.callback()
def _root() -> None:
    """Keep vLLM's prefix cache across session switches: apply, prove, measure."""


def main() -> None:
    """Run the command line; what a user did wrong is told without a traceback.

    SIGTERM is as Ctrl-C: children are ended and temporary folders removed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        try:
            app()
        finally:
            outputs.flush()
    except (PatchError, OSError) as error:
        if isinstance(error, OSError):
            outputs.discard()
        typer.echo(f"vllm-pr: {error}", err=True)
        sys.exit(2)
