"""Features in the places of tokens: divided where every part asks whether it has as many of both, else refused."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.check.batch import find_batch_axis
from autoshard.errors import PlanError
from autoshard.plan.workload import Workload

WIDTH, WORDS, IMAGE = 8, 12, 0


class Model(nn.Module):
    def __init__(self, put) -> None:
        super().__init__()
        self.embed, self.vision, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(6, WIDTH), nn.Linear(WIDTH, WORDS)
        self.put, self.texts = put, []

    def forward(self, ids, images):
        return self.head(self.put(self, self.embed(ids), ids, self.vision(images)))


def inputs(*, uneven=False):
    ids = torch.tensor([[IMAGE, IMAGE, IMAGE, 1, 2]]).repeat(4, 1)
    if uneven:  # as many places in all
        ids[0, 2], ids[2, 3] = 5, IMAGE
    return {"ids": ids, "images": torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))}


def check(answer, text=""):
    torch._check_tensor_all_with(ValueError, answer, lambda: text)


def with_text(self, x, ids, features):
    mask = ids == IMAGE
    count = mask.sum()
    check(
        count * x.shape[-1] == features.numel(),
        f"{count} places and {features.shape[1]} features",
    )
    return x.masked_scatter(mask.unsqueeze(-1), features)


def raises(self, x, ids, features):
    if (ids == IMAGE).sum() * WIDTH != features.numel():
        raise ValueError("places")
    return x.masked_scatter((ids == IMAGE).unsqueeze(-1).expand_as(x), features)


def assigns(self, x, ids, features):
    mask, features, x = ids == IMAGE, features.flatten(0, 1), x.clone()
    assert mask.sum() == len(features)
    x[mask] = features
    return x


def asks_of_all_elements(self, x, ids, features):
    mask = (ids == IMAGE).unsqueeze(-1).expand_as(x)
    assert mask.long().sum() == features.numel()
    return x.masked_scatter(mask, features)


EACH = [with_text, raises, assigns, asks_of_all_elements]


@pytest.mark.parametrize("put", EACH)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_parts_that_ask_are_divided(put, mode):
    (output,) = find_batch_axis(Model(put), inputs(), Workload(mode=mode)).outputs
    assert (output.how, output.dim) == ("cat", 0)


@pytest.mark.parametrize("put", EACH)
@pytest.mark.parametrize("settings", [{"strategy": "pipeline", "num_microbatches": 2}, {"strategy": "data-parallel"}])
def test_rows_with_other_numbers_of_places_raise_what_the_model_raises(put, settings):
    model = Model(put)
    expected = model(**inputs())
    model(**inputs(uneven=True))
    with autoshard.simulate("2x64MiB") as devices, torch.no_grad():
        autoshard.apply(model, autoshard.plan(model, devices, inputs=inputs(), objective="throughput", **settings))
        torch.testing.assert_close(model(**inputs()), expected)
        with pytest.raises((ValueError, AssertionError)):
            model(**inputs(uneven=True))


def scatters(ask=lambda self, x, ids, f: check((ids == IMAGE).sum() * WIDTH == f.numel()), mask=None, made=None):
    def put(self, x, ids, features):
        ask(self, x, ids, features)
        places = ids == IMAGE if mask is None else mask(ids)
        return x.masked_scatter(places.unsqueeze(-1), features if made is None else made(features))

    return put


def _warns(self, x, ids, features):
    if (ids == IMAGE).sum() * WIDTH != features.numel():
        self.texts.append("places")


def _is_caught(self, x, ids, features):
    try:
        check((ids == IMAGE).sum() * WIDTH == features.numel())
    except ValueError:
        self.head(x)


def _from_two_rows(self, x, ids, features):
    alike = (ids == IMAGE).sum() * WIDTH == features.numel()
    if len(ids) > 1:
        check(alike)


def _keeps_text(self, x, ids, features):
    count = (ids == IMAGE).sum()
    self.texts.append(f"{count}")
    check(count * WIDTH == features.numel())


def _decides_by_text(self, x, ids, features):
    def ask(answer, text):
        check(answer)
        if len(text) > 5:
            self.head(x)

    count = (ids == IMAGE).sum()
    ask(count * WIDTH == features.numel(), f"{count}")


def _transposed(self, x, ids, features):
    check((ids == IMAGE).sum() * WIDTH == features.numel())
    return x.transpose(0, 1).masked_scatter((ids == IMAGE).T.unsqueeze(-1), features).transpose(0, 1)


NO_RULE = "no rule says what masked_scatter does"
AS_NUMBERS = "reads values of several rows as numbers"
REFUSED = {
    "nobody asks": (scatters(lambda *_: None), NO_RULE),
    "it asks of another mask": (scatters(mask=lambda ids: ids < 1), NO_RULE),
    "it asks for so many per row": (scatters(lambda self, x, ids, f: check((ids == 0).sum() == 3 * len(ids))), NO_RULE),
    "it asks how many other features there are": (scatters(made=lambda f: torch.cat([f, f], 1)), NO_RULE),
    "it asks for at most as many": (
        scatters(lambda self, x, ids, f: check((ids == IMAGE).sum() * WIDTH <= f.numel())), AS_NUMBERS,
    ),
    "it asks of one row": (
        scatters(lambda self, x, ids, f: check((ids == 0)[0].sum() * len(ids) * WIDTH == f.numel())), AS_NUMBERS,
    ),
    "it asks of rounded numbers": (
        scatters(lambda self, x, ids, f: check((ids == 0).sum().half() * WIDTH == f.numel())), AS_NUMBERS,
    ),
    "it warns": (scatters(_warns), AS_NUMBERS),
    "the error is caught": (scatters(_is_caught), "is caught"),
    "one row alone is not asked": (scatters(_from_two_rows), "it does not ask for one row alone"),
    "the text is kept": (scatters(_keeps_text), "says numbers of several rows"),
    "the text decides": (scatters(_decides_by_text), "says numbers of several rows, and may decide anything"),
    "features are in another order": (scatters(made=lambda features: features.flip(0)), "mixes its rows (flip"),
    "rows come second": (_transposed, NO_RULE),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_looks_like_it_is_refused(name):
    put, why = REFUSED[name]
    with pytest.raises(PlanError, match="can't be divided") as error:
        find_batch_axis(Model(put), inputs(), Workload())
    assert why in str(error.value)
