"""The client of a bundle: frames to a Triton server that runs its engine, answers back."""

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from .command import add_reading_options, check_places, chosen_reading, describe_profile, positive
from .engine import Engine
from .images import read_reading
from .sessions import Array
from .sources import open_sources
from .stream import Timings, open_sink, run_stream

INSTALL = "Run pip install 'tritonclient[http,grpc]' numpy pillow."

_DESCRIPTION = f"""Send frames to the Triton server that serves this bundle, and write its answers as infer.py does.

It needs tritonclient and of this folder client.py, frame_engine/, model.json and report.json, but no runtime.
{INSTALL}"""

_EXAMPLES = """examples:
  tritonserver --model-repository=triton
  python client.py photos/ --out masks/
  python client.py one.jpg two.jpg --url 10.0.0.5:8001 --grpc --out masks/
  python client.py frames.npy --out masks.npy --at-once 32 --profile"""


def main(argv: list[str] | None = None) -> None:
    """Read frames and write answers."""
    options = _make_parser().parse_args(argv)
    try:
        _run(options)
    except ImportError as error:
        sys.exit(f"client.py: {error}. {INSTALL}")
    except (OSError, ValueError) as error:
        sys.exit(f"client.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "client.py",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("images", metavar="IMAGES", nargs="+", help="image files, or one .npy, folder or video")
    add("--out", metavar="ANSWERS", required=True, help="a folder for masks, or a .npy or .csv file")
    add("--url", metavar="HOST:PORT", help="the server (default 127.0.0.1:8000, with --grpc 127.0.0.1:8001)")
    add("--grpc", action="store_true", help="use gRPC in place of HTTP")
    add("--at-once", type=positive, default=8, metavar="N", help="requests on their way (default 8)")
    add_reading_options(parser)
    add(
        "--profile", action="store_true", help="print to stderr how long each phase took; run is the server's"
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    check_places(options.images, options.out)
    bundle = Path(__file__).resolve().parents[1]
    card = json.loads((bundle / "model.json").read_text(encoding="utf-8"))
    reading = chosen_reading(options, card, read_reading(card))
    row = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    url = options.url or f"127.0.0.1:{8001 if options.grpc else 8000}"
    size = card["height"], card["width"]
    source = open_sources(options.images, channels=len(card["mean"]), size=size, reading=reading)
    timings = Timings()
    with (
        open_served(
            card, f"{row['variant']}-{row['target']}", url, is_grpc=options.grpc, at_once=options.at_once
        ) as engine,
        open_sink(
            options.out, task=card["task"], classes=card["classes"], tiff_names=source.tiff_names
        ) as write,
    ):
        run_stream(
            engine,
            source,
            write,
            timings=timings,
            batch=options.at_once,
            reading=reading,
            is_engine_size=options.engine_size,
        )
    if options.profile:
        sys.stderr.write(describe_profile(timings.profile(), options.at_once))


@contextmanager
def open_served(
    card: dict[str, Any], model: str, url: str, *, is_grpc: bool, at_once: int
) -> Iterator[Engine]:
    """Give the engine of a card (model.json) behind a server, which gets each frame as a request of its own.

    It reads frames and gives answers, whatever the engine itself does. Raises ValueError where the server does not
    answer, or serves another engine.
    """
    served = ServedModel(model, card["task"], url, is_grpc=is_grpc)
    try:
        served.check(card["sha256"])
    finally:
        served.disconnect()
    with ThreadPoolExecutor(at_once) as pool:
        meeting = threading.Barrier(at_once)

        def disconnect(_: int) -> None:
            meeting.wait()  # so that each thread gets one of these calls
            served.disconnect()

        def run(frames_NHWC: Array) -> Array:
            return np.concatenate(list(pool.map(served.infer, frames_NHWC[:, None])))

        try:
            yield Engine(card | {"reads": "frames", "gives": "classes", "batches": [[1, at_once]]}, run)
        finally:
            list(pool.map(disconnect, range(at_once)))


class ServedModel:
    """A model of a server; each thread has a connection of its own, because those of HTTP cannot be shared."""

    def __init__(self, model: str, task: str, url: str, *, is_grpc: bool) -> None:
        if is_grpc:
            import tritonclient.grpc as protocol
        else:
            import tritonclient.http as protocol
        self._model, self._task, self._url = model, task, url
        self._protocol, self._is_grpc = protocol, is_grpc
        self._of_thread = threading.local()

    def check(self, sha256: str) -> None:
        """Raise ValueError unless the server has the model ready, with the engine of this sha256."""
        with self._errors("no Triton server answers", advice=" Start it, or name another --url."):
            client = self._connect()
            is_ready = client.is_server_ready() and client.is_model_ready(self._model)
        if not is_ready:
            raise ValueError(
                f"{self._url}: the server has no model {self._model} that is ready. Start it with "
                "--model-repository=<this folder>/triton, and see its log."
            )
        with self._errors("the server does not tell what it serves"):
            told = client.get_model_config(self._model, **({"as_json": True} if self._is_grpc else {}))
        config = told["config"] if self._is_grpc else told
        served = config.get("parameters", {}).get("sha256", {}).get("string_value", "none")
        if served != sha256:
            raise ValueError(
                f"{self._url}: {self._model} runs the engine with sha256 {served[:12]}..., model.json here says "
                f"{sha256[:12]}... Copy the same bundle to both sides."
            )

    def infer(self, frames_NHWC: Array) -> Array:
        """Return the answers to one request."""
        frames = self._protocol.InferInput("frames", list(frames_NHWC.shape), "UINT8")
        frames.set_data_from_numpy(frames_NHWC)
        with self._errors("the server gave no answer"):
            result = self._connect().infer(self._model, [frames])
        answers: Array = result.as_numpy("values" if self._task == "values" else "classes")
        return answers[:, 0] if self._task == "classification" else answers

    def disconnect(self) -> None:
        """Close the connection of this thread, which no other one may do; a server that is stopped waits for it."""
        if hasattr(self._of_thread, "client"):
            self._of_thread.client.close()
            del self._of_thread.client

    def _connect(self) -> Any:
        """Return the connection of this thread."""
        if not hasattr(self._of_thread, "client"):
            self._of_thread.client = self._protocol.InferenceServerClient(self._url)
        return self._of_thread.client

    @contextmanager
    def _errors(self, what: str, *, advice: str = "") -> Iterator[None]:
        """Turn what tritonclient raises into a ValueError of one line."""
        from tritonclient.utils import InferenceServerException

        try:
            yield
        except (OSError, HTTPException, InferenceServerException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{self._url}: {what} ({reason}).{advice}") from error
