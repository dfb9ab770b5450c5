"""Identical weights and histories first: do sampler and learner give every token the same bits?

    torchrun --standalone --nproc-per-node=2 recipes/audit.py

Step 1 gives both sides the same weights and compares, with torch's own kernels and then with the exact ones.
Step 2 trains asynchronously with the exact kernels and audits the samplers in between; what lag explains is
left out by version, and nothing else may be left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipes.audit_report import audit_table, draw_audit
from recipes.config import Config
from recipes.launch import Channels, parse, run
from recipes.learners import Learners
from recipes.policy import new_policy
from recipes.reinforce_zero import learn
from recipes.run.folder import new_run_folder
from recipes.samplers import run_sampler, start_samplers
from rzero.audit import AuditReport
from rzero.collectors import WeightPublisher, named_weights


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Config):
    """Audit first with identical weights and histories, then during asynchronous training."""

    audited_responses: int = 512
    """Responses of each audit in step 1."""
    updates: int = 60
    """Optimizer updates of step 2."""
    audit_every: int = 20
    """Updates between the audits of step 2."""


def identical_weights(config: AuditConfig, channels: Channels, *, kernels: str) -> AuditReport:
    """Step 1: build engines, publish the learner's weights to them, compare."""
    policy = new_policy(replace(config, kernels=kernels))
    engines = start_samplers(policy, channels, max_slots=config.max_slots)
    WeightPublisher(engines).publish(named_weights(policy.model), version=0)
    report = policy.audit(
        engines[0],
        named_weights(policy.model),
        version=0,
        prompts=config.audited_responses,
        max_new_tokens=config.max_new_tokens,
    )
    for engine in engines:
        engine.close()
    return report


def main() -> None:
    """Both steps, a table and a figure."""
    config = parse(AuditConfig, default=AuditConfig(), description=AuditConfig.__doc__ or "")

    def audit_both_steps(learners: Learners, channels: Channels) -> None:
        folder = new_run_folder(config.runs, "audit")
        rows: list[dict[str, Any]] = []
        for kernels in ("native", "exact"):
            report = identical_weights(config, channels, kernels=kernels)
            rows.append({"step": 1, "kernels": kernels, "version": 0, **report.to_dict()})
        summary = learn(replace(config, kernels="exact", runs=folder), learners, channels)
        rows += [{"step": 2, "kernels": "exact", **audited} for audited in (summary or {}).get("audits", [])]
        save(rows, folder)

    run(audit_both_steps, run_sampler)


def save(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write ``audit.json`` and ``audit.png`` and print the table."""
    (folder / "audit.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw_audit(rows, folder / "audit.png")
    print(f"\n{audit_table(rows)}\n\n  {folder}", flush=True)


if __name__ == "__main__":
    main()
