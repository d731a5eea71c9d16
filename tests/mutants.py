"""Named wrong versions of the project's functions, each with the test that must fail on it (test_mutants.py).

A mutant replaces one piece of its function's source. Its fault is what one would say of the wrong version.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A function by its import path, what is wrong, the replaced source text, and the test that notices."""

    function: str
    fault: str
    old: str
    new: str
    killed_by: str


SDE, GRPO, ROLLOUT = "shared.sde.", "shared.grpo.", "shared.rollout."
FLOW, TP, OP = "algos.flow_grpo.", "algos.tp_grpo.", "algos.op_grpo."
TRAINING = "shared.training."
MOMENTS = "test_sde.test_moments_are_the_papers"
REPLAY = "test_rollout.test_rollout_replays_its_noise"
WAVEFRONT = "test_rollout.test_wavefront_is_one_at_a_time"
SURROGATE = "test_grpo.test_surrogate_value_and_gradient_off_policy"
FORMULA = "test_grpo.test_advantages_are_the_formula"
PATTERNS = "test_tp_grpo.test_turning_points_are_the_definitions_on_every_sign_pattern"
BALANCE = "test_tp_grpo.test_balance_keeps_the_largest_awards"
BY_HAND = "test_tp_grpo.test_step_rewards_by_hand"
WEIGHTED = "test_op_grpo.test_weighted_expectations_are_those_of_the_old_policy"
CORRECTED = "test_op_grpo.test_the_corrected_gradient_is_exact_and_the_naive_one_is_not"
OP_LOSS = "test_op_grpo.test_step_loss_off_policy"
PER_DIM = "test_op_grpo.test_weights_of_averaged_log_probabilities"
BUFFER = "test_op_grpo.test_the_buffer_keeps_the_better_of_two_after_decay"
EVICTION = "test_op_grpo.test_of_too_many_the_one_of_lowest_decayed_reward_leaves"
SAMPLES = "test_op_grpo.test_samples_of_the_buffer_are_different_and_every_entry_can_be_drawn"
REPLAYED = "test_rollout.test_replayed_rows_follow_their_states"
VARIANCE = "test_rollout.test_log_weight_variance_is_the_closed_form"
UNEVEN = "test_grpo.test_weight_metrics"
SET_UP = "test_training.test_what_is_set_up_before_a_run"
DIGIT_TOKENS = "shared.policies.digit_tokens."
LEVEL_PATHS = "test_digit_tokens.test_metric_paths_are_a_quarter_circle_and_labels_equally_far_apart"
CARRY_OVER = "test_digit_tokens.test_carry_over_keeps_what_is_revealed_with_a_gradient_of_exactly_zero"
ANSWERS = "test_rewards.test_answers_are_right_whatever_their_case_and_blanks"
DFLOW, TOKEN_ROLLOUT = "algos.dflow_grpo.", "shared.token_rollout."
DFLOW_TEST = "test_dflow_grpo."
UNBIASED = DFLOW_TEST + "test_mc_is_unbiased_with_the_used_draw"
GOLDEN_MASKS = DFLOW_TEST + "test_aggregates_are_over_the_tokens_inside_the_mask"
GOLDEN_JOINT = DFLOW_TEST + "test_golden_step_of_three_tokens"
DIVERGENCE = DFLOW_TEST + "test_posterior_kl_is_the_divergence"
BY_TOKEN = DFLOW_TEST + "test_surrogate_by_token_clips_each_and_averages_each_sample_first"
PAIRS = DFLOW_TEST + "test_dpo_pairs_the_best_with_the_worst"
MEAN_FIELD = DFLOW_TEST + "test_mean_field_is_the_posterior_at_the_source"
EXACT_GRADIENT = DFLOW_TEST + "test_the_loss_has_the_exact_gradient_of_the_expected_reward"
KL_OF_LOSS = DFLOW_TEST + "test_kl_and_dpo_compare_with_the_reference"
K3 = DFLOW_TEST + "test_k3_estimates_the_kl_of_the_transitions"
STEPS = DFLOW_TEST + "test_which_steps_are_trained"
RESOLVED = DFLOW_TEST + "test_defaults"
NOISE = DFLOW_TEST + "test_noise_depends_on_the_sample_alone"
LAW = DFLOW_TEST + "test_the_rollout_has_the_exact_law"
KEEPS = DFLOW_TEST + "test_what_the_rollout_keeps"
CUT = DFLOW_TEST + "test_top_k_cuts_the_posterior"
RELEASED = DFLOW_TEST + "test_released_sampler_is_another_kernel_for_more_than_one_draw"
AROUND = DFLOW_TEST + "test_the_noise_of_the_ratio_is_measured_around_the_exact_one"
JOINED = DFLOW_TEST + "test_samples_of_several_batches_are_joined_in_order"
TOKEN_EVALUATION = DFLOW_TEST + "test_evaluations_of_tokens"
CTMC, PATHS = "shared.ctmc.", "shared.paths."
TOKENS, DISTANCES = "shared.tokens.", "shared.distances."
MIXTURE, METRIC = PATHS + "MixturePath.", PATHS + "MetricPath."
CARRIED = "test_ctmc.test_rates_carry_their_path"
KERNEL = "test_ctmc.test_kernel_is_its_definition"
CLOSED = "test_ctmc.test_closed_forms_are_the_sum_over_the_vocabulary"
RESPONSIBILITY = "test_ctmc.test_gradient_is_responsibility_minus_posterior"
IDENTITY = "test_ctmc.test_an_identity_step_is_exactly_zero_with_zero_gradient"
FREQUENCIES = "test_ctmc.test_sampling_frequencies_are_the_transition"
BOUNDED = "test_ctmc.test_table_error_is_bounded"
INVERSE = "test_ctmc.test_a_drawn_symbol_is_the_first_beyond_its_uniform_number"
SAME_DRAWS = "test_ctmc.test_a_token_draws_the_same_whatever_the_batch"
REFUSED = "test_ctmc.test_bad_arguments_are_refused"
STEP_LOSS = "test_training.test_step_loss_off_policy"

MUTANTS = [
    # ---- samplers ----
    Mutant(
        SDE + "shifted_sigmas",
        "shift enters the denominator whole",
        "(shift - 1) * s",
        "shift * s",
        "test_sde.test_shifted_sigmas_closed_form",
    ),
    Mutant(
        SDE + "shifted_sigmas",
        "no sigma = 0 at the end",
        "num_steps, -1, -1",
        "num_steps, 0, -1",
        "test_sde.test_shifted_sigmas_closed_form",
    ),
    Mutant(
        SDE + "ode_step",
        "steps towards noise",
        "- v * (",
        "+ v * (",
        "test_sde.test_ode_step_moves_towards_data",
    ),
    Mutant(SDE + "transition", "step_std lacks sqrt(dt)", "g * math.sqrt(dt)", "g", MOMENTS),
    Mutant(
        SDE + "transition",
        "score term lacks the half",
        "step_std**2 / (2 * sigma)",
        "step_std**2 / sigma",
        MOMENTS,
    ),
    Mutant(
        SDE + "transition",
        "no score term: noise is added and never removed",
        " - eps_hat * shrink",
        "",
        "test_sde.test_marginals_at_fixed_and_growing_numbers_of_steps",
    ),
    Mutant(
        SDE + "transition",
        "the guard at sigma = 1 tests equality",
        "(1 - min(sigma, sigma_clip)))",
        "(1 - (sigma_clip if sigma == 1 else sigma)))",
        "test_sde.test_first_step_std_is_the_noise_level",
    ),
    Mutant(
        SDE + "transition", "eps_hat has the sign of data", "+ v * (1 - sigma)", "- v * (1 - sigma)", MOMENTS
    ),
    Mutant(
        SDE + "transition",
        "cps takes its std from sigma",
        "sigma_next * math.sin",
        "sigma * math.sin",
        MOMENTS,
    ),
    Mutant(
        SDE + "transition",
        "cps is not the ODE without noise",
        "(1 - math.cos(",
        "(math.cos(",
        "test_sde.test_noise_level_zero_is_the_ode_exactly",
    ),
    Mutant(
        SDE + "transition",
        "flow and dance are swapped",
        'kind == "flow" else 1.0',
        'kind == "dance" else 1.0',
        MOMENTS,
    ),
    Mutant(
        SDE + "transition",
        "returns the variance",
        "torch.tensor(step_std,",
        "torch.tensor(step_std**2,",
        MOMENTS,
    ),
    Mutant(
        SDE + "transition",
        "the score term is detached",
        "+ v * (1 - sigma)",
        "+ v.detach() * (1 - sigma)",
        "test_sde.test_gradients_reach_the_velocity_only_through_the_mean",
    ),
    Mutant(
        SDE + "transition",
        "16-bit latents stay 16-bit",
        "dtype=mean.dtype",
        "dtype=x.dtype",
        "test_sde.test_sixteen_bit_latents_are_computed_in_float32",
    ),
    Mutant(
        SDE + "gaussian_log_prob",
        "mean over entries",
        ".sum(1)",
        ".mean(1)",
        "test_sde.test_log_prob_is_the_density",
    ),
    Mutant(
        SDE + "gaussian_log_prob",
        "log std is missing",
        "(math.log(step_std) + ",
        "(",
        "test_sde.test_log_prob_is_the_density",
    ),
    Mutant(
        SDE + "gaussian_log_prob",
        "log 2 pi is missing",
        " + 0.5 * math.log(2 * math.pi)",
        "",
        "test_sde.test_log_prob_is_the_density",
    ),
    Mutant(
        SDE + "gaussian_log_prob",
        "the half is missing",
        "-0.5 * z**2",
        "-(z**2)",
        "test_sde.test_log_prob_is_the_density",
    ),
    Mutant(
        SDE + "gaussian_log_prob",
        "the mean is detached",
        "- mean) / step_std",
        "- mean.detach()) / step_std",
        "test_sde.test_gradients_reach_the_velocity_only_through_the_mean",
    ),
    Mutant(
        SDE + "gaussian_log_prob",
        "a deterministic step has a density",
        "if not step_std > 0:",
        "if False:",
        "test_sde.test_bad_steps_are_refused",
    ),
    Mutant(
        SDE + "gaussian_kl",
        "the variance is missing",
        "(mean - mean_ref) / step_std",
        "(mean - mean_ref)",
        "test_sde.test_kl_is_the_divergence",
    ),
    Mutant(
        SDE + "gaussian_kl",
        "dt is missing: divides by g^2",
        "(mean - mean_ref) / step_std",
        "(mean - mean_ref) / (step_std / 0.25**0.5)",
        "test_sde.test_kl_is_the_divergence",
    ),
    Mutant(
        SDE + "gaussian_kl",
        "the half is missing",
        ".sum(1) / 2",
        ".sum(1)",
        "test_sde.test_kl_is_the_divergence",
    ),
    Mutant(
        SDE + "gaussian_kl",
        "no gradient",
        "(mean - mean_ref)",
        "(mean - mean_ref).detach()",
        "test_sde.test_gradients_reach_the_velocity_only_through_the_mean",
    ),
    # ---- advantages and the surrogate ----
    Mutant(GRPO + "group_advantages", "mean over prompts", "r.mean(dim=1", "r.mean(dim=0", FORMULA),
    Mutant(GRPO + "group_advantages", "unbiased std", "correction=0", "correction=1", FORMULA),
    Mutant(GRPO + "group_advantages", "no eps", "correction=0) + eps)", "correction=0))", FORMULA),
    Mutant(GRPO + "group_advantages", "the batch's std is the group's", "else (0, 1)", "else 1", FORMULA),
    Mutant(
        GRPO + "group_advantages",
        "the batch's std mixes steps",
        "else (0, 1)",
        "else tuple(range(r.dim()))",
        FORMULA,
    ),
    Mutant(
        GRPO + "group_advantages",
        "no clamp",
        ".clamp(-clamp, clamp)",
        "",
        "test_grpo.test_advantages_are_clamped",
    ),
    Mutant(
        GRPO + "group_advantages",
        "rounding noise in a group of equal rewards",
        ".masked_fill(all_equal, 0.0)",
        "",
        "test_grpo.test_equal_rewards_give_exactly_zero",
    ),
    Mutant(GRPO + "clipped_surrogate", "min for max", "torch.maximum", "torch.minimum", SURROGATE),
    Mutant(
        GRPO + "clipped_surrogate",
        "clips above only",
        "ratio.clamp(1 - below, 1 + above)",
        "ratio.clamp(max=1 + above)",
        SURROGATE,
    ),
    Mutant(
        GRPO + "clipped_surrogate",
        "no clip",
        "ratio.clamp(1 - below, 1 + above)",
        "ratio",
        SURROGATE,
    ),
    Mutant(
        GRPO + "clipped_surrogate",
        "the ratio is detached: nothing is learned",
        "torch.exp(log_prob_new - ",
        "torch.exp(log_prob_new.detach() + 0 * log_prob_new - ",
        SURROGATE,
    ),
    Mutant(
        GRPO + "clipped_surrogate",
        "the ratio is inverted",
        "log_prob_new - log_prob_old.detach()",
        "log_prob_old.detach() - log_prob_new",
        SURROGATE,
    ),
    Mutant(
        GRPO + "clipped_surrogate",
        "the reward falls",
        "torch.maximum(-advantages * ratio, -advantages",
        "torch.maximum(advantages * ratio, advantages",
        SURROGATE,
    ),
    Mutant(
        GRPO + "clipped_surrogate", "weights are ignored", "if weights is not None:", "if False:", SURROGATE
    ),
    Mutant(GRPO + "clipped_surrogate", "weights get a gradient", "weights.detach()", "weights", SURROGATE),
    Mutant(
        GRPO + "clipped_surrogate",
        "the old policy gets a gradient",
        "log_prob_old.detach()",
        "log_prob_old",
        SURROGATE,
    ),
    Mutant(
        GRPO + "clipped_surrogate", "sum over samples", "per_sample.mean()", "per_sample.sum()", SURROGATE
    ),
    Mutant(
        GRPO + "clipped_surrogate",
        "clip fraction counts one side",
        "((shift < -below) | (shift > above))",
        "(shift > above)",
        SURROGATE,
    ),
    Mutant(
        GRPO + "clipped_surrogate",
        "shapes broadcast",
        "t.shape != log_prob_new.shape",
        "False",
        "test_grpo.test_surrogate_refuses_shapes_that_would_broadcast",
    ),
    # ---- rollouts ----
    Mutant(
        ROLLOUT + "sample_generator",
        "every iteration draws the same noise",
        "(seed, iteration, sample)",
        "(seed, sample)",
        "test_rollout.test_sample_noise_depends_on_the_sample_alone",
    ),
    Mutant(
        ROLLOUT + "sample_noise",
        "noise depends on the place in the micro-batch",
        "for i in samples]",
        "for i in range(len(samples))]",
        "test_rollout.test_sample_noise_depends_on_the_sample_alone",
    ),
    Mutant(
        ROLLOUT + "rollout",
        "the first step reuses the initial noise",
        "noise[:, 1 + k - start]",
        "noise[:, k - start]",
        REPLAY,
    ),
    Mutant(
        ROLLOUT + "rollout",
        "sigma_clip moves with the step",
        "sigma_clip=sigmas[1]",
        "sigma_clip=sigma_next",
        REPLAY,
    ),
    Mutant(
        ROLLOUT + "rollout",
        "stores the state after the step",
        "latents.append(x)\n                if with",
        "latents.append(ode_step(x, v, sigma, sigma_next))\n                if with",
        REPLAY,
    ),
    Mutant(
        ROLLOUT + "rollout",
        "log-prob of the unrounded state",
        "x = reach((mean + step_std * noise[:, 1 + k - start]).to(storage_dtype), k + 1 - start)",
        "x = mean + step_std * noise[:, 1 + k - start]; latents[-1] = latents[-1].to(storage_dtype)",
        "test_rollout.test_ratio_is_one_before_the_first_update",
    ),
    Mutant(
        ROLLOUT + "rollout",
        "completions skip their first step",
        "branches.append(ode_step(x, v, sigma, sigma_next).to(storage_dtype))",
        "branches.append(x)",
        WAVEFRONT,
    ),
    Mutant(
        ROLLOUT + "rollout",
        "completions get each other's prompts",
        "torch.cat([value] * len(branches))",
        "value.repeat_interleave(len(branches), 0)",
        WAVEFRONT,
    ),
    Mutant(
        ROLLOUT + "rollout",
        "the last completion is not the trajectory's end",
        "[*branches, x]",
        "[*branches, branches[-1]]",
        WAVEFRONT,
    ),
    Mutant(
        ROLLOUT + "rollout",
        "completions are not counted",
        "rows + len(joined), calls + used",
        "rows, calls",
        "test_rollout.test_wavefront_counts",
    ),
    Mutant(
        ROLLOUT + "rollout",
        "the window may hold the last step",
        "stop <= num_steps - 1",
        "stop <= num_steps",
        "test_rollout.test_windows_that_do_not_fit_are_refused",
    ),
    Mutant(
        ROLLOUT + "ode_sample",
        "stops a step early",
        "zip(sigmas[:-1], sigmas[1:], strict=True)",
        "zip(sigmas[:-2], sigmas[1:-1], strict=True)",
        "test_rollout.test_ode_sample_follows_the_grid",
    ),
    # ---- turning points ----
    Mutant(
        TP + "incremental_rewards",
        "the decrease",
        "R[..., 1:] - R[..., :-1]",
        "R[..., :-1] - R[..., 1:]",
        "test_tp_grpo.test_increments_telescope",
    ),
    Mutant(
        TP + "turning_points", "ignores the first step", "points[..., 0] = follows[..., 0]", "pass", PATTERNS
    ),
    Mutant(
        TP + "turning_points",
        "the first step of `trend` need not agree",
        "s[..., 0] > 0",
        "d[..., 0] > 0",
        PATTERNS,
    ),
    Mutant(TP + "turning_points", "`consistent` is `trend`", "points &= follows", "pass", PATTERNS),
    Mutant(
        TP + "turning_points",
        "continuation counts the step itself",
        "sign(R[..., -1:] - R[..., 1:]) > 0",
        "sign(R[..., -1:] - R[..., :-1]) > 0",
        "test_tp_grpo.test_last_step_is_never_a_consistent_turning_point",
    ),
    Mutant(
        TP + "turning_points", "a flat step ends a trend", "(s[..., :-1] < 0)", "(s[..., :-1] <= 0)", PATTERNS
    ),
    Mutant(
        TP + "turning_points",
        "local flips, whatever the overall trend",
        "d * sign(R[..., -1:] - R[..., :1])",
        "d",
        PATTERNS,
    ),
    Mutant(
        TP + "turning_points",
        "tolerance is ignored",
        "difference.abs() <= tolerance",
        "difference == 0",
        "test_tp_grpo.test_tolerance_ignores_jitter",
    ),
    Mutant(TP + "balance", "keeps the smallest", "descending=True", "descending=False", BALANCE),
    Mutant(TP + "balance", "ranks by the signed award", "r_agg.abs(), -1.0)", "r_agg, -99.0)", BALANCE),
    Mutant(TP + "balance", "drops all if one side is empty", "return mask", "return mask & False", BALANCE),
    Mutant(TP + "balance", "drops awards of 0", "(mask & (r_agg == 0))", "(mask & False)", BALANCE),
    Mutant(
        TP + "balance",
        "later ones win ties",
        "torch.where(side, r_agg.abs(), -1.0)",
        "torch.where(side, r_agg.abs() + 1e-3 * torch.arange(side.numel()).view_as(side), -1.0)",
        BALANCE,
    ),
    Mutant(
        TP + "step_rewards",
        "a turning point does not get its own change",
        "R[..., -1:] - R[..., :-1]",
        "R[..., -1:] - R[..., 1:]",
        BY_HAND,
    ),
    Mutant(
        TP + "step_rewards",
        "a turning point gets the whole trajectory's change",
        "R[..., -1:] - R[..., :-1]",
        "(R[..., -1:] - R[..., :1]).expand_as(R[..., 1:])",
        BY_HAND,
    ),
    Mutant(
        TP + "step_rewards",
        "the aggregate comes on top",
        "torch.where(points, r_agg,",
        "torch.where(points, r_agg + incremental_rewards(R),",
        BY_HAND,
    ),
    Mutant(
        TP + "step_rewards",
        "steps that do not turn get nothing",
        "incremental_rewards(R))",
        "0 * r_agg)",
        BY_HAND,
    ),
    Mutant(
        TP + "step_rewards",
        "dropped turning points keep their award",
        "points = balance(points, r_agg)",
        "pass",
        "test_tp_grpo.test_balance_spans_the_whole_batch_and_the_rest_falls_back",
    ),
    # ---- the objective, in both files ----
    *[
        mutant
        for algorithm in (FLOW, TP)
        for mutant in (
            Mutant(
                algorithm + "step_loss",
                "the KL is rewarded",
                "+ args.beta * kl",
                "- args.beta * kl",
                STEP_LOSS,
            ),
            Mutant(
                algorithm + "step_loss",
                "the KL has no gradient",
                "+ args.beta * kl",
                "+ args.beta * kl.detach()",
                STEP_LOSS,
            ),
            Mutant(
                algorithm + "step_loss",
                "the KL is to the policy itself",
                "policy.reference()",
                "torch.no_grad()",
                STEP_LOSS,
            ),
            Mutant(
                algorithm + "step_loss",
                "the KL is summed where the ratio is averaged",
                "mean_ref, step_std) / entries",
                "mean_ref, step_std)",
                STEP_LOSS,
            ),
            Mutant(algorithm + "step_loss", "per_dim is exact", "x[0].numel()", "1", STEP_LOSS),
            Mutant(
                algorithm + "step_loss",
                "the old log-prob of another step",
                "trajectory.log_prob[:, j]",
                "trajectory.log_prob[:, j - 1]",
                STEP_LOSS,
            ),
            Mutant(
                algorithm + "step_loss",
                "trains the step after",
                "trajectory.latents[:, j + 1]",
                "trajectory.latents[:, j + 2]",
                STEP_LOSS,
            ),
        )
    ],
    # ---- OP-GRPO ----
    Mutant(
        OP + "sequence_weight",
        "inverted",
        "(log_prob_old - log_prob_off)",
        "(log_prob_off - log_prob_old)",
        WEIGHTED,
    ),
    Mutant(
        OP + "sequence_weight", "the geometric mean of the steps", ".sum(dim=1)", ".mean(dim=1)", WEIGHTED
    ),
    Mutant(
        OP + "sequence_weight",
        "the last step is left out",
        "log_prob_off).sum",
        "log_prob_off)[:, :-1].sum",
        WEIGHTED,
    ),
    Mutant(OP + "sequence_weight", "capped", ".exp()", ".exp().clamp(max=1)", WEIGHTED),
    Mutant(
        OP + "hybrid_rollout",
        "the weight is of p_old alone",
        "log_prob_off.double() / entries)",
        "0 * log_prob_off.double())",
        WEIGHTED,
    ),
    Mutant(OP + "hybrid_rollout", "nothing is followed", "replayed=followed", "replayed=None", WEIGHTED),
    Mutant(OP + "hybrid_rollout", "p_off is p_old", "log_prob_off[replayed] = ", "unused = ", WEIGHTED),
    Mutant(OP + "hybrid_rollout", "per_dim weights are exact", "noise[0, 0].numel() if", "1 if", PER_DIM),
    Mutant(
        OP + "step_loss",
        "the correction is left out",
        "args.clip_range, weights)",
        "args.clip_range)",
        CORRECTED,
    ),
    Mutant(
        OP + "step_loss",
        "the weight is inside the clip",
        "clipped_surrogate(log_prob_new,",
        "clipped_surrogate(log_prob_new + weights.log(),",
        OP_LOSS,
    ),
    Mutant(OP + "step_loss", "always the naive ratio", "if args.naive_ratio", "if True", CORRECTED),
    Mutant(OP + "step_loss", "never the naive ratio", "if args.naive_ratio", "if False", OP_LOSS),
    Mutant(OP + "step_loss", "the KL is not weighted", "(weights * kl)", "kl", OP_LOSS),
    Mutant(OP + "step_loss", "the KL is rewarded", "+ args.beta * (", "- args.beta * (", OP_LOSS),
    Mutant(
        OP + "step_loss", "the KL is to the policy itself", "policy.reference()", "torch.no_grad()", OP_LOSS
    ),
    Mutant(OP + "step_loss", "per_dim is exact", "x[0].numel()", "1", OP_LOSS),
    Mutant(
        OP + "step_loss",
        "the old log-prob of another step",
        "trajectory.log_prob[:, j]",
        "trajectory.log_prob[:, j - 1]",
        OP_LOSS,
    ),
    Mutant(
        OP + "step_loss",
        "trains the step after",
        "trajectory.latents[:, j + 1]",
        "trajectory.latents[:, j + 2]",
        OP_LOSS,
    ),
    Mutant(
        OP + "step_loss",
        "new ends count as replayed",
        "torch.zeros_like(batch.replayed)",
        "batch.replayed",
        OP_LOSS,
    ),
    Mutant(OP + "ReplayBuffer.worth", "no decay", "self.decay **", "1.0 **", BUFFER),
    Mutant(
        OP + "ReplayBuffer.worth",
        "decays by the entry's iteration",
        "(iteration - entry.iteration)",
        "entry.iteration",
        BUFFER,
    ),
    Mutant(
        OP + "ReplayBuffer.worth",
        "a negative reward grows with age",
        "abs(entry.reward)",
        "entry.reward",
        "test_op_grpo.test_a_negative_reward_decays_downwards",
    ),
    Mutant(OP + "ReplayBuffer.offer", "ties replace", "<=", "<", BUFFER),
    Mutant(OP + "ReplayBuffer.offer", "the newest stays", "old is not None and", "False and", BUFFER),
    Mutant(OP + "ReplayBuffer.offer", "no bound", "> self.capacity", "> 10**9", EVICTION),
    Mutant(OP + "ReplayBuffer.offer", "the best leaves", "min(", "max(", EVICTION),
    Mutant(
        OP + "ReplayBuffer.offer",
        "ranks without decay",
        "self.worth(entry, new.iteration)",
        "entry.reward",
        EVICTION,
    ),
    Mutant(
        OP + "ReplayBuffer.sample",
        "draws with replacement",
        "torch.randperm(len(entries), generator=generator)[:k]",
        "torch.randint(len(entries), (k,), generator=generator)",
        SAMPLES,
    ),
    Mutant(
        OP + "ReplayBuffer.sample",
        "always the first",
        "generator=generator)[:k]",
        "generator=generator).sort().values[:k]",
        SAMPLES,
    ),
    Mutant(
        OP + "hybrid_groups",
        "the cap is ignored",
        "[:most]",
        "",
        "test_op_grpo.test_hybrid_groups_of_the_dataset",
    ),
    Mutant(
        OP + "hybrid_groups",
        "a prompt twice in an iteration",
        "if prompt not in {replay.prompt for replay in drawn}]",
        "]",
        "test_op_grpo.test_hybrid_groups_of_the_buffer",
    ),
    Mutant(
        ROLLOUT + "rollout",
        "replayed rows start from their own noise",
        "reach(noise[:, 0].to(storage_dtype), -start)",
        "noise[:, 0].to(storage_dtype)",
        REPLAYED,
    ),
    Mutant(
        ROLLOUT + "rollout",
        "one replayed state too few",
        "j < replayed[1].shape[1]",
        "j < replayed[1].shape[1] - 1",
        REPLAYED,
    ),
    Mutant(
        ROLLOUT + "rollout",
        "the given states are those of other rows",
        "replayed[1][:, j])",
        "replayed[1][:, j].flip(0))",
        REPLAYED,
    ),
    Mutant(
        ROLLOUT + "step_moments",
        "the next step's sizes",
        "sigmas[k], sigmas[k + 1],",
        "sigmas[k + 1], sigmas[k + 2],",
        VARIANCE,
    ),
    Mutant(
        ROLLOUT + "all_moments",
        "counts steps from 0",
        "enumerate(range(*window))",
        "enumerate(range(window[1] - window[0]))",
        VARIANCE,
    ),
    Mutant(
        ROLLOUT + "log_weight_variance", "half of the variance", "2 * gaussian_kl", "gaussian_kl", VARIANCE
    ),
    Mutant(
        ROLLOUT + "log_weight_variance",
        "the state before the step",
        "latents[:, j + 1]",
        "latents[:, j]",
        VARIANCE,
    ),
    Mutant(
        GRPO + "weight_metrics",
        "the share is the number of samples",
        "scaled.mean() ** 2 /",
        "len(used) * scaled.mean() ** 2 /",
        UNEVEN,
    ),
    Mutant(
        GRPO + "weight_metrics",
        "the logarithm of the mean",
        "bounds.max).log().mean()",
        "bounds.max).mean().log()",
        UNEVEN,
    ),
    Mutant(
        GRPO + "weight_metrics",
        "reports the weights without cap",
        "used.max(), share",
        "weights.max(), share",
        UNEVEN,
    ),
    Mutant(TRAINING + "set_up", "prompts are not checked", "policy.encode(each)", "pass", SET_UP),
    Mutant(
        TRAINING + "prepare", "no weight decay", "weight_decay=args.weight_decay", "weight_decay=0.0", SET_UP
    ),
    Mutant(
        TRAINING + "prepare",
        "the rate of the weight decay",
        "args.learning_rate",
        "args.weight_decay",
        SET_UP,
    ),
    Mutant(
        OP + "step_loss",
        "the naive clip count is the corrected one",
        "(log_prob_off, replayed)):",
        "(log_prob_old, replayed)):",
        OP_LOSS,
    ),
    Mutant(OP + "step_loss", "steps without an advantage count", "rows & trained]", "rows]", OP_LOSS),
    Mutant(
        OP + "ReplayBuffer.age",
        "the age of the first",
        "self.entries.values()) / len(self.entries)",
        "list(self.entries.values())[:1])",
        "test_op_grpo.test_ages_are_averaged",
    ),
    Mutant(
        OP + "ReplayBuffer.load_state_dict",
        "keyed by place",
        'entry["prompt"]: Replay',
        "len(entry): Replay",
        "test_op_grpo.test_the_state_of_the_buffer_is_all_of_it",
    ),
    Mutant(
        OP + "ReplayBuffer.state_dict",
        "drops the last entry",
        "self.entries.values()]",
        "list(self.entries.values())[:-1]]",
        "test_op_grpo.test_the_state_of_the_buffer_is_all_of_it",
    ),
    Mutant(
        ROLLOUT + "log_weight_variance",
        "the variance over trajectories",
        "((log_w + V / 2) ** 2).mean()",
        "log_w.var(correction=0)",
        VARIANCE,
    ),
    Mutant(
        GRPO + "weight_metrics",
        "weights that vanish have no logarithm",
        ".clamp(bounds.tiny, bounds.max).log()",
        ".log()",
        UNEVEN,
    ),
    # ---- around the algorithms ----
    Mutant(
        "shared.prompts.load_prompts",
        "blank lines are prompts",
        "if line.strip()]",
        "]",
        "test_prompts.test_prompts_in_files",
    ),
    Mutant(
        "shared.rewards.make_rewards",
        "weights are 1",
        "float(weight) if",
        "1.0 if",
        "test_rewards.test_specifications",
    ),
    Mutant(
        "shared.policies.make_policy",
        "unknown models crash",
        "if model not in models:",
        "if False:",
        "test_prompts.test_unknown_models_are_refused",
    ),
    Mutant(
        "shared.policies.make_policy",
        "models of the other kind are unknown",
        "if model in others:",
        "if False:",
        "test_prompts.test_models_of_the_other_kind_are_refused",
    ),
    Mutant(
        "shared.rewards.make_rewards",
        "rewards of the other task are unknown",
        "if name in others:",
        "if False:",
        "test_rewards.test_rewards_of_the_other_task_are_refused",
    ),
    Mutant(
        "shared.prompts.load_prompts",
        "the held-out images are trained on",
        "slice(-HELD_OUT) if",
        "slice(None) if",
        "test_prompts.test_digit_images_are_the_real_digits",
    ),
    Mutant("shared.rewards.answers.make_answer", "wrong answers are right", " == ", " != ", ANSWERS),
    Mutant("shared.rewards.answers._plain", "capitals are wrong", ".casefold()", "", ANSWERS),
    Mutant("shared.rewards.answers._plain", "blanks are wrong", ".strip()", "", ANSWERS),
    # ---- the discrete model ----
    Mutant(DIGIT_TOKENS + "token_path", "levels on a half circle", "* math.pi / 2", "* math.pi", LEVEL_PATHS),
    Mutant(
        DIGIT_TOKENS + "token_path",
        "labels are ordered",
        "else torch.eye(NUM_CLASSES, dtype=torch.float64)",
        "else circle[:NUM_CLASSES]",
        LEVEL_PATHS,
    ),
    Mutant(
        DIGIT_TOKENS + "token_path",
        "the first symbol is the mask",
        "mask_id=symbols",
        "mask_id=0",
        "test_digit_tokens.test_masked_paths_have_a_mask_token_after_the_others",
    ),
    Mutant(
        DIGIT_TOKENS + "carry_over",
        "revealed tokens are drawn again",
        "x[..., None] == mask_id",
        "x[..., None] >= 0",
        CARRY_OVER,
    ),
    Mutant(DIGIT_TOKENS + "carry_over", "a mask token is clean", "value=-math.inf", "value=0.0", CARRY_OVER),
    Mutant(
        DIGIT_TOKENS + "DigitTokensPolicy.posterior_logits",
        "the time stands still",
        "float(t)",
        "0.0",
        "test_digit_tokens.test_contract",
    ),
    Mutant(
        DIGIT_TOKENS + "DigitTokensPolicy.decode",
        "masks are black",
        "x == LEVELS, 0.5",
        "x == LEVELS, 0.0",
        "test_digit_tokens.test_levels_are_grey_and_masks_are_mid_grey",
    ),
    Mutant(
        DIGIT_TOKENS + "DigitTokensPolicy.decode",
        "words are off by one",
        '(*DIGIT_WORDS, "?")',
        '("?", *DIGIT_WORDS)',
        "test_digit_tokens.test_labels_are_words_and_masks_are_question_marks",
    ),
    Mutant(
        DIGIT_TOKENS + "_pixels_of",
        "fractions are levels",
        "type(level) is int and ",
        "",
        "test_digit_tokens.test_prompts_without_image_or_answer_are_refused",
    ),
    Mutant(
        "shared.evaluation.Evaluation.run",
        "batches are scored with the first prompts",
        "value[rows]",
        "value[: len(value[rows])]",
        "test_training.test_evaluation_does_not_depend_on_its_batches",
    ),
    Mutant(
        "shared.evaluation.Evaluation.run",
        "follows the ODE of other noise",
        "(noise[rows] for",
        "(-noise[rows] for",
        "test_training.test_evaluation_does_not_depend_on_its_batches",
    ),
    Mutant(
        TRAINING + "gather",
        "out of order",
        ".cpu()",
        ".cpu().flip(0)",
        "test_training.test_gathered_values_are_in_order",
    ),
    Mutant(
        TRAINING + "set_values",
        "adds",
        "p.copy_(value)",
        "p.add_(value)",
        "test_training.test_ema_closed_form_and_swap",
    ),
    Mutant(
        TRAINING + "average",
        "the deviation is a mean",
        'name == "ratio_deviation"',
        "False",
        "test_training.test_averages_are_weighted",
    ),
    Mutant(
        "shared.prompts.sample_groups",
        "every pass has the same order",
        " + iteration // per_pass",
        "",
        "test_prompts.test_groups_differ_between_passes_and_seeds",
    ),
    Mutant(
        "shared.prompts.sample_groups",
        "an iteration repeats the last one's prompts",
        "iteration % per_pass * num_groups",
        "0",
        "test_prompts.test_groups_are_distinct_and_pass_over_all_prompts",
    ),
    Mutant(
        "shared.prompts.digit_of",
        "takes the first of several digits",
        "len(found) != 1",
        "len(found) < 1",
        "test_prompts.test_digit_of_refuses",
    ),
    Mutant(
        "shared.rewards.score",
        "weights are ignored",
        "reward.weight * parts",
        "1.0 * parts",
        "test_rewards.test_weighted_sum_keeps_its_parts",
    ),
    Mutant(
        "shared.rewards.score",
        "every batch sees the first prompts",
        "prompts[rows]",
        "prompts[: len(made[rows])]",
        "test_rewards.test_scores_keep_the_order_in_any_batches",
    ),
    Mutant(
        "shared.training.EMA.update",
        "the average copies the weights",
        "self._average_into(self.average",
        "self._average_into([p.clone() for p in self.average]",
        "test_training.test_ema_closed_form_and_swap",
    ),
    Mutant(
        TRAINING + "apply_update",
        "an infinite gradient is applied",
        "if not norm < float",
        "if norm == 2 * float",
        "test_training.test_a_gradient_that_is_not_finite_never_reaches_the_weights",
    ),
    Mutant(
        TRAINING + "apply_update",
        "gradients pile up",
        "optimizer.zero_grad()",
        "pass",
        "test_training.test_update_clips_the_norm",
    ),
    Mutant(
        TRAINING + "average",
        "unweighted",
        "sum(weight * value for",
        "sum(value / len(present) * mass for",
        "test_training.test_averages_are_weighted",
    ),
    Mutant(
        TRAINING + "micro_batches",
        "drops the rest",
        "range(0, count, size)",
        "range(0, count // size * size, size)",
        "test_training.test_micro_batches_cover_all_rows_in_order",
    ),
    Mutant(
        TRAINING + "own_groups",
        "all processes take the first groups",
        "range(rank * num_groups // count,",
        "range(0,",
        "test_training.test_groups_are_dealt_out_whole",
    ),
    # ---- discrete flows ----
    Mutant(
        PATHS + "_kernel",
        "first order under the name of exp",
        "_jump_chance(h * total, jump)",
        "(h * total).clamp(max=1)",
        KERNEL,
    ),
    Mutant(
        PATHS + "_kernel",
        "the step size is missing",
        "_jump_chance(h * total, jump)",
        "_jump_chance(total, jump)",
        KERNEL,
    ),
    Mutant(
        PATHS + "_kernel", "tokens at rest vanish", "kernel.scatter(-1, x[..., None], stay)", "kernel", KERNEL
    ),
    Mutant(
        PATHS + "_kernel",
        "the last step stays where it is",
        "one_hot(x1, path.vocab_size).double()",
        "one_hot(x, path.vocab_size).double()",
        KERNEL,
    ),
    Mutant(
        PATHS + "_sample",
        "clean tokens instead of noisy ones",
        "draw_symbols(path.marginal(x1, t), u)",
        "x1",
        "test_ctmc.test_samples_of_the_path_have_its_marginals",
    ),
    Mutant(
        PATHS + "_draw_source",
        "draws at the end of the path",
        "0.0, generator",
        "1.0, generator",
        "test_ctmc.test_samples_of_the_path_have_its_marginals",
    ),
    Mutant(
        PATHS + "_jump_chance",
        "euler chances above 1",
        "z.clamp(max=1)",
        "z",
        "test_ctmc.test_euler_is_the_first_order_of_exp",
    ),
    Mutant(
        PATHS + "_jump_chance",
        "exp and euler are swapped",
        'jump == "exp"',
        'jump == "euler"',
        "test_ctmc.test_a_hand_computed_mixture_step",
    ),
    Mutant(TOKENS + "checked_step", "steps backwards are accepted", "0 < (h", "-1 < (h", REFUSED),
    Mutant(TOKENS + "checked_start", "t = 1 is accepted", "< 1:", "<= 1:", REFUSED),
    Mutant(
        TOKENS + "checked_tokens",
        "tokens beyond the vocabulary are accepted",
        "< path.vocab_size",
        "<= path.vocab_size",
        REFUSED,
    ),
    Mutant(
        MIXTURE + "rates",
        "rates in float32",
        "one_hot(x1, self.vocab_size).double()",
        "one_hot(x1, self.vocab_size)",
        CARRIED,
    ),
    Mutant(
        MIXTURE + "rates",
        "a rate from a token to itself",
        "rates.scatter(-1, x[..., None], 0.0)",
        "rates",
        CARRIED,
    ),
    Mutant(
        MIXTURE + "_speeds",
        "the corrector only adds noise",
        "a = (1 + self.corrector) * self.power",
        "a = self.power",
        CARRIED,
    ),
    Mutant(MIXTURE + "_speeds", "kappa is t whatever the power", "(1 - t**self.power)", "(1 - t)", CARRIED),
    Mutant(
        MIXTURE + "_speeds",
        "the corrector lacks kappa",
        "self.corrector * self.power / t if",
        "self.corrector * self.power if",
        CARRIED,
    ),
    Mutant(
        MIXTURE + "marginal",
        "source and data are swapped",
        "kappa * clean + (1 - kappa) *",
        "(1 - kappa) * clean + kappa *",
        "test_ctmc.test_marginal_is_the_definition",
    ),
    Mutant(
        MIXTURE + "_source_law",
        "a masked source is uniform",
        "if self.mask_id is None",
        "if True",
        "test_ctmc.test_marginal_is_the_definition",
    ),
    Mutant(
        MIXTURE + "coefficients",
        "a stay forgets the correct prediction",
        "(1 - jump1, jump1 - jump0, zero)",
        "(1 - jump1, zero, zero)",
        CLOSED,
    ),
    Mutant(
        MIXTURE + "coefficients",
        "moves forget the corrector at x1 = x",
        "back * (f0 - f1).clamp(min=0)",
        "zero",
        CLOSED,
    ),
    Mutant(
        MIXTURE + "coefficients",
        "moves by the corrector alone are forgotten",
        "(back * f1,",
        "(zero,",
        CLOSED,
    ),
    Mutant(
        MIXTURE + "coefficients",
        "the mask can be left by noise towards itself",
        "b * (1 - source_law[x])",
        "b",
        CLOSED,
    ),
    Mutant(
        MIXTURE + "is_identity",
        "the first step of every path is an identity",
        "and self.power > 1",
        "",
        IDENTITY,
    ),
    Mutant(
        METRIC + "_beta_and_speed",
        "beta' lacks the exponent",
        "self.c * self.a * odds",
        "self.c * odds",
        CARRIED,
    ),
    Mutant(
        METRIC + "_beta_and_speed", "beta' lacks a power of 1 - t", "/ (1 - t) ** 2", "/ (1 - t)", CARRIED
    ),
    Mutant(
        METRIC + "_beta_and_speed",
        "t = 0 divides by zero",
        "if odds > 0 or self.a >= 1 else 0.0",
        "if True else 0.0",
        IDENTITY,
    ),
    Mutant(METRIC + "_beta_and_speed", "a = 1 has no first step", "or self.a >= 1 else", "else", IDENTITY),
    Mutant(
        METRIC + "rates", "moves away from x1, too", "- distance).clamp(min=0)", "- distance).abs()", CARRIED
    ),
    Mutant(
        METRIC + "rates",
        "moves to x1 by distance alone",
        "(-beta * distance).softmax(-1) * gap",
        "gap",
        CARRIED,
    ),
    Mutant(
        METRIC + "marginal",
        "beta lacks the exponent",
        "1e-300)) ** self.a",
        "1e-300))",
        "test_ctmc.test_marginal_is_the_definition",
    ),
    Mutant(
        METRIC + "marginal",
        "t = 1 is not a number",
        "torch.where(t < 1, law, one_hot(x1, self.vocab_size).to(law))",
        "law",
        "test_ctmc.test_marginal_is_the_definition",
    ),
    Mutant(
        METRIC + "log_kernel_column",
        "the normaliser of p_t is missing",
        "* distance_next - log_z",
        "* distance_next",
        CLOSED,
    ),
    Mutant(
        METRIC + "log_kernel_column",
        "the gap between distances is missing",
        "(distance - distance_next) * speed",
        "torch.ones_like(distance) * speed",
        CLOSED,
    ),
    Mutant(
        METRIC + "log_kernel_column",
        "probabilities instead of logarithms",
        "factor.log() - beta * distance_next - log_z",
        "(factor * (-beta * distance_next - log_z).exp()).log()",
        "test_ctmc.test_nothing_underflows",
    ),
    Mutant(
        METRIC + "log_kernel_column",
        "stays of exp under the name of euler",
        'if jump == "exp" else torch.log1p(-chance)',
        "if True else torch.log1p(-chance)",
        CLOSED,
    ),
    Mutant(
        METRIC + "log_kernel_column",
        "the distance is transposed",
        "self.distance.from_symbol(x_next)",
        "self.distance.to_clean(x_next)",
        CLOSED,
    ),
    Mutant(METRIC + "is_identity", "only the exact beginning of time", "[1] == 0", "[0] == 1", IDENTITY),
    Mutant(
        CTMC + "transition_log_prob",
        "unnormalised logits",
        ".logsumexp(-1) - log_sum",
        ".logsumexp(-1)",
        CLOSED,
    ),
    Mutant(
        CTMC + "transition_log_prob",
        "the normaliser is a constant",
        "log_sum = logits.logsumexp(-1)",
        "log_sum = logits.detach().logsumexp(-1)",
        RESPONSIBILITY,
    ),
    Mutant(
        CTMC + "transition_log_prob",
        "impossible transitions poison the gradient",
        "terms.masked_fill(impossible[..., None], 0.0)",
        "terms",
        "test_ctmc.test_impossible_transitions_are_minus_infinity_and_harm_nothing",
    ),
    Mutant(
        CTMC + "transition_log_prob",
        "impossible transitions have log-probability 0",
        "log_prob.masked_fill(impossible, -math.inf)",
        "log_prob.masked_fill(impossible, 0.0)",
        "test_ctmc.test_impossible_transitions_are_minus_infinity_and_harm_nothing",
    ),
    Mutant(
        CTMC + "transition_log_prob",
        "the last step is like any other",
        "x_next, t, h, jump, last)]",
        "x_next, t, h, jump)]",
        CLOSED,
    ),
    Mutant(
        CTMC + "transition_log_prob",
        "a metric path jumps by exp only",
        "x_next, t, h, jump).to",
        "x_next, t, h).to",
        CLOSED,
    ),
    Mutant(
        CTMC + "transition_log_prob",
        "x and x_next are swapped",
        "for y in (x_next, x)",
        "for y in (x, x_next)",
        CLOSED,
    ),
    Mutant(
        CTMC + "sample_step",
        "the jump uses another draw than it returns",
        "path.kernel(x, x1, t",
        "path.kernel(x, draw_symbols(rows[row].softmax(-1), torch.rand_like(u)), t",
        FREQUENCIES,
    ),
    Mutant(
        CTMC + "sample_step",
        "the greedy clean token",
        "x1 = draw_symbols(rows[row].softmax(-1), u)",
        "x1 = rows[row].argmax(-1)",
        FREQUENCIES,
    ),
    Mutant(CTMC + "sample_step", "the last step jumps by its rate", "x1 if last else ", "", FREQUENCIES),
    Mutant(
        CTMC + "sample_step",
        "the jump ignores its kind",
        "t, h, jump), u_next)",
        "t, h), u_next)",
        FREQUENCIES,
    ),
    Mutant(
        CTMC + "sample_step",
        "both draws share a uniform number",
        "t, h, jump), u_next)",
        "t, h, jump), u)",
        FREQUENCIES,
    ),
    Mutant(
        CTMC + "sample_step",
        "given uniform numbers are ignored",
        "if uniforms is None",
        "if True",
        SAME_DRAWS,
    ),
    Mutant(
        TOKENS + "draw_symbols",
        "the first symbol that reaches the number, even at law 0",
        ", right=True",
        "",
        INVERSE,
    ),
    Mutant(
        TOKENS + "draw_symbols",
        "the total is taken for 1",
        "numbers[row].double() * total",
        "numbers[row].double()",
        INVERSE,
    ),
    Mutant(TOKENS + "draw_symbols", "laws are summed in float32", "torch.float64", "torch.float32", INVERSE),
    Mutant(
        TOKENS + "draw_symbols",
        "a number that rounds to the total is beyond the last symbol",
        "torch.minimum(numbers[row].double() * total, below)",
        "(numbers[row].double() * total)",
        INVERSE,
    ),
    Mutant(
        TOKENS + "draw_symbols",
        "draws and tokens are mixed up",
        "drawn.T.reshape(uniforms.shape)",
        "drawn.reshape(uniforms.shape)",
        INVERSE,
    ),
    Mutant(
        TOKENS + "draw_symbols",
        "a law of zeros is accepted",
        "(total > 0) & ",
        "",
        REFUSED,
    ),
    Mutant(TOKENS + "draw_uniforms", "numbers of 24 bits", "torch.float64", "torch.float32", SAME_DRAWS),
    Mutant(
        TOKENS + "checked_logits",
        "logits stay in 16 bits",
        "torch.promote_types(logits.dtype, torch.float32)",
        "logits.dtype",
        "test_ctmc.test_other_dtypes_agree",
    ),
    Mutant(TOKENS + "checked_times", "times after the end are accepted", " & (t <= 1)", "", REFUSED),
    Mutant(
        DISTANCES + "EmbeddingDistance.from_symbol",
        "dot products in float32 depend on the batch",
        "self.unit[x] @ self.unit.T",
        "self.tensor[x] @ self.tensor.T",
        SAME_DRAWS,
    ),
    Mutant(
        DISTANCES + "DistanceMatrix.tabulate",
        "the mass includes the next symbol",
        "mass[..., :-1]",
        "mass[..., 1:]",
        BOUNDED,
    ),
    Mutant(
        DISTANCES + "DistanceMatrix.tabulate",
        "prefix sums in sorted order",
        "torch.empty_like(mu).scatter_(-1, order, mu)",
        "mu",
        CLOSED,
    ),
    Mutant(
        DISTANCES + "DistanceMatrix.tabulate",
        "a difference of prefix sums cancels",
        "(mass[..., :-1] * ordered.diff(dim=-1)).cumsum(-1)",
        "(ordered * mass - (ordered * law.gather(-1, order)).cumsum(-1))[..., 1:]",
        "test_ctmc.test_nothing_underflows",
    ),
    Mutant(
        DISTANCES + "EmbeddingDistance.tabulate",
        "nodes forget the symbols inside their interval",
        "* nodes.diff() + inside",
        "* nodes.diff()",
        BOUNDED,
    ),
    Mutant(
        DISTANCES + "EmbeddingDistance.tabulate",
        "symbols inside an interval count twice",
        "(mass.cumsum(-1) - mass)",
        "mass.cumsum(-1)",
        BOUNDED,
    ),
    Mutant(
        DISTANCES + "EmbeddingDistance.look_up",
        "the lower node instead of a line",
        "torch.lerp(below, above, share)",
        "below",
        BOUNDED,
    ),
    Mutant(
        DISTANCES + "EmbeddingDistance.look_up",
        "a line in the root of the distance",
        "(position.square_() - cell.square()) / (2 * cell + 1)",
        "position - cell",
        BOUNDED,
    ),
    Mutant(
        DISTANCES + "EmbeddingDistance.from_symbol",
        "a squared distance, not its square",
        ".square_()",
        "",
        BOUNDED,
    ),
    Mutant(
        DISTANCES + "_log_z_and_table",
        "tables pile up",
        "if len(kept) >= TABLES_KEPT",
        "if False",
        "test_ctmc.test_tables_are_remembered_by_time",
    ),
    Mutant(
        DISTANCES + "embedding_distance",
        "embeddings keep their lengths",
        "weight.double() / norm",
        "weight.double()",
        "test_ctmc.test_golden_steps",
    ),
    Mutant(
        DISTANCES + "embedding_distance",
        "a large codebook gets a matrix",
        "len(unit) <= EXACT_VOCABULARY",
        "len(unit) > 1",
        "test_ctmc.test_large_vocabularies_get_no_matrix",
    ),
    Mutant(
        DISTANCES + "in_chunks",
        "everything at once",
        "max(1, CHUNK // width)",
        "rows[0].numel() + 1",
        "test_ctmc.test_results_do_not_depend_on_chunks",
    ),
    Mutant(
        DISTANCES + "_log_z_and_table",
        "every time has the first one's table",
        "if beta not in kept",
        "beta = next(iter(kept), beta)\n    if beta not in kept",
        "test_ctmc.test_tables_are_remembered_by_time",
    ),
    # ---- dFlowGRPO
    Mutant(
        DFLOW + "mc_log_ratio",
        "weights are the old posterior's",
        "(log_p_new, log_p_old, column)",
        "(log_p_new, log_p_old, log_p_old)",
        UNBIASED,
    ),
    Mutant(
        DFLOW + "mc_log_ratio",
        "the jump is always exp",
        "t, h, jump=jump)",
        "t, h)",
        "test_dflow_grpo.test_mc_takes_the_jump_it_is_given",
    ),
    Mutant(
        DFLOW + "draws_log_ratio",
        "the used draw is thrown away",
        "change.logsumexp(0) - log_weight.logsumexp(0)",
        "change[1:].logsumexp(0) - log_weight[1:].logsumexp(0)",
        UNBIASED,
    ),
    Mutant(DFLOW + "draws_log_ratio", "not normalised", " - log_weight.logsumexp(0)", "", UNBIASED),
    Mutant(
        DFLOW + "draws_log_ratio",
        "all draws weigh the same",
        "log_weight + (",
        "0 * log_weight + (",
        UNBIASED,
    ),
    Mutant(
        DFLOW + "draws_log_ratio", "old / new", "(log_p_new - log_p_old)", "(log_p_old - log_p_new)", UNBIASED
    ),
    Mutant(
        DFLOW + "draws_log_ratio",
        "no gradient",
        "(log_p_new - log_p_old)",
        "(log_p_new.detach() - log_p_old)",
        UNBIASED,
    ),
    Mutant(
        DFLOW + "draws_log_ratio",
        "the mean of log-ratios",
        "change.logsumexp(0) - log_weight.logsumexp(0)",
        "(log_weight.softmax(0) * (log_p_new - log_p_old)).sum(0)",
        UNBIASED,
    ),
    Mutant(
        DFLOW + "aggregate",
        "padding counts",
        "masked_fill(~mask, 0.0)",
        "masked_fill(~mask & False, 0.0)",
        GOLDEN_MASKS,
    ),
    Mutant(DFLOW + "aggregate", "the mean counts padding", "/ mask.sum(1)", "/ mask.shape[1]", GOLDEN_MASKS),
    Mutant(
        DFLOW + "aggregate",
        "product and mean exchanged",
        'how == "product"',
        'how != "product"',
        GOLDEN_JOINT,
    ),
    Mutant(DFLOW + "posterior_kl", "KL(ref || p)", "log_p.exp() * gap", "-log_ref.exp() * gap", GOLDEN_JOINT),
    Mutant(
        DFLOW + "posterior_kl", "p is detached", "log_p.exp() * gap", "log_p.exp().detach() * gap", DIVERGENCE
    ),
    Mutant(DFLOW + "posterior_kl", "0 log 0 is NaN", "log_p > -torch.inf", "log_p == log_p", DIVERGENCE),
    Mutant(
        DFLOW + "surrogate",
        "samples with more tokens weigh more",
        "share.expand_as(mask)[mask]",
        "None",
        BY_TOKEN,
    ),
    Mutant(
        DFLOW + "surrogate",
        "padding has a ratio",
        "total[mask], share",
        "total[mask] * 0 + total[mask].mean(), share",
        BY_TOKEN,
    ),
    Mutant(
        DFLOW + "surrogate",
        "no clip",
        "advantages, clip_range, weights",
        "advantages, (9.0, 99.0), weights",
        BY_TOKEN,
    ),
    Mutant(DFLOW + "dpo_loss", "the worse wins", "descending=True", "descending=False", PAIRS),
    Mutant(DFLOW + "dpo_loss", "equals are pairs", " * differ", "", PAIRS),
    Mutant(
        DFLOW + "dpo_loss",
        "best with second best",
        "order.flip(1)[:, : group_size // 2]",
        "order[:, group_size // 2 : 2 * (group_size // 2)]",
        PAIRS,
    ),
    Mutant(DFLOW + "dpo_loss", "beta is lost", "logsigmoid(beta * ", "logsigmoid(", PAIRS),
    Mutant(
        DFLOW + "step_loss",
        "mean field looks at the first step only",
        "trajectory.states[:, [0, -1]]",
        "trajectory.states[:, [0, 1]]",
        MEAN_FIELD,
    ),
    Mutant(
        DFLOW + "step_loss",
        "the last step jumps by rates",
        "h, jump=args.jump, last=last)\n            return",
        "h, jump=args.jump)\n            return",
        EXACT_GRADIENT,
    ),
    Mutant(
        DFLOW + "step_loss",
        "tokens that stay are dropped",
        "masked_fill(~mask, 0.0)",
        "masked_fill(~mask | (x == x_next), 0.0)",
        EXACT_GRADIENT,
    ),
    Mutant(
        DFLOW + "step_loss",
        "the ratio of posteriors at x_next, without rates",
        "new = transition_log_prob(path, logits, x, x_next, t, h, jump=args.jump, last=last)",
        "new = transition_log_prob(path, logits, x, x_next, t, h, jump=args.jump, last=True)",
        EXACT_GRADIENT,
    ),
    Mutant(
        DFLOW + "step_loss",
        "the next step's log-probability",
        "trajectory.log_prob[:, k])",
        "trajectory.log_prob[:, k - 1])",
        EXACT_GRADIENT,
    ),
    Mutant(
        DFLOW + "step_loss",
        "KL of the other direction",
        "posterior_kl(logits, logits_ref)",
        "posterior_kl(logits_ref, logits)",
        KL_OF_LOSS,
    ),
    Mutant(
        DFLOW + "step_loss",
        "k3 of the inverse ratio",
        "torch.expm1(change) - change",
        "torch.expm1(-change) + change",
        K3,
    ),
    Mutant(
        DFLOW + "step_loss",
        "the KL is rewarded",
        "loss + args.beta * kl",
        "loss - args.beta * kl",
        KL_OF_LOSS,
    ),
    Mutant(
        DFLOW + "step_loss",
        "DPO without a reference",
        "log_ratio - log_ratio_to_old(logits_ref)",
        "log_ratio",
        KL_OF_LOSS,
    ),
    Mutant(
        DFLOW + "trained_steps", "identity steps are trained", "not path.is_identity(times[k])", "True", STEPS
    ),
    Mutant(
        DFLOW + "trained_steps",
        "the last step is not trained",
        "range(K) if k == K - 1 or",
        "range(K - 1) if",
        STEPS,
    ),
    Mutant(
        DFLOW + "resolve",
        "the clip range of another aggregation",
        "CLIP_RANGES[aggregation]",
        'CLIP_RANGES["product"]',
        RESOLVED,
    ),
    Mutant(
        DFLOW + "resolve",
        "understanding is evaluated without a cut",
        "1 if understanding else 0",
        "0",
        RESOLVED,
    ),
    Mutant(DFLOW + "resolve", "evaluated on the training images", '"digit-images" and', '"" and', RESOLVED),
    # ---- rollouts of tokens
    Mutant(
        TOKEN_ROLLOUT + "sample_uniforms",
        "more draws change the others",
        "(2, num_draws - 1)",
        "(1 + num_draws, 0)",
        NOISE,
    ),
    Mutant(
        TOKEN_ROLLOUT + "sample_uniforms",
        "all samples draw the same",
        "(seed, iteration, i)",
        "(seed, iteration, 0)",
        NOISE,
    ),
    Mutant(TOKEN_ROLLOUT + "token_rollout", "the last step jumps", "k == K - 1", "False", LAW),
    Mutant(
        TOKEN_ROLLOUT + "token_rollout",
        "every step starts at 0",
        "float(times[k]), float",
        "float(times[0]), float",
        LAW,
    ),
    Mutant(
        TOKEN_ROLLOUT + "token_rollout",
        "steps of the whole grid",
        "times[k + 1] - times[k]",
        "times[-1] - times[k]",
        LAW,
    ),
    Mutant(
        TOKEN_ROLLOUT + "token_rollout",
        "one number for X1 and jump",
        "torch.stack([clean[0], jumps])",
        "torch.stack([clean[0], clean[0]])",
        LAW,
    ),
    Mutant(
        TOKEN_ROLLOUT + "token_rollout",
        "all steps share their numbers",
        "numbers[:1, :, k]",
        "numbers[:1, :, 0]",
        LAW,
    ),
    Mutant(TOKEN_ROLLOUT + "token_rollout", "padding moves", "torch.where(mask, x_next, x)", "x_next", KEEPS),
    Mutant(
        TOKEN_ROLLOUT + "token_rollout",
        "fresh draws only",
        "torch.cat([numbers[:1, :, k], numbers[2:, :, k]])",
        "torch.cat([numbers[2:, :, k], numbers[:1, :, k]])",
        KEEPS,
    ),
    Mutant(
        TOKEN_ROLLOUT + "token_rollout",
        "weights of another step",
        "path.log_kernel_column(x, x_next, t",
        "path.log_kernel_column(x, x_next, t / 2",
        KEEPS,
    ),
    Mutant(
        TOKEN_ROLLOUT + "token_rollout",
        "the posterior is cut to its worst",
        "logits.topk(top_k, dim=-1)",
        "logits.topk(top_k, dim=-1, largest=False)",
        CUT,
    ),
    Mutant(
        TOKEN_ROLLOUT + "token_rollout",
        "ends of the first step",
        "states[0], x, 0.0",
        "states[0], states[1], 0.0",
        KEEPS,
    ),
    Mutant(TOKEN_ROLLOUT + "averaged_law", "the mean of the draws' kernels", ".mean(0)", "[0]", RELEASED),
    Mutant(TOKEN_ROLLOUT + "averaged_law", "rates are summed", ".mean(0)", ".sum(0)", RELEASED),
    Mutant(
        TOKEN_ROLLOUT + "averaged_law",
        "the first order's jump chance",
        "-torch.expm1(-h * total)",
        "(h * total)",
        RELEASED,
    ),
    Mutant(
        TOKEN_ROLLOUT + "at_draws", "draws are reversed", "movedim(0, -1)", "flip(0).movedim(0, -1)", KEEPS
    ),
    Mutant(
        TOKEN_ROLLOUT + "ratio_noise",
        "used draws of the posterior",
        "draw_symbols(used_law, ",
        "draw_symbols(log_p_old.exp(), ",
        AROUND,
    ),
    Mutant(
        TOKEN_ROLLOUT + "ratio_noise",
        "fresh draws of the new posterior",
        "log_p_old.exp(), uniforms",
        "log_p.exp(), uniforms",
        AROUND,
    ),
    Mutant(
        "shared.evaluation.join_samples",
        "answers are joined in reverse",
        "for part in parts for",
        "for part in parts[::-1] for",
        JOINED,
    ),
    Mutant(
        "shared.evaluation.ode_evaluation",
        "as many steps as in training",
        "policy.sigmas(args.eval_steps)",
        "policy.sigmas(args.num_steps)",
        "test_training.test_evaluation_does_not_depend_on_its_batches",
    ),
    Mutant(
        "shared.evaluation.token_evaluation",
        "the posterior is not cut",
        "args.eval_top_k or None",
        "None",
        TOKEN_EVALUATION,
    ),
    Mutant(
        "shared.evaluation.token_evaluation",
        "as many steps as in training",
        "policy.times(args.eval_steps)",
        "policy.times(args.num_steps)",
        TOKEN_EVALUATION,
    ),
    Mutant(
        "shared.evaluation.decoded_states",
        "the last state only",
        "states.unbind(1)",
        "states[:, -1:].unbind(1)",
        TOKEN_EVALUATION,
    ),
    Mutant(
        "shared.ctmc.transition_kl",
        "KL(ref || p)",
        "for each in (logits, logits_ref))",
        "for each in (logits_ref, logits))",
        GOLDEN_JOINT,
    ),
]
