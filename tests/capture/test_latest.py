"""Latest: what was worked out of a graph last is given again for the same question, and for no other."""

from dataclasses import replace

import torch
from torch import nn

import autoshard
from autoshard.capture.latest import Latest
from autoshard.profile.units import find_units
from autoshard.workload import Workload


def test_only_the_same_question_about_the_same_graph_is_answered_from_memory():
    graphs = [autoshard.capture(nn.Linear(2, 2), torch.ones(1, 2)) for _ in range(2)]
    made: list[str] = []
    latest = Latest[str]()

    def ask(graph, question):
        return latest.of(graph, question, lambda: made.append(question) or question)

    assert [ask(graphs[0], "a"), ask(graphs[0], "a"), ask(graphs[1], "a"), ask(graphs[0], "b")] == ["a", "a", "a", "b"]
    assert ask(graphs[0], "a") == "a" and made == ["a", "a", "b", "a"]


def test_units_are_those_of_the_workload():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(1, 8)
    profile = autoshard.profile(model, x, workload=Workload(mode="training", optimizer="adamw"))
    with_state = find_units(profile)
    without = find_units(replace(profile, workload=replace(profile.workload, optimizer="sgd")))
    assert find_units(profile).resident_bytes.sum() == with_state.resident_bytes.sum() > without.resident_bytes.sum()
