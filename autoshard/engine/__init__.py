"""Recipe, model and cluster → seconds, memory over time, timeline: one engine for plans that run on a mesh."""
