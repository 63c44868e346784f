"""Which modules can compute on a part of their experts: tried on made-up ones, no processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshplan.runtime.apply.experts.expert_protocol import Protocol, find_protocol
from tests.helpers import moe

E, D, F = 4, 8, 6


class Base(nn.Module):
    """Experts that do as they should; each test's class spoils one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.weight = nn.Parameter(torch.randn(E, D, D))

    def weigh(self, scores: Tensor) -> Tensor:
        return scores

    def one(self, expert: int, rows: Tensor) -> Tensor:
        return torch.tanh(rows @ self.weight[expert])

    def forward(self, x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        scores, out = self.weigh(scores), torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            if token.numel():
                out.index_add_(0, token, self.one(expert, x[token]) * scores[token, slot, None])
        return out


class Squares(Base):
    """Not linear in the weight, which is the module's own business."""

    def weigh(self, scores: Tensor) -> Tensor:
        return scores**2


class Normalises(Base):
    """Weights made to add up to one inside: with one slot a row they all would be one."""

    def weigh(self, scores: Tensor) -> Tensor:
        return scores / scores.sum(-1, keepdim=True)


class NormalisesInTraining(Normalises):
    """The same, seen in training alone."""

    def weigh(self, scores: Tensor) -> Tensor:
        return super().weigh(scores) if self.training else scores


class Forgets(Base):
    """Dropout, as a module and as a function: masks are nobody's to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def one(self, expert: int, rows: Tensor) -> Tensor:
        rows = nn.functional.dropout(rows, 0.5, self.training)
        rows = torch.dropout(input=rows, p=0.5, train=self.training)
        return self.drop(super().one(expert, rows))


class Drops(Base):
    """A capacity per expert."""

    def one(self, expert: int, rows: Tensor) -> Tensor:
        kept = torch.arange(rows.shape[0]) < 1
        return super().one(expert, rows) * kept.unsqueeze(-1)


class Capacity(Base):
    """A capacity that grows with the tokens and shrinks with the number of experts."""

    def forward(self, x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        self.capacity = max(1, 2 * index.numel() // self.num_experts)
        return super().forward(x, index, scores)

    def one(self, expert: int, rows: Tensor) -> Tensor:
        return super().one(expert, rows) * (torch.arange(len(rows)) < self.capacity)[:, None]


class Mixes(Base):
    """Statistics over the tokens of an expert."""

    def one(self, expert: int, rows: Tensor) -> Tensor:
        return super().one(expert, rows - rows.mean(0))


class Numbered(Base):
    """The last expert passes tokens on as they are."""

    def one(self, expert: int, rows: Tensor) -> Tensor:
        return rows if expert >= E - 1 else super().one(expert, rows)


class Scaled(Base):
    """A scale per expert that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0 + 0.1 * expert for expert in range(E)]

    def one(self, expert: int, rows: Tensor) -> Tensor:
        return super().one(expert, rows) * self.scales[expert]


class Stubborn(Base):
    """Loops over a number of experts that cannot be changed."""

    def forward(self, x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(E):
            out += (index == expert).sum(-1, keepdim=True) * self.one(expert, x) * scores[:, :1]
        return out


class Deaf(Base):
    """Does not use its experts."""

    def one(self, expert: int, rows: Tensor) -> Tensor:
        return rows * (self.weight[expert].sum() * 0 + 1)


class Nan(Base):
    def one(self, expert: int, rows: Tensor) -> Tensor:
        return super().one(expert, rows) * float("nan")


class Whole(Base):
    """A block with its router inside."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class More(Base):
    def forward(self, x: Tensor, index: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        return x


class Tuple(Base):
    def forward(self, x: Tensor, index: Tensor, scores: Tensor) -> tuple[Tensor, int]:
        return super().forward(x, index, scores), 0


REFUSED: dict[type[Base], str] = {
    Normalises: "its output is not the sum of the experts' outputs over the slots",
    NormalisesInTraining: "its output is not the sum of the experts' outputs over the slots",
    Drops: "its output for a token depends on the other tokens",
    Capacity: "its output for a token depends on how many tokens go to the same expert",
    Mixes: "its output is not the sum of the experts' outputs over the slots",
    Numbered: "its output depends on an expert's index, not only on its parameters",
    Scaled: "its output is not the sum of the experts' outputs over the slots",
    Stubborn: "a test call raised IndexError: index 1 is out of bounds for dimension 0 with size 1",
    Deaf: "its output does not depend on the expert",
    Nan: "its output is not the sum of the experts' outputs over the slots",
    Whole: "its forward must take tokens, expert indices and weights, but takes (x)",
    More: (
        "its forward must take tokens, expert indices and weights, but takes "
        "(x, index, scores, mask)"
    ),
    Tuple: "its forward does not return one row per token",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_cannot_compute_on_a_part_is_found_out(kind: type[Base]) -> None:
    assert find_protocol(kind(), E) == REFUSED[kind]


@pytest.mark.parametrize("kind", [Base, Squares, Forgets])
def test_a_module_that_can(kind: type[Base]) -> None:
    names = ("x", "index", "scores")
    assert find_protocol(kind(), E) == Protocol(names, names, ("num_experts",))


def test_a_count_under_any_name_is_found() -> None:
    found = find_protocol(experts_of("grouped"), moe.EXPERTS)
    assert isinstance(found, Protocol)
    assert found.counters == ("count",)


def test_a_size_that_happens_to_equal_the_number_of_experts_is_left_alone() -> None:
    module = Base()
    module.width, module.num_experts_per_tok = E, E
    found = find_protocol(module, E)
    assert isinstance(found, Protocol)
    assert found.counters == ("num_experts",)


def experts_of(name: str) -> nn.Module:
    return next(m for n, m in moe.build(name).named_modules() if n.endswith(".experts"))


@pytest.mark.parametrize("name", ["mixtral", "mixtral grouped", "qwen3_moe batched", "deepseek_v3",
                                  "gpt_oss", "stack", "grouped"])  # fmt: skip
def test_the_models_of_the_parity_tests_can(name: str) -> None:
    assert isinstance(find_protocol(experts_of(name), moe.EXPERTS), Protocol)


def test_arguments_are_found_in_any_order_and_by_name() -> None:
    found = find_protocol(experts_of("stack"), moe.EXPERTS)
    assert isinstance(found, Protocol)
    assert (found.names, found.order) == (("x", "chosen", "scores"), ("x", "scores", "chosen"))
    x, scores, chosen = torch.zeros(1), torch.ones(1), torch.ones(1) * 2
    assert found.arguments((x, scores), {"chosen": chosen}) == [x, chosen, scores]
    with pytest.raises(Exception, match="were called with arguments other than"):
        found.arguments((x, scores, chosen), {"more": x})


def test_trying_leaves_the_module_as_it_is() -> None:
    module: nn.Module = Base()
    module.inner = nn.Dropout(0.1)
    module.inner.eval()
    before = {**vars(module)}, dict(module.named_parameters()), torch.get_rng_state()
    find_protocol(module, E)
    assert vars(module) == before[0]
    assert all(p is before[1][n] for n, p in module.named_parameters())
    assert (module.training, module.inner.training) == (True, False)
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("name", ["mixtral", "stack"])
def test_on_meta_the_answer_is_the_same(name: str) -> None:
    with torch.device("meta"):
        model = moe.BUILDERS[name]()
    experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    assert find_protocol(experts, moe.EXPERTS) == find_protocol(experts_of(name), moe.EXPERTS)
