"""Search: from a model's work and a cluster to the recipe that an expert would choose, among all that fit."""
