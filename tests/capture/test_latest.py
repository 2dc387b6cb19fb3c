"""Latest: what was worked out of a graph last is given again for the same question, and for no other."""

import torch
from torch import nn

import autoshard
from autoshard.capture.latest import Latest


def test_only_the_same_question_about_the_same_graph_is_answered_from_memory():
    graphs = [autoshard.capture(nn.Linear(2, 2), torch.ones(1, 2)) for _ in range(2)]
    made: list[str] = []
    latest = Latest[str]()

    def ask(graph, question):
        return latest.of(graph, question, lambda: made.append(question) or question)

    assert [ask(graphs[0], "a"), ask(graphs[0], "a"), ask(graphs[1], "a"), ask(graphs[0], "b")] == ["a", "a", "a", "b"]
    assert ask(graphs[0], "a") == "a" and made == ["a", "a", "b", "a"]
