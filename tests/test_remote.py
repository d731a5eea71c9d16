"""The reward of another process: the same values as here, and failures that name the server and the cause."""

import contextlib
import http.client
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

from algos import flow_grpo
from shared.errors import InputError, RewardError
from shared.prompts import Prompt, digit_of, load_prompts
from shared.rewards import CHECKS, REWARDS, check_prompts, make_rewards, remote, score
from shared.training import set_up

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "reward_server.py"
PROMPTS = load_prompts("digits")[:5]
PIXELS = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROUNDED = (PIXELS * 255).round() / 255  # what a PNG holds
REFUSED = "http://127.0.0.1:1"  # nobody listens there


@contextlib.contextmanager
def running(server):
    """Within this context the server answers, and REWARD_URL is its address."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REWARD_URL", url)
            patch.setenv("no_proxy", "*")
            patch.setattr(remote, "BACK_OFF", 0.001)
            yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serving(reward, task="generation"):
    """The server of scripts/reward_server.py in a thread."""
    script = runpy.run_path(str(SCRIPT))
    return running(script["make_server"](script["Args"](reward=reward, task=task, port=0)))


@contextlib.contextmanager
def scripted(*answers, task="generation"):
    """A server that answers POST requests with the given (status, text), the last one for ever. Yields the
    objects that it was sent."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, json.dumps({"task": task}))

        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.reply(*answers[min(len(seen), len(answers)) - 1])

        def reply(self, status, text):
            if status is None:  # hang up
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    with running(HTTPServer(("127.0.0.1", 0), Handler)):
        yield seen


def post(url, path, body):
    """(status, object) of a request with the bytes of `body`."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request("POST", path, body)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_a_served_reward_is_the_local_one():
    with serving("label:2,jpeg:-0.5"):
        rewards = make_rewards("remote:3,ink")
        for batch_size in (None, 2):
            scores = score(rewards, PIXELS, PROMPTS, batch_size)
            local = score(make_rewards("label:2,jpeg:-0.5"), ROUNDED, PROMPTS).total
            assert torch.allclose(scores.parts["remote"], local, atol=1e-6)
            ink = score(make_rewards("ink"), PIXELS, PROMPTS).total
            assert torch.allclose(scores.total, 3 * local + ink, atol=1e-5)


def test_answers_are_served():
    prompts = load_prompts("digit-images")[:3]
    given = [prompts[0].metadata["answer"], "?", prompts[2].metadata["answer"].upper()]
    with serving("answer", "understanding"):
        rewards = make_rewards("remote", task="understanding")
        assert score(rewards, given, prompts).total.tolist() == [1.0, 0.0, 1.0]


def test_what_a_server_is_sent():
    prompts = [Prompt("a", {"answer": [1, "é"]}), Prompt("b", {})]
    sent = [{"text": "a", "metadata": {"answer": [1, "é"]}}, {"text": "b", "metadata": {}}]
    with scripted((200, '{"rewards": [1, 2.5]}')) as seen:
        (reward,) = make_rewards("remote")
        assert reward.function(PIXELS[:2], prompts).tolist() == [1.0, 2.5]
    assert set(seen[0]) == {"images", "prompts"} and seen[0]["prompts"] == sent
    images = torch.stack([remote.image_of(png) for png in seen[0]["images"]])
    assert torch.allclose(images, ROUNDED[:2], atol=1e-6)
    with scripted((200, '{"rewards": [1, 2.5]}'), task="understanding") as seen:
        make_rewards("remote", task="understanding")[0].function(["x", "y"], prompts)
    assert seen == [{"answers": ["x", "y"], "prompts": sent}]


def test_images_survive_the_way():
    """Not square, no grey, out of range: clamped as for any image file."""
    pixels = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(1)) * 1.4 - 0.2
    expected = (pixels.clamp(0, 1) * 255).round() / 255
    assert torch.allclose(remote.image_of(remote.png_of(pixels)), expected, atol=1e-6)


FAIL, DONE = (503, '{"error": "out of\\nmemory"}'), (200, '{"rewards": [1, 2, 3, 4, 5]}')


@pytest.mark.parametrize("answers, tries", [((DONE,), 1), ((FAIL, DONE), 2), (((None, ""), FAIL, DONE), 3)])
def test_what_may_pass_is_tried_again(answers, tries):
    with scripted(*answers) as seen:
        assert score(make_rewards("remote"), PIXELS, PROMPTS).total.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert len(seen) == tries and all(request == seen[0] for request in seen)


@pytest.mark.parametrize("answers, tries, message", [
    ((FAIL,), 4, r"status 503: out of memory \(tries: 4\)"),
    (((None, ""),), 4, "without response"),
    (((500, "<html>"),), 4, "status 500: Internal Server Error"),
    (((400, '{"error": "no"}'), DONE), 1, r"status 400: no \(tries: 1\)"),
    (((404, "[]"), DONE), 1, "status 404: Not Found"),
    (((200, "<html>"), DONE), 1, "the answer is not a JSON object"),
    (((200, "[1, 2, 3, 4, 5]"), DONE), 1, "the answer is not a JSON object"),
    (((200, "{}"), DONE), 1, "expected {\"rewards\": "),
    (((200, '{"rewards": 1}'), DONE), 1, "expected {\"rewards\": "),
    (((200, '{"rewards": [1, 2, null, 4, 5]}'), DONE), 1, "expected {\"rewards\": "),
    (((200, '{"rewards": [1, 2]}'), DONE), 1, "2 rewards for 5 images"),
    (((200, '{"rewards": [1, NaN, 3, 4, Infinity]}'), DONE), 1, "2 values that are not finite"),
])  # fmt: skip
def test_failures_name_the_server_and_the_cause(answers, tries, message):
    with scripted(*answers) as seen:
        rewards = make_rewards("remote")
        with pytest.raises(RewardError, match=message) as error:
            score(rewards, PIXELS, PROMPTS)
        assert len(seen) == tries and "reward 'remote'" in str(error.value) and "\n" not in str(error.value)
        assert os.environ["REWARD_URL"] in str(error.value) or "not finite" in message


def test_back_off_doubles():
    with scripted(FAIL), pytest.MonkeyPatch.context() as patch:
        waits = []
        patch.setattr(remote, "BACK_OFF", 0.5)
        patch.setattr(remote.time, "sleep", waits.append)
        with pytest.raises(RewardError):
            make_rewards("remote")[0].function(PIXELS, PROMPTS)
    assert waits == [0.5, 1.0, 2.0]


def test_a_server_that_does_not_answer_is_not_waited_for():
    asked = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.wait(2)

    with running(HTTPServer(("127.0.0.1", 0), Slow)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "FIRST_TIME_OUT", 0.05)
        with pytest.raises(InputError, match=r"timed out \(tries: 1\)"):
            make_rewards("remote")
        asked.set()


@pytest.mark.parametrize("url, message", [
    (None, "REWARD_URL is ''"),
    ("localhost:8000", "REWARD_URL is 'localhost:8000'"),
    ("file:///etc/hostname", "REWARD_URL is 'file:"),
    (REFUSED, REFUSED + r": .*refused \(tries: 1\)"),
    ("http://127.0.0.1:port", "nonnumeric port"),
])  # fmt: skip
def test_a_wrong_address_is_refused_before_training(url, message):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "*")
        patch.setenv("REWARD_URL", url or "")
        with pytest.raises(InputError, match=message) as error:
            set_up(flow_grpo.Args(reward="remote"))
        assert "reward_server.py" in str(error.value) and "\n" not in str(error.value)


def test_a_server_of_the_other_task_is_refused():
    with scripted(task="understanding"), pytest.raises(InputError, match="serves the task 'understanding'"):
        make_rewards("remote")
    with scripted(task="generation"), pytest.raises(InputError, match="serves the task 'generation'"):
        make_rewards("remote", task="understanding")


def test_prompts_are_checked_by_the_server():
    with scripted((200, "{}"), (400, '{"error": "no digit in it"}')) as seen:
        with pytest.raises(InputError, match="/check: status 400: no digit in it"):
            set_up(flow_grpo.Args(reward="remote"))  # the prompts of training, then those of evaluations
    digits = [{"text": p.text, "metadata": {}} for p in load_prompts("digits")]
    assert seen == [{"prompts": digits}] * 2
    with serving("label"), pytest.MonkeyPatch.context() as patch:
        assert set_up(flow_grpo.Args(reward="remote")).rewards[0].name == "remote"
        patch.setitem(CHECKS, "label", lambda prompts: digit_of(prompts[-1].text + " and nine and ten"))
        with pytest.raises(InputError, match="/check: status 400: .* must name exactly one digit"):
            check_prompts(make_rewards("remote"), PROMPTS)


def test_training_with_a_server_is_training_without(tmp_path):
    options = {"num_iterations": 2, "num_prompts": 2, "group_size": 4, "eval_samples": 10, "adam_eps": 1e-2}
    with serving("label"):
        served = flow_grpo.train(flow_grpo.Args(output_dir=str(tmp_path / "a"), reward="remote", **options))
    local = flow_grpo.train(flow_grpo.Args(output_dir=str(tmp_path / "b"), **options))
    for name in ("reward_mean", "eval_reward"):
        expected = [m[name] for m in local]
        assert [m[name] for m in served] == pytest.approx(expected, abs=5e-3)  # pixels are rounded
    assert served[0]["reward_remote"] == served[0]["reward_mean"]


@pytest.mark.parametrize("path, body, status, message", [
    ("/score", b"\x80pickle", 400, "not JSON"),
    ("/score", b"[1]", 400, "not a JSON object"),
    ("/score", b"{}", 400, 'expected "prompts"'),
    ("/score", b'{"prompts": [{"text": 1, "metadata": {}}]}', 400, 'expected "prompts"'),
    ("/score", b'{"prompts": [{"text": "a"}]}', 400, 'expected "prompts"'),
    ("/score", b'{"prompts": [{"text": "a", "metadata": {}}]}', 400, 'expected "images"'),
    ("/score", b'{"prompts": [{"text": "a", "metadata": {}}], "images": ["?"]}', 400, "a PNG in base64"),
    ("/score", b'{"prompts": [{"text": "a", "metadata": {}}], "images": ["AAAA"]}', 400, "a PNG in base64"),
    ("/nowhere", b"{}", 404, "no such path"),
])  # fmt: skip
def test_requests_that_cannot_be_used(path, body, status, message):
    with serving("label") as url:
        found, content = post(url, path, body)
        assert found == status and message in content["error"] and "\n" not in content["error"]


def test_the_server_survives_a_failing_reward():
    label, calls = REWARDS["label"]("cpu"), []

    def fails_first(pixels, prompts):
        calls.append(1)
        if len(calls) <= 4:
            raise OSError("disk on fire")
        return label(pixels, prompts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "label", lambda device: fails_first)
        with serving("label"):
            rewards = make_rewards("remote")
            with pytest.raises(RewardError, match="500: reward 'label' failed: OSError: disk on fire"):
                score(rewards, PIXELS, PROMPTS)
            assert torch.allclose(score(rewards, PIXELS, PROMPTS).total, label(ROUNDED, PROMPTS), atol=1e-6)


def test_requests_are_scored_one_after_the_other():
    inside, together = [], []

    def slow(pixels, prompts):
        inside.append(1)
        together.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return pixels.mean((1, 2, 3))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "label", lambda device: slow)
        with serving("label"), ThreadPoolExecutor(4) as pool:
            (reward,) = make_rewards("remote")
            found = pool.map(lambda i: reward.function(PIXELS[i : i + 1], PROMPTS[i : i + 1]), range(4))
            assert torch.allclose(torch.cat(list(found)), ROUNDED[:4].mean((1, 2, 3)), atol=1e-6)
    assert together == [1] * 4


def test_an_address_that_is_taken(capsys):
    script = runpy.run_path(str(SCRIPT))
    with serving("jpeg") as url, pytest.raises(SystemExit) as left:
        script["main"](script["Args"](reward="jpeg", port=int(url.split(":")[-1])))
    said = capsys.readouterr().err
    assert (
        left.value.code == 2
        and said.startswith("error: cannot listen at 127.0.0.1")
        and said.count("\n") == 1
    )


def test_the_script():
    """It says where it listens (this machine alone), serves, and ends quietly when it is interrupted."""
    command = [sys.executable, SCRIPT, "--reward", "jpeg", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline()
        assert said.startswith("serving jpeg at http://127.0.0.1:"), process.stderr.read()
        url = said.split()[-1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REWARD_URL", url)
            patch.setenv("no_proxy", "*")
            found = score(make_rewards("remote"), PIXELS, PROMPTS).total
        assert torch.equal(found, score(make_rewards("jpeg"), PIXELS, PROMPTS).total)
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and errors == ""
