"""``coterie serve-model``: answer requests for recommendations from an exported model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.options import JsonOption
from coterie.cli.output import Output

__all__ = ["serve_model"]


def serve_model(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Model, as `coterie runs model` or `save` in Python writes it."
        ),
    ],
    http: Annotated[
        str, typer.Option("--http", metavar="HOST:PORT", help="Address of HTTP with JSON; `none` for none.")
    ] = "127.0.0.1:8080",
    grpc: Annotated[
        str, typer.Option("--grpc", metavar="HOST:PORT", help="Address of gRPC; `none` for none.")
    ] = "127.0.0.1:8081",
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="Certificate chain of the server, PEM, for both."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Key of the certificate, PEM.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve an exported model over HTTP and gRPC.

    A caller sends the vector that a user's host kept in training, or a history of items or ratings where the system
    serves people who never took part. Nothing of a request is stored or logged. Addresses beyond this machine need a
    certificate. Ends by Ctrl-C or SIGTERM. HTTP needs the extra `serve`.
    """
    output = Output("serve-model", as_json=json)
    import asyncio

    from coterie.launch.model_folder import read_model
    from coterie.serving.answers import ModelAnswers
    from coterie.serving.running import ServingAddresses
    from coterie.serving.running import serve_model as serve

    at = ServingAddresses(
        None if grpc == "none" else grpc, None if http == "none" else http, certificate, key
    )
    if at.rpc is not None and at.http is not None and importlib.util.find_spec("starlette") is None:
        output.say("warning: no HTTP, for which starlette is not installed (pip install 'coterie[serve]')")
        at = ServingAddresses(at.rpc, None, certificate, key)
    answers = ModelAnswers(read_model(folder))
    model = answers.model

    def ready(rpc: str | None, web: str | None) -> None:
        scheme = "http" if certificate is None else "https"
        output.say(f"{model!r}")
        if web is not None:
            output.say(f"{scheme}://{web}/recommend")
        if rpc is not None:
            output.say(f"gRPC {rpc}, coterie.serving.v1.ModelServer")
        output.finish({"model": folder, "http": web, "grpc": rpc, "items": len(model.items)})
        import sys

        sys.stdout.flush()

    asyncio.run(serve(answers, at, ready))
