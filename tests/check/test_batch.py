import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoshard.check.batch import find_batch_axis
from autoshard.errors import PlanError
from autoshard.plan.batching import BatchAxis
from autoshard.plan.workload import Workload
from autoshard.runtime.chunks import split
from autoshard.runtime.merging import merge

from .batches import Counter, Decoder, Grouped, Output, Pair, Small, Statistics

TRAINING = Workload(mode="training")


def found(model: nn.Module, inputs, workload: Workload = TRAINING) -> BatchAxis:
    torch.manual_seed(0)
    return find_batch_axis(model, inputs, workload)


def refused(model: nn.Module, inputs, workload: Workload = TRAINING) -> str:
    with pytest.raises(PlanError) as error:
        found(model, inputs, workload)
    return str(error.value)


def rows(batch: BatchAxis) -> dict[str, tuple[int, str]]:
    return {item.path: (item.dim, item.axis) for item in batch.inputs}


def ways(batch: BatchAxis) -> dict[str, str]:
    return {item.path: item.how for item in batch.outputs}


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(1))


def is_equal_in_parts(model: nn.Module, inputs: dict, batch: BatchAxis, parts) -> bool:
    """Run a call as a plan would, on the model's own weights."""
    pieces = split(batch, model, (), inputs, parts)
    made = merge(batch, [model(*piece.args, **piece.kwargs) for piece in pieces], pieces)
    whole = model(**inputs)
    return all(torch.allclose(made[name], whole[name], rtol=1e-5, atol=1e-6) for name in whole)


# ---- rows that stay apart


def test_tokens_masks_and_logits_have_the_batch():
    inputs = {"input_ids": tokens(5, 8), "attention_mask": torch.ones(5, 8, dtype=torch.int64)}
    batch = found(Decoder(), inputs)
    assert batch.size == 5
    assert rows(batch) == {"input_ids": (0, "*5"), "attention_mask": (0, "*5")}
    assert ways(batch) == {"logits": "cat"}
    inputs["attention_mask"][2, 5:] = 0
    assert is_equal_in_parts(Decoder(), inputs, batch, (2, 3))


class Pooled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool1d(x.transpose(1, 2), 1)


def test_pools_to_one_place_have_the_batch():
    """Where channels come last, torch gives the result other strides in place: the pool is one op in the recording."""
    assert found(Pooled(), {"x": torch.randn(4, 5, 6)}).size == 4


def test_position_ids_of_one_row_are_for_all_parts():
    inputs = {"input_ids": tokens(3, 8), "position_ids": torch.arange(8)[None]}
    batch = found(Decoder(), inputs)
    assert rows(batch) == {"input_ids": (0, "*3")}
    assert batch.whole == ("position_ids",)


def test_a_loss_is_weighted_by_the_labels_that_count():
    batch = found(Decoder(), {"input_ids": tokens(3, 8), "labels": tokens(3, 8)})
    loss = next(one for one in batch.outputs if one.path == "loss")
    assert (loss.how, loss.weights, loss.ignored, loss.skipped) == ("weighted", "labels", -100, 1)
    labels = tokens(3, 8)
    labels[0, 2:] = -100
    assert is_equal_in_parts(Decoder(), {"input_ids": tokens(3, 8), "labels": labels}, batch, (1, 2))


def test_a_model_that_refuses_other_rows_says_so():
    class Fixed(nn.Linear):
        def forward(self, x):
            if x.shape[0] > 3:
                raise ValueError("too many rows")
            return super().forward(x).mean()

    assert "too many rows" in refused(Fixed(6, 6), torch.ones(3, 6))


def test_a_batch_without_rows_is_none():
    assert "no input has a dimension for it" in refused(nn.Linear(6, 6), torch.zeros(0, 6))


def test_sizes_that_a_model_computes_from_its_numbers_are_bounded():
    class Speech(nn.Linear):  # how long it takes to say is predicted: exp of a wrong number is long
        def forward(self, x):
            length = 8 * int((1e3 * super().forward(x).abs().max()).exp().clamp(max=1e6))
            return torch.arange(length)[None, :, None] * x[:, None, :]

    silent = Speech(6, 6)
    with torch.no_grad():
        silent.weight.zero_(), silent.bias.zero_()
    said = refused(silent, torch.randn(3, 6))
    assert "decides what to do by values of all rows" in said


def test_a_loss_that_is_summed_up():
    batch = found(Decoder(reduction="sum"), {"input_ids": tokens(3, 8), "labels": tokens(3, 8)})
    assert ways(batch) == {"logits": "cat", "loss": "sum"}


def test_a_mean_over_all_rows_and_what_is_the_same_in_all_parts():
    model = Small(lambda self, x: (self.linear(x).square().mean(), self.linear.weight.sum(), self.linear(x)))
    assert ways(found(model, torch.randn(4, 6))) == {"0": "mean", "1": "same", "2": "cat"}


def test_a_loss_that_is_weighted_by_a_mask():
    class Masked(Decoder):
        def forward(self, input_ids, attention_mask):
            losses = super().forward(input_ids)["logits"].square().mean(-1)
            return (losses * attention_mask).sum() / attention_mask.bool().sum()

    inputs = {"input_ids": tokens(3, 8), "attention_mask": torch.ones(3, 8)}
    (loss,) = found(Masked(), inputs).outputs
    assert (loss.how, loss.weights, loss.ignored) == ("weighted", "attention_mask", 0)

    class Summed(Decoder):  # a mask may hold other numbers than 0 and 1, and then its sum is not how many count
        def forward(self, input_ids, attention_mask):
            losses = super().forward(input_ids)["logits"].square().mean(-1)
            return (losses * attention_mask).sum() / attention_mask.sum()

    assert "can't be divided" in refused(Summed(), inputs)


def test_several_rows_of_an_input_for_each_of_the_batch():
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 6)

        def forward(self, prompt, codes):
            codes = self.embed(codes.view(-1, 3, codes.shape[-1])).sum((1, 2))
            return (codes + self.embed(prompt).sum(1)).repeat_interleave(2, 0)

    batch = found(Codes(), {"prompt": tokens(4, 5), "codes": tokens(12, 7)})
    assert rows(batch) == {"prompt": (0, "*4"), "codes": (0, "*4x3")}
    assert [(one.how, one.axis) for one in batch.outputs] == [("cat", "*4x2")]


def test_the_batch_in_the_second_dimension():
    model = nn.TransformerEncoderLayer(6, 2, 12, batch_first=False).eval()
    batch = found(model, torch.randn(5, 3, 6))
    assert [(item.dim, item.axis) for item in (*batch.inputs, *batch.outputs)] == [(1, "*3"), (1, "*3")]


def test_rows_that_are_joined_twice():
    batch = found(Small(lambda self, x: torch.cat([self.linear(x), x])), torch.randn(4, 6))
    assert [(one.how, one.axis) for one in batch.outputs] == [("cat", "2x*4")]


def test_outputs_in_data_classes():
    model = Small(lambda self, x: Output(score=self.linear(x).sum(), hidden=(x, self.linear(x))))
    assert ways(found(model, torch.randn(3, 6))) == {"score": "sum", "hidden.0": "cat", "hidden.1": "cat"}


def test_what_an_object_among_the_outputs_holds_is_not_listed():
    class Kept:
        def __init__(self, keys, total):
            self.keys, self.total = keys, total

    model = Small(lambda self, x: {"y": self.linear(x), "kept": Kept(x * 2, x.amax(0))})
    assert ways(found(model, torch.randn(4, 6))) == {"y": "cat"}


def _added(made, known, tokens):
    return torch.zeros_like(tokens).index_add(0, known["order"] // 2, made)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"back": _added},
        {"back": lambda made, known, _: made[known["order"].argsort()].view(-1, 2, 8).sum(1)},
        {"back": lambda made, known, _: torch.zeros_like(made).index_put((known["order"],), made)},
        {"change": lambda made, known: made + torch.tensor([1.0, 2.0, 3.0, 4.0])[known["keys"]][:, None]},
        {"ends": lambda known: torch.histc(known["chosen"].flatten().float(), 4, 0, 3).cumsum(0).int()},
        {"classes": 5, "keys": lambda chosen: chosen.masked_fill(chosen == 4, 0).reshape(-1).sort()},
        {"keys": lambda chosen: torch.cat([one.clone() for one in chosen.split(1, 1)], 1).reshape(-1).sort()},
    ],
)
def test_tokens_in_groups_by_expert(options):
    x = torch.randn(3, 5, 8)
    batch = found(Grouped(**options), x, Workload())
    assert ways(batch) == {"": "cat"}


def _shifted(known):
    return (known["counts"].cumsum(0, dtype=torch.int32) + 1).clamp(max=len(known["keys"]))


def _with_a_mask_that_is_written(chosen):
    last = chosen == 4
    last.zero_()
    return chosen.masked_fill(last, 0).reshape(-1).sort()


def _rank(made):
    return torch.arange(len(made))[:, None]


@pytest.mark.parametrize(
    ("options", "op"),
    [
        ({"change": lambda made, known: torch.cat([made[:100], 2 * made[100:]])}, "slice"),
        ({"change": lambda made, known: made * (_rank(made) < 100)}, "arange"),
        ({"change": lambda made, known: made - made.mean(0)}, "mean"),
        ({"change": lambda made, known: made.cumsum(0)}, "cumsum"),
        ({"change": lambda made, known: made.view(len(made) // 2, 2, 8).softmax(1).view_as(made)}, "view"),
        ({"change": lambda made, known: made.flip(0)}, "flip"),
        ({"change": lambda made, known: made + known["order"][:, None]}, "sort"),
        ({"change": lambda made, known: made / known["counts"][known["keys"]][:, None]}, "histc"),
        ({"change": lambda made, known: made * (known["counts"].max() < 1000)}, "histc"),
        ({"ends": _shifted}, "histc"),
        ({"ends": lambda known: torch.histc(known["chosen"][:, :1].float(), 4, 0, 3).cumsum(0).int()}, "histc"),
        ({"ends": lambda known: torch.histc(known["keys"].float(), 4, 0, 6).cumsum(0).int()}, "histc"),
        ({"ends": lambda known: known["counts"].flip(0).cumsum(0, dtype=torch.int32)}, "histc"),
        ({"keys": lambda chosen: chosen.reshape(-1).sort(descending=True)}, "histc"),
        (
            {"ends": lambda known: torch.histc(known["keys"].int().view(torch.float32), 4, 0, 3).cumsum(0).int()},
            "histc",
        ),
        ({"keys": lambda chosen: (chosen + 1).reshape(-1).sort()}, "histc"),
        ({"keys": lambda chosen: torch.cat([chosen[:, :1], chosen[:, 1:] + 1], 1).reshape(-1).sort()}, "histc"),
        ({"keys": lambda chosen: (chosen * 2 - 3).reshape(-1).sort()}, "histc"),
        ({"classes": 5}, "histc"),
        ({"classes": 5, "keys": lambda chosen: chosen.masked_fill(chosen == 3, 0).reshape(-1).sort()}, "histc"),
        ({"classes": 5, "keys": lambda chosen: chosen.masked_fill(chosen == 4, 4).reshape(-1).sort()}, "histc"),
        ({"classes": 5, "keys": lambda chosen: chosen.masked_fill(chosen.flip(1) == 4, 0).reshape(-1).sort()}, "histc"),
        ({"classes": 5, "keys": _with_a_mask_that_is_written}, "histc"),
        ({"back": lambda made, known, _: made}, ""),
        ({"back": lambda made, known, _: made[known["order"]]}, "sort"),
        ({"back": lambda made, known, tokens: _added(made.flip(0), known, tokens)}, "sort"),
        ({"back": lambda made, known, tokens: _added(made, known, tokens) * known["counts"][0]}, "histc"),
        ({"back": lambda made, known, tokens: _added(made, known, tokens) * known["shares"].mean(0)[0]}, "mean"),
        ({"back": lambda made, known, _: torch.zeros(40, 8).index_put((known["order"] // 2,), made)[: len(made)]}, ""),
    ],
)
def test_tokens_in_groups_that_others_decide_are_refused(options, op):
    said = refused(Grouped(**options), torch.randn(3, 5, 8), Workload())
    assert f"({op} in the model itself" in said if op else "can't be divided" in said


def _written(self, x, at, by):
    made = self.linear(x).clone()
    made[at] = by
    return made


@pytest.mark.parametrize(
    "by_place",
    [
        lambda self, x: torch.cat([self.linear(x)[:100], 2 * self.linear(x)[100:]]),
        lambda self, x: torch.cat([*self.linear(x).split(100)[:1], *[2 * h for h in self.linear(x).split(100)[1:]]]),
        lambda self, x: self.linear(x)[torch.arange(len(x))[:100].repeat(2)[: len(x)]],
        lambda self, x: _written(self, x, 0, 0.0),
        lambda self, x: _written(self, x, slice(100, None), 0.0),
        lambda self, x: _written(self, x, torch.tensor([0]), 0.0),
        lambda self, x: self.linear(x) * _written(self, x, torch.arange(len(x))[100:], 0.0),
        lambda self, x: torch.cat([self.linear(x)[:-1], 2 * self.linear(x)[-1:]]),
    ],
)
def test_a_part_of_the_batch_by_its_place_is_refused(by_place):
    assert "in the model itself" in refused(Small(by_place), torch.randn(4, 6))


def test_a_part_that_has_the_same_of_all_rows():
    def halves(self, x):
        first, second = torch.cat([self.linear(x), x]).chunk(2)
        pairs = (first + second).repeat_interleave(2, 0)
        return pairs[::2] + pairs[1::2] + pairs[torch.arange(0, len(pairs), 2)]

    assert ways(found(Small(halves), torch.randn(4, 6))) == {"": "cat"}


def test_rows_that_are_picked_by_their_number():
    def last(self, x):
        return self.linear(x)[torch.arange(len(x)), (x[..., 0] > 0).sum(1) % x.shape[1]]

    assert ways(found(Small(last), torch.randn(3, 5, 6))) == {"": "cat"}


def test_positions_that_are_repeated_where_there_are_several_rows():
    def placed(self, x, also=lambda at: at):
        at = torch.arange(x.shape[1])[None]
        at = also(at.expand(len(x), -1)) if len(x) != len(at) else at
        return self.linear(x) + at[..., None] % 7

    def twice(self, x):  # as often as there are rows in a run with two
        return self.linear(x)[:, :, None].expand(-1, -1, 2, -1).sum(2)

    for by in (placed, twice):
        assert ways(found(Small(by), torch.randn(4, 5, 6))) == {"": "cat"}
    more = Small(lambda self, x: placed(self, x, also=lambda at: at + 1))
    assert "something else for one row alone" in refused(more, torch.randn(4, 5, 6))


def test_a_look_at_the_first_row_is_mixing_but_for_its_shape():
    model = Small(lambda self, x: self.linear(x) if x[0].shape else x)
    assert rows(found(model, torch.randn(3, 6))) == {"x": (0, "*3")}
    model = Small(lambda self, x: self.linear(x) + 0 * x[0].detach().sum())
    assert "mixes its rows" in refused(model, torch.randn(3, 6))


def test_rows_in_a_loop_of_python_are_divided_only_if_they_are_said_to_be_independent():
    def masked(self, x):
        kept = torch.ones_like(x)
        for row in kept:
            row[numpy.random.choice(6, 2, replace=False)] = 0
        return self.linear(x * kept)

    state = numpy.random.get_state()[1].tolist()
    model, x = Small(masked), torch.randn(4, 6)
    assert "runs other ops for 4 rows than for 3" in refused(model, x)
    said = find_batch_axis(model, x, TRAINING, assume_independent_rows=True).proof
    assert "assume_independent_rows" in said
    assert numpy.random.get_state()[1].tolist() == state


def test_inputs_that_are_written_are_refused_and_checkpoints_that_ask_for_backward():
    def written(self, x):
        return self.linear(x.mul_(2)).relu() * x

    def checkpointed(self, x):
        return checkpoint(self.more[0], self.linear(x), use_reentrant=True)

    given = torch.randn(4, 6)
    before = given.clone()
    assert "mul_ in the model itself changes positional input 0 in place" in refused(Small(written), given)
    assert torch.equal(given, before)
    assert ways(found(Small(checkpointed, nn.Linear(6, 6)), given)) == {"": "cat"}
    hooked = Small(checkpointed, nn.Linear(6, 6))
    hooked.more.register_full_backward_hook(lambda module, given, made: None)
    assert "more has a hook on its gradients, which may mix rows" in refused(hooked, given)


class Bags(nn.Module):
    """Bags of words that begin where `offsets` says, given the words of all samples one after the other."""

    def __init__(self, offsets, mode="mean", **options):
        super().__init__()
        self.table, self.linear, self.offsets = nn.Embedding(50, 6), nn.Linear(6, 6), offsets
        self.options = {"mode": mode, **options}

    def forward(self, words):
        weight, flat = self.table.weight, words.reshape(-1)
        return self.linear(nn.functional.embedding_bag(flat, weight, self.offsets(words), **self.options))


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_bags_are_rows(mode):
    assert ways(found(Bags(lambda words: torch.arange(0, words.numel(), words.shape[1]), mode), tokens(4, 6))) == {
        "": "cat"
    }


@pytest.mark.parametrize(
    ("offsets", "options"),
    [
        (lambda words: torch.arange(len(words)) * (words.shape[1] - 1), {}),  # of 5 words, from the row before
        (lambda words: torch.arange(len(words)) * words.shape[1] + torch.arange(len(words)).clamp(max=1), {}),
        (lambda words: words.sum(1).cumsum(0) - words.sum(1)[0], {}),
        (lambda words: torch.arange(0, words.numel(), words.shape[1]), {"scale_grad_by_freq": True}),
    ],
)
def test_bags_of_other_words_are_refused(offsets, options):
    assert "in the model itself" in refused(Bags(offsets, **options), tokens(4, 6))


def test_buffers_that_all_parts_write_are_refused():
    assert "writes into more.0.calls" in refused(Small(lambda self, x: self.more[0](x), Counter()), torch.randn(4, 6))


def test_arguments_that_are_no_tensors_belong_to_the_plan():
    class Scaled(nn.Linear):
        def forward(self, x, count=1, flag=True):
            return super().forward(x).sum() / count

    assert found(Scaled(6, 6), {"x": torch.randn(3, 6), "count": 7}).plain == ("count=7",)


def test_the_model_and_the_random_numbers_stay_as_they_were():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)).train()
    model[1].eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    batch = find_batch_axis(model, torch.randn(4, 6, generator=torch.Generator()), TRAINING)
    assert torch.equal(torch.rand(2), wanted)
    assert batch.frozen == ("1",)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- rows that mix


def test_statistics_of_the_batch_are_named():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).train()
    assert "1 (BatchNorm1d) mixes its rows (batch_norm in 1)" in refused(model, torch.randn(4, 6))
    batch = found(model.eval(), torch.randn(4, 6))
    assert batch.frozen == ("1",)
    assert found(nn.Linear(6, 6).eval(), torch.randn(4, 6)).frozen == ()


@pytest.mark.parametrize(
    "mixing",
    [
        lambda self, x: self.linear(x) - x.mean(0),
        lambda self, x: self.linear(x) * x.amax(0),
        lambda self, x: self.linear(x).cumsum(0),
        lambda self, x: self.linear(x).flip(0),
        lambda self, x: self.linear(x) + x[:1],
        lambda self, x: self.linear(x).softmax(0),
        lambda self, x: self.linear(x) + torch.arange(len(x))[:, None],
        lambda self, x: self.linear(x) / len(x),
        lambda self, x: self.linear(x) * (2.0 if x.max() > 1.5 else 1.0),
        lambda self, x: self.linear(x)[torch.argsort(x[:, 0])],
        lambda self, x: self.linear(x)[x[:, 0] > 0],
        lambda self, x: self.linear(x).square().mean().sqrt(),
        lambda self, x: self.linear(x).mean() + x.sum(),
        lambda self, x: self.linear(x) @ self.linear(x).T,
        lambda self, x: self.linear(x).flatten().roll(1).view_as(x),
        lambda self, x: self.linear(x)[torch.arange(len(x)) % 3],
        lambda self, x: self.linear(x)[:, None].expand(-1, len(x), -1).sum(),
        lambda self, x: self.linear(x)[:, None].sum(1, keepdim=True).squeeze(),
        lambda self, x: F.pad(self.linear(x), (0, 1), value=len(x)),
        lambda self, x: (self.linear(x), torch.cat([torch.zeros(len(x)), torch.ones(len(x))])),
        lambda self, x: self.linear(x)[torch.arange(len(x)), torch.arange(len(x)) % 6],
    ],
)  # fmt: skip
def test_rows_that_mix_are_refused(mixing):
    assert "can't be divided" in refused(Small(mixing), torch.randn(4, 6))


def test_an_op_that_is_named_is_one_of_who_mixes_rows():
    class Last(nn.Module):
        def forward(self, x):
            return x[torch.arange(len(x)), x[..., 0].argmax(-1)]

    model = Small(lambda self, x: self.linear(self.more[0](x)) @ self.linear(x[:, 0]).T, Last())
    assert "the model's own forward mixes its rows (matmul in the model itself, test_batch.py:" in refused(
        model, torch.randn(4, 3, 6)
    )


def test_numbers_that_a_mask_chooses_are_of_rows():
    """`where` with numbers makes as many as the mask has; with the mask alone it lists places."""
    assert found(Small(lambda self, x: self.linear(x) * torch.where(x > 0, 2, 0)), torch.randn(4, 6))


def test_a_count_that_python_reads_is_named_with_its_line():
    """Not what hands it on."""

    def counted(self, x):
        if (x > 0).sum(-1).detach().numpy().max() > 100:
            raise ValueError("too many")
        return self.linear(x)

    assert "as numbers, which may decide anything (sum in the model itself, test_batch.py:" in refused(
        Small(counted), torch.randn(4, 6)
    )


def test_images_against_texts_are_refused():
    inputs = {"image": torch.randn(3, 6), "text": torch.randn(3, 5)}
    assert "can't be divided" in refused(Pair(), inputs)
    assert "can't be divided" in refused(Pair(loss=True), inputs)


def test_a_buffer_with_a_mean_of_the_rows_is_refused():
    model = Small(lambda self, x: self.linear(self.more[0](x)), Statistics())
    assert "writes into more.0.average" in refused(model, torch.randn(4, 6))


def test_rows_that_are_packed_are_refused():
    class Packed(nn.Linear):
        def forward(self, patches, lengths):
            return torch.stack([part.sum(0) for part in super().forward(patches).split(lengths.tolist())])

    assert "No dimension of patches [7, 6] is the batch" in refused(
        Packed(6, 6), {"patches": torch.randn(7, 6), "lengths": torch.tensor([3, 4])}
    )


def test_samples_in_a_list_are_named_where_their_first_dimension_is_none_of_samples():
    class Images(nn.Conv2d):
        def forward(self, images):
            return torch.stack([super(Images, self).forward(image[None]).mean() for image in images])

    assert "images holds 4 tensors: samples in a list are not divided" in refused(
        Images(3, 2, 3), {"images": [torch.randn(3, 8, 8) for _ in range(4)]}
    )


def test_a_model_made_for_so_many_rows_is_refused():
    model = Small(lambda self, x: self.linear(x) * self.more[0].weight, nn.Linear(6, 4))
    assert "can't be divided" in refused(model, torch.randn(4, 6))


# ---- large models


def test_a_large_model_is_checked_without_its_weights():
    with torch.device("meta"):
        model = Decoder(width=4096, depth=12, vocabulary=20_000)
    assert sum(parameter.numel() for parameter in model.parameters()) > 2e9
    inputs = {"input_ids": tokens(4, 64), "labels": tokens(4, 64), "attention_mask": torch.ones(4, 64)}
    batch = found(model, inputs)
    assert ways(batch) == {"logits": "cat", "loss": "weighted"}
    assert all(parameter.is_meta for parameter in model.parameters())


class Padded(nn.Module):
    """Two heads of keys for four of queries, with a mask only where a row is padded, and another `repeat` then."""

    def __init__(self, repeat) -> None:
        super().__init__()
        self.q, self.kv, self.repeat = nn.Linear(16, 16), nn.Linear(16, 8), repeat

    def forward(self, x, mask):
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k = self.kv(x).unflatten(-1, (2, 4)).transpose(1, 2)
        if mask.all():
            return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        wide = self.repeat(k)
        return F.scaled_dot_product_attention(q, wide, wide, attn_mask=mask[:, None, None, :])


def test_heads_that_are_repeated_by_hand_where_a_row_is_padded():
    inputs = {"x": torch.randn(3, 6, 16), "mask": torch.ones(3, 6, dtype=torch.bool)}
    every = Padded(lambda k: k[:, :, None].expand(len(k), 2, 2, 6, 4).reshape(len(k), 4, 6, 4))
    assert ways(found(every, inputs, Workload())) == {"": "cat"}
    in_turn = Padded(lambda k: k[:, None].expand(len(k), 2, 2, 6, 4).reshape(len(k), 4, 6, 4))
    assert "asks whether any row is masked" in refused(in_turn, inputs, Workload())


class AsksTwice(nn.Module):
    """Leaves out a mask of attention where nothing is hidden, and a product with it where it is all ones."""

    def __init__(self, ones, change=lambda x: x) -> None:
        super().__init__()
        self.q, self.ones, self.change = nn.Linear(16, 16), ones, change

    def forward(self, x, mask):
        hidden = None if mask.bool().all() else mask.bool()[:, None, :]
        if not self.ones(mask).all():
            x = self.change(x * mask[..., None])
        q = self.q(x)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=hidden)


def test_two_questions_about_one_mask():
    inputs = {"x": torch.randn(3, 6, 16), "mask": torch.ones(3, 6, dtype=torch.int64)}
    assert ways(found(AsksTwice(lambda mask: mask == 1), inputs, Workload())) == {"": "cat"}
    assert "asks whether any row is masked" in refused(
        AsksTwice(lambda mask: mask == 1, torch.relu), inputs, Workload()
    )
    assert "decides what to do by" in refused(AsksTwice(lambda mask: mask < 2), inputs, Workload())
    assert "decides what to do by" in refused(AsksTwice(lambda mask: mask < 9), inputs, Workload())


def test_differences_of_neighbours_are_those_of_a_row():
    assert ways(found(Small(lambda self, x: self.linear(x).diff(dim=1, prepend=x[:, :1])), torch.randn(3, 6))) == {
        "": "cat"
    }
    said = refused(Small(lambda self, x: self.linear(x).diff(dim=0, prepend=x[:1])), torch.randn(3, 6))
    assert "in the model itself" in said


def _tabled(by):
    """A model that folds rows of four vectors and adds vectors of a table to them."""

    def forward(self, x):
        return by(self.linear(x), self.more[0].weight)

    return Small(forward, nn.Embedding(1024, 6))


@pytest.mark.parametrize(
    "by",
    [
        lambda h, table: h.flatten(0, 1) + table[:4].expand(len(h), 4, 6).reshape(-1, 6),
        lambda h, table: h.flatten(0, 1) * table[:2].repeat(2 * len(h), 1),
        lambda h, table: (h.flatten(0, 1)[:, None] + table[:8, None].repeat(len(h), 1, 1).view(-1, 2, 6)).flatten(0, 1),
        lambda h, table: h + table[None, :4].repeat_interleave(len(h), 0),
        lambda h, table: F.pad(h, (0, 0, 1, 1)).flatten(0, 1).view(len(h), 6, 6).cumsum(1),
    ],
)
def test_a_table_that_is_repeated_for_every_row(by):
    assert ways(found(_tabled(by), torch.randn(3, 4, 6))) == {"": "cat"}


@pytest.mark.parametrize(
    "by",
    [
        lambda h, table: h.flatten(0, 1) + table[: 4 * len(h)],
        lambda h, table: h.transpose(0, 1).flatten(0, 1) + table[: len(h)].expand(4, len(h), 6).reshape(-1, 6),
        lambda h, table: h[:, :3].flatten(0, 1) + table[: len(h)].expand(3, len(h), 6).reshape(-1, 6),
        lambda h, table: h.flatten(0, 1) + table[: 2 * len(h)].repeat(2, 1),
        lambda h, table: h.flatten(0, 1) + table[: len(h)].repeat(4, 1),
        lambda h, table: h[:, :3].flatten(0, 1) + table[:9].repeat_interleave(len(h), 0)[: 3 * len(h)],
        lambda h, table: torch.cat([h, table[: len(h), None]], 1).sum(1),
        lambda h, table: torch.cat([h, table[: len(h), None]], 1)[:, (h > 0).sum() % 5],
    ],
)
def test_a_table_that_differs_from_row_to_row_is_refused(by):
    assert "in the model itself" in refused(_tabled(by), torch.randn(3, 4, 6))


def test_a_table_that_is_written_into_a_part_of_every_row():
    def written(h, table):
        made = torch.zeros(len(h), 6, 6)
        made[:, 1:5] = h
        made[:, 5:] = table[:1]
        return made.softmax(1)

    assert ways(found(_tabled(written), torch.randn(3, 4, 6))) == {"": "cat"}

    def of_its_row(h, table):
        made = torch.zeros(len(h), 6, 6)
        made[:, 1:5] = h
        made[:, 5] = table[: len(h)]
        return made.softmax(1)

    assert "in the model itself" in refused(_tabled(of_its_row), torch.randn(3, 4, 6))


class Settling(nn.Linear):
    """Sets a number at its first forward, and counts its calls if it is told to."""

    def __init__(self, counts=False):
        super().__init__(6, 6)
        self.window, self.calls, self.counts = 8, 0, counts

    def forward(self, x):
        self.window = min(self.window, x.shape[1])
        self.calls += self.counts
        return super().forward(x)[:, -self.window :]


def test_numbers_that_the_first_forward_sets_once_are_no_state():
    model = Settling()
    assert ways(found(model, torch.randn(4, 3, 6))) == {"": "cat"}
    assert model.window == 8
    assert "in the model itself is another number" in refused(Settling(counts=True), torch.randn(4, 3, 6))
