"""Lab 20: training runs designed on a whiteboard, every number from the planner."""
