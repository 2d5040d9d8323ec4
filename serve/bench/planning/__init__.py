"""Measurements that calibrate the planner, and that test its predictions."""
