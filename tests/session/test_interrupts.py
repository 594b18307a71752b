"""Tests Ctrl-C at any line of a forward and a backward: what cleans up leads back to the committed step."""

import ast
import functools
import itertools
import os
import pathlib
import sys

import pytest
import torch
from support.chains import chain, loss_of, require_same, step, twins

import memascend

PACKAGE = os.path.dirname(memascend.__file__)
# Lines between two interrupts. Odd, and each way has its own first one, so that together they come to most lines.
STRIDE = 97


@functools.cache
def with_lines(file):
    """The lines of a file on which a `with` begins, and ends."""
    statements = (node for node in ast.walk(ast.parse(pathlib.Path(file).read_text())) if isinstance(node, ast.With))
    return {line for one in statements for line in range(one.lineno, one.body[0].lineno)}


def interrupted(run, line, functions=None):
    """Whether `run` was interrupted at this line of the package, or of these functions, counted as they come.

    At a `with` it comes one line later: a trace function is called there between the end of the block and its
    `__exit__`, where no signal is, and what it raises would leave out the exit.
    """
    lines = itertools.count(1)
    due = False

    def trace(frame, event, arg):
        nonlocal due
        del arg
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return None
        if event in ("call", "line") and (functions is None or frame.f_code.co_name in functions):
            due |= next(lines) == line
            if due and frame.f_lineno not in with_lines(file):
                due = False
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    # One in a callback that torch or Python calls is told and goes on.
    return next(lines) > line


def drop_each(model):
    for parameter in model.parameters():
        parameter.grad = None


def goes_on(tmp_path, way, gradients, lines, functions=None):
    """Interrupts a backward at each of some lines; a way back to the last step later, training goes on as in memory."""
    plain, theirs, model, ours = twins(tmp_path, gradients, lambda: chain(bias=True))
    ways = {"optimizer": ours.zero_grad, "model": model.zero_grad, "each": lambda: drop_each(model)}
    count = 0
    with ours:
        for line in lines:
            more = interrupted(lambda line=line: loss_of(model, line).backward(), line, functions)
            ways[way]()
            for one, optimizer in ((plain, theirs), (model, ours)):
                step(one, optimizer, line + 1)
            require_same(plain, model)
            if not more:
                break
            count += 1
    # Else every later test of this process would compute past the parameters' class.
    assert torch._C._is_torch_function_enabled()
    return count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("first", "way", "gradients"), [(1, "optimizer", "ram"), (33, "model", "ssd"), (65, "each", "fused")]
)
def test_after_an_interrupt_at_any_line_the_next_step_is_as_in_memory(tmp_path, first, way, gradients):
    assert goes_on(tmp_path, way, gradients, itertools.count(first, STRIDE)) > 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_materializing_leaves_nothing_half_done(tmp_path):
    materializing = {"count", "_bring", "materialize", "offload", "_make_placeholders"}
    assert goes_on(tmp_path, "each", "fused", itertools.count(1), materializing) > 50
