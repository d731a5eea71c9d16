"""One file a model. A policy is a plain class with the methods of `DigitsPolicy` (continuous) or
`DigitTokensPolicy` (discrete); there is no base class."""

from functools import partial

from shared.args import MODEL_OPTIONS, flag
from shared.errors import InputError
from shared.policies.digit_tokens import DigitTokensPolicy
from shared.policies.digits import ASSETS, DigitsPolicy
from shared.policies.sd3 import SD3Policy

MODELS = {  # continuous
    "digits": DigitsPolicy,
    "digits-faithful": partial(DigitsPolicy, weights=ASSETS / "digits_faithful.safetensors"),
    "sd3.5-m": SD3Policy,
}
TOKEN_MODELS = {  # discrete
    "digit-tokens": DigitTokensPolicy,
    "digit-tokens-masked": partial(
        DigitTokensPolicy, weights=ASSETS / "digit_tokens_masked.safetensors", path="mask"
    ),
    "digit-tokens-timed": partial(
        DigitTokensPolicy, weights=ASSETS / "digit_tokens_timed.safetensors", time_input=True
    ),
}


def make_policy(model: str, device="cpu", task: str | None = None, options: dict | None = None):
    """The policy of a model by name, with its pretrained weights, on a device.

    task: None for a continuous model; "generation" or "understanding" for a discrete one. options: of a real
    model, as `model_options` gives them; the model has a default for each. Raises InputError for an unknown
    name, for a model of the other kind, and for options that the model does not have.
    """
    options = options or {}
    models, others = (MODELS, TOKEN_MODELS) if task is None else (TOKEN_MODELS, MODELS)
    if model in others:
        kind, files = (
            ("discrete", "algos/dflow_grpo.py")
            if task is None
            else ("continuous", "algos/flow_grpo.py, algos/tp_grpo.py or algos/op_grpo.py")
        )
        raise InputError(f"model {model!r} is {kind}: train it with {files}, or use {', '.join(models)} here")
    if model not in models:
        raise InputError(f"unknown model {model!r}: known are {', '.join(models)}")
    for name in options:
        if name not in MODEL_OPTIONS.get(model, ()):
            having = ", ".join(other for other, names in MODEL_OPTIONS.items() if name in names)
            raise InputError(f"{flag(name)} is an option of {having}, not of {model}")
    return models[model](device, **options) if task is None else models[model](device, task=task)
