"""Running statistics: the tensors that a normalising step updates in place while it trains.

A launch gives the statistics of its batch beside the result; here they go into the running ones,
once a call, with or without gradients, as in torch's batch_norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fusegen.bound import Update
from fusegen.ops import COUNTER, RUNNING


def update(
    updates: Sequence[Update], statistics: Sequence[Tensor], named: Mapping[str, Tensor]
) -> None:
    """Move each step's running mean and variance towards those of its batch.

    statistics are a mean and an unbiased variance for each update; named are the call's operands.
    """
    for i, each in enumerate(updates):
        tensors = {parameter: named[name].detach() for parameter, name in each.tensors}
        counter = tensors.get(COUNTER)
        if counter is not None:
            counter.add_(1)
        for parameter, batch in zip(RUNNING, statistics[2 * i : 2 * i + 2], strict=True):
            running = tensors[parameter]
            new = batch.detach().reshape(running.shape).to(running.dtype)
            if each.momentum is not None:
                running.lerp_(new, each.momentum)
            else:
                assert counter is not None
                # On the device, so that nothing waits for the number.
                running.lerp_(new, counter.to(running.dtype).reciprocal())
