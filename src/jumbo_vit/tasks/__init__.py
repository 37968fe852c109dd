"""What is learned: one module a task, and the one loop that they share."""
