"""Serve a reward over HTTP, to train with it from another environment or machine.

    python scripts/reward_server.py --reward ink                               # in one environment
    REWARD_URL=http://127.0.0.1:8000 python algos/tp_grpo.py --reward remote   # in another

For rewards whose packages clash with those of the model, or that need a device of their own. The requests
and answers are described in shared/rewards/remote.py. Requests are scored one after the other. There is no
password: whoever reaches the address can ask, so leave --host as it is outside a network of your own.
"""

import json
import sys
import threading
import traceback
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bundle: drop

import torch
import tyro

from shared.errors import InputError, RewardError
from shared.prompts import Prompt
from shared.rewards import check_prompts, make_rewards, score
from shared.rewards.remote import image_of


@dataclass
class Args:
    reward: str = "label"
    """A reward, or a weighted sum, as for training."""
    task: Literal["generation", "understanding"] = "generation"
    """Score images, or answers."""
    device: str = "cpu"
    host: str = "127.0.0.1"
    """The address to listen at: 0.0.0.0 for every machine that reaches this one."""
    port: int = 8000
    """0: any free one."""


def make_server(args: Args) -> ThreadingHTTPServer:
    """The server, which listens already. Raises InputError for a reward that cannot be made, and for an
    address that cannot be used."""
    rewards, lock = make_rewards(args.reward, args.device, args.task), threading.Lock()

    def scored(request: dict) -> dict:
        """The weighted sum, for each image or answer of the request."""
        prompts = prompts_of(request)
        made = made_of(request, args.task, len(prompts))
        with lock:
            return {"rewards": score(rewards, made, prompts).total.tolist()}

    def checked(request: dict) -> dict:
        check_prompts(rewards, prompts_of(request))
        return {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/":
                self.answer(200, {"task": args.task, "reward": args.reward})
            else:
                self.answer(404, {"error": f"no such path: {self.path}"})

        def do_POST(self):
            reply = {"/score": scored, "/check": checked}.get(self.path)
            if reply is None:
                return self.answer(404, {"error": f"no such path: {self.path}"})
            try:
                self.answer(200, reply(self.request_object()))
            except InputError as error:
                self.answer(400, {"error": str(error)})
            except Exception as error:
                traceback.print_exc()
                message = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
                self.answer(500, {"error": message})

        def request_object(self) -> dict:
            try:
                found = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            except ValueError as error:
                raise InputError(f"the request is not JSON ({error})") from None
            if not isinstance(found, dict):
                raise InputError("the request is not a JSON object")
            return found

        def answer(self, status: int, content: dict):
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_request(self, code="-", size="-"):
            """Requests that succeed are not logged."""

    try:
        return ThreadingHTTPServer((args.host, args.port), Handler)
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen at {args.host}, port {args.port}: {error}") from None


def prompts_of(request: dict) -> list[Prompt]:
    try:
        prompts = [Prompt(p["text"], p["metadata"]) for p in request["prompts"]]
    except (LookupError, TypeError):
        prompts = None
    if prompts is None or not all(isinstance(p.text, str) and isinstance(p.metadata, dict) for p in prompts):
        raise InputError('expected "prompts": [{"text": string, "metadata": object}, ..]')
    return prompts


def made_of(request: dict, task: str, count: int) -> torch.Tensor | list[str]:
    """The images (B, 3, H, W) in [0, 1] of a request, or its B answers."""
    name = "images" if task == "generation" else "answers"
    made = request.get(name)
    if not isinstance(made, list) or not all(isinstance(m, str) for m in made) or len(made) != count:
        raise InputError(f'expected "{name}": [string, ..], one for each of the {count} prompts')
    if name == "answers" or not made:
        return made
    try:
        return torch.stack([image_of(png) for png in made])
    except (ValueError, OSError, RuntimeError) as error:
        raise InputError(f"expected images of one size, each a PNG in base64: {error}") from None


def main(args: Args) -> None:
    try:
        server = make_server(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    host, port = server.server_address[:2]
    print(f"serving {args.reward} at http://{host}:{port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main(tyro.cli(Args))
