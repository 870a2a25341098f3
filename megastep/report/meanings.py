"""Every metric by name, and what it means: the one place where they are documented.

A number about trajectories counts each once; one about turns says `turn/`. Words in capitals stand for what varies:
K for a number, REASON for a word, NAME for anything. Means over nothing are left out rather than given as NaN. Over the
mini-batches of a step counts are added, maxima are maxima, all else is the mean.

Every number of a rollout has its like for held-out prompts:

    reward/mean, reward/std → eval/reward_mean, eval/reward_std     turn/count → eval/turn/count
    reward/success → eval/success                                   env/NAME → eval/env/NAME
    rollout/turns_mean → eval/turns_mean
"""

import re
from functools import cache

MEANINGS = {
    # what was generated, per trajectory
    "reward/mean": "total reward of a trajectory, mean",
    "reward/std": "total reward of a trajectory, standard deviation over the batch",
    "reward/success": "share of trajectories that succeeded: what the environment calls success, else reward > 0",
    "reward/pass_at_K": "chance that one of K trajectories of a prompt succeeds; K = 1, 2, 4, ...",
    "rollout/prompts": "prompts of the batch",
    "rollout/trajectories": "trajectories of the batch",
    "rollout/turns_mean": "model calls of a trajectory, mean",
    "rollout/turns_max": "model calls of a trajectory, at most",
    "rollout/response_tokens_mean": "response tokens of a trajectory over all its turns, mean",
    "rollout/response_tokens_max": "response tokens of a trajectory over all its turns, at most",
    "rollout/stop_REASON": "share of trajectories that ended so",
    "rollout/no_steps": "trajectories without a model call: the first prompt was already too long, or the environment "
    "did not start; rollout/stop_REASON says which",
    "rollout/version": "of the weights that the engines have now: optimizer steps behind them",
    "rollout/tokens_per_s": "sampled tokens per second of the rollout",
    "env/event_loop_blocked_s": "seconds for which the environment of an episode held the event loop, in stretches of "
    "half a second and more, mean over the trajectories in which it did; all other episodes waited meanwhile",
    "env/NAME": "mean over the trajectories for which the environment reports a number of that name",
    # how old it is
    "staleness/mean": "policies that the engines were given since a trained token was sampled, mean",
    "staleness/max": "the same, at most; never more than async.max_staleness, rounded up",
    "staleness/fraction_K": "share of trained tokens of that age",
    "async/waited": "groups that became due before they were complete, so that training waited for them",
    "async/dropped": "groups that were given up, complete or not, because they had become too old (async.on_stale: drop)",
    "eval/step": "training steps behind the policy when the evaluation began; beside training, newer policies join in",
    # per model call
    "turn/count": "model calls of the batch",
    "turn/older_routing": "model calls that met a weight sync while they waited for their engine: the experts of their "
    "prompt are those of the version before",
    "turn/prompt_tokens_mean": "prompt tokens of one model call, mean",
    "turn/prompt_tokens_max": "prompt tokens of one model call, at most",
    "turn/response_tokens_mean": "response tokens of one model call, mean",
    "turn/response_tokens_max": "response tokens of one model call, at most",
    "turn/finish_REASON": "share of model calls that ended so",
    # what is trained on
    "filter/dropped": "trajectories that are not trained on",
    "filter/dropped_fraction": "share of trajectories that are not trained on",
    "train/sequences_before_merge": "steps that train something",
    "train/sequences_after_merge": "root-to-leaf paths that those steps were folded into",
    "train/tokens_before_merge": "tokens, were every step computed alone",
    "train/tokens_distinct": "tokens, every one of a trie once",
    "train/tokens_computed": "tokens in micro-batches: repeated prefixes, padding and paddings included",
    "train/sharing_ratio": "tokens_before_merge / tokens_distinct",
    "train/micro_batches": "micro-batches of each rank",
    "train/paddings": "micro-batches that only keep the count equal on all ranks",
    "train/packing_efficiency": "share of the token budget of all micro-batches that real tokens fill",
    "train/balance": "mean tokens of a rank / most tokens of a rank",
    # the update
    "warm_start/loss": "loss of the last optimizer step on demonstrations, before the first rollout",
    "train/loss": "the weighted sum that was minimised, before the update",
    "train/optimizer_steps": "optimizer steps in this step, one for each mini-batch with a trained token",
    "train/empty_mini_batches": "mini-batches without a trained token, which make no optimizer step",
    "train/grad_norm": "norm of the whole gradient before clipping",
    "train/lr": "learning rate of the update",
    "train/skipped": "share of the optimizer steps that were left out because a loss or gradient was not finite",
    "train/tokens_trained": "response tokens with a loss",
    "train/entropy": "entropy of the policy's next-token distribution, mean over trained tokens",
    "train/ratio_mean": "probability of a trained token now / before the update, mean",
    "train/ratio_max": "probability of a trained token now / before the update, at most",
    "train/clip_fraction": "share of trained tokens whose ratio was clipped",
    "train/kl_reference": "KL from the initial model, mean over trained tokens (loss.kl_coef)",
    "train/kl_clamped_fraction": "share of trained tokens whose KL estimate was bounded at 10 and has no gradient",
    "train/advantage_abs_mean": "size of the advantage, mean over trained tokens",
    "train/importance_mean": "correction for the engine's logprobs, mean over trained tokens (loss.importance_sampling.mode)",
    "train/importance_clipped_fraction": "share of trained tokens whose correction was truncated or masked",
    # do the engine and the trainer agree
    "mismatch/kl": "KL between the engine's and the trainer's policy on the sampled tokens, by the k3 estimate; "
    "asynchronous, these three include the updates since the tokens were sampled",
    "mismatch/mean_abs": "difference of the engine's and the trainer's logprob of a token, mean size",
    "mismatch/max_abs": "difference of the engine's and the trainer's logprob of a token, at most",
    "routing_replay/agreement": "share of experts that the live routers would have chosen as well",
    "routing_replay/conflict_rate": "share of experts recorded twice that differ from the owner's",
    "routing_replay/free_fraction": "share of tokens whose experts the live router decides",
    # where the time goes
    "time/step_s": "seconds of the whole step, without writing its metrics and checkpoint",
    "time/run_s": "seconds since the command began to train",
    "time/rollout_s": "seconds of generating the batch",
    "time/pack_s": "seconds of credit, folding and packing",
    "time/update_s": "seconds of training on the batch",
    "time/sync_s": "seconds of handing the new weights to the engines",
    "time/eval_s": "seconds of playing held-out prompts",
}
_PLACEHOLDERS = {"K": r"\d+", "REASON": r"\w+", "NAME": r".+"}
_ROLLOUT = ("reward", "rollout", "turn", "env")


def meaning_of(name: str) -> str | None:
    """None: nobody has said what it means."""
    found = next((meaning for pattern, meaning in _patterns() if pattern.fullmatch(name)), None)
    if found is None and name.startswith("eval/"):
        alike = (meaning_of(rollout) for rollout in _rollout_names(name.removeprefix("eval/")))
        found = next(
            (f"held-out prompts: {meaning}" for meaning in alike if meaning is not None), None
        )
    return found


def _rollout_names(short: str) -> list[str]:
    """What a metric of an evaluation may be called in a rollout."""
    if short.split("/")[0] in _ROLLOUT:
        return [short]
    return [short.replace("reward_", "reward/", 1), f"reward/{short}", f"rollout/{short}"]


@cache
def _patterns() -> list[tuple[re.Pattern, str]]:
    def pattern(name: str) -> re.Pattern:
        pieces = re.split(f"({'|'.join(_PLACEHOLDERS)})", name)
        return re.compile("".join(_PLACEHOLDERS.get(piece) or re.escape(piece) for piece in pieces))

    return [(pattern(name), meaning) for name, meaning in MEANINGS.items()]
