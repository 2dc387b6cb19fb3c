"""A recorded run, run again with real weights: bitwise what the model gives for inputs that take the same branches."""

import torch

from autoshard.capture.inputs import as_call
from autoshard.capture.material import copied
from autoshard.nested import tensors_in


class _AsRecorded(torch.fx.Interpreter):
    """Gives a fresh result the strides it had in the record, where a fake kernel had promised others."""

    def run_node(self, n):
        result, strides = super().run_node(n), n.meta.get("stride")
        if not isinstance(result, torch.Tensor) or strides in (None, result.stride()) or not result.numel():
            return result
        return torch.empty_strided(result.shape, strides, dtype=result.dtype).copy_(result)


def replay(graph, model, inputs):
    """Run a graph's ops on `model`'s own values; return (output tensors in order, gradients by parameter name).

    Equal to the model only with the same random state. The model's tensors and the inputs are not written.
    """
    module, storages = graph.module(model), {}
    found = [copied(tensor, storages) for _, tensor in tensors_in(as_call(inputs, model))]
    given = dict(zip(graph.inputs, found, strict=True))  # one tensor given twice is one input
    # Some kernels ask whether gradients are enabled. In this order, because leaving inference mode enables them.
    with torch.inference_mode(False), torch.set_grad_enabled(graph.training):
        outputs, gradients = _AsRecorded(module).run(*given.values())
    return list(outputs), dict(gradients)
