"""Let the library of Hugging Face models load tensors without values, to see what it does with them.

    names, shapes, dtypes ──▶ traced tensors ──from_pretrained──▶ a model of traced tensors

The library builds the model, renames and fuses what its files hold, ties, initialises, and computes its buffers;
whatever it does is known then, and nothing was allocated.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard.checkpoint.traced import TracedTensor, missing
from autoshard.errors import CheckpointError
from autoshard.integrations.strictness import Differences
from autoshard.integrations.words import count, first, one_line
from autoshard.torch_private import no_dispatch_modes


def rehearse(
    model_class: Any, config: Any, state: Mapping[str, TracedTensor], dtype: Any, *, where: Path, strict: bool
) -> tuple[Any, Differences]:
    """Let the library load traced tensors; return its model of traced tensors, and what did not fit.

    `strict`: what is missing gets no memory. `where`: what errors name. Raises `CheckpointError`.
    """
    report: list[str] = []
    unallocated = _NoMemoryForMissing() if strict else contextlib.nullcontext()
    try:
        with quiet(), _reported(report), no_dispatch_modes(), unallocated:
            model, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=dict(state),
                dtype=dtype,
                ignore_mismatched_sizes=True,  # they are listed, and refused here
                output_loading_info=True,
            )
    except Exception as error:  # whatever the class of this model makes of its configuration
        unmade = re.findall(r"^(\S+) +\| CONVERSION", "\n".join(report), re.MULTILINE)
        if unmade:
            raise CheckpointError(
                f"transformers can't make {count(unmade, 'tensor')} of the model from {where}: "
                f"{first(unmade)}. Parts may be missing or of another shape. Check that the files are whole."
            ) from error
        raise CheckpointError(
            f"transformers can't load {model_class.__name__} from {where}: {one_line(error)}. If "
            f"{model_class.__name__}.from_pretrained can, please report this."
        ) from error
    shapes = {name: (tuple(there), tuple(needed)) for name, there, needed in info["mismatched_keys"]}
    return model, Differences(missing=info["missing_keys"], unexpected=info["unexpected_keys"], shapes=shapes)


class _NoMemoryForMissing(TorchFunctionMode):
    """A parameter that the checkpoint does not have stays without values, so that all can be listed at no cost."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: "dict[str, Any] | None" = None
    ) -> Any:
        if func is torch.empty_like and isinstance(args[0], nn.Parameter) and args[0].is_meta:
            return missing(args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _reported(report: list[str]) -> Iterator[None]:
    """Within it, what the library says of its loading goes to `report`."""
    log = logging.getLogger("transformers.modeling_utils")
    handler = logging.Handler()
    handler.emit = lambda record: report.append(record.getMessage())  # type: ignore[method-assign]
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it, the library shows no bars and reports only errors."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging as library

    verbosity, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if bars:
            library.enable_progress_bar()
