"""The published Flow-GRPO (github.com/yifan123/flow_grpo, or a fork of it) by the contract's names.

    FLOW_GRPO=CHECKOUT python -m oracle --impl oracle/adapters/flow_grpo_public.py
    FLOW_GRPO=CHECKOUT FLOW_GRPO_STEP=wan python -m oracle --impl oracle/adapters/flow_grpo_public.py

It runs code of the checkout, as oracle/adapters/checkout.py says, and needs neither diffusers nor weights.

Where the functions come from
    transition, ode_step    sde_step_with_logprob of diffusers_patch/sd3_sde_with_logprob.py, or with
                            FLOW_GRPO_STEP=wan of diffusers_patch/wan_pipeline_with_logprob.py
    gaussian_log_prob       its second result
    gaussian_kl             the statements `kl_loss = ...` of scripts/train_sd3.py or train_wan2_1.py
    group_advantages        PerPromptStatTracker, and the statement that clamps in the script
    clipped_surrogate       the statements `ratio`, `unclipped_loss`, `clipped_loss`, `policy_loss` = ...
The script's main(), its sampling loop and its grid (the scheduler of diffusers) are not covered.

Conventions that are translated
    - The log-prob and the KL are means over the latent's entries there, sums here: times their number.
    - KL and loss are averaged over the batch there: the KL is asked sample by sample.
    - Sigmas are looked up in a scheduler's grid there: a grid 1, sigma_clip, sigma, sigma_next, 0.
    - step_std is what the sampling branch multiplies its noise with, not the returned std_dev_t, which is
      another quantity for each kind of step; the KL formula gets std_dev_t, as in the script.
    - gaussian_log_prob takes a mean there is no argument for: it comes from x = 0 and a velocity.
    - Old log-probs and advantages are stored numbers in the script: they are detached. Weights, which it
      has not, multiply the advantages.
    - The step of Wan has no noise level: its g is sigmas[1] * sigma. With sigmas[1] = noise_level / sigma it
      is g = noise_level, the contract's `dance`.
"""

import os

from oracle.adapters.checkout import (
    Checkout,
    NoCheckout,
    NotOffered,
    PublishedStep,
    Step,
    advantages_of,
    assigns,
    sd3_step,
    surrogate_of,
)

SCRIPTS = {"sd3": "scripts/train_sd3.py", "wan": "scripts/train_wan2_1.py"}


def wan_step(checkout: Checkout, script: str) -> PublishedStep:
    """The step of Wan2.1, which returns g and the square root of dt if asked for."""
    path = "flow_grpo/diffusers_patch/wan_pipeline_with_logprob.py"
    function = checkout.load(path, "sde_step_with_logprob")
    kl = checkout.statements(script, assigns("kl_loss"), "assigns kl_loss")

    def arguments(step: Step, ode: bool) -> tuple[float, dict]:
        if step.kind != "dance":
            raise NotOffered(f"the step of Wan has no kind {step.kind}: it is checked as dance")
        return step.noise_level / step.sigma, {"determistic": ode, "return_dt_and_std_dev_t": True}

    return PublishedStep(function, kl, 5, arguments, "dance")


checkout = Checkout("FLOW_GRPO", "github.com/yifan123/flow_grpo")
model = os.environ.get("FLOW_GRPO_STEP", "sd3")
if model not in SCRIPTS:
    raise NoCheckout(f"FLOW_GRPO_STEP={model}: it must be one of {', '.join(SCRIPTS)}")

step = (wan_step if model == "wan" else sd3_step)(checkout, SCRIPTS[model])
ode_step = step.ode_step
transition = step.transition
gaussian_log_prob = step.gaussian_log_prob
gaussian_kl = step.gaussian_kl
clipped_surrogate = surrogate_of(checkout, SCRIPTS[model])
group_advantages = advantages_of(checkout, SCRIPTS[model], one_tracker_a_step=False)
