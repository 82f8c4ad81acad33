"""Run ahead of the known order: a pure planner and the service that carries it out."""
