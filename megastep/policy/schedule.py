"""Megatron's pipeline schedule over micro-batches."""

from collections.abc import Callable

from megatron.core.pipeline_parallel import get_forward_backward_func

from megastep.types import MicroBatch


def run_schedule(
    chunks: list, forward_step: Callable, micro_batches: list[MicroBatch], forward_only: bool
) -> list:
    """Call `forward_step(data, model)` for each chunk and micro-batch; backward too, unless
    forward_only. `next(data)` is (index of the chunk, micro-batch).

    Returns the last result of the function that forward_step returns, for each micro-batch, on
    ranks with the output layer.
    """
    data_iterators = [
        iter([(chunk, micro_batch) for micro_batch in micro_batches])
        for chunk in range(len(chunks))
    ]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterators,
        model=chunks,
        num_microbatches=len(micro_batches),
        seq_length=len(micro_batches[0].trie),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
