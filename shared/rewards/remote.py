"""A reward of another process: its models, and what they depend on, stay out of this environment.

scripts/reward_server.py serves any reward of this project; a server of your own answers three requests in
JSON. Errors are {"error": one line}, with a status of 400 or above.

    GET  /        {"task": "generation"}, or "understanding": whether it scores images or answers
    POST /check   {"prompts": [..]} -> {}, or status 400 if there is a prompt that it cannot score
    POST /score   {"images": [PNG in base64, ..], "prompts": [..]} -> {"rewards": [number, ..]};
                  of understanding with "answers": [string, ..] in place of images

A prompt is {"text": string, "metadata": object}. A PNG has 8 bits, so pixels are rounded to 1/255.
"""

import base64
import io
import json
import os
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from shared.errors import InputError, RewardError
from shared.prompts import Prompt
from shared.rewards.image import bytes_of

ADDRESS = "REWARD_URL"  # the environment variable with the server's address
START = "start scripts/reward_server.py, then export REWARD_URL=http://127.0.0.1:8000"
TRIES, BACK_OFF = 4, 1.0  # of a request; seconds before the second try, twice as many before each next one
TIME_OUT, FIRST_TIME_OUT = 600.0, 30.0  # seconds: of a try to score; of a request before training, tried once


def make_remote(device="cpu"):
    """`remote`: what the server at REWARD_URL, an environment variable, scores the images with.

    The address is no part of --reward: names of runs and metrics stay short, and a resumed run may find its
    server elsewhere. A run has one server. It may serve a weighted sum, and `remote` itself be part of that.
    Raises InputError, in one line, if there is no such server or it scores answers.
    """
    return _make("generation", "images")


def make_remote_answers(device="cpu"):
    """`remote` for answers in words."""
    return _make("understanding", "answers")


def check_remote(prompts: list[Prompt]) -> None:
    """Raises InputError with the server's reason if it cannot score the prompts."""
    request = {"prompts": [p._asdict() for p in prompts]}
    try:
        _ask(_address() + "/check", request, tries=1, time_out=FIRST_TIME_OUT)
    except RewardError as error:
        raise InputError(str(error)) from None


def png_of(image: Tensor) -> str:
    """An image (3, H, W) in [0, 1] as PNG in base64."""
    buffer = io.BytesIO()
    Image.fromarray(bytes_of(image)).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def image_of(png: str) -> Tensor:
    """The image (3, H, W) in [0, 1] of a PNG in base64."""
    with Image.open(io.BytesIO(base64.b64decode(png, validate=True)), formats=["PNG"]) as image:
        array = np.array(image.convert("RGB"))
    return torch.from_numpy(array).permute(2, 0, 1) / 255


def _make(task: str, made_name: str):
    address = _address()
    try:
        served = _ask(address, None, tries=1, time_out=FIRST_TIME_OUT).get("task")
    except RewardError as error:
        raise InputError(f"reward 'remote': {error}: {START}") from None
    if served != task:
        raise InputError(f"reward 'remote': {address} serves the task {served!r}, and this run is {task!r}")

    def remote(made: Tensor | list[str], prompts: list[Prompt]) -> Tensor:
        scored = [png_of(image) for image in made] if task == "generation" else list(made)
        request = {made_name: scored, "prompts": [p._asdict() for p in prompts]}
        rewards = _ask(address + "/score", request).get("rewards")
        if not isinstance(rewards, list) or not all(isinstance(r, int | float) for r in rewards):
            raise RewardError(f'{address}/score: expected {{"rewards": [number, ..]}}')
        if len(rewards) != len(prompts):
            raise RewardError(f"{address}/score: {len(rewards)} rewards for {len(prompts)} {made_name}")
        return torch.tensor(rewards, dtype=torch.float32)

    return remote


def _address() -> str:
    address = os.environ.get(ADDRESS, "").strip().rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise InputError(f"reward 'remote': {ADDRESS} is {address!r}, not a server's address: {START}")
    return address


def _ask(url: str, body: dict | None, tries: int = TRIES, time_out: float = TIME_OUT) -> dict:
    """The object that a server answers to a POST of body, or to a GET (None).

    A failing connection, a try that lasts too long and a status of 500 or above are tried again. Raises
    RewardError, with the address and the cause, after the last try and for other failures at once.
    """
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    for i in range(tries):
        if i > 0:
            time.sleep(BACK_OFF * 2 ** (i - 1))
        try:
            with urlopen(request, timeout=time_out) as response:
                return _object(response.read(), url)
        except HTTPError as error:
            cause = f"status {error.code}: {_reason(error)}"
            if error.code < 500:
                break
        except (OSError, HTTPException) as error:
            cause = str(getattr(error, "reason", error)) or type(error).__name__
    raise RewardError(f"{url}: {cause} (tries: {i + 1})")


def _object(answer: bytes, url: str) -> dict:
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RewardError(f"{url}: the answer is not a JSON object")
    return found


def _reason(error: HTTPError) -> str:
    """What the server says of its error, else what the status means."""
    try:
        return " ".join(str(json.loads(error.read())["error"]).split())
    except (ValueError, LookupError, TypeError, OSError, HTTPException):
        return str(error.reason)
