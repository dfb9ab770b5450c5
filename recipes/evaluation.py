"""What is measured beside the training: held-out accuracy, and audits of the samplers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from recipes.config import Config
from recipes.policy import Policy
from recipes.run.log import RunLog
from rzero.collectors.weights import rounded

AUDITED_PROMPTS = 64


def evaluate(
    config: Config,
    policy: Policy,
    log: RunLog,
    *,
    version: int,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Measure the weights of a version by the samplers, if it is time to; meanwhile nothing is trained.

    Args:
        config: Says how often.
        policy: Knows the held-out problems.
        log: Notes what is found; the engines of its collector have these weights or are getting them.
        version: Of the weights.
        weights: The learner's, for an audit; None before the first update, which is not audited.
    """
    accuracy_due = version % config.eval_every == 0 or version == config.updates
    audit_due = weights is not None and config.audit_every > 0 and version % config.audit_every == 0
    if not (accuracy_due or audit_due):
        return
    collector = log.collector
    with log.evaluating():
        collector.publisher.wait()
        if accuracy_due:
            accuracy = policy.held_out_accuracy(
                collector.sample,
                version=version,
                samples=config.held_out_samples,
                max_new_tokens=config.max_new_tokens,
            )
            log.held_out(version, accuracy)
        if audit_due and weights is not None:
            held = weights if config.wire is None else rounded(weights, config.wire)
            reports = [
                policy.audit(
                    engine,
                    held,
                    version=version,
                    prompts=AUDITED_PROMPTS,
                    max_new_tokens=config.max_new_tokens,
                )
                for engine in collector.engines
            ]
            log.audit(version, reports)
