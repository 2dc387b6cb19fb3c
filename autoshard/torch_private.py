"""Every private torch API in use but `Module._apply`, named here and nowhere else, each for what no public one does.

That they exist is checked when this is imported. Two are modules that torch's documents name as the way to extend it:
`torch.utils._python_dispatch` has modes that see each op, `torch._subclasses.fake_tensor` runs ops on shapes alone.
The others are listed below.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

NEEDED: tuple[tuple[Any, str, str], ...] = (
    (torch.Tensor, "_make_wrapper_subclass", "torch's documents name it: a tensor of a class of ours, without memory"),
    (torch.Tensor, "_version", "what is copied to another device must be told from what was written to since"),
    (torch._C, "_SetExcludeDispatchKeyGuard", "composite ops must be seen whole, and views without what they are of"),
    (torch._C, "_swap_tensor_impl", "`torch.utils.swap_tensors` refuses tensors that someone refers to weakly"),
    (torch._C, "_current_autograd_node", "an op of a backward belongs to the node that runs it"),
    (torch.autograd.Variable, "_execution_engine", "ranks average some gradients when a backward is over"),
    (
        torch.utils._python_dispatch,
        "_disable_current_modes",
        "what is computed beside a model's own ops is none of them",
    ),
)
"""Who has a private name, the name, and what needs it."""

_MISSING = [name for owner, name, _ in NEEDED if not hasattr(owner, name)]
if _MISSING:
    raise ImportError(
        f"autoshard needs {', '.join(_MISSING)} of torch, and torch {torch.__version__} has no such name. "
        "Install a torch that autoshard was tested with: 2.11 to 2.15."
    )

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
OpOverload: Any = type(torch.ops.aten.add.Tensor)
"""What ops are."""
not_overridden = torch.nn.Parameter.__torch_function__
"""`__torch_function__` of a subclass that is met at ops only."""


def wrapper(kind: type, like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of a subclass with the shape, strides and dtype of another and no memory: ops on it go to its class.

    It is lazily conjugated or negated where the other is.
    """
    keys = torch.DispatchKey
    lazy = [key for key, is_set in ((keys.Conjugate, like.is_conj()), (keys.Negative, like.is_neg())) if is_set]
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=device,
        _extra_dispatch_keys=reduce(or_, map(torch.DispatchKeySet, lazy)) if lazy else None,
    )  # fmt: skip


def autograd_node() -> Any:
    """The autograd node that is running in this thread, or None outside of a backward."""
    return torch._C._current_autograd_node()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of `torch.func` (vmap, grad, …) has wrapped a tensor for the function that it runs."""
    return torch.func.debug_unwrap(tensor, recurse=False) is not tensor


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that ops below the transforms of `torch.func` see; the same one where none has wrapped it."""
    return torch.func.debug_unwrap(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """How many writes into a tensor's memory torch has seen. Only errors of a backward tell of it elsewhere."""
    return tensor._version


def after_backward(call: Callable[[], None]) -> None:
    """Call something when the backward that runs in this thread is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _table(kind: type, method: str, *given: Any) -> str:
    """The dict or set in which modules keep what one of their methods registers: found in a fresh one."""
    fresh = torch.nn.Module()
    getattr(fresh, method)(*given)
    (name,) = [name for name, value in vars(fresh).items() if isinstance(value, kind) and value]
    return name


def _hooks(method: str) -> str:
    return _table(dict, method, _hooks)


_BACKWARD = _hooks("register_full_backward_pre_hook"), _hooks("register_full_backward_hook")
_FORWARD = _hooks("register_forward_pre_hook"), _hooks("register_forward_hook")
_STATE_DICT = (
    _hooks("register_state_dict_pre_hook"), _hooks("register_load_state_dict_pre_hook"),
    _hooks("register_load_state_dict_post_hook"),
)  # fmt: skip


def _hooks_of_tensors(method: str) -> str:
    """The attribute in which tensors have the hooks that one of their methods registers: its handle leads there."""
    leaf = torch.ones((), requires_grad=True)
    hooks = getattr(leaf, method)(_hooks).hooks_dict_ref()
    (name,) = [name for name in dir(leaf) if "hook" in name and getattr(leaf, name) is hooks]
    return name


_ON_GRADIENT = _hooks_of_tensors("register_hook")
_ON_ACCUMULATED = _hooks_of_tensors("register_post_accumulate_grad_hook")
_HELD = "autoshard_held"
_UNSAVED = _table(set, "register_buffer", "buffer", None, False)


def unsaved_buffers(module: torch.nn.Module) -> Any:
    """The names of a module's own buffers that its state dict leaves out."""
    return getattr(module, _UNSAVED)


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    """The forward pre-hooks registered on a module, in calling order."""
    return list(getattr(module, _FORWARD[0]).values())


def backward_hooks(module: torch.nn.Module, except_of: str = "") -> list[Any]:
    """The hooks of a module on the gradients of its outputs and of its inputs, but for those of one package."""
    return [hook for name in _BACKWARD for hook in getattr(module, name).values() if _package(hook) != except_of]


def hook_numbers(module: torch.nn.Module, except_of: str) -> tuple[int, ...]:
    """The numbers of a module's hooks, no two of which are the same in a process, but for those of one package."""
    tables = [getattr(module, name) for name in (*_FORWARD, *_BACKWARD)]
    return tuple(number for table in tables for number, hook in table.items() if _package(hook) != except_of)


def _package(hook: Any) -> str:
    """The package of a hook's class; "builtins" of a function."""
    return type(hook).__module__.partition(".")[0]


def default_store() -> Any:
    """The key-value store with which the default process group was made, None without such a group."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    world: Any = torch.distributed.group.WORLD
    return world.get_group_store()


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that torch's compiler has nothing to do with."""

    def __init_subclass__(cls) -> None:
        """Leave out what torch does here: ask the compiler at every op, of which the first import takes seconds."""


_function_class: Any = torch.autograd.Function
_apply_of_function: Any = vars(_function_class)["apply"]
_asked: list[Callable[..., Any]] = []


@contextmanager
def autograd_functions(call: Callable[..., Any]) -> Iterator[None]:
    """Inside, in all threads, an `apply` of a `torch.autograd.Function`, which no function mode sees, asks `call`.

    Nor does a node of the graph tell of it where gradients are off, or ops pass autograd by. `call` is called with the
    function, what applies it, and the arguments as a tuple and a dict.
    """
    _asked.append(call)
    _function_class.apply = classmethod(_applied)
    try:
        yield
    finally:
        _asked.remove(call)
        if not _asked:
            _function_class.apply = _apply_of_function


def _applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    apply: Callable[..., Any] = _apply_of_function.__get__(None, function)
    for call in tuple(_asked):
        apply = partial(_ask, call, function, apply)
    return apply(*args, **kwargs)


def _ask(call: Callable[..., Any], function: Any, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(function, apply, args, kwargs)


def untracked_views() -> Any:
    """A context in which views do not refer to what they are views of."""
    return torch._C._SetExcludeDispatchKeyGuard(torch.DispatchKey.ADInplaceOrView, True)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Inside, ops pass autograd by, so that dispatch modes see composite ones (`linear`) whole."""
    keys = torch.DispatchKey
    with ExitStack() as stack:
        for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, True))
        yield


def swap_contents(left: torch.Tensor, right: torch.Tensor) -> None:
    """Exchange what two tensor objects are (type, attributes, values, history) and keep the objects; `right` is new.

    As `torch.utils.swap_tensors`, which refuses a tensor that someone refers to weakly (recurrent layers do so with
    their own weights) or that a backward graph holds. Such a graph can't be run any more: its gradient would end in the
    wrong object, so backward raises RuntimeError. Raises RuntimeError for a tensor with history that a graph holds.
    """
    torch.clear_autocast_cache()  # it refers weakly to parameters, which torch does not swap then
    if is_held(left):
        if not left.is_leaf:
            raise RuntimeError("a backward graph still holds it; run backward or drop the output first")
        with no_modes(), torch.inference_mode(False):
            _accumulation(left).register_prehook(_refuse_backward)
    left.__class__, right.__class__ = right.__class__, left.__class__
    left.__dict__, right.__dict__ = right.__dict__, left.__dict__
    torch._C._swap_tensor_impl(left, right)
    _run_hooks_again(left)


def _run_hooks_again(tensor: torch.Tensor) -> None:
    """Let the hooks that a Python object has on its gradient run for what is behind it now: the setters see to that."""
    for name in (_ON_GRADIENT, _ON_ACCUMULATED):
        hooks = getattr(tensor, name, None)
        if hooks is not None:  # nor does torch look again at a table that was empty when a hook is added to it
            setattr(tensor, name, None)
            setattr(tensor, name, hooks)


def is_held(tensor: torch.Tensor) -> bool:
    """Whether a backward graph refers to a tensor.

    Of a leaf a graph has the node that fills `.grad`, which else is made anew each time it is asked for. What has a
    history torch exchanges if nobody refers to it; it refuses what is referred to weakly, which counts as held then.
    """
    if not tensor.requires_grad or tensor.is_inference():
        return False
    if tensor.is_leaf:
        with no_modes(), torch.inference_mode(False):
            _accumulation(tensor).metadata[_HELD] = True
            return _HELD in _accumulation(tensor).metadata
    other = torch.empty(0)
    try:
        for _ in range(2):
            torch.utils.swap_tensors(tensor, other)
    except RuntimeError:
        return True
    return False


def _accumulation(leaf: torch.Tensor) -> Any:
    """The node that fills `.grad` of a leaf; no mode may see this."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def gradient_hooks(tensor: torch.Tensor) -> list[Any]:
    """The hooks registered with `tensor.register_hook`, in calling order."""
    return list((getattr(tensor, _ON_GRADIENT) or {}).values())


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Whether something is called when the gradient of a parameter was accumulated."""
    return bool(getattr(tensor, _ON_ACCUMULATED, None))


def drop_gradient_hooks(tensor: torch.Tensor, kind: type) -> None:
    """Take the hooks of one class off a tensor."""
    hooks = getattr(tensor, _ON_GRADIENT) or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
        del hooks[key]


def _refuse_backward(grad_outputs: Any) -> None:
    raise RuntimeError(
        "backward through a graph that was made before autoshard moved the parameters. "
        "Run the forward again after autoshard.apply or autoshard.remove."
    )


def is_composite(op: Any) -> bool:
    """Whether CPU tensors run an op as a sequence of other ops that autograd sees one by one."""
    has_kernel, keys = op.has_kernel_for_dispatch_key, torch.DispatchKey
    return has_kernel(keys.CompositeImplicitAutograd) and not has_kernel(keys.CPU)


def looks_for_overrides(module: torch.nn.Module) -> bool:
    """Whether a forward asks if torch functions are overridden: torch's encoder layers leave their fused path if so."""
    return _mentions(module, "has_torch_function")


def looks_for_hooks(module: torch.nn.Module) -> bool:
    """Whether a forward asks if modules have hooks, as that of torch's encoder layers does."""
    return _mentions(module, *_FORWARD)


def _mentions(module: torch.nn.Module, *names: str) -> bool:
    """Whether there is one of some names in the code of a forward, or in a function inside of it."""
    found = [getattr(inspect.unwrap(inspect.getattr_static(type(module), "forward")), "__code__", None)]
    for code in found:
        found += [one for one in getattr(code, "co_consts", ()) if inspect.iscode(one)]
    return any(name in (*code.co_names, *code.co_consts) for code in found if code is not None for name in names)


def no_overrides() -> Any:
    """A context in which no torch function is overridden, by modes or by subclasses, and none looks as if it were."""
    return torch.DisableTorchFunction()


def overrides_are_off() -> bool:
    """Whether this runs inside `no_overrides`."""
    with TorchFunctionMode():
        return not torch.overrides.has_torch_function((None,))


def no_dispatch_modes() -> Any:
    """Inside, no dispatch mode sees what is called."""
    return torch.utils._python_dispatch._disable_current_modes()


@contextmanager
def no_modes() -> Iterator[None]:
    """Inside, no mode sees what is called: neither dispatch modes nor torch function modes."""
    with torch.utils._python_dispatch._disable_current_modes(), no_overrides():
        yield


def run_composite(op: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a composite op's own C++ code, as CPU tensors do (`op.decompose` may pick Python that rounds otherwise).

    Views are tracked inside, as they are for CPU tensors: whether a view requires grad decides how matmul folds. Not
    where torch tracks the result (of narrow and chunk), since it refuses one that is tracked already.
    """
    keys = torch.DispatchKey
    tracked = op.has_kernel_for_dispatch_key(keys.ADInplaceOrView)
    with torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, tracked):
        return op.redispatch(torch.DispatchKeySet(keys.CPU), *args, **kwargs)


def uncompiled() -> Any:
    """A context in which what is compiled runs as it is written."""
    is_loaded = "torch._dynamo" in sys.modules  # else nothing is compiled, and the compiler takes seconds to import
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


def fake_from_meta(mode: FakeTensorMode, meta: torch.Tensor) -> FakeTensor:
    """A fake CPU tensor in the memory of a meta tensor.

    Its device is an object of its own, by which who passes it on is known to mean this tensor.
    """
    return FakeTensor(mode, meta, torch.device("cpu"))


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


_added: "weakref.WeakKeyDictionary[torch.nn.Module, set[str]]" = weakref.WeakKeyDictionary()
"""The names of the attributes that modules have from `fully_shard`."""


def fully_shard(module: torch.nn.Module, **options: Any) -> Any:
    """Do what torch's function of this name does, so that `undo_fully_shard` can undo it, also if it raises."""
    from torch.distributed import fsdp

    before = {one: set(vars(one)) for one in module.modules()}
    try:
        return fsdp.fully_shard(module, **options)
    finally:
        for one, names in before.items():
            _added.setdefault(one, set()).update(vars(one).keys() - names)


def undo_fully_shard(model: torch.nn.Module) -> None:
    """Take off the modules of a model what `fully_shard` put on them: classes, hooks and states; not its parameters."""
    from torch.distributed import fsdp

    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            state: Any = fsdp.fully_shard.state(module)  # type: ignore[attr-defined]
            for handle in vars(state).values():
                if isinstance(handle, RemovableHandle):
                    handle.remove()
            for kind in type(state).__mro__:  # beside one of them torch has a table of all modules with a state
                for table in vars(sys.modules[kind.__module__]).values():
                    if isinstance(table, weakref.WeakKeyDictionary):
                        table.pop(module, None)
            module.__class__ = type(module).__mro__[2]
        for table in (getattr(module, name) for name in _STATE_DICT):
            for number, hook in list(table.items()):
                if str(getattr(hook, "__module__", "")).startswith(fsdp.__name__):
                    del table[number]  # else it would keep the shards
        for name in _added.pop(module, ()):
            vars(module).pop(name, None)
