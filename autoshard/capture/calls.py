"""Module calls of a run as they begin and end, and what they tell about its phases."""

from dataclasses import replace

from autoshard.capture.allocations import AllocationLog
from autoshard.capture.graph import Call
from autoshard.errors import CaptureError


class Calls:
    """Rows of calls in order of their beginning.

    Attributes:
        running: those that have begun and not ended, the innermost last.
    """

    def __init__(self, log: AllocationLog) -> None:
        self.running: list[int] = []
        self._log = log
        self._rows: list[Call] = []
        self._root = 0
        self._context = -1  # when the context began to be made for the last step of a generation; -1: it was not

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def current(self) -> int:
        """The innermost module call that is running, or the outermost one before."""
        return self.running[-1] if self.running else self._root

    @property
    def root(self) -> int:
        """The outermost call that began last."""
        return self._root

    def path_of(self, call: int) -> str:
        return self._rows[call].path if call < len(self._rows) else ""

    def begin(
        self, path: str, inputs: tuple[int, ...], contained: tuple[int, ...], paths: tuple[str, ...], backward: bool
    ) -> int:
        """Enter a call."""
        index = len(self._rows)
        if not self.running:
            self._root = index
        row = Call(
            index=index, path=path, parent=self.running[-1] if self.running else -1, begin=self._log.now, end=-1,
            inputs=inputs, outputs=(), contained=contained, input_paths=paths, backward=backward,
        )  # fmt: skip
        self._rows.append(row)
        self.running.append(index)
        return index

    def end(self, index: int, outputs: tuple[int, ...], paths: tuple[str, ...]) -> int:
        """Close the innermost call and return its first op. Raises CaptureError if nobody was told of the end of it."""
        inner = self.running.pop()
        if inner != index:
            raise CaptureError(
                f"{self.path_of(inner)} raises an error that the model catches and that is no Exception: hooks are "
                "told of no other error, so it is not known where that call ends. Derive it from Exception."
            )
        self._rows[index] = replace(self._rows[index], end=self._log.now, outputs=outputs, output_paths=paths)
        return self._rows[index].begin

    def root_outputs(self) -> tuple[int, ...]:
        """Values returned by the first call of the root."""
        return next(row.outputs for row in self._rows if row.path == "" and not row.backward)

    def step_outputs(self) -> tuple[int, ...]:
        """Values returned by the last step of a generation."""
        return self._steps()[-1].outputs

    def begin_context(self) -> None:
        """All before was the prompt; what comes now makes the state for the last step of the generation."""
        self._context = self._log.now

    def prompt_and_step(self) -> list[tuple[str, int, int]]:
        """Phases of a generation: up to the context that is made for the last step, that, and the last step."""
        context = max(self._context, 0)
        begins = [row.begin for row in self._steps() if row.begin >= context]
        if len(begins) < 2:
            raise CaptureError("the model was not called a second time while generating; set new_tokens=0.")
        step = ("decode", begins[-1], self._log.now)
        if self._context < 0:
            return [("forward", 0, begins[-1]), step]
        return [("forward", 0, context), ("context", context, begins[-1]), step]

    def _steps(self) -> list[Call]:
        """Calls of the module that generates: the root, or a part of it to which the root's `generate` hands over."""
        outermost = [row for row in self._rows if row.parent < 0]
        return [row for row in outermost if row.path == outermost[-1].path]

    def finished(self) -> tuple[Call, ...]:
        """Return the rows."""
        return tuple(self._rows)
