"""The same numbers on a GPU."""

import pytest
import torch

from rzero.losses import flash_reinforce_loss, importance_diagnostics, reinforce_loss
from tests.losses.batches import LAYOUTS, random_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("function", "options"), [(reinforce_loss, {}), (flash_reinforce_loss, {"delta": 5e-2})]
)
def test_a_gpu_agrees_with_the_cpu(function, options, layout):
    rows = random_rows(8, num_rows=12)
    found = {}
    for device in ("cpu", "cuda"):
        tokens = {name: value.to(device) for name, value in LAYOUTS[layout](rows).items()}
        log_probs = tokens.pop("log_probs").detach().requires_grad_()
        behavior, mask = tokens.pop("behavior_log_probs"), tokens.pop("mask")
        loss = function(log_probs, behavior, rows.advantages.to(device), mask, **tokens, **options)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        gradient = gradient.values() if gradient.is_nested else gradient
        found[device] = loss.detach().cpu(), gradient.cpu()
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-5, atol=1e-7)


def test_diagnostics_agree_with_the_cpu():
    tokens = LAYOUTS["packed"](random_rows(8, num_rows=12))
    lag = torch.arange(len(tokens["mask"])) % 5
    on_cpu = importance_diagnostics(**tokens, lag=lag).to_dict()
    on_gpu = importance_diagnostics(**{k: v.cuda() for k, v in tokens.items()}, lag=lag.cuda()).to_dict()
    assert on_gpu == pytest.approx(on_cpu, rel=1e-9, nan_ok=True)
