"""One file a model. A policy is a plain class with the methods of `DigitsPolicy`; there is no base class."""

from functools import partial

from shared.errors import InputError
from shared.policies.digits import ASSETS, DigitsPolicy

MODELS = {
    "digits": DigitsPolicy,
    "digits-faithful": partial(DigitsPolicy, weights=ASSETS / "digits_faithful.safetensors"),
}


def make_policy(model: str, device="cpu"):
    """The policy of a model by name, with its pretrained weights, on a device. Raises InputError for an
    unknown name."""
    if model not in MODELS:
        raise InputError(f"unknown model {model!r}: known are {', '.join(MODELS)}")
    return MODELS[model](device)
