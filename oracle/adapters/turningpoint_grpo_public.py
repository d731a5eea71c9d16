"""The published TurningPoint-GRPO (github.com/YunzeTong/TurningPoint-GRPO) by the contract's names.

    TURNINGPOINT_GRPO=CHECKOUT python -m oracle --impl oracle/adapters/turningpoint_grpo_public.py

It runs code of the checkout, as oracle/adapters/checkout.py says, and needs neither diffusers nor weights.

Where the functions come from, besides those that oracle/adapters/flow_grpo_public.py names, here with
scripts/my_train_sd3_fast_with_op3.py and one PerPromptStatTracker a step
    incremental_rewards, turning_points, step_rewards
                   the script's loop over sampling batches that assigns `d_list`, executed on one batch with
                   the flags of the published run (scripts/single_node/common_op3.sh); rule="trend" unsets the
                   two flags that demand consistency
    balance        the script's statement `if config.use_balanced_bonus ...`, ranking by its d_list (flag
                   take_delta_global_as_main), which holds r_agg here: so it is the procedure that `balance`
                   checks, and `step_rewards` the quantity that the published flags rank by
Not covered: the sampling loop, and so which noise the baseline R[0] starts from, and how often the final
image is scored; propagation of a bonus, which is off in the published run.

Conventions that are translated
    - All that oracle/adapters/flow_grpo_public.py lists.
    - R[0] is the script's ode_rewards, R[1 .. n] its intermediate_results, R[n] also its rewards.
    - A sampling batch is all of R: the script balances each by itself.
"""

import ast
from types import SimpleNamespace

import torch
from torch import Tensor

from oracle.adapters.checkout import (
    Checkout,
    NotOffered,
    advantages_of,
    assigns,
    execute,
    sd3_step,
    surrogate_of,
)

SCRIPT = "scripts/my_train_sd3_fast_with_op3.py"
FLAGS = {
    "turn_on_bonus_global_step": 0,
    "apply_first_step_bonus": True,
    "use_delta_global": True,
    "take_delta_global_as_main": False,
    "eta": 1.0,
    "select_first_step_only_from_consistent_trajectory": True,
    "select_inter_step_only_from_consistent_trajectory": True,
    "select_only_positive_intermediate_step": False,
    "use_balanced_bonus": True,
    "use_sde_minus_rt": True,
    "propagate_bonus_to_future_steps": False,
    "drop_original_reward_when_having_bonus": True,
    "indicator_wo_delta_global_constraint": False,
}
CONSISTENT = [name for name in FLAGS if name.endswith("only_from_consistent_trajectory")]


def is_reward_loop(node: ast.stmt) -> bool:
    """The loop whose body assigns d_list."""
    names = [target for part in getattr(node, "body", []) for target in getattr(part, "targets", [])]
    return isinstance(node, ast.For) and any(getattr(target, "id", "") == "d_list" for target in names)


def is_balancing(node: ast.stmt) -> bool:
    """The test of config.use_balanced_bonus under which indicator_list is replaced."""
    if not isinstance(node, ast.If) or "config.use_balanced_bonus" not in ast.unparse(node.test):
        return False
    return any(isinstance(part, ast.stmt) and assigns("indicator_list")(part) for part in ast.walk(node))


checkout = Checkout("TURNINGPOINT_GRPO", "github.com/YunzeTong/TurningPoint-GRPO")
reward_loop = checkout.statements(SCRIPT, is_reward_loop, "is a loop that assigns d_list")
balancing = checkout.statements(SCRIPT, is_balancing, "balances indicator_list")


def process(R: Tensor, rule: str = "consistent", balanced: bool = False, tolerance: float = 0.0) -> dict:
    """Run the script's loop on one sampling batch. R (..., n+1). Returns its names afterwards."""
    if tolerance:
        raise NotOffered("the script has no tolerance")
    columns = R.reshape(-1, R.shape[-1]).unbind(dim=1)
    results = [{"sde_steps_count": j, "rewards": {"avg": column}} for j, column in enumerate(columns)]
    sample = {
        "rewards": {"avg": columns[-1]},
        "ode_rewards": {"avg": columns[0]},
        "intermediate_results": results[1:],
    }
    flags = {**FLAGS, "use_balanced_bonus": balanced, **{name: rule == "consistent" for name in CONSISTENT}}
    return execute(reward_loop, samples=[sample], config=SimpleNamespace(**flags), global_step=0)


def shaped(result: Tensor, R: Tensor) -> Tensor:
    return result.reshape(*R.shape[:-1], R.shape[-1] - 1)


def incremental_rewards(R: Tensor) -> Tensor:
    """The script's d_list."""
    return shaped(torch.stack(process(R)["d_list"], dim=1), R)


def turning_points(R: Tensor, rule: str = "consistent", tolerance: float = 0.0) -> Tensor:
    """The script's indicators before balancing."""
    return shaped(torch.stack(process(R, rule, tolerance=tolerance)["indicator_list"], dim=1) > 0, R)


def step_rewards(
    R: Tensor, rule: str = "consistent", balanced: bool = True, tolerance: float = 0.0
) -> Tensor:
    """The script's process_rewards."""
    return shaped(process(R, rule, balanced, tolerance)["sample"]["process_rewards"], R)


def balance(mask: Tensor, r_agg: Tensor) -> Tensor:
    """The script's indicators after balancing, with r_agg for the quantity that it ranks by."""
    rows, awards = (t.reshape(-1, t.shape[-1]) for t in (mask, r_agg))
    indicators, candidates = list(rows.to(awards.dtype).unbind(1)), list(awards.unbind(1))
    config = SimpleNamespace(**{**FLAGS, "take_delta_global_as_main": True})
    names = {"indicator_list": indicators, "d_list": candidates, "s_list": candidates, "global_step": 0}
    after = execute(balancing, config=config, **names)["indicator_list"]
    return (torch.stack(after, dim=1) > 0).reshape(mask.shape)


step = sd3_step(checkout, SCRIPT)
ode_step = step.ode_step
transition = step.transition
gaussian_log_prob = step.gaussian_log_prob
gaussian_kl = step.gaussian_kl
clipped_surrogate = surrogate_of(checkout, SCRIPT)
group_advantages = advantages_of(checkout, SCRIPT, one_tracker_a_step=True)
