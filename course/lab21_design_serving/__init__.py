"""Lab 21: serving systems designed on a whiteboard, every number from the planner, the roofline and a queue."""
