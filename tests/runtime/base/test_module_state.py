"""Whose a hook is.

Which seeded bug would this catch? A hook is taken for torch's because torch decorates it, or for
the user's because it is a partial of torch's function.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from meshplan.runtime.base.module_state import is_users, users_hooks


def note(*args: Any) -> None:
    pass


class Noted:
    def __call__(self, *args: Any) -> None:
        pass

    def method(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("hook", [
    note, functools.partial(functools.partial(note), 1), torch.no_grad()(note), Noted(),
    functools.partial(Noted().method), [].append, lambda *args: None,
])  # fmt: skip
def test_hooks_of_the_user(hook: Any) -> None:
    assert is_users(hook)


@pytest.mark.parametrize("hook", [
    functools.partial(torch.nn.functional.relu, inplace=True), nn.Linear(1, 1).forward, nn.ReLU(),
    functools.wraps(nn.Module.train)(lambda *args: None), functools.partial(users_hooks),
])  # fmt: skip
def test_hooks_of_torch_and_of_meshplan(hook: Any) -> None:
    assert not is_users(hook)


def test_hooks_that_prepare_weights_are_not_the_users() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)))
    assert not list(users_hooks(model))
    model[0].register_forward_hook(note)
    assert list(users_hooks(model)) == [note]
