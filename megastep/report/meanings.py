"""The meaning of every metric; docs/metrics.md is generated from this table.

Metrics of trajectories count each trajectory once; metrics of model calls start with `turn/`. Words
in capitals stand for a part that varies: K for a number, REASON for a word, NAME for any text. A
mean over nothing is left out, never NaN. Over the mini-batches of a training step counts are added,
maxima are maxima, all other metrics are averaged.

Every rollout metric has a counterpart for held-out prompts:

    reward/mean, reward/std → eval/reward_mean, eval/reward_std     turn/count → eval/turn/count
    reward/success → eval/success                                   env/NAME → eval/env/NAME
    rollout/turns_mean → eval/turns_mean
"""

import re
from functools import cache

MEANINGS = {
    # rollout, per trajectory
    "reward/mean": "total reward of a trajectory, mean",
    "reward/std": "total reward of a trajectory, standard deviation over the batch",
    "reward/success": "fraction of trajectories that succeeded; success is the environment's "
    "metric of that name, else reward > 0",
    "reward/pass_at_K": "probability that one of K trajectories of a prompt succeeds; "
    "K = 1, 2, 4, ...",
    "rollout/prompts": "prompts in the batch",
    "rollout/trajectories": "trajectories in the batch",
    "rollout/turns_mean": "turns of a trajectory, mean",
    "rollout/turns_max": "turns of a trajectory, maximum",
    "rollout/response_tokens_mean": "response tokens of a trajectory over all turns, mean",
    "rollout/response_tokens_max": "response tokens of a trajectory over all turns, maximum",
    "rollout/stop_REASON": "fraction of trajectories that ended for this reason",
    "rollout/no_steps": "trajectories without a model call: the first prompt was too long or the "
    "environment did not start, see rollout/stop_REASON",
    "rollout/version": "weight version of the engines, in optimizer steps",
    "rollout/tokens_per_s": "sampled tokens per second of rollout",
    "env/event_loop_blocked_s": "seconds in which an episode's environment blocked the event loop "
    "for at least 0.5 s at a time, mean over the trajectories affected",
    "env/NAME": "number that the environment reports under this name, mean over the trajectories "
    "that have it",
    # ranks, engines and agent workers
    "policy/restarts": "restarts of all ranks after one was lost, since the start of the run",
    "engine/serving": "engines that serve",
    "engine/restarts": "engine restarts since the start of the run",
    "engine/queued": "model calls beyond engine.max_sequences, which wait in vLLM's queue",
    "worker/restarts": "agent worker restarts since the start of the run",
    "worker/env_calls_waiting": "blocking environment calls that waited for a thread of a worker "
    "(rollout.env_threads), maximum",
    "worker/routing_gb": "recorded routing of complete groups in Ray's object stores, in GB",
    "worker/prompts_held_back": "prompts that did not start because the routing of outstanding "
    "groups filled its share of the object stores, maximum",
    # staleness
    "staleness/mean": "weight syncs since each trained token was sampled, mean",
    "staleness/max": "weight syncs since each trained token was sampled, maximum; at most "
    "async.max_staleness, rounded up",
    "staleness/fraction_K": "fraction of trained tokens with a staleness of K weight syncs",
    "async/waited": "groups that training waited for",
    "async/dropped": "groups dropped because they became stale, complete or not "
    "(async.on_stale: drop)",
    "eval/step": "training steps behind the policy when the evaluation started; an evaluation "
    "alongside training uses newer weights as they arrive",
    # rollout, per model call
    "turn/count": "model calls in the batch",
    "turn/older_routing": "model calls that were queued during a weight sync, so that the routing "
    "of their prompt is of the version before",
    "turn/prompt_tokens_mean": "prompt tokens of a model call, mean",
    "turn/prompt_tokens_max": "prompt tokens of a model call, maximum",
    "turn/response_tokens_mean": "response tokens of a model call, mean",
    "turn/response_tokens_max": "response tokens of a model call, maximum",
    "turn/finish_REASON": "fraction of model calls that ended for this reason",
    "turn/role_NAME": "fraction of model calls in this role of an agent program",
    "turn/untrained_REASON": "model calls of agent programs that are context for this reason "
    "(docs/agents.md), relative to all model calls",
    # the training batch
    "filter/dropped": "trajectories dropped from training",
    "filter/dropped_fraction": "fraction of trajectories dropped from training",
    "train/sequences_before_merge": "steps with a trained token",
    "train/sequences_after_merge": "root-to-leaf paths of the tries that hold those steps",
    "train/tokens_before_merge": "tokens of those steps, each step counted alone",
    "train/tokens_distinct": "tokens of the tries, each counted once",
    "train/tokens_computed": "tokens of all micro-batches, with repeated prefixes and padding",
    "train/sharing_ratio": "tokens_before_merge / tokens_distinct",
    "train/micro_batches": "micro-batches per rank",
    "train/padding_micro_batches": "padding micro-batches, which keep the count equal on all ranks",
    "train/packing_efficiency": "fraction of the token budget of all micro-batches that holds real "
    "tokens",
    "train/balance": "mean tokens per rank / maximum tokens per rank",
    # the update
    "warm_start/loss": "loss of the last optimizer step on demonstrations",
    "train/loss": "weighted sum over the mini-batch that was minimised, before the update",
    "train/optimizer_steps": "optimizer steps, one per mini-batch with a trained token",
    "train/empty_mini_batches": "mini-batches without a trained token, which make no optimizer "
    "step",
    "train/grad_norm": "gradient norm before clipping",
    "train/lr": "learning rate",
    "train/skipped": "fraction of optimizer steps skipped because a loss or gradient was not "
    "finite",
    "train/tokens_trained": "response tokens with a loss",
    "train/entropy": "entropy of the next-token distribution, mean over trained tokens",
    "train/ratio_mean": "importance ratio of the current to the old policy, mean over trained "
    "tokens",
    "train/ratio_max": "importance ratio of the current to the old policy, maximum",
    "train/clip_fraction": "fraction of trained tokens whose importance ratio was clipped",
    "train/kl_reference": "KL to the reference model, mean over trained tokens (loss.kl_coef)",
    "train/kl_teacher": "KL to the teacher, mean over trained tokens of its k1 estimate "
    "(loss.type=distill)",
    "train/kl_clamped_fraction": "fraction of trained tokens whose KL estimate was clamped to 10 "
    "and has no gradient",
    "train/advantage_abs_mean": "absolute advantage, mean over trained tokens",
    "train/importance_mean": "importance sampling weight for the engine's logprobs, mean over "
    "trained tokens (loss.importance_sampling.mode)",
    "train/importance_clipped_fraction": "fraction of trained tokens whose importance sampling "
    "weight was truncated or masked",
    # engine against trainer
    "mismatch/kl": "KL between the engine's and the trainer's policy on the sampled tokens, k3 "
    "estimator; in asynchronous training the mismatch metrics include the updates since sampling",
    "mismatch/mean_abs": "absolute logprob difference between engine and trainer, mean",
    "mismatch/max_abs": "absolute logprob difference between engine and trainer, maximum",
    "routing_replay/agreement": "fraction of replayed experts that the live router also selects",
    "routing_replay/conflict_rate": "fraction of experts recorded twice that differ from the "
    "owner's",
    "routing_replay/free_fraction": "fraction of tokens routed by the live router",
    # time
    "time/step_s": "seconds of the training step, without writing metrics and checkpoint",
    "time/run_s": "seconds since training started in this process, or since its last restart of "
    "ranks",
    "time/rollout_s": "seconds of rollout",
    "time/pack_s": "seconds of advantages, folding and packing",
    "time/update_s": "seconds of training on the batch",
    "time/sync_s": "seconds of weight sync",
    "time/eval_s": "seconds of evaluation on held-out prompts",
}
_PLACEHOLDERS = {"K": r"\d+", "REASON": r"\w+", "NAME": r".+"}
_ROLLOUT = ("reward", "rollout", "turn", "env")


def meaning_of(name: str) -> str | None:
    """None for a metric that is not documented."""
    for pattern, meaning in _patterns():
        if pattern.fullmatch(name):
            return meaning
    if name.startswith("eval/"):
        for counterpart in _rollout_names(name.removeprefix("eval/")):
            if found := meaning_of(counterpart):
                return f"held-out prompts: {found}"
    return None


def _rollout_names(short: str) -> list[str]:
    """Candidates for the rollout metric behind `eval/short`."""
    if short.split("/")[0] in _ROLLOUT:
        return [short]
    return [short.replace("reward_", "reward/", 1), f"reward/{short}", f"rollout/{short}"]


@cache
def _patterns() -> list[tuple[re.Pattern, str]]:
    def pattern(name: str) -> re.Pattern:
        pieces = re.split(f"({'|'.join(_PLACEHOLDERS)})", name)
        return re.compile("".join(_PLACEHOLDERS.get(piece) or re.escape(piece) for piece in pieces))

    return [(pattern(name), meaning) for name, meaning in MEANINGS.items()]
