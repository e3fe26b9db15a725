"""Compare predictions of the planner with measurements that others published."""
